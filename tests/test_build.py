"""The exporter and the checks of the book, on toy chapters in a temporary checkout."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import build
import nbformat
import prose
import pytest

from minisgl.notebook import add_to
from tests import conftest
from tests.turns import in_turns

ROOT = Path(__file__).resolve().parents[1]


def chapter(*cells: str, promise: str = "A toy.") -> str:
    """A chapter from its code cells; a cell may begin with a line of tags."""
    blocks = "\n\n".join(f"Text.\n\n```{{code-cell}} ipython3\n{cell}\n```" for cell in cells)
    return f"# Toy\n\n> {promise}\n\n{blocks}\n"


@pytest.fixture(autouse=True)
def own_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running a toy chapter puts its checkout on the path; the next test must not find it there."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty checkout."""
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def write(root: Path, stem: str, *cells: str, promise: str = "A toy.") -> None:
    text = chapter(*cells, promise=promise)
    (root / "notebooks" / f"{stem}.md").write_text(text, encoding="utf-8")


def exported(root: Path, module: str) -> str:
    """Export everything and return one module."""
    assert build.export(root, []) == 0
    return (root / "minisgl" / module).read_text(encoding="utf-8")


DEFAULT = "#| default_exp pool\n#| export\n"
CLASS = (
    DEFAULT
    + 'class Pool:\n    """A pool."""\n\n'
    + "    def __init__(self) -> None:\n        self.n = 0"
)


# ---------------------------------------------------------------- what a module looks like


def test_methods_and_properties_are_folded_in_source_order(root: Path) -> None:
    method = "from minisgl.notebook import add_to\n\n\n# grows\n"
    method += "@add_to(Pool)\ndef grow(self) -> None:\n"
    prop = "#| export\n@add_to(Pool)\n@property\ndef size(self) -> int:\n    return self.n"
    write(root, "02_pool", CLASS, "#| export\n" + method + "    self.n += 1  # one", prop)
    text = exported(root, "pool.py")
    tree = ast.parse(text)
    (pool,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [n.name for n in pool.body[1:] if isinstance(n, ast.FunctionDef)] == [
        "__init__",
        "grow",
        "size",
    ]
    assert "    # grows\n    def grow" in text
    assert "        self.n += 1  # one" in text
    assert "    @property\n    def size" in text
    assert "add_to" not in text
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)


def test_strings_of_several_lines_keep_their_indentation(root: Path) -> None:
    body = '@add_to(Pool)\ndef text(self) -> str:\n    """Doc.\n\n    More.\n    """\n'
    body += '    return """a\n  b\n"""'
    write(root, "02_pool", CLASS, "#| export\n" + body, "#| export\nF = f'''x\n {1}\n'''")
    space: dict[str, type] = {}
    text = exported(root, "pool.py")
    exec(text, space)
    assert space["Pool"]().text() == "a\n  b\n"
    assert '        """Doc.\n\n        More.\n' in text
    assert space["F"] == "x\n 1\n"


def test_imports_are_hoisted_and_deduped(root: Path) -> None:
    first = DEFAULT + "import math\nfrom os import path\n\nX = math.pi"
    second = "#| export\nimport math\nfrom os import getcwd, path\n\n\n"
    second += "def f() -> str:\n    return path.join(getcwd())"
    typing = "#| export\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    write(root, "02_pool", first, second, typing)
    text = exported(root, "pool.py")
    assert text.count("import math") == 1
    assert "from os import getcwd, path" in text
    assert (
        text.index("from __future__") < text.index("import math") < text.index("    import torch")
    )
    assert text.index("    import torch") < text.index("X = math.pi")


def test_docstring_is_the_promise_or_the_doc_line(root: Path) -> None:
    doc = "#| export other\n#| doc Another.\nY = 1"
    write(root, "02_pool", DEFAULT + "X = 1", doc, promise="One sentence.")
    first = exported(root, "pool.py")
    lines = '"""One sentence.\n\nGenerated from notebooks/02_pool.ipynb: edit there.\n"""'
    assert first.startswith(lines)
    assert exported(root, "other.py").startswith('"""Another.\n')


def test_one_chapter_feeds_several_modules_and_folders(root: Path) -> None:
    write(root, "02_pool", "#| default_exp kv.pool\n#| export\nX = 1", "#| export __init__\nY = 2")
    assert "X = 1" in exported(root, "kv/pool.py")
    assert "Y = 2" in (root / "minisgl" / "__init__.py").read_text()
    assert "The package `minisgl.kv`" in (root / "minisgl" / "kv" / "__init__.py").read_text()
    assert (root / "minisgl" / "py.typed").exists()


def test_modules_of_one_chapter_import_from_each_other(root: Path) -> None:
    """The notebook has the names already, so its cells need no import that would hide an edit."""
    user = "#| export pool\ndef f(x: Slot, SIZE: int) -> int:\n    return x + SIZE + len(NAMES)"
    write(root, "02_pool", "#| export base\nSlot = int\nSIZE = 4\nNAMES = ()\nOTHER = 1", user)
    assert "from minisgl.base import NAMES, Slot\n" in exported(root, "pool.py")
    assert "import" not in exported(root, "base.py").replace("__future__ import", "")


def test_main_is_called_under_python_m(root: Path) -> None:
    write(root, "02_pool", DEFAULT + "def main() -> int:\n    return 0")
    assert 'if __name__ == "__main__":\n    raise SystemExit(main())' in exported(root, "pool.py")


@pytest.mark.parametrize("rest", ["pass", "...", '"""Doc."""\n    pass'])
def test_placeholder_of_a_class_goes(root: Path, rest: str) -> None:
    cell = DEFAULT + f"class Pool:\n    {rest}"
    write(root, "02_pool", cell, "#| export\n@add_to(Pool)\ndef f(self) -> int:\n    return 1")
    text = exported(root, "pool.py")
    assert "pass" not in text and "..." not in text
    assert "    def f(self)" in text


def test_class_on_one_line_grows(root: Path) -> None:
    cell = DEFAULT + "class Full(Exception): ..."
    write(root, "02_pool", cell, "#| export\n@add_to(Full)\ndef f(self) -> int:\n    return 1")
    assert "class Full(Exception):\n    def f(self)" in exported(root, "pool.py")


def test_drafts_stay_out(root: Path) -> None:
    write(root, "02_pool", DEFAULT + "X = 1", "X = 2\nprint(X)")
    assert "X = 2" not in exported(root, "pool.py")


def test_overloads_and_setters_are_no_duplicates(root: Path) -> None:
    accessors = "class A:\n    @property\n    def x(self): ...\n"
    accessors += "    @x.setter\n    def x(self, v): ...\n"
    over = "from typing import overload\n@overload\ndef f(a: int) -> int: ...\ndef f(a): return a"
    write(root, "02_pool", DEFAULT + accessors + over)
    exported(root, "pool.py")


# ---------------------------------------------------------------- what the exporter refuses


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([DEFAULT + "X = 1", "#| export\nX = 2"], "X is defined twice in minisgl.pool"),
        ([DEFAULT + "def f(): ...", "#| export\nclass f: ..."], "f is defined twice"),
        (
            [CLASS, "#| export\n@add_to(Pool)\ndef __init__(self): ..."],
            "__init__ is defined twice",
        ),
        (["#| export\nX = 1"], "before any #| default_exp"),
        ([DEFAULT + "@add_to(Pool)\ndef f(self): ..."], "no class Pool before this cell"),
        ([CLASS, "#| export\n@add_to(Pool)\ndef f(self):\n    super().f()"], "super() fails"),
        ([DEFAULT + "%time 1"], "line 1: invalid syntax"),
        ([DEFAULT + "from os import *"], "absolute and name what they take"),
        ([DEFAULT + "from . import x"], "absolute and name what they take"),
        ([DEFAULT + "from minisgl.pool import x"], "imports itself"),
        ([DEFAULT + "a = 1; b = 2"], "two statements on one line"),
        (["#| exports\nX = 1"], "unknown directive #| exports"),
        (["#| default_exp a b\nX = 1"], "not a module name"),
        (["#| doc Lost.\nX = 1"], "#| doc belongs"),
    ],
)
def test_failures_are_named(
    root: Path, capsys: pytest.CaptureFixture[str], cells: list[str], message: str
) -> None:
    write(root, "02_pool", *cells)
    assert build.export(root, []) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert "02_pool, code cell" in errors
    assert not (root / "minisgl" / "pool.py").exists()


def test_module_fed_by_two_chapters(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "02_pool", DEFAULT + "X = 1")
    write(root, "03_radix", DEFAULT + "Y = 1")
    assert build.export(root, []) == 1
    assert "03_radix: minisgl.pool is already fed by 02_pool" in capsys.readouterr().err


def test_module_and_folder_of_one_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "02_pool", DEFAULT + "X = 1", "#| export pool.inner\nY = 1")
    assert build.export(root, []) == 1
    assert "pool is both a module and a folder" in capsys.readouterr().err


def test_chapter_without_a_promise(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notebooks" / "02_pool.md").write_text("```{code-cell}\n" + DEFAULT + "X = 1\n```\n")
    assert build.export(root, []) == 1
    assert "no `> promise` line" in capsys.readouterr().err


# ---------------------------------------------------------------- exporting beside others


def test_broken_chapter_leaves_the_others_alone(root: Path) -> None:
    write(root, "02_pool", DEFAULT + "X = 1")
    write(root, "03_radix", "#| default_exp radix\n#| export\nY = 1")
    assert build.export(root, []) == 0
    write(root, "02_pool", DEFAULT + "X = = 1")
    write(root, "03_radix", "#| default_exp radix\n#| export\nY = 2")
    assert build.export(root, []) == 1
    assert "X = 1" in (root / "minisgl" / "pool.py").read_text()
    assert "Y = 2" in (root / "minisgl" / "radix.py").read_text()
    assert build.export(root, ["03"]) == 0


def test_only_a_full_export_removes_orphans(root: Path) -> None:
    write(root, "02_pool", DEFAULT + "X = 1")
    exported(root, "pool.py")
    orphan = root / "minisgl" / "old.py"
    orphan.write_text("")
    (root / "minisgl" / "core.py").write_text("")
    assert build.export(root, ["02"]) == 0
    assert orphan.exists()
    assert build.export(root, []) == 0
    assert not orphan.exists()


def test_export_changes_nothing_the_second_time(root: Path) -> None:
    write(root, "02_pool", CLASS)
    exported(root, "pool.py")
    before = (root / "minisgl" / "pool.py").stat().st_mtime_ns
    exported(root, "pool.py")
    assert (root / "minisgl" / "pool.py").stat().st_mtime_ns == before


def test_unknown_chapter(root: Path) -> None:
    write(root, "02_pool", DEFAULT + "X = 1")
    assert build.select(root, ["02"]) == build.select(root, ["02_pool"]) == ["02_pool"]
    with pytest.raises(build.BuildError, match="no '99' among 02_pool"):
        build.select(root, ["99"])


# ---------------------------------------------------------------- pairs


@pytest.fixture
def book(root: Path) -> Path:
    """A checkout of one chapter, exported, paired and run (as far as the files show)."""
    write(root, "02_pool", CLASS, "print(1)", ":tags: [gpu]\n\nprint(2)")
    build.sync(root, [], False)
    edit_notebook(root, mark_run)
    build.sync(root, [], False)
    build.export(root, [])
    assert build.find_problems(root, []) == []
    return root


def mark_run(nb: nbformat.NotebookNode) -> None:
    """Store outputs as a run would."""
    for number, cell in enumerate(build.code_cells(nb), start=1):
        cell.execution_count = number
        if "print" in cell.source:
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]


def edit_notebook(root: Path, change: object) -> nbformat.NotebookNode:
    """Apply a function to the stored notebook."""
    path = root / "notebooks" / "02_pool.ipynb"
    nb = nbformat.read(path, as_version=4)
    if callable(change):
        change(nb)
        path.write_text(json.dumps(nb))  # as it is: nbformat would mend some faults
    return nb


def test_sync_is_idempotent_and_keeps_ids_and_outputs(book: Path) -> None:
    notebook, text = book / "notebooks" / "02_pool.ipynb", book / "notebooks" / "02_pool.md"
    before = notebook.read_bytes(), text.read_bytes()
    assert build.sync(book, [], False) == 0
    assert (notebook.read_bytes(), text.read_bytes()) == before

    ids = [cell["id"] for cell in edit_notebook(book, None).cells]
    text.write_text(text.read_text().replace("print(1)", "print(10)"))
    build.sync(book, ["02"], False)
    after = edit_notebook(book, None)
    assert [cell["id"] for cell in after.cells] == ids
    changed, kept = build.code_cells(after)[1:]
    assert changed.outputs == [] and changed.execution_count is None
    assert kept.outputs and kept.execution_count == 3


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("x = 1", "x = 1  # one", True),
        (
            'def f():\n    """A sum."""\n    return 1',
            'def f():\n    """Add."""\n    return 1',
            True,
        ),
        ('class A:\n    """A sum."""', 'class A:\n    """A set."""', True),
        ('def f():\n    """A sum."""', "def f():\n    return 1", False),
        ("%time x", "%time  x", False),
        ("'a'", "'b'", False),
    ],
)
def test_comments_and_docstrings_are_not_run(before: str, after: str, same: bool) -> None:
    assert (build.code_of(before) == build.code_of(after)) is same


def test_sync_of_an_inserted_cell_moves_no_id(book: Path) -> None:
    before = {cell["id"] for cell in edit_notebook(book, None).cells}
    text = book / "notebooks" / "02_pool.md"
    cell = "```{code-cell} ipython3\n1 + 1\n```\n\n"
    text.write_text(text.read_text().replace("```\n\nText.", f"```\n\n{cell}Text.", 1))
    build.sync(book, [], False)
    nb = edit_notebook(book, None)
    assert before < {cell["id"] for cell in nb.cells}
    assert [cell.execution_count for cell in build.code_cells(nb)] == [1, None, 2, 3]


def test_sync_from_the_notebook(book: Path) -> None:
    edit_notebook(book, lambda nb: build.code_cells(nb)[1].update(source="print(11)"))
    build.sync(book, [], True)
    assert "print(11)" in (book / "notebooks" / "02_pool.md").read_text()
    assert build.pair_problems(book, "02_pool") == []


def test_jupyterlab_folds_what_the_site_folds(book: Path) -> None:
    text = book / "notebooks" / "02_pool.md"
    plain = text.read_text()
    for tag in ("hide-input", "hide-cell"):
        text.write_text(plain.replace("print(1)", f":tags: [{tag}]\n\nprint(1)"))
        build.sync(book, [], False)
        cell = build.code_cells(edit_notebook(book, None))[1]
        assert cell.metadata == {"tags": [tag], "jupyter": {"source_hidden": True}}
        assert build.find_problems(book, []) == [] and "source_hidden" not in text.read_text()
    text.write_text(plain)
    build.sync(book, [], False)
    assert build.code_cells(edit_notebook(book, None))[1].metadata == {}


def test_format_keeps_outputs(book: Path) -> None:
    text = book / "notebooks" / "02_pool.md"
    text.write_text(text.read_text().replace("print(1)", "print( 1 )"))
    build.sync(book, [], False)
    edit_notebook(book, mark_run)
    assert build.format_chapters(book, ["02"]) == 0
    assert build.code_cells(edit_notebook(book, None))[1].outputs
    assert "print(1)\n" in text.read_text()
    assert build.find_problems(book, []) == []


def test_run_stores_outputs_and_clean_metadata(root: Path) -> None:
    write(root, "02_pool", CLASS, "Pool().n", ":tags: [gpu]\n\nprint('gpu')", "print('end')")
    assert build.run(root, ["02"]) == 0
    build.export(root, [])
    nb = edit_notebook(root, None)
    cells = build.code_cells(nb)
    assert cells[1].outputs[0]["data"]["text/plain"] == "0"
    assert cells[3].execution_count == 4
    if not build.has_gpu():
        (problem,) = build.find_problems(root, [])
        assert "tagged gpu, never run on one" in problem
    before = build.notebook_text(nb)
    build.run(root, ["02"])
    assert build.notebook_text(edit_notebook(root, None)) == before


def test_failing_chapter_keeps_its_outputs(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = book / "notebooks" / "02_pool.md"
    text.write_text(text.read_text().replace("print(1)", "1 / 0"))
    assert build.run(book, ["02"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---------------------------------------------------------------- every fault is found


def test_check_says_it_by_exit_status(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.main(["--root", str(book), "check"]) == 1
    assert "budget: 02_pool: no cell, or more than one, is tagged" in capsys.readouterr().out
    monkeypatch.setattr(build, "budget_of", lambda stem: None)
    assert build.main(["--root", str(book), "check"]) == 0
    (book / "minisgl" / "pool.py").write_text("X = 1\n")
    assert build.main(["--root", str(book), "check"]) == 1
    out = capsys.readouterr().out
    assert "-X = 1" in out and "+class Pool:" in out


def first(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return build.code_cells(nb)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nb: first(nb).update(execution_count=None), "never executed"),
        (lambda nb: first(nb).update(execution_count=5), "out of order, as number 5"),
        (lambda nb: nb.metadata.update(language_info={}), "metadata is not clean"),
        (lambda nb: first(nb).metadata.update(collapsed=True), "metadata ['collapsed'] is not"),
        (lambda nb: first(nb).metadata.update(tags=["hide-input"]), "metadata ['jupyter'] is not"),
        (lambda nb: nb.cells[0].update(id=nb.cells[1].id), "not unique"),
        (lambda nb: first(nb).update(source="X = 1"), "notebooks/02_pool.md"),
        (
            lambda nb: build.code_cells(nb)[1].outputs.append(
                nbformat.v4.new_output("error", ename="KeyError", evalue="", traceback=[])
            ),
            "stored output is an error, KeyError",
        ),
        (
            lambda nb: build.code_cells(nb)[1].outputs.append(
                nbformat.v4.new_output("display_data", {"image/png": "AAAA"})
            ),
            "a picture without alternative text",
        ),
        (
            lambda nb: build.code_cells(nb)[1].outputs.append(
                nbformat.v4.new_output("stream", name="stderr", text="\rweights: 100%|#####| 68/68")
            ),
            "stored output is a progress bar",
        ),
        (
            lambda nb: build.code_cells(nb)[2].update(outputs=[], execution_count=None),
            "never run on one",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Non-unique cell id")
def test_check_finds_faults_of_a_notebook(book: Path, change: object, message: str) -> None:
    edit_notebook(book, change)
    problems = build.find_problems(book, [])
    assert any(message in problem for problem in problems), problems


def test_check_allows_a_gpu_cell_with_stored_outputs_or_openly_pending(book: Path) -> None:
    edit_notebook(book, lambda nb: build.code_cells(nb)[2].update(execution_count=None))
    assert build.find_problems(book, []) == []
    write(book, "02_pool", CLASS, "print(1)", ":tags: [gpu, gpu-pending]\n\nprint(2)")
    build.sync(book, [], False)
    assert build.find_problems(book, []) == []


def test_check_finds_a_path_of_this_machine(book: Path) -> None:
    output = nbformat.v4.new_output("stream", name="stdout", text=str(book))
    edit_notebook(book, lambda nb: build.code_cells(nb)[1].update(outputs=[output]))
    assert any("of this machine" in problem for problem in build.find_problems(book, []))


@pytest.mark.parametrize("name", ["old.py", "kv/__init__.py", "data.bin", "tiny/model/weights.bin"])
def test_check_finds_orphans(book: Path, name: str) -> None:
    path = book / "minisgl" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    assert build.find_problems(book, []) == [f"minisgl/{name}: no chapter exports this file"]


def test_modules_beside_the_package_are_not_installed_and_are_checked(root: Path) -> None:
    write(root, "02_pool", "#| default_exp training.pool\n#| export\nPAGES = 4")
    build.export(root, [])
    beside = root / "notebooks" / "training"
    assert (beside / "pool.py").exists() and not (root / "minisgl" / "training").exists()
    (beside / "old.py").write_text("x = 1\n")
    problems = build.find_problems(root, [])
    assert "notebooks/training/old.py: no chapter exports this file" in problems


@pytest.mark.parametrize("name", ["pool.py", "__init__.py", "py.typed"])
def test_check_finds_missing_files(book: Path, name: str) -> None:
    (book / "minisgl" / name).unlink()
    assert any(f"minisgl/{name}: missing" in problem for problem in build.find_problems(book, []))


def test_check_finds_a_missing_half(book: Path) -> None:
    (book / "notebooks" / "02_pool.ipynb").unlink()
    assert any("02_pool.ipynb: missing" in problem for problem in build.find_problems(book, []))


def test_model_data_is_held_to_its_manifest(book: Path) -> None:
    folder = book / build.MODEL_DATA
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    (folder / "MANIFEST.json").write_text(json.dumps({"sha256": {"weights.bin": digest}}))
    assert build.find_problems(book, []) == []
    assert build.export(book, []) == 0 and (folder / "weights.bin").exists()
    (folder / "weights.bin").write_bytes(b"other")
    assert any("sha256 is" in problem for problem in build.find_problems(book, []))


# ---------------------------------------------------------------- the notebook's own tools


def test_add_to_covers_every_kind_of_member():  # untyped: mypy cannot see what add_to adds
    class A:
        pass

    @add_to(A)
    def method(self: A) -> int:
        return 1

    @add_to(A)
    @property
    def prop(self: A) -> int:
        return 2

    @add_to(A)
    @functools.cached_property
    def cached(self: A) -> list[int]:
        return []

    @add_to(A)
    @staticmethod
    def static() -> int:
        return 3

    a = A()
    assert (a.method(), a.prop, a.static()) == (1, 2, 3)
    assert a.cached is a.cached
    with pytest.raises(TypeError, match="has no name"):
        add_to(A)(3)


def test_pitfall_16_book_and_package_agree_and_are_checked_quickly() -> None:
    start = time.process_time()
    assert build.find_problems(ROOT, []) == []
    assert time.process_time() - start < 30  # 5 s on a free core


# ---------------------------------------------------------------- budgets


def notebook(*cells: tuple[str, ...]) -> nbformat.NotebookNode:
    """A notebook of (kind, source, tags)."""
    nb = nbformat.v4.new_notebook()
    for kind, source, *tags in cells:
        new = nbformat.v4.new_markdown_cell if kind == "text" else nbformat.v4.new_code_cell
        nb.cells.append(new(source, metadata={"tags": " ".join(tags).split()}))
    return nb


SOURCES = "[a](https://a.org) [b](https://b.org) [c](https://c.org)"
PLAIN: list[tuple[str, ...]] = [
    ("text", "word " * 1600 + SOURCES),
    ("code", "x = 1\n\ny = 2", build.FIRST_VERSION),
    ("code", "#| export\n#| doc A pool.\ndef f():\n    return 1"),
    ("code", "plot()\n" * 500, "hide-input"),
    ("text", "See [the pool](02_kv_cache.ipynb#pages)."),
]


def test_what_counts() -> None:
    text = "Two words, `code` and [a link](https://a.org/b_c).\n\n```text\nnot these\n```"
    assert build.count_words(text) == 6
    m = build.measure("02_pool", notebook(*PLAIN))
    assert (m.exported, m.shown, m.longest, m.first) == (2, 4, 2, 2)
    assert (m.place, m.sources, m.links) == (0.4, 3, 1)


@pytest.mark.parametrize(
    ("stem", "at", "cell", "message"),
    [
        ("02_pool", 0, ("text", "word " * 2600 + SOURCES), "words, the budget is 1500 to 2500"),
        ("02_pool", 0, ("text", SOURCES), "words, the budget is 1500 to 2500"),
        ("02_pool", 0, ("text", "word " * 1600 + SOURCES[:40]), "2 linked sources of 3"),
        ("02_pool", 2, ("code", "#| export\n" + "x = 1\n" * 31), "an exported cell of 31 lines"),
        ("02_pool", 1, ("code", "x = 1", ""), "no cell, or more than one, is tagged"),
        ("02_pool", 2, ("code", "#| export\nx = 1", build.FIRST_VERSION), "or more than one"),
        ("02_pool", 1, ("code", "x = 1\n" * 61, build.FIRST_VERSION), "a first version of 61"),
        ("02_pool", 3, ("code", "x = 1\n" * 500), "words for each line shown, at least 4.0"),
        ("02b_pool", 3, ("code", "x = 1\n" * 700), "words for each line shown, at least 2.5"),
        ("13_pool", 0, ("text", "word " * 3100 + SOURCES), "words, the budget is 0 to 3000"),
        ("02b_pool", 2, ("code", "#| export\n" + "x = 1\n" * 41), "an exported cell of 41 lines"),
        ("02_pool", 4, ("code", "#| export\n" + "x = 1\n" * 351), "353 exported lines of 350"),
        ("A_pool", 2, ("code", "#| export\n" + "x = 1\n" * 61), "an exported cell of 61 lines"),
        ("A_pool", 4, ("code", "#| export\n" + "x = 1\n" * 2009), "2011 exported lines of 2010"),
        ("12_pool", 4, ("code", "#| export\n" + "x = 1\n" * 579), "581 exported lines of 580"),
    ],
)
def test_broken_budgets_are_named(stem: str, at: int, cell: tuple[str, ...], message: str) -> None:
    cells: list[tuple[str, ...]] = [
        ("text", "x"),
        *PLAIN,
        ("text", "x"),
    ]  # the first version stands at 3 of 7
    broken = build.over_budget(build.measure(stem, notebook(*cells)))
    main = build.MAIN_LINE.fullmatch(stem) is not None
    assert broken == ([f"{stem}: the first version stands at 43% of the cells"] if main else [])
    cells = [*PLAIN, *[("text", "x")] * 3]
    assert build.over_budget(build.measure(stem, notebook(*cells))) == []
    cells[at] = cell
    assert any(message in text for text in build.over_budget(build.measure(stem, notebook(*cells))))


def test_appendices_and_the_tour_are_spared() -> None:
    nb = notebook(("text", "word " * 4000 + SOURCES), ("code", "x = 1\n" * 900))
    assert build.over_budget(build.measure("B_workshop", nb)) == []
    nb = notebook(("text", "word " * 2000 + SOURCES), ("code", "x = 1"))
    assert build.over_budget(build.measure("00_tour", nb)) == []


def test_chapters_say_how_long_they_take() -> None:
    head, exercise = (
        "# 02 · Pool\n\n> A pool.\n\nNeeds little.",
        ("code", "x = 1", "solution hide-cell"),
    )
    nb = notebook(("text", head), ("text", "word " * 1596), ("code", "y = 2\n" * 20), exercise)
    assert build.measure("02_pool", nb).minutes == 20  # 8 to read, 2 for the code, 5 to solve, up
    assert build.reading_time_problems("02_pool", nb)
    build.write_reading_time("02_pool", nb)
    line = "*Reading time: about 20 minutes, with the exercises.*"
    assert nb.cells[0].source == head.replace("A pool.", f"A pool.\n\n{line}")
    assert build.reading_time_problems("02_pool", nb) == []
    assert build.measure("02_pool", nb).minutes == 20  # the line itself takes no time
    nb.cells[1].source += "word " * 1000
    (problem,) = build.reading_time_problems("02_pool", nb)
    assert "takes about 25 minutes" in problem
    build.write_reading_time("02_pool", nb)
    assert nb.cells[0].source == head.replace("A pool.", f"A pool.\n\n{line}".replace("20", "25"))
    nb.cells.append(nbformat.v4.new_code_cell("#| export\ndef f():\n" + "    x = 1\n" * 80))
    build.write_reading_time("02_pool", nb)  # 13 minutes for the words, 80 for the lines
    assert "the exercises. Building it as a lab: about 1.5 hours.*" in nb.cells[0].source
    (problem,) = build.reading_time_problems("02b_pool", nb)
    assert "takes about 30 minutes, which" in problem  # a deeper chapter has no lab
    appendix = notebook(("text", head))
    build.write_reading_time("B_workshop", appendix)
    assert appendix.cells[0].source == head


def test_main_line_has_a_budget_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    one = build.measure("02_pool", notebook(*PLAIN, *[("text", "x")] * 3))
    assert build.budget_problems([one]) == []
    assert (one.exact_minutes, one.minutes) == (1609 / 200 + 4 / 10, 10)  # rounded once, at the end
    assert build.whole_line([one] * 13)[2] == pytest.approx(13 * one.exact_minutes / 60)
    assert build.budget_problems([one] * 19) == ["budget: the main line has 30571 words of 28000"]
    many = [dataclasses.replace(one, words=1500, exported=350)] * 13
    assert build.budget_problems(many) == ["budget: the main line exports 4550 lines of 4300"]
    assert build.main(["budget", "B"]) == 0
    assert "B_workshop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "turns"), [("mutation", 32), ("drill", 4), ("turn", 8), ("plain", 1)]
)
def test_mutations_drills_and_parts_take_turns(kind: str, turns: int) -> None:
    marks = in_turns(8, range(240))

    def item(number: int) -> Any:
        name = f"bug {number}"
        params = {"mutation": SimpleNamespace(name=name)} if kind == "mutation" else {}
        marked = {"drill": True} if kind == "drill" else {}
        marked |= {"turn": marks[number].marks[0]} if kind == "turn" else {}
        call = SimpleNamespace(params=params)
        return SimpleNamespace(name=name, callspec=call, get_closest_marker=marked.get)

    items = [item(number) for number in range(240)]
    days = [conftest.settle_rotation("today", 3 + day, False) for day in range(turns)]
    parts = [[i for i in items if not conftest.is_left_out(i, day)] for day in days]
    assert all(parts) and sum(map(len, parts)) == len(items)
    assert {id(item) for part in parts for item in part} == set(map(id, items))
    assert {conftest.is_left_out(i, "none") for i in items} == {kind != "plain"}
    assert not any(conftest.is_left_out(i, "all") for i in items)
    assert conftest.settle_rotation("today", 0, True) == "all"  # they were chosen by name
    assert conftest.settle_rotation("2", 0, True) == "2"


def test_each_day_has_a_part() -> None:
    with pytest.raises(AssertionError, match="3 values in turns of 4 days"):
        in_turns(4, "abc")


# ---------------------------------------------------------------- English


PAGE = '''# A chapter

The queue says
nobody waits, and `x` is told. "Ours", says [vLLM](https://vllm.ai) here.

```{code-cell} ipython3
:tags: [hide-input]

#| export
class Part:
    """What it is."""

    @property
    def size(self) -> int:
        """The size."""
        return 1

    def grow(self) -> None:
        """The growth of the part."""
        raise ValueError("size: the host knows no more of it")
```

```{code-cell} ipython3
def draft() -> None:
    """The draft."""
```
'''


def test_prose_reports_the_place_of_each_private_word(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    page, program = (tmp_path / "notebooks" / name for name in ("01_a.md", "tool.py"))
    page.write_text(PAGE)
    program.write_text('"""Tools."""\n\n\ndef run() -> None:\n    """Runs it."""\n')
    hits = prose.find_hits(tmp_path)
    assert [(Path(hit.path).name, hit.line, hit.words) for hit in hits] == [
        ("01_a.md", 3, "says"),
        ("01_a.md", 4, "nobody"),
        ("01_a.md", 4, "told"),
        ("01_a.md", 11, "What"),
        ("01_a.md", 19, "The"),
        ("01_a.md", 20, "knows"),
        ("tool.py", 5, "Runs"),
    ]
    assert str(hits[0]) == "notebooks/01_a.md:3: 'says': write shows, states, returns, is"
    assert [hit.line for hit in prose.find_hits(tmp_path, [program])] == [5]
    assert prose.main(str(tmp_path)) == 1
    page.unlink()
    program.write_text(program.read_text().replace("Runs", "Run"))
    assert prose.main(str(tmp_path)) == 0


@pytest.mark.parametrize("older", [".md", ".ipynb"])
def test_opening_and_saving_in_jupyterlab_changes_no_byte(tmp_path: Path, older: str) -> None:
    """Whichever half is older, and with what JupyterLab adds: the kernel's `language_info`."""
    from ipykernel.ipkernel import IPythonKernel
    from jupyter_server.services.contents.largefilemanager import LargeFileManager
    from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class

    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    halves = [tmp_path / f"03_radix_cache{suffix}" for suffix in (".md", ".ipynb")]
    for half in halves:
        shutil.copy2(ROOT / "notebooks" / half.name, half)
    os.utime(tmp_path / f"03_radix_cache{older}", (0, 0))
    before = [half.read_bytes() for half in halves]
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)()
    manager.root_dir = str(tmp_path)
    content = manager.get("03_radix_cache.ipynb")["content"]
    assert content["metadata"] == build.METADATA
    kernel = {**IPythonKernel().language_info, "version": "3.11.7"}
    assert content["metadata"]["language_info"] == kernel
    saved = {"type": "notebook", "format": "json", "content": content}
    manager.save(saved, "03_radix_cache.ipynb")
    assert [half.read_bytes() for half in halves] == before


def test_a_chapter_with_a_lab_does_not_import_from_itself(tmp_path: Path) -> None:
    """Such an import would put the package's class in place of the one in the notebook."""
    cells = (
        "#| default_exp one\n#| export\nclass Pool: ...",
        "#| export two\nfrom minisgl.one import Pool\n\n\ndef pool() -> Pool:\n    return Pool()",
    )
    (tmp_path / "notebooks").mkdir()
    for stem, refused in (("03_radix_cache", True), ("03b_prefix_caches", False)):
        path = tmp_path / f"notebooks/{stem}.md"
        path.write_text(chapter(*cells))
        errors = build.generate(tmp_path).errors
        assert ("leave out `from minisgl.one import Pool`" in str(errors)) == refused
        path.unlink()
