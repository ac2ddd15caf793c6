"""The site's extensions: figures, folds, glossary, scripts, and what a stranger reads first."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sphinx", reason="the site needs pip install -e '.[book]'")
from docutils import nodes
from docutils.utils import new_document
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]


def extension(name: str) -> Any:
    """A module of `book/_ext`, by its path: their names are everyday words."""
    spec = importlib.util.spec_from_file_location(f"ext_{name}", ROOT / f"book/_ext/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(*children: nodes.Node) -> nodes.document:
    """A document of one section."""
    document = new_document("page")
    document += nodes.section("", *children)
    return document


def app(tmp_path: Path, docname: str) -> Any:
    return SimpleNamespace(srcdir=str(tmp_path), env=SimpleNamespace(docname=docname))


@pytest.mark.parametrize(("dpi", "width"), [(200, "120px"), (100, "240px")])
def test_a_picture_becomes_a_figure_of_the_size_it_was_drawn_for(
    tmp_path: Path, dpi: int, width: str
) -> None:
    about = PngInfo()
    about.add_text("Description", "Two pages, one of them free.")
    Image.new("RGB", (240, 60)).save(tmp_path / "a.png", pnginfo=about, dpi=(dpi, dpi))
    other = nodes.image(uri="b.svg", alt="a drawing of the text")
    document = page(nodes.image(uri="/a.png"), nodes.image(uri="/a.png"), other)
    extension("figures").add_figures(app(tmp_path, "notebooks/03_radix_cache"), document)
    first, second = document.findall(nodes.figure)
    captions = [caption.astext() for caption in document.findall(nodes.caption)]
    assert captions[0] == "Figure 03.1 Two pages, one of them free."
    assert captions[1].startswith("Figure 03.2") and second["ids"] == ["figure-03-2"]
    assert [image["width"] for image in first.findall(nodes.image)] == [width]
    assert [image["alt"] for image in first.findall(nodes.image)] == ["Figure 03.1"]
    assert other.get("width") is None


@pytest.mark.parametrize(
    ("tags", "source", "draws", "title"),
    [
        ({"solution", "hide-cell"}, "def f(): ...", True, "Solution"),
        ({"spoiler", "hide-input"}, "bug = 1", False, "Spoiler: the line that was changed"),
        ({"hide-input"}, "show(fig)", True, "Code of the figure"),
        ({"hide-input"}, "def f(): ...\nclass G: ...", False, "Code of f, G"),
        ({"hide-input"}, "def a(): ...\ndef b(): ...\ndef c(): ...\ndef d(): ...", False,
         "Code of a, b, c and 1 more"),
        ({"hide-input"}, "!pip list", False, "Code of this cell"),
    ],
)  # fmt: skip
def test_folds_are_named_by_what_is_in_them(
    tags: set[str], source: str, draws: bool, title: str
) -> None:
    assert extension("folds").title_of(tags, source, draws) == title


def test_glossary_entries_keep_their_anchors() -> None:
    entry = nodes.section("", nodes.title("", "Page table"), nodes.paragraph("", "A row each."))
    entry["ids"] = ["page-table"]
    document = page(nodes.title("", "Glossary"), nodes.paragraph("", "Words."), entry)
    extension("glossary").make_list(
        SimpleNamespace(env=SimpleNamespace(docname="x/03_a")), document
    )
    assert not list(document.findall(nodes.definition_list))
    made = SimpleNamespace(env=SimpleNamespace(docname="notebooks/C_glossary"))
    extension("glossary").make_list(made, document)
    (term,) = document.findall(nodes.term)
    assert term["ids"] == ["page-table"] and term.astext() == "Page table"
    assert [d.astext() for d in document.findall(nodes.definition)] == ["A row each."]


@pytest.mark.parametrize("formulas", [False, True])
def test_pages_load_only_the_scripts_that_they_use(tmp_path: Path, formulas: bool) -> None:
    scripts = extension("scripts")
    files = ["_static/sphinx-thebe.js", "_static/tex-svg.js", "_static/doctools.js"]
    context: dict[str, Any] = {"script_files": files}
    document = page(nodes.math("", "x")) if formulas else page(nodes.paragraph("", "x"))
    scripts.drop_scripts(None, "a", "page.html", context, document)
    assert context["script_files"] == files[1 if formulas else 2 :]
    icons = '<script src="_static/vendor/fontawesome/6/js/all.min.js?digest=1"></script>'
    font = '<link rel="preload" as="font" type="font/woff2" crossorigin href="x.woff2" />'
    (tmp_path / "a.html").write_text(f"<head>{icons}{font}<script src='a.js'></script></head>")
    scripts.drop_icons(SimpleNamespace(outdir=str(tmp_path)), None)
    assert (tmp_path / "a.html").read_text() == "<head><script src='a.js'></script></head>"


def test_a_page_describes_itself() -> None:
    about = extension("about")
    site = SimpleNamespace(config=SimpleNamespace(root_doc="intro", html_baseurl=""))
    context: dict[str, Any] = {"title": "03 · The <em>radix</em> cache"}
    quote = nodes.block_quote("", nodes.paragraph("", 'Reuse\nwhat "another" computed.'))
    about.describe_page(site, "notebooks/03_radix_cache", "page.html", context, page(quote))
    tags = context["metatags"]
    assert 'name="description" content="Reuse what &quot;another&quot; computed."' in tags
    assert 'content="03 · The radix cache"' in tags and 'content="../_static/card.png"' in tags
    about.describe_page(site, "intro", "page.html", context, None)
    assert context["title"] != "minisgl" and (ROOT / "book/_static/card.png").is_file()


def test_the_first_page_plays_the_run_of_chapter_09d() -> None:
    run = extension("about").recorded_run(ROOT / "notebooks/09d_viewer.ipynb")
    assert run.startswith("<!doctype html>") and "#loop" in run
    assert "_static/run.html#loop" in (ROOT / "book/intro.md").read_text("utf-8")
    with pytest.raises(ValueError, match="shows no recording"):
        extension("about").recorded_run(ROOT / "notebooks/C_glossary.ipynb")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("git@example.org:a/b.git", "https://example.org/a/b"),
        ("https://example.org/a/b.git", "https://example.org/a/b"),
        ("/somewhere/local", None),
        ("", None),
    ],
)
def test_the_repository_is_linked_where_it_is_public(
    monkeypatch: pytest.MonkeyPatch, given: str, found: str | None
) -> None:
    monkeypatch.setenv("MINISGL_REPOSITORY", given)
    assert extension("about").repository(ROOT) == found


def test_the_citation_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    intro = (ROOT / "book/intro.md").read_text("utf-8")
    assert f"Version {project['version']}, {project['license']}" in intro
