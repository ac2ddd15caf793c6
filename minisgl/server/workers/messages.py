"""Messages between the server's workers: typed, validated, and their encoding.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from minisgl.core import SamplingParams
from minisgl.events import StageTimed
from minisgl.scheduler.frames import Codec, same_but_seed
from minisgl.scheduler.messages import PLAIN, Msg, Reply


class TokenizeMsg(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Frontend to text worker: one request as text, as a conversation or as token ids."""

    shared: ClassVar[tuple[str, ...]] = ("text", "messages", "template_kwargs", "input_ids")

    uid: int
    sampling_params: SamplingParams = PLAIN
    client: str = ""  # the scheduler is fair between clients
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}  # variables of the chat template
    input_ids: list[int] | None = None

    def same_request(self, other: TokenizeMsg | None) -> bool:
        """Return True for answers to one request: they share all objects except for the seed."""
        if other is None or not same_but_seed(self.sampling_params, other.sampling_params):
            return False
        pairs = [(getattr(self, name), getattr(other, name)) for name in self.shared]
        return all(mine is its or not (mine or its) for mine, its in pairs)


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log probability of one token of an answer, and the alternatives."""

    text: str  # of this token alone; part of a character decodes to U+FFFD
    data: bytes  # the token's exact bytes
    logprob: float | None  # natural logarithm; None for the first token of a prompt
    offset: int  # characters of the answer before it
    top: list[tuple[str, bytes, float]] = []  # the most likely tokens: text, bytes, logprob


class UserReply(msgspec.Struct, tag=True, kw_only=True):
    """Text worker to frontend: text that became readable, and the counts so far."""

    uid: int
    text: str
    token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended the text
    thinking: bool = False  # the prompt ended with an open `<think>`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    thought_tokens: int = 0  # those up to the first `</think>`, once it has come
    logprobs: list[TokenLogprob] = []


class ConvertMsg(TokenizeMsg, tag=True, kw_only=True):
    """Frontend to text worker: convert a prompt to tokens, or `input_ids` to text; no answer."""

    add_special_tokens: bool = True
    pieces: bool = False  # return them, too


class Converted(UserReply, tag=True, kw_only=True):
    """Text worker to frontend: a prompt's tokens, or the text of tokens."""

    pieces: list[str] = []  # each token's name in the vocabulary


class StatsMsg(msgspec.Struct, tag=True, kw_only=True):
    """State of the scheduler: requests, pages of the pool, and counts since its start."""

    running: int = 0  # requests that hold a row
    waiting: int = 0  # requests without a row
    free_pages: int = 0
    cached_pages: int = 0  # only in the prefix cache: evictable
    used_pages: int = 0  # held by requests
    counts: dict[str, int] = {}  # by name


StatsEvent = StatsMsg | StageTimed

Message = Msg | Reply | TokenizeMsg | ConvertMsg | UserReply | Converted | StatsEvent

CODEC = Codec(Message)
encode = CODEC.encode
decode = CODEC.decode  # or raises `msgspec.DecodeError`
