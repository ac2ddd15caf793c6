"""Garbage collections that do not stop the loop for long; freed memory that goes back.

Generated from notebooks/07b_recorded_steps.ipynb: edit there.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from minisgl.trim import give_heap_back


@contextmanager
def frozen_heap() -> Iterator[None]:
    """In the block, garbage collections skip all objects that existed at its start.

    For processes that serve or measure: a full collection stops every thread while it scans each
    object. Garbage is removed first, because it would stay. The end of the block unfreezes
    everything, unless most of it was frozen already, by an outer block or by the owner of the
    process.
    """
    gc.collect()
    # Many: Python 3.12 itself freezes some hundred objects when it starts.
    already = gc.get_freeze_count() > len(gc.get_objects())
    gc.freeze()
    try:
        yield
    finally:
        if not already:
            gc.unfreeze()


BLOCK = 2**18  # bytes; larger blocks go back to the system when they are freed
GLIBC = {-8: 2, -3: BLOCK, -1: BLOCK}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
TRIM = 5.0  # seconds between two trims


def return_free_memory() -> None:
    """Make the C library return freed memory to the system, where it can: for text, not tensors.

    Large blocks go back at once. A thread returns the others every `TRIM` seconds.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # of glibc
        for option, value in GLIBC.items():
            mallopt(option, value)

    def trim() -> None:
        while True:
            time.sleep(TRIM)
            give_heap_back()

    Thread(target=trim, name="trim", daemon=True).start()
