"""Attention: metadata, the backends against a dense oracle, graph plans, the plan's arithmetic."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from minisgl.attention import factory, torch_backend
from minisgl.attention.base import AttentionBackend
from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import AttentionMetadata, build_metadata, ragged_arange
from minisgl.attention.plan_arithmetic import plan_tiles, search_kv_chunk
from minisgl.attention.staging import StagingRing
from minisgl.core import IntArray, Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
FEW = settings(QUICK, max_examples=8)

# ------------------------------------------------------------------------------ a batch to attend


@dataclass(frozen=True)
class Shape:
    """What a batch looks like: (cached tokens, new tokens) of each request, pages and heads."""

    lens: tuple[tuple[int, int], ...]
    page_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    shared_pages: int = 0  # leading pages that all requests have in common
    seed: int = 0

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if all(new == 1 for _, new in self.lens) else Phase.PREFILL


@dataclass
class World:
    """A pool with scattered pages, the batch's q, k, v, and the dense K and V of every request."""

    shape: Shape
    pool: KVPool
    tables: TableManager
    meta: AttentionMetadata
    out_loc: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dense: list[tuple[Tensor, Tensor]]

    def backend(self, name: str) -> AttentionBackend:
        heads = self.shape.kv_heads * self.shape.group
        return create_backend(name, pool=self.pool, tables=self.tables, num_qo_heads=heads)

    def attend(self, name: str, layer_id: int = 1) -> Tensor:
        plan = self.backend(name).plan(self.meta, self.out_loc)
        return plan.run(self.q, self.k, self.v, layer_id)


def make_world(shape: Shape, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> World:
    """Random keys and values; pages in random order; stale garbage in every slot not in use."""
    gen = torch.Generator().manual_seed(shape.seed)
    rng = np.random.default_rng(shape.seed)
    page = shape.page_size
    totals = [cached + new for cached, new in shape.lens]
    pages_needed = sum(-(-total // page) for total in totals)
    pool = KVPool(
        num_layers=2, num_pages=pages_needed + 3, page_size=page, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, dtype=dtype, device=device,
    )  # fmt: skip
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=gen) * 30)
    tables = TableManager(
        len(totals) + 1, max(totals) + 2 * page, page, pool.dummy_page, torch.device(device)
    )
    free = list(rng.permutation(pool.num_pages))
    shared = [free.pop() for _ in range(shape.shared_pages)]
    rows, new_slots, new_kv, dense = [], [], [], []
    for (cached, _), total in zip(shape.lens, totals, strict=True):
        common = min(shape.shared_pages, cached // page)
        own = [free.pop() for _ in range(-(-total // page) - common)]
        pages = np.array(shared[:common] + own)
        slots = (pages[:, None] * page + np.arange(page)).reshape(-1)[:total].astype(np.int32)
        rows.append(tables.allocate())
        tables.write(rows[-1], 0, slots)
        kv = torch.randn(2, total, shape.kv_heads, shape.head_dim, generator=gen)
        kv = kv.to(dtype).to(device)
        if common:
            index = torch.from_numpy(slots[: common * page].astype(np.int64)).to(device)
            if dense:
                kv[:, : common * page] = pool.buffer[:, 1].flatten(1, 2)[:, index]
        index = torch.from_numpy(slots[:cached].astype(np.int64)).to(device)
        pool.buffer[:, 1].flatten(1, 2)[:, index] = kv[:, :cached]
        dense.append((kv[0], kv[1]))
        new_slots.append(slots[cached:])
        new_kv.append(kv[:, cached:])
    tables.flush()
    extend, seq = np.array([n for _, n in shape.lens]), np.array(totals)
    meta = build_metadata(
        shape.phase, np.array(rows), extend, seq, tables.page_table, shape.page_size
    )
    k, v = torch.cat(new_kv, dim=1)
    q = torch.randn(meta.num_tokens, shape.kv_heads * shape.group, shape.head_dim, generator=gen)
    out_loc = torch.from_numpy(np.concatenate(new_slots).astype(np.int64)).to(device)
    return World(
        shape, pool, tables, meta, out_loc, q.to(dtype).to(device), k, v, dense
    )  # fmt: skip


def dense_oracle(world: World) -> Tensor:
    """Attention by its definition: one query token and head at a time, in float64."""
    shape, out, row = world.shape, torch.empty(world.q.shape, dtype=torch.float64), 0
    q = world.q.double().cpu()
    for (cached, new), (keys, values) in zip(shape.lens, world.dense, strict=True):
        for i in range(new):
            for head in range(shape.kv_heads * shape.group):
                seen = slice(0, cached + i + 1)
                k = keys.double().cpu()[seen, head // shape.group]
                v = values.double().cpu()[seen, head // shape.group]
                scores = k @ q[row, head] / shape.head_dim**0.5
                weights = torch.exp(scores - scores.max())
                out[row, head] = (weights / weights.sum()) @ v
            row += 1
    return out


def assert_close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=0)


@st.composite
def shapes(draw: st.DrawFn, max_len: int = 40, decode: bool | None = None) -> Shape:
    """Batches of one to five requests; decode steps, prompts with and without a cached prefix."""
    if decode is None:
        decode = draw(st.booleans())
    new = st.just(1) if decode else st.integers(1, max_len // 2)
    lens = draw(st.lists(st.tuples(st.integers(0, max_len // 2), new), min_size=1, max_size=5))
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Shape(
        lens=tuple(lens),
        page_size=page_size,
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([8, 16, 20])),
        shared_pages=draw(st.integers(0, min(c for c, _ in lens) // page_size)),
        seed=draw(st.integers(0, 2**16)),
    )


CASES = {
    "decode": Shape(lens=((6, 1), (0, 1), (3, 1))),
    "prefill": Shape(lens=((0, 5), (0, 1), (0, 8))),
    "partial": Shape(lens=((4, 3), (0, 2), (8, 1), (7, 4))),
    "shared": Shape(lens=((8, 1), (9, 1), (15, 1)), shared_pages=2),
}

# ------------------------------------------------------------------------------------- metadata


def ragged(table: IntArray, meta: AttentionMetadata) -> list[list[int]]:
    """Pages of each request, by a loop over the table."""
    return [
        [int(table[row, p]) // meta.page_size for p in range(0, length, meta.page_size)]
        for row, length in zip(meta.table_idx, meta.seq_lens, strict=True)
    ]


@QUICK
@given(shapes())
def test_metadata_describes_every_request(shape: Shape) -> None:
    world = make_world(shape)
    meta, page = world.meta, shape.page_size
    want = ragged(world.tables.page_table, meta)
    got = [list(part) for part in np.split(meta.kv_indices, meta.kv_indptr[1:-1])]
    assert got == want
    for i, (cached, new) in enumerate(shape.lens):
        assert meta.qo_indptr[i + 1] - meta.qo_indptr[i] == new
        full_pages = meta.kv_indptr[i + 1] - meta.kv_indptr[i] - 1
        assert full_pages * page + meta.last_page_len[i] == cached + new
        assert 1 <= meta.last_page_len[i] <= page
    assert meta.qo_indptr[0] == meta.kv_indptr[0] == 0
    assert meta.num_tokens == len(world.out_loc) and meta.batch_size == len(shape.lens)
    assert meta.max_seq_len == max(c + n for c, n in shape.lens)
    assert meta.max_extend_len == max(n for _, n in shape.lens)
    assert meta.no_prefix == all(c == 0 for c, _ in shape.lens)
    names = ["table_idx", "extend_lens", "seq_lens", "qo_indptr", "kv_indptr", "last_page_len"]
    assert all(getattr(meta, name).dtype == np.int32 for name in [*names, "kv_indices"])


def test_metadata_last_page_exactly_full() -> None:
    meta = make_world(Shape(lens=((3, 1), (4, 1), (7, 1)))).meta
    assert meta.last_page_len.tolist() == [4, 1, 4]
    assert meta.kv_indptr.tolist() == [0, 1, 3, 5]


def test_metadata_prefill_without_hit_shares_its_row_pointers() -> None:
    meta = make_world(Shape(lens=((0, 5), (0, 2)), page_size=1)).meta
    assert meta.no_prefix and meta.qo_indptr.tolist() == meta.kv_indptr.tolist() == [0, 5, 7]


@pytest.mark.parametrize(
    ("phase", "extend", "seq", "word"),
    [
        (Phase.PREFILL, [0], [3], "extend_lens"),
        (Phase.PREFILL, [4], [3], "extend_lens"),
        (Phase.DECODE, [2], [3], "decode"),
        (Phase.PREFILL, [1, 1], [3], "one entry per request"),
    ],
)
def test_metadata_refuses(phase: Phase, extend: list[int], seq: list[int], word: str) -> None:
    table = np.zeros((2, 8), dtype=np.int32)
    with pytest.raises(ValueError, match=word):
        build_metadata(phase, np.zeros(len(seq)), np.array(extend), np.array(seq), table, 4)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=6))
def test_ragged_arange(rows: list[tuple[int, int]]) -> None:
    starts, lens = (np.array([r[i] for r in rows], dtype=np.int32) for i in (0, 1))
    want = [s + j for s, n in rows for j in range(n)]
    assert ragged_arange(starts, lens).tolist() == want


# ------------------------------------------------------------------------------- torch = oracle


@QUICK
@given(shapes())
def test_torch_is_dense(shape: Shape) -> None:
    world = make_world(shape)
    assert_close(world.attend("torch"), dense_oracle(world))


@pytest.mark.parametrize("case", CASES)
def test_torch_cases(case: str) -> None:
    world = make_world(CASES[case])
    assert_close(world.attend("torch"), dense_oracle(world))
    keys = world.pool.k_cache(1).flatten(0, 1)[world.out_loc]
    values = world.pool.v_cache(1).flatten(0, 1)[world.out_loc]
    assert torch.equal(keys, world.k) and torch.equal(values, world.v)


def test_torch_plan_serves_every_layer() -> None:
    world = make_world(CASES["decode"])
    plan = world.backend("torch").plan(world.meta, world.out_loc)
    first = plan.run(world.q, world.k, world.v, 1)
    plan.run(world.q * 3, world.k * 50, world.v, 0)
    assert torch.equal(plan.run(world.q, world.k, world.v, 1), first)


def test_torch_takes_rows_of_a_wider_tensor() -> None:
    for case in CASES.values():
        world = make_world(case)
        want = world.attend("torch")
        packed = torch.cat([world.q, world.k, world.v], dim=1)  # as a fused projection gives them
        heads, kv_heads = world.q.shape[1], world.k.shape[1]
        world.q, world.k, world.v = packed.split([heads, kv_heads, kv_heads], dim=1)
        assert_close(world.attend("torch"), want, 1e-6)


def test_torch_decode_bfloat16() -> None:
    world = make_world(CASES["decode"], dtype=torch.bfloat16)
    assert_close(world.attend("torch"), dense_oracle(world), 0.05)


def test_decode_equals_prefill_of_one_token() -> None:
    shape = CASES["decode"]
    decode, prefill = make_world(shape), make_world(shape)
    prefill.meta = build_metadata(
        Phase.PREFILL, decode.meta.table_idx, decode.meta.extend_lens, decode.meta.seq_lens,
        prefill.tables.page_table, shape.page_size,
    )  # fmt: skip
    assert_close(decode.attend("torch"), prefill.attend("torch"), 1e-5)


# ------------------------------------------------------------------------------ triton = torch


@FEW
@given(shapes(max_len=24))
def test_triton_is_dense(shape: Shape) -> None:
    world = make_world(shape)
    assert_close(world.attend("triton"), dense_oracle(world))


@pytest.mark.parametrize("case", CASES)
def test_triton_cases(case: str) -> None:
    world = make_world(CASES[case])
    assert_close(world.attend("triton"), dense_oracle(world))


# Long enough that the plan splits: four SMs are assumed, chunks of 128 at least.
SPLIT = {
    "decode": Shape(lens=((300, 1), (130, 1)), kv_heads=1, group=3, page_size=16),
    "prefill": Shape(lens=((280, 5), (0, 4)), kv_heads=1, group=2, page_size=16),
}


@pytest.mark.parametrize("case", SPLIT)
def test_triton_split_and_merge(case: str) -> None:
    world = make_world(SPLIT[case])
    backend = world.backend("triton")
    plan = backend.plan(world.meta, world.out_loc)
    if DEVICE == "cpu":
        assert plan.split
    got = plan.run(world.q, world.k, world.v, 1)
    assert_close(got, dense_oracle(world))


def test_triton_pads_its_work_items() -> None:
    """A captured grid has room to spare: what is not used is marked, and tiles stay in order."""
    from minisgl.attention.triton_backend import kernel_args

    world = make_world(CASES["decode"])
    tiles = world.backend("triton").tiles(world.meta)  # type: ignore[attr-defined]
    args = kernel_args(world.meta, tiles, num_items=6, num_tiles=5)
    chunk, rows, qo_indptr, seq_lens, request, qo_tile, kv_tile, tile_indptr = args
    assert chunk.tolist() == [128] and rows.tolist() == world.meta.table_idx.tolist()
    assert request.tolist() == [0, 1, 2, -1, -1, -1]
    assert qo_tile[:3].tolist() == kv_tile[:3].tolist() == [0, 0, 0]
    assert tile_indptr.tolist() == [0, 1, 2, 3, 3, 3]
    assert qo_indptr.tolist() == [0, 1, 2, 3] and seq_lens.tolist() == [7, 1, 4]


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    from minisgl.attention import triton_backend

    compiled = type(triton_backend.attention_kernel)  # as if the kernels were to be compiled
    monkeypatch.setattr(triton_backend.triton, "JITFunction", compiled)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        make_world(CASES["decode"]).backend("triton")


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 20), (2, 16)])
def test_store_kv_kernel(kv_heads: int, head_dim: int) -> None:
    from minisgl.kernels.store_kv import store_kv, store_kv_reference

    gen = torch.Generator().manual_seed(1)
    caches = torch.randn(2, 4, 4, kv_heads, head_dim, generator=gen).to(DEVICE)
    want = caches.clone()
    packed = torch.randn(6, 3 * kv_heads, head_dim, generator=gen).to(DEVICE)
    k, v = packed[:, :kv_heads], packed[:, kv_heads : 2 * kv_heads]  # rows further apart
    out_loc = torch.tensor([3, 15, -1, 0, 8, -1], device=DEVICE)
    store_kv(k, v, caches[0], caches[1], out_loc)
    store_kv_reference(k, v, want[0], want[1], out_loc)
    assert torch.equal(caches, want)
    assert not torch.equal(caches[0, 3, 3], packed[2, :kv_heads])


def test_store_kv_kernel_transposed_heads() -> None:
    from minisgl.kernels.store_kv import store_kv, store_kv_reference

    k = torch.randn(2, 3, 8).transpose(0, 1).to(DEVICE)  # [3 tokens, 2 heads, 8]
    got, want = torch.zeros(2, 2, 2, 4, 2, 8, device=DEVICE).unbind(0)
    slots = torch.tensor([5, 0, 2], device=DEVICE)
    store_kv(k, -k, got[0], got[1], slots)
    store_kv_reference(k, -k, want[0], want[1], slots)
    assert torch.equal(got, want)


# --------------------------------------------------------------------- a prefix that all share


@QUICK
@given(shapes(decode=True))
def test_torch_decode_reads_a_shared_prefix_once(shape: Shape) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "MIN_SHARED", 1)
        world = make_world(shape)
        plan = world.backend("torch").plan(world.meta, world.out_loc)
        assert isinstance(plan, torch_backend.RaggedDecodePlan)
        if len(shape.lens) > 1:
            assert plan.shared == shape.shared_pages * shape.page_size
        assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


def test_shared_prefix_leaves_every_request_a_position() -> None:
    """Two rows that agree everywhere still keep their last position apart."""
    table = np.tile(np.arange(64, dtype=np.int32), (3, 1))
    lens = np.array([40, 64, 50])
    ones = np.ones(3, dtype=np.int32)
    meta = build_metadata(Phase.DECODE, np.arange(3), ones, lens, table, 4)
    assert torch_backend.shared_prefix(meta) == 39
    table[1, 35] = 99
    assert torch_backend.shared_prefix(meta) == 35
    table[2, 10] = 99
    assert torch_backend.shared_prefix(meta) == 0  # too short to be worth it
    alone = build_metadata(Phase.DECODE, np.arange(1), ones[:1], lens[1:2], table, 4)
    assert torch_backend.shared_prefix(alone) == 0


# ----------------------------------------------------------------------------------- graph plans


def check_graph_plan(name: str, worlds: list[World]) -> None:
    """One graph plan serves batch after batch; its buffers stay where they are."""
    first = worlds[0]
    out_loc = torch.full_like(first.out_loc, first.pool.dummy_slot)
    backend = first.backend(name)
    plan = backend.graph_plan(len(out_loc), out_loc)
    plan.run(first.q, first.k, first.v, 1)  # as a capture does, with dummy requests
    addresses = tensor_addresses(plan)
    for world in worlds:
        # the same pool and tables serve all batches: bring this world's content into the first's
        first.pool.buffer.copy_(world.pool.buffer)
        first.tables.device_page_table.copy_(world.tables.device_page_table)
        eager = world.attend(name)
        out_loc.copy_(world.out_loc)
        plan.update(world.meta)
        got = plan.run(world.q, world.k, world.v, 1)
        assert_close(got, eager, 2e-5)
        assert_close(got, dense_oracle(world))
        assert tensor_addresses(plan) == addresses


def tensor_addresses(plan: object) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in vars(plan).items() if isinstance(t, Tensor)}


def batches_of_one_size(group: int = 2) -> list[World]:
    """Three batches that differ in all lengths, in tables and pools of one size."""
    lens = [((5, 1), (130, 1), (0, 1)), ((140, 1), (3, 1), (7, 1)), ((0, 1), (0, 1), (150, 1))]
    worlds = []
    for i, each in enumerate(lens):
        padded = (*each, (160, 1))  # a fourth request keeps the sizes equal; it is not in the batch
        shape = Shape(lens=each, group=group, seed=i)
        whole = make_world(Shape(lens=padded, group=group, seed=i))
        worlds.append(first_requests(whole, shape))
    pages = max(w.pool.num_pages for w in worlds)
    return [regrow(w, pages) for w in worlds]


def first_requests(world: World, shape: Shape) -> World:
    """The same world with a smaller batch."""
    n = len(shape.lens)
    meta = build_metadata(
        shape.phase, world.meta.table_idx[:n], world.meta.extend_lens[:n],
        world.meta.seq_lens[:n], world.tables.page_table, shape.page_size,
    )  # fmt: skip
    t = meta.num_tokens
    return World(
        shape, world.pool, world.tables, meta, world.out_loc[:t], world.q[:t],
        world.k[:t], world.v[:t], world.dense[:n],
    )  # fmt: skip


def regrow(world: World, num_pages: int) -> World:
    """Move a world into a pool of `num_pages` pages."""
    old = world.pool
    world.pool = KVPool(
        num_layers=2, num_pages=num_pages, page_size=old.page_size, num_kv_heads=old.num_kv_heads,
        head_dim=old.head_dim, dtype=old.buffer.dtype, device=DEVICE,
    )  # fmt: skip
    world.pool.buffer[:, :, : old.num_pages + 1] = old.buffer
    return world


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("group", [1, 3])
def test_graph_plan_equals_eager_plan(name: str, group: int) -> None:
    check_graph_plan(name, batches_of_one_size(group))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_graph_plan_refuses_another_size(name: str) -> None:
    world = make_world(CASES["decode"])
    plan = world.backend(name).graph_plan(4, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="batch_size: must be 4, got 3"):
        plan.update(world.meta)


def test_graph_plan_of_torch_ignores_stale_table_entries() -> None:
    world = make_world(CASES["decode"])
    table = world.tables.device_page_table
    for row, length in zip(world.meta.table_idx, world.meta.seq_lens, strict=True):
        table[row, length:] = -1
    plan = world.backend("torch").graph_plan(3, world.out_loc)
    plan.update(world.meta)
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


# ------------------------------------------------------------------------------ FlashInfer's plan


def lengths(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def test_plan_arithmetic_worked_example() -> None:
    """144 SMs, 64 KV heads: four tiles fill the GPU."""
    heads = {"num_qo_heads": 64, "num_kv_heads": 64, "head_dim": 128, "num_sms": 144}
    long = plan_tiles(lengths(1000), lengths(1000), page_size=1, **heads)
    assert (long.tile_q, long.split, long.num_items) == (128, False, 8)
    short = plan_tiles(lengths(256), lengths(256), page_size=1, **heads)
    assert (short.tile_q, short.kv_chunk, short.split) == (128, 128, True)
    assert short.request_indices.tolist() == [0, 0, 0, 0]
    assert short.qo_tile_indices.tolist() == [0, 0, 1, 1]
    assert short.kv_tile_indices.tolist() == [0, 1, 0, 1]
    assert short.merge_indptr.tolist() == list(range(0, 513, 2))
    assert short.o_indptr.tolist() == [0, 512]


def plan_by_loops(
    qo_lens: list[int], kv_lens: list[int], group: int, kv_heads: int, page: int, sms: int
) -> tuple[int, int, list[tuple[int, int, int]]]:
    """The same rules by linear search and nested loops."""
    average = sum(n * group for n in qo_lens) // len(qo_lens)
    tile = 128 if average > 64 else 64 if average > 16 else 16
    tiles = [-(-n * group // tile) for n in qo_lens]
    pages = [max(1, -(-n // page)) for n in kv_lens]
    chunk = max(128 // page, 1)
    while chunk < max(pages):
        if sum(t * -(-p // chunk) for t, p in zip(tiles, pages, strict=True)) <= (
            2 * sms // kv_heads
        ):
            break
        chunk += 1
    items = [
        (i, t, c)
        for i in range(len(tiles))
        for t in range(tiles[i])
        for c in range(-(-pages[i] // chunk))
    ]
    return tile, chunk * page, items


@QUICK
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([1, 16, 256]),
    st.integers(1, 144),
)
def test_plan_arithmetic_equals_loops(
    rows: list[tuple[int, int]], group: int, kv_heads: int, page: int, sms: int
) -> None:
    qo = [n for n, _ in rows]
    kv = [n + cached for n, cached in rows]
    plan = plan_tiles(
        lengths(*qo), lengths(*kv), num_qo_heads=group * kv_heads, num_kv_heads=kv_heads,
        head_dim=64, page_size=page, num_sms=sms,
    )  # fmt: skip
    tile, chunk, items = plan_by_loops(qo, kv, group, kv_heads, page, sms)
    got = list(zip(plan.request_indices, plan.qo_tile_indices, plan.kv_tile_indices, strict=True))
    assert (plan.tile_q, plan.kv_chunk) == (tile, chunk) and got == items
    chunks = [-(-max(1, -(-n // page)) // (chunk // page)) for n in kv]
    assert (
        plan.merge_indptr[-1]
        == plan.o_indptr[-1]
        == sum(n * c for n, c in zip(qo, chunks, strict=True))
    )
    assert plan.split == (max(chunks) > 1)


def test_plan_splits_no_further_than_the_gpu_is_wide() -> None:
    tiles = np.array([1, 1, 1])
    pages = np.array([100, 50, 10])
    for most in range(3, 40):
        chunk = search_kv_chunk(tiles, pages, most, 1)
        count = lambda c: int((-(-pages // c)).sum())  # noqa: E731
        assert count(chunk) <= most
        assert chunk == 1 or count(chunk - 1) > most


# --------------------------------------------------------------------------------- host staging


class LateCopy:
    """A copy that happens when it is waited for, as behind a long queue on a device."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source, self.done = target, source, False

    def synchronize(self) -> None:
        if not self.done:
            self.target.copy_(self.source)
            self.done = True


def test_pitfall_04_next_plan_leaves_a_buffer_that_is_still_read() -> None:
    copies: list[LateCopy] = []

    def copy(target: Tensor, source: Tensor) -> LateCopy:
        copies.append(LateCopy(target, source))
        return copies[-1]

    ring = StagingRing(torch.device("cpu"), copy=copy)
    targets = [torch.zeros(5, dtype=torch.int32) for _ in range(6)]
    for i, target in enumerate(targets):
        ring.send([np.full(2, i, dtype=np.int32), np.full(3, 10 * i, dtype=np.int32)], target)
        assert sum(not late.done for late in copies) <= 2
    for late in copies:
        late.synchronize()
    for i, target in enumerate(targets):
        assert target.tolist() == [i, i, 10 * i, 10 * i, 10 * i]


# ----------------------------------------------------------------------------- pairs and factory


def test_pair_backend_routes_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Spy(torch_backend.TorchBackend):
        def plan(self, meta: AttentionMetadata, out_loc: Tensor):  # type: ignore[no-untyped-def]
            calls.append(self.name)
            return super().plan(meta, out_loc)

        def graph_plan(self, batch_size: int, out_loc: Tensor):  # type: ignore[no-untyped-def]
            calls.append(f"graph {self.name}")
            return super().graph_plan(batch_size, out_loc)

    class First(Spy):
        name = "torch"

    class Second(Spy):
        name = "triton"

    monkeypatch.setattr(
        factory.importlib,
        "import_module",
        lambda module: type("M", (), {"TorchBackend": First, "TritonBackend": Second}),
    )
    worlds = {case: make_world(CASES[case]) for case in ("decode", "partial")}
    for world in worlds.values():
        assert_close(world.attend("torch,triton"), dense_oracle(world))
    pair = worlds["decode"].backend("torch,triton")
    assert isinstance(pair, factory.PairBackend) and pair.name == "torch,triton"
    pair.graph_plan(3, worlds["decode"].out_loc)
    assert calls == ["triton", "torch", "graph triton"]
    assert worlds["decode"].backend("torch,torch").name == "torch"


@pytest.mark.parametrize("name", ["cuda", "", "torch,", ",torch", "torch,fa3", "torch,torch,fi"])
def test_factory_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="attention_backend: must be one of torch, triton, fi"):
        make_world(CASES["decode"]).backend(name)


def test_factory_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"pip install 'minisgl\[cuda\]'"):
        make_world(CASES["decode"]).backend("fi")


def test_factory_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith("minisgl.kernels")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "minisgl.attention.triton_backend", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="attention_backend: 'triton' needs triton"):
        make_world(CASES["decode"]).backend("triton")


def test_sm_scale_reaches_the_backend() -> None:
    world = make_world(CASES["partial"])
    heads = world.q.shape[1]
    for name in ("torch", "triton"):
        backend = create_backend(
            name, pool=world.pool, tables=world.tables, num_qo_heads=heads, sm_scale=0.0
        )
        got = backend.plan(world.meta, world.out_loc).run(world.q, world.k, world.v, 1)
        seen = world.dense[0][1][:5].repeat_interleave(2, dim=1)  # all weights are equal
        assert_close(got[0], seen.mean(dim=0), 1e-5)


# ---------------------------------------------------------------- FlashInfer's wrappers, faked


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the library is replaced by wrappers that compute with torch."""
    if DEVICE == "cuda":
        pytest.skip("the real library is tested")
    from tests import fake_flashinfer

    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("case", CASES)
def test_flashinfer_plan_describes_the_batch(case: str) -> None:
    world = make_world(CASES[case])
    assert_close(world.attend("fi"), dense_oracle(world))


@pytest.mark.usefixtures("fake")
def test_flashinfer_graph_plan_equals_eager_plan() -> None:
    check_graph_plan("fi", batches_of_one_size())


@pytest.mark.usefixtures("fake")
def test_pitfall_04_flashinfer_plans_alternate_host_buffers() -> None:
    world = make_world(CASES["decode"])
    backend = world.backend("fi")
    order: list[str] = []

    class Logged:
        def synchronize(self) -> None:
            order.append("waited")

    backend.workspace.events = [Logged(), Logged()]  # type: ignore[attr-defined]
    for _ in range(4):
        backend.plan(world.meta, world.out_loc)
    used = backend.decode.hosts_used  # type: ignore[attr-defined]
    assert used[0] != used[1] and used[:2] == used[2:]
    assert order == ["waited", "waited"]  # each buffer's old copy, before it is filled again


# ------------------------------------------------------------------------------- on a real GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU_SHAPES = {
    "decode": Shape(
        lens=((700, 1), (0, 1), (2050, 1), (64, 1)),
        page_size=16, kv_heads=8, group=2, head_dim=128,
    ),
    "wide group": Shape(
        lens=((300, 1), (4000, 1)), page_size=16, kv_heads=2, group=8, head_dim=64
    ),
    "prefill": Shape(
        lens=((0, 200), (0, 33)), page_size=16, kv_heads=2, group=4, head_dim=128
    ),
    "partial": Shape(
        lens=((512, 77), (0, 64), (48, 1)), page_size=16, kv_heads=2, group=4, head_dim=128
    ),
    "page 1": Shape(lens=((90, 3), (5, 40)), page_size=1, kv_heads=2, group=2, head_dim=64),
}  # fmt: skip


@gpu
@pytest.mark.parametrize("name", ["torch", "triton", "fi"])
@pytest.mark.parametrize("case", GPU_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_backends_agree(name: str, case: str, dtype: torch.dtype) -> None:
    if name == "fi":
        pytest.importorskip("flashinfer")
    world = make_world(GPU_SHAPES[case], dtype=dtype)
    want = per_request_float32(world)
    assert_close(world.attend(name), want, 0.03 if dtype == torch.bfloat16 else 0.005)


def per_request_float32(world: World) -> Tensor:
    """The oracle for long requests: one dense product per request, in float32 on the CPU."""
    out, row = [], 0
    for (cached, new), (keys, values) in zip(world.shape.lens, world.dense, strict=True):
        q = world.q[row : row + new].float().cpu()
        mask = torch_backend.causal_mask(new, cached + new, torch.device("cpu"))
        out.append(
            torch_backend.grouped_attention(
                q,
                keys.float().cpu(),
                values.float().cpu(),
                mask=mask,
                scale=world.shape.head_dim**-0.5,
            )
        )
        row += new
    return torch.cat(out)


@gpu
@pytest.mark.parametrize("name", ["torch", "triton", "fi"])
def test_gpu_graph_replay_equals_eager(name: str) -> None:
    """Capture once with dummies, replay other batches: values in place, addresses unchanged."""
    if name == "fi":
        pytest.importorskip("flashinfer")
    world = make_world(GPU_SHAPES["decode"], dtype=torch.bfloat16)
    backend = world.backend(name)
    bs = world.meta.batch_size
    out_loc = torch.full((bs,), world.pool.dummy_slot, dtype=torch.int64, device=DEVICE)
    plan = backend.graph_plan(bs, out_loc)
    q, k, v = (torch.zeros_like(t) for t in (world.q, world.k, world.v))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.run(q, k, v, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = plan.run(q, k, v, 1)
        eager = world.attend(name)
        for static, value in ((q, world.q), (k, world.k), (v, world.v), (out_loc, world.out_loc)):
            static.copy_(value)
        plan.update(world.meta)
        graph.replay()
        stream.synchronize()
    assert_close(out, eager, 0.02)
    assert_close(out, per_request_float32(world), 0.03)


@gpu
def test_gpu_plans_in_flight_do_not_disturb_each_other() -> None:
    """Many plans are made while the device is busy; each gives its own batch's answer."""
    worlds = [make_world(Shape(lens=((300 + i, 1), (10 * i, 1)), seed=i)) for i in range(6)]
    want = [dense_oracle(w) for w in worlds]
    big = torch.randn(8192, 8192, device=DEVICE)
    backends = [w.backend("triton") for w in worlds]
    ring = backends[0].ring  # type: ignore[attr-defined]
    for backend in backends:
        backend.ring = ring  # type: ignore[attr-defined]
    got = []
    for world, backend in zip(worlds, backends, strict=True):
        big = big @ big.T / 8192
        plan = backend.plan(world.meta, world.out_loc)
        got.append(plan.run(world.q, world.k, world.v, 1))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-3)
