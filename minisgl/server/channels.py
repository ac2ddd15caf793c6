"""How messages travel: a queue inside one process, or a ZeroMQ socket between processes.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from minisgl.scheduler.messages import ExitMsg, Msg, Reply
from minisgl.server.messages import Codec, Message, Watched


class Outbox(Protocol):
    """Where a part puts what it says. Putting never blocks for long and keeps the order."""

    def put(self, msg: Message) -> None: ...


class Wire(Outbox, Protocol):
    """An outbox that is cheaper for several messages at once."""

    def put_all(self, messages: Sequence[Message]) -> None: ...


class Inbox(Protocol):
    """Where a part reads what it is told; which messages those are is the wiring's business."""

    def get_all(self, timeout: float) -> list[Any]:
        """Wait up to `timeout` seconds for a message, then take all that are there, in order."""
        ...


class QueueBox:
    """Both ends of a queue between two threads of one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, msg: Message) -> None:
        self._queue.put(msg)

    def put_all(self, messages: Sequence[Message]) -> None:
        for msg in messages:
            self._queue.put(msg)

    def get_all(self, timeout: float) -> list[Any]:
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(block=timeout > 0, timeout=timeout or None))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class ZmqInbox:
    """The reading end, a PULL socket: it binds, so many may push to it. One thread only."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._codec = Codec()

    def get_all(self, timeout: float) -> list[Any]:
        messages: list[Message] = []
        if self._socket.poll(int(timeout * 1000)):
            try:
                while True:
                    messages += self._codec.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqOutbox:
    """The writing end, a PUSH socket: messages wait in it for the reader. One thread only."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._codec = Codec()

    def put(self, msg: Message) -> None:
        self.put_all([msg])

    def put_all(self, messages: Sequence[Message]) -> None:
        self._socket.send(self._codec.encode(messages))

    def close(self) -> None:
        # Half a second for the last words: a reader that is gone must not hold us.
        self._socket.close(linger=500)


class Gathered:
    """An outbox that keeps messages until `flush`, which sends them as one."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._held: list[Message] = []

    def put(self, msg: Message) -> None:
        self._held.append(msg)

    def flush(self) -> None:
        if self._held:
            self._wire.put_all(self._held)
            self._held = []


class SchedulerChannel:
    """The scheduler's channel over two boxes; `alive` says whether to go on waiting.

    `beat` is called in each turn of the loop and while it waits. `report` gives what watchers
    should know; it is asked at most every `report_every` seconds.
    """

    def __init__(
        self, inbox: Inbox, outbox: Wire, alive: Callable[[], bool] = lambda: True,
        beat: Callable[[], None] = lambda: None, report_every: float = 0.5,
    ) -> None:  # fmt: skip
        self._inbox, self._outbox, self.alive, self._beat = inbox, outbox, alive, beat
        self.report: Callable[[], Sequence[Watched]] = list
        self._report_every, self._report_at = report_every, 0.0  # seconds; time of the next one

    def recv(self, block: bool) -> list[Msg]:
        """All messages that wait; with `block`, wait for one, or leave when nobody is left."""
        self._beat()
        messages = self._inbox.get_all(timeout=0.0)
        if block and not messages:
            self._send_report()
        while block and not messages and self.alive():
            self._beat()
            messages = self._inbox.get_all(timeout=0.5)
        if not messages and block:
            return [ExitMsg()]
        return messages

    def send(self, replies: Sequence[Reply]) -> None:
        if replies:
            self._outbox.put_all(replies)
        if time.monotonic() >= self._report_at:
            self._send_report()

    def _send_report(self) -> None:
        self._report_at = time.monotonic() + self._report_every
        for msg in self.report():
            self._outbox.put(msg)

    def close(self) -> None:
        for box in (self._inbox, self._outbox):
            if hasattr(box, "close"):
                box.close()
