"""Return of freed memory to the operating system.

Generated from notebooks/05b_weights.ipynb: edit there.
"""

from __future__ import annotations

import ctypes


def give_heap_back() -> None:
    """Return freed memory to the system, where the C library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)
