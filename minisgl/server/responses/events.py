"""A response under construction, and its events.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from minisgl.server.http.errors import ApiError
from minisgl.server.http.formats import Completion, chat_logprobs, encoded
from minisgl.server.http.tool_parser import CallArguments, CallStart, Content, Reasoning
from minisgl.server.http.translated import Event

PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def item_id(kind: str, response_id: str, number: int) -> str:
    """Make an item's id from its response's id, which is hard to guess, and its index."""
    return f"{PREFIX[kind]}_{response_id.removeprefix('resp_')}_{number}"


def usage_of(answer: Completion) -> dict[str, Any]:
    """Count tokens; those not read from the prefix cache count as written to it."""
    given, cached = answer.prompt_tokens, answer.cached_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": given - cached},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": given + answer.completion_tokens,
    }


NEW_ITEMS: dict[type, dict[str, Any]] = {
    Content: {"type": "message", "role": "assistant", "content": []},
    Reasoning: {"type": "reasoning", "summary": [], "content": []},
}
STREAMS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseBuilder:
    """Makes a response from the pieces of an answer; its methods yield the events.

    `response` is replaced and never changed, so an event keeps what it was made of. The items of
    the answer are numbered from `first`: those of the input come before.
    """

    def __init__(self, response: dict[str, Any], first: int) -> None:
        self.response, self._first, self.begun = response, first, False
        self._numbers = itertools.count()
        self._item: dict[str, Any] = {}  # the open item's text
        self._text: list[str] = []
        self._logprobs: list[msgspec.Raw] = []  # as JSON, which takes less memory

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    @property
    def _kind(self) -> str:
        """What the events of the open item's text are called."""
        return STREAMS.get(self._item["type"], "function_call_arguments")

    def _item_event(self, name: str) -> Event:
        place = len(self.response["output"])
        return self._event(f"output_item.{name}", output_index=place, item=self._item)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"])}
        part = {"content_index": 0} if "content" in self._item else {}
        return self._event(kind, **place, **part, **fields)

    def _part(self) -> dict[str, Any]:
        """Return the item's content so far: its one part, or the arguments of a call."""
        text, kind = "".join(self._text), self._kind
        if kind == "function_call_arguments":
            return {"name": self._item["name"], "arguments": text}
        more = {"annotations": [], "logprobs": self._logprobs} if kind == "output_text" else {}
        return {"type": kind, "text": text, **more}

    def add(self, answer: Completion) -> Iterator[Event]:
        """Yield the events of what is new in an answer; a message's text has its logprobs."""
        if not self.begun:
            self.begun = True
            yield self._event("created", response=self.response)
            yield self._event("in_progress", response=self.response)
        entries = [msgspec.Raw(encoded(e)) for e in chat_logprobs(answer.logprobs)["content"]]
        for piece in answer.pieces:
            if isinstance(piece, CallStart):
                call = {"call_id": piece.id, "name": piece.name, "arguments": ""}
                yield from self._open({"type": "function_call", **call})
                continue
            if not isinstance(piece, CallArguments):
                new = NEW_ITEMS[type(piece)]
                if self._item.get("type") != new["type"]:
                    yield from self._open(new)
            more: dict[str, Any] = {}
            if isinstance(piece, Content):
                more, entries = {"logprobs": entries}, []
                self._logprobs += more["logprobs"]
            self._text.append(piece.text)
            yield self._part_event(f"{self._kind}.delta", delta=piece.text, **more)
        self._logprobs += entries  # of text that has gone out

    def _open(self, new: dict[str, Any]) -> Iterator[Event]:
        """Close the item before, and open the next one, empty."""
        if self._item:
            yield from self._close("completed")
        self._text, self._logprobs = [], []
        number = self._first + len(self.response["output"])
        name = item_id(new["type"], self.response["id"], number)
        self._item = {"id": name, **new, "status": "in_progress"}
        yield self._item_event("added")
        if "content" in new:
            yield self._part_event("content_part.added", part=self._part())

    def _close(self, status: str) -> Iterator[Event]:
        """Close the part and the item with their final text."""
        part = self._part()
        said = {k: part[k] for k in ("text", "logprobs", "name", "arguments") if k in part}
        yield self._part_event(f"{self._kind}.done", **said)
        if "content" in self._item:
            yield self._part_event("content_part.done", part=part)
            part = {"content": [part]}
        self._item = {**self._item, **part, "status": status}
        yield self._item_event("done")
        self.response = {**self.response, "output": [*self.response["output"], self._item]}
        self._item = {}

    def finish(self, last: Completion, now: int) -> Iterator[Event]:
        """Yield the end: `last` has the reason and the counts, `now` is Unix time in seconds."""
        cut = last.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if not self._item:  # an empty answer is an answer
            yield from self._open(NEW_ITEMS[Content])
        yield from self._close(status)
        why = {"reason": "max_output_tokens"} if cut else None
        end = {"status": status, "incomplete_details": why, "completed_at": None if cut else now}
        usage = usage_of(last)
        self.response = {**self.response, **end, "usage": usage}
        yield self._event(status, response=self.response)

    def fail(self, error: ApiError) -> Event:
        """Return the failure that ends a response which has begun."""
        code = "server_error" if error.status_code >= 500 else error.code
        why = {"code": code, "message": error.detail}
        self.response = {**self.response, "status": "failed", "error": why}
        return self._event("failed", response=self.response)
