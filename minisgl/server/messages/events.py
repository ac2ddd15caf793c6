"""A message of blocks under construction, and its events.

Generated from notebooks/12db_messages.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from minisgl.server.http.errors import ApiError
from minisgl.server.http.formats import Completion
from minisgl.server.http.tool_parser import CallArguments, CallStart, Content, Reasoning
from minisgl.server.http.translated import Event

KINDS = {Content: ("text", "text"), Reasoning: ("thinking", "thinking")}  # type, field
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
          500: "api_error", 503: "overloaded_error"}  # fmt: skip


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = ERRORS.get(error.status_code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.detail}}


def as_input(text: str) -> dict[str, Any]:
    """Parse a call's arguments to an object; a cut call keeps the parsed part."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {"arguments": text}


def usage_of(answer: Completion) -> dict[str, int]:
    """Return token counts; `input_tokens` excludes tokens from the prefix cache."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


class MessageBuilder:
    """Makes a message from the pieces of an answer; its methods yield the events.

    `message` is replaced and never changed, so an event keeps what it was made of.
    """

    def __init__(self, name: str, model: str) -> None:
        about = {"id": name, "type": "message", "role": "assistant", "model": model}
        self.message: dict[str, Any] = {
            **about,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self.begun = False
        self._block: dict[str, Any] | None = None  # the open one
        self._text: list[str] = []

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._block, self._text = block, []
        index = len(self.message["content"])
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._block is None:
            return
        index, kind = len(self.message["content"]), self._block["type"]
        text = "".join(self._text)
        filled = {"input": as_input(text)} if kind == "tool_use" else {kind: text}
        done = [*self.message["content"], {**self._block, **filled}]
        self.message, self._block = {**self.message, "content": done}, None
        yield {"type": "content_block_stop", "index": index}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        self._text.append(text)
        index = len(self.message["content"])
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}

    def add(self, answer: Completion) -> Iterator[Event]:
        """Yield the events of the pieces that are new in an answer."""
        if not self.begun:
            self.begun = True
            self.message = {**self.message, "usage": usage_of(answer)}
            yield {"type": "message_start", "message": self.message}
            yield {"type": "ping"}
        for piece in answer.pieces:
            match piece:
                case CallStart(_, id, name):
                    yield from self._open({"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta("input_json_delta", "partial_json", text)
                case _:
                    kind, field = KINDS[type(piece)]
                    if self._block is None or self._block["type"] != kind:
                        signed = {"signature": ""} if kind == "thinking" else {}
                        yield from self._open({"type": kind, field: "", **signed})
                    yield self._delta(f"{kind}_delta", field, piece.text)

    def finish(self, last: Completion) -> Iterator[Event]:
        """Yield the last events; `last` has the reason and the counts."""
        yield from self._close()
        called = any(block["type"] == "tool_use" for block in self.message["content"])
        reason = "stop_sequence" if last.stop is not None else "tool_use" if called else "end_turn"
        reason = "max_tokens" if last.finish_reason == "length" else reason
        end = {"stop_reason": reason, "stop_sequence": last.stop}
        self.message = {**self.message, **end, "usage": usage_of(last)}
        yield {"type": "message_delta", "delta": end, "usage": usage_of(last)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Event:
        """Return the event of a message that has begun and cannot go on."""
        return error_body(error)
