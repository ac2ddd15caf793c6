"""Bugs in the simulator."""

from __future__ import annotations

from tests.mutations import Mutation

SIMULATE, TESTS = "minisgl.benchmark.simulate", "tests/test_simulate.py::"

MUTATIONS = [
    Mutation(
        "simulate: the device does two steps at once",
        SIMULATE,
        "self.free_at = max(self.now, self.free_at) + seconds",
        "self.free_at = self.now + seconds",
        TESTS + "test_the_device_works_in_order_and_waiting_moves_the_clock",
    ),
    Mutation(
        "simulate: the clock goes back",
        SIMULATE,
        "self.device.now = max(self.device.now, self.at)",
        "self.device.now = self.at",
        TESTS + "test_the_device_works_in_order_and_waiting_moves_the_clock",
    ),
    Mutation(
        "simulate: more clients than asked for",
        SIMULATE,
        "self.running < self.clients",
        "self.running <= self.clients",
        TESTS + "test_clients_wait_for_their_answers",
    ),
    Mutation(
        "simulate: one replica too many",
        SIMULATE,
        "while high - low > 1:",
        "while high - low > 2:",
        TESTS + "test_the_fewest_replicas_are_found",
    ),
]
