"""Chapter 05: our models against transformers, layer pieces, and checkpoints that are refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from minisgl.config.model import ModelConfig, RopeScaling, RotaryConfig
from minisgl.layers.attention import QKNorm, RMSNorm, RotaryTable, apply_rotary
from minisgl.models.registry import MODELS, build_model
from minisgl.models.weights import WeightError, load_dummy_weights, load_weights
from minisgl.parallel.comm import ParallelContext, SingleRank
from tests.checkpoints import ARCHITECTURES, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, make_checkpoint
from tests.dense import dense_batch
from tests.plain_model import plain_logits

PROMPTS = [[5, 9, 200, 31, 7, 7, 280, 14], [3], list(range(40, 75))]


def open_model(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Our model with the weights of a folder."""
    config = dataclasses.replace(ModelConfig.from_path(folder), **changes)
    model = build_model(config, SingleRank(), dtype=dtype)
    load_weights(model, folder, SingleRank(), device="cpu", dtype=dtype, progress=False)
    return model


def reference_logits(folder: Path, *sequences: list[int]) -> torch.Tensor:
    """Logits [n, vocab] by transformers, of one sequence after the other."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])


def assert_equal_to_transformers(folder: Path, **changes: Any) -> None:
    """Logits of several prompts in one flat batch, each against transformers on its own."""
    model = open_model(folder, **changes)
    with torch.inference_mode():
        logits = model(dense_batch(PROMPTS))
        last = model(dense_batch(PROMPTS, last_only=True))
    theirs, lengths = reference_logits(folder, *PROMPTS), [len(ids) for ids in PROMPTS]
    assert min(part.std() for part in theirs.split(lengths)) > 0.5  # else it proves little
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
    ours = torch.stack([part[-1] for part in logits.split(lengths)])
    torch.testing.assert_close(last, ours, atol=1e-5, rtol=0)


PLAIN = {
    "llama3": ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0}),
    "linear": ("llama", {"rope_scaling": LINEAR_ROPE, "tie_word_embeddings": True}),
    "yarn": ("qwen2", {"rope_scaling": YARN_ROPE, "rope_theta": 500.0, "head_dim": 24}),
    "default": ("qwen3", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_plain_arithmetic(tmp_path: Path, name: str) -> None:
    """Against loops in float64 that share nothing with us; also the oracle of the mutations."""
    arch, fields = PLAIN[name]
    folder = make_checkpoint(tmp_path, arch, **fields)
    config = json.loads((folder / "config.json").read_text())
    model = open_model(folder)
    with torch.inference_mode():
        parts = model(dense_batch(PROMPTS)).split([len(ids) for ids in PROMPTS])
        last = model(dense_batch(PROMPTS, last_only=True))
    for row, ids in enumerate(PROMPTS):
        plain = plain_logits(folder, config, ids)
        torch.testing.assert_close(parts[row].double(), plain, atol=1e-4, rtol=0)
        torch.testing.assert_close(last[row].double(), plain[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tmp_path: Path, arch: str, tied: bool) -> None:
    assert_equal_to_transformers(make_checkpoint(tmp_path, arch, tie_word_embeddings=tied))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)])
def test_grouped_heads(tmp_path: Path, heads: tuple[int, int]) -> None:
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    assert_equal_to_transformers(make_checkpoint(tmp_path, "qwen3", **shape))


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_head_dim_other_than_hidden_over_heads(tmp_path: Path, arch: str) -> None:
    assert_equal_to_transformers(make_checkpoint(tmp_path, arch, head_dim=24))


ROPES = {
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn_attention_factor": {**YARN_ROPE, "attention_factor": 1.5},
    "yarn_mscale": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_betas": {**YARN_ROPE, "beta_fast": 16.0, "beta_slow": 2.0},
}


@pytest.mark.parametrize("old_spelling", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_scaling(tmp_path: Path, name: str, old_spelling: bool) -> None:
    arch = "llama" if name in ("linear", "llama3") else "qwen2"
    folder = make_checkpoint(
        tmp_path, arch, rope_scaling=ROPES[name], rope_theta=500.0, old_spelling=old_spelling
    )
    assert_equal_to_transformers(folder)


def test_many_files_give_the_same_model(tmp_path: Path) -> None:
    one = open_model(make_checkpoint(tmp_path / "one", "qwen2"))
    three = open_model(make_checkpoint(tmp_path / "three", "qwen2", num_files=3))
    for a, b in zip(one.parameters(), three.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dtype_is_cast_while_reading(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    model = open_model(folder, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_equal_to_transformers(folder)
    half = open_model(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = half(dense_batch(PROMPTS))
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


def test_model_is_built_without_memory(tmp_path: Path) -> None:
    config = ModelConfig.from_path(make_checkpoint(tmp_path))
    model = build_model(config, SingleRank(), dtype=torch.float32)
    assert all(p.is_meta and not p.requires_grad for p in model.parameters())
    assert [name for name, b in model.named_buffers() if not b.is_meta] == ["model.rotary.table"]


def test_tied_head_shares_memory(tmp_path: Path) -> None:
    model = open_model(make_checkpoint(tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    config = ModelConfig.from_path(make_checkpoint(tmp_path))
    object.__setattr__(config, "architecture", "GPT9ForCausalLM")
    with pytest.raises(ValueError, match=r"architecture: 'GPT9ForCausalLM'.*LlamaForCausalLM"):
        build_model(config, SingleRank(), dtype=torch.float32)
    assert len(MODELS) >= 4


# ----------------------------------------------------------------- checkpoints that do not fit


def refused(folder: Path) -> str:
    """The message with which a folder is refused."""
    with pytest.raises(WeightError) as caught:
        open_model(folder)
    return str(caught.value)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    assert f"missing {name}" in refused(make_checkpoint(tmp_path, drop=(name,)))


def test_extra_tensor_is_named(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.extra_proj.weight": torch.zeros(3)}
    message = refused(make_checkpoint(tmp_path, extra=extra))
    assert "no place for model.layers.0.mlp.extra_proj.weight" in message


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)}
    message = refused(make_checkpoint(tmp_path, extra=extra))
    assert "model.layers.0.mlp.up_proj.weight has shape (95, 64)" in message
    assert "(96, 64)" in message


def test_every_fault_is_in_one_message(tmp_path: Path) -> None:
    names = [
        f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up", "down")
    ]
    extra = {"odd": torch.zeros(1), "model.norm.weight": torch.zeros(1, 64)}
    message = refused(make_checkpoint(tmp_path, drop=tuple(names), extra=extra))
    assert "and 1 more" in message
    assert "odd" in message
    assert "model.norm.weight has shape (1, 64)" in message


def test_quantised_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}
    assert "model.norm.weight has dtype I8" in refused(make_checkpoint(tmp_path, extra=extra))


def test_bias_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    message = refused(make_checkpoint(tmp_path, "mistral", extra=extra))
    assert "q_proj.bias" in message


def test_harmless_extras_are_ignored_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True, extra=extra)
    plain = open_model(folder)
    head = {**extra, "lm_head.weight": plain.lm_head.weight.data.clone()}
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True, extra=head)
    with caplog.at_level(logging.INFO, logger="minisgl.weights"):
        open_model(folder)
    assert "inv_freq: the rotary table is computed" in caplog.text
    assert "lm_head.weight: the head is tied" in caplog.text


def test_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.randn(320, 64)}
    message = refused(make_checkpoint(tmp_path, tie_word_embeddings=True, extra=extra))
    assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_several_files_without_an_index(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_files=2)
    (folder / "model.safetensors.index.json").unlink()
    assert "model-00001-of-00002.safetensors" in refused(folder)


def test_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_files=2)
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    assert "in two files, one is model-00002-of-00002.safetensors" in refused(folder)


def test_parameter_without_a_rule_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = ModelConfig.from_path(folder)
    model = build_model(config, SingleRank(), dtype=torch.float32)
    model.odd = nn.Bilinear(2, 2, 2, device="meta")
    with pytest.raises(TypeError, match="odd: no rule fills a Bilinear"):
        load_weights(model, folder, SingleRank(), device="cpu", dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_config_counts_the_parameters_of_the_model(tmp_path: Path, arch: str) -> None:
    """The biases and norms of a family: the model and the config agree."""
    model = build_model(
        config := ModelConfig.from_path(make_checkpoint(tmp_path, arch)),
        SingleRank(),
        dtype=torch.float32,
    )
    held = sum(p.numel() for p in model.parameters())
    copies = config.num_qo_heads + config.num_kv_heads - 2 if config.qk_norm else 0
    assert held - config.num_layers * copies * config.head_dim == config.num_parameters


def test_stretched_positions_need_their_rule() -> None:
    rotary = RotaryConfig(16, 100.0, 64, RopeScaling("linear", 2.0))
    with pytest.raises(ValueError, match="rope_scaling: 'linear' needs its own frequencies"):
        RotaryTable(rotary)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert "neither model.safetensors.index.json nor model.safetensors" in message
    assert "pytorch_model.bin" in message


def test_index_that_names_an_absent_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_files=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "absent: model-00002-of-00002.safetensors" in refused(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "a/../../x.safetensors", "/x"])
def test_index_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model", num_files=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00002.safetensors", name))
    for there in ("outside", "x"):
        (tmp_path / f"{there}.safetensors").touch()
    assert f"names files outside its folder: {name}" in refused(folder)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors cannot be read" in refused(folder)


# ----------------------------------------------------------------------------- parts


def test_dummy_weights_are_small_seeded_and_finite(tmp_path: Path) -> None:
    config = ModelConfig.from_path(make_checkpoint(tmp_path))
    made = []
    for seed in (0, 0, 1):
        model = build_model(config, SingleRank(), dtype=torch.float32)
        load_dummy_weights(model, device="cpu", dtype=torch.float32, seed=seed)
        with torch.inference_mode():
            made.append(model(dense_batch(PROMPTS)))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert torch.isfinite(made[0]).all()
    assert 0 < made[0].std() < 1


def test_fused_add_and_norm() -> None:
    norm = RMSNorm(8, 1e-6, ParallelContext(SingleRank(), torch.float32, "cpu"))
    norm.weight.data = torch.rand(8)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(y, expected)
    y, same = norm(x)
    assert same is x


def test_qk_norm_gives_queries_and_keys_their_own_weight() -> None:
    norm = QKNorm(2, 1, 4, 1e-6, ParallelContext(SingleRank(), torch.float32, "cpu"))
    norm.weight.data = torch.tensor([[1.0] * 4, [1.0] * 4, [3.0] * 4])
    out = norm(torch.ones(5, 3, 4))
    torch.testing.assert_close(out[0, :, 0], torch.tensor([1.0, 1.0, 3.0]), atol=1e-5, rtol=0)


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    table = RotaryTable(RotaryConfig(head_dim=16, base=100.0, max_position=64))
    x, y = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def turned(v: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rotary(v, *table(torch.tensor([position])))

    torch.testing.assert_close(turned(x, 17).norm(), x.norm())
    near = (turned(x, 7) * turned(y, 3)).sum()
    far = (turned(x, 57) * turned(y, 53)).sum()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_rotation_is_counted_from_the_first_half() -> None:
    """Both wrong ways would give the same attention; other people's kernels see the difference."""
    table = RotaryTable(RotaryConfig(head_dim=2, base=100.0, max_position=4))
    turned = apply_rotary(torch.tensor([[[1.0, 0.0]]]), *table(torch.tensor([1])))
    torch.testing.assert_close(turned[0, 0], torch.tensor([math.cos(1), math.sin(1)]))


def test_rotation_in_bfloat16_is_computed_in_float32() -> None:
    table = RotaryTable(RotaryConfig(head_dim=64, base=10000.0, max_position=4096))
    x = torch.randn(3, 2, 64).bfloat16()
    positions = torch.tensor([0, 1000, 4095])
    out = apply_rotary(x, *table(positions))
    assert table.table.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    exact = apply_rotary(x.float(), *table(positions))
    assert torch.equal(out, exact.bfloat16())


def test_greedy_tokens_equal_transformers_on_64_prompts(tmp_path: Path) -> None:
    """Eight new tokens each, recomputed densely; the engine's own tests do the same with pages."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    model = open_model(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 310, 12).tolist() for _ in range(64)]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor(prompts)
    theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 12:]
    ours = [list(ids) for ids in prompts]
    with torch.inference_mode():
        for _ in range(8):
            logits = model(dense_batch(ours, last_only=True))
            for ids, token in zip(ours, logits.argmax(-1).tolist(), strict=True):
                ids.append(token)
    assert [ids[12:] for ids in ours] == theirs.tolist()
