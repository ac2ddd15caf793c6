"""Causal attention of long prompts on Hopper GPUs: one warp loads, two warpgroups compute.

Generated from notebooks/04c_prefill_attention.ipynb: edit there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minisgl.kernels.paged_attention import UNALIGNED

# mypy: allow-untyped-defs, allow-incomplete-defs
ROWS = gl.constexpr(64)  # query rows of a warpgroup, as in one wgmma instruction
TILE_KV = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(3)  # tiles of K, and again of V, in shared memory
# Triton renamed it.
start_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def place_of(turn, places):
    """Return this thread block's place in its `turn`-th turn; odd turns go backwards."""
    grid, program = gl.num_programs(0), gl.program_id(0)
    return turn * grid + gl.where(turn % 2 == 0, program, grid - 1 - program)


@gluon.jit
def tile_of(place, batch, kv_heads, GROUP: gl.constexpr):
    """Return KV head, request, first row of q, new and cached tokens, tile, keys that it sees."""
    _table, _rows, last_ptr, qo_indptr_ptr, request_ptr, tile_ptr = batch
    head, at = place % kv_heads, place // kv_heads
    request, tile = gl.load(request_ptr + at), gl.load(tile_ptr + at)
    first = gl.load(qo_indptr_ptr + request)
    qo_len = gl.load(qo_indptr_ptr + request + 1) - first
    cached = (gl.load(last_ptr + request) + 1).to(gl.int32) - qo_len
    last_token = gl.minimum(((tile + 1) * 2 * ROWS - 1) // GROUP, qo_len - 1)
    exists = tile * 2 * ROWS // GROUP < qo_len
    return head, request, first, qo_len, cached, tile, gl.where(exists, cached + last_token + 1, 0)


@gluon.jit
def wait_full(ring, number):
    """Wait for tile `number`; return its shared memory."""
    smem, full, _free = ring
    mbarrier.wait(full.index(number % STAGES), number // STAGES & 1)
    return smem.index(number % STAGES)


@gluon.jit
def release(ring, number):
    """Free the stage of tile `number` for the warp that loads."""
    _smem, _full, free = ring
    mbarrier.arrive(free.index(number % STAGES), count=1)


@gluon.jit
def load_tile(ring, pages, number, row, start, last_page, column, BOX: gl.constexpr):
    """Start the copy of one tile of K or V to its stage, once both warpgroups released it."""
    smem, full, free = ring
    slots = ()
    for b in gl.static_range(TILE_KV // BOX):  # past the last page, read it again
        slots = slots + (gl.load(row + gl.minimum(start + b * BOX, last_page)),)  # type: ignore[assignment]
    stage = number % STAGES
    mbarrier.wait(free.index(stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), TILE_KV * smem.shape[2] * 2)
    for b in gl.static_range(TILE_KV // BOX):
        box = smem.index(stage).slice(b * BOX, BOX)
        start_copy(pages, [slots[b], column], full.index(stage), box)


@gluon.jit
def load_tiles(
    keys, values, k_pages, v_pages, batch, kv_heads, places, table_stride,
    GROUP: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Load the K and V tiles of each place, from the last to the first; runs in one warp."""
    table_ptr, rows_ptr, _last, _qo_indptr, _request, _tile = batch
    DIM: gl.constexpr = keys[0].shape[2]
    number = 0
    for turn in range(gl.cdiv(places, gl.num_programs(0))):
        place = place_of(turn, places)
        if place < places:
            head, request, _first, _new, _cached, _at, end = tile_of(place, batch, kv_heads, GROUP)
            row = table_ptr + gl.load(rows_ptr + request).to(gl.int64) * table_stride
            last_page, tiles = (end - 1) // BOX * BOX, gl.cdiv(end, TILE_KV)
            for j in range(tiles):
                start = (tiles - 1 - j) * TILE_KV
                load_tile(keys, k_pages, number, row, start, last_page, head * DIM, BOX)
                load_tile(values, v_pages, number, row, start, last_page, head * DIM, BOX)
                number += 1


@gluon.jit
def mask_future(s, start, limit, S: gl.constexpr):
    """Mask the scores of keys from `start` with -inf where a key is after the row's position."""
    positions = start + gl.arange(0, TILE_KV, gl.SliceLayout(0, S))
    return gl.where(positions[None, :] <= limit[:, None], s, float("-inf"))


@gluon.jit
def online_softmax(s, m, total, scale_log2):
    """Return a tile's softmax weights, the new maximum and sum, and the factor of earlier sums."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    weights = gl.exp2(s * scale_log2 - m_new[:, None])
    rescale = gl.exp2(m - m_new)
    return weights, m_new, total * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def multiply_keys(q, keys, number, turns, who: gl.constexpr, S: gl.constexpr):
    """Start Q @ K^T of a tile once it is loaded and it is this warpgroup's turn."""
    k = wait_full(keys, number)
    mbarrier.wait(turns.index(who), (number & 1) ^ (1 - who))
    nothing = gl.zeros([ROWS, TILE_KV], gl.float32, S)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def update_tiles(
    state, q, keys, values, turns, who: gl.constexpr, begin, end, tiles, limit, scale_log2,
    MASK: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Fold in tiles [begin, end), counted from the last; `weights` are the previous tile's."""
    m, total, acc, weights, number = state
    for j in range(begin, end):
        p = gl.convert_layout(weights.to(q.dtype), P)
        scores = multiply_keys(q, keys, number, turns, who, S)
        sums = warpgroup_mma(p, wait_full(values, number - 1), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - who), count=1)
        s = warpgroup_mma_wait(1, deps=[scores])
        release(keys, number)
        if MASK:
            s = mask_future(s, (tiles - 1 - j) * TILE_KV, limit, S)
        weights, m, total, rescale = online_softmax(s, m, total, scale_log2)
        acc = warpgroup_mma_wait(0, deps=[sums])
        release(values, number - 1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, P.parent))[:, None]
        number += 1
    return m, total, acc, weights, number


@gluon.jit
def first_tile(
    q, keys, values, turns, who: gl.constexpr, number, tiles, end, limit, scale_log2,
    DIM: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Begin each row with its last tile: return the softmax state, zero outputs and weights."""
    A: gl.constexpr = P.parent
    scores = multiply_keys(q, keys, number, turns, who, S)
    mbarrier.arrive(turns.index(1 - who), count=1)
    s = warpgroup_mma_wait(0, deps=[scores])
    release(keys, number)
    s = mask_future(s, (tiles - 1) * TILE_KV, limit, S)
    zeros = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    weights, m, total, _rescale = online_softmax(s, zeros - 1e30, zeros, scale_log2)
    v = wait_full(values, number)
    if end % TILE_KV != 0:
        clear_rows(v, end % TILE_KV)
    return m, total, gl.zeros([ROWS, DIM], gl.float32, A), weights, number + 1


@gluon.jit
def clear_rows(tile, count):
    """Zero the rows from `count` on: another request may have left NaN there."""
    DIM: gl.constexpr = tile.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row, held = gl.arange(0, TILE_KV, gl.SliceLayout(1, LINES)), tile.load(LINES)
    tile.store(gl.where((row < count)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()


@gluon.jit
def finalize(state, q, values, A: gl.constexpr, P: gl.constexpr):
    """Add the values of the last tile, and divide by the sum of all weights."""
    _m, total, acc, weights, number = state
    p = gl.convert_layout(weights.to(q.dtype), P)
    sums = warpgroup_mma(p, wait_full(values, number - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    release(values, number - 1)
    return acc / gl.convert_layout(total, gl.SliceLayout(1, A))[:, None]


@gluon.jit
def attend_tiles(
    who: gl.constexpr, q_ptr, out_ptr, q_smem, keys, values, turns, batch, kv_heads, places,
    scale_log2, q_stride, GROUP: gl.constexpr,
):  # fmt: skip
    """Attend with one warpgroup, to its half of the query rows of each place."""
    DIM: gl.constexpr = q_smem.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    q, number, dims = q_smem.index(who), 0, gl.arange(0, DIM, gl.SliceLayout(0, LINES))
    for turn in range(gl.cdiv(places, gl.num_programs(0))):
        place = place_of(turn, places)
        if place < places:
            head, _request, first, new, cached, tile, end = tile_of(place, batch, kv_heads, GROUP)
            if end > 0:
                tiles, row = gl.cdiv(end, TILE_KV), (tile * 2 + who) * ROWS
                line = row + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
                own = line // GROUP
                real, token = (own < new)[:, None], (own - row // GROUP)[:, None]
                column = ((head * GROUP + line % GROUP) * DIM)[:, None] + dims[None, :]
                base, width = (first + row // GROUP).to(gl.int64), kv_heads * GROUP * DIM
                from_ptr = q_ptr + base * q_stride + (token * q_stride + column)
                q.store(gl.load(from_ptr, mask=real, other=0.0))
                fence_async_shared()
                limit = cached + (row + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
                state = first_tile(q, keys, values, turns, who, number, tiles, end, limit,
                                   scale_log2, DIM, S, P)  # fmt: skip
                seen_by_all = (cached + tile * 2 * ROWS // GROUP + 1) // TILE_KV
                edge = gl.maximum(tiles - seen_by_all, 1)
                state = update_tiles(state, q, keys, values, turns, who, 1, edge, tiles, limit,
                                   scale_log2, True, S, P)  # fmt: skip
                state = update_tiles(state, q, keys, values, turns, who, edge, tiles, tiles, limit,
                                   scale_log2, False, S, P)  # fmt: skip
                number = state[4]
                q.store(finalize(state, q, values, A, P).to(q.dtype))
                to_ptr = out_ptr + base * width + (token * width + column)
                gl.store(to_ptr, q.load(LINES), mask=real)


@gluon.jit
def new_ring(dtype: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Allocate STAGES tiles of shared memory and their barriers: full and free."""
    smem = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, DIM], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return smem, full, free


@gluon.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    q_ptr, k_pages, v_pages, out_ptr, table_ptr, rows_ptr, last_ptr, qo_indptr_ptr,
    request_ptr, tile_ptr, kv_heads, places, scale_log2, q_stride, table_stride,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Attend; grid: the blocks that run at once. A place is 2 * ROWS query rows of a KV head."""
    dtype: gl.constexpr = k_pages.dtype
    BOX: gl.constexpr = k_pages.block_shape[0]
    DIM: gl.constexpr = k_pages.block_shape[1]
    LAYOUT: gl.constexpr = k_pages.layout
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], LAYOUT)
    keys, values = new_ring(dtype, DIM, LAYOUT), new_ring(dtype, DIM, LAYOUT)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(turns.index(who), count=1)
    fence_async_shared()
    batch = (table_ptr, rows_ptr, last_ptr, qo_indptr_ptr, request_ptr, tile_ptr)
    gl.warp_specialize([
        (attend_tiles, (0, q_ptr, out_ptr, q_smem, keys, values, turns, batch, kv_heads, places,
                        scale_log2, q_stride, GROUP)),
        (attend_tiles, (1, q_ptr, out_ptr, q_smem, keys, values, turns, batch, kv_heads, places,
                        scale_log2, q_stride, GROUP)),
        (load_tiles, (keys, values, k_pages, v_pages, batch, kv_heads, places, table_stride,
                      GROUP, BOX)),
    ], [4, 1], [232, 40])  # fmt: skip


def tensor_map(cache: Tensor) -> TensorDescriptor:
    """Make a tensor map of a cache [pages, page_size, KV heads, dim]: boxes of one head's rows."""
    page_size, heads, dim = cache.shape[1:]
    rows = math.gcd(page_size, TILE_KV.value)
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.float16)  # or another of 16 bits
    return TensorDescriptor.from_tensor(cache.view(-1, heads * dim), [rows, dim], layout)


TensorMaps = tuple[TensorDescriptor, TensorDescriptor]  # of K and V


def prefill_attention(
    q: Tensor, boxes: TensorMaps, out: Tensor, page_table: Tensor,
    tiles: Sequence[Tensor], scale_log2: float, max_programs: int, compiled: Any = None,
) -> Any:  # fmt: skip
    """Write the attention of a batch to `out`, and return the compiled kernel.

    `tiles` are the batch's `KernelArgs`. With `compiled`, the result for another layer, Triton
    does not search for the kernel by the types of all arguments.
    """
    kv_heads = boxes[0].shape[1] // boxes[0].block_shape[1]
    places = len(tiles[-1]) * kv_heads
    grid = min(places, max_programs), 1, 1
    args = (q, *boxes, out, page_table, *tiles, kv_heads, places, scale_log2, q.stride(0),
            page_table.stride(0), q.shape[1] // kv_heads)  # fmt: skip
    if compiled is None:
        return prefill_kernel[grid](*args, num_warps=4)
    compiled[grid](*args)
    return compiled
