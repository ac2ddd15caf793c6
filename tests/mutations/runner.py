"""Runs pytest in copies of the project; libraries are imported once, each run is a fork of this.

Reads lines `{"root": folder, "tests": [ids], "seconds": limit}`, answers each with a line
`{"code": status, "output": text}`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import build  # notebooks/build.py
import pytest

OPTIONS = ["-q", "-x", "--tb=short", "-o", "addopts=", "-p", "no:xdist", "-p", "no:nbval"]
OPTIONS += ["-p", "no:cacheprovider", "--timeout-method=signal", "--disable-warnings"]
OPTIONS += ["-p", "no:rerunfailures", "-p", "no:schemathesis"]
# What tests, the package and pytest's plugins import, but for the package itself: it is mutated.
LIBRARIES = [
    "hypothesis", "schemathesis", "anyio.pytest_plugin", "openai", "httpx", "fastapi",
    "uvicorn", "prompt_toolkit", "matplotlib.pyplot", "scipy.stats", "sympy", "torch",
    "torch._dynamo", "triton", "tokenizers", "transformers.models.auto.modeling_auto",
    "transformers.tokenization_utils_tokenizers",
]  # fmt: skip


def run_forked(root: Path, tests: list[str], seconds: int) -> dict[str, Any]:
    """Run tests of the copy at `root` in a child process, with its own output."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(run_here(root, tests, seconds))
        limit = time.monotonic() + 3 * seconds
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                os.kill(child, 9)
            time.sleep(0.02)
        output.seek(0)
        return {"code": os.waitstatus_to_exitcode(done[1]), "output": output.read()[-4000:]}


def run_here(root: Path, tests: list[str], seconds: int) -> int:
    """Run pytest in this process, with the copy first on the path."""
    os.chdir(root)
    sys.dont_write_bytecode = True  # the next mutation of this module may have its size and second
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.update(PYTHONPATH=str(root), HYPOTHESIS_PROFILE="mutation")
    sys.path.insert(0, str(root))
    limit = f"--timeout={seconds}"
    code = pytest.main([*OPTIONS, limit, "-c", "pyproject.toml", "--rootdir", ".", *tests])
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def main() -> None:
    """Answer one line for each line."""
    build.run_environment(Path(__file__).resolve().parents[2], build.has_gpu())
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would look at, and so copy, all that these have made
    for line in sys.stdin:
        job = json.loads(line)
        answer = run_forked(Path(job["root"]), job["tests"], job["seconds"])
        print(json.dumps(answer), flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    main()
