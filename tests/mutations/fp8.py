"""Bugs in weights, keys and values of eight bits."""

from __future__ import annotations

from tests.mutations import Mutation

TEST = "tests/test_fp8.py::"
EXPERTS = "tests/test_fp8_experts.py::"
LAYERS = "minisgl.fp8"
QUANTIZATION = "minisgl.models.quantization"
POOL = "minisgl.kvcache.fp8_pool"
LINEAR = "minisgl.kernels.linear"
PRODUCTS = "minisgl.kernels.fp8_linear"
DECODE = "minisgl.kernels.decode_attention"
RANKS = f"{TEST}test_ranks_read_their_scales"
OVER = f"{TEST}test_attention_over_eight_bits"

MUTATIONS = [
    Mutation(
        "fp8: a row's largest number becomes 240",
        LAYERS,
        "clamp_(min=1e-12) / LARGEST",
        "clamp_(min=1e-12) / 240",
        f"{TEST}test_quantize_is_within_half_a_step[24]",
    ),
    Mutation(
        "fp8: groups of columns get their scales in turn",
        LAYERS,
        "scale = scale.repeat_interleave(self.group, -1)",
        "scale = scale.repeat(1, self.group)",
        f"{TEST}test_dequantize_multiplies_each_group_by_its_scale[16]",
    ),
    Mutation(
        "fp8: every rank reads the scales of the first rank's columns",
        "minisgl.models.quantization",
        "slice(start // width, -(-stop // width))",
        "slice(0, -(-(stop - start) // width))",
        f"{RANKS}[2-block-options0]",
    ),
    Mutation(
        "fp8: rows of scales are not repeated for the rows of a block",
        "minisgl.models.weights",
        ".repeat_interleave(spec.repeat, -2)[..., rows, :]",
        ".repeat(spec.repeat, 1)[..., rows, :]",
        f"{RANKS}[2-block-options0]",
    ),
    Mutation(
        "fp8: a cut through a block is let pass",
        "minisgl.models.quantization",
        "if stored.columns and stop - start < k and",
        "if stored.columns and stop - start > k and",
        f"{TEST}test_a_rank_that_would_cut_a_block_is_refused",
    ),
    Mutation(
        "fp8: stored weights may have any dtype",
        "minisgl.models.quantization",
        'yield replace(spec, dtypes=("F8_E4M3",))',
        'yield replace(spec, dtypes=("F8_E4M3", "F32"))',
        f"{TEST}test_numbers_of_eight_bits_without_a_scale_are_refused",
    ),
    Mutation(
        "fp8: an unknown method is read as plain weights",
        QUANTIZATION,
        '    raise refuse("quantization_config", f"one of {FORMATS}", config)',
        "    return None",
        f"{TEST}test_other_formats_are_refused_with_the_list",
    ),
    Mutation(
        "fp8: modules are kept in more bits by their full names alone",
        QUANTIZATION,
        'f".{name}." in f".{module}."',
        "name == module",
        f"{TEST}test_modules_that_a_checkpoint_keeps[qwen3-block-entry0]",
    ),
    Mutation(
        "fp8: a layer is kept in more bits for one of its projections",
        QUANTIZATION,
        "if wide and len(wide) < len(specs):",
        "if wide and len(wide) > len(specs):",
        f"{TEST}test_a_part_of_a_layer_is_not_kept_alone",
    ),
    Mutation(
        "fp8: rows beyond those that are widened stay with our kernel",
        PRODUCTS,
        "(split_k or m <= WIDENED or not library)",
        "(split_k or m <= FEW_ROWS or not library)",
        f"{TEST}test_many_rows_go_to_the_library",
    ),
    Mutation(
        "fp8: a few rows forget the scales of gate or up",
        LINEAR,
        "            up *= tl.load(scale_ptr + N + cols)\n",
        "            up *= tl.load(scale_ptr + cols)\n",
        f"{TEST}test_gemms_of_eight_bits[7-512]",
    ),
    Mutation(
        "fp8: every part of a split sum begins with the first scales",
        LINEAR,
        "scale_ptr + (at + k) // 128 * groups",
        "scale_ptr + k // 128 * groups",
        f"{TEST}test_many_rows_go_to_the_library",
    ),
    Mutation(
        "fp8: tiles leave no room for one that is widened",
        PRODUCTS,
        "limits.shared_memory - tiles.bn * tiles.bk",
        "limits.shared_memory",
        f"{TEST}test_tiles_of_eight_bits",
    ),
    Mutation(
        "fp8: the gate's other half forgets the scale of the activations",
        LINEAR,
        "y, up = y * x_scale, up * x_scale",
        "y, up = y * x_scale, up",
        f"{TEST}test_eight_bits_on_both_sides[17]",
    ),
    Mutation(
        "fp8: the last part of a split sum goes on into the next row",
        LINEAR,
        "tl.minimum(part, K - at)",
        "part",
        f"{TEST}test_eight_bits_on_both_sides[65]",
    ),
    Mutation(
        "fp8: a norm in front of a few rows quantizes them",
        PRODUCTS,
        "return len(x) > WIDENED and",
        "return len(x) > 0 and",
        f"{TEST}test_rows_are_quantized_where_they_are_made",
    ),
    Mutation(
        "fp8: the gate is quantized without its other half",
        "minisgl.kernels.scaled_mm",
        "(gate * tl.sigmoid(gate) * up)",
        "(gate * tl.sigmoid(gate))",
        f"{TEST}test_rows_are_quantized_where_they_are_made",
    ),
    Mutation(
        "fp8: sums are split into more programs than run at once",
        PRODUCTS,
        "limits.resident_blocks(2, nbytes)",
        "4 * limits.sms",
        f"{TEST}test_tiles_of_eight_bits_on_both_sides",
    ),
    Mutation(
        "fp8: experts that are one tensor have their scales under another name",
        "minisgl.models.quantization",
        'mark = "." if base != spec.name else "_"',
        'mark = "."',
        f"{EXPERTS}test_checkpoints_of_eight_bits[qwen3_moe-block-options1]",
    ),
    Mutation(
        "fp8: every expert takes the first one's scales",
        "minisgl.kernels.moe",
        "scale_ptr += row * SCALES",
        "scale_ptr += 0",
        f"{EXPERTS}test_parts_add_up_to_the_oracle[1-even-0-0]",
    ),
    Mutation(
        "fp8: one expert is the first of them",
        LAYERS,
        "scale = self.scale[part]",
        "scale = self.scale[part] if isinstance(part, slice) else self.scale[0]",
        f"{EXPERTS}test_checkpoints_of_eight_bits[qwen3_moe-channel-options2]",
    ),
    Mutation(
        "fp8: one row forgets the scale of the row",
        LINEAR,
        "        y *= tl.load(scale_ptr + cols)\n",
        "        y *= 1.0\n",
        f"{TEST}test_one_row_of_eight_bits[1024]",
    ),
    Mutation(
        "fp8: what is too large for the cache becomes NaN",
        POOL,
        ".clamp_(-LARGEST, LARGEST)",
        ".mul_(1e30)",
        f"{TEST}test_pool_rounds_scales_and_saturates",
    ),
    Mutation(
        "fp8: a prompt without a hit sees its keys before they are rounded",
        "minisgl.attention.torch_backend",
        "if extend_len == seq_len and not self.pool.quantized:",
        "if extend_len == seq_len:",
        f"{TEST}test_prompt_with_and_without_a_hit_sees_the_same",
    ),
    Mutation(
        "fp8: the decode kernel forgets the scale of values",
        DECODE,
        "return m, total, acc * v_scale",
        "return m, total, acc",
        f"{OVER}[lens0-None-fused]",
    ),
    Mutation(
        "fp8: queries of the decode kernel overflow",
        DECODE,
        "qa = tl.clamp(qa.to(tl.float32), -65504.0, 65504.0).to(tl.float16)",
        "qa = qa.to(tl.float16)",
        "tests/test_fp8.py::test_queries_that_float16_cannot_hold_give_numbers",
    ),
    Mutation(
        "fp8: the Triton kernel forgets the scale of values",
        "minisgl.kernels.paged_attention",
        "acc = acc / total[:, None] * v_scale",
        "acc = acc / total[:, None]",
        f"{OVER}[lens1-extend1-triton]",
    ),
    Mutation(
        "fp8: keys are scored without their scale",
        "minisgl.kernels.paged_attention",
        "scale_log2 *= 1.0 if scales_ptr is None else tl.load(scales_ptr + head)",
        "scale_log2 *= 1.0",
        f"{OVER}[lens1-extend1-triton]",
    ),
    Mutation(
        "fp8: keys of every head are scored by the first one's scale",
        DECODE,
        "tl.load(scales_ptr + head)",
        "tl.load(scales_ptr)",
        f"{OVER}[lens0-None-fused]",
    ),
    Mutation(
        "fp8: values of a prompt take the scale of the head before",
        "minisgl.kernels.rotate_store",
        "tl.load(scales_ptr + KV + cols // HEAD_DIM, is_v, 1.0)",
        "tl.load(scales_ptr + KV - 1 + cols // HEAD_DIM, is_v, 1.0)",
        f"{TEST}test_rotate_and_store_eight_bits[4-2-False]",
    ),
    Mutation(
        "fp8: the store kernel takes the scale of keys for values",
        "minisgl.kernels.store_kv",
        "tl.load(scales + HEADS, mask=inside, other=1.0)",
        "tl.load(scales, mask=inside, other=1.0)",
        f"{TEST}test_store_kv_of_eight_bits[2-16]",
    ),
    Mutation(
        "fp8: keys of every layer take the values' scales",
        "minisgl.models.kv_scales",
        'zip("kv", scales, strict=True)',
        'zip("vv", scales, strict=True)',
        f"{TEST}test_engine_with_a_cache_of_eight_bits[parts1-wanted1]",
    ),
    Mutation(
        "fp8: every rank takes the scales of the first rank's heads",
        "minisgl.models.kv_scales",
        "found[mine.start : mine.start + mine.size]",
        "found[: mine.size]",
        f"{TEST}test_ranks_read_scales_of_their_heads[2-shape2-every2]",
    ),
    Mutation(
        "fp8: as many scales as heads in any shape pass for one each",
        "minisgl.models.kv_scales",
        "if found.squeeze().shape not in ((), (heads,)):",
        "if found.numel() not in (1, heads):",
        f"{TEST}test_scales_of_another_shape_are_refused[shape1]",
    ),
    Mutation(
        "fp8: the cache is counted in the model's dtype",
        "minisgl.engine.memory",
        'return FP8 if config.kv_cache_dtype == "fp8" else found',
        "return found",
        f"{TEST}test_eight_bits_double_the_pages",
    ),
    Mutation(
        "fp8: FlashInfer is let read eight bits",
        "minisgl.config.engine",
        'if eight_bits and "fi" in backend.split(","):',
        'if eight_bits and "fi" == backend:',
        f"{TEST}test_flashinfer_is_refused",
    ),
]
