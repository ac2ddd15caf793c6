"""Bugs on purpose: the files beside this one list mutations that a test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One bug: in `module` the text `old`, there exactly once, becomes `new`; `test` must fail."""

    name: str
    module: str  # "minisgl.kvcache.radix_cache"
    old: str
    new: str
    test: str  # "tests/test_radix_cache.py::test_unlock"
