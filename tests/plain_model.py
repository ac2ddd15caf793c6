"""A second opinion on the model: float64, one sequence, one head and one position at a time.

Reads the tensors of a Hugging Face checkpoint by their names. Slow, and too plain to be wrong.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def frequency(plane: int, head_dim: int, base: float, rope: dict[str, Any]) -> float:
    """Angle per position of one plane, under the scaling that the config names."""
    plain = base ** (-2 * plane / head_dim)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain
    factor, original = rope["factor"], rope.get("original_max_position_embeddings", 0)
    if kind == "linear":
        return plain / factor
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            return plain
        if wavelength > original / low:
            return plain / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * plain / factor + smooth * plain

    def bound(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(bound(rope.get("beta_fast", 32))), 0)
    last = min(math.ceil(bound(rope.get("beta_slow", 1))), head_dim - 1)
    ramp = min(max((plane - first) / max(last - first, 0.001), 0), 1)
    return ramp * plain / factor + (1 - ramp) * plain


def turn(x: torch.Tensor, position: int, config: dict[str, Any]) -> torch.Tensor:
    """Rotate one head, plane by plane."""
    rope, out = config["rope_parameters"], x.clone()
    stretch = 1.0
    if rope["rope_type"] == "yarn":
        stretch = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1
    half = len(x) // 2
    for i in range(half):
        angle = position * frequency(i, len(x), rope["rope_theta"], rope)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = stretch * (x[i] * cos - x[half + i] * sin)
        out[half + i] = stretch * (x[half + i] * cos + x[i] * sin)
    return out


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def project(t: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """x W^T, and the bias if the checkpoint has one."""
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def attention(t: Tensors, name: str, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Causal attention of a whole sequence [n, hidden]."""
    n, dim, eps = len(x), config["head_dim"], config["rms_norm_eps"]
    q, k, v = (project(t, f"{name}.{p}_proj", x).view(n, -1, dim) for p in "qkv")
    if f"{name}.q_norm.weight" in t:
        q, k = norm(q, t[f"{name}.q_norm.weight"], eps), norm(k, t[f"{name}.k_norm.weight"], eps)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    turned = [[turn(k[p, h], p, config) for h in range(k.shape[1])] for p in range(n)]
    for p in range(n):
        for h in range(q.shape[1]):
            query = turn(q[p, h], p, config)
            scores = torch.stack([query @ turned[j][h // group] for j in range(p + 1)])
            out[p, h] = (scores / math.sqrt(dim)).softmax(0) @ v[: p + 1, h // group]
    return project(t, f"{name}.o_proj", out.reshape(n, -1))


def plain_logits(folder: Path, config: dict[str, Any], ids: list[int]) -> torch.Tensor:
    """Logits [n, vocab] float64 of one sequence; `config` in the spelling of transformers 5."""
    t = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    eps = config["rms_norm_eps"]
    x = t["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, t[f"{layer}.input_layernorm.weight"], eps)
        x = x + attention(t, f"{layer}.self_attn", y, config)
        y = norm(x, t[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = project(t, f"{layer}.mlp.gate_proj", y), project(t, f"{layer}.mlp.up_proj", y)
        x = x + project(t, f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)
    head = "lm_head.weight" if "lm_head.weight" in t else "model.embed_tokens.weight"
    return norm(x, t["model.norm.weight"], eps) @ t[head].T
