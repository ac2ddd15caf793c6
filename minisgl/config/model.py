"""The numbers that describe a model to the engine, read from `config.json`.

Generated from notebooks/01b_configuration.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from minisgl.config.paths import read_json, resolve_model_path
from minisgl.config.rules import (
    STRICT,
    Count,
    Number,
    Positive,
    PositiveNumber,
    Validated,
    explain,
    refuse,
)

MAX_POSITION = 2**31 - 1  # positions and slots are int32
Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class RopeScaling(Validated):
    """Stretching of the rotary angles beyond the length of pretraining, `factor` times.

    `llama3` also reads the two `*_freq_factor` and `original_max_position` (tokens); `yarn` reads
    `original_max_position` and the fields after it; None is the value of the YaRN paper
    (https://arxiv.org/abs/2309.00071).
    """

    kind: Literal["llama3", "yarn", "linear"]
    factor: Annotated[Number, Field(ge=1, le=1e6)]
    low_freq_factor: PositiveNumber = 1.0
    high_freq_factor: PositiveNumber = 4.0
    original_max_position: Annotated[Count, Field(le=MAX_POSITION)] = 0
    beta_fast: PositiveNumber = 32.0
    beta_slow: PositiveNumber = 1.0
    attention_factor: Annotated[Number, Field(ge=0)] | None = None
    mscale: Annotated[Number, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[Number, Field(ge=0)] | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values, and fields that are valid alone but not together."""
        super().__post_init__()
        if self.kind != "linear" and self.original_max_position == 0:
            raise refuse("original_max_position", "above 0", 0)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            must = f"above low_freq_factor {self.low_freq_factor:g}"
            raise refuse("high_freq_factor", must, self.high_freq_factor)
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise refuse("beta_fast", f"at least beta_slow {self.beta_slow:g}", self.beta_fast)


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding of one head; `max_position` is the window in tokens."""

    head_dim: int
    base: float
    max_position: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        """Refuse values that no rotary embedding can have."""
        if self.head_dim % 2:
            raise refuse("head_dim", "even, because rotary embedding turns pairs", self.head_dim)
        if self.max_position > MAX_POSITION:
            raise refuse("max_position_embeddings", f"at most {MAX_POSITION}", self.max_position)


@dataclass(frozen=True)
class MoEConfig:
    """`top_k` of `num_experts` MLPs compute a token, each `intermediate_size` wide.

    norm_topk_prob: the weights of a token's experts are scaled to add up to 1. dense_layers: layers
    that have one ordinary MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer; sizes are of the whole model, not of a rank.

    `sliding_window` is None, or the number of tokens up to which full attention is exact; `moe` is
    None for a dense model.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rotary: RotaryConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: Dtype = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if fields are valid alone but not together."""
        if self.num_qo_heads % self.num_kv_heads:
            must = f"a divisor of num_attention_heads {self.num_qo_heads}"
            raise refuse("num_key_value_heads", must, self.num_kv_heads)
        if self.rotary.head_dim != self.head_dim:
            raise refuse("rotary.head_dim", f"head_dim {self.head_dim}", self.rotary.head_dim)
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise refuse("eos_token_id", f"in the vocabulary of {self.vocab_size}", token)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads on one of `tp_size` ranks; fewer heads than ranks are copied."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tp(self, tp_size: int, expert_parallel: bool = False) -> None:
        """Raise ValueError, which names the possible sizes, if ranks cannot share the model."""
        moe, kv = self.moe, self.num_kv_heads
        if expert_parallel and moe is None:
            raise refuse(
                "expert_parallel", f"off for {self.architecture}, which has no experts", True
            )
        experts = (
            0 if moe is None else moe.num_experts if expert_parallel else moe.intermediate_size
        )
        common = gcd(self.num_qo_heads, self.intermediate_size, experts)
        fits = [n for n in range(1, common + 1) if common % n == 0 and (kv % n == 0 or n % kv == 0)]
        if isinstance(tp_size, bool) or tp_size not in fits:
            raise refuse("tp_size", f"one of {fits}, which divide heads, MLPs and experts", tp_size)

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts, of which a token uses `moe.top_k / moe.num_experts`."""
        if self.moe is None:
            return 0
        sparse = self.num_layers - len(self.moe.dense_layers)
        return sparse * self.moe.num_experts * 3 * self.hidden_size * self.moe.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied output head counts once."""
        hidden, head_dim = self.hidden_size, self.head_dim
        q_width, kv_width = self.num_qo_heads * head_dim, self.num_kv_heads * head_dim
        attention = 2 * hidden * q_width + 2 * hidden * kv_width
        attention += (q_width + 2 * kv_width) * self.qkv_bias + 2 * head_dim * self.qk_norm
        dense = len(self.moe.dense_layers) if self.moe else self.num_layers
        mlps = dense * 3 * hidden * self.intermediate_size + self.expert_parameters
        mlps += (
            (self.num_layers - dense) * hidden * (self.moe.num_experts if self.moe else 0)
        )  # router
        layers = self.num_layers * (attention + 2 * hidden) + mlps  # two norms a layer
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return layers + tables + hidden

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Build from the contents of a `config.json`; a ValueError names the wrong field."""
        if not isinstance(config, Mapping):
            raise refuse("config", "a JSON object", config)
        family, rope = family_of(config), rope_fields(config)
        try:
            file = ConfigFile.model_validate(in_one_spelling(config, rope))
        except ValidationError as error:
            raise explain(error) from None
        heads = read_heads(file, family)
        return cls(
            architecture=family.architecture,
            num_layers=file.num_hidden_layers,
            rotary=read_rotary(file, rope, heads["head_dim"]),
            tie_word_embeddings=file.tie_word_embeddings,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            eos_token_ids=file.eos_token_id,
            sliding_window=read_window(file, family),
            moe=read_moe(file, family),
            **heads,
            **{name: getattr(file, name) for name in SAME_NAMES},
        )

    @classmethod
    def from_path(cls, path: str | Path) -> ModelConfig:
        """Build from a model folder or hub id; the stop tokens of `generation_config.json` win."""
        folder = resolve_model_path(path)
        config = read_json(folder / "config.json")
        eos = read_json(folder / "generation_config.json", required=False).get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
        return cls.from_hf(config)


MAX_LAYERS, MAX_SIZE = 2**10, 2**21  # a start is slow above them, and no model is near
Size = Annotated[Positive, Field(le=MAX_SIZE)]


class ConfigFile(BaseModel):
    """The fields of a `config.json` that decide what a model computes, in one spelling."""

    model_config = STRICT

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[Positive, Field(le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    rms_norm_eps: PositiveNumber
    max_position_embeddings: Annotated[Positive, Field(le=MAX_POSITION)]
    rope_theta: PositiveNumber = 10_000.0  # the paper's
    tie_word_embeddings: bool = False
    dtype: Dtype = "float32"
    eos_token_id: tuple[Count, ...] = ()
    use_sliding_window: bool | None = None
    sliding_window: Positive | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []
    num_experts: Size | None = None  # from here on: only for a mixture of experts
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[Count] = []

    # Features that change the result but are not implemented have one value only.
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False  # Qwen2's biases are not in its file
    mlp_bias: Literal[False] = False
    quantization_config: dict[str, Any] | None = None  # chapter 05g reads or refuses it
    partial_rotary_factor: Annotated[Number, Field(ge=1, le=1)] = 1.0


@dataclass(frozen=True)
class Family:
    """Properties that an architecture implies and its config.json omits."""

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the file has none; None: hidden_size / num_attention_heads
    sliding_window: bool = False  # True: the window applies even without a flag in the file
    kv_heads_optional: bool = False  # without them, as many as query heads
    moe: bool = False
    norm_topk_prob: bool = False  # regardless of the file


FAMILIES = (
    Family("LlamaForCausalLM", "llama", kv_heads_optional=True),
    Family("MistralForCausalLM", "mistral", sliding_window=True),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, moe=True),
    Family("MixtralForCausalLM", "mixtral", sliding_window=True, moe=True, norm_topk_prob=True),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that `architectures` names, or else `model_type`."""
    field = "architectures" if config.get("architectures") else "model_type"
    for family in FAMILIES:
        if config.get(field) in ([family.architecture], family.model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise refuse(field, f"one of {known}", config.get(field))


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the rotary fields of the old and the new spelling into one dictionary."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, found in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
            raise refuse(name, "an object with one set of values for all layers", found)
    if old and new and old != new:
        raise refuse("rope_scaling", "absent beside rope_parameters", old)
    return {name: value for name, value in {**old, **new}.items() if value is not None}


def in_one_spelling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's fields under their current names and forms; null counts as absent."""
    file = {name: value for name, value in config.items() if value is not None}
    file |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    dtype = file.get("dtype", file.get("torch_dtype", "float32"))
    file["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    file.setdefault("num_experts", file.get("num_local_experts"))
    eos = file.get("eos_token_id", ())
    file["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return file


LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_scaling(rope: Mapping[str, Any], window: int) -> RopeScaling | None:
    """Read the scaling of a rope dictionary, or None; YaRN's original length may be `window`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    for name in ("factor", *(LLAMA3_FIELDS if kind == "llama3" else ())):
        if name not in rope:
            raise ValueError(f"rope_scaling.{name}: missing")
    found = {field.name: rope[field.name] for field in fields(RopeScaling) if field.name in rope}
    if "original_max_position_embeddings" in rope:
        found["original_max_position"] = rope["original_max_position_embeddings"]
    if kind == "yarn":
        found.setdefault("original_max_position", window)
    try:
        return RopeScaling(kind=kind, **found)
    except ValueError as error:
        raise ValueError(f"rope_scaling.{error}") from None


def read_rotary(file: ConfigFile, rope: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    """Read the rotary settings; with YaRN the window is the stretched one."""
    window = file.max_position_embeddings
    scaling = read_scaling(rope, window)
    if scaling is not None and scaling.kind == "yarn":
        window = max(window, round(scaling.original_max_position * scaling.factor))
    return RotaryConfig(head_dim, file.rope_theta, window, scaling)


def read_heads(file: ConfigFile, family: Family) -> dict[str, Any]:
    """Read the head counts and the head size, with the defaults of missing fields."""
    heads, kv_heads = file.num_attention_heads, file.num_key_value_heads
    head_dim = file.head_dim or family.head_dim
    if kv_heads is None and not family.kv_heads_optional:
        raise ValueError("num_key_value_heads: missing")
    if head_dim is None and file.hidden_size % heads:
        raise refuse("num_attention_heads", f"a divisor of hidden_size {file.hidden_size}", heads)
    size = head_dim or file.hidden_size // heads
    return {"num_qo_heads": heads, "num_kv_heads": kv_heads or heads, "head_dim": size}


def read_window(file: ConfigFile, family: Family) -> int | None:
    """Read the sliding window in tokens; None if every layer attends to all tokens."""
    flag = file.use_sliding_window
    counts = family.sliding_window if flag is None else flag
    somewhere = not file.layer_types or "sliding_attention" in file.layer_types
    return file.sliding_window if counts and somewhere else None


def read_moe(file: ConfigFile, family: Family) -> MoEConfig | None:
    """Read the experts of a file, or None for a dense family; Mixtral's are as wide as its MLP."""
    if not family.moe:
        return None
    wide = "intermediate_size" if family.model_type == "mixtral" else "moe_intermediate_size"
    sizes = {name: getattr(file, name) for name in ("num_experts", "num_experts_per_tok", wide)}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise refuse(missing[0], "there in a mixture of experts", None)
    experts, top_k, width = sizes.values()
    if top_k > experts:
        raise refuse("num_experts_per_tok", f"at most num_experts {experts}", top_k)
    layers, alone = range(file.num_hidden_layers), file.mlp_only_layers
    if absent := set(alone) - set(layers):
        raise refuse("mlp_only_layers", f"below num_hidden_layers {len(layers)}", sorted(absent))
    dense = tuple(i for i in layers if i in alone or (i + 1) % file.decoder_sparse_step)
    return MoEConfig(experts, top_k, width, file.norm_topk_prob or family.norm_topk_prob, dense)


SAME_NAMES = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "dtype")


def sampling_advice(folder: Path) -> dict[str, Any]:
    """Read the fields of `SamplingParams` that a model's `generation_config.json` has."""
    advice = read_json(folder / "generation_config.json", required=False)
    if advice.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    known = {name: advice[name] for name in names if advice.get(name) is not None}
    return {n: v for n, v in known.items() if (n, v) != ("top_k", 0)}  # 0 is "off" on the hub
