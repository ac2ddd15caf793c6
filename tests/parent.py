"""A worker that has a process of its own; importable, because workers are spawned, and light."""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import time
from pathlib import Path

from minisgl.runtime.supervisor import WorkerContext


def masked(told: str, context: WorkerContext) -> None:
    """Write the signals that this worker blocks into the file `told`."""
    Path(told).write_text(str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))))
    context.ready()


def slow_to_exit(folder: str, context: WorkerContext) -> None:
    """Return at once; at exit, create the file `exiting` and wait for the file `go`."""

    def wait() -> None:
        Path(folder, "exiting").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)

    atexit.register(wait)
    context.ready()


def parent(told: str, context: WorkerContext) -> None:
    """Start a process, write its id into the file `told`, and work for a minute."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    Path(told).write_text(str(child.pid))
    context.ready()
    time.sleep(60)
