"""Bugs in the packed weights of a CPU."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_packed.py::"
PACKED = "minisgl.models.packed"

MUTATIONS = [
    Mutation(
        "packed: one activation scale for all rows of a call",
        PACKED,
        "mixed.abs().amax(1, keepdim=True).clamp_(min=self.tiny)\n        product",
        "mixed.abs().amax().clamp_(min=self.tiny)\n        product",
        f"{TEST}test_a_row_is_independent_of_its_batch[96-Int8Rows]",
    ),
    Mutation(
        "packed: columns are not mixed",
        PACKED,
        "BLOCK = 64",
        "BLOCK = 1",
        f"{TEST}test_large_columns_do_not_set_the_scale_alone",
    ),
    Mutation(
        "packed: a weight out of range is packed all the same",
        PACKED,
        "return peak == 0 or smallest <= peak <= largest",
        "return True or smallest <= peak <= largest",
        f"{TEST}test_a_weight_out_of_range_stays_in_float32[1e+32-fp16]",
    ),
    Mutation(
        "packed: a bias is forgotten",
        PACKED,
        "return y if bias is None else y.add_(bias)",
        "return y",
        f"{TEST}test_model_is_close_to_float32[fp16-0.001-biases and a tied head]",
    ),
    Mutation(
        "packed: a tied head is never packed",
        PACKED,
        "if table.head is not None:",
        "if False:",
        f"{TEST}test_model_is_close_to_float32[fp16-0.001-biases and a tied head]",
    ),
    Mutation(
        "packed: auto rounds weights of 32 bits",
        PACKED,
        'return model.config.dtype != "float32" and size > SMALL',
        "return size > SMALL",
        f"{TEST}test_auto_packs_where_it_gains[dtype1-0-False]",
    ),
    Mutation(
        "packed: experts are left in float32 without an error",
        PACKED,
        "model.config.moe is None",
        "True",
        f"{TEST}test_what_cannot_be_packed_is_refused[int8-case2-auto, none or fp8 for a mixture "
        "of experts, got 'int8']",
    ),
]
