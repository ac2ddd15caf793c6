"""Chapters 05g, 11 and 11b: FP8 experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minisgl import LLM, SamplingParams
from minisgl.fp8 import FP8, Fp8Weight, fp8_weight, quantize
from minisgl.layers.moe import grouped_experts, route
from minisgl.parallel.comm import SingleRank
from tests import tp_drills
from tests.checkpoints import make_checkpoint, make_fp8_checkpoints
from tests.fused_cases import check_model, close, few_programs, small_model
from tests.moe_cases import skewed_logits
from tests.test_fp8 import INTERPRETED, PROMPTS, logits, open_model
from tests.tp_drills import run_ranks
from tests.turns import in_turns

__all__ = ["few_programs"]  # the fixture
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_moe", "block", {"block": 16}),
    ("qwen3_moe", "block", {"block": 16, "packed": True}),
    ("qwen3_moe", "channel", {"packed": True}),
    ("mixtral", "block", {"block": 128}),
    ("mixtral", "channel", {}),
]


def experts(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


@pytest.mark.parametrize(("arch", "layout", "options"), LAYOUTS)
def test_checkpoints_of_eight_bits(
    tmp_path: Path, arch: str, layout: str, options: dict[str, Any]
) -> None:
    """They mean what a checkpoint of the dequantized numbers means; routers keep their bits."""
    quantized, plain = make_fp8_checkpoints(tmp_path, layout, arch, **options)
    ours, theirs = open_model(quantized), open_model(plain)
    assert len(experts(ours)) == 2 * len(ours.model.layers)  # type: ignore[union-attr, arg-type]
    for name, weight in experts(ours).items():
        assert isinstance(weight, Fp8Weight) and weight.dtype is FP8
        assert torch.equal(weight.dequantized(torch.float32), experts(theirs)[name]), name
        one = weight.dequantized(torch.float32, 1)
        assert torch.equal(one, experts(theirs)[name][1])
    for name, gate in ours.named_parameters():
        if name.endswith("mlp.gate"):
            assert torch.equal(gate, dict(theirs.named_parameters())[name])
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("arch", "layout", "options"), LAYOUTS[:3])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_scales(
    tmp_path: Path, arch: str, layout: str, options: dict[str, Any], size: int
) -> None:
    sizes = {"moe_intermediate_size": 64, "num_hidden_layers": 1}
    quantized, plain = make_fp8_checkpoints(tmp_path, layout, arch, **options, **sizes)
    for rank in range(size):
        comm = SimpleNamespace(rank=rank, size=size)
        theirs = experts(open_model(plain, comm))
        for name, weight in experts(open_model(quantized, comm)).items():
            assert isinstance(weight, Fp8Weight)
            assert torch.equal(weight.dequantized(torch.float32), theirs[name]), (rank, name)


def test_a_rank_that_would_cut_a_block_is_refused(tmp_path: Path) -> None:
    quantized, _ = make_fp8_checkpoints(tmp_path, "block", "qwen3_moe", block=32)
    for rank in range(2):
        comm: Any = SimpleNamespace(rank=rank, size=2)
        with pytest.raises(ValueError, match=r"tp_size: .*32 columns of .*down_proj.* of 32"):
            open_model(quantized, comm)


@pytest.mark.parametrize("layout", in_turns(2, ["block", "channel"]))
def test_two_processes_compute_what_one_does(tmp_path: Path, layout: str) -> None:
    quantized, _ = make_fp8_checkpoints(tmp_path, layout, "qwen3_moe", block=16)
    one = tp_drills.logits(SingleRank(), quantized, PROMPTS)
    for many in run_ranks(tp_drills.logits, 2, quantized, PROMPTS, timeout=120):
        torch.testing.assert_close(many, one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_quantized_while_they_are_read(tmp_path: Path, packed: bool) -> None:
    """Each row of each expert by its largest number."""
    folder = make_checkpoint(tmp_path, "qwen3_moe", packed=packed)
    ours, theirs = open_model(folder, quantization="fp8"), open_model(folder)
    for name, weight in experts(ours).items():
        assert isinstance(weight, Fp8Weight)
        values, scale = quantize(experts(theirs)[name], weight.shape[-1])
        assert torch.equal(weight.float(), values.float()) and torch.equal(weight.scale, scale)
    gap = (logits(ours) - logits(theirs)).norm() / logits(theirs).norm()
    assert 0 < gap < 0.1


def test_engine_serves_experts_of_eight_bits(tmp_path: Path) -> None:
    """Tokens of the engine are those of the dequantized checkpoint."""
    quantized, plain = make_fp8_checkpoints(tmp_path, "block", "mixtral", block=32)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for folder in (quantized, plain):
        with LLM(folder, device="cpu", num_pages=32) as llm:
            answers.append([out["token_ids"] for out in llm.generate(PROMPTS, greedy)])
    assert answers[0] == answers[1]


# ----------------------------------------------------------------- kernels, in the interpreter


def random_experts(count: int, n: int, k: int, group: int) -> Fp8Weight:
    """Experts, rows and groups of columns of different sizes."""
    gen = torch.Generator().manual_seed(n + k)
    weight = fp8_weight(count, n, k, device="cpu", group=group)
    weight.copy_((torch.randn(count, n, k, generator=gen) * 50).to(FP8))
    weight.scale.copy_(torch.rand(weight.scale.shape, generator=gen) * 2e-3 + 2e-4)
    return weight


@INTERPRETED
@pytest.mark.parametrize("tiles", [0, 1, 2, 3])
@pytest.mark.parametrize("group", [0, 128, 64])
@pytest.mark.parametrize(("n", "kind"), [(1, "even"), (9, "hot"), (20, "empty")])
def test_parts_add_up_to_the_oracle(
    monkeypatch: pytest.MonkeyPatch, tiles: int, group: int, n: int, kind: str
) -> None:
    """All tilings, whatever the batch that they are meant for; other groups are dequantized."""
    moe = pytest.importorskip("minisgl.kernels.moe")
    if (tiles, n) not in [(0, 1), (0, 20), (1, 9), (2, 20), (3, 20)] or (group == 64 and n != 9):
        pytest.skip("combinations that say nothing new")
    row = moe.FP8_TILINGS[tiles]
    monkeypatch.setattr(moe, "FP8_TILINGS", ((float("inf"), *row[1:]),))
    x = torch.randn(n, 256, generator=torch.Generator().manual_seed(n))
    router = skewed_logits(n, 5, kind, n)
    gate_up, down = random_experts(5, 256, 256, group), random_experts(5, 256, 128, group)
    parts = moe.expert_parts(x, router[None], gate_up, down, 2, True)
    wide = (weight.dequantized(torch.float32) for weight in (gate_up, down))
    want = grouped_experts(x, *route(router, 2, True), *wide)
    close(parts.sum(0), want, 1e-5)


@INTERPRETED
@pytest.mark.parametrize("scales", in_turns(2, ["channel", "block"]))
def test_fused_model_equals_the_plain_one(scales: str, few_programs: None) -> None:
    sizes = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = small_model("qwen3_moe", scales=scales, num_hidden_layers=1, **sizes, **heads)
    check_model(model, [9], None)  # a token alone has no kernels for eight bits
    check_model(model, [5, 20], None)
