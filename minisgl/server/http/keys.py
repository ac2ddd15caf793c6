"""API keys from a file or a flag; this module imports no web framework.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.config.rules import file_of


def check_key(key: str, where: str) -> str:
    """Return a key that a header can carry; the `ValueError` does not show it."""
    read = key.encode().decode("latin-1")  # a header loses spaces at its end
    if not key.isprintable() or any(c.isspace() for c in key) or not read or read != read.strip():
        raise ValueError(f"{where}: must be one word of printable characters, no space, not empty")
    return key


def read_keys(path: Path) -> dict[str, str]:
    """Read a file of keys, `NAME KEY` a line; lines that begin with # are comments."""
    found: dict[str, str] = {}
    with file_of("api_key_file", path):
        lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        words, where = line.split(), f"api_key_file: line {number}"
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not re.fullmatch(r"[\w.@-]{1,64}", words[0]):
            raise ValueError(f"{where}: must be a name of letters, digits and _.@-, and a key")
        name, key = words[0], check_key(words[1], where)
        if name in found or key in found.values():
            raise ValueError(f"{where}: must have a name and a key of its own")
        found[name] = key
    if not found:
        raise ValueError(f"api_key_file: must hold a key, got none in {str(path)!r}")
    return found
