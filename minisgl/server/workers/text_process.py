"""A text worker with all it needs, and the main function of its process.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap
from minisgl.runtime.supervisor import WorkerContext
from minisgl.scheduler.messages import ErrorReply
from minisgl.server.workers.channels import Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.workers.echo import EchoWorker
from minisgl.server.workers.logprobs import HeldLogprobs
from minisgl.server.workers.messages import TokenizeMsg
from minisgl.server.workers.processes import address
from minisgl.server.workers.text_worker import TextWorker, characters, run_text_worker
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import Tokenizer


class PromptLimit:
    """Refuses a text that cannot fit a window of so many tokens, without encoding it."""

    def __init__(self, tokenizer: Tokenizer, window: int) -> None:
        longest = max(map(len, tokenizer.backend.get_vocab()), default=1)
        self._window, self._max_chars = window, 4 * window * longest

    def __call__(self, msg: TokenizeMsg) -> ErrorReply | None:
        size, what, count = characters(msg), "characters", len(msg.messages or [])
        if size <= self._max_chars and count <= self._window:
            return None
        if count > self._window:  # each message takes a token or more
            size, what = count, "messages"
        param = "prompt" if msg.messages is None else "messages"
        why = f"{param}: {size} {what} are too many for a window of {self._window} tokens"
        return ErrorReply(uid=msg.uid, message=why, code="context_length_exceeded", param=param)


def build_text_worker(
    tokenizer: Tokenizer, to_scheduler: Outbox, to_frontend: Outbox, window: int
) -> TextWorker:
    """A text worker that refuses what cannot fit `window` tokens and keeps log probabilities."""
    spell = TokenBytes(tokenizer)
    limit, held = PromptLimit(tokenizer, window), lambda status: HeldLogprobs(status, spell)
    return EchoWorker(tokenizer, to_scheduler, to_frontend, limit, held)


def text_process(config: ServerConfig, folder: Path, part: str, context: WorkerContext) -> None:
    """Text worker: `part` is "text", the one that detokenizes, or an extra tokenizer."""
    # Where transformers must read the tokenizer, it would import torch: two seconds and 190 MB.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    inbox = ZmqInbox(address(folder, part))
    to_scheduler, to_frontend = (ZmqOutbox(address(folder, p)) for p in ("scheduler", "frontend"))
    path = resolve_model_path(config.model_path)
    window = max_seq_len(config, ModelConfig.from_path(path))
    worker = build_text_worker(Tokenizer(path), to_scheduler, to_frontend, window)
    with frozen_heap():
        context.ready()
        run_text_worker(worker, inbox, context.beat)
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
