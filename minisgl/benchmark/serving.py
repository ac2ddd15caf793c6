"""`python -m minisgl` as a child process: started on a free port, stopped at the end.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import psutil

from minisgl.server.options import FLAG_OF


class Child(NamedTuple):
    """A running server: its URL and its process."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of the HTTP process and of each worker with its children."""
        children = sorted(self.process.children(), key=lambda p: p.create_time())
        workers = [p for p in children if "resource_tracker" not in " ".join(p.cmdline())]
        names = ["scheduler", *(f"text {i}" for i in range(len(workers)))]  # in order of start
        spent = {"http": sum(self.process.cpu_times()[:2])}
        for name, worker in zip(names, workers):  # other ranks are children of the scheduler
            family = [worker, *worker.children(recursive=True)]
            spent[name] = sum(sum(p.cpu_times()[:2]) for p in family)
        return spent


def stop(process: subprocess.Popen[str], patience: float = 30.0) -> None:
    """Terminate a server, and kill it if it does not exit."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def served(folder: Path | None, flags: Sequence[str], patience: float = 600.0) -> Iterator[Child]:
    """Start a server on a free port; `ValueError` with its last output if that fails."""
    command = [sys.executable, "-m", "minisgl", "--port", "0", *flags]
    command += [] if folder is None else ["--model", str(folder)]
    if threading.current_thread() is threading.main_thread():  # SIGTERM also stops the server
        for sig in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, lambda *_: sys.exit(1))
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(  # in its own session: Ctrl-C reaches us, and we stop it
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        late = threading.Timer(patience, process.terminate)
        late.start()
        try:
            # A library may print lines before the line with the URL.
            line = next((line for line in process.stdout or () if "http://" in line), None)
            late.cancel()
            if line is None:
                process.wait(patience)
                errors.seek(0)
                said = errors.read().strip().splitlines() or ["no message"]
                raise ValueError(f"server: did not start ({said[-1][:500]})")
            yield Child(line.split()[-1], psutil.Process(process.pid))
        finally:
            late.cancel()
            stop(process)


def flags_of(fields: Mapping[str, Any]) -> list[str]:
    """Convert fields of `SchedulerConfig` to flags of the server's command line."""
    words: list[str] = []
    for name, value in fields.items():
        if isinstance(value, bool):
            if value != (name == "overlap"):  # its flag turns it off
                words.append(FLAG_OF[name])
        elif name in FLAG_OF:
            words += [FLAG_OF[name], "all" if value is None else str(value)]
    return words
