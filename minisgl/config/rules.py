"""Frozen configurations of model and engine; every wrong value is refused by name.

Generated from notebooks/01_requests.ipynb: edit there.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

MAX_SEED = 2**63 - 1
Rule = Callable[[str, Any], Any]  # field name and value to the value's final form, or ValueError


def refuse(name: str, must: str, got: object) -> ValueError:
    """The one form of all complaints: which field, what it must be, what it was."""
    try:
        shown = repr(got)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        shown = "a number too long to print"
    return ValueError(f"{name}: must be {must}, got {shown}")


def integer(low: int, high: int | None = None) -> Rule:
    """Rule for an integer in [low, high]; it comes out as a plain `int`, and a bool is refused."""
    known = {0: "a non-negative integer", 1: "a positive integer"}
    must = known.get(low, f"an integer of at least {low}") + (f" up to {high}" if high else "")

    def rule(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise refuse(name, must, value)
        found = int(value)
        if found < low or (high is not None and found > high):
            raise refuse(name, must, value)
        return found

    return rule


def number(low: float, high: float = math.inf, *, above: bool = False) -> Rule:
    """Rule for a finite number in [low, high]; `above` excludes `low` itself; bools are refused."""
    must = f"a finite number {'above' if above else 'of at least'} {low:g}"
    must += "" if high == math.inf else f" and at most {high:g}"

    def rule(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refuse(name, must, value)
        try:
            found = float(value)
        except OverflowError:  # an integer beyond all floats
            raise refuse(name, must, value) from None
        if not math.isfinite(found) or not low <= found <= high or (above and found == low):
            raise refuse(name, must, value)
        return found

    return rule


def flag(name: str, value: Any) -> bool:
    """Rule for True or False, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise refuse(name, "True or False", value)
    return value


def text(name: str, value: Any) -> str:
    """Rule for a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(name, "a non-empty string", value)
    return value


def word(*choices: str) -> Rule:
    """Rule for one of a few words."""

    def rule(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise refuse(name, f"one of {', '.join(choices)}", value)
        return value

    return rule


def optional(inner: Rule) -> Rule:
    """Rule for None, or what the inner rule takes."""
    return lambda name, value: None if value is None else inner(name, value)


def several(inner: Rule, what: str) -> Rule:
    """Rule for a list or tuple of what the inner rule takes; it comes out as a tuple."""

    def rule(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise refuse(name, f"a list of {what}", value)
        return tuple(inner(name, item) for item in value)

    return rule


def apply_rules(config: object, rules: Mapping[str, Rule], shown: Mapping[str, str]) -> None:
    """Put every field into its final form; `shown` gives other names for the complaint."""
    for name, rule in rules.items():
        value = rule(shown.get(name, name), getattr(config, name))
        object.__setattr__(config, name, value)  # the only write that a frozen config ever sees
