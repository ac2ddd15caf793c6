"""Limits on clients: places, bodies, heads, connections, slow and dead peers.

Generated from notebooks/12ba_hard_to_hurt.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import psutil
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.scheduler.queue import Shares
from minisgl.server.http.access import client_of, network_of
from minisgl.server.http.bodies import HOLD
from minisgl.server.http.errors import ApiError
from minisgl.server.http.turns import PlainHttpProtocol, Turns

LOADING, DRAINING = "the model is loading", "the server is shutting down"


class ConcurrencyLimiter(Shares):
    """Admission of `limit` answers at once, shared by clients; none while `reason` is set."""

    def __init__(self, limit: int = 2**31, reason: str | None = None) -> None:
        super().__init__(limit)
        self.reason = reason

    @contextmanager
    def acquire(self, count: int, client: str = "") -> Iterator[None]:
        """Hold places; a 503 while closed, a 429 when full, a 400 if it can never fit."""
        if self.reason is not None:
            raise ApiError(503, self.reason, code="service_unavailable")
        if count > self.most:
            why = f"n: {count} answers at once are more than the {self.most} of this server"
            raise ApiError(400, why, code="invalid_value", param="n")
        if not self.take(client, count):
            why = f"the queue is full: {self.taken} of {self.limit} answers are in flight"
            why += f", {self.held[client]} of them yours" if self.limit > self.taken else ""
            raise ApiError(429, why, code="queue_full")
        try:
            yield
        finally:
            self.give_back(client, count)


FREE = 2**12  # bytes of a request, and of the heads of a connection, that count in no share
CLOSE = {"connection": "close"}  # the rest of the body will not be read


class BodyLimit:
    """Ends a body with an `ApiError`: 413 beyond `max_bytes`, 408 beyond `seconds`.

    A 429 if all that requests hold exceeds `8 * max_bytes`, which clients share.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = 60.0) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds
        self.shares, self.lock = Shares(8 * max_bytes), threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(self, scope, receive)
        scope[HOLD] = body.hold
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.give_back()
            del scope[HOLD]  # it holds the scope


class Body:
    """One body, on its way in, and the bytes that its request holds until the answer is sent."""

    def __init__(self, limit: BodyLimit, scope: Scope, receive: Receive) -> None:
        length = Headers(scope=scope).get("content-length", "").lstrip("0")[:20]
        self._claimed, self._more = int(length) if length.isdecimal() else 0, True
        self._limit, self._scope, self._receive = limit, scope, receive
        self._client, self._over = "", False
        self._size = self._sum = self._held = 0  # bytes of it, of all, and of those in the shares
        self._deadline = asyncio.get_running_loop().time() + limit._seconds

    async def receive(self) -> Message:
        if not self._more:  # only a disconnect can follow
            return await self._receive()
        message: Message = {}
        if self._claimed <= self._limit._max_bytes:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(
                    408, "body: came too slowly", code="slow_body", headers=CLOSE
                ) from None
        if message.get("type") == "http.disconnect":
            raise ApiError(499, "body: the client left", code="client_left")
        self._size += len(message.get("body", b""))
        if max(self._size, self._claimed) > self._limit._max_bytes:
            why = f"body: more than the {self._limit._max_bytes} bytes that this server takes"
            raise ApiError(413, why, code="body_too_large", headers=CLOSE)
        self.hold(len(message.get("body", b"")))
        self._more = message.get("more_body", False)
        return message

    def hold(self, count: int) -> None:
        """Count bytes in the client's share until the answer is sent; a 429 if they are too many.

        Any thread may call it, but not before the key is checked.
        """
        with self._limit.lock:
            if self._over:
                raise ApiError(499, "body: the client left", code="client_left")
            self._client = self._client or client_of(Request(self._scope))
            more = max(0, self._sum + count - FREE) - self._held
            if more and not self._limit.shares.take(self._client, more):
                why = (
                    "body: too many bytes of requests and answers are in memory, some of them yours"
                )
                raise ApiError(429, f"{why}; try again later", code="bodies_full", headers=CLOSE)
            self._sum += count
            self._held += more

    def give_back(self) -> None:
        with self._limit.lock:
            self._limit.shares.give_back(self._client, self._held)
            self._over = True


MAX_URL = 2**10  # bytes of a URL
MAX_HEAD, LINE = 2**16, 2**8  # bytes of a request's head; what a line of it counts at least
MAX_HEADS = 2**24  # bytes of all heads, those of requests with an answer in progress included
MAX_PIPELINED = 16  # requests of a connection that wait for the answer before theirs
READ, PART = 2**14, 2**12  # bytes of a read; those that are parsed between two looks at them


class TimeoutHttpProtocol(PlainHttpProtocol):
    """uvicorn's HTTP protocol with bounded patience, in seconds, for each connection."""

    stall, head = 30.0, 30.0  # to read our output, to send a whole request head
    places, heads, turns = Shares(2**31), Shares(MAX_HEADS), Turns()  # connections, bytes, steps

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = self._head = 0  # bytes skipped between requests, and bytes of a head
        self._reads, self._whole = 0, False  # reads to be parsed; True if only trailers may follow
        self._heads = self._held = 0  # bytes of all heads in memory, and those in the shares
        self._cycles = list[RequestResponseCycle]()  # of requests without a complete answer
        self._refused, self._peer = False, network_of(self.client[0] if self.client else "")
        transport.set_write_buffer_limits(high=0)
        if hasattr(transport, "max_size"):  # asyncio's own loop
            transport.max_size = READ
        peer = transport.get_extra_info("socket")
        if peer is not None:  # a small write must not wait for the ACK of the one before
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if peer is not None and hasattr(socket, "TCP_KEEPIDLE"):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self._await_head()
        self._placed = self.places.take(self._peer, 1)
        if not self._placed:
            self._refuse(ApiError(503, "too many connections", code="connections_full"))

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._disarm(name)
        if self._placed:
            self.places.give_back(self._peer, 1)
        self._forget_heads()
        self.turns.drop(self._peer, self)
        self._leave()
        self._unset_keepalive_if_required()  # else a reset connection would be kept till then
        HttpToolsProtocol.connection_lost(self, exc)
        self.pipeline, self._cycles, self.cycle = None, [], None  # type: ignore[assignment]  # cycles

    @property
    def _busy(self) -> bool:
        """True while an earlier request has no complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, unless it is answering, and close the connection."""
        self._refused = True
        if self._busy:  # an answer here would stand before those of earlier requests
            self._leave()
            self.transport.abort()
            return
        content = json.dumps(error.body()).encode()
        lines = [f"HTTP/1.1 {error.status_code} Refused", "content-type: application/json"]
        lines += [f"content-length: {len(content)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(lines).encode() + content)
        self.transport.close()

    def _refuse_head(self) -> None:
        why = f"headers: more than {MAX_HEAD} bytes, {LINE} a line at least, or too many at once"
        self._refuse(ApiError(431, why, code="headers_too_large"))

    def data_received(self, data: bytes) -> None:
        self._reads += 1
        self.turns.take(self._peer, self, partial(self._parse, data), 0.0)
        if self._reads > 0:
            self.transport.pause_reading()  # until it is this client's turn

    def _parse(self, data: bytes) -> None:
        self._reads -= 1
        for at in range(0, len(data), PART):
            if self._refused:
                return
            piece = data[at : at + PART]
            self._idle += len(piece)
            PlainHttpProtocol.data_received(self, piece)
            if not self._refused:
                self._count_heads()
        self._await_head()
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _count_heads(self) -> None:
        """Count the bytes of heads beyond `FREE` in the peer's share; refuse more than that."""
        more = self._heads + self._idle - FREE - self._held
        if self._idle > MAX_HEAD or (more > 0 and not self.heads.take(self._peer, more)):
            self._refuse_head()
        else:
            self._held += max(0, more)

    def _forget_heads(self) -> None:
        self.heads.give_back(self._peer, self._held)
        self._heads = self._held = 0

    def _leave(self) -> None:
        """Send a disconnect to all requests; uvicorn sends it to the last pipelined one only."""
        for cycle in self._cycles:
            self.turns.drop(self._peer, cycle)
            cycle.disconnected = True
            cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        start = partial(HttpToolsProtocol._start_asgi_task, self, cycle, app)
        self.turns.take(self._peer, cycle, start)

    def on_message_begin(self) -> None:
        HttpToolsProtocol.on_message_begin(self)
        self._head, self._whole = 0, False
        if not self._busy:
            self._forget_heads()

    def on_url(self, url: bytes) -> None:
        HttpToolsProtocol.on_url(self, url)
        self._head += len(url)
        if self._head > MAX_URL and not self._refused:
            self._refuse(ApiError(414, f"URL: more than {MAX_URL} bytes", code="url_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
            self._refuse(ApiError(501, "Transfer-Encoding: must be chunked", code="not_chunked"))
        self._head += max(LINE, len(name) + len(value) + 4)
        if self._head > MAX_HEAD and not self._refused:
            self._refuse_head()
        if not (
            self._refused or self._whole or name.lower() == b"cookie"
        ):  # FastAPI would parse it
            HttpToolsProtocol.on_header(self, name, value)

    def on_headers_complete(self) -> None:
        if not self._refused and len(self.pipeline) >= MAX_PIPELINED:
            self._refuse_head()
        if self._refused or self.parser.should_upgrade():
            return
        self._idle, self._whole = 0, True
        self._heads += max(self._head, FREE)  # a request that waits takes as much in objects
        if not self.url.startswith(b"/"):  # the host in it counts, whatever `Host` says (RFC 9112)
            self.headers.append((b"host", urlsplit(self.url).netloc))
        HttpToolsProtocol.on_headers_complete(self)
        self._cycles = [each for each in self._cycles if not each.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._idle = 0
        if (
            self.pipeline and not self._refused
        ):  # nobody reads it yet, so it would count in no share
            self._refuse(ApiError(431, "body: sent before the last answer", code="body_too_early"))
        if not self._refused:
            HttpToolsProtocol.on_body(self, body)
            if self.cycle.response_complete:
                self.cycle.body.clear()  # nobody will read it
            elif len(self.cycle.body) > FREE:  # more would wait uncounted
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._idle, cycle = 0, self.cycle

        def end() -> None:
            cycle.more_body = False
            cycle.message_event.set()

        if not (self._refused or self.parser.should_upgrade()):
            self.turns.take(self._peer, cycle, end)

    def _arm(self, name: str, seconds: float) -> None:
        """Cut the connection in `seconds`, unless disarmed before."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _await_head(self) -> None:
        """Arm the deadline for the next request's head between two requests, else disarm it."""
        self._disarm("head") if self._busy else self._arm("head", self.head)

    def pause_writing(self) -> None:
        """Arm the stall deadline while the peer reads nothing."""
        HttpToolsProtocol.pause_writing(self)
        self._arm("stall", self.stall)

    def resume_writing(self) -> None:
        self._disarm("stall")
        HttpToolsProtocol.resume_writing(self)


def timeout_http_protocol(
    stall: float, head: float = 30.0, connections: int = 2**31
) -> type[asyncio.Protocol]:
    """Return the protocol class for one server."""
    fields = {"stall": stall, "head": head, "places": Shares(connections)}
    fields |= {"heads": Shares(MAX_HEADS), "turns": Turns()}
    return type("TimeoutHttpProtocol", (TimeoutHttpProtocol,), fields)


def connection_places() -> tuple[int, int]:
    """Raise the limit on descriptors; return how many connections may be open, and may wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(limit for limit in (hard, 2**11) if limit != resource.RLIM_INFINITY)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    backlog = max(8, min(2048, most // 16))  # asyncio accepts this many in one turn of its loop
    return max(8, most - psutil.Process().num_fds() - backlog - 16), backlog


def http_config(app: ASGIApp, stall: float, trusted: str | None) -> uvicorn.Config:
    """Make the settings of uvicorn; `trusted` proxies may set the address of a client."""
    places, backlog = connection_places()
    return uvicorn.Config(
        app, http=timeout_http_protocol(stall, connections=places), ws="none", log_level="warning",
        access_log=False, backlog=backlog, proxy_headers=bool(trusted),
        forwarded_allow_ips=trusted, timeout_graceful_shutdown=2, timeout_keep_alive=75,
    )  # fmt: skip
