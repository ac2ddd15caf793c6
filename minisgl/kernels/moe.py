"""Experts on a GPU: (token, expert) pairs in blocks, and two grouped GEMMs over them.

Generated from notebooks/11b_moe_kernels.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.fp8 import Fp8Weight
from minisgl.kernels.device import device_limits
from minisgl.kernels.linear import (
    FEW_ROWS,
    Tiling,
    add_product,
    apply_epilogue,
    count_scales,
    prefetch,
)
from minisgl.kernels.pdl import launch_options


@triton.jit
def top_experts(
    logits_ptr, tokens, N, E, most,
    SPLITS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return each expert's place among a token's choices (or TOP_K) and weight: [tokens, WIDTH]."""
    experts = tl.arange(0, WIDTH)[None, :]
    inside = (tokens[:, None] < N) & (experts < E)
    logits = tl.zeros([tokens.shape[0], WIDTH], tl.float32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=4):
        place = (split * N + tokens[:, None]) * E + experts
        logits += tl.load(logits_ptr + place, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where(experts < E, logits, float("-inf"))
    left, choice = logits, tl.full([tokens.shape[0], WIDTH], TOP_K, tl.int32)
    # `most` is no less than TOP_K: Triton 3.6 fails on a loop that has exactly one iteration.
    for i in range(tl.minimum(TOP_K, most)):
        equal = left == tl.max(left, 1)[:, None]
        best = experts == tl.min(tl.where(equal, experts, WIDTH), 1)[:, None]  # the first of them
        choice = tl.where(best, i, choice)
        left = tl.where(best, float("-inf"), left)
    scores = tl.exp(logits - tl.max(logits, 1)[:, None])
    if NORMALIZE:
        scores = tl.where(choice < TOP_K, scores, 0.0)
    choice = tl.where(tokens[:, None] < N, choice, TOP_K)
    return choice, scores / tl.sum(scores, 1)[:, None]


@triton.jit
def sum_counts(counts_ptr, part, parts, WIDTH: tl.constexpr):
    """Sum each expert's (token, choice) pairs over all parts, and over those before `part`."""
    experts, some = tl.arange(0, WIDTH)[None, :], tl.arange(0, 16)[:, None]
    total, before = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    for first in range(0, parts, 16):
        others = first + some
        counts = tl.load(counts_ptr + others * WIDTH + experts, mask=others < parts, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(others < part, counts, 0), 0)
    return total, before


@triton.jit(do_not_specialize=["N", "first", "parts", "num_blocks"])
def align_kernel(
    logits_ptr, counts_ptr, pairs_ptr, weights_ptr, experts_ptr, rows_ptr,
    N, E, first, local, parts, num_blocks,
    SPLITS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Put the pairs of `TOKENS` tokens into blocks of `SIZE`; if COUNT, only count by expert."""
    part = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    choice, weights = top_experts(
        logits_ptr, tokens, N, E, num_blocks, SPLITS, TOP_K, NORMALIZE, WIDTH
    )
    experts, chosen = tl.arange(0, WIDTH), choice < TOP_K
    total = tl.sum(chosen.to(tl.int32), 0)
    if COUNT:
        tl.store(counts_ptr + part * WIDTH + experts, total)
    else:
        before = tl.zeros([WIDTH], tl.int32)
        if not ALONE:
            total, before = sum_counts(counts_ptr, part, parts, WIDTH)
        blocks = (total + SIZE - 1) // SIZE
        ends = tl.cumsum(blocks, 0)
        starts = (ends - blocks) * SIZE + before  # of this part's tokens
        place = starts[None, :] + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + place, tokens[:, None] * TOP_K + choice, mask=chosen)
        tl.store(weights_ptr + place, weights, mask=chosen)
        for j in range(part, tl.max(blocks, 0), parts):  # the j-th block of every expert
            block, inside = ends - blocks + j, j < blocks
            here = (experts >= first) & (experts < first + local)
            tl.store(experts_ptr + block, tl.where(here, experts - first, -1), mask=inside)
            tl.store(rows_ptr + block, tl.minimum(total - j * SIZE, SIZE), mask=inside)
        for base in range(tl.max(ends, 0) + part * WIDTH, num_blocks, parts * WIDTH):
            tl.store(rows_ptr + base + experts, 0, mask=base + experts < num_blocks)  # unused


@dataclass(frozen=True)
class Blocks:
    """(Token, expert) pairs, sorted by expert; each expert begins a new block of `size`.

    pairs, weights [blocks * size]: `token * top_k + choice`, and its weight; undefined beyond the
    rows of a block. experts, rows [blocks]: a block's expert (-1: of another rank) and its number
    of pairs (0: the block is not used).
    """

    pairs: Tensor
    weights: Tensor
    experts: Tensor
    rows: Tensor
    size: int


def max_blocks(pairs: int, experts: int, size: int) -> int:
    """Return the most blocks that `pairs` can need: each expert's last may hold one pair."""
    return (pairs + min(pairs, experts) * (size - 1)) // size


def tokens_of_program(n: int) -> int:
    """Return the number of tokens per thread block of `align_kernel`, a power of two."""
    if n <= 16:
        return int(triton.next_power_of_2(n))  # all, so that no counting launch is needed
    return 8 if n <= 512 else 32


def align(
    logits: Tensor, top_k: int, normalize: bool, size: int, first: int = 0, local: int | None = None
) -> Blocks:
    """Route tokens and sort them into blocks: logits [splits, n, experts], summed over splits.

    The choices of a token are in the order of their weights. The host does not wait for the device.
    This rank has `local` experts (None: all) from `first` on; blocks count from there.
    """
    (splits, n, experts), device = logits.shape, logits.device
    count = max_blocks(n * top_k, experts, size)
    tokens = tokens_of_program(n)
    parts = triton.cdiv(n, tokens)
    width = triton.next_power_of_2(experts)
    pairs, owners, rows, counts = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in (count * size, count, count, parts * width)
    )
    weights = torch.empty(count * size, dtype=torch.float32, device=device)
    for counting in (False,) if parts == 1 else (True, False):
        align_kernel[(parts,)](
            logits, counts, pairs, weights, owners, rows, n, experts, first,
            experts if local is None else local, parts, count, SPLITS=splits, TOP_K=top_k,
            NORMALIZE=normalize, WIDTH=width, TOKENS=tokens, SIZE=size, COUNT=counting,
            ALONE=parts == 1, num_warps=min(8, tokens), **launch_options(logits),
        )  # fmt: skip
    return Blocks(pairs, weights, owners, rows, size)


@triton.jit
def expert_tile(
    x_ptr, w_ptr, scale_ptr, real, OUT, K, depth, GATED: tl.constexpr, SCALES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute [BM, BN] of x w^T over `depth` columns; if GATED, also of the rows `OUT` further."""
    y = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
    up, stride = y, 2 * OUT if GATED else OUT
    for k in tl.range(0, depth, BK, num_stages=STAGES):
        x = tl.load(x_ptr + k, mask=real[:, None], other=0.0)
        scales = scale_ptr + k // 128 * stride
        y = add_product(x, tl.load(w_ptr + k), y, scales, SWAP, SCALES)
        if GATED:
            up = add_product(x, tl.load(w_ptr + k + OUT * K), up, scales + OUT, SWAP, SCALES)
    if SWAP:
        y, up = tl.trans(y), tl.trans(up)
    return y, up


@triton.jit
def wait_then_launch():
    """Wait for earlier kernels, then launch the next one, which may read their results."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit(do_not_specialize=["N"])
def expert_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, pairs_ptr, weights_ptr, experts_ptr, rows_ptr, N, OUT, K,
    TOP_K: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALES: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs by their expert; grid (OUT / BN, blocks); out [TOP_K, N, OUT].

    GATED: x has the order of the tokens, w holds gate and up, and out has the order of the blocks.
    """
    if GATED and PDL:
        wait_then_launch()  # the second GEMM reads the blocks before its wait
    block = tl.program_id(1)
    count, expert = tl.load(rows_ptr + block), tl.load(experts_ptr + block).to(tl.int64)
    away = expert < 0  # of another rank: only zeros for its part of the sum
    if (count == 0) | (away & GATED):
        return
    cols, ks = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    row = tl.maximum(expert, 0) * (2 * OUT if GATED else OUT)  # the first of this expert
    w_ptr += (row + cols[:, None]) * K
    line = tl.arange(0, BM)
    real, place = line < count, block * BM + line
    pair = tl.load(pairs_ptr + place, mask=real, other=0)
    if PDL and not GATED:
        gdc_launch_dependents()
        prefetch(w_ptr + tl.arange(0, AHEAD)[None, :] * 64)
        gdc_wait()
    x_ptr += (pair // TOP_K if GATED else place)[:, None].to(tl.int64) * K + ks[None, :]
    w_ptr, depth = w_ptr + ks[None, :], tl.where(away, 0, K)
    scale_ptr += row * SCALES
    y, up = expert_tile(
        x_ptr, w_ptr, scale_ptr + cols, real, OUT, K, depth, GATED, SCALES, BM, BN, BK, SWAP, STAGES
    )
    y = apply_epilogue(y, up, scale_ptr, x_ptr, OUT, cols, GATED, False, SCALES)
    if not GATED:
        y *= tl.load(weights_ptr + place, mask=real, other=0.0)[:, None]
        place = (pair % TOP_K) * N + pair // TOP_K
    place = place[:, None].to(tl.int64) * OUT + cols[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real[:, None])


# (largest average of pairs per expert, tiles of the first GEMM, of the second)
TILINGS = (
    (8, Tiling(16, 64, 128, 4, 3, True), Tiling(16, 64, 128, 4, 4, True)),
    (24, Tiling(32, 64, 64, 4, 3, True), Tiling(32, 64, 128, 4, 3, True)),
    (48, Tiling(64, 64, 64, 4, 4, False), Tiling(64, 64, 64, 4, 4, False)),
    (float("inf"), Tiling(128, 128, 64, 8, 3, False), Tiling(128, 256, 64, 8, 3, False)),
)
# The same for FP8 weights, which are widened; two warps as in `choose_fp8_tiling`.
SMALL = Tiling(16, 64, 128, 2, 4, True)
FP8_TILINGS = (
    (2, Tiling(16, 32, 128, 2, 6, True), SMALL),
    (24, SMALL, SMALL),
    (128, Tiling(64, 64, 64, 4, 4, False), Tiling(64, 128, 128, 4, 3, True)),
    (float("inf"), Tiling(128, 64, 64, 4, 4, False), Tiling(128, 128, 64, 8, 3, False)),
)


def known_scales(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight, dequantized to `dtype` if the kernel does not support its scales."""
    if isinstance(weight, Fp8Weight) and count_scales(weight) is None:
        return weight.dequantized(dtype)
    return weight


def fit_tiling(tiles: Tiling, out: int, k: int, gated: bool, room: int, itemsize: int) -> Tiling:
    """Return tiles that divide a weight [out, k], with as many stages as fit `room` bytes."""
    bn, bk = min(tiles.bn, out & -out), min(tiles.bk, k & -k)
    if min(bn, bk) < 16:
        raise ValueError(f"moe: sizes of experts must be multiples of 16, got {out} and {k}")
    while 2 * (tiles.bm + bn * (2 if gated else 1)) * bk * itemsize > room and bn > 16:
        bn //= 2  # two stages must fit
    row = bk * itemsize
    return replace(tiles, bn=bn, bk=bk).fit(row, 2 * row if gated else row, room)


def prefetch_lines(k: int) -> int:
    """Return the cache lines of a 16-bit row of k to prefetch: a power of two, at most 8."""
    return max(1, min(8, triton.next_power_of_2(k // 64 + 1) // 2))


def launch_experts(x: Tensor, w: Tensor, out: Tensor, blocks: Blocks, tiles: Tiling, top_k: int,
                   gated: bool) -> None:  # fmt: skip
    """Start `expert_kernel`; out [rows, width] in the order of blocks, or [top_k, n, hidden]."""
    width, k = out.shape[-1], w.shape[-1]
    expert_kernel[(width // tiles.bn, len(blocks.rows))](
        x, w, getattr(w, "scale", x), out, blocks.pairs, blocks.weights, blocks.experts,
        blocks.rows, out.shape[-2], width, k, TOP_K=top_k, GATED=gated, BM=tiles.bm, BN=tiles.bn,
        BK=tiles.bk, SCALES=count_scales(w), SWAP=tiles.swap, STAGES=tiles.stages,
        AHEAD=prefetch_lines(k), num_warps=tiles.warps, **launch_options(x),
    )  # fmt: skip


def expert_parts(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool, *,
    first: int = 0, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """Compute each token's weighted outputs by choice: [top_k, n, hidden], still to be summed.

    x [n, hidden]; logits [splits, n, experts]; gate_up [local, 2 width, hidden] and
    down [local, hidden, width]: of the experts from `first` on; others give zeros. fixed: use the
    same tiles for every n, so that no token depends on the others.
    """
    n, (local, hidden, width) = len(x), down.shape
    average = 0.0 if fixed else n * top_k / logits.shape[-1]
    gate_up, down = (known_scales(w, x.dtype) for w in (gate_up, down))
    table = FP8_TILINGS if count_scales(gate_up) else TILINGS
    in_tiles, out_tiles = next(tiles for most, *tiles in table if average <= most)
    room, itemsize = device_limits(x.device).shared_memory, x.element_size()
    in_tiles = fit_tiling(in_tiles, width, hidden, True, room, itemsize)
    out_tiles = fit_tiling(out_tiles, hidden, width, False, room, itemsize)
    blocks = align(logits, top_k, normalize, in_tiles.bm, first, local)
    mid = torch.empty(len(blocks.pairs), width, dtype=x.dtype, device=x.device)
    launch_experts(x, gate_up, mid, blocks, in_tiles, top_k, gated=True)
    dtype = torch.float32 if fixed or n <= FEW_ROWS else x.dtype
    parts = torch.empty(top_k, n, hidden, dtype=dtype, device=x.device)
    launch_experts(mid, down, parts, blocks, out_tiles, top_k, gated=False)
    return parts


def expert_sum(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool, *,
    first: int = 0, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """Sum the experts' outputs: [n, hidden]; in one order for every n if `fixed`."""
    how = top_k, normalize
    parts = expert_parts(x, logits, gate_up, down, *how, first=first, fixed=fixed)
    y: Tensor = sum(parts.unbind()) if fixed else parts.sum(0)  # type: ignore[assignment]
    return y.to(x.dtype)
