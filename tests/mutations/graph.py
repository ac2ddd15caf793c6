"""Bugs on purpose in the runner of captured steps."""

from __future__ import annotations

from tests.mutations import Mutation

MODULE, TESTS = "minisgl.engine.graph", "tests/test_graph.py::"

MUTATIONS = [
    Mutation(
        "graph_captures_beyond_what_may_run",
        MODULE,
        "bucket_sizes(min(most, max_running_req))",
        "bucket_sizes(most)",
        TESTS + "test_choose_sizes",
    ),
    Mutation(
        "graph_leaves_the_largest_batches_eager",
        MODULE,
        "sizes = {1, 2, 4, max_bs, *range",
        "sizes = {1, 2, 4, *range",
        TESTS + "test_bucket_sizes",
    ),
    Mutation(
        "graph_dummy_rows_are_real_rows",
        MODULE,
        "np.full(size, tables.dummy_row, np.int32)",
        "np.zeros(size, np.int32)",
        TESTS + "test_a_dummy_step_is_one_token_in_the_dummy_row",
    ),
    Mutation(
        "graph_bucket_too_small",
        MODULE,
        "index = bisect_left(self.sizes, batch_size)",
        "index = max(bisect_left(self.sizes, batch_size + 1) - 1, 0)",
        TESTS + "test_bucket",
    ),
    Mutation(
        "graph_positions_of_the_capture",
        MODULE,
        "positions=static.positions,",
        "positions=static.positions.clone().zero_(),",
        TESTS + "test_replay_reads_new_values_and_keeps_its_address",
    ),
    Mutation(
        "graph_keeps_the_logits_of_the_capture",
        MODULE,
        "logits.copy_(out)",
        "pass",
        TESTS + "test_replay_reads_new_values_and_keeps_its_address",
    ),
    Mutation(
        "graph_fails_in_the_midst_of_a_capture",
        MODULE,
        "        finally:\n            graph.capture_end()",
        "        finally:\n            pass",
        TESTS + "test_a_capture_that_fails_ends",
    ),
]
