"""GEMMs with few rows: a weight is read once, at the speed of the memory.

Generated from notebooks/05d_gemm.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Self

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.device import H200, DeviceLimits, device_limits
from minisgl.kernels.norm import DeferredNorm
from minisgl.kernels.pdl import launch_options


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def apply_epilogue(y, up, scale_ptr, bias_ptr, N, cols,
                GATED: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Finish sums y [BN] or [BM, BN]: apply the weight rows' scales, the bias and the gate."""
    if SCALES == 1:
        y *= tl.load(scale_ptr + cols)
        if GATED:
            up *= tl.load(scale_ptr + N + cols)
    if BIAS:
        y += tl.load(bias_ptr + cols).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    return y


@triton.jit
def partial_products(w, x, scale_ptr, SCALES: tl.constexpr, FOLD: tl.constexpr):
    """Multiply a weight tile [rows, BK] by x and add each FOLD columns up: [rows, BK / FOLD]."""
    y = w.to(tl.float32) * x[None, :]
    if FOLD > 1:
        y = tl.sum(tl.reshape(y, [w.shape[0], w.shape[1] // FOLD, FOLD]), 2)
    if SCALES > 1:
        y *= tl.load(scale_ptr)
    return y


@triton.jit
def add_products(w, u, k, total, up, x_ptr, scale_ptr, N, ks,
                 GATED: tl.constexpr, SCALES: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    """Add one tile of weights, w and u, times its part of the row."""
    x = tl.load(x_ptr + k + ks).to(tl.float32)
    folds = k + tl.arange(0, ks.shape[0] // FOLD) * FOLD
    scale_ptr += folds // 128 * (2 * N if GATED else N)  # one for 128 columns, side by side
    total += partial_products(w, x, scale_ptr, SCALES, FOLD)
    if GATED:
        up += partial_products(u, x, scale_ptr + N, SCALES, FOLD)
    return total, up


@triton.jit
def row_kernel(
    x_ptr, x_squares_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, norm_ptr,
    out_ptr, row_ptr, squares_ptr, N, K, eps, BN: tl.constexpr, BK: tl.constexpr,
    SQUARES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr,
    FOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `BN` outputs of one row: x w^T of x [K] and w [N, K], or [2 N, K] if gated."""
    cols, ks = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w_ptr += cols[:, None].to(tl.int64) * K + ks[None, :]
    if PDL:
        gdc_launch_dependents()
    w = tl.load(w_ptr)  # weights have no dependency: load them before the input is ready
    u = tl.load(w_ptr + N * K) if GATED else w
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + cols).to(tl.float32)
    if PDL:
        gdc_wait()
    if norm_ptr is not None:  # a norm follows: the residual is added, too
        residual = tl.load(residual_ptr + cols).to(tl.float32)
    if SQUARES > 0:  # the number of programs that made x, which lacks the norm's factor
        part = tl.arange(0, triton.next_power_of_2(SQUARES))
        squares = tl.load(x_squares_ptr + part, mask=part < SQUARES, other=0.0)
    total = tl.zeros([BN, BK // FOLD], tl.float32)
    scales = scale_ptr + cols[:, None]
    total, up = add_products(w, u, 0, total, total, x_ptr, scales, N, ks, GATED, SCALES, FOLD)
    for k in range(BK, K, BK):
        w = tl.load(w_ptr + k)
        u = tl.load(w_ptr + N * K + k) if GATED else w
        total, up = add_products(w, u, k, total, up, x_ptr, scales, N, ks, GATED, SCALES, FOLD)
    y, up = tl.sum(total, 1), tl.sum(up, 1)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y, up = y * factor, up * factor
    y = apply_epilogue(y, up, scale_ptr, bias_ptr, N, cols, GATED, BIAS, SCALES)
    if norm_ptr is not None:
        y = (residual + y).to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.store(row_ptr + cols, (y * norm).to(row_ptr.dtype.element_ty))
        tl.store(squares_ptr + tl.program_id(0), tl.sum(y * y, 0))
    tl.store(out_ptr + cols, y.to(out_ptr.dtype.element_ty))


def count_scales(weight: Tensor) -> int | None:
    """Return the scales per row: 0 for 16 bits, None if they are not for 128 columns each."""
    scale = getattr(weight, "scale", None)  # chapter 05g
    count = 0 if scale is None else int(scale.shape[-1])
    return None if count > 1 and count * 128 != weight.shape[-1] else count


def choose_gemv_block(
    n: int, k: int, norm: bool, gated: bool, scales: int = 0, limits: DeviceLimits = H200
) -> tuple[int, int, int, int] | None:
    """Choose (BN, BK, warps, FOLD) of `row_kernel` for a weight [n, k]; None if none divides it."""
    kind = ("norm_" if norm else "") + ("gated" if gated else "plain")
    if found := limits.tuned.find("row", kind, scales, n, k):
        return found[0], found[1], found[2], found[3]
    fold = 1
    if scales == 1 and not norm and k % 2048:
        bn, bk, warps = 8, 512 if k % 1024 else 1024, 4
    elif scales:
        fold, (bn, bk, warps) = 16, (8, 512 if gated or k % 1024 else 1024, 4)
        if scales == 1 and not norm:
            bn, bk = 4, 2048
    elif norm or gated:
        bk = 512
        bn, warps = (8, 4) if gated else (4, 4) if n <= 4096 else (16, 4)
    else:
        bk = 512 if k % 1024 else 1024
        bn, warps = (2, 4) if n <= 2048 else (8, 2)
    return None if n % bn or k % bk else (bn, bk, warps, fold)


def gemv_add_norm(
    x: Tensor | DeferredNorm, weight: Tensor, residual: Tensor | None, norm: Tensor | None, *,
    eps: float = 0.0, bias: Tensor | None = None, gated: bool = False,
    block: tuple[int, int, int, int] | None = None,
) -> DeferredNorm | None:  # fmt: skip
    """Return residual [1, n] + x [1, k] by weight [n, k], and its norm [n]; None if no block fits.

    residual and norm None: the total is the product alone. eps: of x's norm. gated: weight [2 n, k]
    holds gate and up, and the product is silu(gate) * up. block: (BN, BK, warps, FOLD) if given.
    """
    total, row, squares = x if isinstance(x, DeferredNorm) else DeferredNorm(x, x)
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    scales, limits = count_scales(weight), device_limits(row.device)
    if row.shape[0] != 1 or scales is None:
        return None
    block = block or choose_gemv_block(n, k, isinstance(x, DeferredNorm), gated, scales, limits)
    if block is None:
        return None
    bn, bk, warps, fold = block
    out = torch.empty(1, n, dtype=total.dtype, device=total.device)
    made = DeferredNorm(out, out)
    if norm is not None:  # float16 could overflow while the factor is missing
        wide = torch.promote_types(out.dtype, torch.bfloat16)
        sums = torch.empty(n // bn, dtype=torch.float32, device=out.device)
        made = DeferredNorm(out, torch.empty_like(out, dtype=wide), sums)
    row_kernel[(n // bn,)](
        row, squares, weight, getattr(weight, "scale", row), bias, residual, norm, *made, n, k, eps,
        BN=bn, BK=bk, SQUARES=0 if squares is None else len(squares), GATED=gated,
        BIAS=bias is not None, SCALES=scales, FOLD=fold, num_warps=warps, **launch_options(row),
    )  # fmt: skip
    return made


def gemv(
    x: Tensor | DeferredNorm, weight: Tensor, *, eps: float = 0.0, bias: Tensor | None = None,
    gated: bool = False,
) -> Tensor | None:  # fmt: skip
    """Return the product of x [1, k] and weight [n, k]: [1, n]; None if no block fits the sizes."""
    made = gemv_add_norm(x, weight, None, None, eps=eps, bias=bias, gated=gated)
    return None if made is None else made.total


def supports_gemv(weight: Tensor, *, norm: bool = False, gated: bool = False) -> bool:
    """Return True if `gemv` computes this product; with `norm`, x is a `DeferredNorm`."""
    n, k, scales = weight.shape[0] // (2 if gated else 1), weight.shape[1], count_scales(weight)
    if scales is None:
        return False
    return choose_gemv_block(n, k, norm, gated, scales, device_limits(weight.device)) is not None


@triton.jit
def prefetch(pointers):
    """Prefetch cache lines to L2 without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_product(x, w, total, scale_ptr, SWAP: tl.constexpr, SCALES: tl.constexpr):
    """Return total + x w^T, transposed if SWAP; scale_ptr: of these columns, for block scales."""
    if SCALES > 0 and x.dtype != w.dtype:
        w = w.to(tl.float32).to(x.dtype)  # in pairs: straight to bfloat16 goes one by one
    if SWAP:
        x, w = w, x
    if SCALES > 1:
        scale = tl.load(scale_ptr)
        total += tl.dot(x, tl.trans(w)) * (scale[:, None] if SWAP else scale[None, :])
    else:  # a product of float32 is not shortened to the 19 bits of TF32
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, M, N, K, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[split] [M, N] = x[:, part of K] w[:, part of K]^T; grid (N / BN, M / BM, splits).

    SWAP computes the transpose, so that the weight rows fill the 64 rows of a tensor-core tile.
    EVEN states that BM divides M, so the loop's loads need no mask. FP8 rows of x have a scale
    each.
    """
    cols, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    at, split = tl.program_id(2) * part, tl.program_id(2)
    w_ptr += cols[:, None].to(tl.int64) * K + at
    if PDL:
        gdc_launch_dependents()
        line = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # of 128 bytes
        prefetch(w_ptr + tl.arange(0, AHEAD)[None, :] * line)
        gdc_wait()
    ks, real, groups = tl.arange(0, BK)[None, :], rows[:, None] < M, 2 * N if GATED else N
    x_ptr += rows[:, None].to(tl.int64) * K + at + ks
    w_ptr += ks
    y = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
    up = y
    for k in tl.range(0, tl.minimum(part, K - at), BK, num_stages=STAGES):
        x = tl.load(x_ptr + k) if EVEN else tl.load(x_ptr + k, mask=real, other=0.0)
        scales = scale_ptr + (at + k) // 128 * groups + cols
        y = add_product(x, tl.load(w_ptr + k), y, scales, SWAP, SCALES)
        if GATED:
            up = add_product(x, tl.load(w_ptr + k + N * K), up, scales + N, SWAP, SCALES)
    if SWAP:
        y, up = tl.trans(y), tl.trans(up)
    if x_ptr.dtype.element_ty.primitive_bitwidth == 8:
        x_scale = tl.load(x_scale_ptr + rows[:, None], mask=real, other=0.0)
        y, up = y * x_scale, up * x_scale
    y = apply_epilogue(y, up, scale_ptr, bias_ptr, N, cols, GATED, BIAS, SCALES)
    place = (split * M + rows[:, None]).to(tl.int64) * N + cols[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Tiling:
    """Division of a GEMM into tiles by `rows_kernel`."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool
    splits: int = 1

    def fit(self, x_bytes: int, w_bytes: int, room: int) -> Self:
        """Return these tiles with as many stages as fit into `room` bytes of shared memory."""
        stage = self.bm * x_bytes + self.bn * w_bytes
        return replace(self, stages=max(2, min(self.stages, room // stage)))


# Measured on an H200 in whole layers of Qwen3-0.6B, 8B and 14B: up to FEW_ROWS our kernel, with
# the launches it saves, beats cuBLAS, except for large weights; beyond, only in small GEMMs.
FEW_ROWS = 64
SMALL_FLOPS = 2.5e9
LARGE, LARGE_GATED = 2**26, 2**25  # elements of a weight, or of each half of a gated one


def beats_cublas(m: int, n: int, k: int, gated: bool, split_k: bool) -> bool:
    """Return True if `rows_kernel` beats cuBLAS for x [m, k] by a weight [n, k], or [2 n, k]."""
    if (gated and n * k >= LARGE_GATED) or (m > 32 and n * k >= LARGE):
        return False
    small = 2.0 * m * n * k * (2 if gated else 1) <= SMALL_FLOPS
    return m <= FEW_ROWS or (small and (split_k or m <= 2 * FEW_ROWS))


def find_tuned(
    limits: DeviceLimits, kernel: str, m: int, n: int, k: int, gated: bool, split_k: bool
) -> list[Any] | None:
    """Return the tuned tiles for m, rounded up to a power of two; None if the rule decides."""
    rows, kind = max(16, triton.next_power_of_2(m)), "gated" if gated else "split"
    kind = kind if gated or split_k else "plain"
    return limits.tuned.find(kernel, kind, rows, n, k) if rows <= 256 else None


def count_splits(tiles: Tiling, m: int, n: int, k: int, sms: int) -> int:
    """Return the splits of k that give every SM a thread block: a power of two, at most 8."""
    splits, programs = 1, n // tiles.bn * -(-m // tiles.bm)
    while 2 * programs * splits <= sms and splits < 8 and k % (2 * splits * tiles.bk) == 0:
        splits *= 2
    return splits


def choose_tiling(
    m: int, n: int, k: int, *, gated: bool, split_k: bool, limits: DeviceLimits = H200
) -> Tiling | None:
    """Choose tiles for x [m, k] by a weight [n, k]; None leaves the product to cuBLAS.

    split_k: the caller adds the splits up, so a weight with few rows may be split along k, too.
    limits: those of the GPU.
    """
    if (found := find_tuned(limits, "rows", m, n, k, gated, split_k)) is not None:
        return Tiling(*found) if found else None
    if not beats_cublas(m, n, k, gated, split_k):
        return None
    if m <= 32:
        bm, bn, bk, warps, stages, swap = 16 if m <= 16 else 32, 64, 128, 4, 4 if gated else 6, True
    elif m <= FEW_ROWS and n * k >= 2**24:
        bm, bn, bk, warps, stages, swap = 64, 64, 64, 4, 8, True
    elif m <= FEW_ROWS and n <= 8192:
        bm, bn, bk, warps, stages, swap = 64, 32, 128, 4, 4 if gated else 6, False
    else:
        bm, bn, bk, warps, stages, swap = 64, 64, 128, 4, 4, False
    if n % bn or k % bk:
        return None
    tiles = Tiling(bm, bn, bk, warps, stages, swap)
    if split_k:
        tiles = replace(tiles, splits=count_splits(tiles, m, n, k, limits.sms))
    return tiles.fit(2 * bk, 2 * bk * (2 if gated else 1), limits.shared_memory)


def launch_few_row_gemm(
    x: Tensor, weight: Tensor, out: Tensor, tiles: Tiling, bias: Tensor | None, gated: bool
) -> None:
    """Start `rows_kernel`; out holds `tiles.splits` results [m, n]. x [m or more, k]."""
    splits, (m, n), k = tiles.splits, out.shape[-2:], x.shape[1]
    part = triton.cdiv(k, splits * tiles.bk) * tiles.bk
    least = k - (splits - 1) * part  # columns of the last part
    lines = max(least * weight.itemsize // 128, 1)  # of memory, for a row of the weight
    rows_kernel[(n // tiles.bn, triton.cdiv(m, tiles.bm), splits)](
        x, getattr(x, "scale", x), weight, getattr(weight, "scale", x),
        x if bias is None else bias, out, m, n, k, part,
        BM=tiles.bm, BN=tiles.bn, BK=tiles.bk, GATED=gated, BIAS=bias is not None,
        SCALES=count_scales(weight), SWAP=tiles.swap, EVEN=m % tiles.bm == 0,
        AHEAD=min(8, 1 << lines.bit_length() - 1), STAGES=tiles.stages, num_warps=tiles.warps,
        **launch_options(x),
    )  # fmt: skip


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute silu(gate) * up of one row; grid (rows, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inside = cols < N
    gate = tl.load(gate_up_ptr + row * 2 * N + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + cols, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * N + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up: [m, 2 n] to [m, n]."""
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(m, n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(n))
    silu_mul_kernel[(m, triton.cdiv(n, block))](
        gate_up, out, n, BLOCK=block, num_warps=4, **launch_options(gate_up)
    )
    return out


@singledispatch
def few_row_gemm(
    weight: Tensor, x: Tensor, bias: Tensor | None = None, *, gated: bool = False,
    split_k: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply x [m, k] by weight [n, k] in parts [splits, m, n] to add up, float32 if several.

    gated: of a weight [2 n, k], as `gated_linear`. Other kinds of weights register their own.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    limits = device_limits(x.device)
    tiles = choose_tiling(m, n, k, gated=gated, split_k=split_k, limits=limits)
    if tiles is None:
        y = F.linear(x, weight, bias)
        return (silu_and_mul(y) if gated else y)[None]
    dtype = torch.float32 if tiles.splits > 1 else x.dtype
    out = torch.empty(tiles.splits, m, n, dtype=dtype, device=x.device)
    launch_few_row_gemm(x, weight, out, tiles, bias, gated)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [m, k] by weight [n, k] and add bias [n]: [m, n]."""
    row = gemv(x, weight, bias=bias)
    return few_row_gemm(weight, x, bias)[0] if row is None else row


def split_k_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [m, k] by weight [n, k] in parts [splits, m, n] to add up, float32 if several."""
    row = gemv(x, weight)
    return few_row_gemm(weight, x, split_k=True) if row is None else row[None]


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute silu(x gate^T) * (x up^T) of x [m, k]; weight [2 n, k] holds gate and up: [m, n]."""
    row = gemv(x, weight, gated=True)
    return few_row_gemm(weight, x, gated=True)[0] if row is None else row


@singledispatch
def mlp(down: Tensor, x: Tensor, gate_up: Tensor) -> Tensor:
    """Apply a gated MLP to x [m, k]: parts [splits, m, n], still to be added up."""
    return split_k_linear(gated_linear(x, gate_up), down)
