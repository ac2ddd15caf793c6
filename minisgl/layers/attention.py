"""Norms, and the attention layer; keys and values are behind its plan.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.attention.metadata import ForwardBatch
from minisgl.config.model import ModelConfig, RotaryConfig
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear, head_shard
from minisgl.parallel.comm import ParallelContext


class RMSNorm(nn.Module):
    """Divide each row by its root mean square and scale it: [n, size] to [n, size].

    forward(x, residual) first adds: it returns the norm of `x + residual`, and that sum, which is
    the next residual. With no residual, `x` itself is the sum. Attributes: shape (size,), weight.
    """

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.weight = ctx.parameter(size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = x + residual
        return F.rms_norm(x, self.shape, self.weight, self.eps), x


class QKNorm(nn.Module):
    """RMS norm of each query and key head: [n, qo + kv heads, head_dim] to the same shape.

    weight: [qo + kv heads, head_dim]: the queries' weight for each query head, then the keys'.
    Other attributes: shape (head_dim,), num_qo_heads.
    """

    def __init__(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, eps: float, ctx: ParallelContext
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.num_qo_heads = (head_dim,), eps, num_qo_heads
        self.weight = ctx.parameter(num_qo_heads + num_kv_heads, head_dim)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(qk, self.shape, None, self.eps).mul_(self.weight)


# Frequencies [head_dim / 2] float32, and a factor on all cosines and sines.
Frequencies = Callable[[RotaryConfig], tuple[torch.Tensor, float]]


def base_frequencies(config: RotaryConfig) -> torch.Tensor:
    """Return each plane's angle per position: base ** (-2 i / head_dim), float32 [head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.base**exponent


def plain_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Return the unscaled frequencies; raise ValueError for a config with rope scaling."""
    if config.scaling is not None:
        raise ValueError(f"rope_scaling: {config.scaling.kind!r} needs its own frequencies")
    return base_frequencies(config), 1.0


class RotaryTable(nn.Module):
    """The cosines and sines of every position, computed once, owned by the model.

    table: float32 [max_position, head_dim], the cosines of all planes, then their sines.
    forward: positions int64 [n] to (cos, sin), each [n, 1, head_dim], ready for `apply_rotary`.
    """

    table: torch.Tensor

    def __init__(
        self,
        config: RotaryConfig,
        frequencies: Frequencies = plain_frequencies,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        inv_freq, factor = frequencies(config)
        positions = torch.arange(config.max_position, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head: x [n, heads, head_dim], plane i lies in dimensions i and i + head_dim / 2.

    The arithmetic is float32, the result has the dtype of `x`.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


Rotation = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Attention with grouped heads: x [n, hidden] to [n, hidden].

    Queries, keys and values handed to the plan are contiguous in their last two dimensions; rows
    of the three lie at a larger stride, because they share one tensor. Attributes: qkv_proj, whose
    shards are q_proj, k_proj and v_proj; o_proj; qk_norm, or None.
    """

    def __init__(self, config: ModelConfig, layer_id: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.layer_id, self.head_dim = layer_id, config.head_dim
        heads = (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = (
            head_shard(name, count, config.head_dim, ctx.comm)
            for name, count in zip(("q_proj", "k_proj", "v_proj"), heads, strict=True)
        )
        self.num_qo_heads, self.num_kv_heads = q.size // self.head_dim, k.size // self.head_dim
        hidden, width = config.hidden_size, config.num_qo_heads * config.head_dim
        self.qkv_proj = MergedColumnParallelLinear(hidden, (q, k, v), ctx, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear(width, hidden, ctx)
        sizes = (self.num_qo_heads, self.num_kv_heads, self.head_dim, config.rms_norm_eps)
        self.qk_norm = QKNorm(*sizes, ctx) if config.qk_norm else None

    def forward(self, x: torch.Tensor, rotation: Rotation, fb: ForwardBatch) -> torch.Tensor:
        num_tokens, num_qk = x.shape[0], self.num_qo_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(num_tokens, num_qk + self.num_kv_heads, self.head_dim)
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = apply_rotary(qk, *rotation)
        q, k = qk[:, : self.num_qo_heads], qk[:, self.num_qo_heads :]
        out = fb.attn.run(q, k, v, self.layer_id)
        return self.o_proj(out.reshape(num_tokens, self.num_qo_heads * self.head_dim))
