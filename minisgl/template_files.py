"""The chat templates in a model's folder.

Generated from notebooks/06b_tokenizer.ipynb: edit there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no such file."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a model by name. Separate files replace those in the config."""
    found = {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file
    if found:
        return {name: file.read_text("utf-8") for name, file in found.items()}
    given = read_json(folder / "tokenizer_config.json").get("chat_template") or []
    if isinstance(given, str):
        return {"default": given}
    return {entry["name"]: entry["template"] for entry in given}
