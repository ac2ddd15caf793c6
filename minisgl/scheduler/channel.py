"""How messages reach a scheduler and replies leave it; the simplest way, inside one process.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Protocol

from minisgl.scheduler.messages import Msg, Reply


class Channel(Protocol):
    """The scheduler's two ends: messages come in, replies go out, both in order."""

    def recv(self, block: bool) -> list[Msg]:
        """Return the waiting messages, oldest first; with `block`, wait until there is one."""
        ...

    def send(self, replies: Sequence[Reply]) -> None:
        """Send replies, in this order, without blocking."""
        ...


def drain(source: queue.SimpleQueue) -> Iterator:
    """Yield everything that is in a queue now."""
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return


class InProcessChannel:
    """Two queues in one process: a caller puts messages in and takes replies out."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Msg] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def put_messages(self, *messages: Msg) -> None:
        for message in messages:
            self._inbox.put(message)

    def take_replies(self) -> list[Reply]:
        return list(drain(self._outbox))

    def recv(self, block: bool) -> list[Msg]:
        first = [self._inbox.get()] if block else []
        return first + list(drain(self._inbox))

    def send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._outbox.put(reply)

    @property
    def waiting(self) -> bool:
        """True if there are messages that were not received yet."""
        return not self._inbox.empty()
