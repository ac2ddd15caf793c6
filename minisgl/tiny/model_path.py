"""Where the embedded model lives.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from pathlib import Path

import minisgl


def model_path() -> Path:
    """The folder with the shipped config, weights and tokenizer."""
    return Path(str(minisgl.__file__)).parent / "tiny" / "model"
