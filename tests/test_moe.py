"""Chapter 11: routing, grouped experts, both families against transformers, three layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config.known_models import QWEN3_30B_A3B
from minisgl.config.model import ModelConfig, MoEConfig
from minisgl.core import SamplingParams
from minisgl.layers.invariant import make_invariant
from minisgl.layers.linear import GatedMLP
from minisgl.layers.moe import MoE, grouped_experts, route, sort_by_expert
from minisgl.llm import LLM
from minisgl.models.registry import build_model
from minisgl.models.weights import Checkpoint, WeightError, load_weights
from minisgl.parallel.comm import ParallelContext, SingleRank
from tests.checkpoints import make_checkpoint
from tests.dense import dense_batch
from tests.test_model import assert_equal_to_transformers, open_model
from tests.tp_drills import quick_ranks, run_threads

__all__ = ["quick_ranks"]  # a fixture

SEQUENCES = [[5, 9, 200, 31, 7, 7, 280, 14], [3], list(range(40, 60))]


def plain_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One pair of token and expert at a time, in float64."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for token, (mine, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(mine, shares, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            y[token] += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return y


# ------------------------------------------------------------------------------------ the config


def test_qwen3_30b_a3b() -> None:
    model = ModelConfig.from_hf(QWEN3_30B_A3B)
    assert model.moe == MoEConfig(128, 8, 768, norm_topk_prob=True)
    assert model.expert_parameters == 48 * 128 * 3 * 2048 * 768
    active = model.num_parameters - model.expert_parameters * 15 // 16
    assert round(active / 1e9, 1) == 3.4
    model.check_tp(4)
    with pytest.raises(ValueError, match=r"tp_size: must be one of \[1, 2, 4\], .* got 8"):
        ModelConfig.from_hf(QWEN3_30B_A3B | {"moe_intermediate_size": 100}).check_tp(8)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 3]}, (0, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
    ],
)
def test_dense_layers(fields: dict[str, Any], dense: tuple[int, ...]) -> None:
    model = ModelConfig.from_hf(QWEN3_30B_A3B | {"num_hidden_layers": 6} | fields)
    assert model.moe is not None and model.moe.dense_layers == dense


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": 129}, {"num_experts": None}, {"num_experts_per_tok": None},
        {"moe_intermediate_size": None}, {"mlp_only_layers": [0, 48]},
    ],
)  # fmt: skip
def test_impossible_experts_are_refused(fields: dict[str, Any]) -> None:
    (field,) = fields
    with pytest.raises(ValueError, match=f"^{field}: must be "):
        ModelConfig.from_hf(QWEN3_30B_A3B | fields)


def test_a_dense_family_has_no_experts() -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert ModelConfig.from_hf(QWEN3_30B_A3B | dense).moe is None


# ----------------------------------------------------------------------------- routing and groups


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 9), st.data())
def test_grouped_experts_equal_one_pair_at_a_time(
    seed: int, n: int, experts: int, data: st.DataObject
) -> None:
    """Any number of tokens and experts, hot ones, empty ones, no token at all."""
    gen = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(1, experts))
    logits = torch.randn(n, experts, generator=gen)
    logits[:, 0] += data.draw(st.sampled_from([0.0, 20.0, -20.0]))
    ids, weights = route(logits, top_k, data.draw(st.booleans()))
    assert all(len(set(row)) == top_k for row in ids.tolist())
    x = torch.randn(n, 8, generator=gen)
    gate_up = torch.randn(experts, 12, 8, generator=gen)
    down = torch.randn(experts, 8, 6, generator=gen)
    order, counts = sort_by_expert(ids, experts)
    assert ids.flatten()[order].tolist() == sorted(ids.flatten().tolist())
    assert counts == [int((ids == e).sum()) for e in range(experts)]
    got = grouped_experts(x, ids, weights, gate_up, down)
    want = plain_experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def test_routing_is_a_softmax_over_all_experts_in_float32() -> None:
    logits = torch.randn(50, 16).bfloat16()
    exact = logits.double().softmax(-1)
    for normalize in (True, False):
        ids, weights = route(logits, 4, normalize)
        assert weights.dtype is torch.float32
        want = exact.gather(-1, ids)
        want = want / want.sum(-1, keepdim=True) if normalize else want
        torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-5)


def test_a_token_does_not_depend_on_the_others_where_that_is_asked_for() -> None:
    layer = MoE(32, MoEConfig(8, 3, 16, True), make_invariant(
        ParallelContext(SingleRank(), torch.float32, "cpu")))  # fmt: skip
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(40, 32)
    together = layer(x)
    for count in (1, 2, 17):
        assert torch.equal(layer(x[:count]), together[:count])


# -------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3, "packed": True}),
        ("mixtral", {"num_experts_per_tok": 1, "num_local_experts": 3}),
        ("mixtral", {"packed": True}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, arch: str, fields: dict[str, Any]) -> None:
    assert_equal_to_transformers(make_checkpoint(tmp_path, arch, **fields))


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_packed_and_single_experts_are_one_model(tmp_path: Path, arch: str) -> None:
    one = open_model(make_checkpoint(tmp_path / "one", arch))
    packed = open_model(make_checkpoint(tmp_path / "packed", arch, packed=True))
    assert packed.model.layers[0].mlp.layout == "packed"  # type: ignore[union-attr]
    for ours, theirs in zip(one.parameters(), packed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_sparse_layers_have_experts(tmp_path: Path) -> None:
    model = open_model(make_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[1]))
    kinds = [type(layer.mlp) for layer in model.model.layers]  # type: ignore[union-attr]
    assert kinds == [MoE, GatedMLP]


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.7.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
    ],
)
def test_a_missing_or_misshapen_expert_is_named(tmp_path: Path, arch: str, name: str) -> None:
    with pytest.raises(WeightError, match=f"missing {name}"):
        open_model(make_checkpoint(tmp_path, arch, drop=(name,)))
    with pytest.raises(WeightError, match=f"{name} has shape"):
        open_model(make_checkpoint(tmp_path, arch, extra={name: torch.zeros(3, 64)}))


def test_an_expert_too_many_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.8.up_proj.weight"
    with pytest.raises(WeightError, match=f"no place for {name}"):
        open_model(make_checkpoint(tmp_path, "qwen3_moe", extra={name: torch.zeros(32, 64)}))


# ---------------------------------------------------------------------------------- over ranks


def test_a_width_that_ranks_do_not_divide_is_refused() -> None:
    def rank(comm: Any) -> None:
        MoE(8, MoEConfig(2, 1, 10, True), ParallelContext(comm, torch.float32, "cpu"))

    with pytest.raises(ValueError, match="moe_intermediate_size: 10 rows cannot be cut"):
        run_threads(rank, 4)


def test_every_expert_is_cut(tmp_path: Path) -> None:
    """Two ranks hold the halves of gate, of up and of down, not half of the experts."""
    config = {"hidden_size": 64, "num_hidden_layers": 1}
    path = make_checkpoint(tmp_path, "qwen3_moe", **config)

    def rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model = build_model(ModelConfig.from_path(path), comm, dtype=torch.float32)
        load_weights(model, path, comm, device="cpu", dtype=torch.float32, progress=False)
        mlp = model.model.layers[0].mlp  # type: ignore[union-attr]
        return mlp.gate_up.data, mlp.down.data  # type: ignore[union-attr]

    halves = run_threads(rank, 2)
    (gate_up, down) = rank(SingleRank())
    for index, (rows, columns) in enumerate(halves):
        mine = slice(16 * index, 16 * index + 16)
        want = torch.cat([part[:, mine] for part in gate_up.chunk(2, 1)], 1)
        assert torch.equal(rows, want) and torch.equal(columns, down[..., mine])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from([1, 2, 3, 6]))
def test_whole_experts_of_all_ranks_add_up(seed: int, n: int, size: int) -> None:
    """Also where a rank has no pair at all."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 6, generator=gen) + 9.0 * torch.arange(6) * (seed % 2)
    ids, weights = route(logits, 2, True)
    x = torch.randn(n, 8, generator=gen)
    layer = torch.randn(6, 12, 8, generator=gen), torch.randn(6, 8, 6, generator=gen)
    total, count = torch.zeros(n, 8), 6 // size
    for first in range(0, 6, count):
        mine = [part[first : first + count] for part in layer]
        order, counts = sort_by_expert(ids, count, first)
        assert counts == [int((ids == first + e).sum()) for e in range(count)]
        assert len(order) == sum(counts)
        total += grouped_experts(x, ids, weights, *mine, first=first)
    torch.testing.assert_close(total, grouped_experts(x, ids, weights, *layer))


@pytest.mark.parametrize(
    ("arch", "packed"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False)]
)
def test_a_rank_reads_its_own_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, packed: bool
) -> None:
    path = make_checkpoint(tmp_path, arch, packed=packed, num_hidden_layers=1)
    one: Any = open_model(path)
    whole = one.model.layers[0].mlp
    read: list[str] = []
    real = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, spec: (read.append(spec.name), real(self, spec))[1]
    )
    for rank in range(2):
        comm, config = SimpleNamespace(rank=rank, size=2), ModelConfig.from_path(path)
        model = build_model(config, cast(Any, comm), dtype=torch.float32, expert_parallel=True)
        read.clear()
        load_weights(
            model, path, cast(Any, comm), device="cpu", dtype=torch.float32, progress=False
        )
        mlp: Any = model.model.layers[0].mlp  # type: ignore[union-attr]
        half = len(whole.gate_up) // 2
        mine = slice(half * rank, half * (rank + 1))
        assert torch.equal(mlp.gate, whole.gate)
        assert torch.equal(mlp.gate_up, whole.gate_up[mine])
        assert torch.equal(mlp.down, whole.down[mine])
        singles = {int(name.split(".experts.")[1].split(".")[0])
                   for name in read if ".experts." in name and not packed}  # fmt: skip
        assert singles == set(range(mine.start, mine.stop) if not packed else ())


def test_an_expert_that_another_rank_reads_is_missed_by_all(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    path = make_checkpoint(tmp_path, "qwen3_moe", drop=(name,))
    comm: Any = SimpleNamespace(rank=0, size=2)
    config = ModelConfig.from_path(path)
    model = build_model(config, comm, dtype=torch.float32, expert_parallel=True)
    with pytest.raises(WeightError, match=f"missing {name}"):
        load_weights(model, path, comm, device="cpu", dtype=torch.float32, progress=False)


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    odd = ModelConfig.from_hf(QWEN3_30B_A3B | {"num_experts": 10, "moe_intermediate_size": 100})
    odd.check_tp(2, True)
    odd.check_tp(4)
    with pytest.raises(ValueError, match=r"^tp_size: must be one of \[1, 2\], .* experts, got 4"):
        odd.check_tp(4, True)
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    with pytest.raises(ValueError, match=r"^expert_parallel: must be off for Qwen3ForCausalLM"):
        ModelConfig.from_hf(QWEN3_30B_A3B | dense).check_tp(2, True)
    with pytest.raises(ValueError, match=r"^expert_parallel: must be off"):
        LLM(device="cpu", expert_parallel=True)


def test_an_llm_with_whole_experts_says_the_same(tmp_path: Path, quick_ranks: None) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for fields in ({}, {"tensor_parallel_size": 2, "expert_parallel": True}):
        with LLM(path, device="cpu", num_pages=64, **fields) as llm:  # type: ignore[arg-type]
            found.append([out["token_ids"] for out in llm.generate([[5, 9, 200, 31]], params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_serves_experts(tmp_path: Path, deterministic: bool) -> None:
    """Greedy tokens of two requests in pages and batches are those of the bare model."""
    path = make_checkpoint(tmp_path, "qwen3_moe")
    prompts = [[5, 9, 200, 31], list(range(40, 60))]
    with LLM(path, device="cpu", num_pages=64, deterministic=deterministic) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        found = [out["token_ids"] for out in llm.generate(prompts, params)]
    model = open_model(path)
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = [*prompt, *tokens]
        with torch.inference_mode():
            best = model(dense_batch([ids])).argmax(-1).tolist()
        assert tokens == best[len(prompt) - 1 : -1]
