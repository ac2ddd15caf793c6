"""Whatever watches can fail without harm.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def guarded(observe: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, until it fails: that is one line in the log, and then it is None."""
    live = [observe]

    def call(*args: Any) -> Any:
        try:
            return live[0](*args) if live else None
        except Exception as error:
            live.clear()
            name = getattr(observe, "__qualname__", type(observe).__name__)
            logging.getLogger(__name__).error(f"{name} failed and observes no more: {error!r}")

    return call
