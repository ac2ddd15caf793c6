"""Labs: a chapter with the bodies of its exported functions left to the reader, and their grade.

`build.py lab 03` writes `notebooks/labs/03_radix_cache.ipynb`. `build.py grade 03` puts the
reader's modules into a copy of the package and runs the project's own tests of that chapter on it.
Both are made from the chapter, so neither can fall behind it.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
ROUND = re.compile(r"^#{2,3} (?:Round (\d+)|The first version)\b", re.MULTILINE)
STUB = re.compile(r"(?:round (\d+)|first version), to be written: ([\w.]+)")
RESULTS = "MINISGL_GRADE"  # the environment variable that names the file of results
CPU_SECONDS = 10  # for one test: a loop without end has failed it, on a busy machine, too
WALL_SECONDS = 60  # likewise, for one that waits

# pytest's arguments: tests of a chapter's modules that take seconds, and none of whole servers.
TESTS: dict[str, list[str]] = {
    "01": [
        "tests/test_core.py",
        "tests/test_config.py::test_a_count_is_an_interval",
        "tests/test_config.py::test_only_finite_numbers_pass",
        "tests/test_config.py::test_numpy_numbers_become_pythons_own",
        "tests/test_config.py::test_endless_integers_are_refused",
        "tests/test_config.py::test_check_positive",
        "tests/test_config.py::test_good_values_take_their_final_form",
    ],
    "02": ["tests/test_kvcache.py"],
    "03": ["tests/test_prefix_cache.py", "tests/test_cache_manager.py"],
    "04": ["tests/test_attention.py"],
    "05": ["tests/test_model.py"],
    "06": ["tests/test_sampler.py"],
    "07": ["tests/test_graph.py"],
    "08": ["tests/test_engine.py"],
    "09": ["tests/test_scheduler.py"],
    "10": [
        "tests/test_tensor_parallel.py",
        "-k",
        "pitfall_09 or neighbours or protocol or rows or equal or broadcast or frees_the_others",
    ],
    "11": ["tests/test_moe.py"],
    "12": ["tests/test_server.py"],
}


class LabError(Exception):
    """A lab cannot be made or graded; the message has the reason and the remedy."""


# --------------------------------------------------------------------------- from chapter to lab


def qualified(stmt: ast.stmt) -> str:
    """Name of a function; `Class.name` for one that `@add_to(Class)` puts into a class."""
    assert isinstance(stmt, FUNCTION)
    for decorator in stmt.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "add_to":
            return f"{ast.unparse(decorator.args[0])}.{stmt.name}"
    return stmt.name


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the statements of a function below its docstring."""
    return function.body[ast.get_docstring(function, clean=False) is not None :]


def is_written(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a function with a body; members of a protocol have none."""
    body = body_of(function)
    return bool(body) and not all(
        isinstance(one, ast.Pass) or ast.unparse(one) == "..." for one in body
    )


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions and methods of a cell with their names."""
    for stmt in tree.body:
        if isinstance(stmt, FUNCTION):
            yield qualified(stmt), stmt
        elif isinstance(stmt, ast.ClassDef):
            for inner in stmt.body:
                if isinstance(inner, FUNCTION):
                    yield f"{stmt.name}.{inner.name}", inner


def called_at_import(sources: Iterable[str]) -> set[str]:
    """Return names that a module's own statements call at import: these cannot be stubs."""
    names: set[str] = set()
    for source in sources:
        for stmt in ast.parse(source).body:
            roots: list[ast.AST] = [stmt]
            if isinstance(stmt, FUNCTION):
                roots = [*stmt.decorator_list]
            elif isinstance(stmt, ast.ClassDef):
                inner = [one for one in stmt.body if not isinstance(one, FUNCTION)]
                roots = [*stmt.decorator_list, *inner]
            calls = (node for root in roots for node in ast.walk(root))
            names |= {ast.unparse(node.func) for node in calls if isinstance(node, ast.Call)}
    return names


def stubbed(source: str, number: int, kept: set[str]) -> tuple[str, dict[str, str]]:
    """Replace the bodies in a cell; return its text, and a hint for each stub by its name."""
    tree, lines = ast.parse(source), source.splitlines()
    hints: dict[str, str] = {}
    for name, function in reversed(list(functions(tree))):
        if not is_written(function) or name in kept:
            continue
        body = body_of(function)
        first, last = body[0].lineno, function.end_lineno or function.lineno
        place = f"round {number}" if number else "first version"
        raising = f'raise NotImplementedError("{place}, to be written: {name}")'
        if first == function.lineno:  # def f(): return 1
            head = lines[first - 1][: body[0].col_offset].rstrip()
            lines[first - 1 : last] = [head, " " * (function.col_offset + 4) + raising]
        else:
            lines[first - 1 : last] = [" " * body[0].col_offset + raising]
        hints = {name: hint_of(body), **hints}
    return "\n".join(lines), hints


def hint_of(body: Sequence[ast.stmt]) -> str:
    """Return what a body calls, and the attributes that it sets: other cells may read them."""
    inside = [node for stmt in body for node in ast.walk(stmt)]
    called = dict.fromkeys(ast.unparse(node.func) for node in inside if isinstance(node, ast.Call))
    stored = dict.fromkeys(
        ast.unparse(node)
        for node in inside
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    said = [
        f"{verb} " + ", ".join(f"`{one}`" for one in names if len(one) < 40)
        for verb, names in (("calls", called), ("sets", stored))
        if names
    ]
    return " and ".join(said) or "calls nothing: indexing, arithmetic and attributes are enough"


def folded(title: str, text: str) -> str:
    """Return Markdown that a click opens."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def directives_of(source: str) -> tuple[str, str]:
    """Split a cell into its `#|` lines and its code."""
    lines = source.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    return "".join(lines[:count]), "".join(lines[count:])


def is_exported(cell: NotebookNode) -> bool:
    """Return True for a code cell that goes to the package."""
    marks = directives_of(cell.source)[0]
    return cell.cell_type == "code" and re.search(r"^#\| export\b", marks, re.M) is not None


def lines_to_write(chapter: NotebookNode) -> int:
    """Count the lines below the docstrings of the functions that a lab leaves to the reader."""
    sources = [directives_of(cell.source)[1] for cell in chapter.cells if is_exported(cell)]
    kept, total = called_at_import(sources), 0
    for source in sources:
        for name, function in functions(ast.parse(source)):
            if is_written(function) and name not in kept:
                first, last = body_of(function)[0].lineno, function.end_lineno
                total += sum(bool(line.strip()) for line in source.splitlines()[first - 1 : last])
    return total


PLACE = """\
# The lab runs where its chapter runs.
import os
import sys

if os.path.basename(os.getcwd()) == "labs":
    os.chdir("..")
    sys.path.insert(0, os.getcwd())"""


def make_lab(chapter: NotebookNode, number: str) -> tuple[NotebookNode, int]:
    """Return the lab of a chapter, and how many functions it leaves to the reader."""
    exported = [directives_of(cell.source)[1] for cell in chapter.cells if is_exported(cell)]
    kept = called_at_import(exported)
    opening = (
        "**This is a lab.** The functions of the engine are yours to write: each raises "
        "`NotImplementedError` until you do. Hints and solutions are folded below their cells.\n\n"
        f"`python notebooks/build.py grade {number}` runs the project's tests on your version "
        f"(`--round 2` those up to round 2), and `python notebooks/build.py serve {number}` "
        "serves a model with it."
    )
    cells = [nbformat.v4.new_markdown_cell(opening), nbformat.v4.new_code_cell(PLACE)]
    current, total = 0, 0
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            for match in ROUND.finditer(cell.source):
                current = int(match[1] or 0)
        if not is_exported(cell):
            cells.append(nbformat.from_dict(dict(cell)))
            continue
        marks, source = directives_of(cell.source)
        text, hints = stubbed(source, current, kept)
        new = nbformat.from_dict({**cell, "source": marks + text, "outputs": []})
        new["execution_count"] = None
        cells.append(new)
        total += len(hints)
        if hints:
            hint = "\n".join(f"- `{name}` {text}." for name, text in hints.items())
            notes = [folded("Hint", hint), folded("Solution", f"```python\n{source}\n```")]
            cells.append(nbformat.v4.new_markdown_cell("\n\n".join(notes)))
    for index, one in enumerate(cells):
        one["id"] = f"lab-{number}-{index}"
    metadata = nbformat.from_dict(dict(chapter.metadata))
    if "language_info" in metadata:  # of the Python that will run the lab
        metadata.language_info.version = platform.python_version()
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata), total


# --------------------------------------------------------------------------- from lab to package


@contextmanager
def package_with(root: Path, modules: dict[str, str]) -> Iterator[Path]:
    """Copy the project to a temporary folder, with these modules in place of its own."""
    with tempfile.TemporaryDirectory(prefix="minisgl-lab-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "minisgl", copy / "minisgl", ignore=ignored)
        shutil.copytree(root / "tests", copy / "tests", ignore=ignored)
        shutil.copy2(root / "pyproject.toml", copy / "pyproject.toml")
        os.symlink(root / "notebooks", copy / "notebooks")
        for name, text in modules.items():
            path = copy.joinpath("minisgl", *name.split(".")).with_suffix(".py")
            if not path.exists():
                raise LabError(f"{name}: the package has no such module; restore `#| export`")
            path.write_text(text, encoding="utf-8")
        yield copy


# --------------------------------------------------------------------------- the grade


@dataclass(frozen=True)
class Outcome:
    """One test of the reader's version."""

    test: str  # its address
    passed: bool
    round: int = 0  # of the stub that it needed; 0 otherwise
    stub: str = ""  # name of that stub
    text: str = ""  # sentence about the failure
    cause: str = ""  # its error: tests that fail by the same one
    flaky: bool = False  # as hypothesis saw it


def words(name: str) -> str:
    """Turn a test's name into words."""
    return re.sub(r"\[.*", "", name).removeprefix("test_").replace("_", " ")


def raised_in(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the innermost function of the package; "" if the test itself failed."""
    name = ""
    for entry in excinfo.traceback:
        path = str(entry.path)
        if "/tests/" in path:
            name = ""
        elif "/minisgl/" in path and "/site-packages/" not in path:
            name = entry.frame.code.raw.co_qualname
    return name


def explain(item: pytest.Item, error: BaseException, place: str, inside: str = "") -> str:
    """Describe a failed test in one sentence: what it checks, what happened, on which input."""
    doc = (getattr(getattr(item, "function", None), "__doc__", None) or "").strip()
    checks = doc.splitlines()[0].rstrip(".") if doc else words(item.name)
    message = " ".join(str(error).split("\n\n")[0].split()).removesuffix(
        " Use -v to get more diff"
    )[:160]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    notes = "\n".join(getattr(error, "__notes__", []))
    example = re.search(
        r"(?:Falsifying|Falsified|failing) example[^\n]*:?\s*(.*)", notes, re.S | re.I
    )
    inputs = f", on {' '.join(example[1].split())[:240]}" if example else ""
    case = re.search(r"\[(.*)\]", item.name)
    with_case = f" [{case[1]}]" if case else ""
    where = f" in `{inside}`" if inside else ""
    return f"{checks}{with_case}: {kind}{message or 'failed'}{where} ({place}){inputs}"


def not_raised(path: Path, line: int, values: Mapping[str, object]) -> str:
    """Return the block under the `with pytest.raises` of a line, and the plain values it names."""
    tree = ast.parse(path.read_text("utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.With) and n.lineno == line]
    body = [stmt for block in blocks for stmt in block.body]
    names = {n.id for stmt in body for n in ast.walk(stmt) if isinstance(n, ast.Name)}
    short = {name: scalar(values[name]) for name in sorted(names & values.keys())}
    given = ", ".join(f"{name} = {text}" for name, text in short.items() if text)
    source = "; ".join(ast.unparse(stmt) for stmt in body)[:200]
    return f": `{source}`{f' with {given}' if given else ''}" if body else ""


def scalar(value: object) -> str:
    """Return a number or a string for a sentence; nothing for a larger object."""
    if isinstance(value, int) and abs(value) >= 2**64:  # Python may refuse to print it
        return "a very large integer"
    return f"{value!r:.80}" if isinstance(value, str | int | float) else ""


def outcome_of(item: pytest.Item, call: pytest.CallInfo[Any]) -> Outcome:
    """Return what a finished test shows."""
    if call.excinfo is None:
        return Outcome(item.nodeid, True)
    errors: list[BaseException] = [call.excinfo.value]
    for error in errors:  # grows: causes, contexts, and what a group holds
        inner = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
        errors += [one for one in inner if one is not None and one not in errors]
        stub = STUB.search(str(error))
        if stub:
            return Outcome(item.nodeid, False, int(stub[1] or 0), stub[2])
    entry = call.excinfo.traceback[-1]
    for one in call.excinfo.traceback:
        if "/tests/" in str(one.path) and "/site-packages/" not in str(one.path):
            entry = one
    place = f"{Path(str(entry.path)).name}:{entry.lineno + 1}"
    flaky = any(type(error).__name__.startswith("Flaky") for error in errors)
    text = explain(item, errors[0], place, raised_in(call.excinfo))
    cause = f"{type(errors[0]).__name__}: {errors[0]}"
    if "DID NOT RAISE" in cause:
        text += not_raised(Path(str(entry.path)), entry.lineno + 1, entry.locals)
    return Outcome(item.nodeid, False, text=text, cause=cause, flaky=flaky)


class Recorder:
    """A plugin of pytest that writes one line for each test to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """End a test that computes for too long."""

        def stop(*_: object) -> None:
            raise TimeoutError(f"no end after {CPU_SECONDS} s of computing")

        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        """Record a test after its body, or after a set-up that failed."""
        report = yield
        failed_early = call.when == "setup" and report.failed
        if not report.skipped and (call.when == "call" or failed_early):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(outcome_of(item, call))) + "\n")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        """Record a test file that cannot be imported."""
        report = yield
        if report.failed:
            text = str(report.longrepr)
            stub = STUB.search(text)
            last = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
            one = Outcome(
                collector.nodeid, False, int(stub[1]) if stub else 0, stub[2] if stub else "",
                f"the tests cannot be imported: {last[-1] if last else text[-160:]}",
            )  # fmt: skip
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(one)) + "\n")
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes where `grade` asks for them: this module is a plugin of pytest."""
    if RESULTS in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[RESULTS])), "minisgl-grade")


def run_tests(copy: Path, tests: Sequence[str]) -> list[Outcome]:
    """Run tests in a copy of the project, in two fresh processes, in the order of the files."""
    results = copy / "results.jsonl"
    results.touch()
    options = [
        "-q", "-p", "labs", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-o", "addopts=",
        "-n", "2", "--dist", "worksteal", "--rotate", "none", "--timeout", str(WALL_SECONDS),
    ]  # fmt: skip
    path = os.pathsep.join([str(copy), str(copy / "notebooks")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=copy, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": path, RESULTS: str(results)},
    )  # fmt: skip
    found = [Outcome(**json.loads(line)) for line in results.read_text("utf-8").splitlines()]
    stub = STUB.search(done.stdout + done.stderr)
    if not found and stub:  # all of the tests need it
        return [Outcome("", False, int(stub[1]), stub[2])]
    if not found:
        tail = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise LabError(f"no test ran; pytest's last line: {''.join(tail) or 'none'}")
    return found


def verdict(outcomes: Sequence[Outcome], last: int | None) -> tuple[bool, str]:
    """Return in one sentence the error of most tests, or that the rounds up to `last` hold."""
    passed = sum(one.passed for one in outcomes)
    # A stub called while hypothesis draws an example makes the test look flaky, and no more.
    failed = [one for one in outcomes if not one.passed and not one.stub and not one.flaky]
    missing = [one for one in outcomes if one.stub and (last is None or one.round <= last)]
    later = sum(bool(one.stub) for one in outcomes) - len(missing)
    if failed:
        causes = Counter(one.cause for one in failed)
        chosen = max(failed, key=lambda one: causes[one.cause])
        alike = causes[chosen.cause]
        same = f", {alike} of them by the same error" if 1 < alike < len(failed) else ""
        return False, f"{chosen.text}. ({len(failed)} tests fail{same}, {passed} pass.)"
    if missing:  # before flaky ones, of which they are the likely cause
        first = min(missing, key=lambda one: one.round)
        where = f"round {first.round}" if first.round else "the first version"
        return False, f"`{first.stub}` ({where}) is yet to be written. ({passed} tests pass.)"
    flaky = [one for one in outcomes if one.flaky]
    if flaky:
        return False, f"{flaky[0].text}. ({len(flaky)} tests fail, {passed} pass.)"
    waiting = f"; {later} wait for later rounds" if later else ""
    return (
        True,
        f"{'It holds' if last is None else f'Round {last} holds'}: {passed} tests pass{waiting}.",
    )
