"""The process of a text worker: its parts and its main function.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

from msgspec.structs import replace

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap
from minisgl.runtime.supervisor import WorkerContext
from minisgl.scheduler.messages import AbortMsg, ErrorReply
from minisgl.scheduler.side import SLOTS, SideTokenizer
from minisgl.server.workers.channels import Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.workers.logprobs import HeldLogprobs
from minisgl.server.workers.messages import Message, TokenizeMsg
from minisgl.server.workers.processes import address
from minisgl.server.workers.text_worker import (
    Encode,
    PromptQueue,
    TextWorker,
    run_text_worker,
)
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import Tokenizer

CHARACTERS, LONG = 2**20, 2**17  # of one second of a thread; of a long prompt


Encoded = list[tuple[int, Message]]  # by uid


def encode_all(encode: Encode, same: list[TokenizeMsg]) -> Encoded:
    """Encode the answers to one request; an error of the first is the error of all."""
    first, *rest = same
    made = encode(first)
    if isinstance(made, ErrorReply):
        return [(msg.uid, replace(made, uid=msg.uid)) for msg in same]
    return [(first.uid, made), *((msg.uid, encode(msg)) for msg in rest)]


class PromptThreads(PromptQueue):
    """Threads that encode prompts beside the text worker's loop; one takes none over `LONG`.

    A client may have fewer of them than are free, and pays for the time that it had one.
    """

    def __init__(self, count: int = SLOTS) -> None:
        super().__init__()
        self._pool, self._count = ThreadPoolExecutor(count, "prompts"), count
        self._jobs: dict[int, tuple[str, float, Future[Encoded]]] = {}  # client, start, result

    def take(self, encode: Encode) -> list[Message]:
        done, now = list[Message](), time.monotonic()
        for uid in [uid for uid, (*_, job) in self._jobs.items() if job.done()]:
            client, start, job = self._jobs.pop(uid)
            done += [made for uid, made in job.result() if self.drop(uid)]  # not of one that left
            if client in self._clocks:
                self._clocks[client] += int((now - start) * CHARACTERS)
        while free := self._count - len(self._jobs):
            held = Counter(client for client, *_ in self._jobs.values())
            heaps = self._heaps.items() if free == 1 else ()
            long = [client for client, heap in heaps if max(size for *_, size in heap) > LONG]
            found = self.pop(busy=[c for c in held if held[c] >= free] + long)
            if not found:
                break
            self.waiting |= {msg.uid: msg for msg in found}  # until they are encoded
            job = self._pool.submit(encode_all, encode, found)
            self._jobs[found[0].uid] = found[0].client, now, job
        return done


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
    inbox = ZmqInbox(address(folder, part))
    to_scheduler, to_frontend = (ZmqOutbox(address(folder, p)) for p in ("scheduler", "frontend"))
    path = resolve_model_path(config.model_path)
    window = max_seq_len(config, ModelConfig.from_path(path))
    tokenizer = SideTokenizer(path)
    tokenizer.side.start()
    kind = TextWorker if part == "text" else ExtraTokenizer
    worker = build_text_worker(tokenizer, to_scheduler, to_frontend, window, kind)
    with frozen_heap():
        context.ready()
        run_text_worker(worker, inbox, context.beat, PromptQueue(PromptThreads(), tokenizer.quick))
    tokenizer.side.close()
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
