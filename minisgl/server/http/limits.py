"""Bounds on what clients may cost: answers at once, bodies, slow senders, dead peers.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from minisgl.server.http.errors import ApiError


class ConcurrencyLimiter:
    """Lets in `limit` answers at once, and none while `reason` says why not."""

    def __init__(self, limit: int = 2**31, reason: str | None = None) -> None:
        self.limit, self.reason = limit, reason
        self.taken = 0  # answers in flight, running or waiting

    @contextmanager
    def acquire(self, count: int) -> Iterator[None]:
        """Hold places; a 503 while closed, a 429 when full, a 400 if it can never fit."""
        if self.reason is not None:
            raise ApiError(503, self.reason, code="service_unavailable")
        if count > self.limit:
            why = f"n: {count} answers at once are more than the {self.limit} of this server"
            raise ApiError(400, why, code="invalid_value", param="n")
        if self.taken + count > self.limit:
            why = f"the queue is full: {self.taken} of {self.limit} answers are in flight"
            raise ApiError(429, why, code="queue_full")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


CLOSE = {"connection": "close"}  # the rest of the body is not wanted


class BodyLimit:
    """Ends a body with an `ApiError`: 413 beyond `max_bytes`, 408 beyond `seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = 60.0) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        claimed, size, more = int(length) if length.isdecimal() else 0, 0, True
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal size, more
            if not more:  # what comes now is a disconnect
                return await receive()
            message: Message = {}
            if claimed <= self._max_bytes:
                try:
                    async with asyncio.timeout_at(deadline):
                        message = await receive()
                except TimeoutError:
                    why = "body: it came too slowly"
                    raise ApiError(408, why, code="slow_body", headers=CLOSE) from None
            if message.get("type") == "http.disconnect":
                raise ApiError(499, "body: the client left", code="client_left")
            size += len(message.get("body", b""))
            if max(size, claimed) > self._max_bytes:
                why = f"body: more than the {self._max_bytes} bytes that this server takes"
                raise ApiError(413, why, code="body_too_large", headers=CLOSE)
            more = message.get("more_body", False)
            return message

        await self._app(scope, limited, send)


Http: Any = AutoHTTPProtocol  # uvicorn's choice, by what is installed


class PatientHttp(Http):
    """uvicorn's HTTP protocol with bounded patience, in seconds, for each connection."""

    stall, head = 30.0, 30.0  # to take what we write, to send a whole request head

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        transport.set_write_buffer_limits(high=0)
        peer = transport.get_extra_info("socket")
        if peer is not None:  # a small write must not wait until the one before is confirmed
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if peer is not None and hasattr(socket, "TCP_KEEPIDLE"):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._disarm(name)
        super().connection_lost(exc)

    def _arm(self, name: str, seconds: float) -> None:
        """Cut the connection in `seconds`, unless disarmed before."""
        if name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(seconds, self.transport.abort)

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _await_head(self) -> None:
        """Between two requests, wait for the next; after its head, no longer."""
        if self.cycle is None or self.cycle.response_complete:
            self._arm("head", self.head)
        else:
            self._disarm("head")

    def data_received(self, data: bytes) -> None:
        Http.data_received(self, data)
        self._await_head()

    def pause_writing(self) -> None:
        """The peer takes nothing more."""
        Http.pause_writing(self)
        self._arm("stall", self.stall)

    def resume_writing(self) -> None:
        self._disarm("stall")
        Http.resume_writing(self)


def patient_http(stall: float, head: float = 30.0) -> type[asyncio.Protocol]:
    """The protocol class for one server."""
    return type("PatientHttp", (PatientHttp,), {"stall": stall, "head": head})
