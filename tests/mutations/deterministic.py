"""Bugs in batch invariance: an order that follows the batch after all."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_deterministic.py::"
LAYERS = "minisgl.layers.invariant"
TORCH = "minisgl.attention.invariant_torch"
TRITON = "minisgl.attention.invariant_triton"
CONFIG = "minisgl.config.engine"
REST = f"{TEST}test_attention_of_a_position_does_not_depend_on_the_rest"

MUTATIONS = [
    Mutation(
        "deterministic: the last block of rows is not padded",
        LAYERS,
        "F.pad(x, (0, 0, 0, -len(x) % BLOCK))",
        "F.pad(x, (0, 0, 0, 0))",
        f"{TEST}test_rows_of_a_product_do_not_depend_on_the_others[256-640-dtype0-1]",
    ),
    Mutation(
        "deterministic: silu by the library, whose remainders round otherwise",
        LAYERS,
        "    return (wide / (1 + (-wide).exp())).to(x.dtype)",
        "    return F.silu(x)",
        f"{TEST}test_silu_does_not_depend_on_the_rows_and_is_silu",
    ),
    Mutation(
        "deterministic: ranks are added by the group",
        LAYERS,
        "        for part in others:",
        "        for part in reversed(others):",
        f"{TEST}test_ranks_are_added_in_their_order",
    ),
    Mutation(
        "deterministic: layers keep the library's product",
        LAYERS,
        "linear=linear, silu=silu",
        "silu=silu",
        f"{TEST}test_a_model_is_built_from_them",
    ),
    Mutation(
        "deterministic: a model is built as any other",
        "minisgl.models.registry",
        "    if deterministic:",
        "    if False:",
        f"{TEST}test_a_model_is_built_from_them",
    ),
    Mutation(
        "deterministic: the head writes where it is told, by the library's product",
        "minisgl.layers.linear",
        " and self.linear is F.linear",
        "",
        f"{TEST}test_any_way_to_serve_gives_the_same_bits",
    ),
    Mutation(
        "deterministic: tiles of keys end where the longest request of the batch does",
        TORCH,
        "seen = torch.arange(tile * TILE_KV, (tile + 1) * TILE_KV, device=device)",
        "seen = torch.arange(tile * TILE_KV, min((tile + 1) * TILE_KV, int(self.last[0]) + 1))",
        REST,
    ),
    Mutation(
        "deterministic: a query sees the key behind it",
        TORCH,
        "keys, values, seen > limit[b]",
        "keys, values, seen > limit[b] + 1",
        f"{TEST}test_attention_is_dense",
    ),
    Mutation(
        "deterministic: blocks are not cut at multiples",
        TORCH,
        "begins = positions % TILE_Q == 0",
        "begins = np.arange(len(positions)) % TILE_Q == 0",
        f"{TEST}test_attention_is_dense",
    ),
    Mutation(
        "deterministic: slots behind a request's end are read",
        TORCH,
        "torch.minimum(seen, self.last[:live, None])",
        "torch.maximum(seen, 0 * self.last[:live, None])",
        f"{TEST}test_slots_behind_a_request_s_end_are_not_read",
    ),
    Mutation(
        "deterministic: recorded steps read one tile less",
        TORCH,
        "tiles = -(-self.tables.page_table.shape[1] // TILE_KV)",
        "tiles = self.tables.page_table.shape[1] // TILE_KV",
        f"{TEST}test_recorded_attention_has_the_bits_of_eager",
    ),
    Mutation(
        "deterministic: the earlier sum is not rescaled",
        TORCH,
        "    total.mul_(rescale).add_(",
        "    total.add_(",
        f"{TEST}test_attention_is_dense",
    ),
    Mutation(
        "deterministic: keys are split by the load of the GPU",
        TRITON,
        "        return 1",
        "        return super().num_splits(places, max_len)",
        f"{TEST}test_triton_attention_does_not_depend_on_the_rest",
    ),
    Mutation(
        "deterministic: query tiles follow the batch",
        TRITON,
        "        return QUERY_ROWS",
        "        return super().query_rows(average_rows)",
        f"{TEST}test_triton_attention_does_not_depend_on_the_rest",
    ),
    Mutation(
        "deterministic: tiles are wider than the weight",
        "minisgl.kernels.tiled_linear",
        "if size % tile == 0) for size",
        "if size >= tile) for size",
        f"{TEST}test_tiles_follow_the_weight_alone",
    ),
    Mutation(
        "deterministic: any backend will do",
        CONFIG,
        '        if backend not in ("auto", only):',
        '        if backend == "fi":',
        f"{TEST}test_what_cannot_be_deterministic_is_refused",
    ),
    Mutation(
        "deterministic: fused kernels are taken although they cannot",
        CONFIG,
        '"torch" if on_cpu or config.deterministic else "triton"',
        '"torch" if on_cpu else "triton"',
        f"{TEST}test_auto_takes_what_can_be",
    ),
    Mutation(
        "deterministic: fused kernels may be asked for",
        CONFIG,
        'elif config.deterministic and config.kernels == "triton":',
        "elif False:",
        f"{TEST}test_what_cannot_be_deterministic_is_refused",
    ),
    Mutation(
        "deterministic: the factory builds the usual backend",
        "minisgl.attention.factory",
        "(INVARIANT if deterministic else BACKENDS)[name]",
        "BACKENDS[name]",
        f"{TEST}test_the_factory_refuses_backends_that_are_not_invariant",
    ),
]
