"""The words and patterns of the embedded model's data, from the file beside this module.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import training

FILE = Path(training.__path__[0]) / "tables.toml"
TABLES: dict[str, Any] = tomllib.loads(FILE.read_text())
