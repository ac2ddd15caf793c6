"""Tests that would not notice the bug they are for are worth nothing: break the package and see."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import mutations
from tests.mutations import Mutation

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 20  # for one test; a mutant that hangs has failed it
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)  # a kernel that leaves its memory


def collect() -> list[Mutation]:
    """All mutations of all files in `tests/mutations/`."""
    found: list[Mutation] = []
    for entry in pkgutil.iter_modules(mutations.__path__):
        module = importlib.import_module(f"tests.mutations.{entry.name}")
        found += getattr(module, "MUTATIONS", [])
    return found


ALL = collect()


def copy_project(target: Path) -> Path:
    """The package and its tests in a new folder; the data of the shipped model is linked."""

    def copy(source: str, destination: str) -> None:
        if source.endswith((".py", ".pyc", ".typed", ".json", ".cfg")):
            shutil.copy2(source, destination)
        else:
            os.symlink(source, destination)

    for name in ("minisgl", "tests"):
        shutil.copytree(ROOT / name, target / name, copy_function=copy)
    shutil.copy2(ROOT / "pyproject.toml", target / "pyproject.toml")
    os.symlink(ROOT / "notebooks", target / "notebooks")
    return target


def apply(mutation: Mutation, root: Path) -> None:
    """Replace the text in the copy; fail if it is not there exactly once."""
    base = root.joinpath(*mutation.module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    count = text.count(mutation.old)
    assert count == 1, (
        f"{mutation.name}: found {count} times in {mutation.module}: {mutation.old!r}"
    )
    assert mutation.old != mutation.new, f"{mutation.name}: changes nothing"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


class Runner:
    """Talks to `tests/mutations/runner.py`."""

    def __init__(self) -> None:
        paths = [str(ROOT / "notebooks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "mutations" / "runner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def run(self, root: Path, tests: list[str], seconds: int = SECONDS) -> tuple[int, str]:
        """Exit status and output of pytest on tests of a copy."""
        assert self.process.stdin is not None and self.process.stdout is not None
        job = {"root": str(root), "tests": tests, "seconds": seconds}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer["code"], answer["output"]

    def close(self) -> None:
        """End the helper process."""
        self.process.communicate()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One helper process for all mutations."""
    runner = Runner()
    yield runner
    runner.close()


def test_names_are_unique() -> None:
    names = [mutation.name for mutation in ALL]
    assert len(set(names)) == len(names)


def test_unbroken_package_passes(runner: Runner, tmp_path: Path) -> None:
    """On an exact copy every named test is found, and one of each file passes.

    That all of them pass is the business of the whole run; here it is the copy that counts.
    """
    tests = sorted({mutation.test for mutation in ALL})
    files = {test.split("::")[0]: test for test in reversed(tests)}
    root = copy_project(tmp_path)
    for arguments in (["--collect-only", *tests], list(files.values())):
        code, output = runner.run(root, arguments, seconds=120)
        assert code == 0, output


def check_caught(mutation: Mutation, runner: Runner, root: Path) -> None:
    """The broken copy fails the named test, and fails in a test, not before it."""
    copy_project(root)
    apply(mutation, root)
    code, output = runner.run(root, [mutation.test])
    assert code != 0, f"{mutation.test} passes although: {mutation.name}"
    failed = code in CRASHES or (code == 1 and " failed" in output)  # an error before it is none
    assert failed, f"pytest ended with status {code} instead of a failed test:\n{output}"


# The other half is in test_mutations_odd.py: pytest-xdist gives a file to one process.
@pytest.mark.parametrize("mutation", ALL[::2], ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, runner: Runner, tmp_path: Path) -> None:
    check_caught(mutation, runner, tmp_path)


def test_runner_sees_the_mutated_copy(runner: Runner, tmp_path: Path) -> None:
    """A mutation of our own helper shows that the copy is tested, not the installation."""
    root = copy_project(tmp_path)
    (root / "tests" / "test_probe.py").write_text(
        "import minisgl.notebook, os\n"
        "def test_probe():\n"
        "    assert minisgl.notebook.__file__.startswith(os.getcwd())\n"
        "    assert minisgl.notebook.palette['dummy'] == '#CC79A7'\n"
    )
    probe = ["tests/test_probe.py::test_probe"]
    assert runner.run(root, probe)[0] == 0
    apply(Mutation("probe", "minisgl.notebook", "#CC79A7", "#000000", probe[0]), root)
    code, output = runner.run(root, probe)
    assert code == 1 and "#000000" in output


def test_missing_text_is_reported(tmp_path: Path) -> None:
    root = copy_project(tmp_path)
    with pytest.raises(AssertionError, match="found 0 times in minisgl"):
        apply(Mutation("typo", "minisgl.notebook", "no such text", "x", ""), root)
