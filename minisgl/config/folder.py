"""What a model's folder must not hold, since its author may be unknown.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import os
from pathlib import Path

from minisgl.config.paths import read_json
from minisgl.config.rules import refuse

WEIGHTS = {".safetensors", ".gguf"}
MAX_TEMPLATE = 2**20  # characters


def check_folder(folder: Path) -> None:
    """Raise ValueError if a tokenizer read from here could show other files, or is too large."""
    home = folder.resolve()
    homes = home, home.parent.parent / "blobs"  # the hub's cache links to the second
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        real = file.resolve()
        if file.suffix not in WEIGHTS and not any(map(real.is_relative_to, homes)):
            raise ValueError(f"model_path: {file} must be no link out of its folder: copy {real}")
        if file.suffix == ".jinja" and (size := real.stat().st_size) > MAX_TEMPLATE:
            raise refuse(file.name, f"at most {MAX_TEMPLATE} bytes", size)
    config = read_json(folder / "tokenizer_config.json", required=False)
    for name, value in config.items():
        if name.endswith("_token") or not isinstance(value, str) or os.path.isdir(value):
            continue
        if os.path.exists(value):
            raise refuse(f"tokenizer_config.json: {name}", "no file of this machine", value)
    if (size := len(str(config.get("chat_template")))) > MAX_TEMPLATE:
        raise refuse("tokenizer_config.json: chat_template", f"at most {MAX_TEMPLATE} long", size)
