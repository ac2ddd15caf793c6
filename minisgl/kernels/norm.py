"""Sum of split-K parts, residual and RMSNorm in one pass over a row.

Generated from notebooks/05d_gemm.ipynb: edit there.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.pdl import launch_options


class DeferredNorm(NamedTuple):
    """RMSNorm without its per-row scale, which the following GEMM applies."""

    total: Tensor  # the row itself, [1, k]
    row: Tensor  # total * the norm's weight, [1, k]; float32 if total is float16
    squares: Tensor | None = None  # sums of squares of total, float32; None: nothing is missing


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def to_fp8(y, scale_ptr):
    """Divide a row by a scale that makes its largest magnitude 448, and store the scale."""
    y = y.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y)), 1e-12) / 448.0
    tl.store(scale_ptr, scale)
    return y / scale


@triton.jit(do_not_specialize=["M"])
def add_norm_kernel(
    parts_ptr, residual_ptr, sum_ptr, norm_ptr, out_ptr, scale_ptr, M, N, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one row's sum = residual + parts and its RMSNorm; an FP8 norm gets a scale."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * M + row) * N + cols
        x += tl.load(parts_ptr + place, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(sum_ptr.dtype.element_ty)
    if PARTS > 0:
        tl.store(sum_ptr + row * N + cols, rounded, mask=inside)
    x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        y = to_fp8(y.to(sum_ptr.dtype.element_ty), scale_ptr + row)
    tl.store(out_ptr + row * N + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


@singledispatch
def gemm_input(weight: Tensor, like: Tensor) -> Tensor:
    """Allocate rows like these [m, k] in the dtype that a product by `weight` reads."""
    return torch.empty_like(like)


def add_norm(
    parts: Tensor | None, residual: Tensor, norm: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of the sum, the sum) of parts [p, m, n] and residual [m, n]; norm [n].

    out: memory for the first, as `gemm_input` allocates it.
    """
    m, n = residual.shape
    out = torch.empty_like(residual) if out is None else out
    total = residual if parts is None else torch.empty_like(residual)
    block = triton.next_power_of_2(n)
    add_norm_kernel[(m,)](
        residual if parts is None else parts, residual, total, norm, out,
        getattr(out, "scale", out), m, n, eps,
        PARTS=0 if parts is None else parts.shape[0], BLOCK=block,
        num_warps=max(4, min(16, block // 256)), **launch_options(residual),
    )  # fmt: skip
    return out, total
