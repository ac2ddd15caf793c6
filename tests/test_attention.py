"""Attention: metadata, the backends against a dense oracle, graph plans, the plan's arithmetic."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from minisgl.attention import factory, torch_backend
from minisgl.attention.base import DecodeBuffers
from minisgl.attention.factory import available, create_backend
from minisgl.attention.metadata import AttentionMetadata, build_metadata, ragged_arange
from minisgl.attention.plan_arithmetic import plan_tiles, search_kv_chunk
from minisgl.attention.staging import StagingRing
from minisgl.core import IntArray, Phase
from minisgl.kvcache.pool import KVPool
from tests.attention_worlds import (
    DEVICE,
    Shape,
    World,
    assert_close,
    dense_oracle,
    fill,
    make_world,
    static_buffers,
)

QUICK = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
FEW = settings(QUICK, max_examples=8)


@st.composite
def shapes(draw: st.DrawFn, max_len: int = 40, decode: bool | None = None) -> Shape:
    """Batches of one to five requests; decode steps, prompts with and without a cached prefix."""
    if decode is None:
        decode = draw(st.booleans())
    new = st.just(1) if decode else st.integers(1, max_len // 2)
    lens = draw(st.lists(st.tuples(st.integers(0, max_len // 2), new), min_size=1, max_size=5))
    page_size = draw(st.sampled_from([1, 4, 16, 64]))
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


@QUICK
@given(shapes())
def test_torch_attends_to_what_is_stored(shape: Shape) -> None:
    world = make_world(shape)
    assert_close(world.attend_stored("torch"), dense_oracle(world))


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


@FEW
@given(shapes(max_len=24))
def test_triton_attends_to_what_is_stored(shape: Shape) -> None:
    world = make_world(shape)
    assert_close(world.attend_stored("triton"), dense_oracle(world))


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


def test_triton_refuses_bfloat16_in_the_interpreter() -> None:
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="dtype: Triton's interpreter"):
        make_world(CASES["decode"], dtype=torch.bfloat16).backend("triton")


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 20), (2, 16)])
def test_store_kv_kernel(kv_heads: int, head_dim: int) -> None:
    from minisgl.kernels.store_kv import store_kv, store_kv_reference

    gen = torch.Generator().manual_seed(1)
    # A page before each cache: a kernel that takes slot -1 for a place must not leave our memory.
    caches = torch.randn(2, 5, 4, kv_heads, head_dim, generator=gen).to(DEVICE)
    want = caches.clone()
    packed = torch.randn(6, 3 * kv_heads, head_dim, generator=gen).to(DEVICE)
    k, v = packed[:, :kv_heads], packed[:, kv_heads : 2 * kv_heads]  # rows further apart
    out_loc = torch.tensor([3, 15, -1, 0, 8, -1], device=DEVICE)
    store_kv(k, v, caches[0, 1:], caches[1, 1:], out_loc)
    store_kv_reference(k, v, want[0, 1:], want[1, 1:], out_loc)
    assert torch.equal(caches, want)


def test_store_kv_kernel_transposed_heads() -> None:
    from minisgl.kernels.store_kv import store_kv, store_kv_reference

    k = torch.randn(2, 3, 8).transpose(0, 1).to(DEVICE)  # [3 tokens, 2 heads, 8]
    got, want = torch.zeros(2, 2, 2, 4, 2, 8, device=DEVICE).unbind(0)
    slots = torch.tensor([5, 0, 2], device=DEVICE)
    store_kv(k, -k, got[0], got[1], slots)
    store_kv_reference(k, -k, want[0], want[1], slots)
    assert torch.equal(got, want)


# ------------------------------------------------------------------- the list of pages, on device


def listed_pages(world: World, monkeypatch: pytest.MonkeyPatch, block: int) -> tuple[Tensor, int]:
    """What the kernel writes into a buffer of -1, and how much of it should be pages."""
    from minisgl.kernels import kv_indices

    monkeypatch.setattr(kv_indices, "BLOCK", block)
    meta = world.meta
    total = int(meta.kv_indptr[-1])
    out = torch.full((total + 7,), -1, dtype=torch.int32, device=DEVICE)
    rows, starts = (torch.from_numpy(a).to(DEVICE) for a in (meta.table_idx, meta.kv_indptr))
    table, page = world.tables.device_page_table, meta.page_size
    most = -(-meta.max_seq_len // page)
    kv_indices.write_kv_indices(table, rows.long(), starts, out, page_size=page, max_pages=most)
    want = kv_indices.kv_indices_reference(table, rows, starts, page)
    assert torch.equal(out[:total], want) and bool((out[total:] == -1).all())
    return out[:total], total


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("case", ["decode", "partial", "shared"])
def test_kv_indices_kernel_cases(case: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(CASES[case])
    listed, _ = listed_pages(world, monkeypatch, block)
    assert listed.tolist() == world.meta.kv_indices.tolist()


@FEW
@given(shapes(max_len=80))
def test_kv_indices_kernel_is_the_hosts_list(shape: Shape) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(shape)
        listed, total = listed_pages(world, patch, 4)
        assert len(listed) == total and listed.tolist() == world.meta.kv_indices.tolist()


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
    buffers = static_buffers(first, len(first.out_loc))
    backend = first.backend(name)
    plan = backend.graph_plan(len(first.out_loc), buffers)
    plan.run(first.q, first.k, first.v, 1)  # as a capture does, with dummy requests
    addresses = tensor_addresses(plan)
    for world in worlds:
        # the same pool and tables serve all batches: bring this world's content into the first's
        first.pool.buffer.copy_(world.pool.buffer)
        first.tables.device_page_table.copy_(world.tables.device_page_table)
        eager = world.attend(name)
        fill(buffers, world)
        plan.update(world.meta)
        got = plan.run(world.q, world.k, world.v, 1)
        assert_close(got, eager, 2e-5)
        assert torch.equal(plan.attend(world.q, 1), got)
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
    plan = world.backend(name).graph_plan(4, static_buffers(world, 4))
    with pytest.raises(ValueError, match="batch_size: must be 4, got 3"):
        plan.update(world.meta)


def test_graph_plan_of_torch_ignores_stale_table_entries() -> None:
    world = make_world(CASES["decode"])
    table = world.tables.device_page_table
    for row, length in zip(world.meta.table_idx, world.meta.seq_lens, strict=True):
        table[row, length:] = -1
    buffers = static_buffers(world, 3)
    plan = world.backend("torch").graph_plan(3, buffers)
    fill(buffers, world)
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pitfall_04_an_upload_waits_for_the_copy_that_reads_its_buffer(depth: int) -> None:
    copies: list[LateCopy] = []

    def copy(target: Tensor, source: Tensor) -> LateCopy:
        copies.append(LateCopy(target, source))
        return copies[-1]

    ring = StagingRing("cpu", depth, copy)
    steps = [ring.upload(np.full(3, n), np.full(2, n / 2)) for n in range(7)]
    assert sum(late.done for late in copies) == 7 - depth
    for late in copies:
        late.synchronize()
    for n, (ints, floats) in enumerate(steps):
        assert ints.tolist() == [n] * 3 and floats.tolist() == [n / 2] * 2


def test_uploads_keep_shapes_dtypes_and_alignment() -> None:
    ring = StagingRing("cpu")
    arrays = [
        np.arange(3, dtype=np.int32),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([0.5], np.float32),
        np.array([0.1, 0.2]),
    ]
    tensors = ring.upload(*arrays)
    for n in range(5):
        ring.upload(np.full(100, n))  # earlier tensors keep their values
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype and tuple(tensor.shape) == array.shape
        assert (tensor.numpy() == array).all()
    big = np.arange(10_000)
    assert ring.upload(big)[0].tolist() == big.tolist()


def test_send_flattens_and_refuses_another_dtype() -> None:
    ring, target = StagingRing("cpu"), torch.full((8,), -1)
    ring.send([np.arange(6).reshape(2, 3)], target)
    assert target.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    with pytest.raises(TypeError):
        ring.send([np.arange(6, dtype=np.int32)], target)


# ----------------------------------------------------------------------------- pairs and factory


def test_pair_backend_routes_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Spy(torch_backend.TorchBackend):
        def plan(self, meta: AttentionMetadata, out_loc: Tensor):  # type: ignore[no-untyped-def]
            calls.append(self.name)
            return super().plan(meta, out_loc)

        def graph_plan(self, batch_size: int, buffers: DecodeBuffers):  # type: ignore[no-untyped-def]
            calls.append(f"graph {self.name}")
            return super().graph_plan(batch_size, buffers)

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
    pair.graph_plan(3, static_buffers(worlds["decode"], 3))
    assert calls == ["triton", "torch", "graph triton"]
    assert worlds["decode"].backend("torch,torch").name == "torch"


@pytest.mark.parametrize("name", ["cuda", "", "torch,", ",torch", "torch,fa3", "torch,torch,fi"])
def test_factory_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="attention_backend: must be one of torch, triton, fi"):
        make_world(CASES["decode"]).backend(name)


def test_available_asks_for_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton"}
    monkeypatch.setattr(factory, "find_spec", lambda name: name if name in installed else None)
    assert available("torch") and available("triton") and available("torch,triton")
    assert not available("fi") and not available("fi,triton") and not available("torch,fi")
    installed.add("flashinfer")
    assert available("fi") and available("fi,triton")
    with pytest.raises(ValueError, match="attention_backend: must be one of torch, triton, fi"):
        available("fa3")


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
@QUICK
@given(shapes())
def test_flashinfer_is_dense(shape: Shape) -> None:
    world = make_world(shape)
    assert_close(world.attend("fi"), dense_oracle(world))
    assert_close(make_world(shape).attend_stored("fi"), dense_oracle(world))


@pytest.mark.usefixtures("fake")
@QUICK
@given(shapes(decode=False))
def test_flashinfer_ragged_prefill_is_dense(shape: Shape) -> None:
    """With a threshold of one token: ragged exactly where nothing is cached."""
    from minisgl.attention import flashinfer_backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_backend, "RAGGED_TOKENS", 1)
        world = make_world(shape)
        plan = world.plan("fi")
        ragged = isinstance(plan, flashinfer_backend.RaggedPlan)
        no_prefix = all(cached == 0 for cached, _ in shape.lens)
        assert ragged == (no_prefix and shape.phase is Phase.PREFILL)
        assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))
        assert_close(make_world(shape).attend_stored("fi"), dense_oracle(world))


@pytest.mark.usefixtures("fake")
def test_flashinfer_ragged_only_without_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl.attention import flashinfer_backend

    monkeypatch.setattr(flashinfer_backend, "RAGGED_TOKENS", 14)
    for lens, ragged in (
        (((0, 5), (0, 9)), True),
        (((0, 5), (0, 8)), False),  # too few tokens
        (((0, 5), (4, 9)), False),  # a prefix
    ):
        world = make_world(Shape(lens=lens))
        plan = world.plan("fi")
        assert isinstance(plan, flashinfer_backend.RaggedPlan) == ragged
        assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


@pytest.mark.usefixtures("fake")
def test_flashinfer_ragged_plan_stays_with_the_pages_once_it_went_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minisgl.attention import flashinfer_backend

    monkeypatch.setattr(flashinfer_backend, "RAGGED_TOKENS", 1)
    world = make_world(CASES["prefill"])
    plan, want = world.plan("fi"), dense_oracle(world)
    assert_close(plan.run(world.q, world.k, world.v, 0), want)
    world.pool.store_kv(world.k, world.v, world.out_loc, 1)
    assert_close(plan.attend(world.q, 1), want)  # its scratch memory holds the paged plan now
    assert_close(plan.run(world.q, world.k, world.v, 0), want)
    assert_close(plan.attend(world.q, 1, world.k, world.v), want)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_flashinfer_graph_plan_equals_eager_plan(
    on_device: bool, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages listed by the host or by the kernel; planned by the short or by the public way."""
    from minisgl.attention import flashinfer_backend
    from tests import fake_flashinfer

    if not short:
        monkeypatch.setattr(fake_flashinfer, "MODULE", "_renamed_in_another_version")

    class Chosen(flashinfer_backend.FlashInferBackend):
        def graph_plan(self, batch_size: int, buffers: DecodeBuffers):  # type: ignore[no-untyped-def]
            self.lists_on_device = on_device
            plan = super().graph_plan(batch_size, buffers)
            assert plan.fast == short
            return plan

    monkeypatch.setattr(flashinfer_backend, "FlashInferBackend", Chosen)
    check_graph_plan("fi", batches_of_one_size())


@pytest.mark.usefixtures("fake")
def test_flashinfer_short_plan_is_only_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first plan no update calls the public one, and host buffers still alternate."""
    from tests import fake_flashinfer

    world = make_world(CASES["decode"])
    buffers = static_buffers(world, 3)
    plan = world.backend("fi").graph_plan(3, buffers)
    fill(buffers, world)
    monkeypatch.delattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan")
    hosts = fake_flashinfer.PLANNER.hosts
    hosts.clear()
    for _ in range(4):
        plan.update(world.meta)
    assert hosts[0] != hosts[1] and hosts[:2] == hosts[2:]
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


@pytest.mark.usefixtures("fake")
def test_flashinfer_short_plan_must_answer_like_the_public_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minisgl.attention import flashinfer_backend

    right = flashinfer_backend.fast_plan

    def other(*args, **kwargs):  # type: ignore[no-untyped-def]
        return [x + 1 for x in right(*args, **kwargs)]

    monkeypatch.setattr(flashinfer_backend, "fast_plan", other)
    world = make_world(CASES["decode"])
    assert not world.backend("fi").graph_plan(3, static_buffers(world, 3)).fast  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fake")
def test_flashinfer_tensor_cores_can_be_switched_off() -> None:
    world = make_world(CASES["decode"])
    for wanted in (True, False):
        backend = world.backend("fi", use_tensor_cores=wanted)
        plan = backend.graph_plan(3, static_buffers(world, 3))
        assert backend.decode.use_tensor_cores == wanted  # type: ignore[attr-defined]
        assert plan.wrapper.use_tensor_cores == wanted  # type: ignore[attr-defined]
        assert plan.fast == wanted  # type: ignore[attr-defined]  # the planner of prefill, or none


@pytest.mark.usefixtures("fake")
def test_flashinfer_sizes_share_one_buffer() -> None:
    """Captured from the largest on; each plan writes its arrays anew, whoever came before."""
    world = make_world(CASES["decode"])
    backend = world.backend("fi")
    plans = {n: (static_buffers(world, n), n) for n in (8, 3)}
    made = {n: backend.graph_plan(n, buffers) for n, (buffers, _) in plans.items()}
    assert made[8].ints.data_ptr() == made[3].ints.data_ptr()  # type: ignore[attr-defined]
    fill(plans[3][0], world)
    made[3].update(world.meta)
    assert_close(made[3].run(world.q, world.k, world.v, 1), dense_oracle(world))


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
