"""Garbage collections that do not stop the loop for long.

Generated from notebooks/07b_recorded_steps.ipynb: edit there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """In the block, garbage collections pass over all objects that exist when it begins.

    For processes that serve or measure: a full collection holds up every thread for as long as it
    takes to look at each object. Garbage is removed first, for it would stay. The end of the block
    thaws everything, unless most of it was frozen already: by a block around it, or by the owner of
    the process.
    """
    gc.collect()
    # More than a few: Python 3.12 itself freezes some hundred objects when it starts.
    already = gc.get_freeze_count() > len(gc.get_objects())
    gc.freeze()
    try:
        yield
    finally:
        if not already:
            gc.unfreeze()
