"""Turns of the event loop, divided among clients.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 0.004  # of a client in one turn
STEP = SECONDS / 16  # of a step that causes later work, at least


class Turns:
    """Steps of clients: each has `SECONDS` for them in one turn of the event loop."""

    def __init__(self) -> None:
        self._used, self._running = dict[str, float](), False  # seconds of each in this turn
        self._waiting: dict[str, dict[object, list[tuple[Callable[[], object], float]]]] = {}

    def take(
        self, client: str, owner: object, call: Callable[[], object], least: float = STEP
    ) -> bool:
        """Do a step, now or after the earlier ones of its client; return True if it is done."""
        if client not in self._used:
            self._used[client], self._waiting[client] = 0.0, {}
            asyncio.get_running_loop().call_soon(self._next, client)
        self._waiting[client].setdefault(owner, []).append((call, least))
        if not self._running:  # else the step that runs is followed by this one
            self._run(client)
        return owner not in self._waiting[client]

    def _run(self, client: str) -> None:
        waiting, self._running = self._waiting[client], True
        try:
            while waiting and self._used[client] < SECONDS:
                for call, least in waiting.pop(next(iter(waiting))):
                    start = time.thread_time()
                    call()
                    self._used[client] += max(least, time.thread_time() - start)
        finally:
            self._running = False

    def _next(self, client: str) -> None:
        """Begin the next turn of a client; forget it if nothing waits."""
        if self._waiting[client]:
            asyncio.get_running_loop().call_soon(self._next, client)
            self._used[client] = 0.0
            self._run(client)
        else:
            del self._used[client], self._waiting[client]

    def drop(self, client: str, owner: object) -> None:
        """Drop the steps of a connection or a request whose client left."""
        self._waiting.get(client, {}).pop(owner, None)
