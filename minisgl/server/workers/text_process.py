"""The process of a text worker: its parts and its main function.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache, partial
from pathlib import Path

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap, return_free_memory
from minisgl.runtime.supervisor import WorkerContext
from minisgl.scheduler.messages import AbortMsg
from minisgl.scheduler.side import SideTokenizer
from minisgl.server.workers.channels import Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.workers.logprobs import HeldLogprobs
from minisgl.server.workers.messages import Message
from minisgl.server.workers.processes import address
from minisgl.server.workers.prompt_threads import PromptThreads
from minisgl.server.workers.text_worker import PromptQueue, TextWorker, run_text_worker
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import Tokenizer


class ExtraTokenizer(TextWorker):
    """A text worker that gets prompts and aborts, and no tokens: aborts leave nothing here."""

    def handle(self, msg: Message) -> None:
        if isinstance(msg, AbortMsg):
            self._scheduler.append(msg)
        else:
            super().handle(msg)


def build_text_worker(
    tokenizer: Tokenizer, to_scheduler: Outbox, to_frontend: Outbox, window: int,
    kind: type[TextWorker] = TextWorker,
) -> TextWorker:  # fmt: skip
    """Build a text worker that rejects prompts over `window` tokens and holds logprobs."""
    spell = lru_cache(2**14)(TokenBytes(tokenizer))
    held = partial(HeldLogprobs, tokenizer=tokenizer, spell=spell)
    return kind(tokenizer, to_scheduler, to_frontend, window, held)


def text_process(config: ServerConfig, folder: Path, part: str, context: WorkerContext) -> None:
    """Run a text worker: `part` is "text", the one that detokenizes, or an extra tokenizer."""
    # Where transformers must read the tokenizer, it would import torch: two seconds and 190 MB.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    return_free_memory()
    inbox = ZmqInbox(address(folder, part))
    to_scheduler, to_frontend = (ZmqOutbox(address(folder, p)) for p in ("scheduler", "frontend"))
    path = resolve_model_path(config.model_path)
    window = max_seq_len(config, ModelConfig.from_path(path))
    tokenizer = SideTokenizer(path)
    tokenizer.side.start()
    kind = TextWorker if part == "text" else ExtraTokenizer
    worker = build_text_worker(tokenizer, to_scheduler, to_frontend, window, kind)
    prompts = PromptQueue(PromptThreads(side=tokenizer.side), tokenizer.quick)
    with frozen_heap():
        context.ready()
        run_text_worker(worker, inbox, context.beat, prompts)
    tokenizer.side.close()
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
