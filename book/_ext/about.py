"""Facts about the site for its pages: repository, version, licence, a description, a card.

And the run that plays on its first page: the recording of chapter 09d, as the chapter stores it.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

FRONT = "A small LLM serving engine that you can read in a weekend, and the book that builds it."
FRONT_TITLE = "An LLM serving engine to read"


def repository(root: Path) -> str | None:
    """Return the public address of the repository, given or that of `origin`; None if unknown."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found = re.sub(r"^git@([^:]+):", r"https://\1/", os.environ.get("MINISGL_REPOSITORY", found))
    return found.removesuffix(".git") if found.startswith("https://") else None


def describe_site(app: Sphinx, config: Config) -> None:
    """Put version, licence and repository where the theme shows them on each page."""
    root = Path(app.srcdir).parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    config.version = config.release = project["version"]
    options, address = config.html_theme_options, repository(root)
    options["extra_footer"] = f"minisgl {project['version']}, {project['license']}"
    if address is not None:
        options |= {"repository_url": address, "use_repository_button": True}
        options["path_to_docs"] = "book"


def promise(doctree: nodes.document | None) -> str:
    """Return the first quoted sentence of a page, which says what its chapter is for."""
    quote = None if doctree is None else next(iter(doctree.findall(nodes.block_quote)), None)
    return FRONT if quote is None else " ".join(quote.astext().split())


def describe_page(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Describe a page to search engines, and to those who show a card for a link."""
    front = page == app.config.root_doc
    if front:
        context["title"] = FRONT_TITLE
    text = FRONT if front else promise(doctree)
    base = app.config.html_baseurl.rstrip("/")
    up = base or "/".join([".."] * page.count("/")) or "."
    tags = {
        "og:title": re.sub("<[^>]*>", "", str(context.get("title", ""))), "og:description": text,
        "og:type": "article", "og:image": f"{up}/_static/card.png", "og:site_name": "minisgl",
        "twitter:card": "summary_large_image",
    }  # fmt: skip
    lines = [f'<meta name="description" content="{html.escape(text)}" />']
    lines += [f'<meta property="{name}" content="{html.escape(value)}" />'
              for name, value in tags.items()]  # fmt: skip
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def recorded_run(notebook: Path) -> str:
    """Return the page of the first recording that a chapter shows."""
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            shown = "".join(output.get("data", {}).get("text/html", []))
            if found := re.search(r'<iframe[^>]* srcdoc="([^"]*)"', shown):
                return html.unescape(found[1])
    raise ValueError(f"{notebook}: shows no recording")


def write_run(app: Sphinx, error: Exception | None) -> None:
    """Write the page of the run beside the site's own files."""
    if error is None and app.builder.format == "html":
        page = recorded_run(Path(app.srcdir, "notebooks", "09d_viewer.ipynb"))
        Path(app.outdir, "_static", "run.html").write_text(page, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Before the theme reads its options."""
    app.connect("config-inited", describe_site, priority=100)
    app.connect("html-page-context", describe_page)
    app.connect("build-finished", write_run)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
