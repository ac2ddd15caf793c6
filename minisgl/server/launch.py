"""Starts the worker processes of a server, watches them, and stops them again.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from minisgl.config import ServerConfig
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.channels import ZmqOutbox
from minisgl.server.parts import Addresses, leave_with_parent

SCHEDULER = "minisgl.server.scheduler_part:scheduler_part"
TEXT = "minisgl.server.worker:text_part"


class StartFailed(RuntimeError):
    """A part of the server could not start; the message says which and why."""


def enter(
    part: str, name: str, config: ServerConfig, addresses: Addresses, index: int, status: Any
) -> None:
    """First code of every worker process: tells the parent that it is ready, or why it failed."""
    # Ctrl-C reaches the whole group; the parent alone answers it, and tells us to leave.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order: what we made, we remove
    leave_with_parent(addresses.folder)
    module, function = part.split(":")
    try:
        main = getattr(importlib.import_module(module), function)
        main(config, addresses, index, lambda: status.put((name, None)))
    except Exception as error:
        traceback.print_exc()
        status.put((name, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


@contextmanager
def ignoring(*signals: signal.Signals) -> Iterator[None]:
    """Signals that have no effect on the block, nor ever on processes that are started in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WorkerGroup:
    """The worker processes of one server and the folder of their sockets. A context manager."""

    def __init__(self, config: ServerConfig) -> None:
        # The path of a socket has at most 107 bytes; 32 of them are ours.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 75 else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="minisgl-", dir=place))
        self.addresses = Addresses.in_folder(self._folder, config.num_tokenizer)
        context = multiprocessing.get_context("spawn")
        self._status = context.SimpleQueue()
        self._grace = 0.0  # seconds to end by themselves, once they can hear us
        parts = [(SCHEDULER, "scheduler", 0), (TEXT, "text worker", -1)]
        parts += [(TEXT, f"tokenizer {i}", i) for i in range(config.num_tokenizer)]
        self._processes: dict[str, BaseProcess] = {
            name: context.Process(
                target=enter,
                args=(part, name, config, self.addresses, index, self._status),
                name=f"minisgl {name}",
            )
            for part, name, index in parts
        }

    def __enter__(self) -> WorkerGroup:
        with ignoring(signal.SIGINT):
            for process in self._processes.values():
                process.start()
        return self

    def wait_ready(self, timeout: float = 1800.0) -> None:
        """Return when every part can work. Raises `StartFailed` with the part's own reason."""
        deadline, waiting = time.monotonic() + timeout, set(self._processes)
        while waiting:
            if self._status.empty():
                dead = self.dead()
                if dead is not None and self._status.empty():
                    raise StartFailed(f"{dead} ended before it was ready")
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"not ready within {timeout:.0f} s: {', '.join(sorted(waiting))}"
                    )
                time.sleep(0.02)
                continue
            name, problem = self._status.get()
            if problem is not None:
                raise StartFailed(f"{name}: {problem}")
            waiting.discard(name)
        self._grace = 5.0

    def dead(self) -> str | None:
        """Name of a worker that has ended, or None while all live."""
        return next((name for name, p in self._processes.items() if not p.is_alive()), None)

    def __exit__(self, *_: object) -> None:
        """Ask every worker to leave, then insist; no process and no socket file stays behind."""
        with ignoring(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if self._grace:
                self._ask()
            deadline = time.monotonic() + self._grace
            for process in self._processes.values():
                process.join(timeout=max(0.0, deadline - time.monotonic()))
            for insist in ("terminate", "kill"):
                for process in self._processes.values():
                    if process.is_alive():
                        getattr(process, insist)()
                        process.join(timeout=2.0)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self) -> None:
        """An `ExitMsg` to every inbox."""
        for address in {
            self.addresses.scheduler,
            self.addresses.detokenizer,
            *self.addresses.tokenizers,
        }:
            box = ZmqOutbox(address)
            box.put(ExitMsg())
            box.close()
