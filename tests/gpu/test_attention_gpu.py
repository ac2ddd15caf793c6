"""Attention on a real GPU: every backend against the oracle, graphs, lists made on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionPlan, DecodeBuffers, GraphPlan
from minisgl.attention.metadata import build_metadata
from minisgl.core import Phase
from tests.attention_worlds import (
    Shape,
    World,
    assert_close,
    dense_oracle,
    fill,
    make_world,
    per_request_float32,
    static_buffers,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.006}
HALVES = list(TOLERANCE)
KINDS = ["decode", "prefill", "partial"]
SHAPES = {
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


@pytest.fixture(params=["torch", "triton", "fi"])
def name(request: pytest.FixtureRequest) -> str:
    """A backend; FlashInfer's only where it is installed."""
    if request.param == "fi":
        pytest.importorskip("flashinfer")
    return str(request.param)


def random_shape(kind: str, page_size: int, group: int, seed: int) -> Shape:
    """One to six requests with up to 700 cached tokens; "partial" has both hits and misses."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 7))
    cached = rng.integers(0, 700, count) * (kind != "prefill") * (rng.random(count) < 0.8)
    new = np.ones(count, dtype=int) if kind == "decode" else rng.integers(1, 300, count)
    lens = tuple((int(c), int(n)) for c, n in zip(cached, new, strict=True))
    kv_heads = int(rng.choice([1, 2, 8]))
    return Shape(
        lens=lens, page_size=page_size, kv_heads=kv_heads, group=group,
        head_dim=int(rng.choice([64, 128])), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_backends_agree(name: str, case: str, dtype: torch.dtype) -> None:
    world = make_world(SHAPES[case], dtype=dtype)
    assert_close(world.attend(name), per_request_float32(world), TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALVES)
def test_random_batches_agree(
    name: str, kind: str, page_size: int, group: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        world = make_world(random_shape(kind, page_size, group, seed), dtype=dtype)
        want = per_request_float32(world)
        assert_close(world.attend(name), want, TOLERANCE[dtype])
        assert_close(world.attend_stored(name), want, TOLERANCE[dtype])


# ------------------------------------------------------------------------------- ragged prefill


@pytest.fixture
def ragged_from_one_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The ragged plan's class, with a threshold of one token."""
    pytest.importorskip("flashinfer")
    from minisgl.attention import flashinfer_backend

    monkeypatch.setattr(flashinfer_backend, "RAGGED_TOKENS", 1)
    yield flashinfer_backend.RaggedPlan


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_ragged_prefill_agrees(
    ragged_from_one_token: type, page_size: int, group: int, dtype: torch.dtype
) -> None:
    world = make_world(random_shape("prefill", page_size, group, seed=group), dtype=dtype)
    plan, want = world.plan("fi"), per_request_float32(world)
    assert isinstance(plan, ragged_from_one_token)
    assert_close(plan.run(world.q, world.k, world.v, 1), want, TOLERANCE[dtype])
    assert_close(plan.attend(world.q, 1, world.k, world.v), want, TOLERANCE[dtype])
    assert_close(plan.attend(world.q, 1), want, TOLERANCE[dtype])  # from the pages, from here on
    assert_close(plan.run(world.q, world.k, world.v, 1), want, TOLERANCE[dtype])


def test_ragged_prefill_takes_slices_of_a_wider_tensor(ragged_from_one_token: type) -> None:
    world = make_world(SHAPES["prefill"], dtype=torch.bfloat16)
    heads, kv_heads = world.q.shape[1], world.k.shape[1]
    packed = torch.cat([world.q, world.k, world.v], dim=1)
    world.q, world.k, world.v = packed.split([heads, kv_heads, kv_heads], dim=1)
    plan = world.plan("fi")
    assert isinstance(plan, ragged_from_one_token)
    got = plan.run(world.q, world.k, world.v, 1)
    assert_close(got, per_request_float32(world), TOLERANCE[torch.bfloat16])


# ------------------------------------------------------------------------------- plans in graphs


class Captured:
    """One decode step of a plan in a CUDA graph, over static tensors."""

    def __init__(self, plan: GraphPlan, world: World, buffers: DecodeBuffers) -> None:
        self.plan, self.buffers = plan, buffers
        self.qkv = [torch.zeros_like(t) for t in (world.q, world.k, world.v)]
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            plan.run(*self.qkv, 1)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.out = plan.run(*self.qkv, 1)

    def replay(self, world: World) -> Tensor:
        with torch.cuda.stream(self.stream):
            for static, value in zip(self.qkv, (world.q, world.k, world.v), strict=True):
                static.copy_(value)
            fill(self.buffers, world)
            self.plan.update(world.meta)
            self.graph.replay()
            self.stream.synchronize()
        return self.out.clone()


def shorter(world: World, lens: list[int]) -> World:
    """The same requests at an earlier step: request i has `lens[i]` tokens, the last one new."""
    seq = np.array(lens)
    meta = build_metadata(
        Phase.DECODE, world.meta.table_idx, np.ones_like(seq), seq,
        world.tables.page_table, world.shape.page_size,
    )  # fmt: skip
    dense = [(k[:n], v[:n]) for (k, v), n in zip(world.dense, lens, strict=True)]
    k, v = (torch.stack([d[i][-1] for d in dense]) for i in (0, 1))
    slots = [int(meta.slots_of(i)[-1]) for i in range(len(lens))]
    out_loc = torch.tensor(slots, device=world.q.device)
    shape = Shape(**{**vars(world.shape), "lens": tuple((n - 1, 1) for n in lens)})
    return World(shape, world.pool, world.tables, meta, out_loc, world.q, k, v, dense)


STEPS = [[700, 1, 2051, 65], [1, 1, 1, 1], [64, 65, 128, 129], [701, 3, 17, 16]]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_graph_replay_equals_eager(
    name: str, page_size: int, group: int, dtype: torch.dtype
) -> None:
    """Capture once with dummies, replay other batches: values in place, addresses unchanged."""
    lens = tuple((n - 1, 1) for n in map(max, *STEPS))
    shape = Shape(lens=lens, page_size=page_size, kv_heads=2, group=group, head_dim=128)
    world = make_world(shape, dtype=dtype)
    buffers = static_buffers(world, 4)
    captured = Captured(world.backend(name).graph_plan(4, buffers), world, buffers)
    world.pool.store_kv(world.k, world.v, world.out_loc, 1)
    for step in STEPS:
        now = shorter(world, step)
        got = captured.replay(now)
        assert_close(got, now.attend(name), 0.02)
        assert_close(got, per_request_float32(now), TOLERANCE[dtype])


# --------------------------------------------------------------- the short plan, lists of pages


def flashinfer_plan(world: World, size: int, tensor_cores: bool = True) -> GraphPlan:
    """A graph plan of FlashInfer's and its buffers, which describe the world's batch."""
    buffers = static_buffers(world, size)
    backend = world.backend("fi", use_tensor_cores=tensor_cores)
    plan = backend.graph_plan(size, buffers)
    fill(buffers, world)
    return plan


def answer(plan: AttentionPlan, world: World) -> Tensor:
    return plan.run(world.q, world.k, world.v, 1).clone()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_short_plan_equals_public_plan(page_size: int, group: int) -> None:
    """Same plan info, same bits: over random decode batches, one plan planned in both ways."""
    pytest.importorskip("flashinfer")
    for seed in range(4):
        world = make_world(random_shape("decode", page_size, group, seed), dtype=torch.bfloat16)
        plan = flashinfer_plan(world, world.meta.batch_size)
        assert plan.fast, "fast_plan does not fit this version of FlashInfer"  # type: ignore[attr-defined]
        answers, infos = [], []
        for fast in (False, True):
            plan.fast = fast  # type: ignore[attr-defined]
            plan.update(world.meta)
            infos.append([int(x) for x in plan.wrapper._plan_info])  # type: ignore[attr-defined]
            answers.append(answer(plan, world))
        assert infos[0] == infos[1]
        assert torch.equal(*answers)
        assert_close(answers[0], per_request_float32(world), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_lists_of_both_sides_are_equal(page_size: int) -> None:
    """kv_indices by the kernel and by the host, in the buffer that the wrapper reads."""
    pytest.importorskip("flashinfer")
    world = make_world(random_shape("decode", page_size, 2, seed=3), dtype=torch.bfloat16)
    plan = flashinfer_plan(world, world.meta.batch_size)
    backend, total = plan.backend, int(world.meta.kv_indptr[-1])  # type: ignore[attr-defined]
    for on_device in (True, False):
        backend.lists_on_device = on_device
        plan.indices.fill_(-1)  # type: ignore[attr-defined]
        plan.update(world.meta)
        assert plan.indices[:total].tolist() == world.meta.kv_indices.tolist()  # type: ignore[attr-defined]


def test_cuda_cores_agree() -> None:
    pytest.importorskip("flashinfer")
    for group in (1, 2, 4, 8):
        world = make_world(random_shape("decode", 16, group, seed=group), dtype=torch.bfloat16)
        plan = flashinfer_plan(world, world.meta.batch_size, tensor_cores=False)
        plan.update(world.meta)
        assert not plan.fast  # type: ignore[attr-defined]
        assert_close(answer(plan, world), per_request_float32(world), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("block", [2, 512])
def test_kv_indices_kernel(page_size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl.kernels import kv_indices

    monkeypatch.setattr(kv_indices, "BLOCK", block)
    for seed in range(4):
        meta = (world := make_world(random_shape("partial", page_size, 1, seed))).meta
        total = int(meta.kv_indptr[-1])
        out = torch.full((total + 5,), -1, dtype=torch.int32, device="cuda")
        rows, starts = (torch.from_numpy(a).cuda() for a in (meta.table_idx, meta.kv_indptr))
        table, most = world.tables.device_page_table, -(-meta.max_seq_len // page_size)
        kv_indices.write_kv_indices(table, rows, starts, out, page_size=page_size, max_pages=most)
        assert out[:total].tolist() == meta.kv_indices.tolist()
        assert bool((out[total:] == -1).all())


def test_store_kv_kernel() -> None:
    from minisgl.kernels.store_kv import store_kv, store_kv_reference

    caches = torch.randn(2, 64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    want = caches.clone()
    packed = torch.randn(300, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = packed[:, 16:24], packed[:, 24:]
    out_loc = torch.randperm(1024, device="cuda")[:300]
    out_loc[::7] = -1
    store_kv(k, v, caches[0], caches[1], out_loc)
    store_kv_reference(k, v, want[0], want[1], out_loc)
    assert torch.equal(caches, want)


# ------------------------------------------------------------------------------ plans in flight


@pytest.mark.parametrize("backend_name", ["triton", "fi"])
def test_plans_in_flight_do_not_disturb_each_other(backend_name: str) -> None:
    """Many plans are made while the device is busy; each gives its own batch's answer."""
    if backend_name == "fi":
        pytest.importorskip("flashinfer")
    lens = [((300 + i, 1), (10 * i, 1)) for i in range(6)]
    worlds = [
        make_world(Shape(lens=each, seed=i, head_dim=64), dtype=torch.bfloat16)
        for i, each in enumerate(lens)
    ]
    want = [dense_oracle(w) for w in worlds]
    big = torch.randn(8192, 8192, device="cuda")
    backends = [w.backend(backend_name) for w in worlds]
    for backend in backends:  # one staging for all of them, as in an engine
        backend.ring = backends[0].ring  # type: ignore[attr-defined]
        if backend_name == "fi":
            backend.workspace = backends[0].workspace  # type: ignore[attr-defined]
            for wrapper in (backend.prefill, backend.ragged, backend.decode):  # type: ignore[attr-defined]
                backend.workspace.adopt(wrapper)  # type: ignore[attr-defined]
    got = []
    for world, backend in zip(worlds, backends, strict=True):
        big = big @ big.T / 8192
        plan = backend.plan(world.meta, world.out_loc)
        got.append(plan.run(world.q, world.k, world.v, 1))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, TOLERANCE[torch.bfloat16])
