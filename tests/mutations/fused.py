"""Bugs in the fused kernels: what a kernel leaves out, or takes from the wrong place."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_fused.py::"
LINEAR = "minisgl.kernels.linear"
NORM = "minisgl.kernels.norm"
ROTATE = "minisgl.kernels.rotate_store"
DECODE = "minisgl.kernels.decode_attention"
DEFERRED = f"{TEST}test_a_norm_is_deferred_to_the_product_behind_it"
MODEL = f"{TEST}test_fused_model_equals_the_plain_one[qwen3]"
ORACLE = f"{TEST}test_decode_equals_the_oracle"
WAITS = f"{TEST}test_a_kernel_touches_before_its_wait_only_what_no_kernel_of_the_chain_writes"

MUTATIONS = [
    Mutation(
        "fused: a layer begins a row that its last product cannot end",
        "minisgl.models.fused",
        "own and supports_gemv(self.gate_up, norm=True, gated=True) and supports_gemv(self.down)",
        "own",
        "tests/test_fused.py::test_a_row_without_a_kernel_launches_nothing_in_vain",
    ),
    Mutation(
        "fused: the norm's factor is left out of a row",
        LINEAR,
        "factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)",
        "factor = 1.0",
        f"{TEST}test_row_linear_applies_the_factor_of_a_norm",
    ),
    Mutation(
        "fused: the norm's factor does not reach the other half of a gated weight",
        LINEAR,
        "y, up = y * factor, up * factor",
        "y, up = y * factor, up",
        f"{TEST}test_row_linear_applies_the_factor_of_a_norm",
    ),
    Mutation(
        "fused: the norm's weight is left out of a row",
        LINEAR,
        "norm = tl.load(norm_ptr + cols).to(tl.float32)",
        "norm = 1.0",
        DEFERRED,
    ),
    Mutation(
        "fused: the residual is not added to a row",
        LINEAR,
        "y = (residual + y).to(",
        "y = y.to(",
        DEFERRED,
    ),
    Mutation(
        "fused: the first program's sum of squares is all there is",
        LINEAR,
        "mask=part < SQUARES, other=0.0",
        "mask=part < 1, other=0.0",
        DEFERRED,
    ),
    Mutation(
        "fused: a row of float16 that is not yet normalised overflows",
        LINEAR,
        "wide = torch.promote_types(out.dtype, torch.bfloat16)",
        "wide = out.dtype",
        DEFERRED,
    ),
    Mutation(
        "fused: a row reads the residual before the kernel that writes it has ended",
        LINEAR,
        "norm = tl.load(norm_ptr + cols)",
        "norm = tl.load(norm_ptr + cols) + 0 * tl.load(residual_ptr + cols)",
        WAITS,
    ),
    Mutation(
        "fused: a layer leaves its own norm to the next one",
        "minisgl.models.fused",
        "[layer.first_norm for layer in self.layers[1:]]",
        "[layer.first_norm for layer in self.layers[:-1]]",
        MODEL,
    ),
    Mutation(
        "fused: a row's gate and up forget the norm's epsilon",
        "minisgl.models.fused",
        "mid: Any = gemv(row, self.gate_up, eps=eps, gated=True)",
        "mid: Any = gemv(row, self.gate_up, gated=True)",
        MODEL,
    ),
    Mutation(
        "fused: only products in front of a norm wait",
        LINEAR,
        "    if PDL:\n        gdc_wait()\n    if norm_ptr",
        "    if PDL and norm_ptr is not None:\n        gdc_wait()\n    if norm_ptr",
        WAITS,
    ),
    Mutation(
        "fused: every split reads the first part of the weights",
        LINEAR,
        "at, split = tl.program_id(2) * part,",
        "at, split = tl.program_id(2) * 0,",
        f"{TEST}test_gemms_of_few_rows",
    ),
    Mutation(
        "fused: gate and up are swapped",
        LINEAR,
        "    if GATED:\n        y = y * tl.sigmoid(y) * up\n    return y",
        "    if GATED:\n        y = up * tl.sigmoid(up) * y\n    return y",
        f"{TEST}test_gemms_of_few_rows",
    ),
    Mutation(
        "fused: stages are not cut to a card's shared memory",
        LINEAR,
        "max(2, min(self.stages, room // stage))",
        "self.stages",
        f"{TEST}test_tiles_fit_into_the_shared_memory_of_a_card",
    ),
    Mutation(
        "fused: decode attention takes every card for an H200",
        DECODE,
        "limits.resident_blocks(*needs)",
        "H200.resident_blocks(*needs)",
        f"{TEST}test_decode_is_cut_for_the_card_it_runs_on",
    ),
    Mutation(
        "fused: kernels are chosen for cards whose memory their tiles exceed",
        "minisgl.models.fused",
        " and device_limits(weight.device).runs_tiles",
        "",
        "tests/test_compile.py::test_kernels_that_do_not_fit_are_not_chosen",
    ),
    Mutation(
        "fused: only the first part of a product is added",
        NORM,
        "for part in tl.static_range(PARTS):",
        "for part in tl.static_range(min(PARTS, 1)):",
        f"{TEST}test_add_norm",
    ),
    Mutation(
        "fused: the sum before a norm is not kept",
        NORM,
        "tl.store(sum_ptr + row * N + cols, rounded, mask=inside)",
        "tl.store(sum_ptr + row * N + cols, rounded * 0, mask=inside)",
        f"{TEST}test_add_norm",
    ),
    Mutation(
        "fused: the rotation takes the wrong half",
        ROTATE,
        "return a * cos - b * sin, b * cos + a * sin",
        "return a * cos + b * sin, b * cos - a * sin",
        MODEL,
    ),
    Mutation(
        "fused: prefill stores keys at the token's position",
        ROTATE,
        "k_place = k_cache_ptr + slot * KV * HEAD_DIM",
        "k_place = k_cache_ptr + position * KV * HEAD_DIM",
        MODEL,
    ),
    Mutation(
        "fused: decode stores at the wrong slot",
        DECODE,
        "page_table_ptr, slots_ptr + r, head",
        "page_table_ptr, slots_ptr, head",
        ORACLE,
    ),
    Mutation(
        "fused: the new token is not folded in",
        DECODE,
        "    acc = acc * old[:, None] + p[:, None] * v.to(tl.float32)[None, :]\n"
        "    return new, total * old + p, acc",
        "    return m, total, acc",
        ORACLE,
    ),
    Mutation(
        "fused: a cached token is read twice, as cached and as new",
        DECODE,
        "tl.minimum((split + 1) * part, length - 1)",
        "tl.minimum((split + 1) * part, length)",
        ORACLE,
    ),
    Mutation(
        "fused: the merge ignores the last part",
        DECODE,
        "old, left = m, (count - first) * GROUP",
        "old, left = m, (count - 1 - first) * GROUP",
        f"{TEST}test_decode_of_one_long_request",
    ),
    Mutation(
        "fused: the counter of finished parts is not reset",
        DECODE,
        "tl.store(done_ptr + place, 0)",
        "tl.store(done_ptr + place, count)",
        f"{TEST}test_decode_of_one_long_request",
    ),
    Mutation(
        "fused: a request is never cut, however long",
        DECODE,
        "counts = tl.maximum((lens + spare) // share, 1)",
        "counts = tl.maximum(lens * 0, 1)",
        f"{TEST}test_one_long_request_among_short_ones_is_cut",
    ),
    Mutation(
        "fused: parts of a single request are two tiles long, and half as many",
        DECODE,
        "spare = share - 1 if BATCH == 1 else 0",
        "spare = 0",
        f"{TEST}test_parts_of_a_short_request_are_single_tiles",
    ),
    Mutation(
        "fused: keys of eight bits are cut like those of sixteen",
        DECODE,
        "shapes = FP8_SHAPES if itemsize == 1 else SHAPES",
        "shapes = SHAPES",
        f"{TEST}test_tiles_fill_one_wave_if_they_can",
    ),
    Mutation(
        "fused: requests of one length are cut into more parts than run at once",
        DECODE,
        "share = tl.maximum(tl.cdiv(tl.sum(lens, 0), parts), TILE)",
        "share = tl.maximum(tl.cdiv(tl.sum(lens, 0), 2 * parts), TILE)",
        f"{TEST}test_requests_of_one_length_have_no_more_parts_than_run_at_once",
    ),
    Mutation(
        "fused: a program takes a part of the request behind its own",
        DECODE,
        "first = tl.sum(tl.where(i < request, counts, 0), 0)",
        "first = tl.sum(tl.where(i <= request, counts, 0), 0)",
        f"{TEST}test_parts_hold_every_key_once_and_none_is_long",
    ),
    Mutation(
        "fused: parts of different requests share their place",
        DECODE,
        "head * tl.num_programs(1) + program - split",
        "head * tl.num_programs(1)",
        f"{TEST}test_every_part_has_its_own_place_in_scratch_memory",
    ),
    Mutation(
        "fused: parts of different heads share their place",
        DECODE,
        "head * tl.num_programs(1) + program - split",
        "program - split",
        f"{TEST}test_every_part_has_its_own_place_in_scratch_memory",
    ),
    Mutation(
        "fused: the tile that was loaded early is counted twice",
        DECODE,
        "        begin += TILE\n",
        "",
        ORACLE,
    ),
    Mutation(
        "fused: the last tile of a part reaches into what is not stored yet",
        DECODE,
        "end - 1), 0)",
        "end), 0)",
        f"{TEST}test_what_was_never_stored_does_not_count",
    ),
    Mutation(
        "fused: a request's first token multiplies what was never stored by zero",
        DECODE,
        "        v = tl.where(begin < end, v, 0.0)",
        "        v = v",
        f"{TEST}test_what_was_never_stored_does_not_count",
    ),
    Mutation(
        "fused: scratch memory suits requests that are not cut only",
        "minisgl.attention.fused_backend",
        "kv * (rows + max_splits(kv, device_limits(pool.buffer.device)))",
        "kv * rows",
        f"{TEST}test_scratch_suits_many_drafts_of_few_requests",
    ),
    Mutation(
        "fused: drafts are loaded before they are stored",
        "minisgl.attention.fused_backend",
        "buffers, drafts=True)",
        "buffers, drafts=False)",
        f"{TEST}test_only_rows_of_one_request_may_be_in_the_cache_since_this_step",
    ),
    Mutation(
        "fused: the model gives the rows of a prefill the wrong residual",
        "minisgl.models.fused",
        "y, residual = y[fb.last_idx], residual[fb.last_idx]",
        "y, residual = y[fb.last_idx], residual[: len(fb.last_idx)]",
        MODEL,
    ),
    Mutation(
        "fused: attention reads its queries before the product has written them",
        DECODE,
        "        if PDL:\n            gdc_wait()\n        r = request",
        "        r = request",
        WAITS,
    ),
    Mutation(
        "fused: a norm reads the residual before it waits",
        NORM,
        "    if PDL:\n        gdc_wait()\n    x = tl.load(",
        "    x = tl.load(",
        WAITS,
    ),
]
