"""From the fields of a GGUF file to a `config.json`.

Generated from notebooks/06e_gguf.ipynb: edit there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minisgl.config.model import ModelConfig
from minisgl.models.gguf.header import GgufError, Header

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")  # `llama` includes Mistral and Mixtral
MAX_CONTEXT = 2**21  # tokens; building the model makes a table of that many positions
SAME = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
CHECKED = ("attention.value_length", "rope.dimension_count")  # must equal the size of a head
ROPE = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
HARMLESS = ("vocab_size", "rope.scaling.finetuned")  # redundant, or used in training alone


def exact(value: Any) -> Any:
    """Return the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def model_fields(header: Header) -> dict[str, Any]:
    """Return the architecture's fields without their prefix; raise GgufError for unknown ones."""
    arch = header.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise header.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES)}", arch)
    if header.fields.get("split.count", 1) != 1:
        rule = "1; llama-gguf-split --merge joins the parts"
        raise header.refuse("split.count", rule, header.fields["split.count"])
    prefix = f"{arch}."
    mine = {k.removeprefix(prefix): v for k, v in header.fields.items() if k.startswith(prefix)}
    if mine.get("expert_count") == 0:
        mine = {name: value for name, value in mine.items() if not name.startswith("expert_")}
    known = {*SAME, *CHECKED, *HARMLESS, *(f"rope.scaling.{name}" for name in ROPE)}
    for name, value in mine.items():
        if name not in known:
            raise header.refuse(f"{arch}.{name}", "absent: its effect is not supported", value)
        if not isinstance(value, int | float) and name != "rope.scaling.type":
            raise header.refuse(f"{arch}.{name}", "one number for all layers", value)
    return {name: exact(value) for name, value in mine.items()}


def dimension(header: Header, name: str, rank: int, axis: int) -> int:
    """Return one dimension of a tensor; raise GgufError unless the file has it with that rank."""
    shape = header.tensors[name].shape if name in header.tensors else None
    if shape is None or len(shape) != rank:
        raise header.refuse(name, f"present, with {rank} dimensions", shape)
    return shape[axis]


def check_sizes(header: Header, found: dict[str, Any]) -> None:
    """Reject a size that differs from the tensors'."""
    arch, head_dim = header.fields["general.architecture"], found["attention.key_length"]
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    exps = "expert_count" in found
    gate = ("blk.0.ffn_gate_exps.weight", 3) if exps else ("blk.0.ffn_gate.weight", 2)
    there = {
        "block_count": len(blocks),
        "embedding_length": dimension(header, "token_embd.weight", 2, 1),
        "attention.head_count": dimension(header, "blk.0.attn_q.weight", 2, 0) / head_dim,
        "attention.head_count_kv": dimension(header, "blk.0.attn_k.weight", 2, 0) / head_dim,
        "expert_feed_forward_length" if arch == "qwen3moe" else "feed_forward_length":
            dimension(header, *gate, -2),
    }  # fmt: skip
    there |= {"expert_count": dimension(header, *gate, 0)} if exps else {}
    for name, size in there.items():
        if found.get(name, size) != size:
            raise header.refuse(f"{arch}.{name}", f"{size:g}, as the tensors have it", found[name])


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_divisors(head_dim: int, base: float, factor: float) -> np.ndarray:
    """Return Llama 3's divisors of the planes' frequencies, float64 [head_dim / 2]."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clip(0, 1)
    return 1 / (keep + (1 - keep) / factor)


def read_rope(header: Header, found: dict[str, Any]) -> dict[str, Any]:
    """Read the rotary scaling of a file as `rope_parameters`."""
    arch = header.fields["general.architecture"]
    there = [name for name in ROPE if f"rope.scaling.{name}" in found]
    scaling = {name: found[f"rope.scaling.{name}"] for name in there}
    kind, base = scaling.pop("type", "none"), found.get("rope.freq_base", 10_000.0)
    rope = {"rope_theta": base, "rope_type": "default" if kind == "none" else kind}
    if kind not in ("none", "linear", "yarn"):
        raise header.refuse(f"{arch}.rope.scaling.type", "none, linear or yarn", kind)
    if stored := header.tensors.get("rope_freqs.weight"):
        head_dim = found["attention.key_length"]
        if (stored.kind.name, stored.shape, kind) != ("F32", (head_dim // 2,), "none"):
            got = f"{stored.kind.name} {stored.shape} beside scaling {kind}"
            raise header.refuse("rope_freqs.weight", f"F32 of {head_dim // 2} numbers, alone", got)
        divisors = np.fromfile(header.path, "<f4", head_dim // 2, offset=stored.start)
        factor = float(divisors.max())
        if not np.allclose(divisors, llama3_divisors(head_dim, base, factor), rtol=1e-4):
            got = divisors.tolist()
            raise header.refuse("rope_freqs.weight", "the divisors of Llama 3's scaling", got)
        return {**rope, "rope_type": "llama3", "factor": factor, **LLAMA3}
    if kind != "none":
        names = {"original_context_length": "original_max_position_embeddings"}
        rope |= {names.get(k, k.removeprefix("yarn_")): v for k, v in scaling.items()}
    return rope


ENDS = ("eos", "eot", "eom")  # end of a text, of a turn, of a message that calls a tool
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}  # fmt: skip
CARDS = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}  # defaults from model cards, by base name


def token_id(header: Header, name: str) -> int | None:
    """Return the id of a special token, or None; raise GgufError if it is not in the vocabulary."""
    field = f"tokenizer.ggml.{name}_token_id"
    found, size = header.fields.get(field), len(header.fields.get("tokenizer.ggml.tokens", ()))
    if found is not None and not (type(found) is int and 0 <= found < size):
        raise header.refuse(field, f"below the vocabulary's {size}", found)
    return found


def advice(header: Header) -> dict[str, Any]:
    """Build the content of `generation_config.json`: end tokens and sampling defaults."""
    ends = dict.fromkeys(token_id(header, name) for name in ENDS)
    found = dict(CARDS.get(str(header.fields.get("general.basename", "")).lower(), {}))
    for old, new in SAMPLING.items():
        if f"general.sampling.{old}" in header.fields:
            found[new] = exact(header.fields[f"general.sampling.{old}"])
    return {"eos_token_id": [end for end in ends if end is not None], **found}


def head_size(header: Header, found: dict[str, Any]) -> int:
    """Return the size of a head, for which a file has zero to three fields."""
    arch, heads = header.fields["general.architecture"], found.get("attention.head_count")
    if type(heads) is not int or heads < 1:
        raise header.refuse(f"{arch}.attention.head_count", "a positive integer", heads)
    whole = dimension(header, "token_embd.weight", 2, 1) // heads
    size = found.get("attention.key_length", found.get("rope.dimension_count", whole))
    if type(size) is not int or size < 2:
        raise header.refuse(f"{arch}.attention.key_length", "an integer above 1", size)
    for name in CHECKED:
        if found.get(name, size) != size:
            raise header.refuse(f"{arch}.{name}", f"the size of a head, {size}", found[name])
    return size


def config_of(header: Header) -> dict[str, Any]:
    """Build the `config.json` of a GGUF file; raise GgufError for an unsupported model."""
    found, arch = model_fields(header), header.fields["general.architecture"]
    found["attention.key_length"] = head_size(header, found)
    check_sizes(header, found)
    kind = arch.replace("moe", "_moe")
    if arch == "llama" and "expert_count" in found:
        kind = "mixtral"
    elif arch == "llama" and "attention.sliding_window" in found:
        kind = "mistral"
    kinds = {tensor.kind.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    dtype = {"F32": "float32", "F16": "float16"}.get("".join(kinds), "bfloat16")  # of matrices
    config = {new: found[old] for old, new in SAME.items() if old in found}
    config |= {"model_type": kind, "rope_parameters": read_rope(header, found)}
    config |= {"vocab_size": dimension(header, "token_embd.weight", 2, 0)}
    config |= {"eos_token_id": advice(header)["eos_token_id"], "dtype": dtype}
    config |= {"tie_word_embeddings": "output.weight" not in header.tensors}
    config |= {"norm_topk_prob": arch == "qwen3moe"}
    try:
        model = ModelConfig.from_hf(config)
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        old_names = {new: f"{arch}.{old}" for old, new in SAME.items()}
        raise GgufError(f"{header.path.name}: {old_names.get(name, name)}{colon}{rest}") from None
    if (window := model.rotary.max_position) > MAX_CONTEXT:
        raise header.refuse(f"{arch}.context_length", f"at most {MAX_CONTEXT}, scaled", window)
    return {**config, "architectures": [model.architecture]}
