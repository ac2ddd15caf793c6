"""Attention: metadata, the backends against a dense oracle, recorded plans, staging, names."""

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
from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import (
    AttentionMetadata,
    DecodeBuffers,
    build_metadata,
    ragged_arange,
)
from minisgl.attention.staging import StagingRing
from minisgl.attention.torch_backend import TorchBackend
from minisgl.core import IntArray, Phase
from minisgl.kvcache.page_table import TableManager
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
from tests.turns import in_turns

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
    names = ["table_idx", "extend_lens", "seq_lens", "qo_indptr", "kv_indptr", "last_page_len"]
    assert all(getattr(meta, name).dtype == np.int32 for name in [*names, "kv_indices"])


def test_metadata_last_page_exactly_full() -> None:
    meta = make_world(Shape(lens=((3, 1), (4, 1), (7, 1)))).meta
    assert meta.last_page_len.tolist() == [4, 1, 4]
    assert meta.kv_indptr.tolist() == [0, 1, 3, 5]


def test_metadata_prefill_without_hit_shares_its_row_pointers() -> None:
    meta = make_world(Shape(lens=((0, 5), (0, 2)), page_size=1)).meta
    assert meta.qo_indptr.tolist() == meta.kv_indptr.tolist() == [0, 5, 7]


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


# Long enough that the plan splits: parts have 128 keys at least.
SPLIT = {
    "decode": Shape(lens=((300, 1), (130, 1)), kv_heads=1, group=3, page_size=16),
    "prefill": Shape(lens=((280, 5), (0, 4)), kv_heads=1, group=2, page_size=16),
    "long prompts": Shape(lens=((0, 70), (65, 66)), kv_heads=1, group=1, page_size=16),
}


@pytest.mark.parametrize("case", SPLIT)
def test_triton_split_and_merge(case: str) -> None:
    world = make_world(SPLIT[case])
    backend = world.backend("triton")
    plan = backend.plan(world.meta, world.out_loc)
    assert plan.splits > 1  # type: ignore[attr-defined]
    got = plan.run(world.q, world.k, world.v, 1)
    assert_close(got, dense_oracle(world))


def test_triton_lists_every_tile_once() -> None:
    """A tile for each 16, 64 or 128 rows of a request; a row is a token and a head of its group."""
    world = make_world(Shape(lens=((4, 9), (0, 1), (2, 6)), group=2))
    plan = world.backend("triton").plan(world.meta, world.out_loc)
    args = plan.args  # type: ignore[attr-defined]
    assert plan.tile_q == 16  # type: ignore[attr-defined]  # 32 rows, 3 requests
    assert args.request.tolist() == [0, 0, 2, 1] and args.tile.tolist() == [1, 0, 0, 0]
    assert args.last.tolist() == [12, 0, 7] and args.qo_indptr.tolist() == [0, 9, 10, 16]
    assert args.rows.tolist() == world.meta.table_idx.tolist()


@pytest.mark.parametrize(("new", "rows"), [(130, 64), (1100, 128)])
def test_triton_takes_wide_tiles_where_they_fill_the_gpu(new: int, rows: int) -> None:
    world = make_world(Shape(lens=((0, new),), page_size=16), dtype=torch.float16)
    plan = world.backend("triton").plan(world.meta, world.out_loc)
    assert plan.tile_q == rows  # type: ignore[attr-defined]


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    from minisgl.attention import triton_backend

    compiled = type(triton_backend.attention_kernel)  # as if the kernels were to be compiled
    monkeypatch.setattr(triton_backend.triton, "JITFunction", compiled)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        make_world(CASES["decode"]).backend("triton")


def test_triton_refuses_bfloat16_in_the_interpreter() -> None:
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="dtype: Triton's interpreter"):
        make_world(CASES["decode"], dtype=torch.bfloat16).backend("triton")


def store_by_index(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_loc: Tensor) -> None:
    """Store keys and values as `store_kv` must, in plain torch."""
    wanted = torch.nonzero(out_loc >= 0).flatten()
    k_cache.flatten(0, 1)[out_loc[wanted]] = k[wanted]
    v_cache.flatten(0, 1)[out_loc[wanted]] = v[wanted]


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 20), (2, 16)])
def test_store_kv_kernel(kv_heads: int, head_dim: int) -> None:
    from minisgl.kernels.store_kv import store_kv

    gen = torch.Generator().manual_seed(1)
    # A page before each cache: a kernel that takes slot -1 for a place must not leave our memory.
    caches = torch.randn(2, 5, 4, kv_heads, head_dim, generator=gen).to(DEVICE)
    want = caches.clone()
    packed = torch.randn(6, 3 * kv_heads, head_dim, generator=gen).to(DEVICE)
    k, v = packed[:, :kv_heads], packed[:, kv_heads : 2 * kv_heads]  # rows further apart
    out_loc = torch.tensor([3, 15, -1, 0, 8, -1], device=DEVICE)
    store_kv(k, v, caches[0, 1:], caches[1, 1:], out_loc)
    store_by_index(k, v, want[0, 1:], want[1, 1:], out_loc)
    assert torch.equal(caches, want)


def test_store_kv_kernel_transposed_heads() -> None:
    from minisgl.kernels.store_kv import store_kv

    k = torch.randn(2, 3, 8).transpose(0, 1).to(DEVICE)  # [3 tokens, 2 heads, 8]
    got, want = torch.zeros(2, 2, 2, 4, 2, 8, device=DEVICE).unbind(0)
    slots = torch.tensor([5, 0, 2], device=DEVICE)
    store_kv(k, -k, got[0], got[1], slots)
    store_by_index(k, -k, want[0], want[1], slots)
    assert torch.equal(got, want)


# -------------------------------------------------------------------------------- recorded plans


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
        got = plan.run(world.q, world.k, world.v, 1)
        assert_close(got, eager, 2e-5)
        assert torch.equal(plan.attend(world.q, world.k, world.v, 1), got)
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
@pytest.mark.parametrize("group", in_turns(2, [1, 3]))
def test_graph_plan_equals_eager_plan(name: str, group: int) -> None:
    check_graph_plan(name, batches_of_one_size(group))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_graph_plan_ignores_stale_table_entries(name: str) -> None:
    world = make_world(CASES["decode"])
    table = world.tables.device_page_table
    for row, length in zip(world.meta.table_idx, world.meta.seq_lens, strict=True):
        table[row, length:] = -1
    buffers = static_buffers(world, 3)
    plan = world.backend(name).graph_plan(3, buffers)
    fill(buffers, world)
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


@QUICK
@given(shapes(decode=True), st.integers(1, 64))
def test_torch_decode_in_slices_of_any_size(shape: Shape, positions: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "POSITIONS", positions)
        world = make_world(shape)
        assert_close(world.attend("torch"), dense_oracle(world))


@pytest.mark.parametrize(
    "lens",
    [
        [20] * 60 + [1000],
        [700, *[3] * 100, 1500],
        list(range(1, 400, 9)),
        [30, 1, 2000, 4, 500, 90] * 5,
        [90] * 40,
    ],
)
def test_torch_decode_pads_no_request_to_a_far_longer_one(
    lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def load_kv(pool: KVPool, slots: Tensor, layer_id: int, dtype: torch.dtype) -> list[Tensor]:
        read.append(slots.numel())
        return whole(pool, slots, layer_id, dtype)

    world = make_world(
        Shape(lens=tuple((length - 1, 1) for length in lens), kv_heads=1, head_dim=8)
    )
    whole = KVPool.load_kv
    monkeypatch.setattr(KVPool, "load_kv", load_kv)
    assert_close(world.attend("torch"), dense_oracle(world))
    assert sum(lens) <= sum(read) <= 2 * sum(lens)


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
        lambda module: type("M", (), {"TorchBackend": First, "HopperBackend": Second}),
    )
    worlds = {case: make_world(CASES[case]) for case in ("decode", "partial")}
    for world in worlds.values():
        assert_close(world.attend("torch,triton"), dense_oracle(world))
    pair = worlds["decode"].backend("torch,triton")
    assert isinstance(pair, factory.HybridBackend) and pair.name == "torch,triton"
    pair.graph_plan(3, static_buffers(worlds["decode"], 3))
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
    for name in ("triton_backend", "hopper_backend"):
        monkeypatch.delitem(sys.modules, f"minisgl.attention.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="attention_backend: 'triton' needs triton"):
        make_world(CASES["decode"]).backend("triton")


def test_sm_scale_reaches_the_backend() -> None:
    world = make_world(CASES["partial"])
    heads = world.q.shape[1]
    for name in ("torch", "triton"):
        backend = create_backend(
            name, pool=world.pool, tables=world.tables, num_qo_heads=heads, sm_scale=1e-9
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
    monkeypatch.setattr("minisgl.attention.flashinfer_backend.WORKSPACE_MIB", 1)  # zeroed each time


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
def test_flashinfer_plan_serves_every_layer() -> None:
    world = make_world(CASES["partial"])
    plan = world.plan("fi")
    plan.run(world.q * 3, world.k * 50, world.v, 0)
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world))


@pytest.mark.usefixtures("fake")
def test_pitfall_04_flashinfer_plans_when_its_host_buffer_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrapper fills its host buffer in `plan`: not before the last copies are over."""
    from minisgl.attention import flashinfer_backend

    order: list[str] = []

    class Logged:
        def synchronize(self) -> None:
            order.append("wait")

    monkeypatch.setattr(flashinfer_backend, "mark", lambda device: Logged())
    world = make_world(CASES["decode"])
    backend = world.backend("fi").decode  # type: ignore[attr-defined]
    plan = backend.decode.plan
    monkeypatch.setattr(
        backend.decode, "plan", lambda *args, **named: (order.append("plan"), plan(*args, **named))
    )
    for _ in range(3):
        backend.plan(world.meta, world.out_loc)
    assert order == ["plan", "wait", "plan", "wait", "plan"]


@pytest.mark.usefixtures("fake")
def test_recorded_steps_of_flashinfer_decode_by_our_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from minisgl.attention.flashinfer_backend import FlashInferPlan
    from minisgl.attention.fused_backend import FusedPlan

    caplog.set_level("INFO", logger="minisgl.attention")
    world = make_world(CASES["decode"])
    for name in ("fi", "torch,fi"):
        caplog.clear()
        backend = world.backend(name)
        assert backend.name == name and "'fused' captured ones" in caplog.text
        assert isinstance(backend.plan(world.meta, world.out_loc), FlashInferPlan)
        assert isinstance(backend.graph_plan(3, static_buffers(world, 3)), FusedPlan)
    caplog.clear()
    assert world.backend("fi,triton").name == "fi,triton" and not caplog.text


def test_what_lies_behind_a_row_is_never_read() -> None:
    """A short request is padded to its neighbour's width; NaN there must not reach it."""
    pool = KVPool(
        num_layers=1, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    pool.buffer.normal_()
    tables = TableManager(3, 16, 4, pool.dummy_page, "cpu")
    for pages in ([0, 1], [2]):
        slots = np.concatenate([np.arange(4 * page, 4 * page + 4) for page in pages])
        tables.write(tables.allocate(), 0, slots.astype(np.int32))
    tables.flush()
    pool.v_cache(0)[0, 0] = torch.nan  # slot 0 is the first request's
    rows, lens, ones = (np.array(x, np.int32) for x in ([0, 1], [6, 3], [1, 1]))
    meta = build_metadata(Phase.DECODE, rows, ones, lens, tables.page_table, 4)
    out_loc = torch.from_numpy(tables.page_table[rows, lens - 1].astype(np.int64))
    q, k, v = torch.randn(3, 2, 1, 8)
    out = TorchBackend(pool, tables, 1, 8**-0.5).plan(meta, out_loc).run(q, k, v, 0)
    assert out.isnan().flatten(1).any(1).tolist() == [True, False]
