"""Response formats: whole and in chunks, for chats and for plain completions.

Generated from notebooks/12c_http.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import msgspec
from fastapi.sse import format_sse_event

from minisgl.server.http.chats import AnswerParser, as_delta, as_message
from minisgl.server.http.schemas import SlicedResponse
from minisgl.server.http.tool_parser import Piece
from minisgl.server.workers.messages import TokenLogprob, UserReply


@dataclass
class Completion:
    """A collected answer; `text`, `pieces` and `logprobs` hold what came since `forget`.

    `packed` has the log probabilities of a whole answer as JSON, by list.
    """

    parser: AnswerParser | None = None
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    stop: str | None = None  # the stop string that ended it
    undecided: list[TokenLogprob] = field(default_factory=list)
    packed: dict[str, bytearray] = field(default_factory=dict)

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.finish_reason = reply.finish_reason
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        self.completion_tokens, self.stop = reply.completion_tokens, reply.stop
        if self.parser is None:
            self.logprobs += reply.logprobs
        else:
            self._parse(self.parser, reply)

    def forget(self) -> None:
        """Drop the sent text; keep the counts."""
        self.text, self.pieces, self.logprobs = "", [], []

    def _parse(self, parser: AnswerParser, reply: UserReply) -> None:
        """Parse a reply: count its thought tokens, release the log probabilities of its content."""
        before = parser.state
        self.pieces += parser.push(reply.text, reply.finished, reply.thinking)
        if parser.state == parser._thought:
            self.reasoning_tokens = reply.completion_tokens
        elif before in (parser._start, parser._thought) and parser.opened:
            self.reasoning_tokens = reply.thought_tokens
        entries, self.undecided = self.undecided + reply.logprobs, []
        for at, entry in enumerate(entries):
            content = is_content(parser, entry.offset, entry.offset + max(len(entry.text), 1))
            if content is None and not reply.finished:
                self.undecided = entries[at:]  # those behind it are undecided, too
                break
            self.logprobs += [entry] if content else []

    def pack(self, form: Callable[[Sequence[TokenLogprob]], dict[str, Any]]) -> None:
        """Keep log probabilities, in a route's form, as JSON, which takes less memory."""
        for name, values in form(self.logprobs).items():
            if values:
                self.packed.setdefault(name, bytearray()).extend(encoded(values)[1:-1] + b",")
        self.logprobs = []


def is_content(parser: AnswerParser, start: int, end: int) -> bool | None:
    """Return True if these characters of the answer are content; None if undecided."""
    if parser.state != parser._rest:
        return False if start < parser.total - len(parser.buffer) else None
    start, end = start - parser.total + parser.rest, end - parser.total + parser.rest
    tools = parser.tools
    if tools is None:
        return end > 0
    held = len(tools.buffer) + len(tools.blank)
    held += len(tools.marker) if tools.state == tools._head else 0
    if start >= tools.total - held:
        return None
    return any(first < end and start < stop for first, stop in tools.spans)


def usage(answers: list[Completion], prompts: int = 1) -> dict[str, Any]:
    """Count the tokens of one HTTP request with `prompts` prompts."""
    per_prompt = max(1, len(answers) // max(1, prompts))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::per_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[::per_prompt])
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    total, details = prompt_tokens + completion_tokens, {"cached_tokens": cached}
    found = {**counts, "total_tokens": total, "prompt_tokens_details": details}
    if any(answer.parser for answer in answers):
        thoughts = sum(answer.reasoning_tokens for answer in answers)
        found["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return found


def finite(logprob: float | None) -> float | None:
    """Return a finite number for JSON, also for a token of probability zero."""
    return None if logprob is None or isnan(logprob) else max(logprob, -9999.0)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Format log probabilities for a chat: an object for each token."""

    def one(text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**one(e.text, e.data, e.logprob), "top_logprobs": [one(*other) for other in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Format log probabilities for a completion: four lists of one length."""
    tops = [{text: finite(value) for text, _, value in reversed(e.top)} for e in entries]
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [finite(e.logprob) for e in entries],
        "top_logprobs": [None if e.logprob is None else top for e, top in zip(entries, tops)],
        "text_offset": [e.offset for e in entries],
    }


class CompletionFormatter:
    """Format of a plain completion and its chunks: both are `text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, logprobs: bool = False) -> None:
        self._logprobs = logprobs

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return completion_logprobs(entries)

    def answer(self) -> Completion:
        """Make an answer before its first reply."""
        return Completion()

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        """Format a whole answer."""
        return self._entry(index, {"text": answer.text}, answer)

    def deltas(self, index: int, answer: Completion, first: bool) -> list[dict[str, Any]]:
        """Format the chunks of a stream for new text: none while a character is incomplete."""
        if not (answer.text or answer.finish_reason or answer.logprobs or first):
            return []
        return [self._entry(index, {"text": answer.text}, answer)]

    def _entry(self, index: int, content: dict[str, Any], answer: Completion) -> dict[str, Any]:
        logprobs, reason = self.logprobs(answer.logprobs) if self._logprobs else None, None
        if logprobs is not None:
            packed = answer.packed.items()
            logprobs |= {name: msgspec.Raw(b"[" + data[:-1] + b"]") for name, data in packed}
        if answer.finish_reason is not None:
            reason = answer.finish_reason
            reason = answer.parser.reason(reason) if answer.parser else reason
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class ChatFormatter(CompletionFormatter):
    """Format of a chat answer and its chunks."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, logprobs: bool = False, parser: Callable[[], AnswerParser] = AnswerParser
    ) -> None:
        super().__init__(logprobs)
        self._parser = parser

    def answer(self) -> Completion:
        return Completion(self._parser())

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(entries)

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        return self._entry(index, {"message": as_message(answer.pieces)}, answer)

    def deltas(self, index: int, answer: Completion, first: bool) -> list[dict[str, Any]]:
        finished = answer.finish_reason is not None
        found = [as_delta(piece) for piece in answer.pieces]
        if first:
            found[:1] = [{"role": "assistant", **(found[0] if found else {"content": ""})}]
        if (finished and "tool_calls" in (found or [{}])[-1]) or not found:
            found.append({})
        if not (found[0] or finished or answer.logprobs):
            return []
        entries = [{"index": index, "delta": delta, "logprobs": None} for delta in found]
        last = self._entry(index, {"delta": found[-1]}, answer)
        return [*({**entry, "finish_reason": None} for entry in entries[:-1]), last]


LINES = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]


def encoded(payload: Any) -> bytes:
    """Encode JSON on one line; NaN and infinities become null."""
    data = msgspec.json.encode(payload)
    for line_end, escape in LINES:
        data = data.replace(line_end, escape)
    return data


class Json(SlicedResponse):
    """A whole answer, encoded like the events of a stream."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def sse(payload: Mapping[str, Any] | str) -> bytes:
    """Encode one server-sent event: text as it is, anything else as JSON."""
    if isinstance(payload, str):
        return format_sse_event(data_str=payload)
    return b"data: " + encoded(payload) + b"\n\n"
