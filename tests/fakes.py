"""An engine without a model: the scheduler's logic in microseconds.

`FakeEngine` gives tokens that depend on the prompt and the position alone, so every schedule must
give the same answer. It checks what a device would rely on, as the executor below it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from recorder import RecordingGraph

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine.engine import build_engine
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.events import Emit
from minisgl.kvcache.audit import check_integrity
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.naive_cache import NaiveCache
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.scheduler import build as scheduler_build
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import Reply, TokenReply, UserMsg
from minisgl.scheduler.mixed import GPU_CONTEXT, SharedDecode, SharedPrefill
from minisgl.scheduler.observe import IdleAudit
from minisgl.scheduler.phases import DecodeManager, PrefillLimits
from minisgl.scheduler.queue import TURN, ArrivalOrder, FairQueue
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.retraction import DelayedPrefill, make_room
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulated import Hashes, Ready, SimulatedExecutor

VOCAB = 1000
EOS = 999


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on schedulers build engines that record decode steps without a GPU, too."""
    recording = partial(build_engine, new_graph=RecordingGraph)
    parts = partial(scheduler_build.Parts, engine=recording)
    monkeypatch.setattr(scheduler_build, "Parts", parts)


def fake_token(prompt: Sequence[int], index: int) -> int:
    """Token number `index` of the answer to a prompt; one prompt in three ends by itself."""
    total = int(sum(prompt))
    if total % 3 == 0 and index == total % 7:
        return EOS
    return (total * 31 + index * 17) % 997


def expected(prompt: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """The whole answer to a prompt."""
    out: list[int] = []
    for index in range(max_tokens):
        out.append(fake_token(prompt, index))
        if out[-1] == EOS and not ignore_eos:
            break
    return out


@dataclass
class Step:
    """Input of one step, for a test to look at."""

    phase: str
    uids: list[int]
    extend: list[int]
    sampled: list[int]
    seq_lens: list[int]


class FakeEngine(SimulatedExecutor):
    """A simulated executor whose answers a test can predict, and which keeps a list of its steps.

    Each read of a slot is compared with the prefix that it should hold (chapter 09e).
    """

    def __init__(
        self, num_pages: int = 64, page_size: int = 4, max_seq_len: int = 128,
        max_running_req: int = 8, vocab_size: int = VOCAB,
    ) -> None:  # fmt: skip
        super().__init__(
            num_pages=num_pages, page_size=page_size, max_seq_len=max_seq_len,
            max_running_req=max_running_req, vocab_size=vocab_size,
        )  # fmt: skip
        self.max_running_req, self.steps = max_running_req, list[Step]()

    def prepare(self, batch: Batch) -> ForwardInput:
        inputs = super().prepare(batch)
        writes = inputs.out_loc
        assert len(np.unique(writes)) == len(writes), "two tokens of a step share a slot"
        assert writes.max() < self.num_pages * self.page_size, "a request writes the dummy page"
        self.steps.append(
            Step(
                batch.phase.value,
                [r.uid for r in batch.reqs],
                [r.extend_len for r in batch.reqs],
                [r.uid for r in inputs.sampled],
                [r.device_len for r in batch.reqs],
            )
        )
        return inputs

    def sample(self, inputs: ForwardInput, prefixes: Hashes) -> ForwardOutput:
        """Return the tokens of `fake_token`."""
        ids = [
            fake_token(r.input_ids[: r.prompt_len].tolist(), r.device_len - r.prompt_len)
            for r in inputs.sampled
        ]
        self.token_pool[inputs.write_rows, inputs.write_positions] = ids
        return Ready(SampledTokens(ids))


class Driver:
    """A scheduler over a fake engine, and a record of all its replies."""

    def __init__(
        self,
        *,
        overlap: bool = False,
        cache_type: str = "radix",
        budget: int = 64,
        engine: Any = None,
        emit: Emit | None = None,
        min_shared: int = 32,
        policy: str = "fcfs",
        reserve: int | None = None,
        mixed_prefill_threshold: int = 16,
        share: int | None = None,
        mixed: tuple[int, int] = (0, 0),
        max_context: int = GPU_CONTEXT,
        turn: int = TURN,
        scheduler: Callable[..., Scheduler] = Scheduler,
        **sizes: Any,
    ) -> None:
        self.engine = FakeEngine(**sizes) if engine is None else engine
        page_size, pages = self.engine.page_size, self.engine.num_pages
        prefixes = RadixCache(page_size) if cache_type == "radix" else NaiveCache(page_size)
        self.cache = CacheManager(pages, self.engine.tables, prefixes, emit)
        fair = policy == "fair"
        decode = SharedDecode(reserve, max_context) if fair else DecodeManager(reserve)
        limits = PrefillLimits(
            budget,
            min_shared if cache_type != "naive" else 0,
            mixed_prefill_threshold if fair else None,
        )
        waiting = FairQueue(budget, turn) if fair else ArrivalOrder()
        manager = SharedPrefill if fair else DelayedPrefill
        prefill = manager(self.cache, decode, limits, waiting)
        prefill.max_tokens, prefill.max_requests = mixed
        if share is not None and isinstance(prefill, DelayedPrefill):
            prefill.share = share
        self.channel = InProcessChannel()
        self.limits = Limits(self.engine.max_seq_len, pages * page_size, VOCAB)
        self.scheduler = scheduler(
            self.engine,
            self.cache,
            prefill,
            decode,
            self.channel,
            make_req=lambda msg: make_req(msg, self.limits),
            make_room=make_room,
            audit=IdleAudit(every=0.0),
            eos_token_ids=frozenset([EOS]),
            overlap=overlap,
            interleave=fair,
            emit=emit,
        )
        self.step = self.scheduler.step_overlap if overlap else self.scheduler.step
        self.replies: dict[int, list[Reply]] = {}
        self.clients: set[str] = set()

    def ask(self, uid: int, prompt: Sequence[int], client: str = "", **params: Any) -> None:
        """Send a request."""
        self.clients.add(client)
        self.channel.put_messages(UserMsg(uid, list(prompt), SamplingParams(**params), client))

    def go(self, turns: int = 1) -> None:
        """Take turns and collect replies; after every turn, each page has one owner."""
        for _ in range(turns):
            self.step()
            for reply in self.channel.take_replies():
                self.replies.setdefault(reply.uid, []).append(reply)
            self.check()

    def live(self) -> list[Req]:
        return [r for r in self.scheduler.reqs.values() if r.table_idx >= 0]

    def check(self) -> None:
        """Check that pages and rows have owners, and that no request got a reply after its last."""
        check_integrity(self.cache, live=self.live())
        assert self.engine.tables.free_rows == self.engine.max_running_req - len(self.live())
        for said in self.replies.values():
            assert not any(getattr(r, "finished", True) for r in said[:-1])

    def drain(self, limit: int = 2000) -> None:
        """Turn until nothing is left to do; fails if that never comes."""
        while self.channel.waiting or self.scheduler.has_work:
            self.go()
            limit -= 1
            assert limit > 0, "the scheduler never becomes idle"
        assert self.cache.available_tokens == self.engine.num_pages * self.engine.page_size
        whole = self.scheduler.decode.reserve is None  # then promises cover whole answers
        assert not whole or len(self.clients) > 1 or self.scheduler.retractions == 0

    def computed(self, uid: int) -> int:
        """Return the tokens that all steps computed for a request."""
        steps = self.engine.steps
        return sum(n for s in steps for other, n in zip(s.uids, s.extend) if other == uid)

    def half_done(self, uid: int) -> bool:
        """Return True if a prompt is partly computed."""
        req = self.scheduler.prefill.chunked_req
        return req is not None and req.uid == uid

    def tokens(self, uid: int) -> list[int]:
        """The answer so far."""
        said = self.replies.get(uid, [])
        return [r.token for r in said if isinstance(r, TokenReply) and r.token is not None]

    def reason(self, uid: int) -> str | None:
        """Return the finish reason or the error code of a request; None while it runs."""
        last = self.replies[uid][-1] if uid in self.replies else None
        return None if last is None else getattr(last, "finish_reason", getattr(last, "code", None))
