"""Requests of other APIs that run as the one task of a chat.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.sse import format_sse_event

from minisgl.server.http.api import RequestHandler, Service
from minisgl.server.http.bodies import renamed_errors
from minisgl.server.http.errors import ApiError, api_error
from minisgl.server.http.formats import ChatFormatter
from minisgl.server.http.schemas import ChatRequest
from minisgl.server.http.tool_parser import Piece
from minisgl.server.workers.messages import UserReply

Event = dict[str, Any]


def event_bytes(event: Event) -> bytes:
    """Encode an event for the wire; its type stands beside the JSON, too."""
    return format_sse_event(data_str=msgspec.json.encode(event).decode(), event=event["type"])


class Builder(Protocol):
    """An answer under construction; its methods yield the events that tell how it grows."""

    begun: bool

    def add(self, pieces: Sequence[Piece], reply: UserReply) -> Iterator[Event]: ...

    def fail(self, error: ApiError) -> Event: ...


class TranslatedHandler(RequestHandler):
    """Runs a request as the one task of a chat; a builder gives the answer its shape.

    `names` maps names of a chat's fields to those of the API.
    """

    builder: Builder
    names: Mapping[str, str] = {}
    ending = b""  # behind the last event

    def __init__(
        self, service: Service, request: Request, as_chat: Callable[[], ChatRequest]
    ) -> None:
        with renamed_errors(self.names):
            self.chat = as_chat()
            self.chat.prepare(service.settings.can)
            super().__init__(service, request, self.chat, [self.chat.prompt()], ChatFormatter())

    def finish(self, last: UserReply) -> Sequence[Event]:
        """Complete the answer with its last reply; return the last events."""
        raise NotImplementedError

    async def changes(self) -> AsyncGenerator[Event, None]:
        """Yield all events; the answer is complete before its client learns of the end."""
        parser = self.chat.parser()
        with renamed_errors(self.names):
            async with aclosing(self._replies()) as replies:
                async for _, reply in replies:
                    pieces = parser.push(reply.text, reply.finished, reply.thinking)
                    for event in self.builder.add(pieces, reply):
                        yield event
        for event in self.finish(reply):
            yield event

    async def collected(self) -> None:
        """Run to the end; the builder has the answer in one piece."""
        async with aclosing(self.changes()) as events:
            async for _ in events:
                pass

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events; a failure is one, too, if it is not the first."""
        try:
            async with aclosing(self.changes()) as events:
                async for event in events:
                    yield event_bytes(event)
        except Exception as failure:
            if not self.builder.begun:
                raise
            if not isinstance(failure, ApiError):
                traceback.print_exc()
            yield event_bytes(self.builder.fail(api_error(failure)))
        if self.ending:
            yield self.ending
