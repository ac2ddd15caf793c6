"""Starts the parts of a server, as processes or as threads, and stops them again.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from minisgl.config import ServerConfig, resolve_model_path
from minisgl.scheduler.messages import ExitMsg
from minisgl.scheduler.scheduler import Scheduler, build_scheduler
from minisgl.server.channels import QueueBox, SchedulerChannel, ZmqInbox, ZmqOutbox
from minisgl.server.frontend import Frontend
from minisgl.server.worker import TextWorker, run_text_worker
from minisgl.tokenizer import Tokenizer


class StartFailed(RuntimeError):
    """A part of the server could not start; the message says which and why."""


def run_scheduler(scheduler: Scheduler, overlap: bool) -> None:
    """Loop until an `ExitMsg`, overlapped or in turns."""
    if overlap:
        scheduler.run_overlap()
    else:
        scheduler.run()


@dataclass(frozen=True)
class Addresses:
    """Where each inbox listens. With no extra tokenizers, one text worker does both jobs."""

    scheduler: str
    detokenizer: str
    tokenizers: tuple[str, ...]
    frontend: str

    @classmethod
    def in_folder(cls, folder: Path, num_tokenizer: int) -> Addresses:
        def name(part: str) -> str:
            return f"ipc://{folder / part}"

        extra = tuple(name(f"tokenizer-{i}") for i in range(num_tokenizer))
        return cls(name("scheduler"), name("text"), extra or (name("text"),), name("frontend"))


class ThreadedServer:
    """All parts in threads of this process: for notebooks, tests and small tools. One rank.

    The scheduler and the text worker are the ones that serve; only the boxes differ.
    """

    def __init__(self, config: ServerConfig) -> None:
        to_scheduler, to_text, to_frontend = QueueBox(), QueueBox(), QueueBox()
        self._to_scheduler, self._to_text = to_scheduler, to_text
        self._overlap = config.overlap
        self.scheduler = build_scheduler(config, SchedulerChannel(to_scheduler, to_text))
        tokenizer = Tokenizer(resolve_model_path(config.model_path))
        self._worker = TextWorker(tokenizer, to_scheduler, to_frontend)
        self.frontend = Frontend([to_text], to_frontend)
        self._threads = [
            threading.Thread(target=self._run_scheduler, name="scheduler", daemon=True),
            threading.Thread(target=self._run_text, name="text", daemon=True),
        ]

    def __enter__(self) -> ThreadedServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._to_scheduler.put(ExitMsg())
        self._to_text.put(ExitMsg())
        for thread in self._threads:
            thread.join(timeout=10)

    def _run_scheduler(self) -> None:
        """A scheduler that fails takes no caller with it: all streams end with the reason."""
        try:
            run_scheduler(self.scheduler, self._overlap)
        except Exception as error:
            traceback.print_exc()
            self.frontend.fail_all(f"the scheduler died: {error}")

    def _run_text(self) -> None:
        run_text_worker(self._worker, self._to_text, alive=lambda: True)


class Part(Protocol):
    """The main function of a worker process; it calls `ready()` once it can work."""

    def __call__(
        self, config: ServerConfig, addresses: Addresses, index: int, ready: Callable[[], None]
    ) -> None: ...


def parent_alive() -> bool:
    """Whether the process that started this one still lives; a worker must not outlive it."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def text_part(
    config: ServerConfig, addresses: Addresses, index: int, ready: Callable[[], None]
) -> None:
    """Text worker: index -1 is the one that detokenizes, 0… are extra tokenizers."""
    inbox = ZmqInbox(addresses.detokenizer if index < 0 else addresses.tokenizers[index])
    to_scheduler, to_frontend = ZmqOutbox(addresses.scheduler), ZmqOutbox(addresses.frontend)
    tokenizer = Tokenizer(resolve_model_path(config.model_path))
    ready()
    run_text_worker(TextWorker(tokenizer, to_scheduler, to_frontend), inbox, parent_alive)
    for box in (inbox, to_scheduler, to_frontend):
        box.close()


def scheduler_part(
    config: ServerConfig, addresses: Addresses, index: int, ready: Callable[[], None]
) -> None:
    """Scheduler of the only rank, or rank 0 of several."""
    inbox, outbox = ZmqInbox(addresses.scheduler), ZmqOutbox(addresses.detokenizer)
    channel = SchedulerChannel(inbox, outbox, parent_alive)
    scheduler = build_scheduler(config, channel)
    ready()
    try:
        run_scheduler(scheduler, config.overlap)
    finally:
        channel.close()


def enter(
    part: Part, name: str, config: ServerConfig, addresses: Addresses, index: int, status: Any
) -> None:
    """First code of every worker process: tells the parent that it is ready, or why it failed."""
    # Ctrl-C reaches the whole group; the parent alone answers it, and tells us to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        part(config, addresses, index, lambda: status.put((name, None)))
    except Exception as error:
        traceback.print_exc()
        status.put((name, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


class WorkerGroup:
    """The worker processes of one server and the folder of their sockets. A context manager."""

    def __init__(self, config: ServerConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="minisgl-"))
        self.addresses = Addresses.in_folder(self._folder, config.num_tokenizer)
        context = multiprocessing.get_context("spawn")
        self._status = context.SimpleQueue()
        parts: list[tuple[Part, str, int]] = [
            (scheduler_part, "scheduler", 0),
            (text_part, "text worker", -1),
        ]
        parts += [(text_part, f"tokenizer {i}", i) for i in range(config.num_tokenizer)]
        self._processes: dict[str, BaseProcess] = {
            name: context.Process(
                target=enter,
                args=(part, name, config, self.addresses, index, self._status),
                name=f"minisgl {name}",
            )
            for part, name, index in parts
        }

    def __enter__(self) -> WorkerGroup:
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

    def dead(self) -> str | None:
        """Name of a worker that has ended, or None while all live."""
        return next((name for name, p in self._processes.items() if not p.is_alive()), None)

    def __exit__(self, *_: object) -> None:
        """Ask every worker to leave, then insist; no process and no socket file stays behind."""
        for address in {
            self.addresses.scheduler,
            self.addresses.detokenizer,
            *self.addresses.tokenizers,
        }:
            box = ZmqOutbox(address)
            box.put(ExitMsg())
            box.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes.values():
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        for insist in ("terminate", "kill"):
            for process in self._processes.values():
                if process.is_alive():
                    getattr(process, insist)()
                    process.join(timeout=2.0)
        shutil.rmtree(self._folder, ignore_errors=True)
