"""A response that is being made, and the events that tell how it grows.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi.sse import format_sse_event

from minisgl.server.http.errors import ApiError
from minisgl.server.http.formats import Completion, chat_logprobs
from minisgl.server.workers.messages import TokenLogprob, UserReply

Event = dict[str, Any]
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def item_id(kind: str, response_id: str, number: int) -> str:
    """The id of an item tells its response and its place there, and is as hard to guess."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{number}"


def event_bytes(event: Event) -> bytes:
    """An event as it goes over the wire; its type stands beside the JSON, too."""
    return format_sse_event(data_str=msgspec.json.encode(event).decode(), event=event["type"])


def usage_of(answer: Completion | UserReply) -> dict[str, Any]:
    """Token counts; what the prefix cache did not have was computed and is written to it."""
    given, cached = answer.prompt_tokens, answer.cached_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": given - cached},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + answer.completion_tokens,
    }


class ResponseBuilder:
    """Makes a response from pieces of text; what its methods yield are the events of a stream.

    `response` is replaced and never changed, so an event keeps what it was made of. The items of
    the answer are numbered from `first`: those of the input come before.
    """

    def __init__(self, response: dict[str, Any], first: int) -> None:
        self.response, self._first, self.begun = response, first, False
        self._numbers = itertools.count()
        self._item: dict[str, Any] = {}  # what is being said
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}

    def _item_event(self, name: str, item: dict[str, Any]) -> Event:
        return self._event(name, output_index=len(self.response["output"]), item=item)

    def _part_event(self, name: str, item: dict[str, Any], **fields: Any) -> Event:
        place = {"item_id": item["id"], "output_index": len(self.response["output"])}
        return self._event(name, **place, content_index=0, **fields)

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """A piece of the answer's text, with the entries of its tokens."""
        if not self.begun:
            self.begun = True
            yield self._event("created", response=self.response)
            yield self._event("in_progress", response=self.response)
        if not text and not logprobs:
            return  # half a character: nothing to show yet
        if not self._item:
            yield from self._open()
        entries = chat_logprobs(logprobs)["content"]
        self._text.append(text)
        self._logprobs += entries
        more = {"delta": text, "logprobs": entries}
        yield self._part_event("output_text.delta", self._item, **more)

    def _open(self) -> Iterator[Event]:
        """A message with one part, both empty."""
        self._text, self._logprobs = [], []
        number = self._first + len(self.response["output"])
        about = {"id": item_id("message", self.response["id"], number), "type": "message"}
        self._item = {**about, "role": "assistant", "status": "in_progress", "content": []}
        yield self._item_event("output_item.added", self._item)
        yield self._part_event("content_part.added", self._item, part=text_part("", []))

    def _close(self, status: str) -> Iterator[Event]:
        """The part and the message as they have become."""
        part = text_part("".join(self._text), self._logprobs)
        said = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._part_event("output_text.done", self._item, **said)
        yield self._part_event("content_part.done", self._item, part=part)
        item = {**self._item, "status": status, "content": [part]}
        yield self._item_event("output_item.done", item)
        self.response = {**self.response, "output": [*self.response["output"], item]}
        self._item = {}

    def finish(self, answer: Completion | UserReply, now: int) -> Iterator[Event]:
        """The end: `answer` has the reason and the counts, `now` is in seconds since 1970."""
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if not self._item:  # an empty answer is an answer
            yield from self._open()
        yield from self._close(status)
        why = {"reason": "max_output_tokens"} if cut else None
        end = {"status": status, "incomplete_details": why, "completed_at": None if cut else now}
        self.response = {**self.response, **end, "usage": usage_of(answer)}
        yield self._event(status, response=self.response)

    def fail(self, error: ApiError) -> Event:
        """The end of a response that has begun and cannot go on."""
        code = "server_error" if error.status_code >= 500 else error.code
        why = {"code": code, "message": error.detail}
        self.response = {**self.response, "status": "failed", "error": why}
        return self._event("failed", response=self.response)


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
