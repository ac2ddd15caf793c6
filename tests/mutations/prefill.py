"""Bugs on purpose in captured prefill."""

from __future__ import annotations

from tests.mutations import Mutation

MODULE, TESTS = "minisgl.engine.prefill_graph", "tests/test_prefill_graph.py::"
TILED = "minisgl.engine.tiled_prefill"
KERNEL, LONG = "minisgl.kernels.prefill_attention", "tests/test_prefill_attention.py::"

MUTATIONS = [
    Mutation(
        "prefill_records_beyond_the_budget",
        MODULE,
        "most = min(most, config.max_extend_tokens)",
        "pass",
        TESTS + "test_as_many_tokens_as_the_host_is_slower_than_the_gpu",
    ),
    Mutation(
        "prefill_records_deterministic_engines",
        MODULE,
        "    if config.deterministic:",
        "    if False:",
        TESTS + "test_as_many_tokens_as_the_host_is_slower_than_the_gpu",
    ),
    Mutation(
        "prefill_has_no_room_for_tiles_that_are_not_full",
        MODULE,
        "size * group // tile_q + min(size, MAX_REQUESTS)",
        "-(-size * group // tile_q)",
        TESTS + "test_there_is_room_for_all_tiles",
    ),
    Mutation(
        "prefill_buffers_overlap",
        MODULE,
        "rest = memory[4 * (size + most) :]",
        "rest = memory[4 * (size + most) - 33 :]",
        TESTS + "test_buffers_share_no_word",
    ),
    Mutation(
        "prefill_pads_in_a_real_row",
        MODULE,
        "static.gather[:] = static.scatter[:] = tables.dummy_row * tables.width",
        "static.gather[:] = static.scatter[:] = 19 * tables.width",
        TESTS + "test_padding_writes_only_to_the_dummy_row_and_page",
    ),
    Mutation(
        "prefill_pads_on_a_real_page",
        MODULE,
        "static.out_loc[:] = int(tables.page_table[tables.dummy_row, 0])",
        "static.out_loc[:] = int(tables.page_table[tables.dummy_row, 0]) - 4",
        TESTS + "test_padding_writes_only_to_the_dummy_row_and_page",
    ),
    Mutation(
        "prefill_leaves_padding_to_the_step_before",
        MODULE,
        "packed, width = self.blanks[size].copy(), self.tables.width",
        "packed, width = self.blanks[size], self.tables.width",
        TESTS + "test_nothing_of_a_larger_step_is_left",
    ),
    Mutation(
        "prefill_takes_the_logits_of_other_tokens",
        MODULE,
        "to.last_idx[:count] = fi.last_idx[:count]",
        "to.last_idx[:count] = range(count)",
        TESTS + "test_draws_are_those_of_eager_steps[ways2]",
    ),
    Mutation(
        "prefill_draws_all_rows_greedily",
        MODULE,
        "    if fi.sampling is not None:",
        "    if False:",
        TESTS + "test_draws_are_those_of_eager_steps[ways1]",
    ),
    Mutation(
        "prefill_scores_no_prompt",
        MODULE,
        "any(req.scores_prompt for req in batch.reqs)",
        "False",
        TESTS + "test_who_is_computed_eagerly",
    ),
    Mutation(
        "prefill_takes_too_many_requests",
        MODULE,
        "batch.size > MAX_REQUESTS",
        "batch.size > 2 * MAX_REQUESTS",
        TESTS + "test_who_is_computed_eagerly",
    ),
    Mutation(
        "prefill_packs_a_decode_step",
        "minisgl.engine.runners",
        "runner = self.decode if batch.phase is Phase.DECODE else self.prefill",
        "runner = self.prefill",
        TESTS + "test_who_is_computed_eagerly",
    ),
    Mutation(
        "prefill_gives_tokens_to_requests_that_are_not_there",
        MODULE,
        "tiles.qo_indptr[bs + 1 :] = meta.qo_indptr, meta.num_tokens",
        "tiles.qo_indptr[bs + 1 :] = meta.qo_indptr, len(fi.positions) + 7",
        TESTS + "test_tiles_of_padding_do_nothing",
    ),
    Mutation(
        "prefill_tiles_of_padding_belong_to_the_first_request",
        MODULE,
        "of_attention.request[:] = MAX_REQUESTS",
        "of_attention.request[:] = 0",
        TESTS + "test_tiles_of_padding_do_nothing",
    ),
    Mutation(
        "prefill_leaves_any_bits_behind_the_last_token",
        TILED,
        "plan.out = torch.zeros(",
        "plan.out = torch.nan * torch.zeros(",
        TESTS + "test_tiles_equal_the_oracle[1-16-1]",
    ),
    Mutation(
        "prefill_stays_when_the_engine_goes",
        "minisgl.engine.engine",
        "self.runners = Runners()",
        "self.runners = Runners(prefill=self.runners.prefill)",
        TESTS + "test_sizes_share_one_memory_and_all_leave_together",
    ),
    Mutation(
        "prefill_attention_multiplies_keys_before_they_are_there",
        KERNEL,
        "mbarrier.wait(full.index(number % STAGES), number // STAGES & 1)",
        "mbarrier.wait(full.index(number % STAGES), (number // STAGES & 1) ^ 1)",
        LONG + "test_the_kernel_attends[a prompt]",
    ),
    Mutation(
        "prefill_attention_does_not_rescale",
        KERNEL,
        "acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, P.parent))[:, None]",
        "acc = acc + 0",
        LONG + "test_the_kernel_attends[behind a cached prefix]",
    ),
    Mutation(
        "prefill_attention_multiplies_what_others_left",
        KERNEL,
        "if end % TILE_KV != 0:",
        "if end < 0:",
        LONG + "test_the_kernel_attends[a prompt]",
    ),
    Mutation(
        "prefill_attention_copies_pieces_too_small_for_a_swizzle",
        "minisgl.attention.hopper_backend",
        "box >= 8",
        "box >= 1",
        LONG + "test_which_pools_fit",
    ),
    Mutation(
        "prefill_attention_searches_for_its_kernel_in_every_layer",
        KERNEL,
        "    if compiled is None:",
        "    if True:",
        LONG + "test_layers_share_tensor_maps_and_the_compiled_kernel",
    ),
    Mutation(
        "prefill_attention_makes_tensor_maps_for_every_plan",
        "minisgl.attention.hopper_backend",
        "    @cached_property",
        "    @property",
        LONG + "test_layers_share_tensor_maps_and_the_compiled_kernel",
    ),
    Mutation(
        "prefill_attention_reads_the_first_layer_in_all",
        "minisgl.attention.hopper_backend",
        "self.boxes[layer_id]",
        "self.boxes[0]",
        LONG + "test_layers_share_tensor_maps_and_the_compiled_kernel",
    ),
]
