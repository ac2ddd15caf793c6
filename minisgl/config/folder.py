"""Checks of a model's folder, whose author may be unknown.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minisgl.config.paths import read_json
from minisgl.config.rules import refuse

WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".onnx"}
MERGED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MAX_TEMPLATE = 2**20  # characters


def leads_out(file: Path, home: Path) -> bool:
    """Return True for a link to a file that no download put there.

    The hub's cache links to its `blobs`. A hidden folder, as `.git`, may hold a token.
    """
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):  # broken, or a loop
        return False
    inside = real.is_relative_to(home) and "/." not in f"/{real.relative_to(home)}"
    return file.is_symlink() and not inside and "blobs" not in real.parts


def texts_in(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON value, each with the name of its field, but no tokens."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from texts_in(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part, name)
    elif isinstance(value, str) and not name.endswith(("_token", "_tokens", "content", "_side")):
        yield name, value


def check_folder(folder: Path) -> None:
    """Raise ValueError if a tokenizer read from here could show other files, or is too large."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix not in WEIGHTS and leads_out(file, folder.resolve()):
            raise ValueError(f"model_path: {file} must be no link out of its folder: copy the file")
        if file.suffix == ".jinja" and file.is_file() and (n := file.stat().st_size) > MAX_TEMPLATE:
            raise refuse(file.name, f"at most {MAX_TEMPLATE} bytes", n)
    for source in MERGED:
        config = read_json(folder / source, required=False)
        for name, value in texts_in(config):
            if os.path.exists(value) and not os.path.isdir(value):
                raise refuse(f"{source}: {name}", "no file of this machine", value)
        if config.get("init_inputs"):
            raise refuse(f"{source}: init_inputs", "empty", config["init_inputs"])
        if (n := len(str(config.get("chat_template")))) > MAX_TEMPLATE:
            raise refuse(f"{source}: chat_template", f"at most {MAX_TEMPLATE} characters", n)
