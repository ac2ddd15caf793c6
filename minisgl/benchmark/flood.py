"""The cheapest client: many streams at once, of which only the ends are looked at.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from minisgl.benchmark.client import base_url


class Tail(asyncio.Protocol):
    """One request over a connection of its own; `done` gets the answer's head and tail."""

    def __init__(self, request: bytes, done: asyncio.Future[tuple[bytes, bytes]]) -> None:
        self.request, self.done = request, done
        self.head = self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.head = self.head or data
        self.tail = data if len(data) > 1024 else self.tail[-1024:] + data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result((self.head, self.tail))


def http_request(url: str, body: Mapping[str, Any]) -> bytes:
    """A POST to `/v1/completions`, as bytes; the server closes the connection after it."""
    parts, data = urlsplit(base_url(url)), json.dumps(body).encode()
    head = (
        f"POST {parts.path}completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    )
    return head.encode() + b"\r\n" + data


class Flooded(NamedTuple):
    """Seconds until all streams had ended, and the client's CPU seconds in them."""

    seconds: float
    client_cpu_s: float


def check_answer(head: bytes, tail: bytes, tokens: int) -> None:
    """`ValueError` unless the answer is whole and has so many tokens."""
    counts = re.findall(rb'"completion_tokens": ?(\d+)', tail)
    if not head.startswith(b"HTTP/1.1 200") or b"[DONE]" not in tail or not counts:
        said = (tail or b"nothing").decode(errors="replace")[-300:]
        raise ValueError(f"server: a stream did not end well, it says {said!r}")
    if int(counts[-1]) != tokens:
        raise ValueError(f"server: {tokens} tokens were asked for, got {int(counts[-1])}")


async def flood(url: str, bodies: Sequence[Mapping[str, Any]]) -> Flooded:
    """Send all requests at once and wait for the last end. `ValueError` for a bad answer."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    requests = [http_request(url, body) for body in bodies]
    ends: list[asyncio.Future[tuple[bytes, bytes]]] = [loop.create_future() for _ in bodies]
    start, cpu = time.perf_counter(), time.process_time()

    async def connect(request: bytes, done: asyncio.Future[tuple[bytes, bytes]]) -> None:
        def make() -> Tail:
            return Tail(request, done)

        await loop.create_connection(make, parts.hostname or "", parts.port or 80)

    await asyncio.gather(*map(connect, requests, ends))
    answers = await asyncio.gather(*ends)
    flooded = Flooded(time.perf_counter() - start, time.process_time() - cpu)
    for body, (head, tail) in zip(bodies, answers, strict=True):
        check_answer(head, tail, body["max_tokens"])
    return flooded
