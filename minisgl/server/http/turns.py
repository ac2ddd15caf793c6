"""Turns of the event loop, divided among clients.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SECONDS = 0.008  # of the loop's thread, for the steps of all clients in one turn
STEP = SECONDS / 16  # of a step that causes later work, at least


class Turns:
    """Steps of clients, which take `SECONDS` in one turn of the event loop."""

    def __init__(self) -> None:
        self._used, self._begun, self._running = 0.0, False, False  # in this turn
        self._waiting: dict[str, dict[object, list[tuple[Callable[[], object], float]]]] = {}

    def take(
        self, client: str, owner: object, call: Callable[[], object], least: float = STEP
    ) -> None:
        """Do a step, now or after earlier ones of its client."""
        if not self._begun:
            self._begun = True
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.setdefault(client, {}).setdefault(owner, []).append((call, least))
        if not self._running:  # else the step that runs is followed by others
            self._run()

    def _run(self) -> None:
        """Do steps while this turn has time; those of one owner are done together."""
        self._running = True
        try:
            while self._waiting and self._used < SECONDS:
                client = next(iter(self._waiting))
                owners = self._waiting.pop(client)
                steps = owners.pop(next(iter(owners)))
                if owners:
                    self._waiting[client] = owners  # behind the other clients
                for call, least in steps:
                    start = time.thread_time()
                    call()
                    self._used += max(least, time.thread_time() - start)
        finally:
            self._running = False

    def _next(self) -> None:
        """Begin the next turn."""
        self._used, self._begun = 0.0, bool(self._waiting)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
            self._run()

    def drop(self, client: str, owner: object) -> None:
        """Drop the steps of a connection or a request whose client left."""
        owners = self._waiting.get(client, {})
        owners.pop(owner, None)
        if not owners:
            self._waiting.pop(client, None)


class PlainHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which ignores offers of another one (RFC 9110, 7.8).

    A subclass ignores a head and its end while `parser.should_upgrade()`: they come again.
    """

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._repeat_head(data[stop.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _repeat_head(self, rest: bytes) -> None:
        """Parse the head again without its offer, then the `rest` of the data."""
        if (method := self.parser.get_method()) == b"CONNECT":
            self.send_400_response("CONNECT is for proxies.")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % line for line in self.headers
                  if line[0] not in (b"connection", b"upgrade")]  # fmt: skip
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        PlainHttpProtocol.data_received(self, b"\r\n".join([*lines, b"", rest]))
