"""The life of a server: load, serve, drain, exit with the right status.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from minisgl.engine.heap import frozen_heap, return_free_memory
from minisgl.runtime.supervisor import Supervisor, WorkerFailed
from minisgl.server.frontend import Frontend
from minisgl.server.http.limits import DRAINING, ConcurrencyLimiter


class Server(uvicorn.Server):
    """Counts stop signals; `Lifecycle` acts on them."""

    asked = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.asked += 1


class Lifecycle:
    """From the first 503 to the exit status: 0 after a stop, 1 after a failure."""

    def __init__(
        self,
        server: Server,
        group: Supervisor,
        frontend: Frontend,
        limiter: ConcurrencyLimiter,
        *,
        drain_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        self.server, self.group, self.frontend, self.limiter = server, group, frontend, limiter
        self.drain_timeout, self.on_ready, self.status = drain_timeout, on_ready, 0  # seconds

    async def run(self, sock: socket.socket) -> int:
        """Serve on a listening socket until the server stops; raise the failure that ended it."""
        return_free_memory()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.server.handle_exit, signal.SIGHUP, None)
        states = asyncio.ensure_future(self._states(sock))
        try:
            await self.server.serve(sockets=[sock])
        finally:
            states.cancel()
            (failure,) = await asyncio.gather(states, return_exceptions=True)
        if isinstance(failure, Exception):  # and not that it was cancelled
            raise failure
        return self.status

    async def _states(self, sock: socket.socket) -> None:
        try:
            if await self._load():
                sock.listen(2048)  # asyncio has reduced it to the number of one turn
                with frozen_heap():
                    self.limiter.reason = None
                    self.on_ready()
                    if await self._serve():
                        await self._drain()
        finally:
            self.server.should_exit = True

    async def _load(self) -> bool:
        """Wait for the workers; False if a signal came first."""
        while not self.server.asked and (self.group.starting() or not self.server.started):
            await asyncio.sleep(0.02)
        return not self.server.asked

    async def _serve(self) -> bool:
        """Serve until a signal comes, and return True; or until a worker fails: False."""
        while not self.server.asked:
            if (broken := self.group.broken()) is not None:
                await self._fail(broken)
                return False
            await asyncio.sleep(0.1)
        return True

    async def _fail(self, broken: WorkerFailed) -> None:
        """Fail all requests, and report what broke."""
        self.status, self.group.grace = 1, 0.5
        self.frontend.fail_all(f"{broken}; restart the server")
        notes = getattr(broken, "__notes__", [])  # tracebacks: after the start they are bugs
        print(f"minisgl: {broken}", *notes, sep="\n", file=sys.stderr, flush=True)
        await asyncio.sleep(1.0)  # time for error events, and for a look at /health

    async def _drain(self) -> None:
        """Reject new requests and wait for those in flight, until a deadline or second signal."""
        self.limiter.reason = DRAINING
        end = time.monotonic() + self.drain_timeout
        if (count := self.limiter.taken) and sys.stdin.isatty():  # stderr is relayed
            wait = f"{count} answer{'s' * (count > 1)} to end, {self.drain_timeout:g} s at most"
            print(f"minisgl: waits for {wait}; Ctrl-C again cuts them", file=sys.stderr, flush=True)
        while self.limiter.taken and time.monotonic() < end and self.server.asked < 2:
            if (broken := self.group.broken()) is not None:
                await self._fail(broken)
                return
            await asyncio.sleep(0.05)
        self.frontend.fail_all(self.limiter.reason)
        await asyncio.sleep(0.05)
