"""The order of the chapters is the order of the imports; nothing in the package is global state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import build
import pytest

ROOT = Path(__file__).resolve().parents[1]
# The package's own `__init__` hands out the public names lazily, so it may name any chapter.
EXCEPTIONS = {"minisgl"}


def dotted(path: Path) -> str:
    """Module name of a file, below the project's root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def chapter_of(source: str) -> str:
    """Return the chapter that exports a module, by its head; a folder without one comes first."""
    found = re.search(r"Generated from notebooks/(\w+)\.ipynb", source)
    return found[1] if found else ""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import at any depth, except for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # `from minisgl import core` names a module, too
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.If) and build.is_type_checking(node):
            yield from (found for other in node.orelse for found in imports(other))
        else:
            yield from imports(node)


def violations(sources: dict[str, str], chapters: dict[str, str]) -> list[str]:
    """Return the violations of the map, a line each: globals, and imports of a later chapter."""
    found = []
    for name, source in sorted(sources.items()):
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.append(f"{name}:{node.lineno}: global {', '.join(node.names)}")
        if name in EXCEPTIONS:
            continue
        for line, target in imports(tree):
            module = target if target in chapters else target.rpartition(".")[0]
            if chapters.get(module, "") > chapters[name] and module not in EXCEPTIONS:
                later = f"{module} of chapter {chapters[module]}"
                found.append(f"{name}:{line} of chapter {chapters[name]} imports {later}")
    return found


def test_the_package_follows_the_map() -> None:
    roots = {ROOT / "minisgl": ROOT, ROOT / "notebooks/training": ROOT / "notebooks"}
    sources = {
        dotted(path.relative_to(root)): path.read_text()
        for folder, root in roots.items()
        for path in folder.rglob("*.py")
    }
    chapters = {name: chapter_of(source) for name, source in sources.items()}
    assert len(set(chapters.values())) > 30  # heads are read; test_build checks that they are true
    assert violations(sources, chapters) == []


CHAPTERS = {"minisgl": "", "minisgl.core": "01_requests", "minisgl.llm": "09_scheduler"}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("minisgl.core", "from minisgl.llm import LLM", "chapter 01_requests imports minisgl.llm"),
        ("minisgl.core", "from minisgl import llm", "imports minisgl.llm"),
        ("minisgl.core", "def f():\n    import minisgl.llm", ":2 of chapter"),
        ("minisgl.core", "try:\n    import minisgl.llm\nexcept ImportError:\n    pass", ":2 of"),
        ("minisgl.llm", "from minisgl.core import Req", None),
        ("minisgl.core", "if TYPE_CHECKING:\n    from minisgl.llm import LLM", None),
        ("minisgl", "def __getattr__(n):\n    import minisgl.llm", None),
        ("minisgl", "def f():\n    global x\n    x = 1", "global x"),
    ],
)
def test_violations_are_found(module: str, source: str, message: str | None) -> None:
    found = violations({module: source}, CHAPTERS)
    assert len(found) == (message is not None)
    if message:
        assert message in found[0]


WIRING = {"minisgl.scheduler.build"}  # it builds the parts


def test_a_scheduler_works_with_any_executor() -> None:
    for path in sorted((ROOT / "minisgl/scheduler").glob("*.py")):
        name = dotted(path.relative_to(ROOT))
        targets = [target for _, target in imports(ast.parse(path.read_text()))]
        wired = any(target.startswith("minisgl.engine.engine.") for target in targets)
        assert not wired or name in WIRING, name


def packages_in_cycles(sources: dict[str, str]) -> dict[str, set[str]]:
    """Packages directly below `minisgl` that reach themselves, and the others of their cycles."""
    edges: dict[str, set[str]] = {}
    for name, source in sources.items():
        mine = name.split(".")[1:2]
        for _, target in imports(ast.parse(source)):
            theirs = target.split(".")[1:2] if target.startswith("minisgl.") else mine
            if mine and name not in EXCEPTIONS and mine != theirs:
                edges.setdefault(mine[0], set()).add(theirs[0])

    def reached(start: str) -> set[str]:
        found, new = set[str](), {start}
        while new := {far for near in new for far in edges.get(near, ())} - found:
            found |= new
        return found

    far = {name: reached(name) for name in edges}
    cyclic = {a: {b for b in far[a] if a in far.get(b, ())} for a in far if a in far[a]}
    return {name: others - {name} for name, others in cyclic.items()}


def test_no_package_imports_itself_by_way_of_others() -> None:
    files = list((ROOT / "minisgl").rglob("*.py"))
    sources = {dotted(p.relative_to(ROOT)): p.read_text() for p in files}
    assert packages_in_cycles(sources) == {}


def test_a_cycle_of_packages_is_found() -> None:
    sources = {
        "minisgl.a.one": "from minisgl.b.two import f",
        "minisgl.b.two": "import torch",
        "minisgl.b.three": "def f():\n    from minisgl.c import g",
        "minisgl.c": "from minisgl.a.one import h",
    }
    found = {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}
    assert packages_in_cycles(sources) == found
    del sources["minisgl.b.three"]
    assert packages_in_cycles(sources) == {}
