"""Compiled forms of tests, written once for all processes that import them.

pytest rewrites the assertions of a test file in each process that finds no compiled form; three
workers that begin together find none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_tests(config: pytest.Config, folder: Path) -> None:
    """Leave a compiled form of each test file beside it, as pytest itself would."""
    names = ("_read_pyc", "_rewrite_test", "_write_pyc", "assertstate_key", "get_cache_dir")
    if not all(hasattr(rewrite, name) for name in names):  # another version of pytest
        return
    state = config.stash[rewrite.assertstate_key]
    for path in [*folder.glob("test_*.py"), *folder.glob("conftest.py")]:
        cache = rewrite.get_cache_dir(path)
        compiled = cache / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(cache):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, compiled)


def allow_compiled() -> None:
    """Some two hundred processes import the package: write it compiled, whoever asked for none."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
