"""Faults of the search for tiles that a test must notice."""

from tests.mutations import Mutation

TEST = "tests/test_tuning.py::"

MUTATIONS = [
    Mutation(
        name="tuning: one row of two ranks is searched for as if there was one",
        module="minisgl.benchmark.tune_steps",
        old="        self.size = size\n",
        new="        self.size = 1\n",
        test=TEST + "test_one_row_meets_the_kernels_of_so_many_ranks",
    ),
    Mutation(
        name="tuning: a lucky measurement is enough",
        module="minisgl.benchmark.tuning",
        old="return median(gained) > GAIN",
        new="return True",
        test=TEST + "test_an_entry_has_to_beat_the_rule_again",
    ),
    Mutation(
        name="tuning: what was tried last stays",
        module="minisgl.benchmark.tuning",
        old="        tuned.pop(key, None)\n        if kept is not None:\n",
        new="        if kept is not None:\n",
        test=TEST + "test_a_search_finds_the_best_of_what_can_run",
    ),
    Mutation(
        name="tuning: entries that are there are searched for again",
        module="minisgl.benchmark.tuning",
        old="keys = sorted(tuned.asked - old)",
        new="keys = sorted(tuned.asked)",
        test=TEST + "test_entries_that_are_there_are_left_alone",
    ),
    Mutation(
        name="tuning: a wrong product is a choice",
        module="minisgl.benchmark.tune_steps",
        old="return bool((got - want).norm() < 0.02 * want.norm())",
        new="return True",
        test=TEST + "test_a_wrong_product_is_no_choice",
    ),
    Mutation(
        name="tuning: shipped tiles go before this machine's",
        module="minisgl.kernels.device",
        old="for path in tile_files(gpu):",
        new="for path in reversed(tile_files(gpu)):",
        test=TEST + "test_tiles_of_this_machine_go_before_the_shipped_ones",
    ),
    Mutation(
        name="tuning: tiles for 16 rows serve any number",
        module="minisgl.kernels.linear",
        old="rows, kind = max(16, triton.next_power_of_2(m)), ",
        new="rows, kind = 16, ",
        test=TEST + "test_kernels_take_what_was_found",
    ),
    Mutation(
        name="tuning: an empty entry is none",
        module="minisgl.kernels.linear",
        old='limits, "rows", m, n, k, gated, split_k)) is not None:',
        new='limits, "rows", m, n, k, gated, split_k)):',
        test=TEST + "test_kernels_take_what_was_found",
    ),
    Mutation(
        name="tuning: a tile of eight bits spans two blocks' scales",
        module="minisgl.kernels.fp8_linear",
        old="if found and found[2] <= 128:",
        new="if found:",
        test=TEST + "test_kernels_take_what_was_found",
    ),
]
