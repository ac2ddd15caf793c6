"""Experts on a GPU: kernels against chapter 11, replay against eager, a model of real sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton")

from minisgl.config.known_models import QWEN3_30B_A3B
from minisgl.kernels import moe
from minisgl.kernels.moe import align, expert_parts, expert_sum
from minisgl.kernels.moe_row import FusedExperts
from minisgl.kernels.norm import DeferredNorm
from minisgl.layers.moe import MoE, grouped_experts, route
from tests.fused_cases import check_model, close, small_model
from tests.moe_cases import check_blocks, check_row, skewed_logits

BF16 = torch.bfloat16
QWEN, MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 3584)  # Mixtral on four ranks
MIXTRAL_8X7B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "vocab_size": 2000, "eos_token_id": 1,
}  # fmt: skip
Shape = tuple[int, int, int, int]  # experts, top_k, hidden, width


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


def experts_of(shape: Shape, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    experts, _, hidden, width = shape
    gate_up = normal(experts, 2 * width, hidden, seed=1, dtype=dtype) * hidden**-0.5
    return gate_up, normal(experts, hidden, width, seed=2, dtype=dtype) * width**-0.5


def logits_of(n: int, experts: int, kind: str) -> torch.Tensor:
    logits = normal(n, experts, seed=3, dtype=torch.float32)
    logits[:, experts // 2] += 20.0 * (kind == "hot")
    logits[:, : experts // 2] -= 20.0 * (kind == "empty")
    return logits


@pytest.mark.parametrize("n", [1, 5, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("kind", ["even", "hot", "empty"])
@pytest.mark.parametrize("top_k", [1, 8])
def test_blocks_hold_every_pair_once(top_k: int, n: int, kind: str) -> None:
    logits = skewed_logits(n, 128, kind, n).cuda()
    check_blocks(align(logits[None], top_k, True, 16), logits, top_k, True)


@pytest.mark.parametrize("shape", [QWEN, MIXTRAL])
@pytest.mark.parametrize("kind", ["even", "hot", "empty"])
@pytest.mark.parametrize("n", [1, 8, 64, 200, 256, 1000, 4096])
def test_experts_equal_the_oracle(n: int, kind: str, shape: Shape) -> None:
    experts, top_k, hidden, _ = shape
    x, logits, weights = normal(n, hidden), logits_of(n, experts, kind), experts_of(shape)
    got = expert_parts(x, logits[None], *weights, top_k, True).float().sum(0)
    close(got, grouped_experts(x, *route(logits, top_k, True), *weights).float(), 2e-2)


@pytest.mark.parametrize("row", range(len(moe.TILINGS)))
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_every_tiling(monkeypatch: pytest.MonkeyPatch, row: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(moe, "TILINGS", ((float("inf"), *moe.TILINGS[row][1:]),))
    x, logits, weights = (
        normal(50, 2048, dtype=dtype),
        logits_of(50, 128, "hot"),
        experts_of(QWEN, dtype),
    )
    got = expert_parts(x, logits[None], *weights, 8, True).float().sum(0)
    close(got, grouped_experts(x, *route(logits, 8, True), *weights).float(), 2e-2)


def test_a_token_alone_gets_the_same_bits_where_that_is_asked_for() -> None:
    x, logits, weights = normal(700, 2048), logits_of(700, 128, "even"), experts_of(QWEN)
    together = expert_sum(x, logits[None], *weights, 8, True, fixed=True)
    for rows in (slice(0, 1), slice(3, 11), slice(100, 400)):
        alone = expert_sum(x[rows], logits[None, rows].contiguous(), *weights, 8, True, fixed=True)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("n", [1, 8, 64, 256])
def test_replay_equals_eager_bit_for_bit(n: int) -> None:
    """With a routing that was not there when the graph was recorded."""
    router, weights = normal(128, 2048, seed=6) * 0.05, experts_of(QWEN)
    experts = FusedExperts(router, *weights, 8, True, 0, router.new_zeros(1).int())
    x = normal(n, 2048)

    def step() -> torch.Tensor:
        return experts.parts(x)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in range(3):
        x.copy_(normal(n, 2048, seed=10 + seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, step())


def test_replay_of_one_token_equals_eager_bit_for_bit() -> None:
    """Each replay finds the counter as the one before left it."""
    router, weights = normal(128, 2048, seed=6) * 0.05, experts_of(QWEN)
    experts = FusedExperts(router, *weights, 8, True, 0, router.new_zeros(1).int())
    x, norm = normal(1, 2048), normal(2048, seed=7)

    def step() -> DeferredNorm:
        row = DeferredNorm(x, x * norm, x.float().square().view(-1, 8).sum(1))
        return experts.row(row, norm, 1e-6)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in range(20):
        x.copy_(normal(1, 2048, seed=10 + seed))
        graph.replay()
        torch.cuda.synchronize()
        for mine, eager in zip(recorded, step(), strict=True):
            assert mine is not None and eager is not None and torch.equal(mine, eager)


@pytest.mark.parametrize("kind", ["even", "hot", "empty"])
@pytest.mark.parametrize("n", [1, 8, 64, 300, 4096])
def test_whole_experts_of_two_ranks_add_up(n: int, kind: str) -> None:
    """Each rank's parts, recorded and replayed over dirty memory, and their sum."""
    x, logits, weights = normal(n, 2048), logits_of(n, 128, kind), experts_of(QWEN)
    total = torch.zeros(n, 2048, device="cuda")
    for first in (0, 64):
        mine = [part[first : first + 64].contiguous() for part in weights]
        eager = expert_parts(x, logits[None], *mine, 8, True, first=first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = expert_parts(x, logits[None], *mine, 8, True, first=first)
        recorded.fill_(7.0)
        graph.replay()
        assert torch.equal(recorded, eager)
        total += eager.float().sum(0)
    close(total, grouped_experts(x, *route(logits, 8, True), *weights).float(), 2e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("shape", "top_k"), [((128, 2048, 768), 8), ((8, 4096, 14336), 2)])
def test_one_token_equals_the_oracle(
    shape: tuple[int, int, int], top_k: int, dtype: torch.dtype
) -> None:
    for kind in ("even", "hot", "empty", "equal"):
        check_row(shape, top_k, True, kind, "cuda", dtype, 2e-2)


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 0.1), (torch.float16, 0.05)])
def test_model_of_real_sizes(dtype: torch.dtype, limit: float) -> None:
    """Where rounding turns one of eight choices, a row is an eighth off, so many rows share."""
    real: dict[str, Any] = {**QWEN3_30B_A3B, "num_hidden_layers": 2, "vocab_size": 2000}
    real.pop("torch_dtype")
    model = small_model("qwen3_moe", "cuda", dtype, **{**real, "eos_token_id": 1})
    for layer in model.model.layers:
        assert isinstance(layer.mlp, MoE)
        layer.mlp.gate.data *= 3  # few ties
    check_model(model, [9], None, 2 * limit)
    check_model(model, [1 + i * 37 % 300 for i in range(64)], None, limit)
    check_model(model, [40 + i for i in range(64)], [1 + i % 40 for i in range(64)], limit)


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 0.1), (torch.float16, 0.05)])
def test_mixtral_of_real_sizes(dtype: torch.dtype, limit: float) -> None:
    """Two of eight experts: where rounding turns a choice, a row is another one. Few rows are."""
    model = small_model("mixtral", "cuda", dtype, **MIXTRAL_8X7B)
    for layer in model.model.layers:
        assert isinstance(layer.mlp, MoE)
        layer.mlp.gate.data *= 3
    if dtype == torch.float16:
        check_model(model, [9], None, limit)
    check_model(model, [1 + i * 37 % 300 for i in range(64)], None, limit, turned=8)
    extend = [1 + i % 40 for i in range(64)]
    check_model(model, [40 + i for i in range(64)], extend, limit, turned=8)
