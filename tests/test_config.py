"""Configurations: real files, both spellings, what transformers writes, every refusal."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config.engine import (
    EngineConfig,
    SchedulerConfig,
    ServerConfig,
    TPInfo,
    max_seq_len,
    resolve,
)
from minisgl.config.known_models import (
    KNOWN_CONFIGS,
    LLAMA_3_1_8B,
    QWEN2_5_7B,
    QWEN3_0_6B,
    QWEN3_8B,
    QWEN3_30B_A3B,
)
from minisgl.config.model import FAMILIES, ModelConfig, RopeScaling, RotaryConfig
from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import Count, Number, PositiveNumber, Validated, check_positive

NAN, INF = float("nan"), float("inf")
NOT_INTEGERS = [True, False, 1.0, "1", NAN, [1], b"1"]
NOT_NUMBERS = [True, "0.5", NAN, INF, -INF, [0.5], 1j]


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def refused(action: Any, *args: Any, **kwargs: Any) -> str:
    """The error message of a call that must be refused."""
    with pytest.raises(ValueError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class Sample(Validated):
    count: Count = 0
    number: Number = 0.0
    above: PositiveNumber = 1.0


@given(st.integers())
def test_a_count_is_an_interval(value: int) -> None:
    if 0 <= value < 2**63:
        assert Sample(count=value).count == value
    else:
        assert refused(Sample, count=value).startswith("count: must be ")


@given(st.one_of(st.floats(), st.integers()))
def test_only_finite_numbers_pass(value: float) -> None:
    if math.isfinite(value) and value > 0:
        assert Sample(above=value).above == float(value)
    else:
        assert repr(value) in refused(Sample, above=value)


def test_numpy_numbers_become_pythons_own() -> None:
    sample = Sample(count=np.int64(3), number=np.float32(0.5))  # type: ignore[arg-type]
    assert sample == Sample(3, 0.5) and {type(sample.count), type(sample.number)} == {int, float}


def test_endless_integers_are_refused() -> None:
    assert refused(Sample, number=10**400).startswith("number: must be a valid number")
    for name in ("number", "above"):
        assert refused(Sample, **{name: 10**5000}).endswith("got a number too long to print")
    assert refused(Sample, count=-(10**5000)).endswith("got a number too long to print")


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "1", None])
def test_check_positive(wrong: Any) -> None:
    check_positive(a=1, b=np.int32(7))
    assert refused(check_positive, a=1, b=wrong) == f"b: must be a positive integer, got {wrong!r}"


def test_message_names_field_rule_and_value() -> None:
    message = "page_size: must be greater than or equal to 1, got -3"
    assert refused(EngineConfig, page_size=-3) == message
    assert refused(replace, EngineConfig(), page_size=-3) == message


# ----------------------------------------------------------------------------------- engine config

INTEGER_FIELDS = {  # field to the smallest value allowed
    "max_running_req": 1,
    "page_size": 1,
    "max_seq_len_override": 2,
    "num_pages": 1,
    "cuda_graph_max_bs": 0,
    "seed": 0,
    "max_extend_tokens": 1,
    "port": 0,
    "num_tokenizer": 0,
}


@pytest.mark.parametrize(("name", "low"), INTEGER_FIELDS.items())
def test_integer_fields(name: str, low: int) -> None:
    assert getattr(ServerConfig(**{name: low}), name) == low
    for wrong in [low - 1, -(10**9), *NOT_INTEGERS]:
        message = refused(ServerConfig, **{name: wrong})
        assert message.startswith(f"{name}: must be ") and message.endswith(f"got {wrong!r}")


@pytest.mark.parametrize("name", ["memory_ratio", "distributed_timeout"])
def test_number_fields(name: str) -> None:
    for wrong in [0, -0.1, *NOT_NUMBERS]:
        message = refused(ServerConfig, **{name: wrong})
        assert message.startswith(f"{name}: must be ") and message.endswith(f"got {wrong!r}")
    assert refused(EngineConfig, memory_ratio=1.01).startswith("memory_ratio: ")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dtype", ["int8", "float64", "", None, 16, True]),
        ("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "", None, 0]),
        (
            "attention_backend",
            ["flash", "fi,", ",fi", "fi,triton,torch", "fi, triton", "fused", "", None],
        ),
        ("cache_type", ["lru", "", None]),
        ("use_dummy_weight", [0, 1, "yes", None]),
        ("overlap", [0, 1, "yes"]),
        ("schedule_policy", ["lifo", "", None]),
        ("reserve_tokens", [0, -1, 1.5, True]),
        ("cuda_graph_bs", [4, "1,2", (0,), (1, True), (2.0,), {1: 2}]),
        ("model_path", ["", 3, b"x"]),
        ("tp", [0, True, None, (0, 1)]),
        ("host", ["", None, 127]),
        ("port", [65536]),
        ("served_model_name", ["", 1]),
        ("api_key", ["", 1]),
    ],
)
def test_other_fields(name: str, values: list[Any]) -> None:
    for wrong in values:
        assert refused(ServerConfig, **{name: wrong}).startswith(f"{name}: must "), wrong


def test_good_values_take_their_final_form() -> None:
    config = ServerConfig(
        model_path=Path("m"),  # type: ignore[arg-type]
        cuda_graph_bs=[1, 2],  # type: ignore[arg-type]
        attention_backend="fi,triton",
        memory_ratio=1,
    )
    assert config.model_path == "m" and config.cuda_graph_bs == (1, 2)
    assert type(config.memory_ratio) is float
    assert hash(config) == hash(replace(config))
    with pytest.raises(FrozenInstanceError):
        config.page_size = 16  # type: ignore[misc]
    with pytest.raises(TypeError, match="pagesize"):
        EngineConfig(pagesize=16)  # type: ignore[call-arg]


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (True, 2), (0, 2.0)])
def test_tp_info(rank: Any, size: Any) -> None:
    assert refused(TPInfo, rank, size).startswith(("rank: ", "size: "))


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_ranks_are_a_positive_number(ranks: Any) -> None:
    message = refused(EngineConfig, tp=ranks)
    assert message == f"tp: must be a positive number of ranks, got {ranks!r}"


# ------------------------------------------------------------------------------------ real models

BILLIONS = {  # as published
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}


MISTRAL_7B_V0_1 = without(LLAMA_3_1_8B, "rope_scaling") | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_known_models_have_their_published_size(name: str) -> None:
    assert ModelConfig.from_hf(KNOWN_CONFIGS[name]).num_parameters == BILLIONS[name]


def test_llama_3_1() -> None:
    model = ModelConfig.from_hf(LLAMA_3_1_8B)
    assert (model.num_qo_heads, model.num_kv_heads, model.head_dim) == (32, 8, 128)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert model.rotary == RotaryConfig(128, 500000.0, 131072, scaling)
    assert model.eos_token_ids == (128001,)
    assert (model.dtype, model.qkv_bias, model.qk_norm) == ("bfloat16", False, False)


def test_families() -> None:
    qwen2, qwen3 = ModelConfig.from_hf(QWEN2_5_7B), ModelConfig.from_hf(QWEN3_8B)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 128)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    for family in FAMILIES:
        config = without(QWEN3_30B_A3B, "architectures") | {"model_type": family.model_type}
        assert ModelConfig.from_hf(config).architecture == family.architecture


def test_both_spellings_are_one_model() -> None:
    rope = LLAMA_3_1_8B["rope_scaling"]
    new = without(LLAMA_3_1_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new |= {"rope_parameters": {**rope, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA_3_1_8B)
    old_type = {**without(rope, "rope_type"), "type": "llama3"}
    assert ModelConfig.from_hf(LLAMA_3_1_8B | {"rope_scaling": old_type}) == ModelConfig.from_hf(
        LLAMA_3_1_8B
    )


# -------------------------------------------------------------------- what transformers 5 writes

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    ("Llama", {"head_dim": 32, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("Qwen2", {"eos_token_id": [5, 6], "dtype": "float16"}),
    ("Qwen3", {}),
    ("Qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    ("Qwen3", {"head_dim": 16, "rope_parameters": {**YARN_ROPE, "attention_factor": 1.0}}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen3Moe", {"head_dim": 16, "num_experts": 9, "mlp_only_layers": [0]}),
    ("Mixtral", {"num_local_experts": 4}),
]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_what_transformers_saves(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """The file is written by transformers; sizes are compared with the model that it builds."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = getattr(transformers, f"{family}Config")(**{**TINY, **overrides})
    config.save_pretrained(tmp_path)
    ours = ModelConfig.from_path(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    state = theirs.state_dict()
    attention = "model.layers.0.self_attn."
    assert ours.architecture == type(theirs).__name__
    assert ours.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert state[attention + "q_proj.weight"].shape[0] == ours.num_qo_heads * ours.head_dim
    assert state[attention + "k_proj.weight"].shape[0] == ours.num_kv_heads * ours.head_dim
    assert (attention + "q_proj.bias" in state) == ours.qkv_bias
    assert (attention + "q_norm.weight" in state) == ours.qk_norm
    assert ours.rotary.base == config.rope_parameters["rope_theta"]
    kind = ours.rotary.scaling.kind if ours.rotary.scaling else "default"
    assert kind == config.rope_parameters["rope_type"]
    assert ours.dtype == str(config.dtype or "float32").removeprefix("torch.")
    eos = config.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,) if eos else ())
    assert ours.tie_word_embeddings == config.tie_word_embeddings


def test_stop_tokens_come_from_generation_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Qwen3Config(**{**TINY, "eos_token_id": 7}).save_pretrained(tmp_path)
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7,)
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7, 9)
    transformers.GenerationConfig(do_sample=True, temperature=0.5).save_pretrained(tmp_path)
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    assert refused(ModelConfig.from_path, tmp_path).startswith("eos_token_id: ")


# ------------------------------------------------------------------------- wrong config.json files

REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    assert refused(ModelConfig.from_hf, without(QWEN3_8B, name)).startswith(f"{name}: missing")


def test_old_llama_files_lack_two_fields_on_purpose() -> None:
    gone = ("num_key_value_heads", "rope_theta", "rope_scaling", "torch_dtype", "eos_token_id")
    model = ModelConfig.from_hf(without(LLAMA_3_1_8B, *gone))
    assert (model.num_kv_heads, model.rotary.base, model.rotary.scaling) == (32, 10000.0, None)
    assert (model.dtype, model.eos_token_ids) == ("float32", ())


@pytest.mark.parametrize("name", [*REQUIRED[:6], "vocab_size", "head_dim"])
@pytest.mark.parametrize("wrong", [-1, True, 1.5, "64", NAN, [64]])
def test_wrong_sizes_are_named(name: str, wrong: Any) -> None:
    message = refused(ModelConfig.from_hf, LLAMA_3_1_8B | {name: wrong})
    assert message.startswith(f"{name}: must be ") and repr(wrong) in message


ROPE = LLAMA_3_1_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("architectures", {"architectures": ["GPT2LMHeadModel"]}),
        ("architectures", {"architectures": ["DeepseekV3ForCausalLM"]}),
        ("model_type", {"architectures": [], "model_type": "deepseek_v3"}),
        ("architectures", {"architectures": "LlamaForCausalLM"}),
        ("model_type", {"architectures": None, "model_type": "gpt2"}),
        ("model_type", {"architectures": None, "model_type": None}),
        ("num_attention_heads", {"num_attention_heads": 48}),
        ("num_key_value_heads", {"num_key_value_heads": 5}),
        ("num_key_value_heads", {"num_key_value_heads": 64}),
        ("head_dim", {"head_dim": 65}),
        ("rms_norm_eps", {"rms_norm_eps": NAN}),
        ("rms_norm_eps", {"rms_norm_eps": 0}),
        ("rope_theta", {"rope_theta": -1.0}),
        ("rope_theta", {"rope_theta": True}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("dtype", {"torch_dtype": "int8"}),
        ("dtype", {"dtype": {"text": "float16"}}),
        ("tie_word_embeddings", {"tie_word_embeddings": "no"}),
        ("attention_bias", {"attention_bias": True}),
        ("mlp_bias", {"mlp_bias": True}),
        ("quantization_config", {"quantization_config": "awq"}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_scaling": {**ROPE, "partial_rotary_factor": 0.5}}),
        ("eos_token_id", {"eos_token_id": 128256}),
        ("eos_token_id", {"eos_token_id": [1, -1]}),
        ("eos_token_id", {"eos_token_id": "</s>"}),
        ("rope_scaling", {"rope_scaling": "llama3"}),
        ("rope_scaling", {"rope_parameters": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}),
        ("rope_scaling.kind", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("rope_scaling.kind", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("rope_scaling.kind", {"rope_scaling": {"rope_type": 3, "factor": 2.0}}),
        ("rope_scaling.kind", {"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}),
        ("rope_scaling.factor", {"rope_scaling": without(ROPE, "factor")}),
        ("rope_scaling.factor", {"rope_scaling": {**ROPE, "factor": 0.5}}),
        ("rope_scaling.factor", {"rope_scaling": {**ROPE, "factor": NAN}}),
        ("rope_scaling.factor", {"rope_scaling": {**YARN_ROPE, "factor": 1e308}}),
        ("max_position_embeddings", {"max_position_embeddings": 2**31}),
        (
            "max_position_embeddings",
            {
                "rope_scaling": {
                    **YARN_ROPE,
                    "factor": 1e6,
                    "original_max_position_embeddings": 10**6,
                }
            },
        ),
        ("rope_scaling.low_freq_factor", {"rope_scaling": without(ROPE, "low_freq_factor")}),
        ("rope_scaling.high_freq_factor", {"rope_scaling": {**ROPE, "high_freq_factor": 1.0}}),
        ("rope_scaling.beta_fast", {"rope_scaling": {**YARN_ROPE, "beta_fast": 0.5}}),
        ("rope_scaling.truncate", {"rope_scaling": {**YARN_ROPE, "truncate": "no"}}),
        ("rope_scaling.attention_factor", {"rope_scaling": {**YARN_ROPE, "attention_factor": -1}}),
        (
            "rope_scaling.original_max_position_embeddings",
            {"rope_scaling": without(ROPE, "original_max_position_embeddings")},
        ),
    ],
)
def test_wrong_files_are_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    message = refused(ModelConfig.from_hf, LLAMA_3_1_8B | changes)
    assert message.startswith(f"{field}: "), message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "rope_theta", "a"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)
MORE = ["rope_parameters", "rope_scaling", "layer_types", "quantization_config", "dtype"]


@settings(max_examples=200)
@given(st.data(), st.sampled_from([*KNOWN_CONFIGS.values(), MISTRAL_7B_V0_1]))
def test_whatever_stands_in_a_file_is_read_or_refused(
    data: st.DataObject, config: dict[str, Any]
) -> None:
    """Never a TypeError, a KeyError or an endless number: a ValueError or a model."""
    names = st.sampled_from([*config, *MORE, "use_sliding_window"])
    changes = data.draw(st.dictionaries(names, JSON, max_size=3))
    flag = {"use_sliding_window": True} if data.draw(st.booleans()) else {}
    try:
        model = ModelConfig.from_hf({**config, **flag, **changes})
    except ValueError as error:
        assert ": " in str(error)
    else:
        assert model.num_parameters > 0 and hash(model) == hash(replace(model))


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    config = QWEN3_8B | {"architectures": ["DeepseekV3ForCausalLM"]}
    message = refused(ModelConfig.from_hf, config)
    assert message.startswith("architectures: must be one of LlamaForCausalLM, ")
    assert "Qwen3MoeForCausalLM, Mixtral" in message and message.endswith(
        "['DeepseekV3ForCausalLM']"
    )


def test_yarn_lengthens_the_window() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = ModelConfig.from_hf(QWEN3_8B | {"rope_scaling": yarn})
    assert model.rotary.max_position == 131072 and model.rotary.base == 1000000.0
    shorter = without(yarn, "original_max_position_embeddings")
    model = ModelConfig.from_hf(QWEN3_8B | {"rope_scaling": shorter})
    assert model.rotary.scaling is not None
    assert model.rotary.scaling.original_max_position == 40960
    assert model.rotary.max_position == 163840


# --------------------------------------------------------------------------------- sliding windows


@pytest.mark.parametrize(
    ("base", "changes", "window"),
    [
        (MISTRAL_7B_V0_1, {}, 4096),
        (MISTRAL_7B_V0_1, {"sliding_window": None}, None),
        (QWEN2_5_7B, {}, None),  # the number is there, the flag is false
        (QWEN2_5_7B, {"use_sliding_window": True}, 131072),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": 512}, 512),
        (LLAMA_3_1_8B, {"sliding_window": 4096}, None),  # Llama has no such feature
        (
            QWEN2_5_7B,
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            4096,
        ),
        (
            QWEN2_5_7B,
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention"],
            },
            None,
        ),
    ],
)
def test_which_windows_count(base: dict, changes: dict, window: int | None) -> None:
    assert ModelConfig.from_hf(base | changes).sliding_window == window


def test_a_window_is_full_attention_only_up_to_its_length() -> None:
    mistral = ModelConfig.from_hf(MISTRAL_7B_V0_1)
    assert max_seq_len(EngineConfig(max_seq_len_override=4096), mistral) == 4096
    for override in (None, 4097):
        config = EngineConfig(max_seq_len_override=override, device="cpu")
        for action in (max_seq_len, resolve):
            message = refused(action, config, mistral)
            assert message.startswith("sliding_window: ") and "4096" in message
    wide = ModelConfig.from_hf(MISTRAL_7B_V0_1 | {"sliding_window": 32768})
    assert max_seq_len(EngineConfig(), wide) == 32768


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("layer_types", {"layer_types": ["chunked_attention"]}),
        ("use_sliding_window", {"use_sliding_window": 1}),
        (
            "sliding_window",
            {"use_sliding_window": True, "sliding_window": 0},
        ),
    ],
)
def test_wrong_windows(field: str, changes: dict[str, Any]) -> None:
    assert refused(ModelConfig.from_hf, QWEN2_5_7B | changes).startswith(f"{field}: ")


# ------------------------------------------------------------------------------- folders and files


@pytest.mark.parametrize(
    "content", ["", "{", '{"a": 1,}', "[1]", "null", '"text"', b"\xff\xfe\x00".decode("latin-1")]
)
def test_broken_config_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refused(ModelConfig.from_path, tmp_path).startswith("config.json: ")


def test_binary_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x01")
    assert refused(ModelConfig.from_path, tmp_path).startswith("config.json: cannot be read")


def test_nan_in_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B | {"rms_norm_eps": NAN}))
    assert refused(ModelConfig.from_path, tmp_path).startswith("rms_norm_eps: ")


def test_generation_config_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    for content, ids in [
        ('{"eos_token_id": [7, 9]}', (7, 9)),
        ('{"eos_token_id": 7}', (7,)),
        ('{"eos_token_id": null}', (128001,)),
        ("{}", (128001,)),
    ]:
        (tmp_path / "generation_config.json").write_text(content)
        assert ModelConfig.from_path(tmp_path).eos_token_ids == ids


def test_missing_and_wrong_paths(tmp_path: Path) -> None:
    assert refused(ModelConfig.from_path, tmp_path).startswith("config.json: no such file")
    (tmp_path / "model.bin").write_text("x")
    for wrong in (
        tmp_path / "nothing",
        str(tmp_path / "nothing"),
        "./nothing",
        "a/b/c",
        "~/no-such-folder-here",
        tmp_path / "model.bin",
        "",
        3,
        "name with space",
    ):
        assert refused(resolve_model_path, wrong).startswith("model_path: "), wrong
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert resolve_model_path(None).parts[-3:] == ("minisgl", "tiny", "model")


def test_hub_offline_is_one_clear_sentence(tmp_path: Path) -> None:
    code = "from minisgl.config.paths import resolve_model_path as r; r('Qwen/Qwen3-0.6B')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: model_path: no such folder, and the hub does not deliver")
    assert last.endswith("got 'Qwen/Qwen3-0.6B'")


def test_every_config_has_a_seed_of_its_own_and_keeps_it() -> None:
    """Copies have it, too: those of `resolve` and of other processes, which are other ranks."""
    one, other = EngineConfig(device="cpu"), EngineConfig(device="cpu")
    assert one.seed != other.seed and EngineConfig(seed=5).seed == 5
    resolved = resolve(one, ModelConfig.from_hf(QWEN3_8B))
    for copied in (resolved, replace(one, tp=TPInfo(1, 2)), pickle.loads(pickle.dumps(one))):
        assert copied.seed == one.seed
    assert refused(EngineConfig, seed=-1).startswith("seed: must be")


def test_importing_the_config_does_not_import_torch() -> None:
    code = "import sys, minisgl.config.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ----------------------------------------------------------------------------------------- resolve


def test_resolve_settles_everything_on_a_cpu() -> None:
    model = ModelConfig.from_hf(QWEN3_8B)
    wish = ServerConfig(device="cpu", port=0, seed=0)
    config = resolve(wish, model)
    assert type(config) is ServerConfig and wish == ServerConfig(device="cpu", port=0, seed=0)
    assert (config.device, config.dtype, config.page_size) == ("cpu", "float32", 16)
    assert (config.attention_backend, config.kernels) == ("torch", "torch")
    assert resolve(config, model) == config
    # The format of weights is settled where the model is built: it depends on its size.
    assert [name for name, value in vars(config).items() if value == "auto"] == ["quantization"]


def test_resolve_keeps_what_the_user_said() -> None:
    model = ModelConfig.from_hf(QWEN3_8B)
    wish = EngineConfig(device="cpu", dtype="bfloat16", page_size=1, attention_backend="triton")
    config = resolve(wish, model)
    assert (config.dtype, config.page_size, config.attention_backend) == ("bfloat16", 1, "triton")


def test_resolve_on_a_gpu_is_arithmetic_too() -> None:
    model = ModelConfig.from_hf(QWEN3_8B)
    config = resolve(EngineConfig(device="cuda", tp=TPInfo(3, 4)), model)
    assert (config.device, config.dtype) == ("cuda:3", "bfloat16")
    assert config.attention_backend == "triton,fused"
    assert config.kernels == "triton"
    exact = resolve(EngineConfig(device="cuda", dtype="float32"), model)
    assert exact.attention_backend == "triton"
    with pytest.raises(ValueError, match="attention_backend"):
        resolve(EngineConfig(device="cuda", dtype="float32", attention_backend="fi,fused"), model)
    with pytest.raises(ValueError, match="attention_backend"):
        EngineConfig(attention_backend="fused")
    assert resolve(EngineConfig(device="cuda:1"), model).device == "cuda:1"
    whole = replace(model, dtype="float32")
    assert resolve(EngineConfig(device="cuda"), whole).dtype == "bfloat16"


def test_auto_device_is_there() -> None:
    torch = pytest.importorskip("torch")
    config = resolve(EngineConfig(), ModelConfig.from_hf(QWEN3_8B))
    assert torch.zeros(1, device=config.device).device.type == torch.device(config.device).type


def test_resolve_refuses_what_does_not_fit() -> None:
    model = ModelConfig.from_hf(QWEN3_8B)
    for field, config in [
        ("max_seq_len_override", EngineConfig(device="cpu", max_seq_len_override=40961)),
        ("attention_backend", EngineConfig(device="cpu", attention_backend="fi")),
        ("attention_backend", EngineConfig(device="cpu", attention_backend="torch,fi")),
        ("tp_size", EngineConfig(device="cpu", tp=TPInfo(0, 3))),
        ("tp_size", EngineConfig(device="cpu", tp=TPInfo(0, 64))),
    ]:
        assert refused(resolve, config, model).startswith(f"{field}: ")


def test_pitfall_09_kv_heads_fewer_than_ranks() -> None:
    model = ModelConfig.from_hf(QWEN3_0_6B)  # 16 query heads, 8 KV heads
    assert [model.kv_heads_per_rank(size) for size in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    model = ModelConfig.from_hf(QWEN2_5_7B)  # 28 query heads, 4 KV heads
    model.check_tp(4)
    for size in (0, 3, 8, True):
        assert refused(model.check_tp, size).startswith("tp_size: must be one of [1, 2, 4")


def test_a_config_is_more_specific_step_by_step() -> None:
    assert issubclass(ServerConfig, SchedulerConfig) and issubclass(SchedulerConfig, EngineConfig)
    assert ServerConfig().port == 1919 and SchedulerConfig().cache_type == "radix"
