"""Labs: what `build.py lab` writes, and what `build.py grade` finds in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import build
import labs
import nbformat
import pytest

from minisgl.kvcache.radix_cache import RadixCache
from tests.test_mutations import ALL, ROOT

NUMBERS = list(labs.TESTS)
TURNS = 16  # days; a part of 32


def chapter(number: str) -> tuple[str, nbformat.NotebookNode]:
    """Name and stored notebook of a chapter."""
    stem = build.select(ROOT, [number])[0]
    return stem, build.read_notebook_half(build.pair(ROOT, stem)[1])


def package_modules(number: str) -> dict[str, str]:
    """The package's own modules of a chapter, as they are installed."""
    stem, nb = chapter(number)
    names = build.parse_cells(nb, stem).modules
    return {name: (ROOT / build.module_path(name)).read_text("utf-8") for name in names}


def graded(number: str, modules: dict[str, str], last: int | None = None) -> tuple[bool, str]:
    """Grade of these modules."""
    with labs.package_with(ROOT, modules) as copy:
        return labs.verdict(labs.run_tests(copy, labs.TESTS[number]), last)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lab_leaves_the_functions_and_keeps_the_rest(number: str) -> None:
    """Stubs have the solution's signatures; the folded solutions make the chapter's modules."""
    stem, nb = chapter(number)
    lab, total = labs.make_lab(nb, number)
    nbformat.validate(lab)
    prose = [cell.source for cell in nb.cells if cell.cell_type == "markdown"]
    kept = [cell.source for cell in lab.cells if cell.cell_type == "markdown"]
    assert [text for text in kept if text in prose] == prose
    stubs = [cell for cell in lab.cells if labs.is_exported(cell)]
    left = sum(cell.source.count("to be written: ") for cell in stubs)
    assert left == total > 5
    for before, after in zip((c for c in nb.cells if labs.is_exported(c)), stubs):
        old, new = (ast.parse(labs.directives_of(c.source)[1]) for c in (before, after))
        pairs = zip(labs.functions(old), labs.functions(new), strict=True)
        for (name, one), (stub_name, stub) in pairs:
            assert (name, ast.dump(one.args)) == (stub_name, ast.dump(stub.args))
            assert ast.get_docstring(one) == ast.get_docstring(stub)
    filled = nbformat.from_dict(dict(lab))
    for index, cell in enumerate(filled.cells):
        solution = re.search(r"```python\n(.*?)\n```\n\n</details>", cell.source, re.S)
        if cell.cell_type == "markdown" and cell.source.startswith("<details>") and solution:
            marks = labs.directives_of(filled.cells[index - 1].source)[0]
            filled.cells[index - 1].source = marks + solution[1]
    made, right = (build.assemble(build.parse_cells(one, stem)) for one in (filled, nb))
    assert {n: ast.dump(ast.parse(t)) for n, t in made.items()} == {
        n: ast.dump(ast.parse(t)) for n, t in right.items()
    }


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lab_imports_none_of_its_own_modules(number: str) -> None:
    """An exported cell would put the package's class in place of the reader's."""
    stem, nb = chapter(number)
    modules = build.parse_cells(nb, stem).modules
    for cell in filter(labs.is_exported, nb.cells):
        for node in ast.walk(ast.parse(labs.directives_of(cell.source)[1])):
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).removeprefix("minisgl.") not in modules


def planted(number: str) -> list[tuple[str, dict[str, str]]]:
    """Three mistakes in a chapter's modules: mutations that its graded tests are there to catch."""
    modules, chosen = package_modules(number), labs.TESTS[number]
    words = chosen[-1].split(" or ") if "-k" in chosen else [""]
    found = []
    for mutation in ALL:
        name, graded_by = mutation.module.removeprefix("minisgl."), mutation.test.split("::")[0]
        if name in modules and graded_by in chosen and any(w in mutation.test for w in words):
            broken = modules[name].replace(mutation.old, mutation.new)
            found.append((mutation.name, {**modules, name: broken}))
    step = max(1, len(found) // 3)
    return found[::step][:3]


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.turn(i, TURNS)) for i, n in enumerate(NUMBERS)],
)
@pytest.mark.timeout(1800)  # five runs of a chapter's tests, on a machine that may be busy
def test_stubs_fail_solutions_pass_and_mistakes_get_a_sentence(number: str) -> None:
    stem, nb = chapter(number)
    stubs = build.assemble(build.parse_cells(labs.make_lab(nb, number)[0], stem))
    good, sentence = graded(number, stubs)
    assert not good and "is yet to be written" in sentence
    good, sentence = graded(number, package_modules(number))
    assert good and re.fullmatch(r"It holds: \d+ tests pass\.", sentence), sentence
    for name, modules in planted(number):
        good, sentence = graded(number, modules)
        assert not good, name
        assert re.search(r"\(\w+\.py:\d+\)", sentence), (name, sentence)
        assert "Traceback" not in sentence and len(sentence) < 800


def test_a_verdict_is_one_sentence() -> None:
    passed = labs.Outcome("t::a", True)
    wrong = labs.Outcome("t::b", False, text="ids come back: assert 1 == 2 (test_b.py:3)")
    early, late = (labs.Outcome(f"t::{r}", False, r, f"Cache.r{r}") for r in (1, 3))
    flaky = labs.Outcome("t::f", False, text="flaky (test_f.py:1)", flaky=True)
    assert labs.verdict([passed, late, early], 2) == (
        False, "`Cache.r1` (round 1) is yet to be written. (1 tests pass.)",
    )  # fmt: skip
    assert labs.verdict([passed, late], 2) == (
        True, "Round 2 holds: 1 tests pass; 1 wait for later rounds.",
    )  # fmt: skip
    assert labs.verdict([wrong, early, passed], None)[1].startswith("ids come back: assert 1 == 2")
    often = [labs.Outcome(f"t::{i}", False, text=f"{i}: NameError", cause="np") for i in range(2)]
    assert labs.verdict([wrong, *often, passed], None) == (
        False, "0: NameError. (3 tests fail, 2 of them by the same error, 1 pass.)",
    )  # fmt: skip
    assert labs.verdict([flaky, late, passed], None)[1].startswith("`Cache.r3` (round 3)")
    assert labs.verdict([flaky, passed], None) == (
        False, "flaky (test_f.py:1). (1 tests fail, 1 pass.)",
    )  # fmt: skip


def test_a_sentence_names_the_function_that_raised(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValueError, match="page_size") as inside:
        RadixCache(-1)
    assert labs.raised_in(inside) == "check_positive"
    sentence = labs.explain(request.node, inside.value, "test_x.py:3", labs.raised_in(inside))
    assert " in `check_positive` (test_x.py:3)" in sentence
    with pytest.raises(AssertionError) as outside:
        assert RadixCache(4).evictable_tokens
    assert labs.raised_in(outside) == ""


def test_a_call_that_should_have_failed_is_shown_with_its_values(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "def test_x():\n    for size in (0, 3):\n        with pytest.raises(\n"
        "            ValueError\n        ):\n            pages(pool, size, name='a')\n"
    )
    values = {"size": 3, "pool": object(), "other": 7}
    assert labs.not_raised(path, 3, values) == ": `pages(pool, size, name='a')` with size = 3"
    assert "size = a very large integer" in labs.not_raised(path, 3, {"size": 10**5000})
    assert labs.not_raised(path, 1, values) == ""


def test_functions_called_at_import_are_kept() -> None:
    sources = ["def name():\n    return 'x'\n\nNAME = name()\n", "def other():\n    return 1\n"]
    kept = labs.called_at_import(sources)
    assert kept == {"name"}
    assert labs.stubbed(sources[0], 1, kept)[0] == sources[0].rstrip("\n")
    text, hints = labs.stubbed("def one(): return len([])", 2, set())
    assert hints == {"one": "calls `len`"}
    with pytest.raises(NotImplementedError, match=r"round 2, to be written: one"):
        scope: dict[str, object] = {}
        exec(text, scope)
        scope["one"]()  # type: ignore[operator]


def test_hints_name_for_each_function_what_it_calls_and_sets() -> None:
    cell = """
class Pool:
    def __init__(self, size):
        self.size, self.free = size, list(range(size))

    def take(self):
        self.used: int = 1
        return self.free[0]

    def left(self):
        return self.size - 1
"""
    text, hints = labs.stubbed(cell, 0, set())
    assert hints == {
        "Pool.__init__": "calls `list`, `range` and sets `self.size`, `self.free`",
        "Pool.take": "sets `self.used`",
        "Pool.left": "calls nothing: indexing, arithmetic and attributes are enough",
    }
    assert "first version, to be written: Pool.left" in text
    assert labs.STUB.search(text) is not None


def project(tmp_path: Path) -> Path:
    """A project with one tiny chapter."""
    (tmp_path / "notebooks").mkdir()
    nb = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Toy\n\n> Adds."),
            nbformat.v4.new_code_cell(
                "#| default_exp core\n#| export\ndef f() -> int:\n    return 1"
            ),
        ]
    )
    nbformat.write(nb, tmp_path / "notebooks" / "01_toy.ipynb")
    return tmp_path


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lab is never overwritten unasked; a lab that cannot be graded is an error with a reason."""
    root = project(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        status = build.main(["--root", str(root), *words])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    assert run("grade", "01")[1].startswith("error: no lab yet: `python notebooks/build.py lab 01`")
    assert run("lab", "01") == (0, "notebooks/labs/01_toy.ipynb: 1 functions are yours to write\n")
    status, text = run("lab", "01")
    assert status == 1 and "exists; --force replaces it" in text
    assert run("lab", "01", "--force")[0] == 0
    path = root / "notebooks" / "labs" / "01_toy.ipynb"
    written = path.read_text("utf-8")
    path.write_text(re.sub(r"raise Not\w+\(.*?\)\"", 'return np.ones(1)"', written), "utf-8")
    status, text = run("grade", "01")
    assert status == 1 and "minisgl.core: must import" in text and "`np` in `return np" in text
    broken = written.replace("def f() -> int:", "def f( -> int:")
    path.write_text(broken, encoding="utf-8")
    status, text = run("grade", "01")
    assert status == 1 and "code cell 2" in text and "Traceback" not in text
    assert run("lab", "99")[0] == 1
