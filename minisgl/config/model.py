"""What an engine knows of a model: its numbers, read from `config.json`.

Generated from notebooks/01_requests.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minisgl.config.paths import read_json, resolve_model_path
from minisgl.config.rules import (
    Rule,
    apply_rules,
    flag,
    integer,
    number,
    optional,
    refuse,
    several,
    text,
    word,
)

ROPE_KINDS = ("llama3", "yarn", "linear")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary angles are stretched beyond the length of pretraining, `factor` times.

    `llama3` also reads the two `*_freq_factor` and `original_max_position` (tokens); `yarn` reads
    `original_max_position` and what follows it; None means the value of the YaRN paper.
    """

    kind: Literal["llama3", "yarn", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        apply_rules(self, SCALING_RULES, SCALING_NAMES)
        check_scaling_order(self)


MAX_POSITION = 2**31 - 1  # positions and slots are int32
SCALING_RULES: dict[str, Rule] = {
    "kind": word(*ROPE_KINDS),
    "factor": number(1, 1e6),
    "low_freq_factor": number(0, above=True),
    "high_freq_factor": number(0, above=True),
    "original_max_position": integer(0, MAX_POSITION),
    "beta_fast": number(0, above=True),
    "beta_slow": number(0, above=True),
    "attention_factor": optional(number(0)),
    "mscale": optional(number(0)),
    "mscale_all_dim": optional(number(0)),
    "truncate": flag,
}
SCALING_NAMES = {name: f"rope_scaling.{name}" for name in SCALING_RULES} | {
    "kind": "rope_scaling.rope_type",
    "original_max_position": "rope_scaling.original_max_position_embeddings",
}


def check_scaling_order(s: RopeScaling) -> None:
    """Raise ValueError if fields that are fine alone do not fit together."""
    if s.kind != "linear":
        name = SCALING_NAMES["original_max_position"]
        integer(1, MAX_POSITION)(name, s.original_max_position)
    if s.kind == "llama3" and s.high_freq_factor <= s.low_freq_factor:
        must = f"above low_freq_factor {s.low_freq_factor:g}"
        raise refuse("rope_scaling.high_freq_factor", must, s.high_freq_factor)
    if s.kind == "yarn" and s.beta_fast < s.beta_slow:
        must = f"at least beta_slow {s.beta_slow:g}"
        raise refuse("rope_scaling.beta_fast", must, s.beta_fast)


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding of one head; `max_position` is the window in tokens."""

    head_dim: int
    base: float
    max_position: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        apply_rules(self, ROTARY_RULES, ROTARY_NAMES)
        if self.head_dim % 2:
            raise refuse("head_dim", "even, because rotary embedding turns pairs", self.head_dim)


def rope_scaling_or_none(name: str, value: Any) -> RopeScaling | None:
    """Rule for the field `scaling`."""
    if value is not None and not isinstance(value, RopeScaling):
        raise refuse(name, "a RopeScaling or None", value)
    return value


ROTARY_NAMES = {"base": "rope_theta", "max_position": "max_position_embeddings"}
ROTARY_RULES: dict[str, Rule] = {
    "head_dim": integer(1),
    "base": number(0, above=True),
    "max_position": integer(1, MAX_POSITION),
    "scaling": rope_scaling_or_none,
}


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder-only transformer is; every size is that of the whole model, not of a rank.

    `sliding_window` is None, or the number of tokens up to which full attention is exact.
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
    hidden_act: str = "silu"
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        apply_rules(self, MODEL_RULES, HF_NAMES)
        check_model(self)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that one of `tp_size` ranks holds; fewer heads than ranks are copied."""
        integer(1)("tp_size", tp_size)
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            must = f"a divisor or a multiple of num_key_value_heads {self.num_kv_heads}"
            raise refuse("tp_size", must, tp_size)
        return max(1, self.num_kv_heads // tp_size)

    def check_tp(self, tp_size: int) -> None:
        """Raise ValueError if the model cannot be split over `tp_size` ranks."""
        self.kv_heads_per_rank(tp_size)
        inner = "moe_intermediate_size" if self.num_experts else "intermediate_size"
        sizes = {"num_attention_heads": self.num_qo_heads, inner: getattr(self, inner)}
        for name, size in sizes.items():
            if size % tp_size:
                raise refuse("tp_size", f"a divisor of {name} {size}", tp_size)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied output head counts once."""
        hidden, head_dim = self.hidden_size, self.head_dim
        q_width, kv_width = self.num_qo_heads * head_dim, self.num_kv_heads * head_dim
        attention = 2 * hidden * q_width + 2 * hidden * kv_width
        attention += (q_width + 2 * kv_width) * self.qkv_bias + 2 * head_dim * self.qk_norm
        if self.num_experts:
            mlp = self.num_experts * (3 * hidden * self.moe_intermediate_size + hidden)
        else:
            mlp = 3 * hidden * self.intermediate_size
        layers = self.num_layers * (attention + mlp + 2 * hidden)  # two norms a layer
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return layers + tables + hidden

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Build from the contents of a `config.json`; ValueError names the field at fault."""
        if not isinstance(config, Mapping):
            raise refuse("config", "a JSON object", config)
        architecture = read_architecture(config)
        family = FAMILIES[architecture]
        refuse_unsupported(config)
        heads = read_heads(config, family)
        eos = config.get("eos_token_id")
        eos = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        dtype = config.get("dtype") or config.get("torch_dtype")
        direct = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
        return cls(
            architecture=architecture,
            num_layers=required(config, "num_hidden_layers"),
            **{name: required(config, name) for name in direct},
            **heads,
            rotary=read_rotary(config, heads["head_dim"]),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            hidden_act=config.get("hidden_act", "silu"),
            dtype=str(dtype or "float32").removeprefix("torch."),
            eos_token_ids=eos,
            bos_token_id=config.get("bos_token_id"),
            **(read_experts(config) if family.moe else {}),
            sliding_window=read_window(config, family),
        )

    @classmethod
    def from_path(cls, path: str | Path) -> ModelConfig:
        """Build from a model folder or hub id; the stop tokens of `generation_config.json` win."""
        folder = resolve_model_path(path)
        config = read_json(folder / "config.json")
        if (folder / "generation_config.json").exists():
            eos = read_json(folder / "generation_config.json").get("eos_token_id")
            config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
        return cls.from_hf(config)


DTYPES = ("float32", "float16", "bfloat16")
HF_NAMES = {  # our names to those of config.json
    "architecture": "architectures",
    "num_layers": "num_hidden_layers",
    "num_qo_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}


def rotary_config(name: str, value: Any) -> RotaryConfig:
    """Rule for the field `rotary`."""
    if not isinstance(value, RotaryConfig):
        raise refuse(name, "a RotaryConfig", value)
    return value


MODEL_RULES: dict[str, Rule] = {
    "architecture": text,
    **dict.fromkeys(("num_layers", "hidden_size", "intermediate_size"), integer(1)),
    **dict.fromkeys(("num_qo_heads", "num_kv_heads", "head_dim", "vocab_size"), integer(1)),
    "rms_norm_eps": number(0, above=True),
    "rotary": rotary_config,
    **dict.fromkeys(("tie_word_embeddings", "qkv_bias", "qk_norm", "norm_topk_prob"), flag),
    "hidden_act": word("silu"),
    "dtype": word(*DTYPES),
    "eos_token_ids": several(integer(0), "token ids"),
    "bos_token_id": optional(integer(0)),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), integer(0)),
    "sliding_window": optional(integer(1)),
}


def check_model(m: ModelConfig) -> None:
    """Raise ValueError if fields that are fine alone do not fit together."""
    if m.num_qo_heads % m.num_kv_heads:
        must = f"a divisor of num_attention_heads {m.num_qo_heads}"
        raise refuse("num_key_value_heads", must, m.num_kv_heads)
    if m.rotary.head_dim != m.head_dim:
        raise refuse("rotary.head_dim", f"the model's head_dim {m.head_dim}", m.rotary.head_dim)
    specials = {"eos_token_id": m.eos_token_ids, "bos_token_id": (m.bos_token_id or 0,)}
    for name, tokens in specials.items():
        for token in tokens:
            integer(0, m.vocab_size - 1)(name, token)
    if m.num_experts:
        integer(1, m.num_experts)("num_experts_per_tok", m.num_experts_per_tok)
        integer(1)("moe_intermediate_size", m.moe_intermediate_size)


@dataclass(frozen=True)
class Family:
    """What an architecture implies without saying it in its config.json."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: bool = False
    default_head_dim: int | None = None  # None: hidden_size // num_attention_heads
    window: Literal["never", "always", "flag"] = "never"  # whether sliding_window counts


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window="always"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="flag"),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, default_head_dim=128, window="flag"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, moe=True, window="flag"),
}


def required(config: Mapping[str, Any], name: str, where: str = "") -> Any:
    """A field that has no sensible default; `where` names the dictionary it lies in."""
    if config.get(name) is None:
        raise ValueError(f"{where}{name}: missing from the model's config")
    return config[name]


def read_architecture(config: Mapping[str, Any]) -> str:
    """Name of the model class: `architectures`, or what `model_type` implies without it."""
    named = config.get("architectures")
    if named is not None:
        if not isinstance(named, list | tuple) or len(named) != 1:
            raise refuse("architectures", "a list of one name", named)
        return str(word(*FAMILIES)("architectures", named[0]))
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    return by_type[word(*by_type)("model_type", required(config, "model_type"))]


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a feature that changes the result and that we do not compute."""
    features: dict[str, tuple[object, str]] = {  # the values that are fine, and what to say
        "attention_bias": ((None, False), "false: only Qwen2 has biases here"),
        "mlp_bias": ((None, False), "false: our MLP has no biases"),
        "quantization_config": ((None,), "absent: we read plain checkpoints"),
        "decoder_sparse_step": ((None, 1), "1: experts in every layer"),
        "mlp_only_layers": ((None, []), "empty: experts in every layer"),
        "partial_rotary_factor": ((None, 1), "1: whole heads are turned"),
    }
    for name, (fine, must) in features.items():
        if config.get(name) not in fine:  # type: ignore[operator]
            raise refuse(name, must, config[name])


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All rotary fields in one dictionary, from the old spelling or the new one."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, found in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(found, Mapping):
            raise refuse(name, "an object", found)
        if any(isinstance(value, Mapping) for value in found.values()):
            raise refuse(name, "one set of values for all layers", dict(found))
    if old and new and old != new:
        raise refuse("rope_scaling", "absent beside rope_parameters", dict(old))
    rope = {"rope_theta": config.get("rope_theta"), **old, **new}
    refuse_unsupported({"partial_rotary_factor": rope.get("partial_rotary_factor")})
    return {name: value for name, value in rope.items() if value is not None}


def read_rotary(config: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    """Rotary settings; a missing base is the 10,000 of the original paper."""
    rope = rope_fields(config)
    name = "max_position_embeddings"
    window = integer(1, MAX_POSITION)(name, required(config, name))
    scaling = read_scaling(rope, window)
    if scaling is not None and scaling.kind == "yarn":
        window = max(window, round(scaling.original_max_position * scaling.factor))
    return RotaryConfig(head_dim, rope.get("rope_theta", 10_000.0), window, scaling)


def read_scaling(rope: Mapping[str, Any], window: int) -> RopeScaling | None:
    """The scaling in a rope dictionary, or None; `window` is YaRN's default original length."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if word("default", *ROPE_KINDS)("rope_scaling.rope_type", kind) == "default":
        return None
    where = "rope_scaling."
    found = {"factor": required(rope, "factor", where)}
    original = rope.get("original_max_position_embeddings")
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            found[name] = required(rope, name, where)
        found["original_max_position"] = required(rope, "original_max_position_embeddings", where)
    if kind == "yarn":
        found["original_max_position"] = window if original is None else original
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        found |= {name: rope[name] for name in (*names, "truncate") if name in rope}
    return RopeScaling(kind=kind, **found)


def read_window(config: Mapping[str, Any], family: Family) -> int | None:
    """Tokens of the sliding window, or None when every layer sees the whole text."""
    kind = word("full_attention", "sliding_attention")
    kinds = several(kind, "layer types")("layer_types", config.get("layer_types") or ())
    if family.window == "never":
        return None
    if family.window == "flag":
        if not flag("use_sliding_window", config.get("use_sliding_window", False)):
            return None
        if kinds and "sliding_attention" not in kinds:
            return None
        layers = integer(1)("num_hidden_layers", required(config, "num_hidden_layers"))
        below = optional(integer(0))("max_window_layers", config.get("max_window_layers"))
        if not kinds and not family.moe and (below or 0) >= layers:
            return None  # the first `below` layers see everything, and those are all
    window: int | None = config.get("sliding_window")
    return window


def read_heads(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Head counts and head size; missing ones follow the conventions of the file format."""
    hidden = integer(1)("hidden_size", required(config, "hidden_size"))
    heads = integer(1)("num_attention_heads", required(config, "num_attention_heads"))
    head_dim = config.get("head_dim") or family.default_head_dim
    if head_dim is None and hidden % heads:
        raise refuse("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
    kv_heads = config.get("num_key_value_heads")
    if "num_key_value_heads" not in config and family.model_type != "llama":
        required(config, "num_key_value_heads")  # only Llama means something by leaving it out
    return {
        "num_qo_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": integer(1)("head_dim", hidden // heads if head_dim is None else head_dim),
    }


def read_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a mixture of experts, in both spellings of the number of experts."""
    count = {"num_experts": config.get("num_experts", config.get("num_local_experts"))}
    return {
        "num_experts": integer(1)("num_experts", required(count, "num_experts")),
        "num_experts_per_tok": required(config, "num_experts_per_tok"),
        "moe_intermediate_size": required(config, "moe_intermediate_size"),
        "norm_topk_prob": config.get("norm_topk_prob", False),
    }
