"""Every second mutation, for a second process: see test_mutations.py."""

from __future__ import annotations

import pytest

from tests.mutations import Mutation
from tests.test_mutations import ALL, Runner, check_caught, runner

__all__ = ["runner"]  # the fixture


@pytest.mark.parametrize("mutation", ALL[1::2], ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, runner: Runner) -> None:
    check_caught(mutation, runner)
