"""Fused kernels and the fused model on a GPU, against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton")

from minisgl.attention.fused_backend import FusedBackend, VerifyBackend
from minisgl.attention.metadata import DecodeBuffers
from minisgl.attention.torch_backend import TorchBackend
from minisgl.kernels import linear as kernels
from minisgl.kernels.norm import add_norm
from tests.fused_cases import (
    World,
    check_decode,
    check_drafts,
    check_drafts_of_model,
    check_model,
    check_rotate,
    close,
    small_model,
)

BF16 = torch.bfloat16
WEIGHTS = [(1024, 1024), (1024, 3072), (6144, 1024), (4096, 4096), (2560, 9728), (5120, 5120)]
WEIGHTS += [(16384, 2048)]  # each half of the gated product takes the deep tiles of large weights


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


def silu_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 48, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gemms(rows: int, weight: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = weight
    x, w = normal(rows, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype) * 0.05
    bias = normal(n, seed=2, dtype=dtype)
    exact = x.double() @ w.double().T
    close(kernels.linear(x, w, bias), exact + bias, 1e-2)
    close(kernels.split_k_linear(x, w).sum(0), exact, 1e-2)
    close(kernels.gated_linear(x, w), silu_mul(exact), 1e-2)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_one_row(weight: tuple[int, int]) -> None:
    n, k = weight
    x, first, w = normal(1, 1024), normal(k, 1024, seed=4) * 0.05, normal(n, k, seed=1) * 0.05
    residual, norm = normal(1, k, seed=3), normal(k, seed=2)
    made = kernels.gemv_add_norm(x, first, residual, norm)
    assert made is not None
    total = residual.double() + x.double() @ first.double().T
    close(made.total, total, 1e-2)
    y = torch.nn.functional.rms_norm(total, (k,), norm.double(), 1e-6) @ w.double().T
    got = kernels.gemv(made, w, eps=1e-6)
    if got is not None:
        close(got, y, 1e-2)
    got = kernels.gemv(made, w, eps=1e-6, gated=True)
    if got is not None:
        close(got, silu_mul(y), 1e-2)


def test_norm() -> None:
    residual, norm, parts = normal(70, 5120), normal(5120, seed=1), normal(4, 70, 5120, seed=2)
    got, total = add_norm(parts.float(), residual, norm, 1e-6)
    want = residual.double() + parts.double().sum(0)
    close(total, want, 1e-2)
    close(got, torch.nn.functional.rms_norm(want, (5120,), norm.double(), 1e-6), 1e-2)


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (28, 4), (8, 8)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bs", [1, 3, 8, 40, 130])
def test_decode(heads: tuple[int, int], dim: int, bs: int) -> None:
    lens = [1 + (i * 397) % 1500 for i in range(bs)]
    lens[0] = 5000
    check_decode(lens, qo=heads[0], kv=heads[1], dim=dim, page_size=16, device="cuda", dtype=BF16)


@pytest.mark.parametrize("where", [0, 40, 63])
def test_one_long_request_among_short_ones(where: int) -> None:
    """Its parts outnumber everybody else's: none is lost, none is counted twice."""
    lens = [1 + (i * 397) % 700 for i in range(64)]
    lens[where] = 40_000
    check_decode(lens, qo=16, kv=8, dim=128, page_size=16, device="cuda", dtype=BF16)


@pytest.mark.parametrize("kind", ["plain", "turned", "normed"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_random_decode(dtype: torch.dtype, group: int, page_size: int, kind: str) -> None:
    """Random ragged batches on shuffled pages; q and k come ready, or raw."""
    for seed in range(3):
        rng = np.random.default_rng([seed, group, page_size])
        kv, dim = int(rng.choice([1, 2, 8])), int(rng.choice([64, 128]))
        lens = rng.integers(1, 2500, int(rng.choice([1, 5, 33, 70]))).tolist()
        check_decode(
            lens, qo=kv * group, kv=kv, dim=dim, turned=kind != "plain", normed=kind == "normed",
            page_size=page_size, device="cuda", dtype=dtype, seed=seed,
        )  # fmt: skip


@pytest.mark.parametrize("bs", [1, 8, 40, 64])
def test_a_recorded_step_attends_as_an_eager_one(bs: int) -> None:
    """To the bit, and to what lengths there are now: none of them was known at the recording."""
    rng = np.random.default_rng(bs)
    most = [4000, *rng.integers(1, 1600, bs - 1).tolist()]
    world = World(most, kv=8, dim=128, qo=16, page_size=16, device="cuda", dtype=BF16)
    q, k, v = (world.random(bs, h, 128, seed=h) for h in (16, 8, 8))
    positions, out_loc = world.places()
    rows = torch.tensor(world.rows, device="cuda")
    buffers = DecodeBuffers(rows, torch.zeros_like(positions), out_loc.clone())
    plan = world.backend(FusedBackend).graph_plan(bs, buffers)
    plan.run(q, k, v, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = plan.run(q, k, v, 0)
    for lens in (most, [1 + n // 7 for n in most], [1] * bs, rng.integers(1, 1 + np.array(most))):
        buffers.positions.copy_(torch.tensor(np.array(lens) - 1))
        table = torch.from_numpy(world.tables.page_table).to("cuda")
        buffers.out_loc.copy_(table[rows, buffers.positions])
        before = world.pool.buffer.clone()
        graph.replay()
        got = recorded.clone()
        world.pool.buffer.copy_(before)
        assert torch.equal(got, plan.run(q, k, v, 0))
        world.lens = np.array(lens, np.int32)
        world.pool.buffer.copy_(before)
        want = world.backend(TorchBackend).plan(world.meta(), buffers.out_loc).run(q, k, v, 0)
        close(got, want, 2e-2)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(16, 8), (40, 8), (28, 4), (5, 1)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_rotate_and_store(dtype: torch.dtype, heads: tuple[int, int], normed: bool) -> None:
    for page_size, lens in ((1, [300, 1, 77]), (16, [5] * 40), (64, [1])):
        check_rotate(
            lens, qo=heads[0], kv=heads[1], dim=128, normed=normed, page_size=page_size,
            device="cuda", dtype=dtype,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_model(arch: str, dtype: torch.dtype) -> None:
    model = small_model(arch, "cuda", dtype)
    check_model(model, [700], None)
    check_model(model, [5, 1, 300], None)
    check_model(model, [9] * 70, None)
    check_model(model, [60, 3, 200], [60, 1, 80])


@pytest.mark.parametrize("kv, dim", [(1, 64), (4, 128), (8, 128)])
def test_rows_of_one_request_see_each_other(kv: int, dim: int) -> None:
    """Many times: a race would lose now and then."""
    for seed in range(50):
        check_drafts(VerifyBackend, qo=4 * kv, kv=kv, dim=dim, device="cuda", dtype=BF16, seed=seed)


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_the_fused_model_verifies_drafts(arch: str) -> None:
    check_drafts_of_model(small_model(arch, "cuda", BF16))
