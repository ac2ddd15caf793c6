"""Small random checkpoints in Hugging Face layout, made in milliseconds, for tests and chapters.

`make_checkpoint(folder, arch="qwen3", **overrides)` writes `config.json`, `generation_config.json`
and safetensors. Overrides are fields of the Hugging Face config (`num_key_value_heads=1`,
`tie_word_embeddings=True`, `rope_scaling={...}`), so that the same folder opens in transformers.
Nothing here imports transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}

# Families and layouts of experts that the loader distinguishes. Name: architecture, overrides.
# Some heads are tied, one layer of an MoE is dense, and no number of ranks divides the vocabulary.
ODD: dict[str, Any] = {"vocab_size": 321}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ODD),
    "qwen2": ("qwen2", {**ODD, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", ODD),
    "mistral": ("mistral", {**ODD, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**ODD, "mlp_only_layers": [0]}),
    "qwen3_moe packed": ("qwen3_moe", {**ODD, "packed": True}),
    "mixtral": ("mixtral", {**ODD, "tie_word_embeddings": True}),
    "mixtral packed": ("mixtral", {**ODD, "packed": True}),
}

# Sizes that suit every kernel, on two ranks, too.
GPU_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "moe_intermediate_size": 64,
}  # fmt: skip

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def base_config(arch: str) -> dict[str, Any]:
    """A tiny config of one architecture, in the spelling of transformers 5."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch: {arch!r} is not one of {', '.join(ARCHITECTURES)}")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 318,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
    }
    if arch == "qwen2":
        del config["attention_bias"]  # its q, k, v always carry a bias
    if arch in ("mistral", "mixtral"):
        del config["attention_bias"]
        config["sliding_window"] = None
    if arch == "qwen3_moe":
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if arch == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return config


def finish_config(config: dict[str, Any], overrides: dict[str, Any], old: bool) -> dict[str, Any]:
    """Apply the overrides; `rope_scaling` and `rope_theta` go where the spelling has them."""
    overrides = dict(overrides)
    scaling = dict(overrides.pop("rope_scaling", None) or {"rope_type": "default"})
    theta = overrides.pop("rope_theta", 10000.0)
    config.update(overrides)
    if config["vocab_size"] != 320 and "eos_token_id" not in overrides:
        config["eos_token_id"] = config["vocab_size"] - 2
    if "rope_parameters" not in overrides:
        config["rope_parameters"] = {"rope_theta": theta, **scaling}
    if old:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
    return config


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Return True if a layer has experts."""
    if config["model_type"] == "mixtral":
        return True
    step = config.get("decoder_sparse_step", 0)
    return step > 0 and layer not in config["mlp_only_layers"] and (layer + 1) % step == 0


def expert_names(config: dict[str, Any], layer: str) -> tuple[str, str, str, str, int, int]:
    """Return a family's names for experts: block, gate, up, down; their number and their width."""
    if config["model_type"] == "mixtral":
        count = config["num_local_experts"]
        return f"{layer}.block_sparse_moe", "w1", "w3", "w2", count, config["intermediate_size"]
    names = f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"
    return *names, config["num_experts"], config["moe_intermediate_size"]


def pack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same checkpoint with experts packed, as transformers 5 holds them in memory."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block, experts, rest = name.partition(".experts.")
        block = block.replace("block_sparse_moe", "mlp")
        if experts:
            found.setdefault(block, {})[rest] = tensor
        else:
            packed[name.replace("block_sparse_moe", "mlp")] = tensor
    for block, parts in found.items():
        count = len(parts) // 3
        kinds = (
            ("w1", "w3", "w2") if "0.w1.weight" in parts else ("gate_proj", "up_proj", "down_proj")
        )
        gate, up, down = (
            torch.stack([parts[f"{i}.{kind}.weight"] for i in range(count)]) for kind in kinds
        )
        packed[f"{block}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        packed[f"{block}.experts.down_proj"] = down
    return packed


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, float32, scaled so that activations stay of order one."""
    gen = torch.Generator().manual_seed(seed)
    hidden, inter, vocab = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    arch = config["model_type"]
    qkv_bias = arch == "qwen2"
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        weight = torch.randn(rows, columns, generator=gen)
        tensors[f"{name}.weight"] = weight * columns**-0.5
        if bias:
            tensors[f"{name}.bias"] = 0.3 * torch.randn(rows, generator=gen)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=gen)

    scale = hidden**-0.5 if config["tie_word_embeddings"] else 1.0  # a tied one is the head too
    tensors["model.embed_tokens.weight"] = scale * torch.randn(vocab, hidden, generator=gen)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{layer}.self_attn.q_proj", q_size, hidden, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, hidden, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size)
        if arch.startswith("qwen3"):
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if is_sparse(config, index):
            block, gate, up, down, experts, width = expert_names(config, layer)
            linear(f"{block}.gate", experts, hidden)
            for expert in range(experts):
                linear(f"{block}.experts.{expert}.{gate}", width, hidden)
                linear(f"{block}.experts.{expert}.{up}", width, hidden)
                linear(f"{block}.experts.{expert}.{down}", hidden, width)
            continue
        linear(f"{layer}.mlp.gate_proj", inter, hidden)
        linear(f"{layer}.mlp.up_proj", inter, hidden)
        linear(f"{layer}.mlp.down_proj", hidden, inter)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden)
    return tensors


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> None:
    """Write one `model.safetensors`, or several files with their index."""
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        name = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        part = {key: tensors[key] for key in names[index::num_files]}  # layers end up in all files
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))


FP8_CONFIGS: dict[str, dict[str, Any]] = {
    "block": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
        "ignore": ["lm_head"],
    },
}


def fp8_tensors(
    tensors: dict[str, torch.Tensor], layout: str, block: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors as an eight-bit checkpoint stores them, and the numbers that those stand for."""
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not re.search(r"(_proj|\.w[123])(\.weight)?$", name):
            continue
        *experts, n, k = weight.shape
        rows, columns = (block, block) if layout == "block" else (1, k)
        scale = torch.empty(*experts, -(-n // rows), -(-k // columns))
        for i in range(scale.shape[-2]):
            for j in range(scale.shape[-1]):
                part = weight[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[..., i, j] = part.float().abs().amax((-2, -1)) / 448
        scale = scale.bfloat16().float()  # as Qwen's files have them
        wide = scale.repeat_interleave(rows, -2)[..., :n, :]
        wide = wide.repeat_interleave(columns, -1)[..., :k]
        values = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name] = values
        suffix = "_scale_inv" if layout == "block" else "_scale"
        stored[name + suffix] = scale.bfloat16() if layout == "block" else scale
        meant[name] = values.float() * wide
    return stored, meant


def make_fp8_checkpoints(
    folder: Path, layout: str, arch: str = "qwen3", *, block: int = 128, seed: int = 0,
    packed: bool = False, **overrides: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """An FP8 checkpoint, "block" or "channel", and one of the same numbers in float32."""
    tensors = random_tensors(finish_config(base_config(arch), overrides, old=False), seed)
    stored, meant = fp8_tensors(pack_experts(tensors) if packed else tensors, layout, block)
    overrides |= {"arch": arch, "packed": packed}
    entry = dict(FP8_CONFIGS[layout])
    if layout == "block":
        entry["weight_block_size"] = [block, block]
    quantized = make_checkpoint(
        folder / "fp8", extra=stored, quantization_config=entry, **overrides
    )
    return quantized, make_checkpoint(folder / "plain", extra=meant, **overrides)


def byte_symbols() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE: 256 bytes, merges of letter pairs, four special tokens at the end."""
    symbols = byte_symbols()
    room = vocab_size - len(symbols) - len(SPECIALS)
    if room < 0:
        raise ValueError(f"vocab_size: a tokenizer needs at least 260, got {vocab_size}")
    letters = "etaoinshrdlucmfwygpb"
    pairs = [(a, b) for a in letters for b in letters][:room]
    words = symbols + [a + b for a, b in pairs]
    words += [f"[unused{i}]" for i in range(vocab_size - len(SPECIALS) - len(words))]
    specials = [
        {"id": len(words) + i, "content": text, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(SPECIALS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [list(pair) for pair in pairs],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_checkpoint(
    folder: str | Path,
    arch: str = "qwen3",
    *,
    seed: int = 0,
    num_files: int = 1,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    old_spelling: bool = False,
    packed: bool = False,
    extra: dict[str, torch.Tensor] | None = None,
    drop: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write a small random checkpoint into `folder` (made if needed) and return the folder.

    seed: the same seed and overrides give the same bytes. num_files: more than one writes shards
    and an index. dtype: of the tensors and in the config. tokenizer: also write a tiny byte-level
    BPE with a chat template (eos is `<|im_end|>`, id vocab_size - 2). old_spelling: `rope_theta`,
    `rope_scaling`, `torch_dtype` as transformers 4 wrote them. packed: experts in one tensor.
    extra and drop: tensors to add or replace, and names to leave out, for tests of the loader.
    Everything else overrides a field of `config.json`; `rope_scaling=YARN_ROPE` and
    `rope_theta=...` work in either spelling.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {"dtype": str(dtype).removeprefix("torch.")}
    full = finish_config(base_config(arch), {**names, **overrides}, old=False)
    written = finish_config(base_config(arch), {**names, **overrides}, old=old_spelling)
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    generation = {"eos_token_id": full["eos_token_id"], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tensors = {name: t.to(dtype) for name, t in random_tensors(full, seed).items()}
    if packed:
        tensors = pack_experts(tensors)
    tensors.update(extra or {})
    kept = {name: t.contiguous() for name, t in tensors.items() if name not in drop}
    save_tensors(folder, kept, num_files)
    if tokenizer:
        save_tokenizer(folder, full["vocab_size"])
    return folder


def make_kind(folder: str | Path, kind: str, **sizes: int) -> Path:
    """A checkpoint of one of `KINDS`, with those of the sizes that its architecture has."""
    arch, fields = KINDS[kind]
    known = {name: size for name, size in sizes.items() if name in base_config(arch)}
    return make_checkpoint(folder, arch, **{**fields, **known})
