"""Observers whose failures do no harm.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def guarded(observe: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to return None where it raises, and log its first exception."""
    name = getattr(observe, "__qualname__", type(observe).__name__)
    failures = 0

    def call(*args: Any) -> Any:
        nonlocal failures
        try:
            return observe(*args)
        except Exception as error:
            failures += 1
            if failures == 1:
                logging.getLogger(__name__).error(f"{name} failed, reported once: {error!r}")

    return call
