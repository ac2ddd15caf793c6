"""Where a model's files are: embedded, in a folder, or on the hub.

Generated from notebooks/01b_configuration.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from minisgl.config.rules import refuse


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Read one JSON object, empty if absent and not `required`; a ValueError names the file."""
    try:
        found = json.loads(path.read_text("utf-8") if required or path.is_file() else "{}")
    except FileNotFoundError:
        raise ValueError(f"{path.name}: no such file in {path.parent}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path.name}: not valid JSON, {error.msg} at {where}") from error
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deep
        raise ValueError(f"{path.name}: cannot be read from {path.parent}: {error}") from error
    if not isinstance(found, dict):
        raise refuse(path.name, "a JSON object", found)
    return found


def resolve_model_path(model: str | Path | None) -> Path:
    """Return the folder of a model: None is the embedded one; else a folder, alias or hub id."""
    if model is None:
        return Path(str(files("minisgl"))) / "tiny" / "model"
    if not isinstance(model, str | Path) or not str(model):
        raise refuse("model_path", "a folder, a .gguf file, a hub id or None", model)
    folder = Path(os.path.expanduser(model))  # an unknown ~name stays
    if folder.is_dir():
        return folder
    if str(model) == "smollm2" or folder.suffix == ".gguf":  # of chapter 06e
        return Path(importlib.import_module("minisgl.models.gguf.folder").unpack(folder))
    if folder.exists():
        raise refuse("model_path", "a folder with a config.json or a .gguf file", str(model))
    if isinstance(model, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise ValueError(f"model_path: no such folder, and not a hub id either, got {str(model)!r}")
    return download(model)


def download(model: str) -> Path:
    """Return a hub model's folder, downloaded on first use; raise ValueError if that fails."""
    from huggingface_hub import snapshot_download  # slow to import, and most users need no hub

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    other = ["*/*.json", "*/*.safetensors", "consolidated*", "adapter*"]  # not read
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=other))
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
        problem = f"model_path: no such folder, and the hub does not deliver it ({reason})"
        raise ValueError(f"{problem}, got {model!r}") from error
