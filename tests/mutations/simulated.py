"""Bugs in the executor of simulations: it would not notice those of others."""

from __future__ import annotations

from tests.mutations import Mutation

SIMULATED, TESTS = "minisgl.scheduler.simulated", "tests/test_adversary.py::"

MUTATIONS = [
    Mutation(
        "simulated: reads are not compared",
        SIMULATED,
        "(wrong := np.flatnonzero(self.kv[slots] != sums)).size",
        "(wrong := np.flatnonzero(self.kv[slots] != sums)).size > 99",
        TESTS + "test_a_slot_of_another_prefix_is_noticed",
    ),
    Mutation(
        "simulated: the first salt counts for all",
        SIMULATED,
        "[found[row] for row in rows.tolist()]",
        "[found[rows[0]] for row in rows.tolist()]",
        TESTS + "test_a_prefix_under_another_salt_is_another_prefix",
    ),
    Mutation(
        "simulated: a token depends on the batch",
        SIMULATED,
        "        before = np.concatenate([[np.uint64(0)], sums[ends[:-1] - 1]])",
        "        before = np.zeros(len(ends), np.uint64)",
        TESTS + "test_answers_do_not_depend_on_the_batch",
    ),
]
