"""Processes that have imported what tests need once; what they are asked to run is a fork of them.

`python warm.py FOLDER PID` listens on the socket `FOLDER/libraries`, and its child, which has
imported our package, too, on `FOLDER/package`, until the process PID is gone. A connection carries
one job, a line of JSON and perhaps files, and its answer, another line. `tests.forks` asks.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import pkgutil
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any

import forks  # tests/forks.py
import interpreter  # tests/interpreter.py
import psutil

OPTIONS = ["-q", "-x", "--tb=short", "-o", "addopts=", "-p", "no:xdist", "-p", "no:nbval"]
OPTIONS += ["-p", "no:cacheprovider", "--timeout-method=signal", "--disable-warnings"]
OPTIONS += ["-p", "no:rerunfailures", "-p", "no:schemathesis", "-p", "no:unraisableexception"]
# What chapters, tests, the package and pytest's plugins import, but for the package itself: copies
# of it are mutated. None of them starts a thread when it is imported: threads do not survive forks.
LIBRARIES = [
    "build", "pytest", "hypothesis", "schemathesis", "anyio.pytest_plugin", "openai", "httpx_sse",
    "fastapi", "uvicorn", "prometheus_client", "zmq.asyncio", "msgspec", "llguidance",
    "prompt_toolkit", "matplotlib.pyplot", "scipy.stats", "sympy", "torch", "torch._dynamo",
    "triton", "tokenizers", "safetensors.torch", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers",
    "nbval.plugin", "ipykernel.kernelapp",
]  # fmt: skip


def become_kernel(command: list[str], env: dict[str, str], folder: str) -> None:
    """The Jupyter kernel that the command would start."""
    gc.unfreeze()  # chapters look at what a collection costs
    os.setsid()  # ending a kernel ends its children, too
    enter(folder, env)
    backend = "module://matplotlib_inline.backend_inline"  # a kernel sets it before the import
    sys.modules["matplotlib"].rcParams["backend"] = backend
    arguments = command[command.index("ipykernel_launcher") + 1 :]
    sys.argv = ["ipykernel_launcher.py", *arguments]
    sys.modules["ipykernel.kernelapp"].launch_new_instance(arguments)


def become_tests(root: str, tests: list[str], seconds: int) -> None:
    """A run of pytest, with the copy of the project at `root` first on the path.

    It leaves no compiled forms: the next mutation of a module may have the same size and second.
    """
    os.chdir(root)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.update(PYTHONPATH=root, HYPOTHESIS_PROFILE="mutation")
    fork_python()
    sys.path.insert(0, root)
    arguments = [*OPTIONS, f"--timeout={seconds}", "-c", "pyproject.toml", "--rootdir", ".", *tests]
    code = sys.modules["pytest"].main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def become_python(words: list[str], env: dict[str, str], folder: str, session: bool) -> None:
    """Run `python -m MODULE …` or `python FILE …`; it ends with this process."""
    if session:
        os.setsid()
    forks.exit_with_parent()
    enter(folder, env)
    own_streams()
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    with as_process():
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")


def become_worker(words: list[str], env: dict[str, str], folder: str, session: bool) -> None:
    """A process of pytest-xdist; it starts Python as a new process unless a test forks it."""
    forks.exit_with_parent()
    enter(folder, env, fork=False)
    own_streams()
    with as_process():
        sys.modules["__main__"] = types.ModuleType("__main__")  # it is no file that a child needs
        sys.argv = ["-c"]
        exec(words[words.index("-c") + 1], vars(sys.modules["__main__"]))


def enter(folder: str, env: dict[str, str], fork: bool = True) -> None:
    """Work in a folder, with these variables; start Python by a fork again."""
    os.chdir(folder)
    here = os.environ[forks.WARM]
    os.environ.clear()
    os.environ.update(env, **{forks.WARM: here})
    if fork:
        fork_python()


@functools.cache
def has_gpu() -> bool:
    return bool(sys.modules["build"].has_gpu())


def fork_python() -> None:
    """Fork what `multiprocessing` spawns and `subprocess` starts with Python; not with a GPU.

    CUDA does not survive a fork.
    """
    if not has_gpu():
        subprocess.Popen = forks.Popen  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = spawn  # type: ignore[attr-defined]


def spawn(path: Any, words: list[Any], files: Any) -> int:
    """Process id of a fork that is as a spawned process: its main module is empty, what it works on
    comes as bytes through a pipe, and it has no files but those that it is given.
    """
    program = words[words.index("-c") + 1]
    if "resource_tracker" in program:  # a process without libraries, and known by its name
        return spawnv_passfds(path, words, files)
    if child := os.fork():
        return child
    with as_process():
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        for first, last in pairwise(sorted({2, *files, os.sysconf("SC_OPEN_MAX")})):
            os.closerange(first + 1, last)
        own_streams()
        forks.name_process("spawn_main")
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *map(os.fsdecode, words[words.index("-c") + 2 :])]
        exec(program, vars(sys.modules["__main__"]))
    return 0


@contextmanager
def as_process() -> Iterator[None]:
    """Ends this process with the block, as Python does, but for the farewells of libraries."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def own_streams() -> None:
    """Write to the files 1 and 2, as a new process does, wherever its parent wrote."""
    streams = (os.fdopen(number, "w" if number else "r", closefd=False) for number in range(3))
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)
    sys.stderr.reconfigure(line_buffering=True)


def start(become: str, files: list[int], output: str = os.devnull, **fields: Any) -> int:
    """Process id of a child; it has these first three files, or writes to the file `output`."""
    if child := os.fork():
        return child
    places = (os.devnull, output, output)
    files = files or [os.open(place, os.O_RDWR | os.O_APPEND) for place in places]
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    globals()[f"become_{become}"](**fields)
    sys.exit()


def poll(pid: int, ended: dict[int, int]) -> int | None:
    """Exit status of a child, or None while it runs; two threads may ask for it."""
    if pid not in ended:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]


def listen(path: Path) -> socket.socket:
    """A socket that is seen only once it listens."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.unheard")
    listener.listen()
    listener.settimeout(1)
    Path(f"{path}.unheard").rename(path)
    return listener


def import_package() -> None:
    """All modules of the package that import on this machine, but for the command and Ray's."""
    package = importlib.import_module("minisgl")
    for module in pkgutil.walk_packages(package.__path__, "minisgl."):
        if not module.name.endswith(("__main__", ".cluster")):
            with suppress(ImportError):
                importlib.import_module(module.name)


def freeze() -> None:
    """A collection in a child would look at, and so copy, all that is there now."""
    gc.collect()
    gc.freeze()


def main(folder: Path, owner: int) -> None:
    """Answer job after job; a second process does so that has imported the package, too."""
    root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(root / "notebooks")
    (folder / "root").symlink_to(root)
    libraries, package = listen(folder / "libraries"), listen(folder / "package")
    for name in LIBRARIES:
        importlib.import_module(name)
    interpreter.quicken()
    os.environ[forks.WARM] = str(folder)
    has_gpu()  # asked once
    freeze()
    if not os.fork():
        libraries.close()
        if not has_gpu():  # which no process may have asked before it forks
            import_package()
        freeze()
        serve(package, owner)
        os._exit(0)
    package.close()
    serve(libraries, owner)
    shutil.rmtree(folder)
    os._exit(0)


def lives(pid: int) -> bool:
    """False for a zombie, too: its parent may wait for the end of its output, which we hold."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def serve(listener: socket.socket, owner: int) -> None:
    """Answer until the owner is gone."""
    ended: dict[int, int] = {}
    while lives(owner):
        with suppress(TimeoutError), listener.accept()[0] as connection:
            data, files, _, _ = socket.recv_fds(connection, 2**16, 3)
            while not data.endswith(b"\n"):
                data += connection.recv(2**16)
            job = json.loads(data)
            answer = poll(**job, ended=ended) if "pid" in job else start(files=files, **job)
            for file in files:
                os.close(file)
            connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
