"""Answers that match a grammar: follow the answer, mask the tokens that must not come next.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams, masks_of
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.forms import compile_grammar, load_tokens
from minisgl.scheduler.messages import AbortMsg, InvalidRequestError, Msg, UserMsg
from minisgl.scheduler.side import SLOTS, asked_for
from minisgl.tokenizer import THINK


class Matcher:
    """Follows one answer through its grammar; depends on the answer and the prompt's end alone."""

    def __init__(self, start: LLMatcher, field: str, job: object = None) -> None:
        """Copy a matcher; while the copy exists, `job` does, too."""
        self.ll, self.field, self.job = start.deep_copy(), field, job
        self.seen = 0  # tokens of the answer that it has accepted

    @property
    def error(self) -> str:
        """The reason why the answer cannot continue, or an empty string."""
        return f"{self.field}: {self.ll.get_error():.500}" if self.ll.is_error() else ""

    def follow(self, output_ids: IntArray) -> None:
        """Accept the tokens that were added since the last call."""
        for token in output_ids[self.seen :].tolist():
            self.ll.consume_token(token)
        self.seen = len(output_ids)


class DeferredOutput(ForwardOutput):
    """A step whose sampling waits for the previous step; `wait` samples if it is still pending."""

    def __init__(self, sample: Callable[[], ForwardOutput]) -> None:
        self._sample = sample
        self.output: ForwardOutput | None = None

    def sample(self) -> ForwardOutput:
        """Sample, once."""
        if self.output is None:
            self.output = self._sample()
        return self.output

    def wait(self) -> SampledTokens:
        return self.sample().wait()


Asked = tuple[str, str, str | None]  # field, text, salt


class Grammars:
    """Compiles the grammars of one model in threads, caches the last ones, fills masks."""

    def __init__(self, load: Callable[[], LLTokenizer | str], keep: int = 2**18) -> None:
        """Start a thread in which `load` returns a tokenizer, or the reason why there is none.

        `keep` bounds the characters of cached grammars; one takes up to 400 bytes of memory.
        """
        self.keep, self.pool = keep, ThreadPoolExecutor(SLOTS, "grammars")
        self.tokenizer = self.pool.submit(load)
        self.waiting: DeferredOutput | None = None  # the last step, if it is not sampled yet
        self.executor = LLExecutor(1)  # one call for a batch, in one thread
        self.jobs = WeakValueDictionary[Asked, Future[LLMatcher]]()  # cached or in use
        self.cached: dict[Asked, Future[LLMatcher]] = {}  # the one used last at the end

    def compile(self, field: str, text: str, salt: str | None = None) -> Future[LLMatcher]:
        """Return the job of a grammar; start it unless it is cached or in use."""
        asked = field, text, salt
        job = self.jobs.get(asked)
        if job is None:
            job = self.pool.submit(lambda: compile_grammar(self.tokenizer.result(), field, text))
            self.jobs[asked] = job
        self.cached.pop(asked, None)
        self.cached[asked] = job
        while sum(max(1024, len(text)) for _, text, _ in self.cached) > self.keep:
            del self.cached[next(iter(self.cached))]
        return job

    def start(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Compile a request's grammar, unless it is cached; return None if it has no grammar."""
        asked = asked_for(params)
        return None if asked is None else self.compile(*asked, params.cache_salt)

    def constrain(self, req: Req, vocab_size: int) -> None:
        """Set the matcher and mask of a constrained request, or raise `InvalidRequestError`."""
        asked = asked_for(req.sampling_params)
        assert asked is not None
        job = self.compile(*asked, req.sampling_params.cache_salt)
        if isinstance(error := job.exception(), InvalidRequestError):
            raise InvalidRequestError(error.message, param=error.param)
        req.matcher = Matcher(job.result(), asked[0], job)
        if asked[0] == "structural_tag":
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
        todo = []
        for index, row in enumerate(rows):
            req = fi.sampled[row]
            if isinstance(req.matcher, Matcher):
                req.matcher.follow(req.output_ids)
                todo.append((req.matcher.ll, index))
        if todo:  # a tokenizer may have more tokens than the model has logits
            tokenizer, words = self.tokenizer.result(), masks.shape[1]
            assert not isinstance(tokenizer, str)
            wide = np.full((len(masks), max(words, -(-tokenizer.vocab_size // 32))), -1, np.int32)
            fill_next_token_bitmask_par(self.executor, todo, wide)
            indices = [index for _, index in todo]
            masks[indices] = wide[indices, :words]

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


def load_grammars(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars:
    """Create a model folder's grammars; without a tokenizer, each is rejected with a reason."""
    return Grammars(partial(load_tokens, folder, vocab_size, eos_token_ids))


class CompileMsg(msgspec.Struct, tag=True):
    """Message of rank 0 to the others: a request with these parameters will come."""

    uid: int
    sampling_params: SamplingParams


class GrammarQueue:
    """Requests that wait for their grammars.

    `start` is that of `Grammars`, once they exist; `announce` if there are other ranks.
    """

    def __init__(self, announce: bool = False) -> None:
        self.announce = announce
        self.start: Callable[[SamplingParams], Future[LLMatcher] | None] = lambda params: None
        self.held: dict[int, tuple[UserMsg, Future[LLMatcher]]] = {}  # by uid
        self.ready: list[Future[LLMatcher]] = []  # of the messages just returned; else forgotten

    def pass_on(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages that may proceed, in order, and those whose wait is over."""
        passed, jobs = list[Any](), list[Future[LLMatcher]]()
        for msg in messages:
            job = self.start(msg.sampling_params) if isinstance(msg, UserMsg) else None
            jobs += [] if job is None else [job]
            if job is None or job.done():
                passed.append(msg)
            else:
                self.held[msg.uid] = msg, job
                passed += [CompileMsg(msg.uid, msg.sampling_params)] if self.announce else []
            if isinstance(msg, AbortMsg):
                self.held.pop(msg.uid, None)
        done = [self.held.pop(uid) for uid in [*self.held] if self.held[uid][1].done()]
        self.ready = jobs + [job for _, job in done]
        return passed + [msg for msg, _ in done]


class CompilingChannel:
    """The channel of a rank: it compiles announced grammars and returns other messages."""

    def __init__(self, channel: Channel, grammars: Grammars) -> None:
        self.channel, self.grammars = channel, grammars
        self.send = channel.send
        self.jobs: dict[int, Future[LLMatcher] | None] = {}  # of announced requests, by uid
        self.ready: list[Future[LLMatcher] | None] = []  # of the messages just returned

    def recv(self, block: bool) -> list[Msg]:
        messages: Sequence[Any] = self.channel.recv(block)
        came = [msg for msg in messages if not isinstance(msg, CompileMsg)]
        users = (msg for msg in came if isinstance(msg, UserMsg))
        cached = [self.grammars.start(msg.sampling_params) for msg in users]
        for msg in messages:  # afterwards: new grammars may take the place of cached ones
            if isinstance(msg, CompileMsg):
                self.jobs[msg.uid] = self.grammars.start(msg.sampling_params)
        self.ready = cached + [self.jobs.pop(getattr(msg, "uid", -1), None) for msg in came]
        return came
