"""GGUF files for tests and chapters, written by llama.cpp's own writer as its converter does.

`gguf_of(folder, path, kind)` converts a checkpoint in Hugging Face layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from safetensors.numpy import load_file

FIELDS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
STACKED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
           "w2": "down"}  # fmt: skip


def write_gguf(
    path: Path, fields: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
) -> Path:
    """Write a file; a tensor is float32 and the name of its kind, or raw bytes of that kind."""
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    for name, value in fields.items():
        if name != "general.architecture":
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind
            sub = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, kind, sub)
    for name, (array, kind_name) in tensors.items():
        quant = GGMLQuantizationType[kind_name]
        raw = array if array.dtype == np.uint8 else gguf.quants.quantize(array, quant)
        writer.add_tensor(name, raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter puts those of queries and keys: halves become neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a checkpoint with this `config.json`."""
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    found: dict[str, Any] = {"general.architecture": arch}
    for old, new in FIELDS.items():
        if config.get(old) is not None:
            found[f"{arch}.{new}"] = config[old]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found |= {f"{arch}.rope.dimension_count": head_dim, f"{arch}.attention.value_length": head_dim}
    rope = config["rope_parameters"]
    found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        found[f"{arch}.rope.scaling.original_context_length"] = length
    return found


def tensors_of(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint under llama.cpp's names, rows in its order, experts stacked."""
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if module in TOP:
            found[f"{TOP[module]}.{end}"] = tensor
            continue
        _, _, layer, part = module.split(".", 3)
        if ".experts." in part:
            number, projection = part.split(".experts.")[1].split(".")
            stacked = f"blk.{layer}.ffn_{STACKED[projection]}_exps.{end}"
            experts.setdefault(stacked, {})[int(number)] = tensor
            continue
        short = INSIDE[part]
        turned = arch == "llama" and short in heads
        found[f"blk.{layer}.{short}.{end}"] = permuted(tensor, heads[short]) if turned else tensor
    return found | {n: np.stack([e[i] for i in range(len(e))]) for n, e in experts.items()}


def gguf_of(
    folder: Path, path: Path, kind: str = "F32", extra: Mapping[str, Any] | None = None
) -> Path:
    """Convert a checkpoint; matrices get `kind` where their rows are whole blocks of it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(config, load_file(folder / "model.safetensors"))
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    named = {}
    for name, tensor in tensors.items():
        fits = tensor.ndim > 1 and tensor.shape[-1] % block == 0
        named[name] = (tensor.astype("f4"), kind if fits else "F32")
    return write_gguf(path, {**fields_of(config), **(extra or {})}, named)


def tokenizer_fields(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str] | None, pre: str, **more: Any
) -> dict[str, Any]:
    """Fields of a byte-level tokenizer, or with `merges` None of a SentencePiece one."""
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if merges is None else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds),
    }
    if merges is not None:
        fields["tokenizer.ggml.merges"] = list(merges)
    return fields | {f"tokenizer.ggml.{name}": value for name, value in more.items()}
