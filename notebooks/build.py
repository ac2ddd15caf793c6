#!/usr/bin/env python3
"""Build the book: export marked cells into the package, pair and run the notebooks, check it all.

A chapter is a pair of files, `notebooks/NN_name.md` (edited) and `NN_name.ipynb` (with outputs).
Every file under `minisgl/` and `notebooks/training/` is made here from the cells that begin with
`#| export`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    # jsonschema, which nbformat imports, would take 2 s to compile a grammar of IRIs, for nothing.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import jupytext
    import labs  # notebooks/labs.py
    import nbformat
    import prose  # notebooks/prose.py
    from jupytext.config import load_jupytext_config
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbformat import NotebookNode
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: build.py needs {error.name}; pip install -e '.[dev]' installs the authors' tools"
    ) from None

PACKAGE = "minisgl"
BESIDE = ("training",)  # packages in notebooks/, which are not installed
CHAPTER = re.compile(r"(\d\d[a-z]{0,2}|[A-Z])_\w+")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# All that JupyterLab adds to a notebook, so that it does not open as changed. A Python of another
# version than this one marks it as changed nevertheless.
METADATA = {
    "jupytext": {"cell_metadata_filter": "tags,-all", "default_lexer": "ipython3"},
    "kernelspec": KERNEL,
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": "3.11.7",
    },
}
PROMISE = re.compile(r"^(>.*(?:\n>.*)*)", re.MULTILINE)
FOLDED = {"hide-input", "hide-cell"}
MODEL_DATA = Path(PACKAGE, "tiny/model")  # the one folder that may hold files not made here,
TABLES = Path("notebooks/training/tables.toml")  # and the one file
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class BuildError(Exception):
    """The book breaks one of the exporter's rules; the message has the place and the remedy."""


@dataclass(frozen=True)
class Cell:
    """One exported code cell: its text without directives, and where it stands in the book."""

    chapter: str
    number: int  # among the code cells of the chapter, from 1
    source: str

    def error(self, message: str) -> BuildError:
        """Make an error that names the chapter and the cell."""
        head = next((line for line in self.source.splitlines() if line.strip()), "")
        return BuildError(f"{self.chapter}, code cell {self.number} ({head[:60]!r}): {message}")


@dataclass
class Chapter:
    """One chapter's part of the package."""

    stem: str
    promise: str = ""
    modules: dict[str, list[Cell]] = field(default_factory=dict)
    docs: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------- chapters and pairs


def chapter_stems(root: Path) -> list[str]:
    """List all chapters in the order of the book: 00 ... 13, then the appendices A, B."""
    folder = root / "notebooks"
    files = [*folder.glob("*.md"), *folder.glob("*.ipynb")]
    return sorted({path.stem for path in files if CHAPTER.fullmatch(path.stem)})


def select(root: Path, wanted: Sequence[str]) -> list[str]:
    """Return chapters named by number (`03`), letter (`A`) or full name; all for no name."""
    stems = chapter_stems(root)
    chosen = []
    for name in wanted:
        key = Path(name).stem if name.endswith((".md", ".ipynb")) else name
        found = [stem for stem in stems if key in (stem, stem.split("_")[0])]
        if not found:
            raise BuildError(f"chapter: no {name!r} among {', '.join(stems) or 'no chapters'}")
        chosen += found
    return chosen if wanted else stems


def pair(root: Path, stem: str) -> tuple[Path, Path]:
    """Return the paths of a chapter's two halves: the Markdown text and the notebook."""
    return root / "notebooks" / f"{stem}.md", root / "notebooks" / f"{stem}.ipynb"


def read_text_half(path: Path) -> NotebookNode:
    """Parse a MyST Markdown chapter; the notebook has no outputs."""
    return jupytext.reads(path.read_text(encoding="utf-8"), fmt="md:myst")


def read_notebook_half(path: Path) -> NotebookNode:
    """Read a stored notebook, outputs included."""
    return nbformat.read(path, as_version=4)


def read_chapter(root: Path, stem: str) -> NotebookNode:
    """Read the chapter's cells, from the Markdown half if there is one."""
    text, notebook = pair(root, stem)
    return read_text_half(text) if text.exists() else read_notebook_half(notebook)


def as_text(root: Path, stem: str, nb: NotebookNode) -> str:
    """Return the Markdown half that belongs to a notebook, byte for byte."""
    clean = nbformat.from_dict({**nb, "metadata": METADATA})
    config = load_jupytext_config(str(pair(root, stem)[1]))
    return jupytext.writes(clean, fmt="md:myst", config=config)


def write_atomically(path: Path, text: str) -> bool:
    """Replace a file in one step, so that no reader gets half of it; False if nothing changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".build-", suffix=path.suffix)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return True


# --------------------------------------------------------------------------- reading directives


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """Separate the `#| name value` lines at the head of a cell from its code."""
    lines = source.splitlines()
    found: dict[str, str] = {}
    while lines and (match := re.match(r"#\|\s*(\w*)\s*(.*)$", lines[0])):
        found[match[1]] = match[2].strip()
        lines.pop(0)
    return found, "\n".join(lines)


def chapter_promise(nb: NotebookNode) -> str:
    """Return the first block quote of a chapter, its summary in one sentence."""
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        match = PROMISE.search(cell.source)
        if match:
            return " ".join(line.lstrip("> ").strip() for line in match[1].splitlines()).strip()
    return ""


def parse_chapter(root: Path, stem: str) -> Chapter:
    """Sort the exported cells of a chapter by the module that they go to."""
    return parse_cells(read_chapter(root, stem), stem)


def parse_cells(nb: NotebookNode, stem: str) -> Chapter:
    """Sort the exported cells of a notebook by the module that they go to."""
    chapter = Chapter(stem, chapter_promise(nb))
    default: str | None = None
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for number, raw in enumerate(code, start=1):
        directives, source = split_directives(raw.source)
        cell = Cell(stem, number, source)
        unknown = directives.keys() - {"default_exp", "export", "doc"}
        if unknown:
            raise cell.error(f"unknown directive #| {sorted(unknown)[0]}")
        if "default_exp" in directives:
            default = module_name(cell, directives["default_exp"])
        if "export" in directives:
            target = directives["export"]
            if not target and default is None:
                raise cell.error("#| export stands before any #| default_exp")
            name = module_name(cell, target) if target else str(default)
            chapter.modules.setdefault(name, []).append(cell)
            if "doc" in directives:
                chapter.docs.setdefault(name, directives["doc"])
        elif "doc" in directives:
            raise cell.error("#| doc belongs into a cell with #| export")
    return chapter


def full_name(name: str) -> str:
    """Return the name by which a module is imported."""
    return name if name.split(".")[0] in BESIDE else f"{PACKAGE}.{name}"


def module_name(cell: Cell, target: str) -> str:
    """Check the dotted name behind a directive; it is relative to the package."""
    name = target.removeprefix(f"{PACKAGE}.")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise cell.error(f"not a module name: {target!r}")
    return name


# --------------------------------------------------------------------------- cells to a module


@dataclass
class Block:
    """A piece of a module: one statement with the comments above it."""

    text: str
    members: set[str] | None = None  # names defined in the body, when it is a class


@dataclass(frozen=True)
class Piece:
    """A top-level statement of a cell with the blank lines and comments before it."""

    stmt: ast.stmt | None  # None for comments after the last statement
    lines: list[str]
    head: int  # lines of the cell above this piece

    @property
    def text(self) -> str:
        """The piece as it stands in the cell."""
        return "\n".join(self.lines)


def pieces(cell: Cell) -> Iterable[Piece]:
    """Cut a cell into its top-level statements."""
    try:
        tree = ast.parse(cell.source)
    except SyntaxError as error:
        raise cell.error(f"line {error.lineno}: {error.msg}") from error
    lines = cell.source.splitlines()
    position = 0
    for stmt in tree.body:
        if first_line(stmt) <= position:
            raise cell.error("two statements on one line")
        end = stmt.end_lineno or stmt.lineno
        for index in range(end, len(lines)):  # comments that close an indented body stay with it
            if re.match(r"\s+#", lines[index]):
                end = index + 1
            elif lines[index].strip():
                break
        yield Piece(stmt, lines[position:end], position)
        position = end
    if any(line.strip() for line in lines[position:]):
        yield Piece(None, lines[position:], position)


def first_line(stmt: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included, from 1."""
    return min([stmt.lineno, *(d.lineno for d in getattr(stmt, "decorator_list", []))])


def defined_names(stmt: ast.stmt) -> list[str]:
    """Return the names that a statement binds; `@overload` and setters define nothing new."""
    if isinstance(stmt, DEFINITION):
        shown = [ast.unparse(d).split("(")[0].split(".")[-1] for d in stmt.decorator_list]
        again = {"overload", "setter", "getter", "deleter"}
        return [] if again.intersection(shown) else [stmt.name]
    if isinstance(stmt, ast.Assign):
        return [target.id for target in stmt.targets if isinstance(target, ast.Name)]
    if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
        return [stmt.target.id]
    return []


def add_to_decorator(stmt: ast.stmt | None) -> ast.Call | None:
    """Return the `@add_to(Class)` of a function, if it carries one."""
    for decorator in getattr(stmt, "decorator_list", []):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "add_to":
            return decorator
    return None


def is_type_checking(stmt: ast.stmt) -> bool:
    """Return True for a block `if TYPE_CHECKING:`."""
    return isinstance(stmt, ast.If) and ast.unparse(stmt.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def indent_code(text: str) -> str:
    """Indent by four spaces, except the lines that lie inside a string of several lines."""
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif kind in ("FSTRING_START", "TSTRING_START"):
            opened.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(opened.pop() + 1, token.end[0] + 1))
    return "\n".join(
        "    " + line if line.strip() and number not in inside else line
        for number, line in enumerate(text.splitlines(), start=1)
    )


class ModuleSource:
    """Assembles one module from the cells exported to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.imports: dict[str, str] = {}  # normalised statement to the text as written
        self.typing_blocks: dict[str, str] = {}
        self.blocks: list[Block] = []
        self.names: set[str] = set()
        self.classes: dict[str, Block] = {}

    def add_cell(self, cell: Cell) -> None:
        """Take in one cell, statement by statement."""
        fresh = True
        for piece in pieces(cell):
            stmt, text = piece.stmt, piece.text
            decorator = add_to_decorator(stmt)
            if stmt is None:
                self.blocks.append(Block(text))
            elif isinstance(stmt, ast.Import | ast.ImportFrom):
                self.add_import(cell, stmt, text)
            elif is_type_checking(stmt):
                self.typing_blocks.setdefault(ast.unparse(stmt), text.strip("\n"))
            elif decorator is not None:
                self.fold(cell, stmt, decorator, piece)
            else:
                self.add_block(cell, stmt, "\n" + text.strip("\n") if fresh else text)
                fresh = False

    def add_import(self, cell: Cell, stmt: ast.Import | ast.ImportFrom, text: str) -> None:
        """Move an import to the top; `add_to` is a tool of the notebook and left out."""
        if isinstance(stmt, ast.ImportFrom):
            if stmt.level or any(alias.name == "*" for alias in stmt.names):
                raise cell.error("exported imports are absolute and name what they take")
            if stmt.module == "__future__":
                return
            if stmt.module == full_name(self.name):
                raise cell.error(f"{stmt.module} imports itself")
            kept = [alias for alias in stmt.names if alias.name != "add_to"]
            if stmt.module == f"{PACKAGE}.notebook" and len(kept) < len(stmt.names):
                if not kept:
                    return
                text = ast.unparse(ast.ImportFrom(stmt.module, kept, 0))
        self.imports.setdefault(ast.unparse(stmt), text.strip("\n"))

    def add_block(self, cell: Cell, stmt: ast.stmt, text: str) -> None:
        """Take in an ordinary statement and remember what it defines."""
        for name in defined_names(stmt):
            if name in self.names:
                raise cell.error(f"{name} is defined twice in {full_name(self.name)}")
            self.names.add(name)
        block = Block(text)
        if isinstance(stmt, ast.ClassDef):
            block.members = {name for inner in stmt.body for name in defined_names(inner)}
            self.classes[stmt.name] = block
        self.blocks.append(block)

    def fold(self, cell: Cell, stmt: ast.stmt, decorator: ast.Call, piece: Piece) -> None:
        """Put a function marked `@add_to(Class)` at the end of the body of its class."""
        owner = ast.unparse(decorator.args[0]) if len(decorator.args) == 1 else "?"
        block = self.classes.get(owner)
        if block is None or block.members is None or not isinstance(stmt, FUNCTION):
            where = full_name(self.name)
            raise cell.error(f"add_to({owner}): {where} has no class {owner} before this cell")
        for node in ast.walk(stmt):
            if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
                raise cell.error(f"super() fails in a notebook: write super({owner}, self)")
        for name in defined_names(stmt):
            if name in block.members:
                raise cell.error(f"{owner}.{name} is defined twice in {full_name(self.name)}")
            block.members.add(name)
        first, last = decorator.lineno, decorator.end_lineno or decorator.lineno
        lines = list(piece.lines)
        del lines[first - 1 - piece.head : last - piece.head]
        method = "\n".join(lines).strip("\n")
        block.text = drop_placeholder(block.text) + "\n\n" + indent_code(method)

    def import_from(self, others: Iterable[ModuleSource]) -> None:
        """Import what other modules of this chapter define: the notebook has the names already.

        So the cells of a chapter work with each other as they stand, edited or not.
        """
        texts = [*self.imports.values(), *(block.text for block in self.blocks)]
        tree = ast.parse("\n".join(texts))
        used: set[str] = set()
        bound = set(self.names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add(node.asname or node.name.partition(".")[0])
        missing = used - bound
        for other in others:
            found = sorted(missing & other.names)
            if found:
                text = f"from {full_name(other.name)} import {', '.join(found)}"
                self.imports.setdefault(text, text)
            missing.difference_update(found)

    def render(self, doc: str, source: str) -> str:
        """Return the module as text, not yet formatted."""
        sentence = textwrap.fill(doc, 95).replace("\\", "\\\\").replace('"""', "'''")
        parts = [f'"""{sentence}\n\nGenerated from {source}: edit there.\n"""']
        if self.imports or self.blocks or self.typing_blocks:
            parts.append("from __future__ import annotations")
        parts.append("\n".join(self.imports.values()))
        parts += self.typing_blocks.values()
        parts.append("\n".join(block.text for block in self.blocks))
        if "main" in self.names or self.name == "__main__":
            parts.append('\nif __name__ == "__main__":\n    raise SystemExit(main())')
        return "\n\n".join(part for part in parts if part) + "\n"


def drop_placeholder(text: str) -> str:
    """Remove the `pass` or `...` of a class whose methods follow in later cells."""
    body = ast.parse(text.strip("\n")).body[0]
    assert isinstance(body, ast.ClassDef)
    last = body.body[-1]
    documented = ast.get_docstring(body, clean=False) is not None
    placeholder = isinstance(last, ast.Pass) or ast.unparse(last) == "..."
    if not placeholder or len(body.body) > 1 + documented:
        return text
    lines = text.strip("\n").splitlines()
    if last.lineno == body.lineno:  # class A: ...
        lines[last.lineno - 1] = lines[last.lineno - 1][: last.col_offset].rstrip()
    else:
        del lines[last.lineno - 1]
    return "\n" + "\n".join(lines)


# --------------------------------------------------------------------------- the whole package


@dataclass
class Package:
    """The generated modules: path below the project's root to text."""

    files: dict[Path, str] = field(default_factory=dict)
    owner: dict[Path, str] = field(default_factory=dict)  # the chapter of each file
    errors: dict[str, str] = field(default_factory=dict)  # chapter to what is wrong with it


def module_path(name: str) -> Path:
    """Return the file of a module below the project's root."""
    beside = ("notebooks",) if name.split(".")[0] in BESIDE else ()
    return Path(*beside, *full_name(name).split(".")).with_suffix(".py")


def generate(root: Path) -> Package:
    """Make the text of every file of the package; a broken chapter is reported and left out."""
    package = Package()
    for stem in chapter_stems(root):
        try:
            chapter = parse_chapter(root, stem)
            made = assemble(chapter)
            for name in made:
                other = package.owner.get(module_path(name))
                if other:
                    raise BuildError(f"{stem}: {full_name(name)} is already fed by {other}")
        except BuildError as error:
            package.errors[stem] = str(error)
            continue
        except Exception as error:  # a chapter that cannot be read must not stop the others
            package.errors[stem] = f"{stem}: cannot be read: {type(error).__name__}: {error}"
            continue
        for name, text in made.items():
            package.files[module_path(name)] = text
            package.owner[module_path(name)] = stem
    add_package_files(package)
    format_files(root, package)
    add_tiles(root, package)
    add_viewer(root, package)
    return package


def assemble(chapter: Chapter) -> dict[str, str]:
    """Return the unformatted text of every module of a chapter."""
    modules = {name: ModuleSource(name) for name in chapter.modules}
    for name, module in modules.items():
        for cell in chapter.modules[name]:
            module.add_cell(cell)
        if not (chapter.docs.get(name) or chapter.promise):
            where = full_name(name)
            raise BuildError(f"{chapter.stem}: no `> promise` line and no #| doc for {where}")
    for module in modules.values():
        check_imports(chapter, module)
        module.import_from(modules.values())
    source = f"notebooks/{chapter.stem}.ipynb"
    return {
        name: module.render(chapter.docs.get(name) or chapter.promise, source)
        for name, module in modules.items()
    }


def check_imports(chapter: Chapter, module: ModuleSource) -> None:
    """Refuse imports of a chapter with a lab from itself: they replace what a reader wrote."""
    number, _, _ = chapter.stem.partition("_")
    own = {f"{PACKAGE}.{name}" for name in chapter.modules}
    for text in module.imports.values() if number in labs.TESTS else ():
        stmt = ast.parse(textwrap.dedent(text)).body[0]
        if isinstance(stmt, ast.ImportFrom) and stmt.module in own:
            raise BuildError(
                f"{chapter.stem}: leave out `{ast.unparse(stmt)}`: the notebook has these names, "
                f"and the exporter writes the import"
            )


def add_package_files(package: Package) -> None:
    """Add an `__init__.py` to every folder, and the package's `py.typed`."""
    package.files[Path(PACKAGE, "py.typed")] = ""
    for path in list(package.files):
        for folder in (folder for folder in path.parents if folder.name not in ("", "notebooks")):
            if folder.with_suffix(".py") in package.files:
                stem = package.owner.get(path, "?")
                package.errors[stem] = f"{stem}: {folder} is both a module and a folder of modules"
            name = ".".join(folder.parts).removeprefix("notebooks.")
            text = f'"""The package `{name}`.\n\nGenerated by notebooks/build.py.\n"""\n'
            package.files.setdefault(folder / "__init__.py", text)


def add_tiles(root: Path, package: Package) -> None:
    """Add the tiles that chapter 13f found for GPUs, from the files with date and command."""
    for path in sorted((root / "notebooks" / "data" / "tiles").glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        lines = [f"{json.dumps(key)}: {json.dumps(one)}" for key, one in stored["tiles"].items()]
        text = '{"tiles": {\n' + ",\n".join(sorted(lines)) + "\n}}\n"
        package.files[Path(PACKAGE, "kernels/tiles", path.name)] = text


def add_viewer(root: Path, package: Package) -> None:
    """Add the parts of the viewer's page, of chapter 09d: HTML, CSS and JavaScript, as they are."""
    for path in sorted((root / "notebooks" / "viewer").glob("*.*")):
        package.files[Path(PACKAGE, "viewer", path.name)] = path.read_text(encoding="utf-8")


def format_files(root: Path, package: Package) -> None:
    """Sort imports and format all modules with ruff, in one call each."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for path, text in package.files.items():
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_text(text, encoding="utf-8")
        run_ruff(root, base)
        for path in package.files:
            package.files[path] = (base / path).read_text(encoding="utf-8")


def run_ruff(root: Path, target: Path) -> None:
    """Sort imports and format; raise BuildError with ruff's message if that fails."""
    config = root / "pyproject.toml"
    common = ["--quiet", "--no-cache", *(["--config", str(config)] if config.exists() else [])]
    sort_imports = ["check", "--select", "I", "--fix", "--exit-zero"]
    for arguments in (sort_imports, ["format"]):
        command = [sys.executable, "-m", "ruff", *arguments, *common, str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"ruff {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def present_files(root: Path) -> set[Path]:
    """Return the files of the package and beside it, caches aside."""
    folders = [root / PACKAGE, *(root / "notebooks" / name for name in BESIDE)]
    every = (path for folder in folders for path in folder.rglob("*"))
    found = {path.relative_to(root) for path in every if path.is_file()}
    return {p for p in found if "__pycache__" not in p.parts and not p.name.startswith(".build-")}


def model_data_problems(root: Path) -> tuple[set[Path], list[str]]:
    """Return the files of the shipped model and its tables, and those that do not fit."""
    folder = root / MODEL_DATA
    manifest = folder / "MANIFEST.json"
    if not manifest.exists():
        return set(), []
    listed: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8")).get("sha256", {})
    allowed = {MODEL_DATA / "MANIFEST.json", TABLES}
    problems = []
    for name, expected in listed.items():
        allowed.add(MODEL_DATA / name)
        path = folder / name
        actual = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no such file"
        if actual != expected:
            problems.append(f"{MODEL_DATA / name}: sha256 is {actual}, not {expected}")
    return allowed, problems


# --------------------------------------------------------------------------- command: export


def export(root: Path, wanted: Sequence[str]) -> int:
    """Write the package; for named chapters only their own modules, and nothing is removed."""
    stems = select(root, wanted)
    package = generate(root)
    changed = 0
    for path, text in sorted(package.files.items()):
        owner = package.owner.get(path)
        if owner is None:  # with a broken chapter, what is there may be that chapter's
            wanted_here = not package.errors or not (root / path).exists()
        else:
            wanted_here = owner in stems
        if not wanted_here:
            continue
        if write_atomically(root / path, text):
            changed += 1
            print(f"wrote {path}")
    if not wanted and not package.errors:
        allowed, _ = model_data_problems(root)
        for path in sorted(present_files(root) - package.files.keys() - allowed):
            if MODEL_DATA in path.parents:
                print(f"kept  {path} (not in its MANIFEST.json)")
                continue
            (root / path).unlink()
            changed += 1
            print(f"removed {path}: no chapter exports it")
    for stem, message in package.errors.items():
        print(f"{'error' if stem in stems else 'warning'}: {message}", file=sys.stderr)
    print(f"export: {changed} files changed")
    return int(any(stem in stems for stem in package.errors))


# --------------------------------------------------------------------------- command: sync


def code_of(source: str) -> str:
    """Return what a cell runs: its source without comments and docstrings."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a magic or a draft: compare it as it stands
        return source
    for node in ast.walk(tree):
        if isinstance(node, DEFINITION) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def merge_outputs(stem: str, fresh: NotebookNode, stored: NotebookNode | None) -> NotebookNode:
    """Copy into `fresh` the ids of corresponding cells, and outputs where code is unchanged."""
    old = list(stored.cells) if stored is not None else []
    new = list(fresh.cells)
    taken: set[str] = set()
    matcher = difflib.SequenceMatcher(
        None, [(c.cell_type, c.source) for c in old], [(c.cell_type, c.source) for c in new], False
    )
    partner: dict[int, NotebookNode] = {}
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag == "equal" or (tag == "replace" and old_to - old_from == new_to - new_from):
            for before, after in zip(old[old_from:old_to], range(new_from, new_to), strict=True):
                if before.cell_type == new[after].cell_type:
                    partner[after] = before
    taken = {cell["id"] for cell in partner.values() if "id" in cell}
    for index, cell in enumerate(new):
        cell.metadata = clean_metadata(cell)
        before = partner.get(index)
        if before is not None and "id" in before:
            cell["id"] = before["id"]
        else:
            cell["id"] = fresh_id(f"{stem}\n{cell.source}", taken)
            taken.add(cell["id"])
        if cell.cell_type == "code" and before and code_of(before.source) == code_of(cell.source):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
    fresh.metadata = nbformat.from_dict(METADATA)
    fresh.nbformat, fresh.nbformat_minor = 4, 5
    return fresh


def clean_metadata(cell: NotebookNode) -> NotebookNode:
    """Return a cell's tags; JupyterLab folds a code cell by its own mark, the site by a tag."""
    tags = cell.metadata.get("tags", [])
    hidden = cell.cell_type == "code" and not FOLDED.isdisjoint(tags)
    marks = {"jupyter": {"source_hidden": True}} if hidden else {}
    return nbformat.from_dict(marks | ({"tags": tags} if tags else {}))


def fresh_id(seed: str, taken: set[str]) -> str:
    """Make a cell id from the cell's text, so that the same edit gives the same file anywhere."""
    salt = 0
    while (name := hashlib.sha1(f"{salt}{seed}".encode()).hexdigest()[:8]) in taken:
        salt += 1
    return name


def notebook_text(nb: NotebookNode) -> str:
    """Return a notebook as the text of its file."""
    return nbformat.writes(nb).rstrip("\n") + "\n"


def sync_chapter(root: Path, stem: str, from_notebook: bool = False) -> NotebookNode:
    """Bring both halves of a chapter to the same content and return the notebook."""
    text, notebook = pair(root, stem)
    stored = read_notebook_half(notebook) if notebook.exists() else None
    if stored is not None and (from_notebook or not text.exists()):
        source = nbformat.from_dict(stored)
    else:
        source = read_text_half(text)
    write_reading_time(stem, source)
    nb = merge_outputs(stem, nbformat.from_dict(source), stored)
    nbformat.validate(nb)
    if write_atomically(notebook, notebook_text(nb)):
        print(f"wrote notebooks/{notebook.name}")
    if write_atomically(text, as_text(root, stem, nb)):
        print(f"wrote notebooks/{text.name}")
    return nb


def sync(root: Path, wanted: Sequence[str], from_notebook: bool) -> int:
    """Pair the chapters."""
    failed = 0
    for stem in select(root, wanted):
        try:
            sync_chapter(root, stem, from_notebook)
        except Exception as error:  # one unreadable chapter must not stop the others
            failed += 1
            print(f"error: {stem}: {type(error).__name__}: {error}", file=sys.stderr)
    return int(failed > 0)


def format_chapters(root: Path, wanted: Sequence[str]) -> int:
    """Sort imports and format the code cells of both halves."""
    stems = select(root, wanted)
    for stem in stems:
        sync_chapter(root, stem)
        notebook = pair(root, stem)[1]
        with tempfile.TemporaryDirectory() as folder:  # a copy: the file itself changes in one step
            copy = Path(shutil.copy(notebook, folder))
            run_ruff(root, copy)
            changed = write_atomically(notebook, copy.read_text(encoding="utf-8"))
        if changed:
            sync_chapter(root, stem, from_notebook=True)
    return 0


# --------------------------------------------------------------------------- command: run


def has_gpu() -> bool:
    """Return True if an NVIDIA driver lists a GPU; does not import torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def run_environment(root: Path) -> None:
    """Set what kernels inherit: few threads, no network; what chapters need, they set."""
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    defaults["PYTHONHASHSEED"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def number_cells(nb: NotebookNode) -> None:
    """Set the n-th code cell's execution count to n; a cell that never ran keeps none."""
    for number, cell in enumerate(code_cells(nb), start=1):
        if cell.execution_count is None:
            continue
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """Return the code cells that hold code; Jupyter does not execute empty ones."""
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def run_chapter(root: Path, stem: str, gpu: bool) -> float:
    """Execute a chapter from top to bottom, store its outputs, return the seconds it took."""
    nb = sync_chapter(root, stem)
    bar = tqdm(total=len(nb.cells), desc=stem, unit="cell", leave=False)
    client = NotebookClient(
        nb,
        timeout=900,
        kernel_name=KERNEL["name"],
        record_timing=False,
        resources={"metadata": {"path": str(root / "notebooks")}},
        skip_cells_with_tag="" if gpu else "gpu",
        on_cell_complete=lambda **_: bar.update(),
    )
    start = time.perf_counter()
    try:
        client.execute()
    finally:
        bar.close()
    number_cells(nb)
    nb.metadata = nbformat.from_dict(METADATA)
    seconds = time.perf_counter() - start
    write_atomically(pair(root, stem)[1], notebook_text(nb))
    return seconds


def run(root: Path, wanted: Sequence[str]) -> int:
    """Execute chapters one after another; a failing one keeps its former outputs."""
    gpu = has_gpu()
    run_environment(root)
    if not gpu:
        print("run: no GPU, cells tagged `gpu` keep their stored outputs")
    failed = 0
    for stem in select(root, wanted):
        try:
            seconds = run_chapter(root, stem, gpu)
            print(f"ran {stem}: {seconds:.1f} s")
        except CellExecutionError as error:
            failed += 1
            print(f"error: {stem}:\n{error}", file=sys.stderr)
    return int(failed > 0)


# --------------------------------------------------------------------------- command: budget

MAIN_LINE = re.compile(r"(0\d|1[0-2])_\w+")  # a plain number; 13 measures what the line builds
APPENDIX = re.compile(r"[A-Z]_\w+")
READING = re.compile(r"^\*Reading time: .*\*\n*", re.MULTILINE)
HIDDEN = FOLDED | {"remove-input", "remove-cell"}
FIRST_VERSION = "first-version"
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
EXTERNAL = re.compile(r"https?://[^\s)>\]\"']+")
INTERNAL = re.compile(r"\]\(([0-9A-Z]\w*\.(?:ipynb|md))?(?:#[\w-]+)?\)")


@dataclass(frozen=True)
class Budget:
    """Limits of a chapter's length."""

    words: tuple[int, int]
    exported: int  # lines
    words_per_line: float  # at least, for each line of code shown
    longest: int  # lines of an exported cell
    sources: int = 3  # links to papers, projects, documentation


MAIN = Budget(words=(1500, 2500), exported=350, words_per_line=4.0, longest=30)
DEEPER = Budget(words=(0, 3000), exported=615, words_per_line=2.5, longest=40)
SERVER = Budget(words=(1500, 2500), exported=580, words_per_line=3.7, longest=30)
MODEL = Budget(words=(0, 2500), exported=2010, words_per_line=1.5, longest=60, sources=0)
WHOLE_WORDS, WHOLE_EXPORTED = 28_000, 4_300  # the main line together
FIRST_LINES, FIRST_PLACE = 60, 1 / 3  # of the first complete version: its length, and where


def budget_of(stem: str) -> Budget | None:
    """Return a chapter's budget by its name; of the appendices only A has code enough for one."""
    if stem.startswith("A_"):
        return MODEL
    if APPENDIX.fullmatch(stem):
        return None
    if not MAIN_LINE.fullmatch(stem):
        return DEEPER
    return SERVER if stem.startswith("12_") else MAIN


@dataclass(frozen=True)
class Measure:
    """Length of a chapter; lines are those that are not blank, directives left out."""

    stem: str
    words: int
    exported: int
    shown: int
    longest: int
    first: int | None  # lines of the first version; None if there is not exactly one
    place: float  # of the first version among all cells, 0 to 1
    sources: int
    links: int  # to other chapters
    exercises: int = 0  # cells tagged `solution`
    to_write: int = 0  # lines that a lab leaves to the reader; 0 where there is no lab

    @property
    def exact_minutes(self) -> float:
        """How long the chapter takes: 200 words or 10 lines a minute, 5 minutes an exercise."""
        return self.words / 200 + self.shown / 10 + 5 * self.exercises

    @property
    def minutes(self) -> int:
        """The reading time stated in the chapter: rounded up to five minutes."""
        return 5 * math.ceil(self.exact_minutes / 5)

    @property
    def building_hours(self) -> float:
        """Time for the lab, in half hours: to read the prose, and a minute for a line to write.

        Two readers took 0.5 (chapter 12) and 1.5 minutes (chapter 08) a line.
        """
        return round((self.words / 200 + self.to_write) / 30) / 2 if self.to_write else 0.0

    @property
    def words_per_line(self) -> float:
        """Words of prose for each line of code in the reader's sight."""
        return self.words / self.shown if self.shown else float("inf")


def count_words(text: str) -> int:
    """Count the words of a Markdown cell, without fenced code, link targets and marks."""
    text = READING.sub("", FENCE.sub("", text))
    plain = re.sub(r"\]\([^)]*\)", "]", EXTERNAL.sub("", text))
    return len(re.findall(r"[^\W_][\w'’.-]*", plain))


def measure(stem: str, nb: NotebookNode) -> Measure:
    """Count what one chapter takes."""
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    shown, exported, exercises = 0, [0], 0
    first: list[tuple[int, float]] = []
    for number, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        directives, source = split_directives(cell.source)
        lines = sum(1 for line in source.splitlines() if line.strip())
        tags = set(cell.metadata.get("tags", []))
        shown += 0 if tags & HIDDEN else lines
        exercises += "solution" in tags
        if "export" in directives:
            exported.append(lines)
        if FIRST_VERSION in tags:
            first.append((lines, (number + 1) / len(nb.cells)))
    length, place = first[0] if len(first) == 1 else (None, 0.0)
    to_write = labs.lines_to_write(nb) if stem.split("_")[0] in labs.TESTS else 0
    return Measure(
        stem, count_words(prose), sum(exported), shown, max(exported), length, place,
        len(set(EXTERNAL.findall(prose))), len(INTERNAL.findall(prose)), exercises, to_write,
    )  # fmt: skip


def write_reading_time(stem: str, nb: NotebookNode) -> None:
    """Write below a chapter's promise the times to read and to build it; appendices have none."""
    if APPENDIX.fullmatch(stem):
        return
    m = measure(stem, nb)
    building = f" Building it as a lab: about {m.building_hours:g} hours." if m.to_write else ""
    line = f"*Reading time: about {m.minutes} minutes, with the exercises.{building}*\n\n"
    for cell in nb.cells:
        if cell.cell_type == "markdown" and PROMISE.search(cell.source):
            without = READING.sub("", cell.source)
            cell.source = PROMISE.sub(lambda m: f"{m[0]}\n\n{line}", without, count=1)
            cell.source = re.sub(r"\n{3,}", "\n\n", cell.source).rstrip("\n")
            return


def reading_time_problems(stem: str, nb: NotebookNode) -> list[str]:
    """Return a problem if the reading time at a chapter's head is wrong."""
    said = nbformat.from_dict(nb)
    write_reading_time(stem, said)
    if [cell.source for cell in said.cells] == [cell.source for cell in nb.cells]:
        return []
    m = measure(stem, nb)
    building = f" and {m.building_hours:g} hours to build" if m.to_write else ""
    return [
        f"it takes about {m.minutes} minutes{building}, which its head does not state; "
        f"build.py sync {stem} mends it"
    ]


def over_budget(m: Measure) -> list[str]:
    """Return the limits that a chapter exceeds, a sentence each."""
    budget = budget_of(m.stem)
    if budget is None:
        return []
    low, high = budget.words
    broken = {
        f"{m.words} words, the budget is {low} to {high}": not low <= m.words <= high,
        f"{m.exported} exported lines of {budget.exported}": m.exported > budget.exported,
        f"{m.words_per_line:.1f} words for each line shown, at least {budget.words_per_line}": (
            m.words_per_line < budget.words_per_line
        ),
        f"an exported cell of {m.longest} lines of {budget.longest}": m.longest > budget.longest,
        f"{m.sources} linked sources of {budget.sources}": m.sources < budget.sources,
    }
    if budget in (MAIN, SERVER) and m.exported:  # the tour builds nothing
        broken |= {
            f"no cell, or more than one, is tagged {FIRST_VERSION}": m.first is None,
            f"a first version of {m.first} lines of {FIRST_LINES}": (m.first or 0) > FIRST_LINES,
            f"the first version stands at {m.place:.0%} of the cells": m.place > FIRST_PLACE,
        }
    return [f"{m.stem}: {text}" for text, is_broken in broken.items() if is_broken]


def whole_line(measures: Sequence[Measure]) -> tuple[int, int, float]:
    """Return words, exported lines and hours of the main line together."""
    line = [m for m in measures if MAIN_LINE.fullmatch(m.stem)]
    hours = sum(m.exact_minutes for m in line) / 60
    return sum(m.words for m in line), sum(m.exported for m in line), hours


def budget_problems(measures: Sequence[Measure]) -> list[str]:
    """Return every broken budget, of the chapters and of the main line as a whole."""
    problems = [f"budget: {text}" for m in measures for text in over_budget(m)]
    words, exported, _ = whole_line(measures)
    if words > WHOLE_WORDS:
        problems.append(f"budget: the main line has {words} words of {WHOLE_WORDS}")
    if exported > WHOLE_EXPORTED:
        problems.append(f"budget: the main line exports {exported} lines of {WHOLE_EXPORTED}")
    return problems


def measure_chapters(root: Path, wanted: Sequence[str]) -> list[Measure]:
    """Measure each chapter, in the order of the book."""
    return [measure(stem, read_chapter(root, stem)) for stem in select(root, wanted)]


def print_budget(root: Path, wanted: Sequence[str]) -> int:
    """Print a row for each chapter, then what is over budget; return 1 if anything is."""
    measures = measure_chapters(root, wanted)
    print(
        "chapter                    words exported shown words/line longest first  at "
        "sources links minutes hours"
    )
    for m in measures:
        first = f"{m.first:5} {m.place:4.0%}" if m.first is not None else "    -    -"
        print(
            f"{m.stem:26} {m.words:5} {m.exported:8} {m.shown:5} {m.words_per_line:10.1f} "
            f"{m.longest:7} {first} {m.sources:6} {m.links:5} {m.minutes:7} "
            f"{m.building_hours or '-':>5}"
        )
    words, exported, hours = whole_line(measures)
    print(f"{'the main line':26} {words:5} {exported:8}   about {hours:.0f} hours")
    problems = budget_problems(measures)
    print("\n".join(problems) if problems else "budget: every chapter keeps it")
    return int(bool(problems))


# --------------------------------------------------------------------------- command: check


def show_diff(before: str, after: str, old: str, new: str) -> str:
    """Return a unified diff, at most 60 lines of it."""
    pieces = before.splitlines(), after.splitlines()
    lines = list(difflib.unified_diff(*pieces, old, new, lineterm=""))
    more = [f"... and {len(lines) - 60} more lines"] if len(lines) > 60 else []
    return "\n".join(lines[:60] + more)


def package_problems(root: Path, stems: list[str], everything: bool) -> list[str]:
    """Compare the package on disk with what the chapters export."""
    package = generate(root)
    problems = [message for stem, message in package.errors.items() if stem in stems]
    for path, text in sorted(package.files.items()):
        if not everything and package.owner.get(path) not in stems:
            continue
        name, disk = str(path), root / path
        if not disk.exists():
            problems.append(f"{name}: missing; build.py export writes it")
        elif (actual := disk.read_text(encoding="utf-8")) != text:
            problems.append(show_diff(actual, text, name, f"export of {package.owner.get(path)}"))
    if everything:
        allowed, wrong_data = model_data_problems(root)
        problems += wrong_data
        for path in sorted(present_files(root) - package.files.keys() - allowed):
            problems.append(f"{path}: no chapter exports this file")
    return problems


def pair_problems(root: Path, stem: str) -> list[str]:
    """Compare the two halves of a chapter."""
    text, notebook = pair(root, stem)
    for path in (text, notebook):
        if not path.exists():
            return [f"notebooks/{path.name}: missing; build.py sync {stem} writes it"]
    expected = as_text(root, stem, read_notebook_half(notebook))
    actual = text.read_text(encoding="utf-8")
    if actual == expected:
        return []
    names = f"notebooks/{notebook.name} as text", f"notebooks/{text.name}"
    return [show_diff(expected, actual, *names)]


def metadata_problems(path: Path) -> list[str]:
    """Find metadata that a run or an editor left behind, in the raw file: nbformat mends some."""
    nb = nbformat.from_dict(json.loads(path.read_text(encoding="utf-8")))
    problems = []
    if nb.metadata != METADATA:
        problems.append(f"notebook metadata is not clean: {sorted(nb.metadata)}")
    for number, cell in enumerate(nb.cells):
        clean = clean_metadata(cell)
        keys = sorted(clean.keys() | cell.metadata.keys())
        if wrong := [key for key in keys if clean.get(key) != cell.metadata.get(key)]:
            problems.append(f"cell {number}: metadata {wrong} is not what build.py sync writes")
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):
        problems.append("cell ids are missing or not unique")
    return problems


def alternative_text(output: NotebookNode) -> str:
    """Return a picture's alternative text, which `minisgl.notebook.show` stores."""
    return str(output.metadata.get("image/png", {}).get("alt", ""))


def execution_problems(root: Path, nb: NotebookNode) -> list[str]:
    """Find cells never executed or out of order, and outputs that no reader should see."""
    problems = []
    never = []
    for number, cell in enumerate(code_cells(nb), start=1):
        tags = cell.metadata.get("tags", [])
        head = cell.source.splitlines()[0][:60]
        where = f"code cell {number} ({head!r})"
        if "gpu" in tags and cell.execution_count is None:
            if not cell.outputs and "gpu-pending" not in tags:
                problems.append(f"{where}: tagged gpu, never run on one (or tag it gpu-pending)")
        elif cell.execution_count is None:
            never.append(str(number))
        elif cell.execution_count != number:
            problems.append(f"{where}: executed out of order, as number {cell.execution_count}")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"{where}: stored output is an error, {output.get('ename')}")
            elif str(root) in json.dumps(output):
                problems.append(f"{where}: output shows the path {root} of this machine")
            elif "image/png" in output.get("data", {}) and not alternative_text(output):
                problems.append(f"{where}: a picture without alternative text; show(fig, alt)")
            elif re.search(r"\d+%\|", output.get("text", "")):
                problems.append(f"{where}: stored output is a progress bar; progress=False")
    if never:
        problems.insert(0, f"code cells never executed: {', '.join(never)}; build.py run does it")
    return problems


def find_problems(root: Path, wanted: Sequence[str]) -> list[str]:
    """Find everything that is wrong with the book, one text for each fault."""
    stems = select(root, wanted)
    problems = package_problems(root, stems, everything=not wanted)
    hits = prose.find_hits(root, [pair(root, stem)[0] for stem in stems] if wanted else None)
    problems += ["\n".join(map(str, hits))] if hits else []
    for stem in stems:
        try:
            problems += pair_problems(root, stem)
            notebook = pair(root, stem)[1]
            if notebook.exists():
                nb = read_notebook_half(notebook)
                found = metadata_problems(notebook) + execution_problems(root, nb)
                found += reading_time_problems(stem, nb)
                problems += [f"notebooks/{notebook.name}: {problem}" for problem in found]
        except Exception as error:
            problems.append(f"{stem}: {type(error).__name__}: {error}")
    return problems


def check(root: Path, wanted: Sequence[str]) -> int:
    """Print what differs; 1 if anything does."""
    start = time.perf_counter()
    problems = find_problems(root, wanted)
    if not problems:  # a chapter that cannot be read has no length
        problems = budget_problems(measure_chapters(root, wanted))
    print("\n\n".join(problems) if problems else "check: the book and the package agree")
    took = time.perf_counter() - start
    print(f"check: {len(select(root, wanted))} chapters, {len(problems)} problems, {took:.1f} s")
    return int(bool(problems))


# --------------------------------------------------------------------------- labs


def lab_path(root: Path, stem: str) -> Path:
    """Return the notebook in which a reader writes a chapter's functions."""
    return root / "notebooks" / "labs" / f"{stem}.ipynb"


def lab_stem(root: Path, name: str) -> str:
    """Return the chapter of a lab; BuildError if it has no tests to be graded by."""
    stem = select(root, [name])[0]
    if stem.split("_")[0] not in labs.TESTS:
        raise BuildError(f"chapter: must be one of {', '.join(labs.TESTS)} for a lab, got {name!r}")
    return stem


def write_lab(root: Path, name: str, force: bool) -> int:
    """Write the lab of a chapter; a lab that exists is the reader's work, and stays."""
    stem = lab_stem(root, name)
    path = lab_path(root, stem)
    if path.exists() and not force:
        raise BuildError(f"{path.relative_to(root)} exists; --force replaces it, and what is in it")
    nb, total = labs.make_lab(read_notebook_half(pair(root, stem)[1]), stem.split("_")[0])
    write_atomically(path, notebook_text(nb))
    print(f"{path.relative_to(root)}: {total} functions are yours to write")
    return 0


def lab_modules(root: Path, stem: str) -> dict[str, str]:
    """Return the modules of a reader's lab as text, by name."""
    path = lab_path(root, stem)
    number = stem.split("_")[0]
    if not path.exists():
        raise BuildError(f"no lab yet: `python notebooks/build.py lab {number}` makes it")
    modules = assemble(parse_cells(read_notebook_half(path), stem))
    for name, text in modules.items():
        require_names(name, text)
    return modules


def require_names(name: str, text: str) -> None:
    """Raise BuildError if a module uses a name that only another cell of its notebook defines."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    done = subprocess.run(
        [*command, "--output-format", "json", "-"], input=text, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    for found in json.loads(done.stdout):
        line = text.splitlines()[found["location"]["row"] - 1].strip()
        raise BuildError(
            f"{full_name(name)}: must import or define each name that it uses, got "
            f"{found['message']} in `{line}`; add it to one of the module's `#| export` cells"
        )


def grade(root: Path, name: str, last: int | None) -> int:
    """Run the project's tests on a reader's modules; print one sentence."""
    stem = lab_stem(root, name)
    with labs.package_with(root, lab_modules(root, stem)) as copy:
        print("running the tests, for up to a minute …", file=sys.stderr, flush=True)
        outcomes = labs.run_tests(copy, labs.TESTS[stem.split("_")[0]])
    good, sentence = labs.verdict(outcomes, last)
    print(sentence)
    return 0 if good else 1


def serve_lab(root: Path, name: str, rest: Sequence[str]) -> int:
    """Run `python -m minisgl` with a reader's modules in place of the package's."""
    stem = lab_stem(root, name)
    with labs.package_with(root, lab_modules(root, stem)) as copy:
        command = [sys.executable, "-m", PACKAGE, *rest]
        return subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, check=False
        ).returncode


# --------------------------------------------------------------------------- command line


def arguments() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent(
            """\
            NN names a chapter: 03, 03_radix_cache, or A for an appendix. Without NN: all of them.
            Author's loop: edit notebooks/NN_name.md, then
              python notebooks/build.py sync NN      # the notebook follows the text
              python notebooks/build.py export       # the package follows the notebook
              python notebooks/build.py run NN       # outputs follow the code
              python notebooks/build.py budget NN    # what it takes of its reader's time
              python notebooks/build.py check        # everything agrees, or a diff"""
        ),
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument(
        "--root", type=Path, default=here, help="the checkout to work on (default: this one)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps: dict[str, str] = {
        "export": "write minisgl/ from the cells marked `#| export`; "
        "without NN also remove files that no chapter exports",
        "sync": "make NN.ipynb follow NN.md; "
        "ids of cells stay, outputs stay where the code is unchanged",
        "format": "sort the imports and format the code of a chapter with ruff, in both halves",
        "run": "sync, execute from top to bottom, store the outputs; "
        "without a GPU, cells tagged `gpu` are skipped and keep their stored outputs",
        "budget": "print what each chapter takes of its reader's time: words, exported and shown "
        "lines, longest exported cell, the first version, sources, links, minutes to read, hours "
        "to build; fail where that is over its budget",
        "check": "fail with a diff if package, text and notebook disagree, or if a cell is not "
        "run, run out of order, stored with an error or with unclean metadata, or if a budget is "
        "broken",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("chapters", nargs="*", metavar="NN", help="a chapter (default: all)")
        if name == "sync":
            command.add_argument(
                "--from-notebook",
                action="store_true",
                help="the other way round: NN.md follows NN.ipynb",
            )
    for name, text in {
        "lab": "write notebooks/labs/NN.ipynb: the chapter with its functions left to the reader",
        "grade": "run the project's tests of a chapter on the reader's lab; print one sentence",
        "serve": "run `python -m minisgl` with the reader's lab in place of the chapter's modules; "
        "flags behind NN go to it",
    }.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("chapter", metavar="NN", help=f"one of {', '.join(labs.TESTS)}")
        if name == "lab":
            command.add_argument("--force", action="store_true", help="replace a lab that exists")
        elif name == "grade":
            command.add_argument(
                "--round", type=int, help="grade up to this round of the chapter (default: all)"
            )
        else:
            command.add_argument("rest", nargs=argparse.REMAINDER, metavar="FLAGS")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options: Any = arguments().parse_args(argv)
    try:
        if options.command == "export":
            return export(options.root, options.chapters)
        if options.command == "sync":
            return sync(options.root, options.chapters, options.from_notebook)
        if options.command == "format":
            return format_chapters(options.root, options.chapters)
        if options.command == "run":
            return run(options.root, options.chapters)
        if options.command == "budget":
            return print_budget(options.root, options.chapters)
        if options.command == "lab":
            return write_lab(options.root, options.chapter, options.force)
        if options.command == "grade":
            return grade(options.root, options.chapter, options.round)
        if options.command == "serve":
            return serve_lab(options.root, options.chapter, options.rest)
        return check(options.root, options.chapters)
    except (BuildError, labs.LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
