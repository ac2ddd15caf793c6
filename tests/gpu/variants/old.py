"""Decode attention without a plan: norm, rotation, store, attention and merge in one kernel.

Generated from notebooks/05e_decode_attention.ipynb: edit there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.device import H200, DeviceLimits, device_limits
from minisgl.kernels.pdl import launch_options
from minisgl.kernels.rotate_store import rotate


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def fold(s, v, m, total, acc):
    """Fold scores s [g, t] and values v [t, d] into maximum m, sum `total`, weighted sum acc."""
    new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    old = tl.exp2(m - new)
    total = total * old + tl.sum(p, 1)
    return new, total, acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def attend_cached(
    qa, qb, k_ptr, v_ptr, slots_ptr, begin, end, scale, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax of queries, as halves qa, qb, over the cached positions [begin, end)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half, dims = tl.arange(0, HALF)[None, :], tl.arange(0, HEAD_DIM)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = start + tl.arange(0, TILE)
        inside = positions < end
        slots = tl.load(slots_ptr + positions, mask=inside, other=0).to(tl.int64)[:, None] * stride
        real = inside[:, None]
        ka = tl.load(k_ptr + slots + half, mask=real, other=0.0).to(qa.dtype)
        kb = tl.load(k_ptr + slots + HALF + half, mask=real, other=0.0).to(qa.dtype)
        v = tl.load(v_ptr + slots + dims, mask=real, other=0.0).to(qa.dtype)
        s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        s = tl.dot(qb, tl.trans(kb), s, input_precision="ieee") * scale
        m, total, acc = fold(tl.where(inside[None, :], s, float("-inf")), v, m, total, acc)
    return m, total, acc


@triton.jit
def write_part(part_ptr, stat_ptr, m, total, acc, split, g, real,
               HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Leave an unfinished result where the last program of its group finds it."""
    dims = tl.arange(0, HEAD_DIM)[None, :]
    place = part_ptr + (split * GROUP + g)[:, None] * HEAD_DIM + dims
    tl.store(place, acc, mask=real[:, None])
    tl.store(stat_ptr + split * 2 * GROUP + g, m, mask=real)
    tl.store(stat_ptr + split * 2 * GROUP + GROUP + g, total, mask=real)


@triton.jit
def merge_parts(part_ptr, stat_ptr, count, g, real,
                HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The parts of one request and head, combined in their order; past the first-level cache."""
    dims = tl.arange(0, HEAD_DIM)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for i in range(count):
        stat = stat_ptr + i * 2 * GROUP + g
        m_i = tl.load(stat, mask=real, other=0.0, cache_modifier=".cg")
        total_i = tl.load(stat + GROUP, mask=real, other=1.0, cache_modifier=".cg")
        place = part_ptr + (i * GROUP + g)[:, None] * HEAD_DIM + dims
        acc_i = tl.load(place, mask=real[:, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(m, m_i)
        old, now = tl.exp2(m - new), tl.exp2(m_i - new)
        acc = acc * old[:, None] + acc_i * now[:, None]
        total = total * old + total_i * now
        m = new
    return acc / total[:, None]


class Scratch:
    """Memory for unfinished parts: decode attention runs once at a time, so one is enough."""

    def __init__(self, max_places: int, group: int, head_dim: int, device: torch.device) -> None:
        """`max_places`: most (request, KV head, split) triples of one launch."""
        size = max_places * group
        self.part = torch.empty(size * head_dim, dtype=torch.float32, device=device)
        self.stat = torch.empty(size * 2, dtype=torch.float32, device=device)
        self.done = torch.zeros(max_places, dtype=torch.int32, device=device)


@triton.jit
def finish(part_ptr, stat_ptr, done_ptr, out_ptr, m, total, acc, place, split, count, g, real,
           HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
           SPLITS: tl.constexpr):  # fmt: skip
    """Write the result; with several parts, the program that comes last merges them."""
    out = out_ptr + (place.to(tl.int64) * GROUP + g)[:, None] * HEAD_DIM
    out += tl.arange(0, HEAD_DIM)[None, :]
    if count == 1:
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
    elif SPLITS > 1:
        part_ptr += place.to(tl.int64) * SPLITS * GROUP * HEAD_DIM
        stat_ptr += place.to(tl.int64) * SPLITS * GROUP * 2
        write_part(part_ptr, stat_ptr, m, total, acc, split, g, real, HEAD_DIM, GROUP)
        tl.debug_barrier()  # all threads have written before one of them says so
        before = tl.atomic_add(done_ptr + place, 1, sem="acq_rel")
        if before == count - 1:
            tl.debug_barrier()
            y = merge_parts(part_ptr, stat_ptr, count, g, real, HEAD_DIM, GROUP, ROWS)
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=real[:, None])
            tl.store(done_ptr + place, 0)  # ready for the next layer


@triton.jit
def load_heads(ptr, heads, real, norm_ptr, cos, sin, eps,
               HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Heads [g] of one token as two halves [g, HEAD_DIM / 2], normalised and rotated as asked."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF)[None, :]
    place = ptr + heads[:, None] * HEAD_DIM + dim
    a = tl.load(place, mask=real[:, None], other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=real[:, None], other=0.0).to(tl.float32)
    if ROTATE:
        norm_a, norm_b = cos, sin
        if NORM:
            norm_a = tl.load(norm_ptr + dim).to(tl.float32)
            norm_b = tl.load(norm_ptr + HALF + dim).to(tl.float32)
        a, b = rotate(a, b, norm_a, norm_b, cos, sin, eps, HEAD_DIM, NORM, DTYPE)
    return a.to(DTYPE), b.to(DTYPE)


@triton.jit
def load_angles(table_ptr, position, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr):
    """Cosines and sines [1, HEAD_DIM / 2] of a position; zeros if nothing is to be rotated."""
    if ROTATE:
        half = table_ptr + position * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)[None, :]
        cos, sin = tl.load(half), tl.load(half + HEAD_DIM // 2)
    else:
        cos, sin = 0.0, 0.0
    return cos, sin


@triton.jit
def add_new_token(
    qa, qb, k_ptr, v_ptr, head, k_norm_ptr, cos, sin, eps, k_cache_ptr, v_cache_ptr, slot,
    scale, k_scale, v_scale, m, total, acc,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Store the new key and value at their slot, and fold them in, as if they were read back."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half, dims, one = tl.arange(0, HALF)[None, :], tl.arange(0, HEAD_DIM), tl.arange(0, 1)
    k_cache_ptr += slot + head * HEAD_DIM
    v_cache_ptr += slot + head * HEAD_DIM
    CACHE: tl.constexpr = k_cache_ptr.dtype.element_ty
    ka, kb = load_heads(
        k_ptr, head + one, one == 0, k_norm_ptr, cos, sin, eps, HEAD_DIM, NORM, ROTATE, qa.dtype
    )
    ka, kb = (ka.to(tl.float32) / k_scale).to(CACHE), (kb.to(tl.float32) / k_scale).to(CACHE)
    tl.store(k_cache_ptr + half, ka)
    tl.store(k_cache_ptr + HALF + half, kb)
    v = (tl.load(v_ptr + head * HEAD_DIM + dims).to(tl.float32) / v_scale).to(CACHE)
    tl.store(v_cache_ptr + dims, v)
    s = tl.sum(qa.to(tl.float32) * ka.to(tl.float32), 1)
    s = (s + tl.sum(qb.to(tl.float32) * kb.to(tl.float32), 1)) * scale
    new = tl.maximum(m, s)
    p, old = tl.exp2(s - new), tl.exp2(m - new)
    acc = acc * old[:, None] + p[:, None] * v.to(tl.float32)[None, :]
    return new, total * old + p, acc


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, table_ptr, k_cache_ptr, v_cache_ptr,
    page_table_ptr, rows_ptr, positions_ptr, slots_ptr, part_ptr, stat_ptr, done_ptr, out_ptr,
    q_stride, k_stride, v_stride, page_table_stride, scale, k_scale, v_scale, eps, shortest,
    KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one request's keys for one KV head; grid (kv heads, requests, SPLITS)."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    position = tl.load(positions_ptr + request)
    length = (position + 1).to(tl.int32)
    part = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE, shortest)
    count = tl.cdiv(length, part)
    if split < count:
        g = tl.arange(0, ROWS)
        real, begin, end = g < GROUP, split * part, tl.minimum((split + 1) * part, length - 1)
        cos, sin = load_angles(table_ptr, position, HEAD_DIM, ROTATE)
        slots_of_row = page_table_ptr + tl.load(rows_ptr + request) * page_table_stride
        if PDL:
            gdc_wait()
        qa, qb = load_heads(q_ptr + request.to(tl.int64) * q_stride, head * GROUP + g, real,
                            q_norm_ptr, cos, sin, eps, HEAD_DIM, NORM, ROTATE,
                            q_ptr.dtype.element_ty)  # fmt: skip
        m, total, acc = attend_cached(
            qa, qb, k_cache_ptr + head * HEAD_DIM, v_cache_ptr + head * HEAD_DIM, slots_of_row,
            begin, end, scale, KV * HEAD_DIM, ROWS, HEAD_DIM, TILE, STAGES,
        )  # fmt: skip
        if split == count - 1:
            m, total, acc = add_new_token(
                qa, qb, k_ptr + request.to(tl.int64) * k_stride,
                v_ptr + request.to(tl.int64) * v_stride, head, k_norm_ptr, cos, sin, eps,
                k_cache_ptr, v_cache_ptr, tl.load(slots_ptr + request) * (KV * HEAD_DIM), scale,
                k_scale, v_scale, m, total, acc, HEAD_DIM, NORM, ROTATE,
            )  # fmt: skip
        finish(part_ptr, stat_ptr, done_ptr, out_ptr, m, total, acc * v_scale, request * KV + head,
               split, count, g, real, HEAD_DIM, GROUP, ROWS, SPLITS)  # fmt: skip


# (TILE, warps, stages) for heads of 128 in 16 bits; the most such programs that registers of an
# SM hold, and the shared memory of one, in bytes
TILES = ((128, 4, 2), (3, 73_728)), ((64, 2, 2), (4, 38_912)), ((32, 1, 6), (6, 37_376))


def waves(limits: DeviceLimits) -> list[tuple[tuple[int, int, int], int]]:
    """The shapes that a GPU can run, and how many such programs it runs at once."""
    counted = [(shape, limits.at_once(*needs)) for shape, needs in TILES]
    return [(shape, count) for shape, count in counted if count]


def splits_of(batch_size: int, num_kv_heads: int, limits: DeviceLimits = H200) -> tuple[int, int]:
    """Into how many parts to split keys at most, and the least length of a part, in tokens.

    Few requests are split until the GPU is full, and at least in two while one wave of the largest
    tiles holds them; more of them only where one request is very long.
    """
    programs = batch_size * num_kv_heads
    if programs > waves(limits)[0][1]:
        return 2, 2048
    full = 1 << (2 * limits.sms).bit_length() - 1
    return max(2, min(16, triton.next_power_of_2(triton.cdiv(full, programs)))), 1


def tile_of(
    batch_size: int, num_kv_heads: int, head_dim: int, itemsize: int, limits: DeviceLimits = H200
) -> tuple[int, ...]:
    """(TILE, warps, stages): the largest that runs all programs in one wave, else the smallest."""
    programs = batch_size * num_kv_heads
    shapes = waves(limits)
    fitting = [shape for shape, at_once in shapes if programs <= at_once]
    tile, warps, stages = fitting[0] if fitting else shapes[-1][0]
    return max(16, tile * 256 // max(256, head_dim * itemsize)), warps, stages


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor,
    rows: Tensor, positions: Tensor, out_loc: Tensor, scratch: Scratch, scale: float, *,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, table: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:  # fmt: skip
    """One new token per request: store its k and v, attend to all before it and to itself.

    q [bs, qo, d], k, v [bs, kv, d]; tokens may lie at any stride. page_table int32 [rows, max_len];
    rows, positions, out_loc int64 [bs]. With `table` (and `norms`) q and k come raw from their
    projection, and are normalised and rotated here. Returns [bs, qo, d].

    positions, rows and table are read before the kernel in front has ended: an ordinary launch must
    lie between the kernel that writes them and this one.
    """
    bs, qo, dim = q.shape
    kv = k.shape[1]
    limits = device_limits(q.device)
    splits, shortest = splits_of(bs, kv, limits)
    tile, warps, stages = tile_of(bs, kv, dim, q.element_size(), limits)
    out = torch.empty(bs, qo, dim, dtype=q.dtype, device=q.device)
    q_norm, k_norm = norms if norms is not None else (q, q)
    decode_kernel[(kv, bs, splits)](
        q, k, v, q_norm, k_norm, q if table is None else table, k_cache, v_cache,
        page_table, rows, positions, out_loc, scratch.part, scratch.stat, scratch.done, out,
        q.stride(0), k.stride(0), v.stride(0), page_table.stride(0),
        scale * kv_scales[0] * 1.4426950408889634, *kv_scales, eps, shortest, KV=kv,
        GROUP=qo // kv, ROWS=max(16, triton.next_power_of_2(qo // kv)),
        HEAD_DIM=dim, TILE=tile, SPLITS=splits, STAGES=stages, NORM=norms is not None,
        ROTATE=table is not None, num_warps=warps, **launch_options(q),
    )  # fmt: skip
    return out
