"""GEMMs of many rows on the tensor cores' eight bits: activations are quantized row by row.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.pdl import launch_options
from minisgl.layers.fp8 import Fp8Weight


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit(do_not_specialize=["M"])
def quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, M, K, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Quantize GROUP columns of a row by the largest of them; grid (rows, groups), scales [M]."""
    row, group = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < GROUP
    place = row.to(tl.int64) * K + group * GROUP + cols
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-12) / 448.0
    tl.store(scale_ptr + group * M + row, scale)
    tl.store(out_ptr + place, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [m, k] as float8_e4m3fn, and float32 scales [m, k / group], side by side down a column.

    Rows without values follow, up to a multiple of 16: cuBLAS has no kernel for some odd numbers.
    """
    (m, k), dtype = x.shape, torch.float8_e4m3fn
    padded = m + -m % 16
    out = torch.empty(padded, k, dtype=dtype, device=x.device)
    scale = torch.empty(k // group, padded, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(group)
    quantize_rows_kernel[(m, k // group)](
        x.contiguous(), out, scale, padded, k, GROUP=group, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **launch_options(x),
    )  # fmt: skip
    return out, scale.t()


def scaled_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """x [m, k] by a weight [n, k], plus bias [n]: [m, n] in bfloat16."""
    whole = weight.scale.shape[1] == 1
    values, scale = quantize_rows(x, x.shape[1] // weight.scale.shape[1])
    kind = ScalingType.RowWise if whole else ScalingType.BlockWise1x128
    product: Tensor = F.scaled_mm(
        values, weight.t(), scale, kind, weight.scale.t(), kind, bias=bias,
        output_dtype=torch.bfloat16, use_fast_accum=whole,
    )  # fmt: skip
    return product[: len(x)]
