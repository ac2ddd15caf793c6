"""Kernels and runs of mutated copies, forked from one process that has imported the libraries."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner


@functools.cache
def warm() -> Path:
    """Folder of the one `tests/warm.py` of this run of pytest, started by who needs it first."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    started = psutil.Process(owner).create_time()
    folder = Path(tempfile.gettempdir(), f"tests-{owner}-{started:.0f}")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            script = Path(__file__).with_name("warm.py")
            command = [sys.executable, str(script), str(folder), str(owner)]
            process = subprocess.Popen(
                command, cwd="/", start_new_session=True
            )  # Ctrl-C is not its
            while not (folder / "socket").exists():
                assert process.poll() is None, "tests/warm.py has ended"
                time.sleep(0.01)
    return folder


def ask(**job: Any) -> Any:
    """The answer of `tests/warm.py` to a job."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(warm() / "socket"))
        file = connection.makefile("rw")
        print(json.dumps(job), file=file, flush=True)
        return json.loads(file.readline())


class Forked:
    """Of `subprocess.Popen`, what Jupyter asks; the process is a fork of `tests/warm.py`."""

    stdin = stdout = stderr = None

    def __init__(self, become: str, output: str = os.devnull, **fields: Any) -> None:
        self.pid: int = ask(become=become, output=output, **fields)
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = ask(pid=self.pid)
        return self.code

    def wait(self, seconds: float = math.inf) -> int:
        """Its exit status; it is killed when its time is over."""
        limit = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                self.kill()
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedProvisioner(LocalProvisioner):
    """Starts Jupyter's kernels of Python as forks: 0.1 instead of 4 seconds of a core."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        self.cwd = kwargs.get("cwd") or os.getcwd()
        env = dict(kwargs.get("env") or os.environ)
        self.process = Forked("kernel", command=cmd, env=env, folder=str(self.cwd))
        self.pid = self.pgid = self.process.pid
        return self.connection_info

    @classmethod
    def use(cls) -> None:
        """Make it the one that starts all kernels of this process."""
        value = f"{cls.__module__}:{cls.__name__}"
        factory = KernelProvisionerFactory.instance()
        factory.provisioners["forked"] = EntryPoint("forked", value, factory.GROUP_NAME)
        factory.default_provisioner_name = "forked"
