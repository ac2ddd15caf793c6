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
def online_softmax_update(s, v, m, total, acc):
    """Update maximum m, sum `total` and weighted sum acc with scores s [g, t], values v [t, d]."""
    new = tl.maximum(m, tl.max(s, 1))
    p, old = tl.exp2(s - new[:, None]), tl.exp2(m - new)
    total = total * old + tl.sum(p, 1)
    return new, total, acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def load_tile(k_ptr, v_ptr, slots_ptr, start, end, stride,
              HEAD_DIM: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Load a tile of keys, as two halves, and values; positions from `end` on repeat the last."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half, dims = tl.arange(0, HALF)[None, :], tl.arange(0, HEAD_DIM)[None, :]
    positions = tl.maximum(tl.minimum(start + tl.arange(0, TILE), end - 1), 0)
    slots = tl.load(slots_ptr + positions).to(tl.int64)[:, None] * stride
    ka, kb = tl.load(k_ptr + slots + half), tl.load(k_ptr + slots + HALF + half)
    return ka, kb, tl.load(v_ptr + slots + dims)


@triton.jit
def attend_tile(qa, qb, ka, kb, v, start, end, scale, m, total, acc, TILE: tl.constexpr):
    """Attend to a loaded tile of positions from `start`; mask those from `end` on."""
    ka, kb, v = ka.to(qa.dtype), kb.to(qa.dtype), v.to(qa.dtype)
    s = tl.dot(qa, tl.trans(ka), input_precision="ieee")
    s = tl.dot(qb, tl.trans(kb), s, input_precision="ieee") * scale
    inside = start + tl.arange(0, TILE)[None, :] < end
    return online_softmax_update(tl.where(inside, s, float("-inf")), v, m, total, acc)


@triton.jit
def attend_cached(qa, qb, m, total, acc, k_ptr, v_ptr, slots_ptr, begin, end, scale, stride,
                  HEAD_DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Attend to the cached positions [begin, end) with the queries' halves qa, qb."""
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        ka, kb, v = load_tile(k_ptr, v_ptr, slots_ptr, start, end, stride, HEAD_DIM, TILE)
        m, total, acc = attend_tile(qa, qb, ka, kb, v, start, end, scale, m, total, acc, TILE)
    return m, total, acc


@triton.jit
def write_partial(part_ptr, stat_ptr, m, total, acc, split, g, real,
               HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Store a partial result in scratch memory for the last program of its group."""
    dims = tl.arange(0, HEAD_DIM)[None, :]
    place = part_ptr + (split * GROUP + g)[:, None] * HEAD_DIM + dims
    tl.store(place, acc, mask=real[:, None])
    tl.store(stat_ptr + split * 2 * GROUP + g, m, mask=real)
    tl.store(stat_ptr + split * 2 * GROUP + GROUP + g, total, mask=real)


@triton.jit
def merge_partials(part_ptr, stat_ptr, count, g, real, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
                ROWS: tl.constexpr, MERGE: tl.constexpr):  # fmt: skip
    """Merge the split-KV parts of one request and KV head, MERGE at a time: [ROWS, HEAD_DIM]."""
    zeros = tl.zeros([ROWS], tl.float32)
    m, total, acc = zeros - 1e30, zeros, tl.zeros([ROWS, HEAD_DIM], tl.float32)
    stat_ptr += g
    part_ptr += g[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    for first in range(0, count, MERGE):
        old, left = m, (count - first) * GROUP
        for i in tl.static_range(MERGE):
            here = g < tl.minimum(left - i * GROUP, GROUP)
            m_i = tl.load(stat_ptr + i * 2 * GROUP, here, float("-inf"), cache_modifier=".cg")
            m = tl.maximum(m, m_i)
        total, acc = total * tl.exp2(old - m), acc * tl.exp2(old - m)[:, None]
        for i in tl.static_range(MERGE):
            here, stat = g < tl.minimum(left - i * GROUP, GROUP), stat_ptr + i * 2 * GROUP
            now = tl.exp2(tl.load(stat, here, float("-inf"), cache_modifier=".cg") - m)
            total += tl.load(stat + GROUP, here, 0.0, cache_modifier=".cg") * now
            place = part_ptr + i * GROUP * HEAD_DIM
            acc += tl.load(place, here[:, None], 0.0, cache_modifier=".cg") * now[:, None]
        stat_ptr, part_ptr = stat_ptr + MERGE * 2 * GROUP, part_ptr + MERGE * GROUP * HEAD_DIM
    return acc / tl.where(real, total, 1.0)[:, None]


class Scratch:
    """Memory for partial results; decode attention runs one at a time, so one is enough."""

    def __init__(self, max_places: int, group: int, head_dim: int, device: torch.device) -> None:
        """Allocate float32 memory for `max_places` (request, KV head, split) triples a launch."""
        size = max_places * group
        self.part = torch.empty(size * head_dim, dtype=torch.float32, device=device)
        self.stat = torch.empty(size * 2, dtype=torch.float32, device=device)
        self.done = torch.zeros(max_places, dtype=torch.int32, device=device)


@triton.jit
def write_output(part_ptr, stat_ptr, done_ptr, out_ptr, m, total, acc, place, first, split, count,
                 g, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, MERGE: tl.constexpr):  # fmt: skip
    """Write the result at `place`; of several parts, from `first` on, the last program merges."""
    dims = tl.arange(0, HEAD_DIM)[None, :]
    out_ptr += place.to(tl.int64) * GROUP * HEAD_DIM
    if count == 1:
        y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g[:, None] * HEAD_DIM + dims, y, mask=g[:, None] < GROUP)
    else:
        part_ptr += first.to(tl.int64) * GROUP * HEAD_DIM
        stat_ptr += first.to(tl.int64) * GROUP * 2
        write_partial(part_ptr, stat_ptr, m, total, acc, split, g, g < GROUP, HEAD_DIM, GROUP)
        tl.debug_barrier()  # all threads have written before one of them counts this program
        before = tl.atomic_add(done_ptr + place, 1, sem="acq_rel")
        if before == count - 1:
            tl.debug_barrier()
            FEW: tl.constexpr = triton.next_power_of_2(GROUP)
            few = tl.arange(0, FEW)
            y = merge_partials(part_ptr, stat_ptr, count, few, few < GROUP, HEAD_DIM, GROUP, FEW,
                            MERGE).to(out_ptr.dtype.element_ty)  # fmt: skip
            tl.store(out_ptr + few[:, None] * HEAD_DIM + dims, y, mask=few[:, None] < GROUP)
            tl.store(done_ptr + place, 0)  # ready for the next layer


@triton.jit
def load_heads(ptr, heads, real, norm_ptr, cos, sin, eps,
               HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Load heads [g] of a token as two halves [g, HEAD_DIM / 2]; normalise and rotate if asked."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NORM: tl.constexpr = norm_ptr is not None
    dim = tl.arange(0, HALF)[None, :]
    place = ptr + heads[:, None] * HEAD_DIM + dim
    a = tl.load(place, mask=real[:, None], other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=real[:, None], other=0.0).to(tl.float32)
    if cos is not None:
        norm_a, norm_b = cos, sin
        if NORM:
            norm_a = tl.load(norm_ptr + dim).to(tl.float32)
            norm_b = tl.load(norm_ptr + HALF + dim).to(tl.float32)
        a, b = rotate(a, b, norm_a, norm_b, cos, sin, eps, HEAD_DIM, NORM, DTYPE)
    return a.to(DTYPE), b.to(DTYPE)


@triton.jit
def load_angles(table_ptr, position, HEAD_DIM: tl.constexpr):
    """Load cosines and sines [1, HEAD_DIM / 2] of a position."""
    half = table_ptr + position * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)[None, :]
    return tl.load(half), tl.load(half + HEAD_DIM // 2)


@triton.jit
def add_new_token(qa, qb, k_ptr, v_ptr, head, k_norm_ptr, cos, sin, eps, k_cache_ptr, v_cache_ptr,
                  slot, scale, k_scale, v_scale, m, total, acc,
                  HEAD_DIM: tl.constexpr):  # fmt: skip
    """Store the new key and value at their slot, and attend to them as if read back."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half, dims, one = tl.arange(0, HALF)[None, :], tl.arange(0, HEAD_DIM), tl.arange(0, 1)
    k_cache_ptr += slot
    v_cache_ptr += slot
    CACHE: tl.constexpr = k_cache_ptr.dtype.element_ty
    ka, kb = load_heads(k_ptr, head + one, one == 0, k_norm_ptr, cos, sin, eps, HEAD_DIM,
                        k_ptr.dtype.element_ty)  # fmt: skip
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
def split_kv(positions_ptr, batch_size, parts, program, BATCH: tl.constexpr, TILE: tl.constexpr):
    """Return (request, split, splits, keys of a split, length); split may lie beyond the last."""
    i = tl.arange(0, BATCH)
    lens = tl.load(positions_ptr + i, mask=i < batch_size, other=-1).to(tl.int32) + 1
    share = tl.maximum(tl.cdiv(tl.sum(lens, 0), parts), TILE)
    spare = share - 1 if BATCH == 1 else 0  # one request alone is rounded up
    counts = tl.maximum((lens + spare) // share, 1)
    request = tl.sum((tl.cumsum(counts, 0) <= program).to(tl.int32), 0)
    length = tl.sum(tl.where(i == request, lens, 0), 0)
    first = tl.sum(tl.where(i < request, counts, 0), 0)
    part = tl.cdiv(tl.cdiv(length, tl.maximum((length + spare) // share, 1)), TILE) * TILE
    return request, program - first, tl.cdiv(length, tl.maximum(part, 1)), part, length


Shape = tuple[int, int, int, bool]
# (TILE, warps, stages, early), heads of 128 in 16 bits; the most such programs that an SM should
# have, and the shared memory of one, in bytes. early: the first tile is loaded before the wait
SMALL = (64, 4, 2, True), (3, 38_912)  # for very few requests
SHAPES = (
    ((128, 4, 2, True), (2, 73_728)), ((128, 4, 2, False), (3, 73_728)),
    ((64, 2, 2, False), (4, 38_912)), ((32, 1, 6, False), (6, 37_376)),
)  # fmt: skip
FP8_SHAPES = SHAPES[0], ((32, 1, 6, False), (10, 20_736))


def tile_shapes(limits: DeviceLimits, itemsize: int = 2) -> list[tuple[Shape, int]]:
    """List the tile shapes that a GPU can run, each with its number of resident thread blocks."""
    shapes = FP8_SHAPES if itemsize == 1 else SHAPES
    return [(shape, count) for shape, needs in shapes if (count := limits.resident_blocks(*needs))]


def choose_shape(
    bs: int, kv: int, limits: DeviceLimits = H200, itemsize: int = 2
) -> tuple[Shape, int]:
    """Choose the tile shape, and the number of splits of a batch's keys per KV head."""
    programs, shapes = bs * kv, tile_shapes(limits, itemsize)
    shape, resident = next((one for one in shapes if programs <= one[1]), shapes[-1])
    if 4 * programs <= limits.sms:
        shape, resident = SMALL[0], limits.resident_blocks(*SMALL[1])
    return shape, max(1, resident // kv)


def max_splits(num_kv_heads: int, limits: DeviceLimits = H200) -> int:
    """Return the largest number of splits per KV head, for batches of any size."""
    most = max(count for itemsize in (1, 2) for _, count in tile_shapes(limits, itemsize))
    return max(1, most // num_kv_heads)


@triton.jit
def attend_split(q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr,
                 page_table_ptr, slot_ptr, head, cos, sin, eps, begin, end, ka, kb, v, last, scale,
                 k_scale, v_scale, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                 HEAD_DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    """Attend to [begin, end), the first tile as ka, kb, v if EARLY, and the new token if `last`."""
    g = tl.arange(0, ROWS)
    qa, qb = load_heads(q_ptr, head * GROUP + g, g < GROUP, q_norm_ptr, cos, sin, eps, HEAD_DIM,
                        q_ptr.dtype.element_ty)  # fmt: skip
    if k_cache_ptr.dtype.element_ty.primitive_bitwidth == 8:  # one instruction widens two
        qa = tl.clamp(qa.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        qb = tl.clamp(qb.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    zeros = tl.zeros([ROWS], tl.float32)
    m, total, acc = zeros - 1e30, zeros, tl.zeros([ROWS, HEAD_DIM], tl.float32)
    if EARLY:
        v = tl.where(begin < end, v, 0.0)  # before a first token nothing is stored
        m, total, acc = attend_tile(qa, qb, ka, kb, v, begin, end, scale, m, total, acc, TILE)
        begin += TILE
    m, total, acc = attend_cached(
        qa, qb, m, total, acc, k_cache_ptr, v_cache_ptr, page_table_ptr, begin, end, scale,
        KV * HEAD_DIM, HEAD_DIM, TILE, STAGES,
    )  # fmt: skip
    if last:
        m, total, acc = add_new_token(
            qa, qb, k_ptr, v_ptr, head, k_norm_ptr, cos, sin, eps, k_cache_ptr, v_cache_ptr,
            tl.load(slot_ptr) * (KV * HEAD_DIM), scale, k_scale, v_scale, m, total, acc, HEAD_DIM,
        )  # fmt: skip
    return m, total, acc * v_scale


@triton.jit(do_not_specialize=["batch_size", "parts"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, table_ptr, k_cache_ptr, v_cache_ptr,
    page_table_ptr, rows_ptr, positions_ptr, slots_ptr, part_ptr, stat_ptr, done_ptr, out_ptr,
    q_stride, k_stride, v_stride, page_table_stride, scale, scales_ptr, eps, batch_size,
    parts, KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, BATCH: tl.constexpr, MERGE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a request for one KV head; grid (KV heads, batch_size + parts - 1)."""
    ROWS: tl.constexpr = max(16, triton.next_power_of_2(GROUP))
    head, program = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    k_scale = 1.0 if scales_ptr is None else tl.load(scales_ptr + head)
    v_scale = 1.0 if scales_ptr is None else tl.load(scales_ptr + KV + head)
    request, split, count, part, length = split_kv(positions_ptr, batch_size, parts, program,
                                                    BATCH, TILE)  # fmt: skip
    if split < count:
        begin, end = split * part, tl.minimum((split + 1) * part, length - 1)
        rotates: tl.constexpr = table_ptr is not None
        cos, sin = load_angles(table_ptr, length - 1, HEAD_DIM) if rotates else (None, None)
        page_table_ptr += tl.load(rows_ptr + request) * page_table_stride
        k_cache_ptr, v_cache_ptr = k_cache_ptr + head * HEAD_DIM, v_cache_ptr + head * HEAD_DIM
        ka, kb, v = 0.0, 0.0, 0.0
        if EARLY:
            ka, kb, v = load_tile(k_cache_ptr, v_cache_ptr, page_table_ptr, begin, end,
                                  KV * HEAD_DIM, HEAD_DIM, TILE)  # fmt: skip
        if PDL:
            gdc_wait()
        r = request.to(tl.int64)
        m, total, acc = attend_split(
            q_ptr + r * q_stride, k_ptr + r * k_stride, v_ptr + r * v_stride, q_norm_ptr,
            k_norm_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, slots_ptr + r, head, cos, sin,
            eps, begin, end, ka, kb, v, split == count - 1, scale * k_scale, k_scale, v_scale,
            KV, GROUP, ROWS, HEAD_DIM, TILE, STAGES, EARLY,
        )  # fmt: skip
        place, first = request * KV + head, head * tl.num_programs(1) + program - split
        write_output(part_ptr, stat_ptr, done_ptr, out_ptr, m, total, acc, place, first, split,
                     count, tl.arange(0, ROWS), HEAD_DIM, GROUP, MERGE)  # fmt: skip


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor,
    rows: Tensor, positions: Tensor, out_loc: Tensor, scratch: Scratch, scale: float, *,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, table: Tensor | None = None,
    kv_scales: Tensor | None = None, drafts: bool = False,
) -> Tensor:  # fmt: skip
    """Decode one new token per request: store its k and v, attend to all before it and to itself.

    q [bs, qo, d], k, v [bs, kv, d]; tokens may lie at any stride. page_table int32 [rows, max_len];
    rows, positions, out_loc int64 [bs]. With `table` (and `norms`) q and k come raw from their
    projection, and are normalised and rotated here. drafts: rows may be tokens of one request,
    which have just been stored. Returns [bs, qo, d].

    positions, rows, tables, scales, keys and values of other tokens than these are read before the
    kernel in front has ended: an ordinary launch must lie between what writes them and this one.
    """
    (bs, qo, dim), kv = q.shape, k.shape[1]
    limits, few = device_limits(q.device), triton.next_power_of_2(qo // kv)
    (tile, warps, stages, early), parts = choose_shape(bs, kv, limits, k_cache.element_size())
    tile = max(16, tile * 256 // max(256, dim * q.element_size()))
    parts = min(parts, bs * triton.cdiv(page_table.shape[1], tile))
    out = torch.empty(bs, qo, dim, dtype=q.dtype, device=q.device)
    decode_kernel[(kv, bs + parts - 1)](
        q, k, v, *(norms or (None, None)), table, k_cache, v_cache, page_table, rows, positions,
        out_loc, scratch.part, scratch.stat, scratch.done, out,
        q.stride(0), k.stride(0), v.stride(0), page_table.stride(0),
        scale * 1.4426950408889634, kv_scales, eps, bs, parts, KV=kv,
        GROUP=qo // kv, HEAD_DIM=dim, TILE=tile, STAGES=stages,
        BATCH=1 if bs == 1 else max(32, triton.next_power_of_2(bs)),
        MERGE=max(2, min(16 if early else 4, 8192 // (few * dim))), EARLY=early and not drafts,
        num_warps=warps,
        maxnreg=255 if warps == 2 else None,  # four on an SM, not five on one and three on another
        **launch_options(q),
    )  # fmt: skip
    return out
