"""Bugs in attention: its metadata, its three backends, the staging of their integers."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_attention.py::"
METADATA = "minisgl.attention.metadata"
TORCH = "minisgl.attention.torch_backend"
TRITON = "minisgl.attention.triton_backend"
KERNELS = "minisgl.kernels.paged_attention"
PLAN = "minisgl.attention.plan_arithmetic"
FLASHINFER = "minisgl.attention.flashinfer_backend"
LISTS = "minisgl.kernels.kv_indices"

MUTATIONS = [
    Mutation(
        "attention: out_loc reversed in prefill",
        TORCH,
        "        self.pool = pool\n        self.out_loc = out_loc\n        self.scale = scale\n"
        "        self.bounds",
        "        self.pool = pool\n        self.out_loc = out_loc.flip(0)\n"
        "        self.scale = scale\n        self.bounds",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: out_loc reversed in decode",
        TORCH,
        "self.pool, self.out_loc, self.scale = pool, out_loc, scale",
        "self.pool, self.out_loc, self.scale = pool, out_loc.flip(0), scale",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: causal mask without the offset of cached tokens",
        TORCH,
        "cached_len = seq_len - extend_len",
        "cached_len = 0",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: keys and values of a hit taken from the batch",
        TORCH,
        "if extend_len == seq_len:",
        "if True:",
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
        "attention: query heads read the wrong KV head",
        TORCH,
        "view[:] = meta.slots_of(i)[skip:] * num_kv_heads + heads",
        "view[:] = meta.slots_of(i)[skip:] * num_kv_heads + heads[::-1]",
        f"{TEST}test_torch_cases",
    ),
    Mutation(
        "attention: the shared prefix is one token too long",
        TORCH,
        "shared = int(differs.argmax()) if differs.any() else limit",
        "shared = int(differs.argmax()) + 1 if differs.any() else limit",
        f"{TEST}test_shared_prefix_leaves_every_request_a_position",
    ),
    Mutation(
        "attention: the shared prefix is scored but not summed",
        TORCH,
        "out.unflatten(1, self.heads).add_(self.sum_shared(weights, v_slots))",
        "self.sum_shared(weights, v_slots)",
        f"{TEST}test_torch_decode_reads_a_shared_prefix_once",
    ),
    Mutation(
        "attention: the graph plan does not see the new token",
        TORCH,
        "masks = self.positions <= self.buffers.positions[:, None]",
        "masks = self.positions < self.buffers.positions[:, None].clamp(min=1)",
        f"{TEST}test_graph_plan_equals_eager_plan[1-torch]",
    ),
    Mutation(
        "attention: the graph plan keeps the rows of its capture",
        TORCH,
        "self.batch_size, self.buffers = batch_size, buffers",
        "self.batch_size, self.buffers = batch_size, DecodeBuffers(\n"
        "            buffers.rows.clone(), buffers.positions, buffers.out_loc\n        )",
        f"{TEST}test_graph_plan_equals_eager_plan[1-torch]",
    ),
    Mutation(
        "attention: stale table entries are read",
        TORCH,
        "slots = slots * masks",
        "slots = slots * 1",
        f"{TEST}test_graph_plan_of_torch_ignores_stale_table_entries",
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
        "acc = acc * rescale[:, None] + tl.dot",
        "acc = acc + tl.dot",
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
        "limit = seq_len - qo_len + token",
        "limit = token",
        f"{TEST}test_triton_cases",
    ),
    Mutation(
        "attention: chunks overlap by one position",
        KERNELS,
        "return begin, tl.minimum(begin + chunk, seq_len",
        "return begin, tl.minimum(begin + chunk + 1, seq_len",
        f"{TEST}test_triton_split_and_merge",
    ),
    Mutation(
        "attention: padded work items are not marked",
        TRITON,
        "request, qo_tile, kv_tile = (np.full(num_items, -1, dtype=np.int32)",
        "request, qo_tile, kv_tile = (np.full(num_items, 0, dtype=np.int32)",
        f"{TEST}test_triton_pads_its_work_items",
    ),
    Mutation(
        "attention: the store kernel writes slot -1",
        "minisgl.kernels.store_kv",
        "if slot >= 0:",
        "if slot >= -1:",
        f"{TEST}test_store_kv_kernel",
    ),
    Mutation(
        "attention: split where query tiles fill the GPU",
        PLAN,
        "if int((q_tiles * chunks).sum()) > max_items:",
        "if int(chunks.sum()) > max_items:",
        f"{TEST}test_plan_arithmetic_worked_example",
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
        "attention: FlashInfer's host buffer is filled without waiting",
        FLASHINFER,
        "self.turn = 1 - self.turn",
        "self.turn = 0",
        f"{TEST}test_pitfall_04_flashinfer_plans_alternate_host_buffers",
    ),
    Mutation(
        "attention: kv_indices on the device are off by one page",
        LISTS,
        "slots_ptr = page_table_ptr + row * table_stride + page * PAGE_SIZE",
        "slots_ptr = page_table_ptr + row * table_stride + (page + 1) * PAGE_SIZE",
        f"{TEST}test_kv_indices_kernel_cases",
    ),
    Mutation(
        "attention: kv_indices on the device write one page too many",
        LISTS,
        "inside = page < num_pages",
        "inside = page <= num_pages",
        f"{TEST}test_kv_indices_kernel_cases",
    ),
    Mutation(
        "attention: every block of kv_indices is the first one",
        LISTS,
        "page = block * PAGES + tl.arange(0, PAGES)",
        "page = tl.arange(0, PAGES)",
        f"{TEST}test_kv_indices_kernel_cases",
    ),
    Mutation(
        "attention: ragged prefill although there is a prefix",
        FLASHINFER,
        "return meta.phase is Phase.PREFILL and meta.no_prefix and",
        "return meta.phase is Phase.PREFILL and",
        f"{TEST}test_flashinfer_ragged_only_without_prefix",
    ),
    Mutation(
        "attention: a ragged plan goes back to numbers that were overwritten",
        FLASHINFER,
        "        if self.paged is not None:\n            return self.paged.attend(q, layer_id)",
        "        if self.paged is not None and k is None:\n"
        "            return self.paged.attend(q, layer_id)",
        f"{TEST}test_flashinfer_ragged_plan_stays_with_the_pages_once_it_went_there",
    ),
    Mutation(
        "attention: FlashInfer attends before it stores",
        FLASHINFER,
        "        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), "
        "self.out_loc)\n        return self.attend(q, layer_id, k, v)",
        "        out = self.attend(q, layer_id, k, v)\n"
        "        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), "
        "self.out_loc)\n        return out",
        f"{TEST}test_flashinfer_plan_describes_the_batch",
    ),
    Mutation(
        "attention: the Triton backend attends before it stores",
        TRITON,
        "        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), "
        "self.out_loc)\n        return self.attend(q, layer_id)",
        "        out = self.attend(q, layer_id)\n"
        "        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), "
        "self.out_loc)\n        return out",
        f"{TEST}test_triton_cases",
    ),
    Mutation(
        "attention: a request without a hit reads the pool from its start",
        TORCH,
        "slots, mask = hit or (self.out_loc[rows], None)",
        "slots, mask = hit or (self.out_loc[: stop - start], None)",
        f"{TEST}test_torch_attends_to_what_is_stored",
    ),
    Mutation(
        "attention: the short plan is trusted without a look",
        FLASHINFER,
        "        return [int(x) for x in call()] == [int(x) for x in wrapper._plan_info]",
        "        return bool([int(x) for x in call()])",
        f"{TEST}test_flashinfer_short_plan_must_answer_like_the_public_one",
    ),
    Mutation(
        "attention: the short plan counts pages instead of tokens",
        FLASHINFER,
        "torch.from_numpy(meta.seq_lens)",
        "torch.from_numpy(meta.kv_indptr[1:] - meta.kv_indptr[:-1])",
        f"{TEST}test_flashinfer_short_plan_is_only_the_planner",
    ),
    Mutation(
        "attention: a pair decodes with its prefill backend",
        "minisgl.attention.factory",
        "chosen = self.decode if meta.phase is Phase.DECODE else self.prefill",
        "chosen = self.prefill",
        f"{TEST}test_pair_backend_routes_by_phase",
    ),
]
