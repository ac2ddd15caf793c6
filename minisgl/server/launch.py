"""Starts the worker processes of a server, watches them, and stops them again.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import signal
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from minisgl.config import ServerConfig
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.channels import ZmqOutbox
from minisgl.server.parts import Addresses

SCHEDULER = "minisgl.server.scheduler_part:scheduler_part"
TEXT = "minisgl.server.worker:text_part"


class StartFailed(RuntimeError):
    """A part of the server could not start; the message says which and why."""


def enter(
    part: str, name: str, config: ServerConfig, addresses: Addresses, index: int, status: Any
) -> None:
    """First code of every worker process: tells the parent that it is ready, or why it failed."""
    # Ctrl-C reaches the whole group; the parent alone answers it, and tells us to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, function = part.split(":")
    try:
        main = getattr(importlib.import_module(module), function)
        main(config, addresses, index, lambda: status.put((name, None)))
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
