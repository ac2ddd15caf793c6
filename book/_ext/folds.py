"""Name the folded cells by what is in them."""

from __future__ import annotations

import ast
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

SILENT = ' aria-label="Toggle hidden content"'  # it hides the title from those who listen


def names_in(source: str) -> list[str]:
    """Return the functions and classes that a cell defines."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [stmt.name for stmt in body if isinstance(stmt, kinds)]


def title_of(tags: set[str], source: str, draws: bool) -> str:
    """Return a title for a folded cell: a noun phrase that invites."""
    if "solution" in tags:
        return "Solution"
    if "spoiler" in tags:
        return "Spoiler: the line that was changed"
    if draws:
        return "Code of the figure"
    names = names_in(source)
    if not names:
        return "Code of this cell"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Code of {', '.join(names[:3])}{more}"


def name_folds(app: Sphinx, doctree: nodes.document) -> None:
    """Set the title of each folded cell of a page."""
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code" or not cell.get("hide_mode"):
            continue
        tags = {name.removeprefix("tag_") for name in cell["classes"]}
        source = next((block.astext() for block in cell.findall(nodes.literal_block)), "")
        title = title_of(tags, source, any(True for _ in cell.findall(nodes.image)))
        cell["prompt_show"], cell["prompt_hide"] = title, title


def let_titles_speak(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Remove the label that stands in for every title."""
    if "body" in context:
        context["body"] = context["body"].replace(SILENT, "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Before the folds are made, which is when a page is written."""
    app.connect("doctree-read", name_folds)
    app.connect("html-page-context", let_titles_speak)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
