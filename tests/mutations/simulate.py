"""Bugs in the simulator."""

from __future__ import annotations

from tests.mutations import Mutation

SIMULATE, TESTS = "minisgl.benchmark.simulate", "tests/test_simulate.py::"

MUTATIONS = [
    Mutation(
        "simulate: the device does two steps at once",
        SIMULATE,
        "max(max(begin, self.free_at) + device, self.now)",
        "max(begin + device, self.now)",
        TESTS + "test_the_device_works_in_order_and_waiting_moves_the_clock",
    ),
    Mutation(
        "simulate: a step ends before its last launch",
        SIMULATE,
        "max(max(begin, self.free_at) + device, self.now)",
        "max(begin, self.free_at) + device",
        TESTS + "test_no_step_ends_before_its_last_launch",
    ),
    Mutation(
        "simulate: a captured step computes its own rows only",
        "minisgl.benchmark.step_cost",
        "return self.captured[bisect_left(self.captured, tokens)], True",
        "return tokens, True",
        TESTS + "test_a_captured_prefill_step_is_padded",
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
