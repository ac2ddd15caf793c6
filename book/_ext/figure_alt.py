"""Give each figure its alternative text: `minisgl.notebook.show` stores it in the PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx


def add_alternative_text(app: Sphinx, doctree: nodes.document) -> None:
    """Read the sentence behind every picture that has none on the page."""
    for node in doctree.findall(nodes.image):
        uris = [str(uri) for uri in [*node.get("candidates", {}).values(), node["uri"]]]
        for uri in uris if not node.get("alt") else []:
            path = Path(app.srcdir, uri.lstrip("/"))
            if path.suffix == ".png" and path.is_file():
                with Image.open(path) as picture:
                    node["alt"] = str(picture.info.get("Description", ""))
                break


def setup(app: Sphinx) -> dict[str, Any]:
    """After the collector of images (500), which settles their paths."""
    app.connect("doctree-read", add_alternative_text, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
