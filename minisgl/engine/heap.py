"""Garbage collections that do not stop the loop for long.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """In the block, garbage collections pass over all objects that exist when it begins.

    For processes that serve or measure: a full collection holds up every thread for as long as it
    takes to look at each object. Garbage is removed first, for it would stay. The outermost block
    thaws everything, unless something was frozen before it.
    """
    mine = gc.get_freeze_count() == 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
