"""Bugs on purpose in the engine: its arithmetic, the layout of a step, the step itself."""

from __future__ import annotations

from tests.mutations import Mutation

MEMORY, STEP, ENGINE = "minisgl.engine.memory", "minisgl.engine.step", "minisgl.engine.engine"
TESTS = "tests/test_engine.py::"

MUTATIONS = [
    Mutation(
        "memory_ratio_forgets_the_dummy_page",
        MEMORY,
        "- model_bytes\n    return available // page_bytes - 1",
        "- model_bytes\n    return available // page_bytes",
        TESTS + "test_pages_of_a_real_model_by_hand",
    ),
    Mutation(
        "memory_peak_is_not_reserved",
        MEMORY,
        "- (peak_bytes - current_bytes)",
        "- 0 * (peak_bytes - current_bytes)",
        TESTS + "test_peak_keeps_what_the_largest_step_needs",
    ),
    Mutation(
        "memory_one_window_need_not_fit",
        MEMORY,
        "if num_pages >= window:",
        "if num_pages >= 1:",
        TESTS + "test_too_little_memory_is_said_with_numbers",
    ),
    Mutation(
        "memory_imbalance_is_ignored",
        MEMORY,
        "if highest - lowest > limit:",
        "if lowest - highest > limit:",
        TESTS + "test_free_memory_is_agreed_on",
    ),
    Mutation(
        "memory_cpu_takes_all",
        MEMORY,
        "return min(num_pages, modest, window * max_running_req)",
        "return min(num_pages, modest)",
        TESTS + "test_a_cpu_gives_a_modest_share",
    ),
    Mutation(
        "engine_ranks_differ_in_pages",
        ENGINE,
        "return require_pages(comm.min_ints([pages])[0], **sizes)",
        "return require_pages(pages, **sizes)",
        TESTS + "test_all_ranks_take_the_smallest_number",
    ),
    Mutation(
        "engine_reads_free_memory_after_loading",
        ENGINE,
        "    free_before = agree_on_free(device, comm)\n"
        "    model = load_model(config, model_config, path, comm, progress)\n",
        "    model = load_model(config, model_config, path, comm, progress)\n"
        "    free_before = agree_on_free(device, comm)\n",
        TESTS + "test_start_order",
    ),
    Mutation(
        "step_out_loc_reversed",
        STEP,
        "out_loc=tables.page_table[token_rows, positions],",
        "out_loc=tables.page_table[token_rows, positions][::-1].copy(),",
        TESTS + "test_layout_equals_the_slow_way",
    ),
    Mutation(
        "step_positions_start_at_zero",
        STEP,
        "np.repeat(ends - device, extend)",
        "np.repeat(ends - extend, extend)",
        TESTS + "test_new_positions",
    ),
    Mutation(
        "step_samples_in_mid_prompt",
        STEP,
        "if not req.is_chunked]",
        "if True]",
        TESTS + "test_pitfall_07_chunks_end_in_the_same_token",
    ),
    Mutation(
        "step_last_token_is_off_by_one",
        STEP,
        "np.cumsum(extend, dtype=np.int32) - 1",
        "np.cumsum(extend, dtype=np.int32) - extend",
        TESTS + "test_layout_equals_the_slow_way",
    ),
    Mutation(
        "step_token_overwrites_its_predecessor",
        STEP,
        "write_positions=device[chosen],",
        "write_positions=device[chosen] - 1,",
        TESTS + "test_tokens_wait_in_the_pool",
    ),
    Mutation(
        "step_layout_is_a_view",
        STEP,
        "device = np.fromiter((req.device_len for req in reqs), np.int32, count)",
        "device = np.fromiter((req.device_len + 1 for req in reqs), np.int32, count)",
        TESTS + "test_layout_equals_the_slow_way",
    ),
    Mutation(
        "engine_pads_with_a_real_row",
        ENGINE,
        "self.dummy_req = dummy_request(self.tables.dummy_row)",
        "self.dummy_req = dummy_request(0)",
        TESTS + "test_only_real_rows_are_sampled",
    ),
    Mutation(
        "engine_samples_the_padding",
        ENGINE,
        "self.sampler.sample(logits[: len(fi.sampled)], fi.sampling)",
        "self.sampler.sample(logits, fi.sampling)",
        TESTS + "test_only_real_rows_are_sampled",
    ),
    Mutation(
        "engine_forgets_the_token",
        ENGINE,
        "tokens.index_copy_(0, scatter, out.next_ids)",
        "tokens.index_copy_(0, scatter, out.next_ids * 0)",
        TESTS + "test_steps_equal_the_dense_model",
    ),
    Mutation(
        "engine_forgets_to_flush",
        ENGINE,
        "            self.tables.flush()\n",
        "",
        TESTS + "test_flushed_before_the_gather",
    ),
    Mutation(
        "engine_keeps_a_tape",
        ENGINE,
        "    @torch.inference_mode()\n    def step(",
        "    def step(",
        TESTS + "test_nothing_is_kept_for_a_backward_pass",
    ),
    Mutation(
        "engine_trial_uses_real_pages",
        ENGINE,
        "row = engine.tables.dummy_row",
        "row = 0",
        TESTS + "test_trial_prefill_touches_only_the_dummy_page",
    ),
]
