"""Tests that would not notice the bug they are for are worth nothing: break the package and see."""

from __future__ import annotations

import compileall
import importlib
import os
import pkgutil
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import mutations
from tests.compiled import compile_tests
from tests.forks import Forked
from tests.mutations import Mutation

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 10  # for one test of a broken copy: a mutant that hangs has failed it
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
    """The package and its tests in a new folder, compiled; the shipped model's data is linked."""

    def copy(source: str, destination: str) -> None:
        if source.endswith((".py", ".pyc", ".typed", ".json", ".cfg")):
            shutil.copy2(source, destination)
        else:
            os.symlink(source, destination)

    for folder in ("minisgl", "notebooks/training", "tests"):
        shutil.copytree(ROOT / folder, target / Path(folder).name, copy_function=copy)
    shutil.copy2(ROOT / "pyproject.toml", target / "pyproject.toml")
    os.symlink(ROOT / "notebooks", target / "notebooks")
    compileall.compile_dir(target / "minisgl", quiet=2)
    compileall.compile_dir(target / "tests", quiet=2, rx=re.compile("/test_"))
    return target


def path_of(mutation: Mutation, root: Path) -> Path:
    """The file in which it replaces a text."""
    base = root.joinpath(*mutation.module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@contextmanager
def applied(mutation: Mutation, root: Path) -> Iterator[None]:
    """Replace the text in the copy for the block; fail if it is not there exactly once."""
    path = path_of(mutation, root)
    text = path.read_text(encoding="utf-8")
    count = text.count(mutation.old)
    assert count == 1, (
        f"{mutation.name}: found {count} times in {mutation.module}: {mutation.old!r}"
    )
    assert mutation.old != mutation.new, f"{mutation.name}: changes nothing"
    kept = path.rename(path.with_suffix(".kept"))  # with its time, which its compiled form names
    try:
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        yield
    finally:
        kept.replace(path)


class Runner:
    """Runs tests in a copy of the project at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, tests: list[str], seconds: int = 200) -> tuple[int, str]:
        """Exit status and output of pytest on tests of the copy; `seconds` only end a hang."""
        with tempfile.NamedTemporaryFile("r") as file:
            fields = {"root": str(self.root), "tests": tests, "seconds": seconds}
            code = Forked("tests", output=file.name, **fields).wait(3 * seconds)
            return code, file.read()[-4000:]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runner:
    """One copy of the project, with compiled tests, for all mutations of a file."""
    root = copy_project(tmp_path_factory.mktemp("copy"))
    compile_tests(request.config, root / "tests")
    return Runner(root)


def test_names_are_unique() -> None:
    names = [mutation.name for mutation in ALL]
    assert len(set(names)) == len(names)


def test_every_mutation_has_one_place(runner: Runner) -> None:
    """Of all, and not only of those whose turn it is."""
    counts = {m.name: path_of(m, runner.root).read_text("utf-8").count(m.old) for m in ALL}
    assert not {name: count for name, count in counts.items() if count != 1}


def test_every_named_test_is_found(runner: Runner) -> None:
    named = sorted({mutation.test for mutation in ALL})
    code, output = runner.run(["--collect-only", *named])
    assert code == 0, output


def test_unbroken_copy_passes(runner: Runner) -> None:
    """A few tests pass in the copy: they fail for no other reason than a mutation.

    That all of them pass is the business of the whole run; here it is the copy that counts.
    """
    tests = sorted({mutation.test for mutation in ALL})
    few = ("test_config", "test_kvcache", "test_scheduler", "test_server.py")
    code, output = runner.run([next(test for test in tests if name in test) for name in few])
    assert code == 0, output


def check_caught(mutation: Mutation, runner: Runner) -> None:
    """The broken copy fails the named test, and fails in a test, not before it."""
    with applied(mutation, runner.root):
        code, output = runner.run([mutation.test], SECONDS)
    assert code != 0, f"{mutation.test} passes although: {mutation.name}"
    failed = code in CRASHES or (code == 1 and " failed" in output)  # an error before it is none
    assert failed, f"pytest ended with status {code} instead of a failed test:\n{output}"


# The other half is in test_mutations_odd.py: pytest-xdist gives a file to one process.
@pytest.mark.parametrize("mutation", ALL[::2], ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, runner: Runner) -> None:
    check_caught(mutation, runner)


def test_runner_sees_the_mutated_copy(runner: Runner) -> None:
    """A mutation of our own helper shows that the copy is tested, not the installation."""
    probe = runner.root / "tests" / "test_probe.py"
    probe.write_text(
        "import minisgl.notebook, os\n"
        "def test_probe():\n"
        "    assert minisgl.notebook.__file__.startswith(os.getcwd())\n"
        "    assert minisgl.notebook.palette['dummy'] == '#CC79A7'\n"
    )
    test = "tests/test_probe.py::test_probe"
    assert runner.run([test])[0] == 0
    with applied(Mutation("probe", "minisgl.notebook", "#CC79A7", "#CC79A8", test), runner.root):
        code, output = runner.run([test])  # the same size, within a second: nothing compiled is old
    assert code == 1 and "#CC79A8" in output
    assert runner.run([test])[0] == 0
    probe.unlink()


def test_missing_text_is_reported(runner: Runner) -> None:
    mutation = Mutation("typo", "minisgl.notebook", "no such text", "x", "")
    with (
        pytest.raises(AssertionError, match="found 0 times in minisgl"),
        applied(mutation, runner.root),
    ):
        pass
