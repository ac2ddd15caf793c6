"""Triton kernels for attention over pages: query tiles against parts of the keys, and a merge.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import triton
import triton.language as tl


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the online-softmax state (maximum, sum, weighted sum) of rows without any key."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros - 1e30, zeros, tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def attend_tile(q, k, v, visible, scale_log2, m, total, acc, MASK: tl.constexpr):
    """Fold one KV tile into the running maximum m, sum `total` and weighted sum acc of each row."""
    s = tl.dot(q, k, input_precision="ieee")
    if MASK:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(tl.fma(s, scale_log2, -m_new[:, None]))
    rescale = tl.exp2(m - m_new)
    total = total * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return m_new, total, acc


@triton.jit
def attend_range(
    q, limit, m, total, acc, k_ptr, v_ptr, slots_ptr, begin, end, scale_log2, kv_stride,
    HEAD_DIM: tl.constexpr, TILE_KV: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Fold in the keys of [begin, end); `limit` is the last position a row sees, read if MASK."""
    dims = tl.arange(0, DIM)
    for start in tl.range(begin, end, TILE_KV, num_stages=STAGES):
        positions = start + tl.arange(0, TILE_KV)
        real = (dims < HEAD_DIM)[None, :]
        if MASK:
            inside = positions < end
            slots = tl.load(slots_ptr + positions, mask=inside, other=0).to(tl.int64) * kv_stride
            real = real & inside[:, None]
            visible = inside[None, :] & (positions[None, :] <= limit[:, None])
        else:
            slots = tl.load(slots_ptr + positions).to(tl.int64) * kv_stride
            visible = real
        k = tl.load(k_ptr + slots[None, :] + dims[:, None], mask=tl.trans(real), other=0.0)
        v = tl.load(v_ptr + slots[:, None] + dims[None, :], mask=real, other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # the cache may have fewer bits
        m, total, acc = attend_tile(q, k, v, visible, scale_log2, m, total, acc, MASK)
    return m, total, acc


@triton.jit
def tile_rows(
    tile, qo_len, head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr
):
    """Return for a query tile's rows: the token, whether it exists, its head's first column."""
    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    token = row // GROUP
    return token, token < qo_len, (head * GROUP + row % GROUP) * HEAD_DIM


@triton.jit
def load_queries(
    q_ptr, token_row, real, column, q_stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Load a query tile [rows, DIM]; missing rows and dimensions are zeros."""
    dims = tl.arange(0, DIM)
    offset = token_row.to(tl.int64) * q_stride + column
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offset[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def write_tile(
    out_ptr, acc, token_row, real, column, num_heads, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Write the finished rows of a tile to the output [tokens, num_heads, HEAD_DIM]."""
    dims = tl.arange(0, DIM)
    offset = token_row.to(tl.int64) * num_heads * HEAD_DIM + column
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + dims[None, :], out, mask=inside)


@triton.jit
def tile_keys(
    request, tile, qo_indptr_ptr, last_ptr, splits,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    """Return a request's first row of q, new and cached tokens; keys of a tile and of a split."""
    first = tl.load(qo_indptr_ptr + request)
    qo_len = tl.load(qo_indptr_ptr + request + 1) - first
    cached = (tl.load(last_ptr + request) + 1).to(tl.int32) - qo_len
    last_token = tl.minimum(((tile + 1) * TILE_Q - 1) // GROUP, qo_len - 1)
    end = cached + last_token + 1
    part = tl.maximum(tl.cdiv(tl.cdiv(end, splits), TILE_KV), 2) * TILE_KV
    return first, qo_len, cached, end, part


UNALIGNED = ["rows_ptr", "last_ptr", "qo_indptr_ptr", "request_ptr", "tile_ptr"]


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, slots_ptr, rows_ptr, last_ptr, qo_indptr_ptr,
    request_ptr, tile_ptr, scale_log2, scales_ptr, q_stride, kv_stride, slots_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend; grid (KV heads, tiles, splits). Row r of a tile is a token's query head r % GROUP."""
    head, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, splits = tl.num_programs(0), tl.num_programs(2)
    scale_log2 *= 1.0 if scales_ptr is None else tl.load(scales_ptr + head)
    v_scale = 1.0 if scales_ptr is None else tl.load(scales_ptr + num_kv_heads + head)
    request, tile = tl.load(request_ptr + place), tl.load(tile_ptr + place)
    first, qo_len, cached, end, part = tile_keys(request, tile, qo_indptr_ptr, last_ptr, splits,
                                                 GROUP, TILE_Q, TILE_KV)  # fmt: skip
    begin = split * part
    if begin < end:
        token, real, column = tile_rows(tile, qo_len, head, GROUP, HEAD_DIM, TILE_Q)
        q = load_queries(q_ptr, first + token, real, column, q_stride, HEAD_DIM, DIM)
        slots_ptr += tl.load(rows_ptr + request).to(tl.int64) * slots_stride
        k_ptr, v_ptr = k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM
        stop, limit = tl.minimum(begin + part, end), cached + token
        seen_by_all = tl.minimum(cached + tile * TILE_Q // GROUP + 1, stop)
        edge = begin + tl.maximum(seen_by_all - begin, 0) // TILE_KV * TILE_KV
        m, total, acc = empty_state(TILE_Q, DIM)
        m, total, acc = attend_range(q, limit, m, total, acc, k_ptr, v_ptr, slots_ptr, begin, edge,
                                     scale_log2, kv_stride, HEAD_DIM, TILE_KV, DIM, False,
                                     STAGES)  # fmt: skip
        m, total, acc = attend_range(q, limit, m, total, acc, k_ptr, v_ptr, slots_ptr, edge, stop,
                                     scale_log2, kv_stride, HEAD_DIM, TILE_KV, DIM, True,
                                     STAGES)  # fmt: skip
        total = tl.where(total == 0.0, 1.0, total)  # a row that saw no key
        acc = acc / total[:, None] * v_scale
        if SPLIT:
            row = ((place * num_kv_heads + head) * splits + split) * TILE_Q + tl.arange(0, TILE_Q)
            tl.store(lse_ptr + row, m + tl.log2(total))
            tl.store(part_ptr + row[:, None] * DIM + tl.arange(0, DIM)[None, :], acc)
        else:
            write_tile(out_ptr, acc, first + token, real, column, GROUP * num_kv_heads, HEAD_DIM,
                       DIM)  # fmt: skip


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, last_ptr, qo_indptr_ptr, request_ptr, tile_ptr, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one tile by their log-sum-exp; grid (tiles, KV heads)."""
    place, head, num_kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    request, tile = tl.load(request_ptr + place), tl.load(tile_ptr + place)
    first, qo_len, _cached, end, part = tile_keys(
        request, tile, qo_indptr_ptr, last_ptr, splits, GROUP, TILE_Q, TILE_KV
    )
    m, total, acc = empty_state(TILE_Q, DIM)
    for i in range(tl.cdiv(end, part)):
        row = ((place * num_kv_heads + head) * splits + i) * TILE_Q + tl.arange(0, TILE_Q)
        lse = tl.load(lse_ptr + row)
        m_new = tl.maximum(m, lse)
        old, new = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        o = tl.load(part_ptr + row[:, None] * DIM + tl.arange(0, DIM)[None, :])
        acc = acc * old[:, None] + o * new[:, None]
        total = total * old + new
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    token, real, column = tile_rows(tile, qo_len, head, GROUP, HEAD_DIM, TILE_Q)
    heads = GROUP * num_kv_heads
    write_tile(out_ptr, acc, first + token, real, column, heads, HEAD_DIM, DIM)
