"""A text worker with all it needs, and the main function of its process.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap
from minisgl.runtime.supervisor import WorkerContext
from minisgl.server.workers.channels import Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.workers.echo import EchoWorker
from minisgl.server.workers.logprobs import HeldLogprobs
from minisgl.server.workers.messages import Message, TokenizeMsg
from minisgl.server.workers.processes import address
from minisgl.server.workers.text_worker import (
    Encode,
    PromptQueue,
    TextWorker,
    characters,
    run_text_worker,
)
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import SLICE, Tokenizer


class PromptLanes(PromptQueue):
    """Prompts to encode: short ones in the loop of the text worker, long ones in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._long, self._pool = PromptQueue(), ThreadPoolExecutor(1, "prompts")
        self._job: tuple[int | None, Future[Message]] | None = None  # uid of the thread's prompt

    @property
    def patience(self) -> float:
        busy = self._job is not None or self._long.waiting
        return min(super().patience, 0.002 if busy else 0.5)

    def add(self, msg: TokenizeMsg) -> None:
        if characters(msg) > SLICE:
            self._long.add(msg)
        else:
            super().add(msg)

    def drop(self, uid: int) -> bool:
        if self._job is not None and self._job[0] == uid:
            self._job = (None, self._job[1])  # its result will be dropped
            return True
        return super().drop(uid) or self._long.drop(uid)

    def take(self, encode: Encode) -> list[Message]:
        done = super().take(encode)
        if self._job is not None and self._job[1].done():
            (uid, result), self._job = self._job, None
            done += [] if uid is None else [result.result()]
        if self._job is None and (prompt := self._long.pop()) is not None:
            self._job = (prompt.uid, self._pool.submit(encode, prompt))
        return done


def build_text_worker(
    tokenizer: Tokenizer, to_scheduler: Outbox, to_frontend: Outbox, window: int
) -> TextWorker:
    """Build a text worker that rejects prompts over `window` tokens and holds logprobs."""
    spell = TokenBytes(tokenizer)
    held = partial(HeldLogprobs, spell=spell)
    return EchoWorker(tokenizer, to_scheduler, to_frontend, window, held)


def text_process(config: ServerConfig, folder: Path, part: str, context: WorkerContext) -> None:
    """Run a text worker: `part` is "text", the one that detokenizes, or an extra tokenizer."""
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
        run_text_worker(worker, inbox, context.beat, PromptLanes())
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
