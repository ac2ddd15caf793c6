"""Make figures of the pictures that cells draw: size, number and caption.

`minisgl.notebook.show` stores a sentence in each PNG, for those who cannot see it. Here it is the
caption, so that everybody can read it; the picture is named by the figure's number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

SHOWN_DPI = 100  # at which a figure has the size that it was drawn for


def picture_of(app: Sphinx, node: nodes.image) -> Path | None:
    """Return the PNG behind a picture, if it is one."""
    uris = [*node.get("candidates", {}).values(), node["uri"]]
    paths = (Path(app.srcdir, str(uri).lstrip("/")) for uri in uris)
    return next((path for path in paths if path.suffix == ".png" and path.is_file()), None)


def as_figure(node: nodes.image, number: str, sentence: str) -> nodes.figure:
    """Return a figure around a copy of a picture, with its number and a sentence below it."""
    picture = node.deepcopy()
    picture["alt"] = number
    caption = nodes.caption("", "", nodes.strong("", f"{number} "), nodes.Text(sentence))
    place = number.lower().replace(" ", "-").replace(".", "-")
    return nodes.figure("", picture, caption, ids=[place])


def add_figures(app: Sphinx, doctree: nodes.document) -> None:
    """Number the pictures of a page that have a sentence, and show it."""
    chapter, count = Path(app.env.docname).name.partition("_")[0], 0
    for node in list(doctree.findall(nodes.image)):
        path = None if node.get("alt") else picture_of(app, node)
        if path is None:
            continue
        with Image.open(path) as picture:
            sentence = str(picture.info.get("Description", ""))
            dots = picture.info.get("dpi", (SHOWN_DPI, SHOWN_DPI))[0]
            node["width"] = f"{round(picture.width * SHOWN_DPI / dots)}px"
        if sentence:
            count += 1
            node.replace_self(as_figure(node, f"Figure {chapter}.{count}", sentence))


def load_late(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Load a figure when the reader comes near it."""
    if "body" in context:
        context["body"] = context["body"].replace(
            '<img alt="Figure', '<img loading="lazy" alt="Figure'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """After the collector of images (500), which settles their paths."""
    app.connect("doctree-read", add_figures, priority=600)
    app.connect("html-page-context", load_late)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
