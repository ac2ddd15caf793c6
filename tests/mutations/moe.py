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
        "(i + 1) % step",
        "i % step",
        T + "test_dense_layers",
    ),
]
