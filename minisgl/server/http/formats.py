"""How answers look on the wire: whole and in chunks, for chats and for plain completions.

Generated from notebooks/12c_http.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi.sse import format_sse_event

from minisgl.server.http.answers import AnswerParser, as_delta, as_message
from minisgl.server.workers.messages import TokenLogprob, UserReply


@dataclass
class Completion:
    """A whole answer, collected."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking: bool = False

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.finish_reason, self.thinking = reply.finish_reason, reply.thinking
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        self.completion_tokens = reply.completion_tokens
        self.logprobs += reply.logprobs


def usage(answers: list[Completion], prompts: int = 1) -> dict[str, Any]:
    """Token counts of one HTTP request with so many prompts."""
    per_prompt = max(1, len(answers) // max(1, prompts))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::per_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[::per_prompt])
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    total, details = prompt_tokens + completion_tokens, {"cached_tokens": cached}
    return {**counts, "total_tokens": total, "prompt_tokens_details": details}


def finite(logprob: float | None) -> float | None:
    """A number that JSON can hold, also for a token of probability zero."""
    return None if logprob is None else max(logprob, -9999.0)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat has them: an object for each token."""

    def one(text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**one(e.text, e.data, e.logprob), "top_logprobs": [one(*other) for other in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a plain completion has them: four lists of one length."""
    tops = [{text: finite(value) for text, _, value in reversed(e.top)} for e in entries]
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [finite(e.logprob) for e in entries],
        "top_logprobs": [None if e.logprob is None else top for e, top in zip(entries, tops)],
        "text_offset": [e.offset for e in entries],
    }


class CompletionFormatter:
    """How a plain completion and its chunks look: both are `text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, logprobs: bool = False) -> None:
        self._logprobs = logprobs

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return completion_logprobs(entries)

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        """A whole answer."""
        return self._entry(index, {"text": answer.text}, answer, answer.finish_reason)

    def deltas(self, index: int, reply: UserReply, first: bool) -> list[dict[str, Any]]:
        """The chunks of a stream that a reply gives: none while a character is incomplete."""
        if not (reply.text or reply.finished or reply.logprobs or first):
            return []
        return [self._entry(index, {"text": reply.text}, reply, reply.finish_reason)]

    def _entry(
        self, index: int, content: dict[str, Any], part: Completion | UserReply, reason: str | None
    ) -> dict[str, Any]:
        logprobs = self.logprobs(part.logprobs) if self._logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class ChatFormatter(CompletionFormatter):
    """How a chat answer and its chunks look."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, logprobs: bool = False, parser: Callable[[], AnswerParser] = AnswerParser
    ) -> None:
        super().__init__(logprobs)
        self._parser, self._parsers = parser, dict[int, AnswerParser]()

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(entries)

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        parser = self._parser()
        message = as_message(parser.push(answer.text, True, answer.thinking))
        return self._entry(index, {"message": message}, answer, parser.reason(answer.finish_reason))

    def deltas(self, index: int, reply: UserReply, first: bool) -> list[dict[str, Any]]:
        if first:
            self._parsers[index] = self._parser()
        parser = self._parsers[index]
        pieces = parser.push(reply.text, reply.finished, reply.thinking)
        found = [as_delta(piece) for piece in pieces]
        if first:
            found[:1] = [{"role": "assistant", **(found[0] if found else {"content": ""})}]
        if (reply.finished and "tool_calls" in (found or [{}])[-1]) or not found:
            found.append({})
        if not (found[0] or reply.finished or reply.logprobs):
            return []
        entries = [{"index": index, "delta": delta, "logprobs": None} for delta in found]
        last = self._entry(index, {"delta": found[-1]}, reply, parser.reason(reply.finish_reason))
        return [*({**entry, "finish_reason": None} for entry in entries[:-1]), last]


def sse(payload: Mapping[str, Any] | str) -> bytes:
    """One server-sent event: text as it is, anything else as JSON."""
    text = payload if isinstance(payload, str) else msgspec.json.encode(payload).decode()
    return format_sse_event(data_str=text)
