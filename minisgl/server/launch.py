"""Starts the worker processes of a server, watches them, and stops them again.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
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
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from minisgl.config.engine import ServerConfig
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.channels import ZmqOutbox
from minisgl.server.parts import Addresses, Link, leave_with_parent
from minisgl.server.pulse import Pulse, Watch

SCHEDULER = "minisgl.server.scheduler_part:scheduler_part"
TEXT = "minisgl.server.text_part:text_part"


class PartFailed(RuntimeError):
    """A part of the server did not start, or works no more; the message says which and why."""


def one_line(error: Exception) -> str:
    """An error for people: our own begin with the field at fault, others with their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def enter(
    part: str, name: str, config: ServerConfig, addresses: Addresses, index: int, status: Any,
    counts: Any, debug: bool,
) -> None:  # fmt: skip
    """First code of every worker process: tells the parent that it is ready, or why it failed."""
    # Ctrl-C reaches the whole group; the parent alone answers it, and tells us to leave.
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    leave_with_parent(addresses.folder)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which outlives a killed process
    module, function = part.split(":")
    started, pulse = threading.Event(), Pulse(counts)

    def ready() -> None:
        started.set()
        pulse.start()
        status.put((name, None))

    try:
        main = getattr(importlib.import_module(module), function)
        # From here on there are things of ours to remove, in order. Not before: PyTorch's import
        # calls Python from C++ that aborts loudly when an exception comes out of it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        main(config, addresses, index, Link(ready, pulse.beat))
    except Exception as error:
        if debug or started.is_set():
            traceback.print_exc()
        status.put((name, one_line(error)))
        raise SystemExit(1) from error


@contextmanager
def ignoring(*signals: signal.Signals) -> Iterator[None]:
    """Signals that have no effect on the block, nor ever on processes that are started in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in signals}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def private_folder() -> Path:
    """A new folder for sockets that its owner alone may enter (mode 0700)."""
    # The path of a socket has at most 107 bytes; 32 of them are ours.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 75 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="minisgl-", dir=place))


class WorkerGroup:
    """The worker processes of one server and the folder of their sockets. A context manager."""

    def __init__(
        self, config: ServerConfig, watch: Watch, *, traced: bool = False, debug: bool = False
    ) -> None:
        self._folder = private_folder()
        self.addresses = Addresses.in_folder(self._folder, config.num_tokenizer)
        context = multiprocessing.get_context("spawn")
        self._status = context.SimpleQueue()
        self.grace = 0.0  # seconds to end by themselves, once they can hear us
        parts = [(SCHEDULER, "scheduler", int(traced)), (TEXT, "text worker", -1)]
        parts += [(TEXT, f"tokenizer {i}", i) for i in range(config.num_tokenizer)]
        self._waiting = {name for _, name, _ in parts}  # not ready yet
        # One writer for each integer, so no lock: one that a killed worker held would stay locked.
        self._pulses = {name: context.RawArray("q", 2) for _, name, _ in parts}
        self._watch = watch
        self._processes: dict[str, BaseProcess] = {
            name: context.Process(
                target=enter,
                args=(part, name, config, self.addresses, index, self._status,
                      self._pulses[name], debug),
                name=f"minisgl {name}",
            )
            for part, name, index in parts
        }  # fmt: skip

    def __enter__(self) -> WorkerGroup:
        with ignoring(signal.SIGINT):
            for process in self._processes.values():
                process.start()
        return self

    def dead(self) -> str | None:
        """Name of a worker that has ended, or None while all live."""
        return next((name for name, p in self._processes.items() if not p.is_alive()), None)

    def broken(self) -> str | None:
        """Which worker has died or does not work on, once all were ready; ask often."""
        dead = self.dead()
        if dead is None:
            return self._watch.look(self._pulses)
        code = self._processes[dead].exitcode or 0
        how = f" (signal {-code}, {signal.strsignal(-code)})" if code < 0 else ""
        return f"the {dead} died{how}"

    async def wait_ready(self, timeout: float = 1800.0) -> None:
        """Return when every part can work. Raises `PartFailed` with the part's own reason."""
        deadline = time.monotonic() + timeout
        while self._waiting:
            if self._status.empty():
                dead = self.dead()
                if dead is not None and self._status.empty():
                    raise PartFailed(f"{dead}: ended before it was ready")
                if time.monotonic() > deadline:
                    slow = ", ".join(sorted(self._waiting))
                    raise PartFailed(f"{slow}: not ready within {timeout:.0f} s")
                await asyncio.sleep(0.02)
                continue
            name, problem = self._status.get()
            if problem is not None:
                raise PartFailed(f"{name}: {problem}")
            self._waiting.discard(name)
        self.grace = 5.0

    def __exit__(self, *_: object) -> None:
        """Ask every worker to leave, then insist; no process and no socket file stays behind."""
        with ignoring(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ranks = self._ranks()
            if self.grace:
                self._ask()
            deadline = time.monotonic() + self.grace
            for process in self._processes.values():
                process.join(timeout=max(0.0, deadline - time.monotonic()))
            for insist, seconds in (("terminate", 1.0), ("kill", 2.0)):
                left = [process for process in self._processes.values() if process.is_alive()]
                for process in left:
                    getattr(process, insist)()
                for process in left:
                    process.join(timeout=seconds)
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):  # as it should be
                    rank.kill()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ranks(self) -> list[psutil.Process]:
        """Processes that our workers started: they leave with them, unless they are stopped."""
        found: list[psutil.Process] = []
        for process in self._processes.values():
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(process.pid).children(recursive=True)
        return found

    def _ask(self) -> None:
        """An `ExitMsg` to every inbox."""
        addresses = self.addresses
        for address in {addresses.scheduler, addresses.detokenizer, *addresses.tokenizers}:
            box = ZmqOutbox(address)
            box.put(ExitMsg())
            box.close()
