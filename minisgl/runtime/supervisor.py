"""Starts worker processes, watches each of them, and leaves none behind.

Generated from notebooks/10b_ranks.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
from tqdm import tqdm

from minisgl.runtime.heartbeat import Heartbeat, Watchdog


class WorkerFailed(RuntimeError):
    """The error for a worker that did not start, failed or died; its traceback is a note."""


class PeerFailed(RuntimeError):
    """Raised by a worker that cannot continue because another one failed."""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's reports to its parent: that it is ready, and each iteration of its loop."""

    ready: Callable[[], None]
    beat: Callable[[], None]


class Worker(NamedTuple):
    """A process to start: `module:function` is called with `args` and a `WorkerContext`."""

    name: str
    entry: str
    args: tuple[Any, ...] = ()


class Ending(NamedTuple):
    """End of a worker: "done" with its result, "failed", or "lost" by another's failure."""

    kind: str
    value: Any  # the result, or the reason in one line
    details: str = ""  # a traceback


def one_line(error: BaseException) -> str:
    """Format an error as one line: ours begin with the invalid field, others with their type."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, (ValueError, WorkerFailed)) else f"{type(error).__name__}: {text}"
    )


def exit_with_parent(folder: Path | None = None) -> None:
    """End this process at any point when its parent is killed, and remove `folder`."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="exit with parent").start()


OF_THE_GROUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # the parent handles them for all
LEAVE = signal.SIGUSR1  # with it the parent ends a worker


def worker_main(worker: Worker, report: Connection, counts: Any, folder: Path | None) -> None:
    """Run a worker's function in its new process and report how it ended."""
    for sig in OF_THE_GROUP:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_GROUP)  # blocked since our start
    exit_with_parent(folder)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which outlives a killed process
    heartbeat = Heartbeat(counts)

    def ready() -> None:
        heartbeat.start()
        report.send_bytes(pickle.dumps("ready"))

    try:
        module, function = worker.entry.split(":")
        main = getattr(importlib.import_module(module), function)
        # From here on there are resources to free in order. Not before: PyTorch's import calls
        # Python from C++, which aborts on an exception.
        signal.signal(LEAVE, lambda *_: sys.exit(1))
        ending = Ending("done", main(*worker.args, WorkerContext(ready, heartbeat.beat)))
    except Exception as error:
        kind = "lost" if isinstance(error, PeerFailed) else "failed"
        ending = Ending(kind, f"failed: {one_line(error)}", traceback.format_exc())
    finally:
        signal.signal(LEAVE, signal.SIG_IGN)  # it would interrupt libraries' exit handlers
    # As bytes: `send` would share a tensor's memory with this process, which is about to end.
    report.send_bytes(pickle.dumps(ending))
    sys.exit(ending.kind != "done")


@contextmanager
def override_signals(handler: Any, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Set another handler of some signals during the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return
    before = {sig: signal.signal(sig, handler) for sig in signals}
    try:
        yield
    finally:
        for sig, usual in before.items():
            signal.signal(sig, usual)


@contextmanager
def defer_signals(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Hold signals back until after the block; processes that it starts inherit the mask."""
    ensure_running()  # first, because it unblocks signals
    heard: list[int] = []  # by other threads
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        with override_signals(lambda sig, _: heard.append(sig), signals):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for sig in heard:
            signal.raise_signal(sig)


def kill_orphans(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run, which nothing else would stop."""
    left = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in left:
        process.kill()
    for process in left:
        process.join()


class Supervisor:
    """A context manager of worker processes and the folder of their sockets, if any."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        watchdog: Watchdog | None = None,
        folder: Path | None = None,
        start_seconds: float = 1800.0,
        method: str = "spawn",
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self._watchdog, self._folder = watchdog, folder
        self._start_seconds, self._deadline = start_seconds, 0.0
        self.grace = 0.0  # seconds for workers that are ready to end by themselves
        self.ready: set[str] = set()
        self.ended: dict[str, Ending] = {}
        self.processes: dict[str, BaseProcess] = {}
        self._pipes: dict[str, tuple[Connection, Connection]] = {}
        # No lock, since each integer has one writer: a killed worker would leave it locked.
        self._heartbeats = {worker.name: context.RawArray("q", 2) for worker in workers}
        for worker in workers:
            self._pipes[worker.name] = pipe = context.Pipe(duplex=False)
            args = (worker, pipe[1], self._heartbeats[worker.name], folder)
            name = f"minisgl {worker.name}"
            self.processes[worker.name] = context.Process(target=worker_main, args=args, name=name)
        # Not daemons, which a forked child would also end when it ends.
        Finalize(self, kill_orphans, (list(self.processes.values()),), exitpriority=0)

    def __enter__(self) -> Self:
        try:
            with defer_signals(OF_THE_GROUP):
                for name, process in self.processes.items():
                    process.start()
                    self._pipes[name][1].close()  # so that the pipe ends with the process
        except BaseException:  # a process did not start, or a signal came
            self.stop()
            raise
        self._deadline = time.monotonic() + self._start_seconds
        return self

    def listen(self, seconds: float = 0.0) -> None:
        """Read reports for at most `seconds`; return early when a worker has reported."""
        running = {name: self._pipes[name][0] for name in self.processes if name not in self.ended}
        heard = wait(list(running.values()), timeout=seconds) if running else []
        for name, pipe in running.items():
            if pipe not in heard:
                continue
            try:
                message = pickle.loads(pipe.recv_bytes())
            except EOFError:
                self.ended[name] = Ending("failed", self._silent_end(name))
                continue
            if isinstance(message, Ending):
                self.ended[name] = message
            else:
                self.ready.add(name)
                if len(self.ready) == len(self.processes):
                    self.grace = 5.0

    def _silent_end(self, name: str) -> str:
        """Describe the end of a process without a report: killed, or crashed below Python."""
        self.processes[name].join(1.0)
        code = self.processes[name].exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return how if name in self.ready else f"{how}: it ended before it was ready"

    def check(self) -> None:
        """Raise WorkerFailed with the traceback of the first worker that failed, if any."""
        self.listen()
        deadline = time.monotonic() + 3.0  # others lose their connection first and report it first
        while True:
            kinds = {ending.kind: name for name, ending in reversed(self.ended.items())}
            if kinds.keys() <= {"done"}:
                return
            all_ended = len(self.ended) == len(self.processes)
            if "failed" in kinds or all_ended or time.monotonic() > deadline:
                raise self._error(kinds.get("failed") or kinds["lost"])
            self.listen(0.1)

    def _error(self, name: str) -> WorkerFailed:
        error = WorkerFailed(f"{name} {self.ended[name].value}")
        if self.ended[name].details:
            error.add_note(f"In {name}:\n{self.ended[name].details}")
        return error

    def starting(self) -> bool:
        """Return True if a worker is not ready yet; raise WorkerFailed if one fails or is late."""
        self.check()
        late = sorted(self.processes.keys() - self.ready - self.ended.keys())
        if late and time.monotonic() > self._deadline:
            raise WorkerFailed(f"{', '.join(late)} not ready within {self._start_seconds:g} s")
        return bool(late)

    def broken(self) -> WorkerFailed | None:
        """Return the error of a worker that died or hangs, once all were ready; poll often."""
        self.listen()
        for name, ending in self.ended.items():
            self.processes[name].join(1.0)
            code = self.processes[name].exitcode or 0
            how = f" (signal {-code}, {signal.strsignal(-code)})" if code < 0 else ""
            error = WorkerFailed(f"the {name} died{how}")
            if ending.details:
                error.add_note(ending.details)
            return error
        silent = self._watchdog.check(self._heartbeats) if self._watchdog else None
        return None if silent is None else WorkerFailed(silent)

    def request_exit(self) -> None:
        """Send workers that are ready a request to end; subclasses choose the message."""

    def stop(self) -> None:
        """Stop every worker, by request and then by signal; leave no process or socket file."""
        with override_signals(signal.SIG_IGN, OF_THE_GROUP):
            started = [process for process in self.processes.values() if process.pid is not None]
            descendants = self._descendants(started)
            if self.grace:
                self.request_exit()
            deadline = time.monotonic() + self.grace
            for process in started:
                process.join(timeout=max(0.0, deadline - time.monotonic()))
            for sig, seconds in ((LEAVE, 1.0), (signal.SIGKILL, 2.0)):
                left = [process for process in started if process.is_alive()]
                for process in left:
                    with suppress(psutil.NoSuchProcess):  # ended just now
                        psutil.Process(process.pid).send_signal(sig)
                for process in left:
                    process.join(timeout=seconds)
            for descendant in descendants:
                with suppress(psutil.NoSuchProcess):  # usually it has ended
                    descendant.kill()
            for receiver, _ in self._pipes.values():
                receiver.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _descendants(self, workers: Sequence[BaseProcess]) -> list[psutil.Process]:
        """List the processes that our workers started, so that none outlives them."""
        found: list[psutil.Process] = []
        for process in workers:
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(process.pid).children(recursive=True)
        return found
