"""GEMMs over weights of eight bits whose activations keep sixteen, as two numbers of eight.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.linear import rows_linear, silu_and_mul
from minisgl.kernels.scaled_mm import scaled_linear
from minisgl.layers.fp8 import Fp8Weight, fp8_weight


@triton.jit
def halve(x):
    """x [rows, k] as (high + low / 16) * size: two float8_e4m3fn, and a power of two for each row.

    Eight significant bits are kept, as many as a bfloat16 has; a number of eight bits has four.
    """
    x = x.to(tl.float32)
    exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 20)
    x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # now below 256
    high = x.to(tl.float8e4nv)
    low = ((x - high.to(tl.float32)) * 16).to(tl.float8e4nv)
    return high, low, ((exponent - 7) << 23).to(tl.float32, bitcast=True)


@cache
def can_multiply(index: int, whole: bool) -> bool:
    """Whether `scaled_mm` takes scales of whole rows, or of 128 columns, on GPU number `index`."""
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
    """True if torch multiplies by this weight without a copy of it in more bits."""
    (n, k), whole = weight.shape, weight.scale.shape[1] == 1
    if not weight.is_cuda or dtype is not torch.bfloat16 or n % 16 or k % (16 if whole else 128):
        return False
    return (whole or weight.group == 128) and can_multiply(weight.device.index or 0, whole)


@rows_linear.register
def fp8_rows_linear(
    weight: Fp8Weight, x: Tensor, bias: Tensor | None = None, *, gated: bool = False,
    split_k: bool = False,
) -> Tensor:  # fmt: skip
    """As `rows_linear`, by a weight of eight bits; the sum is never left open."""
    if has_scaled_mm(weight, x.dtype):
        y = scaled_linear(x, weight)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, weight.dequantized(x.dtype), bias)
    return (silu_and_mul(y) if gated else y)[None]
