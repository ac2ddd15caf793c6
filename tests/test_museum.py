"""The museum of bugs: its tool undoes what it does, and each exhibit names a test that guards it.

That the symptom is there with the bug and not without is asserted by the exhibits' own cells.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import build
import pytest
from museum import Bug

from minisgl.kvcache import page_table
from minisgl.kvcache.page_table import OutOfPages, PageAllocator
from tests.test_mutations import ALL

ROOT = Path(__file__).resolve().parents[1]
EXHIBITS = [stem for stem in build.chapter_stems(ROOT) if re.match("14[a-z]_", stem)]


def cells(stem: str) -> list[tuple[str, set[str]]]:
    """Code and tags of a chapter, cell by cell."""
    nb = build.read_chapter(ROOT, stem)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    return [(cell.source, set(cell.metadata.get("tags", []))) for cell in code]


def planted(stem: str) -> Bug:
    """The bug of an exhibit, made by its folded cell."""
    (spoiler,) = [source for source, tags in cells(stem) if "spoiler" in tags]
    names: dict[str, Any] = {}
    exec(spoiler, names)
    (bug,) = [value for value in names.values() if isinstance(value, Bug)]
    return bug


def squeezed(text: str) -> str:
    """A text without its white space: a method is indented, its source in a `Bug` is not."""
    return "".join(text.split())


def test_there_are_a_dozen_exhibits() -> None:
    assert len(EXHIBITS) >= 12


@pytest.mark.parametrize("stem", EXHIBITS)
def test_an_exhibit_names_the_test_that_notices_its_bug(stem: str) -> None:
    """Its bug is a mutation, of which `test_mutations` shows that the guard fails."""
    bug = planted(stem)
    module = inspect.getmodule(bug.function)
    assert module is not None
    twins = [
        mutation for mutation in ALL
        if mutation.module == module.__name__
        and squeezed(mutation.old) in squeezed(bug.texts[0])
        and squeezed(bug.texts[0]).replace(squeezed(mutation.old), squeezed(mutation.new))
        == squeezed(bug.texts[1])
    ]  # fmt: skip
    text = (ROOT / f"notebooks/{stem}.md").read_text("utf-8")
    assert any(twin.test.split("::")[1].split("[")[0] in text for twin in twins)


@pytest.mark.parametrize("stem", EXHIBITS)
def test_an_exhibit_asserts_its_symptom_without_and_with_the_bug(stem: str) -> None:
    symptom = next(source for source, tags in cells(stem) if not tags and "bug" in source)
    assert "with bug" in symptom and re.search("^assert", symptom, re.MULTILINE)


def test_a_bug_is_there_for_the_length_of_its_block() -> None:
    before = PageAllocator.allocate
    bug = Bug(PageAllocator.allocate, "if n > self.free_pages:", "if False:")
    for _ in range(2):
        with bug:
            assert PageAllocator.allocate is not before
            assert len(PageAllocator(2, 4).allocate(3)) != 3
        assert PageAllocator.allocate is before
        with pytest.raises(OutOfPages):
            PageAllocator(2, 4).allocate(3)
    with pytest.raises(KeyError), bug:
        raise KeyError
    assert PageAllocator.allocate is before


def test_a_bug_in_a_free_function_and_its_diff() -> None:
    bug = Bug(page_table.slots_of_pages, "* page_size + inside", "* page_size")
    with bug:
        assert page_table.slots_of_pages([1], 2).tolist() == [2]  # type: ignore[arg-type]
    assert page_table.slots_of_pages([1], 2).tolist() == [2, 3]  # type: ignore[arg-type]
    assert str(bug).splitlines()[0] == "slots_of_pages" and str(bug).count("\n-") == 1


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("pages", 11)])
def test_a_text_that_is_not_there_once_is_refused(old: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"old: must be once in .*, which is {count} times"):
        Bug(PageAllocator.allocate, old, "")


def test_the_package_does_not_use_the_museum() -> None:
    found = subprocess.run(
        ["grep", "-rlw", "museum", ROOT / "minisgl", "--include=*.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout == ""
