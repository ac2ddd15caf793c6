"""Attention on a real GPU: every backend against the oracle, graphs, plans in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.factory import HybridBackend
from minisgl.attention.hopper_backend import HopperPlan
from minisgl.attention.metadata import AttentionPlan, DecodeBuffers, build_metadata
from minisgl.core import Phase
from tests.attention_worlds import (
    Shape,
    World,
    assert_close,
    dense_oracle,
    fill,
    make_world,
    per_request_float32,
    poison,
    static_buffers,
)
from tests.prefill_tiles import check_recorded_tiles

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
    "long": Shape(
        lens=((0, 1500), (333, 900)), page_size=16, kv_heads=8, group=4, head_dim=128
    ),
    "long, narrow heads": Shape(
        lens=((0, 1900), (5000, 700), (0, 3)), page_size=64, kv_heads=4, group=7, head_dim=64
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


@pytest.mark.parametrize("case", ["long", "long, narrow heads"])
def test_what_others_left_changes_nothing(case: str) -> None:
    world = make_world(SHAPES[case], dtype=torch.bfloat16)
    poison(world)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert isinstance(world.plan("triton"), HopperPlan) == hopper
    assert_close(world.attend("triton"), per_request_float32(world), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("case", ["long", "long, narrow heads"])
def test_layers_of_one_plan_read_their_own_keys(case: str) -> None:
    """Layers share a plan and its compiled kernel; values of layer 0 are twice those of layer 1."""
    world = make_world(SHAPES[case], dtype=torch.bfloat16)
    world.pool.buffer[:, 0] = world.pool.buffer[:, 1]
    world.pool.buffer[1, 0] *= 2
    plan, want = world.plan("triton"), per_request_float32(world)
    for layer, factor in ((1, 1), (0, 2), (1, 1)):
        got = plan.run(world.q, world.k, factor * world.v, layer)
        assert_close(got, factor * want, factor * TOLERANCE[torch.bfloat16])


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


# ------------------------------------------------------------------------------- plans in graphs


class Captured:
    """One decode step of a plan in a CUDA graph, over static tensors."""

    def __init__(self, plan: AttentionPlan, world: World, buffers: DecodeBuffers) -> None:
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


# --------------------------------------------------------------------------------- the store


def test_store_kv_kernel() -> None:
    from minisgl.kernels.store_kv import store_kv

    caches = torch.randn(2, 64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    want = caches.clone()
    packed = torch.randn(300, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = packed[:, 16:24], packed[:, 24:]
    out_loc = torch.randperm(1024, device="cuda")[:300]
    out_loc[::7] = -1
    store_kv(k, v, caches[0], caches[1], out_loc)
    kept = out_loc >= 0
    for cache, new in zip(want.flatten(1, 2), (k, v), strict=True):
        cache[out_loc[kept]] = new[kept]
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
    built = [w.backend(backend_name) for w in worlds]
    # The decode half of a pair plans these batches: captured steps have a backend of their own.
    backends = [pair.decode if isinstance(pair, HybridBackend) else pair for pair in built]
    got, before = [], backends[0]
    for world, backend in zip(worlds, backends, strict=True):
        for shared in ("ring", "decode", "planned"):  # one of each for all, as in an engine
            if hasattr(backend, shared):
                setattr(backend, shared, getattr(before, shared))
        before = backend
        big = big @ big.T / 8192
        plan = backend.plan(world.meta, world.out_loc)
        got.append(plan.run(world.q, world.k, world.v, 1))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["prefill", "partial", "page 1"])
def test_tiles_of_recorded_prefill(kind: str, dtype: torch.dtype) -> None:
    world = make_world(SHAPES[kind], dtype, "cuda")
    check_recorded_tiles(world, 256, TOLERANCE[dtype])
