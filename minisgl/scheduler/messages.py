"""What is said to a scheduler and what it answers: typed messages, and the error for bad ones.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from minisgl.core import SamplingParams

PLAIN = SamplingParams()


class UserMsg(msgspec.Struct, tag=True, omit_defaults=True):
    """A new request: `uid` is the caller's number for it, unused by any other live request.

    `client` names who asks; requests of one client share what the queue gives to it. `cost` is the
    processor time in seconds that the grammar took to compile before, `memory` its bytes; 0:
    unknown.
    """

    shared: ClassVar[tuple[str, ...]] = ("input_ids",)  # what a frame holds once for all requests

    uid: int
    input_ids: list[int]
    sampling_params: SamplingParams = PLAIN
    client: str = ""
    cost: float = 0.0
    memory: int = 0


class AbortMsg(msgspec.Struct, tag=True):
    """The caller of `uid` has lost interest. Unknown and finished uids are ignored."""

    uid: int


class ExitMsg(msgspec.Struct, tag=True):
    """Stop: what is still running is aborted."""


# Token id; its log probability, None for the first; what else was likely: ids, log probabilities.
PromptToken = tuple[int, float | None, list[tuple[int, float]]]


class PromptScores(msgspec.Struct):
    """Log probabilities of a prompt's tokens, as bytes: a list takes too long in one step.

    A row has `width` ids, the token's and those of the most likely tokens, and their values.
    """

    width: int
    rows: bytes  # int32 [tokens, 2 * width]: ids, then the bits of float32 log probabilities

    def part(self, first: int = 0, last: int | None = None) -> list[PromptToken]:
        """List the entries of the tokens from `first` up to `last`, excluded."""
        rows = np.frombuffer(self.rows, np.int32).reshape(-1, 2 * self.width)[first:last]
        ids, values = rows[:, : self.width], rows[:, self.width :].view(np.float32)
        pairs = zip(ids.tolist(), values.tolist())
        found: list[PromptToken] = [(i[0], v[0], [*zip(i[1:], v[1:])]) for i, v in pairs]
        if first == 0:  # nothing precedes it
            found[0] = found[0][0], None, []
        return found


class TokenReply(msgspec.Struct, tag=True, kw_only=True):
    """One token of a request. The last reply of a request, and no other, has `finished` set."""

    shared: ClassVar[tuple[str, ...]] = ("stop",)

    uid: int
    token: int | None  # None if it was aborted, or wanted no tokens
    finished: bool = False
    finish_reason: str | None = None  # "stop" (an end or a stop token), "length" or "abort"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    notice: str | None = None  # what the caller should know; with the first token, or an abort
    stop: tuple[str, ...] = ()  # the request's stop strings; with the first token only
    spare_thoughts: bool = False  # they end no thought
    prompt_tail: tuple[int, ...] = ()  # the prompt's last tokens; with the first token only
    prompt_logprobs: PromptScores | None = None  # if asked for; with the first token only


class ErrorReply(msgspec.Struct, tag=True, kw_only=True):
    """A request that was refused; it is the last reply that this request gets.

    Refused for a uid in use, it carries that uid: to a receiver the live request has ended, too.
    """

    uid: int
    message: str
    code: str = "invalid_request"  # or "context_length_exceeded"
    param: str | None = None  # the field at fault


def aborted(uid: int) -> ErrorReply:
    """Make the receipt of an abort: all that was sent before it has been read."""
    return ErrorReply(uid=uid, message="aborted", code="aborted")


Msg = UserMsg | AbortMsg | ExitMsg
Reply = TokenReply | ErrorReply


class InvalidRequestError(ValueError):
    """A request that cannot be served: a message for people, a code and a field for programs."""

    def __init__(self, message: str, code: str = "invalid_request", param: str = "prompt") -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param
