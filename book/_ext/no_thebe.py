"""Leave out thebe: its script is put on each page twice, which is an error, and is not used."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def drop_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Keep the scripts of a page that do not belong to thebe."""
    parts = {file: f"{file}{getattr(file, 'attributes', '')}" for file in context["script_files"]}
    context["script_files"] = [file for file, text in parts.items() if "thebe" not in text]


def setup(app: Sphinx) -> dict[str, Any]:
    """After all extensions have added their scripts."""
    app.connect("html-page-context", drop_scripts, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
