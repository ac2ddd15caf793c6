"""GEMMs with many rows on FP8 tensor cores: activations are quantized row by row.

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

from minisgl.fp8 import FP8, Fp8Weight
from minisgl.kernels.norm import to_fp8
from minisgl.kernels.pdl import launch_options


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit(do_not_specialize=["M"])
def quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, M, K, GROUP: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize GROUP columns of a row by the largest of them; grid (rows, groups), scales [M].

    GATED: of silu(gate) * up, where x holds both, side by side.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside, at = cols < GROUP, group * GROUP + cols
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += row.to(tl.int64) * (2 * K if GATED else K) + at
    x = tl.load(x_ptr, mask=inside, other=0.0)
    if GATED:
        gate, up = x.to(tl.float32), tl.load(x_ptr + K, mask=inside, other=0.0).to(tl.float32)
        x = (gate * tl.sigmoid(gate) * up).to(x.dtype)
    x = to_fp8(x, scale_ptr + group * M + row)
    tl.store(out_ptr + row.to(tl.int64) * K + at, x.to(out_ptr.dtype.element_ty), mask=inside)


class Fp8Rows(Tensor):
    """Rows in float8_e4m3fn, [m, k], with `scale` [m, groups], side by side down a column.

    `rows` of them have values. The others make m a multiple of 16, for which cuBLAS has kernels.
    """

    scale: Tensor
    rows: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def empty_rows(m: int, k: int, groups: int, device: torch.device) -> Fp8Rows:
    """Allocate FP8 rows [m, k], padded to 16 rows, with `groups` scales each."""
    padded = m + -m % 16
    out = torch.empty(padded, k, dtype=FP8, device=device).as_subclass(Fp8Rows)
    out.rows, out.scale = m, torch.empty(groups, padded, device=device).t()
    return out


def quantize_rows(x: Tensor, group: int, gated: bool = False) -> Fp8Rows:
    """Quantize x [m, k], or gate and up [m, 2 k], to FP8 with a scale for each `group` columns."""
    if isinstance(x, Fp8Rows):
        return x
    m, k = len(x), x.shape[1] // (2 if gated else 1)
    out, block = empty_rows(m, k, k // group, x.device), triton.next_power_of_2(group)
    quantize_rows_kernel[(m, k // group)](
        x.contiguous(), out, out.scale, len(out), k, GROUP=group, BLOCK=block, GATED=gated,
        num_warps=max(1, min(16 if gated else 8, block // 512)), **launch_options(x),
    )  # fmt: skip
    return out


def scaled_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [m, k] by an FP8 weight [n, k] (W8A8) and add bias [n]: bfloat16 [m, n]."""
    whole = weight.scale.shape[1] == 1
    values = quantize_rows(x, x.shape[1] // weight.scale.shape[1])
    kind = ScalingType.RowWise if whole else ScalingType.BlockWise1x128
    product: Tensor = F.scaled_mm(
        values, weight.t(), values.scale, kind, weight.scale.t(), kind, bias=bias,
        output_dtype=torch.bfloat16, use_fast_accum=whole,
    )  # fmt: skip
    return product[: values.rows]
