"""A process that has imported the libraries once; what it is asked to run is a fork of it.

`python warm.py FOLDER PID` listens on the socket `FOLDER/socket` until the process PID is gone. A
connection carries one job, a line of JSON, and its answer, another. `tests.forks` asks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

OPTIONS = ["-q", "-x", "--tb=short", "-o", "addopts=", "-p", "no:xdist", "-p", "no:nbval"]
OPTIONS += ["-p", "no:cacheprovider", "--timeout-method=signal", "--disable-warnings"]
OPTIONS += ["-p", "no:rerunfailures", "-p", "no:schemathesis", "-p", "no:unraisableexception"]
# What chapters, tests, the package and pytest's plugins import, but for the package itself: copies
# of it are mutated. None of them starts a thread when it is imported: threads do not survive forks.
LIBRARIES = [
    "build", "pytest", "hypothesis", "schemathesis", "anyio.pytest_plugin", "openai", "httpx",
    "fastapi", "uvicorn", "prompt_toolkit", "matplotlib.pyplot", "scipy.stats", "sympy", "torch",
    "torch._dynamo", "triton", "tokenizers", "transformers.models.auto.modeling_auto",
    "transformers.tokenization_utils_tokenizers", "nbval.plugin", "ipykernel.kernelapp",
]  # fmt: skip


def become_kernel(command: list[str], env: dict[str, str], folder: str) -> None:
    """The Jupyter kernel that the command would start."""
    gc.unfreeze()
    os.setsid()  # who ends a kernel ends what it started, too
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    backend = "module://matplotlib_inline.backend_inline"  # a kernel sets it before the import
    sys.modules["matplotlib"].rcParams["backend"] = backend
    arguments = command[command.index("ipykernel_launcher") + 1 :]
    sys.argv = ["ipykernel_launcher.py", *arguments]
    sys.modules["ipykernel.kernelapp"].launch_new_instance(arguments)


def become_tests(root: str, tests: list[str], seconds: int, compiled: bool) -> None:
    """A run of pytest, with the copy of the project at `root` first on the path.

    It leaves compiled forms only if it is told to: the next mutation of a module may have the same
    size and second.
    """
    os.chdir(root)
    sys.dont_write_bytecode = not compiled
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.update(PYTHONPATH=root, HYPOTHESIS_PROFILE="mutation")
    sys.path.insert(0, root)
    arguments = [*OPTIONS, f"--timeout={seconds}", "-c", "pyproject.toml", "--rootdir", ".", *tests]
    code = sys.modules["pytest"].main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def start(become: str, output: str, **fields: Any) -> int:
    """Process id of a child that writes to the file `output` what it prints."""
    if child := os.fork():
        return child
    for stream, file in enumerate((os.devnull, output, output)):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), stream)
    {"kernel": become_kernel, "tests": become_tests}[become](**fields)
    sys.exit()


def poll(pid: int) -> int | None:
    """Exit status of a child, or None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main(folder: Path, owner: int) -> None:
    """Answer job after job."""
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "notebooks")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "unheard"))
    listener.listen()
    (folder / "unheard").rename(folder / "socket")  # seen only once it listens
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would look at, and so copy, all that these have made
    listener.settimeout(1)
    while psutil.pid_exists(owner):
        with suppress(TimeoutError), listener.accept()[0] as connection:
            file = connection.makefile("rw")
            job = json.loads(file.readline())
            answer = poll(**job) if "pid" in job else start(**job)
            print(json.dumps(answer), file=file, flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
