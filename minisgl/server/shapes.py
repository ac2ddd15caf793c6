"""How answers look on the wire: whole and in chunks, for chats and for plain completions.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.server.messages import TokenLogprob, UserReply


@dataclass
class Answer:
    """A whole answer, collected."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.finish_reason = reply.finish_reason
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        self.completion_tokens = reply.completion_tokens
        self.logprobs += reply.logprobs


def usage(answers: list[Answer], prompts: int = 1) -> dict[str, Any]:
    """Token counts of one HTTP request. With `n` answers to one prompt, the prompt counts once."""
    per_prompt = max(1, len(answers) // max(1, prompts))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::per_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[::per_prompt])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finite(logprob: float) -> float:
    """A number that JSON can spell, for a token that cannot come, too."""
    return max(logprob, -9999.0)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat has them: an object for each token."""

    def one(text: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**one(e.text, e.data, e.logprob), "top_logprobs": [one(*other) for other in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a plain completion has them: four lists of one length."""
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [finite(e.logprob) for e in entries],
        "top_logprobs": [
            {text: finite(value) for text, _, value in reversed(e.top)} for e in entries
        ],
        "text_offset": [e.offset for e in entries],
    }


class ChatShape:
    """How a chat answer and its chunks look."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, logprobs: bool = False) -> None:
        self._logprobs = logprobs

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def delta(self, index: int, reply: UserReply, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": reply.text} if first else {"content": reply.text}
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(reply.logprobs) if self._logprobs else None,
            "finish_reason": reply.finish_reason,
        }


class CompletionShape:
    """How a plain completion and its chunks look: both are `text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, logprobs: bool = False) -> None:
        self._logprobs = logprobs

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": completion_logprobs(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def delta(self, index: int, reply: UserReply, first: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": reply.text,
            "logprobs": completion_logprobs(reply.logprobs) if self._logprobs else None,
            "finish_reason": reply.finish_reason,
        }


def sse(payload: Mapping[str, Any] | str) -> str:
    """One server-sent event: `data:` lines and a blank line."""
    if not isinstance(payload, str):
        return f"data: {msgspec.json.encode(payload).decode()}\n\n"
    return "".join(f"data: {line}\n" for line in payload.split("\n")) + "\n"
