"""Bugs of a mixture of experts."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_moe.py::"
LAYER = "minisgl.layers.moe"
MODEL = "minisgl.models.moe"
CONFIG = "minisgl.config.model"
GROUPED = T + "test_grouped_experts_equal_one_pair_at_a_time"

MUTATIONS = [
    Mutation(
        "moe: probabilities in the dtype of the model",
        LAYER,
        "logits.softmax(-1, dtype=torch.float32)",
        "logits.softmax(-1)",
        T + "test_routing_is_a_softmax_over_all_experts_in_float32",
    ),
    Mutation(
        "moe: weights are always scaled to 1",
        LAYER,
        "if normalize else weights",
        "if True else weights",
        T + "test_routing_is_a_softmax_over_all_experts_in_float32",
    ),
    Mutation(
        "moe: pairs of an expert lose their order",
        LAYER,
        "x[order // ids.shape[1]]",
        "x[order % len(x)]",
        GROUPED,
    ),
    Mutation(
        "moe: results stay in the order of the experts",
        LAYER,
        "out[pairs] = linear(",
        "out[len(pairs) - 1 - torch.arange(len(pairs))] = linear(",
        GROUPED,
    ),
    Mutation(
        "moe: all layers have experts",
        MODEL,
        "if moe is None or layer_id in moe.dense_layers:",
        "if moe is None:",
        T + "test_only_sparse_layers_have_experts",
    ),
    Mutation(
        "moe: up is read where gate lies",
        MODEL,
        "second = slice(full + mine.start, full + mine.stop)",
        "second = mine",
        T + "test_packed_and_single_experts_are_one_model",
    ),
    Mutation(
        "moe: Mixtral's gate and up are exchanged",
        MODEL,
        '"mixtral": ("w1", "w3", "w2")',
        '"mixtral": ("w3", "w1", "w2")',
        T + "test_logits_equal_transformers",
    ),
    Mutation(
        "moe: every rank reads the columns of the first",
        MODEL,
        "(ALL, mine), (one,)",
        "(ALL, top), (one,)",
        T + "test_every_expert_is_cut",
    ),
    Mutation(
        "config: sparse layers are counted from 0",
        CONFIG,
        "(i + 1) % file.decoder_sparse_step",
        "i % file.decoder_sparse_step",
        T + "test_dense_layers",
    ),
    Mutation(
        "config: dense layers beyond the last one",
        CONFIG,
        "if absent := set(alone) - set(layers):",
        "if absent := set(alone) - set(alone):",
        T + "test_impossible_experts_are_refused",
    ),
    Mutation(
        "config: whole experts are counted by their width",
        CONFIG,
        "moe.num_experts if expert_parallel else moe.intermediate_size",
        "moe.intermediate_size",
        T + "test_experts_that_ranks_do_not_divide_are_refused",
    ),
    Mutation(
        "moe: every rank takes its experts for the first ones",
        LAYER,
        "flat = ids.flatten() - first",
        "flat = ids.flatten()",
        T + "test_whole_experts_of_all_ranks_add_up",
    ),
    Mutation(
        "moe: pairs of other ranks stay, as whatever lies in memory",
        LAYER,
        "out = torch.zeros(",
        "out = 7 + torch.zeros(",
        T + "test_whole_experts_of_all_ranks_add_up",
    ),
    Mutation(
        "moe: a rank reads experts that it does not hold",
        MODEL,
        "mine=held.start <= i < held.stop",
        "mine=i < held.stop",
        T + "test_a_rank_reads_its_own_experts_alone",
    ),
    Mutation(
        "moe: of packed experts, every rank reads the first",
        MODEL,
        "(held, ALL, mine), ()",
        "(slice(layer.experts.size), ALL, mine), ()",
        T + "test_a_rank_reads_its_own_experts_alone",
    ),
]
ROW = "minisgl.kernels.moe_row"
KERNELS = "minisgl.kernels.moe"
K = "tests/test_moe_kernels.py::"
BLOCKS = K + "test_blocks_hold_every_pair_once"
PARTS = K + "test_parts_add_up_to_the_oracle"
MUTATIONS += [
    Mutation(
        "moe kernels: a bound that forgets the blocks that are not full",
        KERNELS,
        "return (pairs + min(pairs, experts) * (size - 1)) // size",
        "return (pairs + size - 1) // size",
        K + "test_most_blocks_is_enough_for_every_routing",
    ),
    Mutation(
        "moe kernels: a program counts itself among those before it",
        KERNELS,
        "others < part, counts",
        "others <= part, counts",
        BLOCKS,
    ),
    Mutation(
        "moe kernels: two tokens share a place",
        KERNELS,
        "tl.cumsum(chosen.to(tl.int32), 0) - 1",
        "tl.minimum(tl.cumsum(chosen.to(tl.int32), 0), 1) - 1",
        BLOCKS,
    ),
    Mutation(
        "moe kernels: unused blocks keep what was there",
        KERNELS,
        "tl.max(ends, 0) + part * WIDTH, num_blocks",
        "num_blocks, num_blocks",
        BLOCKS,
    ),
    Mutation(
        "moe kernels: experts of other ranks are not marked",
        KERNELS,
        "tl.where(here, experts - first, -1)",
        "tl.where(here, experts - first, experts)",
        K + "test_blocks_of_other_ranks_are_marked",
    ),
    Mutation(
        "moe kernels: experts of other ranks are computed by the first",
        KERNELS,
        "ks[None, :], tl.where(away, 0, K)",
        "ks[None, :], K",
        K + "test_parts_of_all_ranks_add_up",
    ),
    Mutation(
        "moe kernels: places of other ranks' pairs keep what was there",
        KERNELS,
        "(count == 0) | (away & GATED)",
        "(count == 0) | away",
        K + "test_parts_of_all_ranks_add_up",
    ),
    Mutation(
        "moe kernels: parts of the logits are not added up",
        KERNELS,
        "place = (split * N + tokens[:, None]) * E",
        "place = tokens[:, None] * E",
        K + "test_split_logits_are_added_up",
    ),
    Mutation(
        "moe kernels: results are not weighted",
        KERNELS,
        "y *= tl.load(weights_ptr + place, mask=real, other=0.0)[:, None]",
        "y *= 1.0",
        PARTS,
    ),
    Mutation(
        "moe kernels: up is taken for gate",
        KERNELS,
        "tl.load(w_ptr + k + OUT * K), up,",
        "tl.load(w_ptr + k), up,",
        PARTS,
    ),
    Mutation(
        "moe kernels: tiles follow the batch of a deterministic engine",
        KERNELS,
        "dtype = torch.float32 if fixed or n <= FEW_ROWS else x.dtype",
        "dtype = torch.float32 if n <= 8 else torch.bfloat16",
        K + "test_a_token_alone_gets_the_same_bits_where_that_is_asked_for",
    ),
    Mutation(
        "moe kernels: who follows may begin before the blocks are there",
        KERNELS,
        "    gdc_wait()\n    gdc_launch_dependents()\n",
        "    gdc_launch_dependents()\n    gdc_wait()\n",
        "tests/test_fused.py::"
        "test_who_is_followed_by_an_early_reader_launches_it_after_its_own_wait",
    ),
    Mutation(
        "moe kernels: who chooses for one token leaves the counter as it is",
        ROW,
        "        tl.store(done_ptr, 0)  # ready for the next step\n",
        "",
        K + "test_one_token_equals_the_oracle",
    ),
    Mutation(
        "moe kernels: experts of one token are chosen before all logits are there",
        ROW,
        "== E - 1:",
        "== E - 2:",
        K + "test_one_token_equals_the_oracle",
    ),
    Mutation(
        "moe kernels: the experts of one token are not weighted",
        ROW,
        "    y *= tl.load(weights_ptr + slot)\n",
        "",
        K + "test_one_token_equals_the_oracle",
    ),
    Mutation(
        "moe kernels: one token goes the way of many",
        ROW,
        "return fits_row(self.gate_up, self.down)",
        "return False",
        K + "test_fused_model_equals_the_plain_one",
    ),
    Mutation(
        "moe kernels: a token alone reads experts of eight bits as if they had no scales",
        "minisgl.models.fused",
        "return own and bool(self.experts.supports_gemv)",
        "return own",
        "tests/test_fp8_experts.py::test_fused_model_equals_the_plain_one",
    ),
    Mutation(
        "moe kernels: who chooses may not see what others stored",
        ROW,
        'sem="acq_rel"',
        'sem="relaxed"',
        K + "test_all_logits_are_stored_before_a_program_chooses",
    ),
    Mutation(
        "moe kernels: a token's router forgets the epsilon of the norm in front",
        ROW,
        "y = tl.sum(total, 0) * tl.rsqrt(tl.sum(squares, 0) / K + eps)",
        "y = tl.sum(total, 0) * tl.rsqrt(tl.sum(squares, 0) / K)",
        K + "test_one_token_equals_the_oracle",
    ),
    Mutation(
        "moe kernels: the norm behind a token's experts is that of the sum before rounding",
        ROW,
        "    y = y.to(out_ptr.dtype.element_ty).to(tl.float32)\n",
        "",
        K + "test_one_token_of_sixteen_bits",
    ),
]
