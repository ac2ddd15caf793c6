"""Bugs in attention: its metadata, its three backends, the staging of their integers."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_attention.py::"
METADATA = "minisgl.attention.metadata"
TORCH = "minisgl.attention.torch_backend"
TRITON = "minisgl.attention.triton_backend"
KERNELS = "minisgl.kernels.paged_attention"
FLASHINFER = "minisgl.attention.flashinfer_backend"

ATTEND = "        return self.attend(q, k, v, layer_id)"
BASE_STORE = "        self.pool.store_kv(k, v, self.out_loc, layer_id)\n"
EARLY, OUT = "        out = self.attend(q, k, v, layer_id)\n", "        return out"
STORE = (
    "        store_kv(k, v, pool.k_cache(layer_id), pool.v_cache(layer_id), self.out_loc, scales)\n"
)

MUTATIONS = [
    Mutation(
        "attention: causal mask without the offset of cached tokens",
        TORCH,
        "cached_len = seq_len - extend_len",
        "cached_len = 0",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: last page counted from zero",
        METADATA,
        "last_page_len=seq_lens - (num_pages - 1) * page_size",
        "last_page_len=seq_lens % page_size",
        f"{TEST}test_metadata_last_page_exactly_full",
    ),
    Mutation(
        "attention: a full last page opens another one",
        METADATA,
        "num_pages = (seq_lens + page_size - 1) // page_size",
        "num_pages = seq_lens // page_size + 1",
        f"{TEST}test_metadata_last_page_exactly_full",
    ),
    Mutation(
        "attention: kv_indices are slots",
        METADATA,
        "(self.page_table[rows, positions] // self.page_size)",
        "(self.page_table[rows, positions])",
        f"{TEST}test_metadata_describes_every_request",
    ),
    Mutation(
        "attention: no check of extend_lens",
        METADATA,
        "if ((extend_lens < 1) | (extend_lens > seq_lens)).any():",
        "if False:",
        f"{TEST}test_metadata_refuses",
    ),
    Mutation(
        "attention: online softmax without rescaling the sum",
        KERNELS,
        "total = total * rescale + tl.sum(p, 1)",
        "total = total + tl.sum(p, 1)",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: online softmax without rescaling the output",
        KERNELS,
        "acc * rescale[:, None], input_precision",
        "acc, input_precision",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: merge without rescaling",
        KERNELS,
        "acc = acc * old[:, None] + o * new[:, None]",
        "acc = acc + o * new[:, None]",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: the kernel forgets the cached tokens in its mask",
        KERNELS,
        "tl.minimum(begin + part, end), cached + token",
        "tl.minimum(begin + part, end), token",
        f"{TEST}test_triton_cases",
    ),
    Mutation(
        "attention: the store kernel writes slot -1",
        "minisgl.kernels.store_kv",
        "if slot >= 0:",
        "if slot >= -1:",
        f"{TEST}test_store_kv_kernel",
    ),
    Mutation(
        "attention: a staging buffer is overwritten while it is read",
        "minisgl.attention.staging",
        "self.turn = (self.turn + 1) % len(self.buffers)\n        event",
        "self.turn = (self.turn + 1) % len(self.buffers)\n        self.events[self.turn] = None"
        "\n        event",
        f"{TEST}test_pitfall_04_next_plan_leaves_a_buffer_that_is_still_read",
    ),
    Mutation(
        "attention: a pair decodes with its prefill backend",
        "minisgl.attention.factory",
        "chosen = self.decode if meta.phase is Phase.DECODE else self.prefill",
        "chosen = self.prefill",
        f"{TEST}test_pair_backend_routes_by_phase",
    ),
    Mutation(
        "attention: out_loc reversed",
        TORCH,
        "self.pool, self.out_loc, self.scale = pool, out_loc, scale",
        "self.pool, self.out_loc, self.scale = pool, out_loc.flip(0), scale",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: keys and values of a hit taken from the batch",
        TORCH,
        "if extend_len == seq_len and not self.pool.quantized:",
        "if True:",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: run attends before it stores",
        "minisgl.attention.metadata",
        BASE_STORE + ATTEND,
        EARLY + BASE_STORE + OUT,
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: the decode plan does not see the new token",
        TORCH,
        "<= last[some, None]",
        "< last[some, None].clamp(min=1)",
        f"{TEST}test_graph_plan_equals_eager_plan[1-torch]",
    ),
    Mutation(
        "attention: the recorded plan keeps the rows of its capture",
        TORCH,
        "        self.buffers, self.out_loc = buffers, buffers.out_loc",
        "        rows, at = buffers.rows.clone(), buffers.positions\n"
        "        buffers = DecodeBuffers(rows, at, buffers.out_loc)\n"
        "        self.buffers, self.out_loc = buffers, buffers.out_loc",
        f"{TEST}test_graph_plan_equals_eager_plan[1-torch]",
    ),
    Mutation(
        "attention: stale table entries are read",
        TORCH,
        "slots = torch.where(seen, slots, slots[:, :1])",
        "slots = slots * 1",
        f"{TEST}test_graph_plan_ignores_stale_table_entries[torch]",
    ),
    Mutation(
        "attention: a captured plan keeps the slots of its first step",
        TORCH,
        "        if self.fixed:\n            self.found = found\n",
        "        self.found = found\n",
        f"{TEST}test_graph_plan_equals_eager_plan[1-torch]",
    ),
    Mutation(
        "attention: slices of a decode step leave out a request",
        TORCH,
        "left = left[count:]",
        "left = left[count + 1 :]",
        f"{TEST}test_torch_decode_in_slices_of_any_size",
    ),
    Mutation(
        "attention: one long context widens all slices of a decode step",
        TORCH,
        "width = lens[len(left) - 1]",
        "width = lens[-1]",
        f"{TEST}test_torch_decode_pads_no_request_to_a_far_longer_one",
    ),
    Mutation(
        "attention: the slices of a decode step mix long and short requests",
        TORCH,
        'left = torch.from_numpy(np.argsort(-seq_lens, kind="stable"))',
        "left = torch.arange(len(lens))",
        f"{TEST}test_torch_decode_in_slices_of_any_size",
    ),
    Mutation(
        "attention: parts overlap by one position",
        KERNELS,
        "stop, limit = tl.minimum(begin + part, end)",
        "stop, limit = tl.minimum(begin + part + 1, end)",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: a tile that holds the diagonal is not masked",
        KERNELS,
        "tl.maximum(seen_by_all - begin, 0) // TILE_KV",
        "tl.cdiv(tl.maximum(seen_by_all - begin, 0), TILE_KV)",
        f"{TEST}test_triton_split_and_merge[long prompts]",
    ),
    Mutation(
        "attention: wide tiles are taken where half of the SMs get none",
        TRITON,
        "* self.pool.num_kv_heads < self.num_sms:",
        "* self.pool.num_kv_heads < 0:",
        f"{TEST}test_triton_takes_wide_tiles_where_they_fill_the_gpu",
    ),
    Mutation(
        "attention: the merge leaves out a part",
        KERNELS,
        "for i in range(tl.cdiv(end, part)):",
        "for i in range(end // part):",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: all tiles of a request are its first",
        TRITON,
        "ragged_arange(np.zeros_like(tiles), tiles)",
        "0 * ragged_arange(np.zeros_like(tiles), tiles)",
        f"{TEST}test_triton_lists_every_tile_once",
    ),
    Mutation(
        "attention: the recorded Triton plan keeps the rows of its capture",
        TRITON,
        "            buffers.rows,\n",
        "            buffers.rows.clone(),\n",
        f"{TEST}test_graph_plan_equals_eager_plan[1-triton]",
    ),
    Mutation(
        "attention: FlashInfer plans while its host buffer is read",
        FLASHINFER,
        "        if self.planned is not None:",
        "        if False:",
        f"{TEST}test_pitfall_04_flashinfer_plans_when_its_host_buffer_is_free",
    ),
    Mutation(
        "attention: FlashInfer prefills without a causal mask",
        FLASHINFER,
        "causal=True",
        "causal=False",
        f"{TEST}test_flashinfer_plan_describes_the_batch",
    ),
    Mutation(
        "attention: the Triton backend attends before it stores",
        TRITON,
        STORE + ATTEND,
        EARLY + STORE + OUT,
        f"{TEST}test_triton_cases",
    ),
    Mutation(
        "attention: FlashInfer attends before it stores",
        FLASHINFER,
        STORE + ATTEND,
        EARLY + STORE + OUT,
        f"{TEST}test_flashinfer_plan_describes_the_batch",
    ),
    Mutation(
        "attention: recorded steps of a pair use its eager backend",
        "minisgl.attention.factory",
        "return self.captured.graph_plan(batch_size, buffers)",
        "return self.prefill.graph_plan(batch_size, buffers)",
        f"{TEST}test_pair_backend_routes_by_phase",
    ),
]
