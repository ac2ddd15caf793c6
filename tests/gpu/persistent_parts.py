"""What the programs of a persistent decode step are made of: waiting, and a share of weights.

They hand each other what they computed in one of two ways. BARRIER: all of a phase is stored before
a counter says so. DATA: memory starts out as minus zeros, and a reader looks until none is left.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.linear import prefetch

QKV, ATTEND, OUT, GATE_UP, DOWN = (tl.constexpr(i) for i in range(5))
NOTHING, BARRIER, DATA = (tl.constexpr(i) for i in range(3))  # what a phase waits for


class Weights(NamedTuple):
    """Those of all layers, stacked: the first dimension is the layer."""

    first_norm: Tensor  # [layers, hidden]
    qkv: Tensor  # [layers, (qo + 2 kv) dim, hidden]
    q_norm: Tensor  # [layers, dim]
    k_norm: Tensor
    out: Tensor  # [layers, hidden, qo dim]
    second_norm: Tensor  # [layers, hidden]
    gate_up: Tensor  # [layers, 2 inter, hidden]
    down: Tensor  # [layers, hidden, inter]


class Request(NamedTuple):
    """Where the keys and values lie, and which token is new."""

    k_cache: Tensor  # [layers, slots, kv, dim]
    v_cache: Tensor
    page_table: Tensor  # [rows, slots] int32
    row: Tensor  # [1] int64, as all three
    position: Tensor
    slot: Tensor
    angles: Tensor  # [positions, dim] float32: cosines, sines
    slots: int  # of the pool
    width: int  # of the page table


class Shared(NamedTuple):
    """What programs leave for each other."""

    x: Tensor  # [layers + 1, hidden]: before each layer, and behind the last
    qkv: Tensor  # [layers, (qo + 2 kv) dim]
    part: Tensor  # [layers, programs, group, dim] float32: attention to a part of the keys
    stat: Tensor  # [layers, programs, group, 2] float32: its maximum, its sum
    sums: Tensor  # [layers, kv, hidden] float32: what each KV head adds to the residual
    mid: Tensor  # [layers, inter]
    counts: Tensor  # int32: programs that arrived, programs that left, waits given up


class Shape(NamedTuple):
    """Sizes, and the way to run: known when the kernel is compiled."""

    layers: int
    hidden: int
    inter: int
    kv: int
    group: int
    dim: int
    splits: int  # programs for each KV head
    warps: int = 8
    sync: int = 1  # NOTHING, BARRIER or DATA
    early: bool = False  # a phase's weights are loaded into registers before it waits
    ahead: int = 0  # and asked for, into L2, so many phases before
    work: int = 31  # bits of the phases that compute

    @property
    def programs(self) -> int:
        return self.kv * self.splits

    @property
    def heads(self) -> int:
        return self.kv * (self.group + 2)

    @property
    def gate_rows(self) -> int:
        """Rows of gate in one tile: a power of two."""
        share = self.inter // self.programs
        return share & -share

    @property
    def down_cols(self) -> int:
        return self.inter & -self.inter

    @property
    def width(self) -> int:
        """Numbers of a row that a warp takes at once."""
        return min(256, self.hidden, self.down_cols)

    @property
    def epsilon(self) -> float:
        return 1e-6


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def wait_for(count_ptr, target):
    """Until so many programs have arrived: one thread looks, and gives up after 20,000 looks."""
    seen = tl.inline_asm_elementwise(
        """{ .reg .pred p, q; .reg .u32 n;
        mov.u32 $0, $2; mov.u32 n, %tid.x; setp.ne.u32 p, n, 0; @p bra done;
        look: ld.acquire.gpu.global.u32 $0, [$1];
        add.u32 n, n, 1; setp.lt.s32 p, $0, $2; setp.lt.and.u32 q, n, 20000, p; @q bra look;
        done: }""",
        "=&r,l,r", [count_ptr, target], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(count_ptr + 2, 1, mask=seen < target)
    tl.debug_barrier()


@triton.jit
def arrive(b, S: tl.constexpr):
    """All that this program has stored is seen by whoever sees its arrival."""
    if S.sync == BARRIER:
        tl.debug_barrier()
        tl.atomic_add(b.counts, 1, sem="release")


@triton.jit
def is_empty(bits):
    """Minus zero: what nobody leaves."""
    return bits == (-32768 if bits.dtype == tl.int16 else -2147483648)


@triton.jit
def leave(ptr, layer, size, place, y, S: tl.constexpr):
    """Store y at `place` of a layer's part [size]; empty what this program left two layers ago."""
    y = y.to(ptr.dtype.element_ty)
    if S.sync == DATA:
        y = tl.where(y == 0, 0.0, y).to(ptr.dtype.element_ty)
        tl.store(ptr + (layer + S.layers - 2) % S.layers * size + place, tl.zeros_like(y) * -1.0)
    tl.store(ptr + layer * size + place, y)


@triton.jit
def look(ptrs, step, COUNT: tl.constexpr):
    """The bits at ptrs, ptrs + step, ..., and 1 where any of them are those of an empty place."""
    BITS: tl.constexpr = tl.int16 if ptrs.dtype.element_ty == tl.bfloat16 else tl.int32
    found = (tl.load(ptrs.to(tl.pointer_type(BITS)), volatile=True),)
    empty = is_empty(found[0])
    for i in tl.static_range(1, COUNT):
        bits = tl.load((ptrs + i * step).to(tl.pointer_type(BITS)), volatile=True)
        found, empty = found + (bits,), empty | is_empty(bits)
    return found, tl.max(empty.to(tl.int32))


@triton.jit
def fetch_all(ptrs, step, COUNT: tl.constexpr, S: tl.constexpr):
    """What other programs left at ptrs, ptrs + step, ..., float32; with DATA, once all is there."""
    got = ()
    if S.sync == DATA:
        bits, empty = look(ptrs, step, COUNT)
        looks = 0
        while (empty > 0) & (looks < 20000):
            bits, empty = look(ptrs, step, COUNT)
            looks += 1
        for i in tl.static_range(COUNT):
            one = bits[i].to(ptrs.dtype.element_ty, bitcast=True)
            got = got + (one.to(tl.float32),)
    else:
        for i in tl.static_range(COUNT):
            one = tl.load(ptrs + i * step, cache_modifier=".cg")  # not from the first-level cache
            got = got + (one.to(tl.float32),)
    return got


@triton.jit
def fetch(ptrs, S: tl.constexpr):
    """`fetch_all` of one tensor."""
    return fetch_all(ptrs, 0, 1, S)[0]


@triton.jit
def tile_at(ptr, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
            EACH: tl.constexpr):  # fmt: skip
    """Pointers [ROWS, COLS / WIDTH, WIDTH / EACH] to every EACH-th number of a tile.

    A row belongs to one warp, which adds it up without the others.
    """
    row, piece = tl.arange(0, ROWS)[:, None, None], tl.arange(0, COLS // WIDTH)[None, :, None]
    return ptr + row * stride + piece * WIDTH + tl.arange(0, WIDTH // EACH)[None, None, :] * EACH


@triton.jit
def tiles(ptr, stride, step, COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
          WIDTH: tl.constexpr, TO_L2: tl.constexpr):  # fmt: skip
    """COUNT tiles [ROWS, COLS] of weights, `step` apart: loaded, or only asked for."""
    found = ()
    for i in tl.static_range(COUNT):
        if TO_L2:
            prefetch(tile_at(ptr + i * step, stride, ROWS, COLS, WIDTH, min(WIDTH, 64)))
        else:
            tile = tl.load(tile_at(ptr + i * step, stride, ROWS, COLS, WIDTH, 1))
            found = found + (tile,)
    return found


@triton.jit
def share_of(w, layer, PHASE: tl.constexpr, TO_L2: tl.constexpr, S: tl.constexpr):
    """The weights with which this program multiplies in a phase."""
    pid = tl.program_id(0)
    found = ()
    if PHASE == QKV:
        rows: tl.constexpr = S.heads * S.dim // S.programs
        ptr = w.qkv + (layer * S.programs + pid) * rows * S.hidden
        found = tiles(ptr, S.hidden, 0, 1, rows, S.hidden, S.width, TO_L2)
    elif PHASE == OUT:
        rows: tl.constexpr = S.hidden // S.splits
        width: tl.constexpr = S.group * S.dim
        row = layer * S.hidden + pid % S.splits * rows
        ptr = w.out + row * (S.kv * width) + pid // S.splits * width
        found = tiles(ptr, S.kv * width, 0, 1, rows, width, width, TO_L2)
    elif PHASE == GATE_UP:
        share: tl.constexpr = S.inter // S.programs
        count: tl.constexpr = share // S.gate_rows
        ptr = w.gate_up + (layer * 2 * S.inter + pid * share) * S.hidden
        step = S.gate_rows * S.hidden
        found = tiles(ptr, S.hidden, step, count, S.gate_rows, S.hidden, S.width, TO_L2)
        up = ptr + S.inter * S.hidden
        found = found + tiles(up, S.hidden, step, count, S.gate_rows, S.hidden, S.width, TO_L2)
    elif PHASE == DOWN:
        rows: tl.constexpr = S.hidden // S.programs
        count: tl.constexpr = S.inter // S.down_cols
        ptr = w.down + (layer * S.programs + pid) * rows * S.inter
        found = tiles(ptr, S.inter, S.down_cols, count, rows, S.down_cols, S.width, TO_L2)
    return found


@triton.jit
def ready(w, b, layer, PHASE: tl.constexpr, S: tl.constexpr):
    """Wait for the phase before; on the way, ask for the weights of a later one."""
    LATER: tl.constexpr = PHASE + S.ahead
    if S.ahead > 0 and (S.work >> LATER % 5) & 1:
        later = layer + LATER // 5
        if later < S.layers:
            share_of(w, later, LATER % 5, True, S)
    if S.sync == BARRIER:
        wait_for(b.counts, (layer * 5 + PHASE) * S.programs)


@triton.jit
def columns(COLS: tl.constexpr, WIDTH: tl.constexpr):
    """0 ... COLS - 1 in the shape of a tile's row: [COLS / WIDTH, WIDTH]."""
    return tl.arange(0, COLS // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def multiply(tile, x):
    """tile [rows, pieces, width] by x [pieces, width] float32: [rows]."""
    return tl.sum(tl.sum(tile.to(tl.float32) * x[None, :, :], 1), 1)
