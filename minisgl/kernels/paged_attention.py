"""Triton kernels for attention over pages: tiles of queries against chunks of keys, and a merge.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import triton
import triton.language as tl


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def fold_tile(q, k, v, visible, scale_log2, m, total, acc):
    """Fold one KV tile into the running maximum m, sum `total` and weighted sum acc of each row."""
    s = tl.dot(q, k, input_precision="ieee") * scale_log2
    s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p = tl.exp2(s - base[:, None])
    rescale = tl.exp2(m - base)
    total = total * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, total, acc


@triton.jit
def attend_chunk(
    q, limit, k_ptr, v_ptr, slots_ptr, begin, end, scale_log2, kv_stride,
    HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Online softmax of a query tile over [begin, end); `limit` is the last position a row sees."""
    dims = tl.arange(0, DIM)
    real_dim = dims < HEAD_DIM
    m = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, DIM], tl.float32)
    for start in range(begin, end, TILE_KV):
        positions = start + tl.arange(0, TILE_KV)
        inside = positions < end
        slots = tl.load(slots_ptr + positions, mask=inside, other=0).to(tl.int64) * kv_stride
        k = tl.load(
            k_ptr + slots[None, :] + dims[:, None],
            mask=inside[None, :] & real_dim[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + slots[:, None] + dims[None, :],
            mask=inside[:, None] & real_dim[None, :],
            other=0.0,
        )
        visible = inside[None, :] & (positions[None, :] <= limit[:, None])
        m, total, acc = fold_tile(q, k, v, visible, scale_log2, m, total, acc)
    return m, total, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr,
    slots_ptr, rows_ptr, qo_indptr_ptr, seq_lens_ptr, chunk_ptr,
    request_ptr, qo_tile_ptr, kv_tile_ptr,
    scale_log2, q_stride, kv_stride, slots_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (items, kv_heads). Row r of a tile is query head `r % GROUP` of token `r // GROUP`."""
    item, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(request_ptr + item)
    if request >= 0:  # padding of a captured grid is -1
        first = tl.load(qo_indptr_ptr + request)
        qo_len = tl.load(qo_indptr_ptr + request + 1) - first
        seq_len = tl.load(seq_lens_ptr + request)
        tile = tl.load(qo_tile_ptr + item)
        row = tile * TILE_Q + tl.arange(0, TILE_Q)
        token, member = row // GROUP, row % GROUP
        real = token < qo_len
        dims = tl.arange(0, DIM)
        inside = real[:, None] & (dims < HEAD_DIM)[None, :]
        q_row = (first + token).to(tl.int64)
        column = (head * GROUP + member) * HEAD_DIM
        q_offset = q_row * q_stride + column
        q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], mask=inside, other=0.0)
        # Row r sees positions up to its own; no row of the tile sees further than the last one.
        limit = seq_len - qo_len + token
        last_token = tl.minimum(((tile + 1) * TILE_Q - 1) // GROUP, qo_len - 1)
        begin = tl.load(kv_tile_ptr + item) * tl.load(chunk_ptr)
        end = tl.minimum(begin + tl.load(chunk_ptr), seq_len - qo_len + last_token + 1)
        m, total, acc = attend_chunk(
            q.to(k_ptr.dtype.element_ty), limit,
            k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM,
            slots_ptr + tl.load(rows_ptr + request).to(tl.int64) * slots_stride,
            begin, end, scale_log2, kv_stride, HEAD_DIM, TILE_Q, TILE_KV, DIM,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if SPLIT:
            part = (item * tl.num_programs(1) + head) * TILE_Q + tl.arange(0, TILE_Q)
            tl.store(lse_ptr + part, m + tl.log2(total))
            tl.store(part_ptr + part[:, None] * DIM + dims[None, :], acc)
        else:
            out_offset = q_row * GROUP * HEAD_DIM * tl.num_programs(1) + column
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset[:, None] + dims[None, :], out, mask=inside)


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, qo_indptr_ptr, request_ptr, qo_tile_ptr, tile_indptr_ptr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE_Q: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, kv_heads): combine the chunks of one tile by their log-sum-exp."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first_item = tl.load(tile_indptr_ptr + tile)
    last_item = tl.load(tile_indptr_ptr + tile + 1)
    if last_item > first_item:  # padding of a captured grid has no items
        rows, dims = tl.arange(0, TILE_Q), tl.arange(0, DIM)
        m = tl.full([TILE_Q], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        acc = tl.zeros([TILE_Q, DIM], tl.float32)
        for item in range(first_item, last_item):
            part = (item * tl.num_programs(1) + head) * TILE_Q + rows
            lse = tl.load(lse_ptr + part)
            m_new = tl.maximum(m, lse)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            old, new = tl.exp2(m - base), tl.exp2(lse - base)
            o = tl.load(part_ptr + part[:, None] * DIM + dims[None, :])
            acc = acc * old[:, None] + o * new[:, None]
            total = total * old + new
            m = m_new
        request = tl.load(request_ptr + first_item)
        first = tl.load(qo_indptr_ptr + request)
        row = tl.load(qo_tile_ptr + first_item) * TILE_Q + rows
        token = first + row // GROUP
        inside = (token < tl.load(qo_indptr_ptr + request + 1))[:, None] & (dims < HEAD_DIM)[
            None, :
        ]
        column = (head * GROUP + row % GROUP) * HEAD_DIM
        offset = token.to(tl.int64) * GROUP * HEAD_DIM * tl.num_programs(1) + column
        out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset[:, None] + dims[None, :], out, mask=inside)
