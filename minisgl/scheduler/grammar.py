"""Answers that match a grammar: follow the answer, mask the tokens that must not come next.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams, masks_of
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.parallel.comm import Comm, SingleRank
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.forms import compile_grammar, load_tokens
from minisgl.scheduler.messages import InvalidRequestError, Msg, UserMsg
from minisgl.scheduler.side import SLOTS, asked_for
from minisgl.tokenizer import THINK

MASK, MASKS, SLOWER = 0.001, 0.02, 2.0  # seconds: a usual mask, all of a step, too slow
LATE, TURNS = 0.004, 16  # seconds: a client so late comes after others, for so many steps


class Matcher:
    """Follows one answer through its grammar; depends on the answer and the prompt's end alone."""

    def __init__(self, start: Any, field: str, job: object = None) -> None:
        """Take an `LLMatcher` of one answer, None except on rank 0; its `job` lives as long."""
        self.ll, self.field, self.job = start, field, job
        self.seen, self.waited, self.why = 0, 0, ""  # tokens; steps without a mask; the error
        self.slower = LATE  # seconds that its masks took longer than `MASK` each; new: unknown

    @property
    def error(self) -> str:
        """The reason why the answer cannot continue, or an empty string."""
        if not self.why and self.ll and self.ll.is_error():
            self.why = f"{self.field}: {self.ll.get_error():.500}"
        return self.why

    def follow(self, output_ids: Sequence[int]) -> None:
        """Accept the tokens that were added since the last call."""
        for token in output_ids[self.seen :]:
            self.ll.consume_token(token)
        self.seen = len(output_ids)


class DeferredOutput(ForwardOutput):
    """A step whose sampling waits for the previous step; `wait` samples if it is still pending."""

    def __init__(self, sample: Callable[[], ForwardOutput]) -> None:
        self.sample = cache(sample)  # once

    def wait(self) -> SampledTokens:
        return self.sample().wait()


class Grammars:
    """Compiles the grammars of one model in threads, each for one request, and fills masks."""

    def __init__(self, load: Callable[[], LLTokenizer | str], comm: Comm | None = None) -> None:
        """Start a thread in which rank 0 loads a tokenizer, or the reason why there is none."""
        self.pool, self.comm = ThreadPoolExecutor(SLOTS, "grammars"), comm or SingleRank()
        self.tokenizer = self.pool.submit(load if self.comm.rank == 0 else str)
        self.waiting: DeferredOutput | None = None  # the last step, if it is not sampled yet
        self.parts = max(1, min(SLOTS, (os.cpu_count() or 1) // 4))  # others have work, too
        self.map = map if self.parts == 1 else ThreadPoolExecutor(self.parts, "masks").map
        self.jobs = WeakValueDictionary[int, Future[LLMatcher]]()  # of requests to come, by uid

    def compile(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Start to compile a grammar; return None if there is none, or on another rank."""
        if (asked := asked_for(params)) is None or self.comm.rank > 0:
            return None
        return self.pool.submit(lambda: compile_grammar(self.tokenizer.result(), *asked))

    def start(self, uid: int, params: SamplingParams) -> Future[LLMatcher] | None:
        """Start the job of a request that will come; the caller keeps the job until then."""
        if (job := self.compile(params)) is not None:
            self.jobs[uid] = job
        return job

    def constrain(self, req: Req, vocab_size: int) -> None:
        """Set the matcher and mask of a constrained request, or raise `InvalidRequestError`."""
        asked = asked_for(req.sampling_params)
        assert asked is not None
        job = self.jobs.pop(req.uid, None) or self.compile(req.sampling_params)
        error = job.exception() if job is not None else None
        why = self.comm.broadcast_object(None if error is None else str(error), kind=str | None)
        if why is not None:
            raise InvalidRequestError(why, param=asked[0])
        req.matcher = Matcher(job and job.result(), asked[0], job)
        if job and asked[0] == "structural_tag":
            self.begin(req.matcher, req.input_ids)
        if not isinstance(req.logits_params, LogitsParams):
            req.logits_params = LogitsParams()
        req.logits_params.mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def begin(self, matcher: Matcher, prompt: IntArray) -> None:
        """Accept the `<think>` at the end of a prompt, if the grammar begins with it too."""
        tokenizer = self.tokenizer.result()
        assert not isinstance(tokenizer, str)
        for length in range(1, 9):  # tokens of a marker that is not a special token
            tail = prompt[-length:].tolist()
            if tokenizer.decode_str(tail).strip() == THINK:
                if matcher.ll.validate_tokens(tail) == len(tail):
                    matcher.ll.consume_tokens(tail)
                return

    def fill_masks(self, fi: ForwardInput) -> None:
        """Write the masks of a step: the tokens allowed next for each constrained request."""
        assert fi.sampling is not None
        rows, masks = masks_of(fi.sampling.processing)
        reqs = [(index, fi.sampled[row]) for index, row in enumerate(rows)]
        todo = [(i, req, req.matcher) for i, req in reqs if isinstance(req.matcher, Matcher)]
        if self.comm.rank == 0:
            tokenizer = self.tokenizer.result()
            assert not isinstance(
                tokenizer, str
            )  # it may have more tokens than the model has logits
            n, words = self.parts, max(masks.shape[1], -(-tokenizer.vocab_size // 32))
            wide = np.pad(masks, ((0, 0), (0, words - masks.shape[1])), constant_values=-1)
            slow = {
                t[1].client: t[2].slower // LATE for t in sorted(todo, key=lambda t: t[2].slower)
            }
            order = sorted(
                todo, key=lambda t: (slow[t[1].client] - t[2].waited // TURNS, -t[2].waited)
            )
            list(self.map(partial(fill_some, wide), [order[i::n] for i in range(n)]))
            masks[:] = wide[:, : masks.shape[1]]
        if self.comm.size > 1:
            mine = [(matcher.error, matcher.waited) for *_, matcher in todo], masks.tobytes()
            states, found = self.comm.broadcast_object(
                mine, kind=tuple[list[tuple[str, int]], bytes]
            )
            masks[:] = np.frombuffer(found, np.int32).reshape(masks.shape)
            for (*_, matcher), state in zip(todo, states):
                matcher.why, matcher.waited = state
        for req in [req for _, req, matcher in todo if matcher.waited]:  # its last token once more
            req.cached_len, req.device_len = req.cached_len - 1, req.device_len - 1

    def defer(self, fi: ForwardInput, sample: Callable[[], ForwardOutput]) -> ForwardOutput:
        """Hold back a sampling that needs masks; do any other at once."""
        if all(req.matcher is None for req in fi.sampled):
            return sample()

        def masked() -> ForwardOutput:
            self.waiting = None
            self.fill_masks(fi)
            return sample()

        self.waiting = DeferredOutput(masked)
        return self.waiting

    def sample(self) -> None:
        """Fill the masks of the deferred step, if there is one, and sample it."""
        if self.waiting is not None:
            self.waiting.sample()

    def reset(self) -> None:
        """Drop the deferred step: its requests are gone."""
        self.waiting = None


def load_grammars(
    folder: Path, vocab_size: int, eos_token_ids: Collection[int], comm: Comm | None = None
) -> Grammars:
    """Create a model folder's grammars; without a tokenizer, each is rejected with a reason."""
    return Grammars(partial(load_tokens, folder, vocab_size, eos_token_ids), comm)


class CompilingChannel:
    """The channel of an `LLM`: compiles the grammars of all messages at the same time."""

    def __init__(self, channel: Channel, grammars: Grammars) -> None:
        self.channel, self.grammars, self.send = channel, grammars, channel.send
        self.ready: list[Future[LLMatcher] | None] = []  # of the messages just returned

    def recv(self, block: bool) -> list[Msg]:
        messages = self.channel.recv(block)
        users = [msg for msg in messages if isinstance(msg, UserMsg)]
        self.ready = [self.grammars.start(msg.uid, msg.sampling_params) for msg in users]
        return messages


def fill_some(masks: IntArray, todo: list[tuple[int, Req, Matcher]]) -> None:
    """Write masks while the step has time for them; the answers beyond that wait."""
    begin = time.monotonic()
    for index, req, matcher in todo:
        start, taken = time.thread_time(), time.monotonic() - begin
        matcher.waited = 0 if matcher.why or taken <= MASKS else matcher.waited + 1
        if not matcher.why and not matcher.waited:
            matcher.follow(req.output_ids)
            fill_next_token_bitmask(matcher.ll, masks, index)
            matcher.slower = max(0.0, matcher.slower + time.thread_time() - start - MASK)
        if req.client and matcher.slower > SLOWER:  # an `LLM` has no clients
            matcher.why = f"{matcher.field}: its masks take {SLOWER:g} s too long; simplify it"
