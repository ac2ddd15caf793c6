"""The frozen heap: what a collection passes over, in a block and behind it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from minisgl.engine.heap import frozen_heap


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
