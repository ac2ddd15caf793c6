"""Leave out scripts that a page does not use: a first visit loads a third of what it would.

thebe is put on each page twice, which is an error, and is not used. MathJax has 2 MB, and few pages
have formulas. The icons are there as a font; the theme loads them a second time as a script.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

ICONS = re.compile(r'\s*<script src="[^"]*fontawesome[^"]*\.js[^"]*"></script>')
PRELOADS = re.compile(r'\s*<link rel="preload" as="font"[^>]*crossorigin[^>]*/>')


def drop_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Keep the scripts of a page that it uses."""
    formulas = doctree is not None and any(
        isinstance(node, nodes.math | nodes.math_block) for node in doctree.findall(nodes.Element)
    )
    unused = ("thebe",) if formulas else ("thebe", "tex-svg.js")
    parts = {file: f"{file}{getattr(file, 'attributes', '')}" for file in context["script_files"]}
    context["script_files"] = [
        file for file, text in parts.items() if not any(name in text for name in unused)
    ]


def drop_icons(app: Sphinx, error: Exception | None) -> None:
    """Remove the script of the icons, which the theme's own template writes."""
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        short = PRELOADS.sub("", ICONS.sub("", text))
        if short != text:
            path.write_text(short, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """After all extensions have added their scripts."""
    app.connect("html-page-context", drop_scripts, priority=900)
    app.connect("build-finished", drop_icons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
