"""Large products of parameters: each day tries a part of them, and `--rotate all` the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turns(days: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, of which each day has every `days`-th.

    There must be at least `days` of them: then each day has one. `days` divides 32.
    """
    found = [value if isinstance(value, tuple) else (value,) for value in values]
    assert len(found) >= days and 32 % days == 0, f"{len(found)} values in turns of {days} days"
    return [
        pytest.param(*value, marks=pytest.mark.turn(index % days, days))
        for index, value in enumerate(found)
    ]
