"""A small serving engine for language models, written as a book of notebooks.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM


__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]
PLACES = {"LLM": "minisgl.llm", "SamplingParams": "minisgl.core"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import minisgl` costs no torch."""
    if name not in PLACES:
        raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
