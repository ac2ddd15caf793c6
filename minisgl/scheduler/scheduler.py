"""The loop: receive, decide, launch, finish, release; one after the other, or overlapped.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minisgl.config.engine import SchedulerConfig
from minisgl.core import Batch, IntArray, Phase, Req, SamplingParams
from minisgl.engine.engine import Engine, build_engine
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.kvcache.audit import check_integrity
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.naive_cache import make_cache
from minisgl.parallel.comm import Comm
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.messages import AbortMsg, ErrorReply, Reply, TokenReply, UserMsg
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.queue import ArrivalOrder, FairQueue, mixed_prefill_threshold


class Limits(NamedTuple):
    """What a request must keep to: window and pool, both in tokens, and vocabulary."""

    max_seq_len: int
    pool_tokens: int
    vocab_size: int

    @property
    def total(self) -> int:
        """Most tokens, prompt and answer together, that one request can ever have."""
        return min(self.max_seq_len, self.pool_tokens)


class InvalidRequestError(ValueError):
    """Why a request cannot be served: a message for people, a code and a field for programs."""

    def __init__(self, message: str, code: str = "invalid_request", param: str = "prompt") -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


def check_prompt(ids: IntArray, limits: Limits) -> None:
    """Raise `InvalidRequestError` if no answer can be computed; ids is one-dimensional."""
    count = len(ids)
    if count == 0:
        raise InvalidRequestError("prompt: must hold at least one token, got an empty prompt")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"prompt: token ids must be in 0..{limits.vocab_size - 1}, got {wrong}"
        )
    if count < limits.total:
        return
    what = "model's context window is" if count >= limits.max_seq_len else "KV cache holds"
    size = limits.max_seq_len if count >= limits.max_seq_len else limits.pool_tokens
    raise InvalidRequestError(
        f"prompt: {count} tokens are too many, the {what} {size} tokens and the answer needs at "
        "least one",
        "context_length_exceeded",
    )


def token_array(ids: object) -> IntArray:
    """Token ids as int32 [n]; `InvalidRequestError` unless it is a flat list of integers."""
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"prompt: must be a flat list of token ids, {error}") from None
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"prompt: must be a flat list of integers, got {array.dtype} {array.shape}"
        )
    if array.size and (array.max() > 2**31 - 1 or array.min() < -1):
        wrong = next(int(i) for i in array if not -1 <= i <= 2**31 - 1)
        raise InvalidRequestError(f"prompt: no token has the id {wrong}")
    return array.astype(np.int32)


def check_params(params: object) -> SamplingParams:
    """Raise `InvalidRequestError` for sampling parameters that got past their constructor."""
    if not isinstance(params, SamplingParams):
        name = "sampling_params"
        raise InvalidRequestError(f"{name}: must be SamplingParams, got {params!r}", param=name)
    try:
        return replace(params)  # a copy runs the constructor's checks again
    except ValueError as error:
        raise InvalidRequestError(str(error), param=str(error).partition(":")[0]) from None


def clamp_max_tokens(prompt_len: int, wanted: int | None, limits: Limits) -> tuple[int, str | None]:
    """How many tokens a request gets, and a notice if that is fewer than it asked for."""
    room = limits.total - prompt_len
    if wanted is None or wanted <= room:
        return (room if wanted is None else wanted), None
    what = "context window" if limits.total == limits.max_seq_len else "KV cache"
    return room, (
        f"max_tokens: clamped from {wanted} to {room}, the prompt has {prompt_len} tokens and the "
        f"{what} holds {limits.total}"
    )


def finish_reason(req: Req, token: int, eos_token_ids: frozenset[int]) -> str | None:
    """Why `token`, appended already, is the last one; None if it is not."""
    params = req.sampling_params
    if token in eos_token_ids and not params.ignore_eos:
        return "stop"
    if token in params.stop_token_ids:
        return "stop"
    return "length" if len(req.input_ids) >= req.max_device_len else None


class TraceEvent(NamedTuple):
    """Something the scheduler did: from when to when, in seconds of its clock."""

    name: str  # receive, schedule, launch, wait, process
    start: float
    end: float
    step: int  # of the step that it was done for
    size: int = 0  # requests in that step, where it is known
    phase: str = ""  # prefill or decode, likewise


class Launched(NamedTuple):
    """A step on its way."""

    step: int
    inputs: ForwardInput
    output: ForwardOutput


class Scheduler:
    """Owns every request from its message to its last reply; the parts it works with are given."""

    def __init__(
        self, engine: Engine, cache: CacheManager, prefill: PrefillManager, decode: DecodeManager,
        channel: Channel, *, eos_token_ids: Iterable[int] = (),
        trace: Callable[[TraceEvent], None] | None = None,
        clock: Callable[[], float] = time.perf_counter, check_every: float = 1.0,
        overlap: bool = True, interleave: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.cache, self.prefill, self.decode = engine, cache, prefill, decode
        self.channel, self.tables = channel, engine.tables
        self.overlap = overlap  # which loop its owner should run
        self.interleave = interleave  # no two prefill steps in a row while requests are running
        self.last_phase = Phase.DECODE
        self.retractions = 0
        self.eos_token_ids = frozenset(eos_token_ids)
        self.trace, self.clock = trace, clock
        pool_tokens = engine.num_pages * engine.page_size
        self.limits = Limits(engine.max_seq_len, pool_tokens, engine.model_config.vocab_size)
        self.reqs: dict[int, Req] = {}  # every request that has not had its last reply, by uid
        self.notices: dict[int, str] = {}
        self.in_flight: Launched | None = None
        self.step_count, self.exiting = 0, False
        self.check_every, self.check_at = check_every, 0.0  # seconds; the time of the next check

    @contextmanager
    def span(self, name: str, step: int, batch: Batch | None = None) -> Iterator[None]:
        """Report how long the block took, if somebody listens."""
        if self.trace is None:
            yield
            return
        start = self.clock()
        yield
        about = () if batch is None else (batch.size, batch.phase.value)
        self.trace(TraceEvent(name, start, self.clock(), step, *about))

    @property
    def has_work(self) -> bool:
        """True while a request is owed a reply or a step is on its way."""
        return bool(self.reqs) or self.in_flight is not None

    def receive(self, block: bool) -> None:
        """Take in what was said. With nothing to do, check that all is in place and wait."""
        idle = block and not self.has_work
        if idle:
            self.check_integrity()
        with self.span("receive", self.step_count):
            for msg in self.channel.recv(idle):
                if isinstance(msg, UserMsg):
                    self.add_request(msg)
                elif isinstance(msg, AbortMsg):
                    self.abort(msg.uid)
                else:
                    self.exiting = True

    def check_integrity(self) -> None:
        """When idle, every page is home; a lost one raises.

        At most once in `check_every` seconds, and more rarely where a check takes long: it walks
        the whole cache, and whoever asks next must not wait for it.
        """
        start = time.monotonic()
        if start < self.check_at:
            return
        check_integrity(self.cache, live=[req for req in self.reqs.values() if req.table_idx >= 0])
        end = time.monotonic()
        self.check_at = end + self.check_every * max(1.0, 100 * (end - start))

    def add_request(self, msg: UserMsg) -> None:
        """Queue a request, or refuse it: one bad request never harms the others."""
        try:
            req, notice = self.make_req(msg)
        except InvalidRequestError as error:
            reply = ErrorReply(
                uid=msg.uid, message=error.message, code=error.code, param=error.param
            )
            self.channel.send([reply])
            return
        if notice is not None:
            self.notices[req.uid] = notice
        self.reqs[req.uid] = req
        self.prefill.waiting.add(req)

    def make_req(self, msg: UserMsg) -> tuple[Req, str | None]:
        """The request of a message, and a notice about it; raises `InvalidRequestError`."""
        if msg.uid in self.reqs:
            raise InvalidRequestError(
                f"uid: {msg.uid} belongs to a request that is still running", param="uid"
            )
        ids = token_array(msg.input_ids)
        check_prompt(ids, self.limits)
        params = check_params(msg.sampling_params)
        max_new_tokens, notice = clamp_max_tokens(len(ids), params.max_tokens, self.limits)
        req = Req(
            uid=msg.uid, input_ids=ids, sampling_params=params, max_new_tokens=max_new_tokens,
            client=msg.client,
        )  # fmt: skip
        return req, notice

    def next_step(self) -> Batch | None:
        """Who runs now: prompts first, so that new requests join the decode batch soon.

        With `interleave` running requests get a token after every prefill step.
        """
        with self.span("schedule", self.step_count):
            if self.interleave and self.last_phase is Phase.PREFILL:
                batch = self.decode_step() or self.prefill.schedule()
            else:
                batch = self.prefill.schedule() or self.decode_step()
            self.last_phase = Phase.DECODE if batch is None else batch.phase
            return batch

    def launch(self, batch: Batch) -> Launched:
        """Start a step and move its requests on, as if it were done: the device keeps the order."""
        with self.span("launch", self.step_count, batch):
            self.cache.allocate_paged(batch.reqs)
            inputs = self.engine.prepare(batch)
            output = self.engine.step(inputs)
            self.prefill.waiting.charge(batch)
            for req in batch.reqs:
                req.advance()
            if batch.phase is Phase.PREFILL:
                for req in inputs.sampled:
                    self.cache.cache_req(req, finished=False)
            self.decode.update(batch.reqs)
            self.step_count += 1
            return Launched(self.step_count - 1, inputs, output)

    def decode_step(self) -> Batch | None:
        """One token for everybody who runs; if pages are missing, the youngest are taken back."""
        size = self.engine.page_size
        while self.decode.running:
            available = self.cache.available_tokens // size - self.prefill.pages_to_finish()
            if len(self.decode.running) <= available or self.decode.pages_now(size) <= available:
                break
            if self.in_flight is not None:  # somebody in that step may have ended: look first
                self.finish(self.in_flight)
                self.in_flight = None
            else:
                self.retract(self.prefill.chunked_req or self.decode.youngest)
        return self.decode.schedule()

    def retract(self, req: Req) -> None:
        """Take row and pages from a request, and let it wait for its turn to go on."""
        self.prefill.remove(req)
        self.decode.remove(req)
        self.free_request(req)
        req.retracted = True
        self.prefill.waiting.resume(req)
        self.retractions += 1

    def free_request(self, req: Req) -> None:
        """Row and pages of an admitted request; what was computed stays in the prefix cache."""
        self.cache.cache_req(req, finished=True)
        self.tables.free(req.table_idx)
        req.table_idx = -1

    def finish(self, launched: Launched) -> None:
        """Wait for a step's tokens, hand them out, release the requests that had their last one."""
        batch = launched.inputs.batch
        with self.span("wait", launched.step, batch):
            tokens = launched.output.wait()
        with self.span("process", launched.step, batch):
            replies: list[Reply] = []
            for index, (req, token) in enumerate(zip(launched.inputs.sampled, tokens.ids)):
                # Aborted or stopped while this step was on its way: its token is dropped.
                if self.reqs.get(req.uid) is not req:
                    continue
                req.append(token)
                reason = finish_reason(req, token, self.eos_token_ids)
                replies.append(self.reply(req, token, reason, tokens, index))
                if reason is not None:
                    self.release(req)
            self.channel.send(replies)

    def reply(
        self, req: Req, token: int, reason: str | None, tokens: SampledTokens, index: int
    ) -> TokenReply:
        """The message for one token."""
        reply = TokenReply(
            uid=req.uid, token=token, finished=reason is not None, finish_reason=reason,
            prompt_tokens=req.prompt_len, cached_tokens=req.matched_len,
            stop=tuple(req.sampling_params.stop),
        )  # fmt: skip
        if self.notices:
            reply.notice = self.notices.pop(req.uid, None)
        wanted = req.sampling_params.logprobs
        if wanted is not None and tokens.logprobs is not None:
            reply.logprob = tokens.logprobs[index]
            if wanted and tokens.top_ids is not None and tokens.top_logprobs is not None:
                pairs = zip(tokens.top_ids[index], tokens.top_logprobs[index])
                reply.top_logprobs = list(pairs)[:wanted]
        return reply

    def release(self, req: Req) -> None:
        """Forget a request and give back all it holds; called once for each, whatever its state."""
        del self.reqs[req.uid]
        self.notices.pop(req.uid, None)
        self.prefill.remove(req)
        self.decode.remove(req)
        self.prefill.waiting.leave(req)
        if req.table_idx >= 0:
            self.free_request(req)

    def abort(self, uid: int) -> None:
        """End a request now, whatever it is doing. Too late is no error."""
        req = self.reqs.get(uid)
        if req is None:
            return
        self.release(req)
        reply = TokenReply(
            uid=uid, token=None, finished=True, finish_reason="abort",
            prompt_tokens=req.prompt_len, cached_tokens=req.matched_len,
            stop=tuple(req.sampling_params.stop),
        )  # fmt: skip
        self.channel.send([reply])

    def step(self, block: bool = False) -> None:
        """One step of the plain loop: nothing happens while the device works, and the reverse."""
        self.receive(block)
        batch = self.next_step()
        if batch is not None:
            self.finish(self.launch(batch))

    def run(self) -> None:
        """The plain loop, until an `ExitMsg`."""
        while not self.exiting:
            self.step(block=True)
        self.stop()

    def step_overlap(self, block: bool = False) -> None:
        """One step of the overlapped loop: launch step n + 1, then finish step n while it runs."""
        self.receive(block)
        batch = self.next_step()
        launched = self.launch(batch) if batch is not None else None
        before, self.in_flight = self.in_flight, launched
        if before is not None:
            self.finish(before)

    def run_overlap(self) -> None:
        """The overlapped loop, until an `ExitMsg`."""
        while not self.exiting:
            self.step_overlap(block=True)
        self.stop()

    def stop(self) -> None:
        """Finish what is on its way, abort the rest, and see that every page is home."""
        if self.in_flight is not None:
            self.finish(self.in_flight)
            self.in_flight = None
        for uid in list(self.reqs):
            self.abort(uid)
        check_integrity(self.cache)


def build_scheduler(
    config: SchedulerConfig,
    channel: Channel,
    comm: Comm | None = None,
    *,
    trace: Callable[[TraceEvent], None] | None = None,
    progress: bool = False,
) -> Scheduler:
    """An engine and everything that feeds it; each part is given what it works with."""
    engine = build_engine(config, comm, progress=progress)
    cache = CacheManager(
        engine.num_pages, engine.tables, make_cache(config.cache_type, engine.page_size)
    )
    decode = DecodeManager(config.reserve_tokens)
    settled = engine.config
    assert isinstance(settled, SchedulerConfig) and settled.max_extend_tokens is not None
    fair, budget = config.schedule_policy == "fair", settled.max_extend_tokens
    prefill = PrefillManager(
        cache, engine.tables, decode, page_size=engine.page_size, max_extend_tokens=budget,
        min_shared=0 if config.cache_type == "naive" else 32,
        waiting=FairQueue(budget) if fair else ArrivalOrder(),
        mixed_prefill_threshold=mixed_prefill_threshold(budget) if fair else None,
    )  # fmt: skip
    return Scheduler(
        engine, cache, prefill, decode, channel, eos_token_ids=engine.model_config.eos_token_ids,
        trace=trace, overlap=bool(settled.overlap), interleave=fair,
    )  # fmt: skip
