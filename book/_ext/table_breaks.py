"""Let long names in tables break where a reader would: after `_`, `/`, `.`, before a capital."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
NAME = re.compile(r'(?<=<span class="pre">)[^<]+')
BREAK = re.compile(r"(?<=[_/.])(?=\w)|(?<=[a-z])(?=[A-Z])")


def add_breaks(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Write `<wbr>` into the names of the page's tables."""

    def in_table(table: re.Match[str]) -> str:
        return NAME.sub(lambda name: BREAK.sub("<wbr>", name[0]), table[0])

    if "body" in context:
        context["body"] = TABLE.sub(in_table, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """After the page's body has been written."""
    app.connect("html-page-context", add_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
