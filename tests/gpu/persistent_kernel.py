"""A decode step of one request in one kernel: five phases a layer, each by all programs.

project   norm, then queries, keys and values: each program some rows of the weight
attend    each program one KV head and one part of its keys
add_head  the parts merged, and one KV head's product with some rows of the output weight
gate      residual, norm, silu(gate) * up: each program some rows
shrink    back to the residual: each program some rows
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.benchmark.kernels import DecodeCase
from minisgl.config.model import ModelConfig
from minisgl.models.fused import FusedModel
from tests.gpu.persistent_parts import (
    ATTEND,
    BARRIER,
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    Request,
    Shape,
    Shared,
    Weights,
    arrive,
    columns,
    fetch,
    fetch_all,
    leave,
    multiply,
    ready,
    share_of,
)  # fmt: skip


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def project(w, b, layer, S: tl.constexpr):
    """Norm, then queries, keys and values: raw, as they leave the product."""
    rows: tl.constexpr = S.heads * S.dim // S.programs
    found = share_of(w, layer, QKV, False, S) if S.early else ()
    k = columns(S.hidden, S.width)
    norm = tl.load(w.first_norm + layer * S.hidden + k).to(tl.float32)
    ready(w, b, layer, QKV, S)
    found = found if S.early else share_of(w, layer, QKV, False, S)
    x = fetch(b.x + layer * S.hidden + k, S)
    scale = tl.rsqrt(tl.sum(x * x) / S.hidden + S.epsilon)
    y = multiply(found[0], x * norm) * scale
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    leave(b.qkv, layer, S.heads * S.dim, place, y, S)


@triton.jit
def turned(ptr, norm_ptr, angles_ptr, S: tl.constexpr):
    """A head [dim], normalised and rotated: dimension i goes with i + dim / 2."""
    half: tl.constexpr = S.dim // 2
    LOW: tl.constexpr = ptr.dtype.element_ty
    d = tl.arange(0, S.dim)
    a = fetch(ptr + d, S)
    b = tl.load(ptr + (d ^ half), cache_modifier=".cg").to(tl.float32)  # there, as all of a
    scale = tl.rsqrt(tl.sum(a * a) / S.dim + S.epsilon)
    a = (a * scale * tl.load(norm_ptr + d).to(tl.float32)).to(LOW).to(tl.float32)
    b = (b * scale * tl.load(norm_ptr + (d ^ half)).to(tl.float32)).to(LOW).to(tl.float32)
    cos, sin = tl.load(angles_ptr + d % half), tl.load(angles_ptr + half + d % half)
    return (a * cos + b * tl.where(d < half, -sin, sin)).to(LOW).to(tl.float32)


@triton.jit
def cached(r, base, start, end, table_ptr, S: tl.constexpr):
    """Keys and values [streams, 4, dim] of tokens `start` and on; zeros from `end` on."""
    STREAMS: tl.constexpr = 2 * S.warps
    token = start + tl.arange(0, STREAMS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    slot = tl.load(table_ptr + token, mask=token < end, other=0)[:, :, None].to(tl.int64)
    place = base + slot * (S.kv * S.dim) + tl.arange(0, S.dim)[None, None, :]
    real = (token < end)[:, :, None]
    k = tl.load(r.k_cache + place, mask=real, other=0.0)
    return k, tl.load(r.v_cache + place, mask=real, other=0.0)


@triton.jit
def fold(q, k, v, real, m, total, acc):
    """Fold tokens k, v [streams, 4, dim] into the softmax of each stream, for one query [dim]."""
    s = tl.where(real, tl.sum(k.to(tl.float32) * q[None, None, :], 2), -1e30)
    new = tl.maximum(m, tl.max(s, 1))
    p, old = tl.exp2(s - new[:, None]), tl.exp2(m - new)
    acc = acc * old[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 1)
    return new, total * old + tl.sum(p, 1), acc


@triton.jit
def finish(w, r, b, layer, g, q, base, m, total, acc, S: tl.constexpr):
    """Join the streams, in the last part with the new token, and leave what they came to."""
    pid, d = tl.program_id(0), tl.arange(0, S.dim)
    head = pid // S.splits
    best = tl.max(m)
    old = tl.exp2(m - best)
    total, acc, m = tl.sum(total * old), tl.sum(acc * old[:, None], 0), best
    if pid % S.splits == S.splits - 1:
        ptr = b.qkv + (layer * S.heads + S.kv * S.group + head) * S.dim
        angles_ptr = r.angles + tl.load(r.position) * S.dim
        k = turned(ptr, w.k_norm + layer * S.dim, angles_ptr, S)
        v = fetch(ptr + S.kv * S.dim + d, S)
        if g == 0:
            place = base + tl.load(r.slot) * (S.kv * S.dim) + d
            tl.store(r.k_cache + place, k.to(r.k_cache.dtype.element_ty))
            tl.store(r.v_cache + place, v.to(r.v_cache.dtype.element_ty))
        s = tl.sum(q * k)
        best = tl.maximum(m, s)
        total, acc = total * tl.exp2(m - best), acc * tl.exp2(m - best)
        total, acc, m = total + tl.exp2(s - best), acc + tl.exp2(s - best) * v, best
    place = pid * S.group + g
    leave(b.part, layer, S.programs * S.group * S.dim, place * S.dim + d, acc, S)
    leave(b.stat, layer, S.programs * S.group * 2, place * 2, m, S)
    leave(b.stat, layer, S.programs * S.group * 2, place * 2 + 1, total, S)


@triton.jit
def attend(w, r, b, layer, scale, S: tl.constexpr):
    """One KV head's queries over one part of its keys; the last part has the new token."""
    STREAMS: tl.constexpr = 2 * S.warps
    DIM: tl.constexpr = S.dim
    GROUP: tl.constexpr = S.group
    pid = tl.program_id(0)
    head, split, position = pid // S.splits, pid % S.splits, tl.load(r.position)
    length = tl.cdiv(position, S.splits).to(tl.int32)
    begin = split * length
    end = tl.minimum(begin + length, position.to(tl.int32))
    table_ptr = r.page_table + tl.load(r.row) * r.width
    base = (layer * r.slots * S.kv + head) * S.dim
    qs, states = (), ()
    k, v = cached(r, base, begin, end if S.early else begin, table_ptr, S)
    ready(w, b, layer, ATTEND, S)
    if not S.early:
        k, v = cached(r, base, begin, end, table_ptr, S)
    for g in tl.static_range(GROUP):
        q_ptr = b.qkv + (layer * S.heads + head * S.group + g) * S.dim
        q = turned(q_ptr, w.q_norm + layer * S.dim, r.angles + position * S.dim, S) * scale
        m = tl.full([STREAMS], -1e30, tl.float32)
        state = m, tl.zeros([STREAMS], tl.float32), tl.zeros([STREAMS, DIM], tl.float32)
        qs, states = qs + (q,), states + (state,)
    for start in range(begin, end, 4 * STREAMS):
        next_k, next_v = cached(r, base, start + 4 * STREAMS, end, table_ptr, S)
        real = start + tl.arange(0, STREAMS)[:, None] * 4 + tl.arange(0, 4)[None, :] < end
        folded = ()
        for g in tl.static_range(GROUP):
            m, total, acc = states[g]
            folded = folded + (fold(qs[g], k, v, real, m, total, acc),)
        k, v, states = next_k, next_v, folded
    for g in tl.static_range(GROUP):
        m, total, acc = states[g]
        finish(w, r, b, layer, g, qs[g], base, m, total, acc, S)


@triton.jit
def merged(b, layer, S: tl.constexpr):
    """The parts of this program's KV head as one, rounded: [1, group dim]."""
    first = layer * S.programs + tl.program_id(0) // S.splits * S.splits
    split, k = tl.arange(0, S.splits)[:, None], tl.arange(0, S.group * S.dim)[None, :]
    part = fetch(b.part + (first + split) * (S.group * S.dim) + k, S)
    stat_ptr = b.stat + ((first + split) * S.group + k // S.dim) * 2
    m, total = fetch_all(stat_ptr, 1, 2, S)
    p = tl.exp2(m - tl.max(m, 0)[None, :])
    y = tl.sum(part * p, 0) / tl.sum(total * p, 0)
    return y.to(b.x.dtype.element_ty).to(tl.float32)[None, :]


@triton.jit
def add_head(w, b, layer, S: tl.constexpr):
    """What one KV head adds to some rows of the residual."""
    rows: tl.constexpr = S.hidden // S.splits
    pid = tl.program_id(0)
    found = share_of(w, layer, OUT, False, S) if S.early else ()
    ready(w, b, layer, OUT, S)
    found = found if S.early else share_of(w, layer, OUT, False, S)
    y = multiply(found[0], merged(b, layer, S))
    place = pid // S.splits * S.hidden + pid % S.splits * rows + tl.arange(0, rows)
    leave(b.sums, layer, S.kv * S.hidden, place, y, S)


@triton.jit
def residual(b, layer, k, S: tl.constexpr):
    """The residual behind attention at places k, rounded."""
    x = tl.load(b.x + layer * S.hidden + k, cache_modifier=".cg").to(tl.float32)  # came before
    heads: tl.constexpr = S.kv
    sums = fetch_all(b.sums + layer * heads * S.hidden + k, S.hidden, heads, S)
    for head in tl.static_range(heads):
        x += sums[head]
    return x.to(b.x.dtype.element_ty).to(tl.float32)


@triton.jit
def gate(w, b, layer, S: tl.constexpr):
    """Norm, then silu(gate) * up of some rows."""
    share: tl.constexpr = S.inter // S.programs
    count: tl.constexpr = share // S.gate_rows
    k = columns(S.hidden, S.width)
    found = share_of(w, layer, GATE_UP, False, S) if S.early else ()
    norm = tl.load(w.second_norm + layer * S.hidden + k).to(tl.float32)
    ready(w, b, layer, GATE_UP, S)
    found = found if S.early else share_of(w, layer, GATE_UP, False, S)
    x = residual(b, layer, k, S)
    scale = tl.rsqrt(tl.sum(x * x) / S.hidden + S.epsilon)
    x *= norm
    for i in tl.static_range(count):
        y, up = multiply(found[i], x) * scale, multiply(found[count + i], x) * scale
        place = tl.program_id(0) * share + i * S.gate_rows + tl.arange(0, S.gate_rows)
        leave(b.mid, layer, S.inter, place, y * tl.sigmoid(y) * up, S)


@triton.jit
def shrink(w, b, layer, S: tl.constexpr):
    """Back to some rows of the residual: the next layer's input."""
    rows: tl.constexpr = S.hidden // S.programs
    count: tl.constexpr = S.inter // S.down_cols
    found = share_of(w, layer, DOWN, False, S) if S.early else ()
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    y = residual(b, layer, place, S)
    ready(w, b, layer, DOWN, S)
    found = found if S.early else share_of(w, layer, DOWN, False, S)
    k = columns(S.down_cols, S.width)
    mid = fetch_all(b.mid + layer * S.inter + k, S.down_cols, count, S)
    for i in tl.static_range(count):
        y += multiply(found[i], mid[i])
    leave(b.x + S.hidden, layer, S.hidden, place, y, S)


@triton.jit
def phase(w, r, b, layer, scale, PHASE: tl.constexpr, S: tl.constexpr):
    """One phase of one layer."""
    if not (S.work >> PHASE) & 1:
        ready(w, b, layer, PHASE, S)
    elif PHASE == QKV:
        project(w, b, layer, S)
    elif PHASE == ATTEND:
        attend(w, r, b, layer, scale, S)
    elif PHASE == OUT:
        add_head(w, b, layer, S)
    elif PHASE == GATE_UP:
        gate(w, b, layer, S)
    else:
        shrink(w, b, layer, S)
    arrive(b, S)


@triton.jit
def step_kernel(
    w, r, b, scale, begin, end, S: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Phases FIRST to LAST of layers [begin, end); grid (programs,), all of them at once."""
    for layer in range(begin, end):
        for i in tl.static_range(FIRST, LAST + 1):
            phase(w, r, b, layer, scale, i, S)
    if S.sync == BARRIER:
        last = tl.atomic_add(b.counts + 1, 1, sem="acq_rel") == S.programs - 1
        if last:
            tl.store(b.counts, 0)  # nobody waits any more
            tl.store(b.counts + 1, 0)


def shape_of(model: ModelConfig, programs: int = 128, **how: Any) -> Shape:
    """Of a model, cut for so many programs."""
    kv = model.num_kv_heads
    return Shape(
        model.num_layers, model.hidden_size, model.intermediate_size, kv, model.num_qo_heads // kv,
        model.head_dim, programs // kv, **how,
    )  # fmt: skip


def stack(fused: FusedModel) -> Weights:
    """The weights of all layers, copied side by side."""
    of = [
        (x.first_norm, x.attention.qkv, *x.attention.norms, x.attention.out, x.second_norm,
         x.gate_up, x.down) for x in fused.layers
    ]  # fmt: skip
    return Weights(*(torch.stack(parts) for parts in zip(*of, strict=True)))


def request_of(case: DecodeCase, angles: Tensor) -> Request:
    """Views of the pool and of what the plan reads."""
    (keys, values), to = case.plan.pool.buffer, case.plan.buffers
    table, slots = case.tables.device_page_table, keys[0].flatten(0, 1)
    return Request(keys, values, table, to.rows, to.positions, to.out_loc, angles, len(slots),
                   table.stride(0))  # fmt: skip


def shared(s: Shape, x: Tensor) -> Shared:
    """Memory in which nobody has left anything but x [1, hidden], the first layer's input."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(sizes, -0.0, dtype=dtype, device=x.device)

    n, p, low = s.layers, s.programs, x.dtype
    made = Shared(
        empty(n + 1, s.hidden, dtype=low), empty(n, s.heads * s.dim, dtype=low),
        empty(n, p, s.group, s.dim), empty(n, p, s.group, 2), empty(n, s.kv, s.hidden),
        empty(n, s.inter, dtype=low), torch.zeros(3, dtype=torch.int32, device=x.device),
    )  # fmt: skip
    made.x[0] = x[0] + 0.0  # no minus zero
    return made


def score_scale(s: Shape) -> float:
    """What scores are multiplied by: the softmax takes powers of two."""
    return float(s.dim**-0.5 / math.log(2))


def launch(w: Weights, r: Request, b: Shared, s: Shape) -> Tensor:
    """All layers in one kernel: the residual behind the last, [1, hidden]."""
    step_kernel[(s.programs,)](
        w, r, b, score_scale(s), 0, s.layers, S=s, FIRST=0, LAST=4,
        num_warps=s.warps, num_stages=1, launch_cooperative_grid=True,
    )  # fmt: skip
    return b.x[s.layers :]
