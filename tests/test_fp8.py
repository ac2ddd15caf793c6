"""Chapter 05g: FP8 weights, read from a checkpoint or quantized while they are read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minisgl import LLM, SamplingParams, fp8
from minisgl.attention.invariant_torch import InvariantTorchBackend
from minisgl.attention.torch_backend import TorchBackend
from minisgl.config.engine import EngineConfig, TPInfo, resolve
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.engine.engine import build_engine
from minisgl.engine.memory import decide_pages, tensor_bytes
from minisgl.fp8 import FP8, Fp8Weight, fp8_weight, quantize
from minisgl.kvcache.fp8_pool import Fp8KVPool
from minisgl.kvcache.pool import KVPool
from minisgl.models.kv_scales import load_kv_scales
from minisgl.models.quantization import quantize_model
from minisgl.models.registry import build_model
from minisgl.models.weights import WeightError, load_dummy_weights, load_weights
from minisgl.parallel.comm import SingleRank
from tests.checkpoints import make_checkpoint, make_fp8_checkpoints
from tests.dense import dense_batch
from tests.fused_cases import (
    World,
    check_eight_bits,
    check_model,
    check_rotate,
    close,
    few_programs,
    small_model,
)
from tests.turns import in_turns

__all__ = ["few_programs"]  # the fixture

ALONE: Any = SingleRank()
PROMPTS = [[5, 9, 200, 31, 7, 7, 280, 14], list(range(40, 75))]


def open_model(folder: Path, comm: Any = ALONE, quantization: str = "none") -> nn.Module:
    """The model of a folder with its weights, or one rank's part of it."""
    model = build_model(ModelConfig.from_path(folder), comm, dtype=torch.float32)
    quantize_model(model, quantization, folder)
    load_weights(model, folder, comm, device="cpu", dtype=torch.float32, progress=False)
    return model


def linears(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "_proj.weight" in name}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(dense_batch(PROMPTS))


# ----------------------------------------------------------------- numbers


@pytest.mark.parametrize("group", [24, 16, 7])
def test_quantize_is_within_half_a_step(group: int) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=gen) * torch.tensor([1e-6, 1.0, 30.0, 1e5, 0.0])[:, None]
    values, scale = quantize(x, group)
    assert values.dtype is FP8 and scale.shape == (5, -(-24 // group))
    wide = scale.repeat_interleave(group, 1)[:, :24]
    back = values.float() * wide
    # Three bits of mantissa: half a step is a sixteenth of the number, below 2^-6 of 2^-10.
    assert ((back - x).abs() <= (x.abs() / 16).maximum(wide * 2**-10) * 1.001).all()
    largest = torch.stack([part.abs().amax(1) for part in values.float().split(group, 1)], 1)
    assert (largest[:4] == 448).all() and (largest[4] == 0).all()


@pytest.mark.parametrize("group", [24, 16, 7])
def test_dequantize_multiplies_each_group_by_its_scale(group: int) -> None:
    weight = fp8_weight(3, 24, device="cpu", group=group)
    weight.copy_(torch.ones(3, 24).to(FP8))
    weight.scale.copy_(torch.arange(1.0, 1 + weight.scale.numel()).view_as(weight.scale))
    expected = [[float(weight.scale[i, j // group]) for j in range(24)] for i in range(3)]
    assert weight.dequantized(torch.float32).tolist() == expected
    assert weight.nbytes == 3 * 24 + 4 * weight.scale.numel()


# ----------------------------------------------------------------- checkpoints

LAYOUTS = [("block", {"block": 16}), ("block", {"block": 128}), ("channel", {})]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_checkpoints_of_eight_bits(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    """They mean what a checkpoint of the dequantized numbers means."""
    quantized, plain = make_fp8_checkpoints(tmp_path, layout, intermediate_size=80, **options)
    ours, theirs = open_model(quantized), open_model(plain)
    for name, weight in linears(ours).items():
        assert isinstance(weight, Fp8Weight) and weight.dtype is FP8
        assert torch.equal(weight.dequantized(torch.float32), linears(theirs)[name]), name
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("layout", "options"), [("block", {"block": 16}), ("channel", {})])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_scales(
    tmp_path: Path, layout: str, options: dict[str, Any], size: int
) -> None:
    """Heads of 16, two KV heads for four ranks, and rows that begin inside of a block."""
    sizes = {"intermediate_size": 192, "hidden_size": 128, "num_attention_heads": 8}
    if layout == "block":
        sizes["head_dim"] = 8  # a KV head is half a block
    quantized, plain = make_fp8_checkpoints(tmp_path, layout, **options, **sizes)
    for rank in range(size):
        comm = SimpleNamespace(rank=rank, size=size)
        theirs = linears(open_model(plain, comm))
        for name, weight in linears(open_model(quantized, comm)).items():
            assert isinstance(weight, Fp8Weight)
            assert torch.equal(weight.dequantized(torch.float32), theirs[name]), (rank, name)


def test_a_rank_that_would_cut_a_block_is_refused(tmp_path: Path) -> None:
    quantized, _ = make_fp8_checkpoints(tmp_path, "block", block=32)  # down_proj has 96 columns
    for rank in range(2):
        comm: Any = SimpleNamespace(rank=rank, size=2)
        with pytest.raises(
            ValueError, match=r"tp_size: .*96 columns of .*down_proj.* of 32, got 2"
        ):
            open_model(quantized, comm)


def test_weights_are_quantized_while_they_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    ours, theirs = open_model(folder, quantization="fp8"), open_model(folder)
    for name, weight in linears(ours).items():
        assert isinstance(weight, Fp8Weight)
        values, scale = quantize(linears(theirs)[name], weight.shape[1])
        assert torch.equal(weight.float(), values.float()) and torch.equal(weight.scale, scale)
    others = {n: p for n, p in ours.named_parameters() if "_proj.weight" not in n}
    assert all(torch.equal(p, dict(theirs.named_parameters())[n]) for n, p in others.items())
    gap = (logits(ours) - logits(theirs)).norm() / logits(theirs).norm()
    assert 0 < gap < 0.1
    half = sum(p.nbytes for p in linears(theirs).values()) * 3 // 4  # of float32
    assert tensor_bytes(ours) < tensor_bytes(theirs) - half * 0.98


def test_fp8_is_what_the_checkpoint_has_already(tmp_path: Path) -> None:
    quantized, _ = make_fp8_checkpoints(tmp_path, "block")
    by_flag, by_file = open_model(quantized, quantization="fp8"), open_model(quantized)
    assert torch.equal(logits(by_flag), logits(by_file))


PROJECTIONS = "gate", "up", "down"


def keep_wide(quantized: Path, plain: Path, module: str, **entry: Any) -> None:
    """Let a checkpoint have a module in more bits, and say so in its config."""
    from safetensors.torch import load_file, save_file

    stored, wide = (load_file(folder / "model.safetensors") for folder in (quantized, plain))
    kept = {name: t for name, t in stored.items() if not name.startswith(f"{module}.")}
    kept |= {name: t for name, t in wide.items() if name.startswith(f"{module}.")}
    save_file(kept, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= entry
    (quantized / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("layout", "entry"),
    [
        ("block", {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "mlp.gate"]}),
        ("block", {"ignored_layers": [f"model.layers.0.mlp.{p}_proj" for p in PROJECTIONS]}),
        ("channel", {"ignore": ["lm_head", r"re:.*layers\.0\.mlp\..*"]}),
    ],
)
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_modules_that_a_checkpoint_keeps(
    tmp_path: Path, arch: str, layout: str, entry: dict[str, Any]
) -> None:
    """They are read as they are; all others have eight bits."""
    if arch == "qwen3_moe" and "ignored_layers" in entry:
        entry = {"ignored_layers": ["model.layers.0.mlp.experts"]}
    quantized, plain = make_fp8_checkpoints(tmp_path, layout, arch)
    keep_wide(quantized, plain, "model.layers.0.mlp", **entry)
    ours, theirs = open_model(quantized), open_model(plain)
    for name, weight in ours.named_parameters():
        wide = not name.endswith(("_proj.weight", "mlp.gate_up", "mlp.down"))
        assert isinstance(weight, Fp8Weight) == (not wide and "layers.0.mlp" not in name), name
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)


def test_a_part_of_a_layer_is_not_kept_alone(tmp_path: Path) -> None:
    quantized, plain = make_fp8_checkpoints(tmp_path, "block")
    module = "model.layers.1.self_attn.k_proj"
    keep_wide(quantized, plain, module, modules_to_not_convert=[module])
    with pytest.raises(ValueError, match=r"quantization_config: .*1.self_attn.qkv_proj.*k_proj"):
        open_model(quantized)


@pytest.mark.parametrize("lost", ["weight_scale_inv", "weight"])
def test_missing_scale_or_weight_is_named(tmp_path: Path, lost: str) -> None:
    quantized, _ = make_fp8_checkpoints(tmp_path, "block")
    name = f"model.layers.1.mlp.up_proj.{lost}"
    from safetensors.torch import load_file, save_file

    tensors = load_file(quantized / "model.safetensors")
    del tensors[name]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=f"missing {name}$"):
        open_model(quantized)


def test_numbers_of_eight_bits_without_a_scale_are_refused(tmp_path: Path) -> None:
    """Without a quantized config; and the other way round."""
    name = "model.layers.0.mlp.up_proj.weight"
    folder = make_checkpoint(tmp_path, extra={name: torch.zeros(96, 64).to(FP8)})
    with pytest.raises(WeightError, match=f"{name} has dtype F8_E4M3, not F64, F32, F16, BF16"):
        open_model(folder)
    quantized, plain = make_fp8_checkpoints(tmp_path / "two", "channel")
    (quantized / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(
        WeightError, match=r"missing .*down_proj.weight_scale.*dtype F32, not F8_E4M3"
    ):
        open_model(quantized)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "awq", "bits": 4},
        {"bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "compressed-tensors"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}},
        },
    ],
)
def test_other_formats_are_refused_with_the_list(tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, quantization_config=entry)
    known = "quantization_config: must be one of fp8 with weight_block_size, compressed-tensors"
    with pytest.raises(ValueError, match=known) as caught:
        open_model(folder)
    assert next(iter(entry)) in str(caught.value)


def test_dummy_weights_are_quantized(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    model = build_model(ModelConfig.from_path(folder), ALONE, dtype=torch.float32)
    quantize_model(model, "fp8", folder)
    load_dummy_weights(model, device="cpu", dtype=torch.float32)
    for weight in linears(model).values():
        assert isinstance(weight, Fp8Weight)
        assert 0.015 < weight.dequantized(torch.float32).std() < 0.025
    assert logits(model).isfinite().all()


def test_engine_serves_eight_bits(tmp_path: Path) -> None:
    """Tokens of the engine are those of the dequantized checkpoint."""
    quantized, plain = make_fp8_checkpoints(tmp_path, "block", block=32)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = []
    for folder in (quantized, plain):
        with LLM(folder, device="cpu", num_pages=32) as llm:
            answers.append([out["token_ids"] for out in llm.generate(PROMPTS, greedy)])
    assert answers[0] == answers[1]


def test_flag_of_the_config() -> None:
    assert dataclasses.asdict(EngineConfig(quantization="fp8"))["quantization"] == "fp8"
    with pytest.raises(ValueError, match=r"quantization: .*'int8' or 'fp8', got 'awq'"):
        EngineConfig(quantization="awq")


# ----------------------------------------------------------------- kernels, in the interpreter


def random_weight(n: int, k: int, group: int) -> Fp8Weight:
    """Rows, and groups of columns, of different sizes."""
    gen = torch.Generator().manual_seed(n + k)
    weight = fp8_weight(n, k, device="cpu", group=group)
    weight.copy_((torch.randn(n, k, generator=gen) * 50).to(FP8))
    weight.scale.copy_(torch.rand(weight.scale.shape, generator=gen) * 0.01 + 0.001)
    return weight


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def silu_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")


def products() -> Any:
    """The kernels of chapter 05d, with support for FP8 weights."""
    pytest.importorskip("minisgl.kernels.fp8_linear")
    return pytest.importorskip("minisgl.kernels.linear")


@INTERPRETED
@pytest.mark.parametrize("group", [512, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 20, 64, 65])
def test_gemms_of_eight_bits(rows: int, group: int) -> None:
    kernels, limit = products(), 1e-5
    weight, x, bias = random_weight(128, 512, group), normal(rows, 512), normal(128)
    x[0] *= 1000  # of each row by itself
    y = x @ weight.dequantized(torch.float32).T
    for got, want in (
        (kernels.linear(x, weight, bias), y + bias),
        (kernels.split_k_linear(x, weight).sum(0), y),
        (kernels.gated_linear(x, weight), silu_mul(y)),
    ):
        close(got[0], want[0], limit)
        close(got[-1], want[-1], limit)
        close(got, want, limit)


@INTERPRETED
@pytest.mark.parametrize("group", [1024, 128])
def test_one_row_of_eight_bits(group: int) -> None:
    kernels = products()
    weight, last = random_weight(1024, 1024, group), random_weight(64, 1024, group)
    x, residual, norm = normal(1, 1024), normal(1, 1024), normal(1024)
    made = kernels.gemv_add_norm(x, weight, residual, norm)
    total = residual + x @ weight.dequantized(torch.float32).T
    close(made.total, total, 1e-5)
    normed = torch.nn.functional.rms_norm(total, (1024,), norm, 1e-6)
    y = normed @ last.dequantized(torch.float32).T
    close(kernels.gemv(made, last, eps=1e-6), y, 1e-5)
    close(kernels.gemv(made, last, eps=1e-6, gated=True), silu_mul(y), 1e-5)
    odd = random_weight(64, 1024, 64)
    assert kernels.gemv(x, odd) is None, "scales of other groups than 128"
    close(kernels.linear(x, odd), x @ odd.dequantized(torch.float32).T, 1e-6)


@INTERPRETED
def test_many_rows_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias and gated, where torch multiplies by eight bits; open sums from 65 rows on."""
    kernels, asked = products(), []
    from minisgl.kernels import fp8_linear

    def scaled(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        asked.append(len(x))
        return torch.nn.functional.linear(x, weight.dequantized(x.dtype))

    monkeypatch.setattr(fp8_linear, "has_scaled_mm", lambda weight, dtype: True)
    monkeypatch.setattr(fp8_linear, "scaled_linear", scaled)
    weight, bias = random_weight(256, 256, 128), normal(256)
    for rows in (2, 16, 17, 64, 65):
        x = normal(rows, 256)
        y = x @ weight.dequantized(torch.float32).T
        close(kernels.linear(x, weight, bias), y + bias, 1e-5)
        close(kernels.split_k_linear(x, weight).sum(0), y, 1e-5)
        close(kernels.gated_linear(x, weight), silu_mul(y), 1e-5)
    assert asked == [17] * 2 + [64] * 2 + [65] * 3


@INTERPRETED
@pytest.mark.parametrize("rows", [17, 64, 65, 200, 257])
def test_eight_bits_on_both_sides(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """By our kernel, as exact as the library, where it is the faster one. Parts of k are uneven."""
    kernels, asked = products(), []
    from minisgl.kernels import fp8_linear

    def scaled(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        asked.append(x)
        return on_eight_bits(x) @ weight.dequantized(x.dtype).T

    def on_eight_bits(x: torch.Tensor) -> torch.Tensor:
        values = fp8_linear.quantize_rows(x, x.shape[1])
        return (values.float() * values.scale)[: values.rows]

    monkeypatch.setattr(fp8_linear, "has_scaled_mm", lambda weight, dtype: True)
    monkeypatch.setattr(fp8_linear, "scaled_linear", scaled)
    weight, bias, x = random_weight(256, 2816, 2816), normal(256), normal(rows, 2816)
    y = on_eight_bits(x) @ weight.dequantized(torch.float32).T
    close(kernels.split_k_linear(x, weight).sum(0), y, 1e-5)
    close(kernels.linear(x, weight, bias), y + bias, 1e-5)
    close(kernels.gated_linear(x, weight), silu_mul(y), 1e-5)
    assert len(asked) == (0 if rows <= 64 else 2 if rows <= 256 else 3)


@INTERPRETED
def test_tiles_of_eight_bits_on_both_sides() -> None:
    """They fit into shared memory, and no product has more programs than run at once."""
    choose = pytest.importorskip("minisgl.kernels.fp8_linear").choose_w8a8_tiling
    from minisgl.kernels.device import H200

    small = dataclasses.replace(H200, sms=58, shared_memory=101_376)
    for m, split_k, gated, limits in itertools.product(
        (17, 64, 65, 128, 129, 256), (False, True), (False, True), (H200, small)
    ):
        if gated and split_k:
            continue  # the gate needs whole sums
        n, k = (4096, 12288) if split_k else (6144, 5120)
        cut = choose(m, n, k, gated=gated, split_k=split_k, limits=limits)
        assert (cut is None) is (m > 64 and not split_k)
        if cut is not None:
            assert n % cut.bn == 0 and k % cut.bk == 0
            steps = -(-k // cut.bk // cut.splits)
            assert (cut.splits - 1) * steps < k // cut.bk <= cut.splits * steps, "none is empty"
            nbytes = cut.stages * cut.bk * (cut.bm + cut.bn * (2 if gated else 1))
            assert nbytes <= limits.shared_memory
            programs, most = n // cut.bn * cut.splits, limits.resident_blocks(2, nbytes)
            assert m <= cut.bm and (cut.splits == 1 or programs <= most)
            assert limits is small or not split_k or programs > 120
    for m, n, k in ((257, 4096, 4096), (64, 4112, 4096), (64, 4096, 4160)):
        assert choose(m, n, k, gated=False, split_k=True) is None


@INTERPRETED
def test_tiles_of_eight_bits() -> None:
    """They divide the weight, fit into shared memory, and give each SM several programs."""
    choose = pytest.importorskip("minisgl.kernels.fp8_linear").choose_fp8_tiling
    from minisgl.kernels.device import H200

    small = dataclasses.replace(H200, shared_memory=101_376)
    for m, split_k, gated, limits in itertools.product(
        (2, 8, 9, 16, 17, 32, 33, 64), (False, True), (False, True), (H200, small)
    ):
        n, k = (4096, 12288) if split_k else (6144, 5120)
        cut = choose(m, n, k, gated=gated, split_k=split_k, limits=limits)
        if cut is None and gated and m > 32 and limits is small:
            continue
        assert cut is not None and n % cut.bn == 0 and k % (cut.splits * cut.bk) == 0
        weights = cut.bn * cut.bk
        stage = 2 * cut.bm * cut.bk + weights * (2 if gated else 1)
        assert cut.stages * stage + weights <= limits.shared_memory
        least = 16 if gated else 8
        assert (cut.splits == 8) is split_k and m <= cut.bm <= max(least, 2 * m)
    for m, n, k in ((65, 4096, 4096), (8, 4112, 4096), (8, 4096, 4160)):
        assert choose(m, n, k, gated=False, split_k=True) is None


@INTERPRETED
@pytest.mark.parametrize("scales", in_turns(2, ["channel", "block"]))
@pytest.mark.parametrize("lens", [[9], [3, 20]])
def test_fused_model_of_eight_bits(few_programs: None, scales: str, lens: list[int]) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = small_model("qwen3", scales=scales, num_hidden_layers=1, **heads)
    check_model(model, lens, None)


@INTERPRETED
@pytest.mark.parametrize("group", [256, 128])
def test_rows_are_quantized_as_weights_are(group: int) -> None:
    """Up to the rounding of Triton's interpreter, which is not that of the hardware."""
    found = pytest.importorskip("minisgl.kernels.scaled_mm").quantize_rows
    x = normal(5, 256)
    values, (expected, expected_scale) = found(x, group), quantize(x, group)
    assert values.shape == (16, 256) and values.scale.stride() == (1, 16), "a multiple of 16 rows"
    assert torch.equal(values.scale[:5], expected_scale)
    close(values[:5].float(), expected.float(), 0.08)


@INTERPRETED
def test_rows_are_quantized_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a norm and a gate, as if they had been written and read in between."""
    kernels = products()
    from minisgl.kernels import fp8_linear
    from minisgl.kernels.norm import add_norm, gemm_input
    from minisgl.kernels.scaled_mm import quantize_rows

    def scaled(x: Any, weight: Fp8Weight) -> torch.Tensor:
        x = quantize_rows(x, x.shape[1])
        return ((x.float() * x.scale) @ weight.dequantized(torch.float32).T)[: x.rows]

    monkeypatch.setattr(fp8_linear, "has_scaled_mm", lambda weight, dtype: True)
    monkeypatch.setattr(fp8_linear, "scaled_linear", scaled)
    parts, residual, norm = normal(2, 70, 256), normal(70, 256), normal(256)
    gate_up, down = random_weight(512, 256, 256), random_weight(256, 256, 256)
    room = gemm_input(gate_up, residual)
    assert room.shape == (80, 256) and room.dtype is FP8
    assert gemm_input(gate_up, residual[:9]).dtype is torch.float32, "too few rows"
    x, total = add_norm(parts, residual, norm, 1e-6, room)
    wide, same = add_norm(parts, residual, norm, 1e-6)
    apart = quantize_rows(wide, 256)
    assert torch.equal(total, same) and torch.equal(x.scale[:70], apart.scale[:70])
    assert torch.equal(x[:70].float(), apart[:70].float())
    found = kernels.mlp(down, x, gate_up)
    again = kernels.split_k_linear(kernels.gated_linear(wide, gate_up), down)
    assert found.shape == again.shape and torch.equal(found, again)


# ----------------------------------------------------------------- keys and values

BATCHES = [([9, 30, 1], None), ([9, 30, 5], [4, 1, 5])]
# Triton's interpreter cuts off where the hardware rounds.
LIMITS = {
    "torch": 1e-6, "invariant": 1e-6, "triton": 0.1, "invariant_triton": 0.1, "recorded": 0.1,
    "fused": 0.1, "store_first": 0.1,
}  # fmt: skip


def backend_named(name: str) -> Any:
    if name in ("torch", "invariant"):
        return TorchBackend if name == "torch" else InvariantTorchBackend
    pytest.importorskip("triton")
    from minisgl.attention.fused_backend import FusedBackend, VerifyBackend
    from minisgl.attention.invariant_triton import InvariantTritonBackend
    from minisgl.attention.triton_backend import TritonBackend
    from minisgl.engine.tiled_prefill import TiledPrefill

    class Recorded(TritonBackend):
        """Plans of captured prefill steps: with split keys, and answers in place."""

        def plan(self, meta: Any, out_loc: torch.Tensor) -> Any:
            eager: Any = super().plan(meta, out_loc)
            tiled, tiles = TiledPrefill(self, torch.float32), vars(eager.args).values()
            static: Any = SimpleNamespace(out_loc=out_loc)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiled, "tile_rows", lambda size: eager.tile_q)
                made: Any = tiled.plan(len(out_loc), static, tuple(tiles))  # type: ignore[arg-type]
            assert made.splits > 1
            return made

    return {
        "triton": TritonBackend, "invariant_triton": InvariantTritonBackend, "recorded": Recorded,
        "fused": FusedBackend, "store_first": VerifyBackend,
    }[name]  # fmt: skip


@INTERPRETED
@pytest.mark.parametrize("backend", LIMITS)
@pytest.mark.parametrize(("lens", "extend"), BATCHES)
def test_attention_over_eight_bits(backend: str, lens: list[int], extend: list[int] | None) -> None:
    if backend in ("fused", "store_first") and extend is not None:
        pytest.skip("it only decodes")
    check_eight_bits(backend_named(backend), lens, extend, LIMITS[backend])


@INTERPRETED
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("qo", "kv"), [(4, 2), (3, 3), (5, 1)])
def test_rotate_and_store_eight_bits(qo: int, kv: int, normed: bool) -> None:
    pytest.importorskip("triton")
    check_rotate([9, 1, 4], qo=qo, kv=kv, dim=32, normed=normed, limit=0.1)


@INTERPRETED
@pytest.mark.parametrize(("kv", "dim"), [(1, 8), (3, 20), (2, 16)])
def test_store_kv_of_eight_bits(kv: int, dim: int) -> None:
    """The kernel against the pool's own, slot -1 left out."""
    store_kv = pytest.importorskip("minisgl.kernels.store_kv").store_kv
    world = World([9, 5], kv=kv, dim=dim, eight_bits=True)
    pool, packed, slots = world.pool, normal(4, 3 * kv, dim), torch.tensor([3, -1, 14, 0])
    k, v = packed[:, :kv], packed[:, kv : 2 * kv]  # rows further apart
    before = pool.buffer.clone()
    real = slots >= 0
    pool.store_kv(k[real], v[real], slots[real], 0)
    want = pool.buffer.float().flatten(2, 3)
    pool.buffer.copy_(before)
    store_kv(k, v, pool.k_cache(0), pool.v_cache(0), slots, pool.scales(0))
    got = pool.buffer.float().flatten(2, 3)
    close(got[:, :, slots[real]], want[:, :, slots[real]], 0.1)
    got[:, :, slots[real]] = want[:, :, slots[real]]
    assert torch.equal(got, want)


@INTERPRETED
def test_fused_model_over_eight_bits(few_programs: None) -> None:
    """A prompt and a decode step: every layer's scales reach its kernels."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = small_model("qwen3", num_hidden_layers=1, **heads)
    check_model(model, [3, 6], [1, 3], limit=0.1, eight_bits=True)
    check_model(model, [3, 6], None, limit=0.1, eight_bits=True)


@INTERPRETED
def test_queries_that_float16_cannot_hold_give_numbers() -> None:
    world = World([70, 5], kv=2, dim=32, qo=4, eight_bits=True)
    q, k, v = (world.random(2, h, 32, seed=i) for i, h in enumerate((4, 2, 2)))
    plan = world.backend(backend_named("fused")).plan(world.meta(), world.places()[1])
    assert plan.run(1e6 * q, k, v, 0).isfinite().all()


def test_prompt_with_and_without_a_hit_sees_the_same(tmp_path: Path) -> None:
    """New keys and values are seen as they were stored, like those of a hit."""
    q, k, v = (normal(9, heads, 32) for heads in (4, 2, 2))
    whole = World([9], kv=2, dim=32, eight_bits=True)
    _, out_loc = whole.places([9])
    plan = whole.backend(TorchBackend).plan(whole.meta(Phase.PREFILL, [9]), out_loc)
    expected = plan.run(q, k, v, 0)
    plan = whole.backend(TorchBackend).plan(whole.meta(Phase.PREFILL, [4]), out_loc[5:])
    torch.testing.assert_close(plan.run(q[5:], k[5:], v[5:], 0), expected[5:])


def test_pool_rounds_scales_and_saturates() -> None:
    pool = Fp8KVPool(
        num_layers=2, num_pages=3, page_size=4, num_kv_heads=2, head_dim=4, device="cpu"
    )
    second = torch.tensor([[0.5, 3.0], [2.0, 0.1]])  # of keys, and of values
    pool.scales(1)[..., 0] = second
    k = torch.tensor([[[1.0, -3.3, 1000.0, -1e9]], [[0.0, 0.3, 447.0, 0.001]]]).expand(-1, 2, -1)
    slots = torch.tensor([7, 2])
    for layer, scales in enumerate([torch.ones(2, 2), second]):
        pool.store_kv(k, k, slots, layer)
        for of_heads, found in zip(scales, pool.load_kv(slots, layer, torch.float32), strict=True):
            for head, scale in enumerate(of_heads):
                expected = (k[:, head] / scale).clamp(-448, 448).to(FP8).float() * scale
                assert torch.equal(found[:, head], expected)
    assert pool.k_cache(1).dtype is FP8 and pool.buffer.nbytes == 2 * 2 * 4 * 4 * 2 * 4
    assert pool.load_kv(slots, 0, torch.float32)[0][0, 0].tolist() == [1.0, -3.25, 448.0, -448.0]


def stored_scales(*shape: int) -> dict[str, torch.Tensor]:
    """Scales of two layers as a checkpoint has them: those of values are larger by a half."""
    numbers = 0.01 + 0.01 * torch.arange(math.prod(shape)).reshape(shape)
    return {
        f"model.layers.{i}.self_attn.{part}_scale": numbers * (i + 1) * (1.5 if part == "v" else 1)
        for i in range(2)
        for part in "kv"
    }


def wanted_scales(heads: list[float]) -> torch.Tensor:
    """[layers, 2, heads] of `stored_scales`, whose first layer has these of keys."""
    return (
        torch.tensor([1.0, 2.0]).view(2, 1, 1) * torch.tensor([[1.0], [1.5]]) * torch.tensor(heads)
    )


def scales_of(pool: Any) -> torch.Tensor:
    return torch.stack([pool.scales(i)[..., 0] for i in range(pool.num_layers)])


ONE, EACH = [0.01] * 4, [0.01, 0.02, 0.03, 0.04]
SHAPES = [((), ONE), ((1,), ONE), ((4,), EACH), ((4, 1, 1), EACH)]


@pytest.mark.parametrize(("shape", "every"), SHAPES)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_ranks_read_scales_of_their_heads(
    tmp_path: Path, shape: tuple[int, ...], every: list[float], size: int
) -> None:
    """Each has its part of four heads; of eight ranks, two have a copy of one."""
    folder = make_checkpoint(
        tmp_path, extra=stored_scales(*shape), num_attention_heads=8, num_key_value_heads=4
    )
    for rank in range(size):
        config = EngineConfig(
            model_path=folder,
            tp=TPInfo(rank, size),
            kv_cache_dtype="fp8",
            num_pages=8,
            device="cpu",
        )
        comm: Any = SingleRank()
        vars(comm).update(rank=rank, size=size)
        pool = build_engine(config, comm, progress=False).pool
        first, count = rank * 4 // size, max(1, 4 // size)
        wanted = wanted_scales(every[first : first + count])
        torch.testing.assert_close(scales_of(pool), wanted)


def test_scales_are_read_into_the_memory_that_kernels_know(tmp_path: Path) -> None:
    """And where a checkpoint has none, or of one layer alone, the others are 1."""
    name = "model.layers.1.self_attn.v_scale"
    folder = make_checkpoint(tmp_path, extra={name: torch.tensor([0.5, 2.0], dtype=torch.bfloat16)})
    sizes = {"num_pages": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 16, "device": "cpu"}
    pool = Fp8KVPool(num_layers=2, **sizes)
    places = [pool.scales(i).data_ptr() for i in range(2)]
    assert all(pool.scales(i).is_contiguous() and places[i] % 16 == 0 for i in range(2))
    load_kv_scales(pool, folder, 2, ALONE)
    assert scales_of(pool).tolist() == [[[1, 1], [1, 1]], [[1, 1], [0.5, 2]]]
    assert places == [pool.scales(i).data_ptr() for i in range(2)]
    plain = KVPool(num_layers=2, dtype=torch.float32, **sizes)  # type: ignore[arg-type]
    load_kv_scales(plain, folder, 2, ALONE)
    assert plain.scales(1) is None


@pytest.mark.parametrize("shape", [(3,), (2, 2), (8,), (0,), (4, 16)])
def test_scales_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.self_attn.k_scale"
    folder = make_checkpoint(
        tmp_path, extra={name: torch.ones(shape)}, num_attention_heads=8, num_key_value_heads=4
    )
    config = EngineConfig(model_path=folder, kv_cache_dtype="fp8", num_pages=8, device="cpu")
    wrong = f"{re.escape(name)} has shape {re.escape(str(shape))}, .* each of 4 KV heads"
    with pytest.raises(WeightError, match=wrong):
        build_engine(config, progress=False)
    build_engine(dataclasses.replace(config, kv_cache_dtype="model"), progress=False)


@pytest.mark.parametrize(
    ("parts", "wanted"), [({}, None), (stored_scales(), [0.01, 0.01]), (stored_scales(2), EACH[:2])]
)
def test_engine_with_a_cache_of_eight_bits(
    tmp_path: Path, parts: dict[str, torch.Tensor], wanted: list[float] | None
) -> None:
    """Scales are those of the checkpoint."""
    folder = make_checkpoint(tmp_path, extra=parts)
    first = SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True)
    found = {}
    for kind in ("model", "fp8"):
        with LLM(folder, kv_cache_dtype=kind, num_pages=32, device="cpu") as llm:
            engine = llm.scheduler.engine
            answers = llm.generate(PROMPTS, first)
            found[kind] = [answer["logprobs"][0]["logprob"] for answer in answers]
            if kind == "fp8":
                expected = torch.ones(2, 2, 2) if wanted is None else wanted_scales(wanted)
                torch.testing.assert_close(scales_of(engine.pool), expected)
    gaps = [abs(a - b) for a, b in zip(found["model"], found["fp8"], strict=True)]
    assert 0 < max(gaps) < 0.3


def test_eight_bits_double_the_pages(tmp_path: Path) -> None:
    model = ModelConfig.from_path(make_checkpoint(tmp_path))

    def pages(kind: str) -> int:
        config = resolve(EngineConfig(device="cpu", kv_cache_dtype=kind, page_size=4), model)  # type: ignore[arg-type]
        return decide_pages(
            dataclasses.replace(config, max_running_req=10**6), model, ALONE,
            free_before=64 << 20, model_bytes=0, trial=lambda tokens: (0, 0),
        )  # fmt: skip

    assert pages("fp8") == pytest.approx(4 * pages("model"), rel=0.01)  # a CPU's are of 32 bits


@pytest.mark.parametrize("backend", ["fi", "fi,fused", "triton,fi"])
def test_flashinfer_is_refused(tmp_path: Path, backend: str) -> None:
    model = ModelConfig.from_path(make_checkpoint(tmp_path, head_dim=64))
    config = EngineConfig(
        device="cuda:0", dtype="bfloat16", kv_cache_dtype="fp8", attention_backend=backend
    )
    with pytest.raises(ValueError, match="attention_backend: must be triton for kv_cache_dtype"):
        resolve(config, model)
    auto = resolve(dataclasses.replace(config, attention_backend="auto"), model)
    assert auto.attention_backend == "triton,fused"


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"kv_cache_dtype: .*capability below 8.9.*fp8 on 8.6"):
        fp8.check_device("kv_cache_dtype", "cuda:0")
    fp8.check_device("kv_cache_dtype", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_device("kv_cache_dtype", "cuda")
