"""The loop: receive, decide, launch, finish, release; one after the other, or overlapped.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from minisgl import events
from minisgl.core import Batch, Phase, Req
from minisgl.engine.step import ForwardInput, SampledTokens
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.executor import Executor, StepOutput
from minisgl.scheduler.messages import AbortMsg, ErrorReply, InvalidRequestError, UserMsg
from minisgl.scheduler.phases import DecodeManager, PrefillManager
from minisgl.scheduler.requests import abort_reply, finish_reason, token_reply


class Launched(NamedTuple):
    """A step in flight."""

    step: int
    inputs: ForwardInput
    output: StepOutput


@dataclass(eq=False)
class Scheduler:
    """Owner of every request from its message to its last reply; its parts are arguments."""

    engine: Executor
    cache: CacheManager
    prefill: PrefillManager
    decode: DecodeManager
    channel: Channel
    make_req: Callable[[UserMsg], Req]  # raises InvalidRequestError
    make_room: Callable[..., None] | None = None  # called with the scheduler before a decode step
    audit: Callable[..., None] | None = None  # and before an idle loop blocks
    eos_token_ids: frozenset[int] = frozenset()
    overlap: bool = True  # which loop `run` uses
    interleave: bool = False  # no two prefill steps in a row while requests are running
    last_phase: Phase = Phase.DECODE
    step_count: int = 0
    retractions: int = 0
    exiting: bool = False
    reqs: dict[int, Req] = field(default_factory=dict)  # those without a last reply, by uid
    in_flight: Launched | None = None
    emit: events.Emit | None = None  # receives events; None: no observer

    @property
    def has_work(self) -> bool:
        """True while a request is owed a reply or a step is in flight."""
        return bool(self.reqs) or self.in_flight is not None

    def receive(self, block: bool) -> None:
        """Handle waiting messages; with `block` and no work, audit and wait for one."""
        idle = block and not self.has_work
        if idle and self.audit is not None:
            self.audit(self)
        for msg in self.channel.recv(idle):
            if isinstance(msg, UserMsg):
                self.add_request(msg)
            elif isinstance(msg, AbortMsg):
                self.abort(msg.uid)
            else:
                self.exiting = True
        if self.emit is not None:
            self.emit(events.StageEnded("receive", self.step_count))

    def add_request(self, msg: UserMsg) -> None:
        """Queue a request, or reply with an error: a bad request never harms the others."""
        try:
            if msg.uid in self.reqs:
                raise InvalidRequestError(f"uid: {msg.uid} is still running", param="uid")
            req = self.make_req(msg)
        except InvalidRequestError as e:
            self.channel.send([ErrorReply(uid=msg.uid, message=str(e), code=e.code, param=e.param)])
            return
        self.reqs[req.uid] = req
        self.prefill.waiting.add(req)
        if self.emit is not None:
            self.emit(
                events.RequestAdded(req.uid, req.prompt_len, req.max_device_len, msg.input_ids)
            )

    def next_step(self) -> Batch | None:
        """Choose the next batch: prefill first, or decode first after a prefill (`interleave`)."""
        if self.interleave and self.last_phase is Phase.PREFILL:
            batch = self.decode_step() or self.prefill.schedule()
        else:
            batch = self.prefill.schedule() or self.decode_step()
        self.last_phase = Phase.DECODE if batch is None else batch.phase
        if self.emit is not None:
            self.emit(events.StageEnded("schedule", self.step_count))
        return batch

    def decode_step(self) -> Batch | None:
        """Return a batch of all running requests, once there are pages for them."""
        rows, pages = len(self.decode.running), self.cache.available_tokens // self.cache.page_size
        others = self.prefill.chunked_req is not None or len(self.prefill.waiting) > 0
        if self.make_room is not None and (rows > pages or others):
            self.make_room(self)
        return self.decode.schedule()

    def abort(self, uid: int) -> None:
        """End a request now, in any state; do nothing if it has ended already."""
        if (req := self.reqs.get(uid)) is not None:
            self.release(req)
            self.channel.send([abort_reply(req)])

    def release(self, req: Req) -> None:
        """Forget a request in any state and free all its memory; called once for each."""
        self.reqs.pop(req.uid).matcher = None  # others may keep the request, but not its grammar
        self.prefill.remove(req)
        self.decode.remove(req)
        self.prefill.waiting.release(req)
        if req.table_idx >= 0:
            self.free_request(req)
        if self.emit is not None:
            self.emit(events.RequestReleased(req.uid))

    def free_request(self, req: Req) -> None:
        """Free row and pages of an admitted request; computed pages stay cached."""
        self.cache.cache_req(req, finished=True)
        self.engine.tables.free(req.table_idx)
        req.table_idx = -1

    def reset(self) -> None:
        """Forget all requests, without a reply, and all cached prefixes, as in a new scheduler."""
        self.engine.reset()
        self.cache.reset()
        self.prefill.waiting.reset()
        self.decode.running.clear()
        self.reqs.clear()
        self.prefill.chunked_req = self.in_flight = None
        if self.emit is not None:
            self.emit(events.SchedulerReset())

    def launch(self, batch: Batch) -> Launched:
        """Lay a step out and start it."""
        self.cache.allocate_paged(batch.reqs)
        return self.start(batch, self.engine.prepare(batch))

    def start(self, batch: Batch, inputs: ForwardInput) -> Launched:
        """Start a step and advance its requests as if it were done; the device works in order."""
        output = self.engine.step(inputs)
        self.prefill.waiting.charge(batch)
        for req in batch.reqs:
            req.advance()
        for req in inputs.sampled:
            if req.cached_len == req.prefill_len:  # its prompt ends in this step
                self.cache.cache_req(req, finished=False)
        self.decode.update(batch.reqs)
        if self.emit is not None:
            self.emit(events.StepLaunched.of(self.step_count, batch.phase, batch.reqs))
        self.step_count += 1
        return Launched(self.step_count - 1, inputs, output)

    def finish(self, launched: Launched) -> None:
        """Wait for the tokens of a launched step, then process them."""
        tokens = launched.output.wait()
        if self.emit is not None:
            self.emit(events.StageEnded("wait", launched.step))
        self.process(launched, tokens)

    def process(self, launched: Launched, tokens: SampledTokens) -> None:
        """Send tokens, and release the requests that had their last one."""
        replies = []
        for index, (req, token) in enumerate(zip(launched.inputs.sampled, tokens.ids)):
            if self.reqs.get(req.uid) is not req:  # aborted or ended while the step was in flight
                continue
            if req.matcher is not None and req.matcher.waited:  # no mask yet: chapter 09a
                self.decode.running[req.uid] = req
                continue
            req.append(token)
            reason = finish_reason(req, token, self.eos_token_ids)
            replies.append(token_reply(req, reason, tokens, index))
            if reason is not None:
                self.release(req)
        self.channel.send(replies)
        if self.emit is not None:
            self.emit(events.StepFinished(launched.step, [(r.uid, r.token) for r in replies]))

    def step(self, block: bool = False) -> None:
        """Run one step of the plain loop: host and device wait for each other."""
        self.receive(block)
        if (batch := self.next_step()) is not None:
            self.finish(self.launch(batch))

    def step_overlap(self, block: bool = False) -> None:
        """Run one overlapped step: launch step n + 1, then finish step n while it runs."""
        self.receive(block)
        batch = self.next_step()
        self.finish_in_flight(self.launch(batch) if batch is not None else None)
        self.engine.sample_deferred()  # of step n + 1, if that needs these tokens (chapter 09a)

    def finish_in_flight(self, following: Launched | None = None) -> None:
        """Finish the step in flight, if there is one; the step `following` takes its place."""
        before, self.in_flight = self.in_flight, following
        if before is not None:
            self.finish(before)

    def run(self) -> None:
        """Loop until an `ExitMsg`; then finish the step in flight and abort the rest."""
        while not self.exiting:
            (self.step_overlap if self.overlap else self.step)(block=True)
        self.finish_in_flight()
        for uid in list(self.reqs):
            self.abort(uid)
