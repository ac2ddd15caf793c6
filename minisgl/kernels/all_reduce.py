"""All-reduce by peer-memory writes, fused with the residual and RMSNorm.

Generated from notebooks/10a_gpu_all_reduce.ipynb: edit there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.pdl import launch_options

MAX_ROWS, MAX_WIDTH = 256, 16384  # more would not all run at once; wider does not fit a block
BITS = {2: tl.int16, 4: tl.int32}  # by the bytes of a number


class PeerBuffers(NamedTuple):
    """Memory through which the ranks exchange rows of one width and dtype."""

    addresses: Tensor  # int64 [size]: every rank's buffer [3, size, MAX_ROWS, width]
    turns: Tensor  # int32 [MAX_ROWS]: which third a row takes next
    quit: Tensor  # int32 [1]: 1 ends all waiting
    rank: int
    width: int


def empty_entry(dtype: torch.dtype) -> int:
    """Return the bits of minus zero as an integer: it marks an entry that has not arrived."""
    return -(1 << (8 * dtype.itemsize - 1))


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def exchange_row(
    x, here, addresses_ptr, turns_ptr, quit_ptr, row, rows, cols, inside, WIDTH,
    RANK: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Sum a row over the ranks in order, float32; each rank writes its part to the others."""
    bits = x.to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    turn = tl.load(turns_ptr + row)
    part = rows.to(tl.int64) * WIDTH
    now = (turn * SIZE * rows + row) * WIDTH + cols
    before = ((turn + 2) % 3 * SIZE * rows + row) * WIDTH + cols
    here = tl.multiple_of(here.to(tl.pointer_type(BITS)), 16)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            there = tl.load(addresses_ptr + peer).to(tl.pointer_type(BITS))
            tl.store(tl.multiple_of(there, 16) + RANK * part + now, bits, mask=inside)
            tl.store(here + peer * part + before, EMPTY, mask=cols < WIDTH)
    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        got = bits
        if peer != RANK:
            got = tl.load(here + peer * part + now, mask=inside, other=0, volatile=True)
            while tl.max((got == EMPTY).to(tl.int32), 0) > tl.load(quit_ptr, volatile=True):
                got = tl.load(here + peer * part + now, mask=inside, other=0, volatile=True)
        total += got.to(x.dtype, bitcast=True).to(tl.float32)
    tl.store(turns_ptr + row, (turn + 1) % 3)
    return total


@triton.jit(do_not_specialize=["M"])
def all_reduce_kernel(
    parts_ptr, residual_ptr, sum_ptr, norm_ptr, out_ptr, addresses_ptr, turns_ptr, quit_ptr,
    M, N, rows, WIDTH, eps, RANK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add one row of all ranks' parts and the residual; with NORM, also store its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    here = tl.load(addresses_ptr + RANK)
    if PDL:
        gdc_launch_dependents()
    if NORM:  # it depends on nothing
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    if NORM:
        before = tl.load(residual_ptr + row * N + cols, mask=inside, other=0.0)
    x = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * M + row) * N + cols
        x += tl.load(parts_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = exchange_row(
        x.to(sum_ptr.dtype.element_ty), here, addresses_ptr, turns_ptr, quit_ptr, row, rows, cols,
        inside, WIDTH, RANK, SIZE, BITS, EMPTY,
    )  # fmt: skip
    if NORM:
        total += before.to(tl.float32)
    rounded = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * N + cols, rounded, mask=inside)
    if NORM:
        y = rounded.to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 0) / N + eps)
        y *= weight.to(tl.float32)
        tl.store(out_ptr + row * N + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    parts: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float, peers: PeerBuffers,
    out: Tensor, total: Tensor,
) -> None:  # fmt: skip
    """Start the kernel over parts [p, m, n]; it writes `out` and `total` [m, n]."""
    m, n = total.shape
    size, rows = len(peers.addresses), len(peers.turns)
    block = triton.next_power_of_2(peers.width)
    all_reduce_kernel[(m,)](
        parts, total if residual is None else residual, total, total if norm is None else norm, out,
        peers.addresses, peers.turns, peers.quit, m, n, rows, peers.width, eps, RANK=peers.rank,
        SIZE=size, PARTS=len(parts), NORM=norm is not None, BITS=BITS[total.itemsize],
        EMPTY=empty_entry(total.dtype), BLOCK=block, num_warps=max(4, min(16, block // 256)),
        **launch_options(total),
    )  # fmt: skip


def all_reduce(x: Tensor, peers: PeerBuffers) -> Tensor:
    """Sum x [m, n] over the ranks into new memory."""
    total = torch.empty_like(x)
    launch(x[None], None, None, 0.0, peers, total, total)
    return total


def all_reduce_add_norm(
    parts: Tensor, residual: Tensor, norm: Tensor, eps: float, peers: PeerBuffers
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of the sum, the sum) of all ranks' parts [p, m, n] and residual [m, n]."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    launch(parts, residual, norm, eps, peers, out, total)
    return out, total
