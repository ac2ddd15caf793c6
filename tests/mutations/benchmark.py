"""Faults of a benchmark that a test must notice: numbers that look right and are not."""

from tests.mutations import Mutation

TEST = "tests/test_benchmark.py::"

MUTATIONS = [
    Mutation(
        name="benchmark: each repetition has the prompts of the last",
        module="minisgl.benchmark.offline",
        old="rng = np.random.default_rng(seed)",
        new="rng = np.random.default_rng(0)",
        test=TEST + "test_redraw_keeps_lengths_and_changes_tokens",
    ),
    Mutation(
        name="benchmark: the joules of all repetitions are those of one",
        module="minisgl.benchmark.offline",
        old="drawn / (repeats * output_tokens)",
        new="drawn / output_tokens",
        test=TEST + "test_joules_of_all_ranks_and_repetitions",
    ),
    Mutation(
        name="benchmark: a clamped answer is timed as if it were whole",
        module="minisgl.benchmark.offline",
        old="longest.output_len, llm.limits.total)",
        new="0, llm.limits.total)",
        test=TEST + "test_a_workload_that_does_not_fit_is_refused",
    ),
    Mutation(
        name="benchmark: the floor reads a token less in every decode step",
        module="minisgl.benchmark.roofline",
        old="            running += [1, -1]\n            yield running[:, 0].astype(np.int32)",
        new="            yield running[:, 0].astype(np.int32)\n            running += [1, -1]",
        test=TEST + "test_decode_lengths_are_every_token_once",
    ),
    Mutation(
        name="benchmark: the first token counts as a decode step",
        module="minisgl.benchmark.roofline",
        old="reshape(-1, 2) - [0, 1]",
        new="reshape(-1, 2)",
        test=TEST + "test_decode_lengths_are_every_token_once",
    ),
    Mutation(
        name="benchmark: prefill attention looks at the future",
        module="minisgl.benchmark.roofline",
        old="(n * (n + 1) // 2)",
        new="(n * n)",
        test=TEST + "test_prefill_counts_causal_pairs",
    ),
    Mutation(
        name="benchmark: steps overlap in the floor that forbids it",
        module="minisgl.benchmark.roofline",
        old="sum(self.seconds(step) for step in steps)",
        new="self.seconds(total)",
        test=TEST + "test_work_overlaps_within_a_step_and_in_one_floor_between_steps",
    ),
    Mutation(
        name="benchmark: a step's attention reads nothing",
        module="minisgl.benchmark.roofline",
        old="kv_itemsize) * kv_read",
        new="kv_itemsize) * 0",
        test=TEST + "test_floors_of_the_offline_workload",
    ),
    Mutation(
        name="benchmark: an untied embedding table is read by every step",
        module="minisgl.benchmark.roofline",
        old="* (1 if model.tie_word_embeddings else 2)",
        new="* 1",
        test=TEST + "test_parameters_are_those_of_the_model",
    ),
    Mutation(
        name="benchmark: a step with half of the batch counts as steady",
        module="minisgl.benchmark.latency",
        old="[full[1:] & full[:-1]]",
        new="[full[1:] | full[:-1]]",
        test=TEST + "test_a_step_without_all_requests_is_not_steady",
    ),
    Mutation(
        name="benchmark: the first steps are in the time per token",
        module="minisgl.benchmark.latency",
        old="for gap in gaps[skip:]",
        new="for gap in gaps",
        test=TEST + "test_gaps_are_of_steady_full_steps",
    ),
    Mutation(
        name="benchmark: a short kernel inside a long one shortens it",
        module="minisgl.benchmark.latency",
        old="if event.end >= reach:",
        new="if True:",
        test=TEST + "test_idle_is_what_no_interval_covers",
    ),
    Mutation(
        name="benchmark: what the host does counts as the device's work",
        module="minisgl.benchmark.latency",
        old='and e.get("cat") in ON_DEVICE',
        new='and e.get("cat")',
        test=TEST + "test_only_the_device_counts_in_a_trace",
    ),
    Mutation(
        name="benchmark: all requests of the timed attention share their pages",
        module="minisgl.benchmark.kernels",
        old="        taken += count",
        new="        taken += 0",
        test=TEST + "test_rows_of_a_pool_are_disjoint",
    ),
    Mutation(
        name="benchmark: a flag does not reach the engine",
        module="minisgl.config.flags",
        old="if name in ENGINE_FIELDS}",
        new='if name in ENGINE_FIELDS and name != "overlap"}',
        test=TEST + "test_every_engine_flag_reaches_the_config",
    ),
]
