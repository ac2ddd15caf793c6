"""Chapters run under the settings of all tests."""

from tests.conftest import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_xdist_setupnodes,
)

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_xdist_setupnodes",
]
