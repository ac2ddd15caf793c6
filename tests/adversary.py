"""Deterministic simulation: a seeded adversary against the real scheduler, queue and caches.

A seed makes a `Script`: the sizes of an engine and what happens to it. `play` runs a script over
`SimulatedExecutor` and checks everything after every step. `shrink` makes a failing script short.

    python -m tests.adversary 17                 reproduce seed 17, shrink it, print it
    python -m tests.adversary --steps 100000     fresh seeds until so many steps were taken
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

from minisgl import events
from minisgl.config.paths import resolve_model_path
from minisgl.core import Batch, IntArray, Phase, Req, SamplingParams
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.kvcache.audit import check_integrity
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.naive_cache import NaiveCache
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.scheduler import grammar, mixed
from minisgl.scheduler.grammar import Grammars, load_grammars
from minisgl.scheduler.messages import AbortMsg, ErrorReply, ExitMsg, Msg, Reply, UserMsg
from minisgl.scheduler.mixed import SharedDecode, SharedPrefill
from minisgl.scheduler.observe import IdleAudit
from minisgl.scheduler.phases import DecodeManager, PrefillLimits
from minisgl.scheduler.queue import ArrivalOrder, FairQueue
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.retraction import DelayedPrefill, make_room
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulated import SimulatedExecutor, salt_hash
from minisgl.scheduler.speculative import (
    NGramProposer,
    SpeculativeScheduler,
    VerifyBatch,
)
from tests.reference import Admission, Fairness, Prefixes, Rest, Shadow, drafts_of

VOCAB = 2240  # of the embedded model, whose tokenizer the grammars need
ENDS = frozenset([0])


class Ask(NamedTuple):
    """A request: `length` tokens of a text that others may share, then `tail` tokens of its own."""

    uid: int
    text: int
    length: int
    tail: int = 0
    max_tokens: int | None = 4
    client: str = ""
    options: tuple[tuple[str, Any], ...] = ()  # further fields of SamplingParams
    strange: bool = False  # with a token that the model does not have

    @property
    def prompt(self) -> list[int]:
        shared = [(self.text * 5 + i * (i + self.text)) % 23 + 1 for i in range(self.length)]
        return shared + [1000 + self.uid % 1000] * self.tail + [VOCAB] * self.strange


class Abort(NamedTuple):
    """The client of a request has left, or sends this once more."""

    uid: int


class Turn(NamedTuple):
    """`turns` steps of the scheduler's loop."""

    turns: int = 1


class Again(NamedTuple):
    """The last message but `back` is delivered once more."""

    back: int = 0


class Swap(NamedTuple):
    """The messages that wait are delivered in another order."""

    seed: int = 0


class Fail(NamedTuple):
    """The call of the executor that comes after `skip` others of its name raises."""

    call: str
    skip: int = 0
    after: bool = False


class Jump(NamedTuple):
    """The clock jumps ahead."""

    seconds: float


class Misuse(NamedTuple):
    """A part is called as no caller may: it must refuse, and change nothing."""

    what: str


class Exit(NamedTuple):
    """The loop ends, and starts again."""


Op = Ask | Abort | Turn | Again | Swap | Fail | Jump | Misuse | Exit


def short(op: Op) -> str:
    """An event without its default values."""
    usual = op._field_defaults
    given = [f"{name}={value!r}" for name, value in op._asdict().items()
             if name not in usual or value != usual[name]]  # fmt: skip
    return f"{type(op).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Script:
    """An engine's sizes, and what happens to it."""

    ops: tuple[Op, ...]
    page_size: int = 4
    num_pages: int = 16
    rows: int = 4
    window: int = 64
    budget: int = 32
    cache: str = "radix"
    policy: str = "fcfs"
    overlap: bool = True
    drafts: int = 0
    reserve: int | None = None
    min_shared: int = 0
    mirrored: bool = False
    grammars: bool = False
    shadowed: bool = False  # the state according to the events is compared with the real one
    mixed: int = 0  # tokens of a step with prompts and running requests
    context: int = 1000  # their tokens with all before them
    long_chunk: int = 1000  # tokens of a long prompt in a step beside running requests
    decode_context: int = 1000  # tokens of all requests in a decode step, if the policy is fair
    turn: int = 128  # answer tokens of a request before it yields to clients without one
    lag: int | None = None  # turns by which a second rank is behind; None: there is none
    slow_masks: bool = False  # the time for a step's masks is often over

    def __str__(self) -> str:
        plain = Script(())
        fields = [f"    {name}={value!r}," for name, value in vars(self).items()
                  if name != "ops" and value != getattr(plain, name)]  # fmt: skip
        ops = [f"        {short(op)}," for op in self.ops]
        return "\n".join(["Script(", "    ops=(", *ops, "    ),", *fields, ")"])


CROWDED, SCARCE = 0.2, 0.15  # of all scripts
REGEXES = ("[a-z ]{3,9}", "(yes|no), [0-9]{2,4}!", "a*", "(ab){2,40}")


def make_script(seed: int) -> Script:
    """Draw sizes, then weights of all kinds of events, then events: each seed is another mix."""
    rng = random.Random(seed)
    pick = rng.choice
    page_size = pick((1, 2, 4, 8))
    sizes: dict[str, Any] = {
        "page_size": page_size, "num_pages": rng.randint(3, 96 // page_size),
        "rows": rng.randint(1, 6), "window": rng.randint(16, 64), "budget": rng.randint(1, 40),
        "cache": pick(("radix", "radix", "naive")), "policy": pick(("fcfs", "fair")),
        "overlap": rng.random() < 0.7, "drafts": pick((0, 0, 3, 7)),
        "reserve": pick((None, None, 0, 1, 4)), "min_shared": pick((0, 1, 8)),
        "mirrored": rng.random() < 0.2, "grammars": rng.random() < 0.3,
        "shadowed": rng.random() < 0.2, "lag": pick((0, 1, 4, *[None] * 27)),
    }  # fmt: skip
    later = random.Random(-seed)
    sizes["mixed"] = 0 if sizes["drafts"] else later.choice((0, 4, 40))
    sizes |= {"context": later.choice((60, 1000)), "long_chunk": later.choice((3, 12, 1000)),
              "decode_context": later.choice((0, 30, 80, 1000)),
              "turn": later.choice((4, 12, 128)),
              "slow_masks": sizes["lag"] is None and later.random() < 0.5}  # fmt: skip
    weights = {Ask: 1.0, Turn: pick((1, 2, 5)), Abort: pick((0, 0.1, 0.5)),
               Again: pick((0, 0.1)), Swap: pick((0, 0.2)), Fail: pick((0, 0, 0.05)),
               Jump: pick((0, 0.1)), Misuse: pick((0, 0.1, 0.4)),
               Exit: pick((0, 0, 0.02))}  # fmt: skip
    longest, answers = rng.randint(1, sizes["window"] + 2), pick((1, 4, 20, 60))
    kind_of_script = random.Random(~seed).random()
    if kind_of_script < CROWDED:  # many short requests, and pages for all of them
        sizes |= {"rows": rng.randint(3, 6), "num_pages": 240 // page_size}
        weights |= {Ask: 4.0, Turn: 4.0}
        longest, answers = rng.randint(4, 40), pick((1, 3, 8))
    elif kind_of_script < CROWDED + SCARCE:  # mixed steps, and too few pages for all answers
        sizes |= {"rows": rng.randint(2, 3), "page_size": 1, "num_pages": rng.randint(20, 70),
                  "budget": rng.randint(3, 12), "drafts": 0, "reserve": 0, "mixed": 40,
                  "window": 64, "context": 1000}  # fmt: skip
        weights |= {Ask: 2.0, Turn: 5.0}
        longest, answers = rng.randint(4, 40), pick((20, 60))
    texts, ops, uid = rng.randint(1, 4), list[Op](), 0
    for kind in rng.choices(list(weights), list(weights.values()), k=150):
        if kind is Ask:
            uid += uid == 0 or rng.random() < 0.9  # else one that is in use, or was
            ops.append(make_ask(rng, uid, texts, longest, answers, sizes["grammars"]))
        elif kind is Abort:
            left = max(0, uid - rng.randint(0, 6))
            ops.append(Abort(left))
            if rng.random() < 0.2:  # its number comes again at once
                ops.append(make_ask(rng, left, texts, longest, answers, sizes["grammars"]))
        elif kind is Turn:
            ops.append(Turn(rng.randint(1, 6)))
        elif kind is Again:
            ops.append(Again(rng.randint(0, 3)))
        elif kind is Swap:
            ops.append(Swap(rng.randint(0, 9)))
        elif kind is Fail:
            ops.append(Fail(pick(CALLS), rng.randint(0, 4), rng.random() < 0.5))
        elif kind is Jump:
            ops.append(Jump(pick((0.001, 2.0, 1e6))))
        elif kind is Misuse:
            ops.append(Misuse(pick(MISUSES)))
        else:
            ops.append(Exit())
    return Script(tuple(ops), **sizes)


def make_ask(
    rng: random.Random, uid: int, texts: int, longest: int, answers: int, grammars: bool
) -> Ask:
    """Draw a request; few of them are refused."""
    options: dict[str, Any] = {}
    if grammars and rng.random() < 0.4:
        options["regex"] = rng.choice(REGEXES)
    else:
        options["ignore_eos"] = rng.random() < 0.7
    if rng.random() < 0.2:
        options["cache_salt"] = rng.choice("ab")
    if rng.random() < 0.1:
        options["stop_token_ids"] = (rng.randint(1, 23),)
    if rng.random() < 0.1:
        options["logprobs"] = rng.randint(0, 1)
    most = None if rng.random() < 0.05 else rng.randint(1, answers)
    if rng.random() < 0.05:
        options["prompt_logprobs"] = 0
        most = rng.choice((0, most))
    if rng.random() < 0.02 and "regex" not in options:
        options["allowed_token_ids"] = (VOCAB,)
    tail = rng.choice((0, 0, 1, 3))
    length = rng.randint(0 if rng.random() < 0.05 else 1, longest)
    given = tuple(item for item in options.items() if item[1] is not False)
    strange = rng.random() < 0.02
    return Ask(uid, rng.randint(1, texts), length, tail, most, rng.choice("abc"), given, strange)


class Fault(BaseException):
    """Exception that the adversary raises inside the executor."""


CALLS = ("prepare", "step", "wait", "sample_deferred", "reset")
MISUSES = (
    "a free page", "a page twice", "no page", "too many pages", "a free row",
    "past the end of a row", "a request that is over", "kept pages", *["a lost prefix"] * 5,
)  # fmt: skip


class Executor(SimulatedExecutor):
    """An executor that fails on demand, and checks what it is asked to do."""

    def __init__(self, world: World, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.world, self.failing = world, dict[str, Fail]()

    def prepare(self, batch: Batch) -> ForwardInput:
        """Check the batch, too."""
        self.world.check_batch(batch)
        return self.perhaps_fail("prepare", lambda: SimulatedExecutor.prepare(self, batch))

    def step(self, inputs: ForwardInput) -> ForwardOutput:
        """Check that what the device reads is what the host wrote."""

        def real() -> ForwardOutput:
            writes = inputs.out_loc
            assert len(set(writes.tolist())) == len(writes), "two tokens of a step share a slot"
            assert writes.max() < self.num_pages * self.page_size, "a step writes the dummy page"
            output = SimulatedExecutor.step(self, inputs)
            for req in inputs.batch.reqs:
                row = self.token_pool[req.table_idx, : req.host_len]
                assert row.tolist() == req.input_ids.tolist(), f"{req}: wrong tokens in its row"
            self.world.note_step(inputs)
            return Waiting(self, output)

        output: ForwardOutput = self.perhaps_fail("step", real)
        return output

    def sample_deferred(self) -> None:
        self.perhaps_fail("sample_deferred", lambda: SimulatedExecutor.sample_deferred(self))

    def reset(self) -> None:
        self.perhaps_fail("reset", lambda: SimulatedExecutor.reset(self))

    def perhaps_fail(self, name: str, real: Callable[[], Any]) -> Any:
        """Call, and raise before or after that if it is this call's turn."""
        plan = self.failing.pop(name, None)
        if plan is not None and plan.skip > 0:
            self.failing[name], plan = plan._replace(skip=plan.skip - 1), None
        if plan is not None and not plan.after:
            raise Fault(name)
        result = real()
        if plan is not None:
            raise Fault(name)
        return result


class Waiting(ForwardOutput):
    """The output of a step, which may fail when it is waited for."""

    def __init__(self, executor: Executor, output: ForwardOutput) -> None:
        self.executor, self.output = executor, output

    def wait(self) -> SampledTokens:
        tokens: SampledTokens = self.executor.perhaps_fail("wait", self.output.wait)
        return tokens


class Proposer(NGramProposer):
    """The usual drafts, compared with the reference; it is charged for accepted ones, too."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.in_vain = world, Counter[Req]()

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
        found = super().propose(reqs, limits)
        for req, tokens, most in zip(reqs, found, limits):
            assert req.matcher is None, f"drafts for {req}, which has a grammar"
            expected = drafts_of(req.input_ids.tolist(), self.in_vain[req], most)
            assert tokens.tolist() == expected, f"{req}: drafts {tokens}, not {expected}"
        return found

    def update(self, req: Req, drafted: int, accepted: int) -> None:
        self.in_vain[req] = 0 if accepted else self.in_vain[req] + 1
        if self.world.fair is not None:
            self.world.fair.charge(Phase.DECODE, [req] * accepted)
        super().update(req, drafted, accepted)

    def release(self, req: Req) -> None:
        self.in_vain.pop(req, None)
        super().release(req)

    def reset(self) -> None:
        self.in_vain.clear()
        super().reset()


def prompts_of(reqs: Iterable[Req]) -> list[Req]:
    """Those of a step's requests that compute a part of their prompt; the others are running."""
    return [req for req in reqs if req.cached_len < req.prefill_len]


class Watched(SharedPrefill):
    """Admission whose decisions are compared with the reference's."""

    world: World

    def schedule(self) -> Batch | None:
        return self.world.watch(super().schedule)


class WatchedDelayed(Watched, DelayedPrefill):
    """The same with groups."""


def over_the_wire(messages: list[Msg]) -> list[Msg]:
    """Messages as another rank gets them (chapter 10)."""
    return WIRE.decode(msgspec.msgpack.encode(messages))


WIRE = msgspec.msgpack.Decoder(list[Msg])


@cache
def compiled() -> Grammars:
    """Grammars for the embedded model, compiled once for all worlds."""
    return load_grammars(resolve_model_path(None), VOCAB, ENDS)


@lru_cache(4096)
def params_of(ask: Ask) -> SamplingParams:
    """The parameters of a request."""
    return SamplingParams(max_tokens=ask.max_tokens, **dict(ask.options))


class Told(NamedTuple):
    """Return the expected next token."""

    token: int | None
    score: float
    reason: str | None


def answer(prompt: Sequence[int], params: SamplingParams, room: int) -> Iterator[Told]:
    """The tokens of a request that is alone: by the same rules as the executor's, one by one."""
    executor, bits = reference(), 2**64 - 1
    matcher = None
    if params.regex is not None:
        job = compiled().compile(params)
        assert job is not None
        matcher = job.result()
    tokens = list(prompt)
    total = salt_hash(params.cache_salt)
    for at, token in enumerate(tokens):
        total += executor[0][token] * executor[1][at]
    most = room if params.max_tokens is None else max(1, min(room, params.max_tokens))
    for number in range(1, most + 1):
        x = total & bits
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & bits
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & bits
        x ^= x >> 31
        period = SimulatedExecutor.PERIOD
        repeats = x % 4 and len(tokens) >= period
        token = tokens[-period] if repeats else (x >> 8) % SimulatedExecutor.ALPHABET
        if matcher is not None:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in range(VOCAB) if mask >> i & 1]
            token = allowed[x % len(allowed)]
            matcher.consume_token(token)
        ends = (token in ENDS and not params.ignore_eos) or token in params.stop_token_ids
        reason = "stop" if ends else "length" if number == most else None
        score = -float(x % 997)
        yield Told(token, score, reason) if params.max_tokens != 0 else Told(None, score, "length")
        total += executor[0][token] * executor[1][len(tokens)]
        tokens.append(token)


@cache
def reference() -> tuple[list[int], list[int]]:
    """The factors of all tokens and positions, as Python's integers."""
    executor = SimulatedExecutor(
        num_pages=1, page_size=1, max_seq_len=256, max_running_req=1, vocab_size=VOCAB
    )
    return executor.of_token.tolist(), executor.of_position.tolist()


@dataclass
class Live:
    """A request that is owed replies."""

    prompt: list[int]
    params: SamplingParams
    answer: Iterator[Told]
    clamped: bool
    heard: int = 0
    matched: int | None = None  # tokens that it found in the cache at its first admission


class World:
    """A scheduler with all its parts, its clients, and what both should be doing."""

    def __init__(self, script: Script, follows: bool = False) -> None:
        self.script, self.now = script, 0.0
        self.follower = None if script.lag is None or follows else World(script, follows=True)
        self.follows, self.inbox = follows, deque[tuple[list[Msg], list[Op]]]()
        self.notes: list[Op] = []  # what the follower has to do before its next turn
        self.said: list[Reply] = []
        self.pending: list[Msg] = []  # messages on their way to the scheduler
        self.sent: list[Msg] = []
        self.live: dict[int, Live] = {}  # by uid
        self.due: deque[tuple[int, str]] = deque()  # replies that must come next: uid, kind
        self.waiting: deque[int] = deque()  # uids in the order of admission, if that is by arrival
        self.joined: dict[int, int] = {}  # by the step that made them running
        self.masks, self.spent, self.masks_late = random.Random(script.page_size), 0.0, 0
        self.last, self.shared = dict[int, int](), 0  # last step by uid; steps that left some out
        self.half_done: Req | None = None  # whose prompt was half done before this turn
        self.last_prefill = -1  # the last turn that launched a prefill step
        self.audited = self.exiting = False
        self.steps, self.trace = 0, list[Any]()  # turns of the loop; steps of the executor
        self.over: Req | None = None  # the last that was released
        self.peeked: Any = None  # a prefix that was found and not locked
        self.reqs: dict[int, Req] = {}  # that were taken in and are not over, by uid
        self.broken = False  # a request was admitted on pages promised to others
        self.fair = Fairness(script.budget, script.turn) if script.policy == "fair" else None
        self.prefixes = Prefixes(script.page_size, sure=script.cache == "radix")
        self.shadow = Shadow(script.num_pages) if script.shadowed else None
        self.scheduler = self.build()
        prefill, most = self.scheduler.prefill, script.decode_context
        most = most if script.policy == "fair" else 10**9
        self.admission = Admission(self.cache, self.scheduler.decode, prefill.limits, most)
        self.limits = Limits(script.window, script.num_pages * script.page_size, VOCAB, ENDS)

    def build(self) -> Scheduler:
        """The real parts over the simulated executor."""
        s = self.script
        limits = Limits(s.window, s.num_pages * s.page_size, VOCAB, ENDS)
        grammars = copy(compiled())  # no world sees the deferred sample of another one
        self.executor = Executor(
            self, num_pages=s.num_pages, page_size=s.page_size, max_seq_len=s.window,
            max_running_req=s.rows, vocab_size=VOCAB, share_memory=not s.mirrored,
            grammars=grammars if s.grammars else None,
        )  # fmt: skip
        prefixes = RadixCache(s.page_size) if s.cache == "radix" else NaiveCache(s.page_size)
        self.cache = CacheManager(s.num_pages, self.executor.tables, prefixes, self.observe)
        fair = s.policy == "fair"
        decode = SharedDecode(s.reserve, s.decode_context) if fair else DecodeManager(s.reserve)
        prefill = PrefillLimits(s.budget, s.min_shared, max(1, s.budget // 4) if fair else None)
        queue = FairQueue(s.budget, s.turn) if fair else ArrivalOrder()
        manager = (Watched if fair else WatchedDelayed)(self.cache, decode, prefill, queue)
        manager.world = self
        manager.max_tokens, manager.max_requests, manager.long_chunk = s.mixed, 3, s.long_chunk
        self.rest = Rest(manager) if isinstance(manager, DelayedPrefill) else None
        audit = IdleAudit(every=1.0, clock=lambda: self.now)

        def audited(scheduler: Scheduler) -> None:
            self.audited = True
            audit(scheduler)

        kind, drafts = Scheduler, dict[str, Any]()
        if s.drafts:
            kind, drafts = SpeculativeScheduler, {
                "num_speculative_tokens": s.drafts, "max_rows": 8, "proposer": Proposer(self),
            }  # fmt: skip
        return kind(
            self.executor, self.cache, manager, decode, self,
            make_req=lambda msg: make_req(msg, limits, grammars.constrain), make_room=make_room,
            audit=audited, eos_token_ids=ENDS, overlap=s.overlap, interleave=fair,
            emit=self.observe, **drafts,
        )  # fmt: skip

    # -------------------------------------------------------------- the scheduler's two ends

    def recv(self, block: bool) -> list[Msg]:
        """Deliver what is pending; note what must be replied at once. Each turn begins here."""
        self.steps += 1
        self.now += 0.01
        self.half_done = self.scheduler.prefill.chunked_req
        if block:
            waits = self.scheduler.has_work or self.scheduler.in_flight is not None
            assert not waits, "the loop waits for input although it has work"
            assert self.audited, "an idle loop is not audited"
        self.audited = False
        messages, self.pending = self.pending, []
        if self.follows:
            messages, notes = self.inbox.popleft()
            for op in notes:
                self.do(op)
        if self.follower is not None:
            self.follower.inbox.append((over_the_wire(messages), self.notes))
            self.notes = []
        for msg in messages:
            if isinstance(msg, UserMsg):
                self.expect(msg)
            elif isinstance(msg, AbortMsg) and msg.uid in self.live:
                del self.live[msg.uid]
                self.due.append((msg.uid, "abort"))
        return messages

    def expect(self, msg: UserMsg) -> None:
        """Note what a request must be answered."""
        size, total, params = len(msg.input_ids), self.limits.total, msg.sampling_params
        ids = [*msg.input_ids, *(params.allowed_token_ids or ())]
        if msg.uid in self.live or not 0 < size < total or max(ids) >= VOCAB:
            self.due.append((msg.uid, "error"))
            return
        room = total - size
        self.live[msg.uid] = Live(
            msg.input_ids, params, answer(msg.input_ids, params, room),
            clamped=params.max_tokens is not None and params.max_tokens > room,
        )  # fmt: skip

    def send(self, replies: Sequence[Reply]) -> None:
        """Check every reply."""
        self.said += replies
        for reply in replies:
            self.hear(reply)

    def hear(self, reply: Reply) -> None:
        """Check one reply against what it must be."""
        uid = reply.uid
        if self.due:
            kind = "error" if isinstance(reply, ErrorReply) else reply.finish_reason
            assert (uid, kind) == self.due.popleft(), f"another reply was due: {reply}"
            return
        assert not isinstance(reply, ErrorReply), f"nothing was wrong: {reply}"
        live = self.live.get(uid)
        assert live is not None, f"request {uid} hears more after its end: {reply}"
        if self.exiting and reply.finish_reason == "abort":
            del self.live[uid]
            return
        want = next(live.answer)
        live.heard += 1
        got = reply.token, reply.finish_reason, reply.finished
        expected = want.token, want.reason, want.reason is not None
        assert got == expected, f"request {uid}, token {live.heard}: got {got}, not {expected}"
        if live.params.logprobs is not None and want.token is not None:
            assert reply.logprob == want.score, f"request {uid}: log probability of another token"
            tops = [(want.token, want.score)][: live.params.logprobs]
            assert (reply.top_logprobs or []) == tops, f"request {uid}: {reply.top_logprobs}"
        assert (reply.notice is not None) == (live.clamped and live.heard == 1), reply
        assert reply.prompt_tokens == len(live.prompt), reply
        assert reply.cached_tokens == live.matched, f"{reply}: it found {live.matched}"
        if reply.finished:
            del self.live[uid]

    def observe(self, event: events.Event) -> None:
        """Follow the queue; by arrival: retracted requests first, then the others as they came."""
        if self.shadow is not None:
            self.shadow.change_request(event)
        match event:
            case events.RequestAdded(uid=uid):
                self.waiting.append(uid)
                self.reqs[uid] = self.scheduler.reqs[uid]
                if self.fair is not None:
                    self.fair.add(self.reqs[uid])
            case events.RequestRetracted(uid=uid):
                self.check_retracted(uid)
                self.waiting.appendleft(uid)
                self.keep(self.reqs[uid])
                if self.fair is not None:
                    self.fair.resume(self.reqs[uid])
            case events.RequestAdmitted(uid=uid, pages=pages):
                self.check_admitted(self.reqs[uid], len(pages) * self.script.page_size)
                self.waiting.remove(uid)
            case events.RequestReleased(uid=uid):
                if uid in self.waiting:
                    self.waiting.remove(uid)
                else:
                    self.keep(self.reqs[uid])
                self.joined.pop(uid, None)
                self.over = self.reqs.pop(uid)
                if self.fair is not None:
                    self.fair.release(self.over)
            case events.StepLaunched(step=step, uids=uids):
                self.last |= dict.fromkeys(uids, step)
                self.note_joined()
            case events.StepFinished():
                self.note_joined()
            case events.NodeEvicted():
                self.prefixes.sure = False
            case events.SchedulerReset():
                for part in (self.waiting, self.joined, self.reqs, self.prefixes.known):
                    part.clear()
                self.prefixes.sure = self.script.cache == "radix"
                self.over = self.peeked = None
                if self.fair is not None:
                    self.fair = Fairness(self.script.budget, self.script.turn)

    def note_joined(self) -> None:
        """Number the requests that run; one that waited for its last mask has come back."""
        running = self.scheduler.decode.running
        self.joined = {uid: at for uid, at in self.joined.items() if uid in running}
        for place, uid in enumerate(running):
            self.joined.setdefault(uid, 1000 * self.steps + place)

    def keep(self, req: Req) -> None:
        """Keep a finished request's tokens as cached."""
        if self.script.cache == "radix":
            self.prefixes.insert(req, min(req.cached_len, req.host_len))

    def note_step(self, inputs: ForwardInput) -> None:
        """A step was computed: charge it, and remember the prefixes of complete prompts."""
        batch = inputs.batch
        self.trace.append((batch.phase.value, inputs.out_loc.tolist()))
        reqs = list(batch.drafts) if isinstance(batch, VerifyBatch) else batch.reqs
        if self.fair is not None:
            prompts = prompts_of(reqs)
            if prompts:
                self.fair.charge(Phase.PREFILL, prompts)
            self.fair.charge(Phase.DECODE, [req for req in reqs if req not in prompts])
        if batch.phase is Phase.PREFILL and self.script.cache == "radix":
            for req in prompts_of(inputs.sampled):
                again = req.matcher is not None  # its last token, while it waits for a mask
                self.prefixes.insert(req, min(req.device_len, req.host_len - again))

    # -------------------------------------------------------------- checks

    def check_retracted(self, uid: int) -> None:
        """The last resort, or for a client without a row; and whose turn it is."""
        scheduler, req = self.scheduler, self.reqs[uid]
        assert scheduler.in_flight is None, "retraction although a step may end a request"
        chunked, running = scheduler.prefill.chunked_req, [*scheduler.decode.running.values()]
        reqs = sorted([*running, req], key=lambda req: self.joined.get(req.uid, 1 << 60))
        reqs += [] if chunked is None else [chunked]
        self.joined.pop(uid, None)
        short = self.script.reserve is not None or self.broken  # otherwise all pages are promised
        if self.fair is None:
            assert short, "retraction although all is promised"
            assert req is reqs[-1], f"request {uid} is not the youngest"
            return
        first = self.fair.first()
        allowed = [self.fair.next_retracted(reqs)] if short else []
        allowed += filter(None, [self.fair.next_displaced(first, reqs)])
        assert req in allowed, f"request {uid} is retracted, not one of {allowed}"

    def check_admitted(self, req: Req, matched: int) -> None:
        """Check whose turn it was, and what it found in the cache."""
        first = self.waiting[0]
        if self.fair is None:
            assert req.uid == first, f"request {req.uid} overtakes {first}"
        if self.fair is not None:
            chunked = self.scheduler.prefill.chunked_req
            first_req = self.fair.first()
            assert first_req is req, f"{req} overtakes {first_req}"
            before = chunked is None or chunked.extend_len > 0 or not self.fair.chunk_first(chunked)
            assert before, f"{req} overtakes {chunked}, whose prompt is half done"
            self.fair.remove(req)
        if self.prefixes.sure or self.script.cache == "naive":
            found = self.prefixes.match(req)
            assert matched == found, f"{req}: {matched} tokens found in the cache, not {found}"
        live = self.live[req.uid]
        if live.matched is None:
            live.matched = matched

    def admitted(self, reqs: Iterable[Req]) -> list[Req]:
        """Those of the next step's requests that do not run yet."""
        running = self.scheduler.decode.running
        return [req for req in prompts_of(reqs) if req.uid not in running]

    def watch(self, schedule: Callable[[], Batch | None]) -> Batch | None:
        """Choose a prefill step; check who is in it, with how much, and who is not."""
        manager = self.scheduler.prefill
        chunked = manager.chunked_req
        rests = self.rest is not None and self.rest.rests()
        first = self.fair is not None and chunked is not None and self.fair.chunk_first(chunked)
        self.admission.limits = self.limits_beside_running(chunked)
        beside = self.fair is not None and self.scheduler.decode.running
        self.admission.chunk = self.script.long_chunk if beside else self.script.budget
        yields = self.yields()
        step = schedule()
        self.broken |= step is not None and bool(yields)
        if rests:
            assert step is None, "a prefill step, although a group is about to form"
            return None
        if chunked is not None and (first or self.fair is None):
            assert step is not None and chunked in step.reqs, f"{chunked} does not go on"
        batch = None
        if step is not None:
            running = list(self.scheduler.decode.running.values())
            batch = Batch(self.admitted(step.reqs), step.phase)
            assert step.reqs in (batch.reqs, batch.reqs + running), "some of the running requests"
            if len(step.reqs) > len(batch.reqs):
                tokens = sum(req.extend_len for req in step.reqs)
                assert tokens <= self.script.mixed and len(step.reqs) <= 3, f"{tokens} mixed tokens"
                assert not any(req.scores_prompt for req in step.reqs), "a mixed step is scored"
                context = sum(req.device_len for req in step.reqs)
                assert context <= self.script.context, f"{context} tokens of context"
            if self.rest is not None:
                self.rest.launched()
            assert self.admission.lengths_fit(batch), f"{batch.reqs}: too much or too little"
            if self.script.min_shared:
                self.check_twins(batch, chunked)
            led = len(batch.reqs) > 1 and batch.reqs[0] is chunked
            assert first or not led or self.fair is None, f"{chunked} was not the first"
        waits = self.reqs[self.waiting[0]] if self.waiting else None
        if self.fair is not None:
            waits = self.fair.first()
        whole = self.fair is not None and chunked is not None and not first  # all of it, or none
        sure = self.prefixes.sure or self.script.cache == "naive"
        if waits is not None and sure and not whole:
            matched = self.prefixes.match(waits)
            alone = batch is None or batch.reqs == [chunked]
            why = self.admission.refused(
                waits, matched, batch, manager.chunked_req, yields if alone else ()
            )
            assert why, f"{waits} is not admitted, although there is room"
        return step

    def yields(self) -> list[Req]:
        """Return the running requests that the first waiting one may displace."""
        running = list(self.scheduler.decode.running.values())
        return [] if self.fair is None else self.fair.displaced(self.fair.first(), running)

    def limits_beside_running(self, chunked: Req | None) -> PrefillLimits:
        """Return the limits of the next step: a long prompt gets little beside running requests."""
        limits, most = self.scheduler.prefill.limits, self.script.long_chunk
        first = chunked or (self.fair.first() if self.fair is not None else None)
        if first is None or self.fair is None or not self.scheduler.decode.running:
            return limits
        long = first.prefill_len - first.cached_len > most
        return replace(limits, max_extend_tokens=min(self.script.budget, most)) if long else limits

    def check_twins(self, batch: Batch, chunked: Req | None) -> None:
        """Check that no request computes what another request of the same step computes."""
        for place, req in enumerate(batch.reqs):
            if req is not chunked:
                twin = self.admission.waits_for_another(req, req.cached_len, batch.reqs[:place])
                assert not twin, f"{req} computes the same beginning as another one"

    def check_batch(self, batch: Batch) -> None:
        """Check members and order of a step."""
        uids = [req.uid for req in batch.reqs]
        assert set(uids) <= self.live.keys(), f"a step for requests that are over: {uids}"
        fair = self.script.policy == "fair"
        if batch.phase is Phase.PREFILL:
            assert len(set(uids)) == len(uids), uids
            tokens = sum(req.extend_len for req in self.admitted(batch.reqs))
            assert tokens <= self.script.budget, f"{tokens} tokens in a step"
            assert sum(req.is_chunked for req in batch.reqs) <= 1, "two prompts are cut"
            half_done = None if fair else self.half_done
            over = half_done is None or self.reqs.get(half_done.uid) is not half_done
            first = over or batch.reqs[0] is half_done
            assert first, f"{uids}, but the prompt of {half_done} is half done"
            twice = fair and self.last_prefill == self.steps - 1
            assert not (twice and self.scheduler.decode.running), "two prefill steps in a row"
            self.last_prefill = self.steps
        else:
            open_step = isinstance(batch, VerifyBatch) and self.scheduler.in_flight is not None
            assert not open_step, "drafts for texts whose last token is not known"
            assert len(uids) <= max(8, self.script.rows), "too many drafts"
            turns = [self.joined[uid] for uid in uids]
            assert turns == sorted(turns), f"{uids} are not in the order of joining"
            self.check_turns(list(batch.drafts if isinstance(batch, VerifyBatch) else batch.reqs))

    def check_turns(self, reqs: list[Req]) -> None:
        """Check that a decode step has all requests, or up to its bound those whose turn it is."""
        running, most = [*self.scheduler.decode.running.values()], self.script.decode_context
        if self.fair is None or sum(req.device_len for req in running) <= most:
            assert reqs == running, f"only {reqs}"
            return
        self.shared += len(reqs) < len(running)
        waits = sorted(running, key=lambda req: self.last[req.uid])  # the longest time first

        def context(req: Req) -> int:
            """Tokens of its client's requests up to this one, none for the first."""
            own = [other for other in waits if other.client == req.client]
            upto = own[: own.index(req) + 1]
            return sum(other.device_len for other in upto) if len(upto) > 1 else 0

        members, left = [waits[0]], most
        for req in sorted(waits[1:], key=context):
            if req.device_len <= left:
                members.append(req)
                left -= req.device_len
        assert {*reqs} == {*members}, f"{reqs} are in the step, not {members}"

    def check(self) -> None:
        """Every page has one owner, every request one place, and nothing else is left."""
        scheduler, queue = self.scheduler, self.scheduler.prefill.waiting
        assert not self.due, f"no reply came: {self.due}"
        reqs = scheduler.reqs
        assert reqs.keys() == self.live.keys(), f"{list(reqs)} live, not {list(self.live)}"
        holders = [req for req in reqs.values() if req.table_idx >= 0]
        check_integrity(self.cache, holders)
        if self.shadow is not None:
            self.shadow.compare(self.cache, holders)
        held = self.script.rows - self.executor.tables.free_rows
        assert held == len(holders), f"{held} rows are taken, {len(holders)} requests have one"
        chunked, running = scheduler.prefill.chunked_req, scheduler.decode.running
        flight = scheduler.in_flight.inputs.sampled if scheduler.in_flight is not None else ()
        waits = list(queue)
        if self.fair is not None and isinstance(queue, FairQueue):
            served = {name: share.served for name, share in queue._shares.items()}
            assert served == self.fair.served, f"clients are charged {served}"
        for req in reqs.values():
            places = (req in waits) + (req is chunked) + (running.get(req.uid) is req)
            waits_for_mask = req.matcher is not None and req.matcher.waited > 0
            self.masks_late += waits_for_mask
            last = places == 0 and req in flight and (not req.can_decode or waits_for_mask)
            assert places == 1 or last, f"{req} is in {places} places"
            assert (req in waits) == (req.table_idx < 0), f"{req}: a row while it waits"
            if running.get(req.uid) is req:
                assert req.cache_handle is not None, f"{req} is running without a prefix"
                own = req.cache_handle.cached_len
                assert own <= req.prefill_len, f"{req}: {own} tokens cached, some of its answer"
        strangers = {*waits, *running.values(), *([chunked] if chunked else [])} - {*reqs.values()}
        assert not strangers, f"{strangers} are over, but not forgotten"
        if not scheduler.has_work:
            self.check_idle()

    def check_idle(self) -> None:
        """Check that nothing is kept for any request."""
        scheduler = self.scheduler
        parts = [scheduler.decode, scheduler.prefill.waiting, getattr(scheduler, "proposer", None)]
        for part in parts:
            for name, value in vars(part).items() if hasattr(part, "__dict__") else ():
                assert not isinstance(value, dict | deque | list) or not value, (name, value)
        assert not scheduler.prefill.waiting and not self.cache.allocated_len
        dummies = self.executor.tables.page_table[self.script.rows] // self.script.page_size
        assert (dummies == self.script.num_pages).all(), "the dummy row names pages of requests"
        whole = self.script.num_pages * self.script.page_size
        assert self.cache.available_tokens == whole, f"{self.cache.available_tokens} of {whole}"

    # -------------------------------------------------------------- what happens

    def turn(self) -> None:
        """One step of the loop; whatever it raises on demand is answered by a reset."""
        scheduler = self.scheduler
        try:
            (scheduler.step_overlap if self.script.overlap else scheduler.step)(block=True)
        except Fault:
            self.recover()
        if self.executor.grammars is not None:
            assert self.executor.grammars.waiting is None, "the device waits for a deferred sample"
        self.check()
        self.follow(self.script.lag or 0)

    def follow(self, lag: int) -> None:
        """Let the other rank take the turns by which it is further behind."""
        while self.follower is not None and len(self.follower.inbox) > lag:
            self.follower.turn()

    def check_ranks(self) -> None:
        """Both ranks did the same, and one alone was heard."""
        self.follow(0)
        if self.follower is not None:
            assert self.trace == self.follower.trace, "the ranks launched different steps"
            assert self.said == self.follower.said, "the ranks gave different replies"

    def recover(self) -> None:
        """Reset; a reset that fails is done again."""
        try:
            self.scheduler.reset()
        except Fault:
            self.scheduler.reset()
        self.live.clear()
        self.due.clear()
        if self.executor.grammars is not None:
            assert self.executor.grammars.waiting is None, "a deferred sample survived"
        assert not self.scheduler.has_work, "a request or a step survived the reset"

    def leave(self) -> None:
        """Run the loop until it has taken its leave."""
        self.follow(0)
        self.exiting = True
        if not self.follows:
            self.pending.append(ExitMsg())
        try:
            self.scheduler.run()
        except Fault:
            self.recover()
        assert not self.live, f"no last reply at the exit: {list(self.live)}"
        assert self.scheduler.in_flight is None, "the last step's tokens were given to nobody"
        self.check()
        self.exiting = self.scheduler.exiting = False
        if self.follower is not None:
            self.follower.leave()

    def misuse(self, what: str) -> None:
        """Call a part as no caller may."""
        cache, tables, pages = self.cache, self.executor.tables, self.cache.allocator
        free = pages.free_set()
        taken = np.setdiff1d(np.arange(self.script.num_pages), free)
        rows = set(range(self.script.rows)) - {r.table_idx for r in self.scheduler.reqs.values()}
        call: Callable[[], Any] | None = None
        match what:
            case "a free page" if len(free):
                call = partial(pages.free, free[:1])
            case "a page twice" if len(taken):
                call = partial(pages.free, taken[[0, 0]])
            case "no page":
                call = partial(pages.free, np.array([-1]))
            case "too many pages":
                call = partial(pages.allocate, len(free) + 1)
            case "a free row" if rows:
                call = partial(tables.free, min(rows))
            case "past the end of a row":
                call = partial(tables.write, 0, tables.width, np.zeros(1, np.int32))
            case "a request that is over" if self.over is not None:
                call = partial(cache.cache_req, self.over, finished=True)
            case "a lost prefix" if self.script.cache == "radix":
                self.lock_what_was_seen()
            case "kept pages" if len(free) > 1:
                kept = pages.allocate(2)
                values = kept.tolist()
                pages.free(kept[::-1].copy())
                assert kept.tolist() == values, "pages change under their owner"
                pages.allocate(2)
                pages.free(np.array(values))
        if call is not None:
            try:
                call()
            except (ValueError, RuntimeError):
                return
            raise AssertionError(f"nobody minds: {what}")

    def lock_what_was_seen(self) -> None:
        """Lock prefixes that were found now and some turns ago; one that was evicted is refused."""
        cache, tree, turn = self.cache, self.cache.prefix_cache, len(self.trace)
        text = np.array(Ask(0, 1 + turn % 4, 40).prompt, np.int32)
        seen = [tree.match_prefix(text), *([self.peeked] if self.peeked is not None else [])]
        if not self.prefixes.sure and tree.evictable_tokens:  # else a check of each match is lost
            asked = 1 + turn % tree.evictable_tokens
            slots = tree.evict(asked)
            assert 0 <= len(slots) - asked < cache.page_size, f"{len(slots)} slots, not {asked}"
            cache.free_slots(slots)
        for self.peeked in seen:
            try:
                cache.lock(self.peeked)
            except RuntimeError:
                self.admit_with_a_lost_prefix()
            else:
                slots = self.peeked.slots()
                assert len(slots) == self.peeked.cached_len, "a prefix lost its end"
                cache.unlock(self.peeked)
        self.peeked = tree.match_prefix(text)

    def admit_with_a_lost_prefix(self) -> None:
        """Ask for a row with a prefix that was evicted: no row may be taken."""
        tables = self.executor.tables
        free = tables.free_rows
        ids = np.array(Ask(0, 1, 8).prompt, np.int32)
        req = Req(uid=0, input_ids=ids, sampling_params=SamplingParams(), max_new_tokens=1)
        with suppress(RuntimeError):
            self.cache.admit(req, self.peeked)
        assert tables.free_rows == free, "a row for a prefix that is lost"

    def put(self, msg: Msg) -> None:
        """A message on its way."""
        self.pending.append(msg)
        self.sent.append(msg)

    def do(self, op: Op) -> None:
        """Let one thing happen."""
        match op:
            case Ask():
                self.put(UserMsg(op.uid, op.prompt, params_of(op), op.client))
            case Abort(uid=uid):
                self.put(AbortMsg(uid))
            case Turn(turns=turns):
                for _ in range(turns):
                    self.turn()
            case Again(back=back):
                self.put(self.sent[-1 - back]) if len(self.sent) > back else None
            case Swap(seed=seed):
                random.Random(seed).shuffle(self.pending)
            case Fail(call=call):
                self.executor.failing[call] = op
                self.notes.append(op)
            case Misuse(what=what):
                self.misuse(what)
                self.notes.append(op)
            case Jump(seconds=seconds):
                self.now += seconds
            case Exit():
                self.leave()

    def play(self) -> None:
        """The whole script, then turns until nothing is left to do."""
        clock = SimpleNamespace(thread_time=lambda: 0.0, monotonic=self.monotonic)
        with (
            mock.patch.object(mixed, "MAX_CONTEXT", self.script.context),
            mock.patch.object(grammar, "time", clock),
        ):
            self.play_to_the_end()

    def monotonic(self) -> float:
        """The seconds that masks have taken, whatever else the machine does."""
        if self.script.slow_masks and self.masks.random() < 0.3:
            self.spent += grammar.MASKS + 0.01
        return self.spent

    def play_to_the_end(self) -> None:
        for op in self.script.ops:
            self.do(op)
        self.follow(0)
        for world in (self, self.follower):
            if world is not None:
                world.executor.failing.clear()
                world.notes = [op for op in world.notes if not isinstance(op, Fail)]
        work = sum(20 + len(live.prompt) + 60 for live in self.live.values())
        limit = 100 + 10 * work + 200 * len(self.pending)  # displaced ones begin again
        while self.pending or self.scheduler.has_work:
            self.turn()
            limit -= 1
            assert limit > 0, f"never idle: {list(self.live)} get nothing"
        self.turn()
        self.check_ranks()


def play(script: Script) -> World:
    """Run a script; an exception if anything is wrong."""
    world = World(script)
    world.play()
    return world


def failure(script: Script) -> str:
    """Return the error of a script without its numbers; empty if there is none."""
    try:
        play(script)
    except Exception as error:
        return re.sub(r"[\d, \[\]]+", " ", f"{type(error).__name__}: {error}")[:40]
    return ""


PLAIN: dict[str, Any] = {
    "mirrored": False, "grammars": False, "drafts": 0, "min_shared": 0, "policy": "fcfs",
    "cache": "naive", "reserve": None, "overlap": False, "shadowed": False, "lag": None,
}  # fmt: skip


def simpler(script: Script) -> Iterator[Script]:
    """Scripts that are a little simpler, the largest steps first."""
    ops, count = script.ops, len(script.ops)
    size = count
    while size > 0:
        for start in range(0, count, size):
            yield replace(script, ops=ops[:start] + ops[start + size :])
        size //= 2
    for name, value in PLAIN.items():
        if getattr(script, name) != value:
            yield replace(script, **{name: value})
    for index, op in enumerate(ops):
        for other in simpler_op(op):
            yield replace(script, ops=(*ops[:index], other, *ops[index + 1 :]))


def simpler_op(op: Op) -> Iterator[Op]:
    """The same event with less in it."""
    if isinstance(op, Turn) and op.turns > 1:
        yield from (Turn(1), Turn(op.turns - 1))
    if isinstance(op, Fail) and op.skip > 0:
        yield op._replace(skip=op.skip - 1)
    if not isinstance(op, Ask):
        return
    if op.strange:
        yield op._replace(strange=False)
    if op.options:
        yield op._replace(options=())
        yield from (op._replace(options=(item,)) for item in op.options if len(op.options) > 1)
    smaller: dict[str, tuple[Any, ...]] = {
        "client": ("",), "tail": (0, op.tail - 1), "text": (1,),
        "length": (1, op.length // 2, op.length - 1),
        "max_tokens": (1, (op.max_tokens or 40) // 2, (op.max_tokens or 40) - 1),
    }  # fmt: skip
    for name, values in smaller.items():
        old = getattr(op, name)
        for value in values:
            if value != old and (isinstance(value, str) or 0 <= value < (old or 99)):
                yield op._replace(**{name: value})


def shrink(script: Script, tries: int = 3000) -> Script:
    """A script that fails with the same kind of error, and of which nothing can be left out."""
    kind = failure(script)
    found = True
    while found and tries > 0:
        found = False
        for other in simpler(script):
            tries -= 1
            if tries <= 0:
                break
            if failure(other) == kind:
                script, found = other, True
                break
    return script


def report(seed: int) -> str:
    """Report a failing seed: its shortest script, the error, the command to reproduce it."""
    script = shrink(make_script(seed))
    try:
        play(script)
        trace = "nothing goes wrong any more\n"
    except Exception:
        trace = traceback.format_exc(limit=-3)
    return f"{script}\n{trace}\nreproduce: python -m tests.adversary {seed}"


def search(seeds: Iterator[int], steps: int) -> tuple[int, int | None]:
    """Play seeds up to a number of steps or the first failure: steps, and the failing seed."""
    taken = 0
    for seed in seeds:
        script = make_script(seed)
        world = World(script)
        try:
            world.play()
        except Exception:
            return taken + world.steps, seed
        taken += world.steps
        if taken >= steps:
            break
    return taken, None


def fresh_seeds(first: int) -> Iterator[int]:
    """Seeds from one on."""
    while True:
        yield first
        first += 1


def main(args: Sequence[str] | None = None) -> int:
    """The command line: one seed, or many."""
    parser = argparse.ArgumentParser("python -m tests.adversary")
    parser.add_argument("seed", type=int, nargs="?", help="play this one; default: fresh ones")
    parser.add_argument("--steps", type=int, default=100_000, help="of the scheduler's loop")
    given = parser.parse_args(args)
    if given.seed is not None and not failure(make_script(given.seed)):
        print(f"seed {given.seed} passes")
        return 0
    failed = given.seed
    if failed is None:
        first = secrets.randbelow(10**9)
        start = time.process_time()
        print(f"seeds from {first} on", flush=True)
        taken, failed = search(fresh_seeds(first), given.steps)
        seconds = time.process_time() - start
        print(f"{taken} steps in {seconds:.1f} s of CPU: {60 * taken / seconds:,.0f} a minute")
    if failed is not None:
        print(report(failed))
    return failed is not None


if __name__ == "__main__":
    sys.exit(main())
