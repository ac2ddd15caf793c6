"""The frozen heap, what a collection passes over; and the heap that loading a model leaves."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from minisgl.engine.heap import frozen_heap, return_free_memory

TRIMS = pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and hasattr(ctypes.CDLL(None), "malloc_trim")),
    reason="needs glibc and /proc",
)


class Circle:
    """An object that only the collector can remove."""

    def __init__(self) -> None:
        self.me = self


class Left(Exception):
    """Raised to leave a loop that would not end."""


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a new process: pytest's has a million objects, and has frozen them."""

    @wraps(test)
    def run() -> None:
        script = f"from tests import test_heap; test_heap.{test.__name__}.__wrapped__()"
        root = Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=root, stderr=subprocess.PIPE, text=True
        )
        assert done.returncode == 0, done.stderr

    return run


@alone
def test_everything_is_frozen_in_the_block_and_thaws_after_it() -> None:
    tracked = len(gc.get_objects())
    with frozen_heap():
        assert gc.get_freeze_count() > 0.5 * tracked
        assert len(gc.get_objects()) < 0.1 * tracked
    assert gc.get_freeze_count() == 0


@alone
def test_an_error_in_the_block_thaws_it_too() -> None:
    with pytest.raises(Left), frozen_heap():
        raise Left
    assert gc.get_freeze_count() == 0


@alone
def test_garbage_goes_before_it_would_stay() -> None:
    circle = weakref.ref(Circle())
    assert circle() is not None
    with frozen_heap():
        assert circle() is None


@alone
def test_what_the_block_leaves_behind_is_collected() -> None:
    with frozen_heap():
        circle = weakref.ref(Circle())
        assert circle() is not None
        gc.collect()
        assert circle() is None


@alone
def test_what_was_dropped_in_the_block_is_collected_behind_it() -> None:
    kept = Circle()
    circle = weakref.ref(kept)
    with frozen_heap():
        del kept
        gc.collect()
        assert circle() is not None
    gc.collect()
    assert circle() is None


@alone
def test_an_inner_block_leaves_the_outer_one_frozen() -> None:
    with frozen_heap():
        circle = weakref.ref(Circle())
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0 and circle() is None


@alone
def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 10_000


@alone
def test_a_few_frozen_objects_of_python_itself_change_nothing() -> None:
    kept = gc.get_objects()
    gc.freeze()
    made: list[Any] = [[] for _ in range(2 * len(kept))]
    with frozen_heap():
        assert gc.get_freeze_count() > len(made)
    assert gc.get_freeze_count() == 0


def resident_bytes() -> int:
    """Memory of this process that takes pages of the machine."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@TRIMS
@alone
def test_freed_memory_goes_back_to_the_system() -> None:
    """A piece above the freed ones keeps them all, until the heap is trimmed."""
    from minisgl.trim import give_heap_back

    pieces = [bytes(1000) for _ in range(64_000)]
    top, before = bytes(1000), resident_bytes()
    del pieces
    kept = before - resident_bytes()
    give_heap_back()
    freed = before - resident_bytes()
    assert kept < 8e6 and freed > 56e6 and len(top) == 1000, (kept, freed)


@TRIMS
@alone
def test_large_blocks_go_back_when_they_are_freed() -> None:
    """Also those between others, and after a block of 30 MB, which raises glibc's limit."""
    return_free_memory()
    del [bytearray(30 << 20)][0]
    blocks, pins = zip(*((b"x" * 2**20, b"y" * 5000) for _ in range(50)), strict=True)
    before = resident_bytes()
    del blocks
    freed = (before - resident_bytes()) / 2**20
    assert freed > 45 and len(pins) == 50, freed


@TRIMS
@alone
def test_small_blocks_go_back_now_and_then() -> None:
    """Also those below others, in a process that is idle."""
    from unittest import mock

    with mock.patch("minisgl.engine.heap.TRIM", 0.01):
        return_free_memory()
        pieces = [bytes(1000) for _ in range(64_000)]
        top, before = bytes(1000), resident_bytes()
        del pieces
        end = time.monotonic() + 30
        while before - resident_bytes() < 56e6 and time.monotonic() < end:
            time.sleep(0.01)
    assert before - resident_bytes() > 56e6 and len(top) == 1000


@alone
def test_loading_ends_with_a_trim() -> None:
    from unittest import mock

    import torch

    from minisgl.config.model import ModelConfig
    from minisgl.config.paths import resolve_model_path
    from minisgl.models import weights
    from minisgl.models.registry import build_model
    from minisgl.parallel.comm import SingleRank

    path = resolve_model_path(None)
    model = build_model(ModelConfig.from_path(path), SingleRank(), dtype=torch.float32)
    with mock.patch.object(weights, "give_heap_back") as trim:
        weights.load_weights(model, path, SingleRank(), device="cpu", dtype=torch.float32)
    trim.assert_called_once_with()
