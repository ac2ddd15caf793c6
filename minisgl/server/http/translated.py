"""Requests of other APIs that run as the one task of a chat.

Generated from notebooks/12c_http.ipynb: edit there.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from fastapi import Request

from minisgl.server.http.api import RequestHandler, Service
from minisgl.server.http.bodies import build, renamed_errors
from minisgl.server.http.errors import ApiError, api_error
from minisgl.server.http.fields import refuse
from minisgl.server.http.formats import ChatFormatter, Completion, sse
from minisgl.server.http.schemas import ChatRequest

Event = dict[str, Any]


def event_bytes(event: Event) -> bytes:
    """Encode an event for the wire; its type stands beside the JSON, too."""
    return b"event: " + event["type"].encode() + b"\n" + sse(event)


class Builder(Protocol):
    """An answer under construction; its methods yield the events of its growth."""

    begun: bool

    def add(self, answer: Completion) -> Iterator[Event]: ...

    def fail(self, error: ApiError) -> Event: ...


class TranslatedHandler(RequestHandler):
    """Runs a request as the one task of a chat; a builder gives the answer its shape.

    `names` maps names of a chat's fields to those of the API.
    """

    builder: Builder
    names: Mapping[str, str] = {}
    ending = b""  # after the last event

    def __init__(
        self, service: Service, request: Request, as_chat: Callable[[], ChatRequest]
    ) -> None:
        with renamed_errors(self.names):
            self.chat = as_chat()
            if self.chat.n not in (None, 1):
                raise refuse(self.chat.client_name("n") or "n", self.chat.n, "one answer only here")
            self.chat.prepare(service.settings.can)
            super().__init__(service, request, self.chat, [self.chat.prompt()], ChatFormatter())

    def finish(self, answer: Completion) -> Sequence[Event]:
        """Complete the answer; return the last events."""
        raise NotImplementedError

    async def changes(self) -> AsyncGenerator[Event, None]:
        """Yield all events; the answer is completed before its last event is sent."""
        answer = Completion(self.chat.parser())
        with renamed_errors(self.names):
            async with aclosing(self._replies()) as replies:
                async for _, reply in replies:
                    answer.add(reply)
                    if reply.logprobs:
                        self.held.add(reply.logprobs)
                    for event in self.builder.add(answer):
                        yield event
                    answer.forget()
        for event in await build(self.request, partial(self.finish, answer)):
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
                    encode = partial(event_bytes, event)  # one with the whole request may be large
                    yield await build(self.request, encode) if "response" in event else encode()
        except Exception as failure:
            if not self.builder.begun:
                raise
            if not isinstance(failure, ApiError):
                traceback.print_exc()
            yield event_bytes(self.builder.fail(api_error(failure)))
        finally:
            self.held.release()
        if self.ending:
            yield self.ending
