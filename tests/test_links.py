"""Links inside the project: the file is there, and so is the heading that an anchor names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
TEXTS = [
    ROOT / "README.md", ROOT / "book" / "intro.md", *sorted((ROOT / "notebooks").glob("*.md"))
]  # fmt: skip


def prose_of(text: str) -> str:
    """Return a text without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for target, anchor in LINK.findall(prose_of(path.read_text("utf-8"))):
        there = path.parent / target if target else path
        page = there.with_suffix(".md") if there.suffix in (".ipynb", "") else there
        if not (there.exists() or page.exists()):
            wrong.append(target)
        elif anchor and page.suffix == ".md" and anchor not in anchors(page):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []
