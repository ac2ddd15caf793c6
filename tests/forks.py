"""Servers and runs of mutated copies: forks of one process that has all libraries."""

from __future__ import annotations

import ctypes
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
from pathlib import Path
from typing import Any

import psutil

WARM = "MINISGL_TESTS_WARM"  # the variable that holds the folder of `tests/warm.py` for forks
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
PlainPopen = subprocess.Popen  # tests put ours in its place


@functools.cache
def warm() -> Path:
    """Folder of the one `tests/warm.py` of this run of pytest, started by who needs it first."""
    if WARM in os.environ:
        return Path(os.environ[WARM])
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    started = psutil.Process(owner).create_time()
    folder = Path(tempfile.gettempdir(), f"tests-{owner}-{started:.0f}")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "package").exists():
            script = Path(__file__).with_name("warm.py")
            command = [sys.executable, str(script), str(folder), str(owner)]
            # Ctrl-C is not its
            process = PlainPopen(command, cwd="/", start_new_session=True)
            while not (folder / "package").exists():
                assert process.poll() is None, "tests/warm.py has ended"
                time.sleep(0.01)
    return folder


def ask(imported: str, files: tuple[int, ...] = (), **job: Any) -> Any:
    """The answer to a job, of a process that has imported all "libraries" or our "package", too."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(warm() / imported))
        line = json.dumps(job).encode() + b"\n"
        sent = socket.send_fds(connection, [line], files) if files else 0
        if sent < len(line):  # else the answer may be there already, and its sender gone
            connection.sendall(line[sent:])
        return json.loads(connection.makefile().readline())


class Forked:
    """Of `subprocess.Popen`, what Jupyter asks; the process is a fork of `tests/warm.py`."""

    stdin = stdout = stderr = None

    def __init__(self, become: str, output: str = os.devnull, **fields: Any) -> None:
        # A chapter shows what is there before a module of the package is imported, and after it.
        self.pid: int = ask("libraries", become=become, output=output, **fields)
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = ask("libraries", pid=self.pid)
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


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; `python -m …` and `python FILE …` are forks of `tests/warm.py`.

    A server then starts in a second instead of five: nothing is imported but our own package.
    `real` makes it a new process all the same.
    """

    become = "python"

    def __init__(self, args: Any, *more: Any, real: bool = False, **options: Any) -> None:
        plain = isinstance(args, list) and len(args) > 1 and args[0] == sys.executable
        plain = plain and self.is_known(args[1])
        self.forked = plain and not real and "preexec_fn" not in options
        self.session = bool(options.get("start_new_session"))
        super().__init__(args, *more, **options)

    @staticmethod
    def is_known(option: str) -> bool:
        return option == "-m" or option.endswith(".py")

    def _execute_child(self, args: Any, *more: Any) -> None:
        """Start the process; from Python 3.9 to 3.14 the arguments are the same."""
        if not self.forked:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        cwd, env, ends = more[4], more[5] or os.environ, more[9:15]
        files = (ends[0], ends[3], ends[5])  # -1: the same as ours
        here = env.get("PYTHONPATH", "").partition(os.pathsep)[0]
        same = os.path.realpath(here) == os.path.realpath(warm() / "root")  # or a mutated copy
        self.imported = "package" if same else "libraries"
        self.pid = ask(
            self.imported,
            become=self.become,
            files=tuple(own if file == -1 else file for own, file in enumerate(files)),
            words=args[1:],
            env=dict(env),
            folder=str(cwd or os.getcwd()),
            session=self.session,
        )
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    def _internal_poll(self, *more: Any, **options: Any) -> int | None:
        if not self.forked:
            return super()._internal_poll(*more, **options)  # type: ignore[misc]
        if self.returncode is None:
            self.returncode = ask(self.imported, pid=self.pid)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self.forked:
            return super()._wait(timeout=timeout)  # type: ignore[misc]
        limit = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return code


class WorkerPopen(Popen):
    """Forks `python -u -c …`, with which pytest-xdist starts its processes."""

    become = "worker"

    @staticmethod
    def is_known(option: str) -> bool:
        return option == "-u"


def exit_with_parent() -> None:
    """Linux kills this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name of this process in Linux, at most 15 letters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
