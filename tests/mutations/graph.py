"""Bugs on purpose in the graph runner and its recorder."""

from __future__ import annotations

from tests.mutations import Mutation

MODULE, TESTS = "minisgl.engine.graph", "tests/test_graph.py::"

MUTATIONS = [
    Mutation(
        "graph_sglang_captures_beyond_the_pool",
        MODULE,
        "limit = max_running\n",
        "limit = max_bs\n",
        TESTS + "test_sglang_fits_a_small_pool",
    ),
    Mutation(
        "graph_output_moves",
        MODULE,
        "old.copy_(new)",
        "old = new",
        TESTS + "test_a_graph_keeps_addresses_not_values",
    ),
    Mutation(
        "graph_in_place_writes_are_not_repeated",
        MODULE,
        "if function._schema.is_mutable:",
        "if False:",
        TESTS + "test_views_copies_and_writes",
    ),
    Mutation(
        "graph_lets_item_pass",
        MODULE,
        "if torch.Tag.data_dependent_output in function.tags:",
        "if False:",
        TESTS + "test_values_on_the_host_are_refused",
    ),
    Mutation(
        "graph_padding_writes_to_a_real_slot",
        MODULE,
        "dummy_slot = int(tables.page_table[tables.dummy_row, 0])",
        "dummy_slot = 0",
        TESTS + "test_capture_writes_only_to_the_dummy_page",
    ),
    Mutation(
        "graph_dummy_rows_are_somebodys",
        MODULE,
        "rows = np.full(size, tables.dummy_row, np.int32)",
        "rows = np.zeros(size, np.int32)",
        TESTS + "test_dummy_metadata_is_one_token_in_the_dummy_row",
    ),
    Mutation(
        "graph_small_sizes_first",
        MODULE,
        "tqdm(self.sizes[::-1],",
        "tqdm(self.sizes,",
        TESTS + "test_capture_goes_from_large_to_small_after_a_trial",
    ),
    Mutation(
        "graph_bucket_too_small",
        MODULE,
        "index = bisect_left(self.sizes, batch_size)",
        "index = max(bisect_left(self.sizes, batch_size + 1) - 1, 0)",
        TESTS + "test_bucket_and_can_replay",
    ),
    Mutation(
        "graph_positions_of_the_capture",
        MODULE,
        "static.positions.copy_(positions)",
        "pass",
        TESTS + "test_replay_reads_new_values_and_keeps_its_address",
    ),
    Mutation(
        "graph_metadata_of_the_capture",
        MODULE,
        "step.plan.update(meta)",
        "pass",
        TESTS + "test_replay_reads_new_values_and_keeps_its_address",
    ),
    Mutation(
        "graph_replays_prefill",
        MODULE,
        "phase is Phase.DECODE and",
        "phase is not None and",
        TESTS + "test_bucket_and_can_replay",
    ),
]
