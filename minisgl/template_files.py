"""The chat templates in a model's folder.

Generated from notebooks/06b_tokenizer.ipynb: edit there.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl.config.paths import read_json
from minisgl.config.rules import file_of


class NamedTemplate(msgspec.Struct):
    """One template of a list."""

    template: str
    name: str = ""


def read_text(file: Path) -> str:
    """Read a template's file; a ValueError names it."""
    with file_of("chat_template", file):
        return file.read_text("utf-8")


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a model by name. Separate files replace those in the config."""
    found = {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file
    if found:
        return {name: read_text(file) for name, file in found.items()}
    given = read_json(folder / "tokenizer_config.json", required=False).get("chat_template") or []
    if isinstance(given, str):
        return {"default": given}
    try:
        return {entry.name: entry.template for entry in msgspec.convert(given, list[NamedTemplate])}
    except msgspec.ValidationError as error:
        raise ValueError(f"tokenizer_config.json: chat_template: {error}") from None
