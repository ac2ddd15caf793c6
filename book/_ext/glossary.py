"""Show the glossary as a list of terms. In JupyterLab its entries are headings, to be linked to."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def as_item(section: nodes.section) -> nodes.definition_list_item:
    """Return a section as a term, which keeps the section's anchors, and its definition."""
    title, *rest = section.children
    term = nodes.term("", "", *(child.deepcopy() for child in title.children))
    term["ids"] = section["ids"]
    return nodes.definition_list_item(
        "", term, nodes.definition("", *(child.deepcopy() for child in rest))
    )


def make_list(app: Sphinx, doctree: nodes.document) -> None:
    """Turn the sections of the glossary's page into one definition list."""
    if not app.env.docname.endswith("C_glossary"):
        return
    page = next(iter(doctree.findall(nodes.section)))
    entries = [child for child in page.children if isinstance(child, nodes.section)]
    page.children = [child for child in page.children if child not in entries]
    page += nodes.definition_list("", *map(as_item, entries), classes=["terms"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Before the collector of headings (500): the terms are no table of contents."""
    app.connect("doctree-read", make_list, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
