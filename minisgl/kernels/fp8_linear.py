"""GEMMs with FP8 weights: widened (W8A16), or with FP8 activations (W8A8).

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.fp8 import FP8, Fp8Weight, fp8_weight
from minisgl.kernels.device import H200, DeviceLimits, device_limits
from minisgl.kernels.linear import (
    FEW_ROWS,
    Tiling,
    count_scales,
    count_splits,
    few_row_gemm,
    find_tuned,
    gated_linear,
    launch_few_row_gemm,
    linear,
    mlp,
    silu_and_mul,
    split_k_linear,
)
from minisgl.kernels.norm import gemm_input
from minisgl.kernels.scaled_mm import Fp8Rows, empty_rows, quantize_rows, scaled_linear


@cache
def can_multiply(index: int, whole: bool) -> bool:
    """Probe `scaled_mm` on GPU `index`, with a scale for each row (`whole`) or each 128 columns."""
    device = torch.device("cuda", index)
    weight = fp8_weight(256, 256, device=device, group=256 if whole else 128)
    weight.copy_(torch.ones(256, 256, device=device))
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
    try:
        got = scaled_linear(x, weight)
    except (RuntimeError, ValueError):
        return False
    return bool((got == 256).all())


def has_scaled_mm(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Return True if torch multiplies by this FP8 weight without widening a copy of it."""
    (n, k), whole = weight.shape, weight.scale.shape[1] == 1
    step, dtypes = 16 if whole else 128, (torch.bfloat16, FP8)
    if not weight.is_cuda or dtype not in dtypes or n % 16 or k % step:
        return False
    return (whole or weight.group == 128) and can_multiply(weight.device.index or 0, whole)


WIDENED = 16  # rows; of products that may be split, FEW_ROWS


def choose_fp8_tiling(
    m: int, n: int, k: int, *, gated: bool, split_k: bool, limits: DeviceLimits = H200
) -> Tiling | None:
    """Choose tiles for an FP8 weight that is widened (W8A16); None if `rows_kernel` cannot run it.

    Up to 32 rows two warps: then Triton takes `mma.sync`, which has its operands in registers.
    """
    found = find_tuned(limits, "rows8", m, n, k, gated, split_k)
    if found and found[2] <= 128:  # a deeper tile would need more than one scale of a block
        return Tiling(*found)
    if m > 32:
        tiles = Tiling(64, 128, 128, 8, 3, False)
    else:
        bm = 8 if m <= 8 and not gated else 16 if m <= 16 else 32
        tiles = Tiling(bm, 64, 128, 2, 5, True) if split_k else Tiling(bm, 32, 128, 2, 6, True)
    if m > FEW_ROWS or n % tiles.bn or k % tiles.bk:
        return None
    if split_k:
        tiles = replace(tiles, splits=count_splits(tiles, m, n, k, 4 * limits.sms))
    room = limits.shared_memory - tiles.bn * tiles.bk  # `wgmma` reads the widened tile there, too
    tiles = tiles.fit(2 * tiles.bk, tiles.bk * (2 if gated else 1), room)
    stage = 2 * tiles.bm * tiles.bk + tiles.bn * tiles.bk * (2 if gated else 1)
    return tiles if tiles.stages * stage <= room else None


def choose_w8a8_tiling(
    m: int, n: int, k: int, *, gated: bool, split_k: bool, limits: DeviceLimits = H200
) -> Tiling | None:
    """Choose tiles for W8A8, FP8 weights and activations; None leaves the product to the library.

    A tile has all rows, so that the weight is read once. k is split into as many parts as there are
    room for programs; the last may be shorter.
    """
    if m <= FEW_ROWS:
        tiles = Tiling(64, 64, 128, 4, 5, True) if split_k else Tiling(64, 64, 256, 4, 4, True)
    elif m <= 128:
        tiles = Tiling(128, 128, 128, 8, 5, True)
    else:
        tiles = Tiling(256, 128, 128, 8, 4, True)
    if m > tiles.bm or (m > FEW_ROWS and not split_k) or n % tiles.bn or k % tiles.bk:
        return None
    w_bytes = tiles.bk * (2 if gated else 1)
    tiles = tiles.fit(tiles.bk, w_bytes, limits.shared_memory)
    if not split_k:
        return tiles
    nbytes = tiles.stages * (tiles.bm * tiles.bk + tiles.bn * w_bytes)
    most = limits.resident_blocks(2, nbytes) // (n // tiles.bn)
    steps = ceil(k // tiles.bk / max(1, min(8, most)))  # of the loop, in each part
    return replace(tiles, splits=ceil(k // tiles.bk / steps))


def supports_fp8_gemm(weight: Fp8Weight, x: Tensor) -> bool:
    """Return True if this product quantizes the rows of x to FP8, each with one scale."""
    return len(x) > WIDENED and count_scales(weight) == 1 and has_scaled_mm(weight, x.dtype)


@gemm_input.register
def fp8_gemm_input(weight: Fp8Weight, like: Tensor) -> Tensor:
    """Allocate rows as `gemm_input` does, in FP8 if the product takes them."""
    if supports_fp8_gemm(weight, like):
        return empty_rows(len(like), like.shape[1], 1, like.device)
    return torch.empty_like(like)


@mlp.register
def fp8_mlp(down: Fp8Weight, x: Tensor, gate_up: Tensor) -> Tensor:
    """Compute `mlp`, quantizing the rows in the gate's kernel if `down` takes FP8 rows."""
    if len(x) > FEW_ROWS and supports_fp8_gemm(down, x):
        y: Tensor = quantize_rows(linear(x, gate_up), down.shape[1], gated=True)
    else:
        y = gated_linear(x, gate_up)
    return split_k_linear(y, down)


@few_row_gemm.register
def fp8_few_row_gemm(
    weight: Fp8Weight, x: Tensor, bias: Tensor | None = None, *, gated: bool = False,
    split_k: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `few_row_gemm` with an FP8 weight."""
    (m, k), n, dtype = x.shape, weight.shape[0] // (2 if gated else 1), x.dtype
    if isinstance(x, Fp8Rows):
        m, dtype = x.rows, torch.bfloat16
    library, tiles, both = has_scaled_mm(weight, dtype), None, supports_fp8_gemm(weight, x)
    if both or (count_scales(weight) is not None and (split_k or m <= WIDENED or not library)):
        choose = choose_w8a8_tiling if both else choose_fp8_tiling
        limits = device_limits(x.device)
        tiles = choose(m, n, k, gated=gated, split_k=split_k, limits=limits)
    if tiles is not None:
        out_dtype = torch.float32 if tiles.splits > 1 else dtype
        out = torch.empty(tiles.splits, m, n, dtype=out_dtype, device=x.device)
        x = quantize_rows(x, k) if both else x.contiguous()
        launch_few_row_gemm(x, weight, out, tiles, bias, gated)
        return out
    if library:
        y = scaled_linear(x, weight)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, weight.dequantized(x.dtype), bias)
    return (silu_and_mul(y) if gated else y)[None]
