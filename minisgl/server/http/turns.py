"""Turns of the event loop, divided among clients.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Turns:
    """Steps of requests: a client may do `most` of them in one turn of the event loop."""

    def __init__(self, most: int = 16) -> None:
        self._most, self._done = most, dict[str, int]()  # steps of each client in this turn
        self._waiting: dict[str, dict[object, list[Callable[[], object]]]] = {}  # in order

    def take(self, client: str, request: object, *calls: Callable[[], object]) -> None:
        """Do a step of a request, these calls, now or after the earlier ones of its client."""
        if client not in self._done:
            self._done[client], self._waiting[client] = 0, {}
            asyncio.get_running_loop().call_soon(self._next, client)
        self._waiting[client].setdefault(request, []).extend(calls)
        self._run(client)

    def _run(self, client: str) -> None:
        waiting = self._waiting[client]
        while waiting and self._done[client] < self._most:
            self._done[client] += 1
            for call in waiting.pop(next(iter(waiting))):
                call()

    def _next(self, client: str) -> None:
        """Begin the next turn of a client; forget it if nothing waits."""
        if self._waiting[client]:
            asyncio.get_running_loop().call_soon(self._next, client)
            self._done[client] = 0
            self._run(client)
        else:
            del self._done[client], self._waiting[client]

    def drop(self, client: str, request: object) -> None:
        """Drop the steps of a request whose client left."""
        self._waiting.get(client, {}).pop(request, None)
