"""Message channels: a queue inside one process, or a ZeroMQ socket between processes.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Any, Protocol

import zmq

from minisgl.server.workers.messages import Message, decode, encode

MOST_MESSAGES, MOST_BYTES = 1024, 2**20  # taken in one call, or a few more: others are waiting


class Outbox(Protocol):
    """The sending end of a queue. It never blocks for long and keeps the order."""

    def put(self, *messages: Message) -> None: ...


class Inbox(Protocol):
    """Waits up to `timeout` seconds for a message, then returns all that have arrived, in order."""

    def get_all(self, timeout: float) -> list[Any]: ...


class LocalQueue:
    """Both ends of a queue between two threads of one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, *messages: Message) -> None:
        for msg in messages:
            self._queue.put(msg)

    def get_all(self, timeout: float) -> list[Any]:
        messages: list[Message] = []
        with suppress(queue.Empty):
            messages.append(self._queue.get(block=timeout > 0, timeout=timeout or None))
            while len(messages) < MOST_MESSAGES:
                messages.append(self._queue.get_nowait())
        return messages


def zmq_socket(kind: int) -> zmq.Socket[bytes]:
    """Make a socket that drops nothing and never blocks its writer; for one thread only."""
    found: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    found.set_hwm(0)
    return found


class ZmqInbox:
    """The reading end, a PULL socket: it binds, so many may push to it."""

    def __init__(self, address: str) -> None:
        self._socket = zmq_socket(zmq.PULL)
        self._socket.bind(address)

    def get_all(self, timeout: float) -> list[Any]:
        messages, size = list[Message](), 0
        while len(messages) < MOST_MESSAGES and size < MOST_BYTES:
            if not self._socket.poll(int(timeout * 1000)):
                break
            messages += decode(frame := self._socket.recv())
            size, timeout = size + len(frame), 0.0
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqOutbox:
    """The writing end, a PUSH socket: messages wait in it for the reader."""

    def __init__(self, address: str) -> None:
        self._socket = zmq_socket(zmq.PUSH)
        self._socket.connect(address)

    def put(self, *messages: Message) -> None:
        self._socket.send(encode(messages))

    def close(self) -> None:
        self._socket.close(linger=500)  # ms; a dead reader must not block the exit
