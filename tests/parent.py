"""A worker that has a process of its own; importable, because workers are spawned, and light."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from minisgl.runtime.supervisor import WorkerContext


def masked(told: str, context: WorkerContext) -> None:
    """Write into the file `told` which signals this worker blocks."""
    Path(told).write_text(str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))))
    context.ready()


def parent(told: str, context: WorkerContext) -> None:
    """Start a process, write its id into the file `told`, and work for a minute."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    Path(told).write_text(str(child.pid))
    context.ready()
    time.sleep(60)
