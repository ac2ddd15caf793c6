"""A request as three integers, its sampling parameters, and the batch of one step.

Generated from notebooks/01_requests.ipynb: edit there.
"""

from __future__ import annotations

import enum
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, TypeAdapter

from minisgl.config.rules import (
    MAX_INT,
    STRICT,
    Count,
    Number,
    PositiveNumber,
    Text,
    Validated,
    as_tuple,
    check_positive,
    plain_number,
    refuse,
)

IntArray = NDArray[np.int32]


class CacheHandle(Protocol):
    """A cached prefix (chapter 03); lock it before anything may evict."""

    @property
    def cached_len(self) -> int: ...  # tokens of the prefix, a multiple of the page size
    def slots(self) -> IntArray: ...  # int32 [cached_len]; RuntimeError if any was evicted


class AnswerRule(Protocol):
    """A restriction of an answer to a grammar (chapter 09a)."""

    waited: int  # steps in a row that gave it no token

    @property
    def error(self) -> str: ...  # why the answer cannot continue; empty if it can


class Req:
    """One generation: the cached length, the end of the next pass, the maximum length.

    `0 <= cached_len < device_len <= max_device_len` holds in a batch. Compared by identity.
    """

    __slots__ = ("cache_handle", "cached_len", "client", "device_len", "host_len", "last_step",
                 "logits_params", "matched_len", "matcher", "max_device_len", "output_ids",
                 "prefill_len", "prompt_ids", "prompt_len", "retracted", "sampling_params",
                 "scores", "table_idx", "uid")  # fmt: skip

    def __init__(
        self, *, uid: int, input_ids: IntArray, sampling_params: SamplingParams,
        max_new_tokens: int, table_idx: int = -1, client: str = "",
    ) -> None:  # fmt: skip
        """Share `input_ids`, the prompt, [prompt_len] int32; ValueError if it is empty.

        `retracted` is False, `scores` is empty, `logits_params` and `matcher` are None.
        """
        prompt = np.asarray(input_ids, dtype=np.int32)
        if prompt.ndim != 1 or prompt.size == 0:
            raise refuse("input_ids", "a list of one token id or more", prompt.tolist())
        check_positive(max_new_tokens=max_new_tokens)
        self.uid, self.client, self.table_idx, self.last_step = uid, client, table_idx, 0
        self.sampling_params, self.retracted = sampling_params, False  # True once it was preempted
        self.cache_handle: CacheHandle | None = None
        self.prompt_len = self.host_len = self.device_len = self.prefill_len = int(prompt.size)
        self.max_device_len = self.prompt_len + int(max_new_tokens)
        self.cached_len = self.matched_len = 0  # matched: came from the prefix cache at admission
        self.logits_params: object = None  # edits its logits before sampling (chapter 06d)
        self.scores: list[object] = []  # log probabilities of its prompt (chapter 08a)
        self.matcher: AnswerRule | None = None
        self.prompt_ids = prompt  # never written: other requests may share it
        self.output_ids = array("i")  # the part of the answer on the host

    @property
    def input_ids(self) -> IntArray:
        """All tokens on the host, [host_len] int32: the prompt itself, or joined to its answer."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, self.output_ids))

    def append(self, token: int) -> None:
        """Append one output token on the host; AssertionError beyond `max_device_len`."""
        assert self.host_len < self.max_device_len, (self.host_len, self.max_device_len)
        self.output_ids.append(token)
        self.host_len += 1

    def schedule(self, device_len: int) -> None:
        """Set where the next pass ends: the end of the prompt, or of a chunk of it."""
        lengths = (self.cached_len, device_len, self.max_device_len)
        assert 0 <= self.cached_len < device_len <= self.max_device_len, lengths
        self.device_len = device_len

    def advance(self) -> None:
        """Advance the lengths after a launch: all is cached; past the prefill, add a token."""
        lengths = (self.cached_len, self.device_len, self.max_device_len)
        assert 0 <= self.cached_len < self.device_len <= self.max_device_len, lengths
        self.cached_len = self.device_len
        if self.device_len >= self.prefill_len:
            assert self.can_decode, lengths  # this pass was one too many
            self.device_len += 1

    @property
    def extend_len(self) -> int:
        """Tokens that the next pass computes."""
        return self.device_len - self.cached_len

    @property
    def can_decode(self) -> bool:
        """True if the request may still get another token."""
        return self.device_len < self.max_device_len

    @property
    def is_chunked(self) -> bool:
        """True if the next pass ends before `prefill_len`, so that nothing is sampled from it."""
        return self.device_len < self.prefill_len

    @property
    def scores_prompt(self) -> bool:
        """Return True while `prompt_logprobs` are requested and the host has no new token (08a).

        Until then the whole prompt is computed.
        """
        asked = self.sampling_params.prompt_logprobs is not None
        return asked and self.host_len == self.prompt_len

    def __repr__(self) -> str:
        """Show the uid, the row and the three lengths."""
        lengths = f"{self.cached_len}, {self.device_len}, {self.max_device_len}"
        return f"Req(uid={self.uid}, row={self.table_idx}, lengths=({lengths}))"

    def restart(self) -> None:
        """Return to the start: all tokens on the host are computed again.

        The caller changes row, handle and `retracted`.
        """
        self.cached_len = 0
        self.prefill_len = self.device_len = self.host_len


class Phase(enum.Enum):
    """Kind of a pass: prefill computes prompts or chunks of them, decode one token per request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Batch:
    """The requests of one pass."""

    reqs: list[Req]
    phase: Phase

    @property
    def size(self) -> int:
        """Requests that get a token in this step."""
        return len(self.reqs)


MAX_LOGPROBS = 20
MAX_RULES = 1024  # biases, bad words, tokens of a bad word, choices
MAX_BAD_TOKENS = 2048  # of one request: each is compared at every step, for each answer
MAX_GRAMMAR = 16 * 1024  # characters of a grammar; a structural tag may have four times as many
MAX_VALUES, MAX_CONTAINERS = 2**17, 2**14  # of a client's JSON, in a body or in a text (12ba)

Penalty = Annotated[Number, Field(ge=-2, le=2)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Biases = Annotated[dict[Count, Bias], Field(max_length=MAX_RULES)]
WordIds = Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_RULES)]
BadWord = Annotated[  # the form selects the check and the error
    Annotated[Text, Tag("text")] | Annotated[WordIds, Tag("ids")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "ids"),
    BeforeValidator(as_tuple),
]


def tuple_of(item: Any, **bounds: int) -> PlainValidator:
    """Make a validator that converts None, one string or a list of items to a tuple."""
    adapter = TypeAdapter(Annotated[tuple[item, ...], Field(**bounds)], config=STRICT)

    def check(value: Any) -> Any:
        given = (value,) if isinstance(value, str) else as_tuple(value)
        return adapter.validate_python(() if given is None else given)

    return PlainValidator(check)


BadWords = Annotated[Sequence[str | Sequence[int]], tuple_of(BadWord, max_length=MAX_RULES)]


def json_text(value: Any) -> str:
    """Encode a value as JSON; keep non-ASCII characters, escape lone surrogates.

    NaN and infinity raise ValueError.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def load_json(text: str) -> Any:
    """Parse a client's JSON; other threads may run between its numbers, which can be slow."""
    # Not in C, as with `float` itself: it would keep the interpreter's lock until the end.
    return json.loads(text, parse_float=lambda x: float(x), parse_int=lambda x: int(x))


def count_values(*texts: bytes) -> tuple[int, int]:
    """Return bounds on the values of JSON texts, and on the lists and objects among them."""
    containers = sum(text.count(b"[") + text.count(b"{") for text in texts)
    return len(texts) + sum(text.count(b",") for text in texts) + containers, containers


def check_values(*texts: bytes) -> None:
    """Raise `ValueError` for JSON with too many values together; commas in strings do not count."""
    values, containers = count_values(*texts)
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        unescaped = (text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts)
        outside = (b"".join(text.split(b'"', 2 * MAX_VALUES)[::2]) for text in unescaped)
        values, containers = count_values(*outside)
    for number, most, what in (
        (containers, MAX_CONTAINERS, "lists and objects"),
        (values, MAX_VALUES, "values"),
    ):
        if number > most:
            raise ValueError(f"{number} {what} are more than the {most} that are allowed")


def schema_text(value: Any) -> str | None:
    """Return a JSON schema, given as text or dict, as text; keep the order of its keys.

    Invalid JSON raises ValueError. Text is parsed and written again, so spaces do not matter.
    """
    try:
        if isinstance(value, str):
            check_values(value.encode(errors="surrogatepass"))
        schema = load_json(value) if isinstance(value, str) else value
        return None if value is None else json_text(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"must be a JSON schema ({error})") from None


@dataclass(frozen=True)
class SamplingParams(Validated):
    """Parameters of sampling and of stopping.

    temperature 0 is greedy; top_k -1 and top_p 1 are off; logprobs n adds n likely tokens."""

    temperature: Annotated[Number, Field(ge=0)] = 0.0
    top_k: Annotated[int, BeforeValidator(plain_number), Field(ge=-1, le=MAX_INT)] = -1
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    max_tokens: Count | None = None
    ignore_eos: bool = False
    stop: Annotated[str | Sequence[str], tuple_of(Text)] = ()
    stop_token_ids: Annotated[Sequence[int], tuple_of(Count)] = ()
    seed: Count | None = None
    logprobs: Annotated[Count, Field(le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Count, Field(le=MAX_LOGPROBS)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: PositiveNumber = 1.0
    logit_bias: Biases | None = field(default=None, hash=False)
    min_tokens: Count = 0
    bad_words: BadWords = ()
    allowed_token_ids: Annotated[Sequence[int], tuple_of(Count, min_length=1)] | None = None
    cache_salt: Text | None = None  # only equal salts share cached prefixes
    json_schema: Annotated[str | Mapping[str, Any] | None, PlainValidator(schema_text)] = None
    regex: Text | None = None
    choice: Annotated[Sequence[str], tuple_of(Text, max_length=MAX_RULES)] = ()
    grammar: Text | None = None
    json_object: bool = False
    structural_tag: Annotated[str | Mapping[str, Any] | None, PlainValidator(schema_text)] = None
    spare_thoughts: bool = False  # ignore stop strings inside a thought

    def __post_init__(self) -> None:
        """Check all fields, then the lengths of rules and the fields that exclude each other.

        A grammar has at most MAX_GRAMMAR characters; the items of `choice` count together.
        Bad words have MAX_BAD_TOKENS in all at most; `max_tokens` 0 needs `prompt_logprobs`.
        """
        Validated.__post_init__(self)
        given = [name for name in GRAMMARS if getattr(self, name)]
        if given and not self.json_object:
            most = MAX_GRAMMAR * (4 if self.structural_tag else 1)
            if (size := len("".join(getattr(self, given[0])))) > most:
                raise ValueError(f"{given[0]}: must have at most {most} characters, got {size}")
        words = [word for word in self.bad_words if not isinstance(word, str)]
        if (size := sum(map(len, words))) > MAX_BAD_TOKENS:
            raise ValueError(
                f"bad_words: must have at most {MAX_BAD_TOKENS} tokens in all, got {size}"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise refuse("max_tokens", "a positive integer without prompt_logprobs", 0)
        clash = given[1:] or (given and [name for name in NOT_BESIDE if getattr(self, name)])
        if clash:
            raise refuse(clash[0], f"left out beside {given[0]}", getattr(self, clash[0]))

    @property
    def is_greedy(self) -> bool:
        """Return True if temperature is 0, top_k 1 or top_p 0: no random number is needed."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def edits_logits(self) -> bool:
        """True if logits may have to be changed before sampling (chapter 06d)."""
        return self.repetition_penalty != 1 or any(getattr(self, name) for name in LOGIT_FIELDS)

    @property
    def is_constrained(self) -> bool:
        """True if the answer has to match a grammar (chapter 09a)."""
        return any(getattr(self, name) not in (None, False, ()) for name in GRAMMARS)


GRAMMARS = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")
NOT_BESIDE = ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids")

LOGIT_FIELDS = ("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
                "bad_words", "allowed_token_ids")  # fmt: skip
