"""Fixtures of a test module: a small model with random weights, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Live, random_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[Live]:
    with Live(checkpoint) as running:
        yield running
