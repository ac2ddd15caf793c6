"""The attention layer: projections and rotation here, keys and values behind the plan.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.attention.base import ForwardBatch
from minisgl.config.model import ModelConfig
from minisgl.layers.linear import QKVLinear, RowParallelLinear
from minisgl.layers.norm import QKNorm
from minisgl.layers.placement import Placement
from minisgl.layers.rotary import apply_rotary

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionStyle:
    """In what the attention layers of the architectures differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


class Attention(nn.Module):
    """Attention with grouped heads: x [n, hidden] to [n, hidden].

    Queries, keys and values handed to the plan are contiguous in their last two dimensions; rows
    of the three lie at a larger stride, because they share one tensor.
    """

    def __init__(
        self, config: ModelConfig, style: AttentionStyle, layer_id: int, place: Placement
    ) -> None:
        super().__init__()
        self.layer_id, self.head_dim = layer_id, config.head_dim
        hidden, heads = config.hidden_size, (config.num_qo_heads, config.num_kv_heads)
        self.qkv_proj = QKVLinear(hidden, *heads, config.head_dim, place, bias=style.qkv_bias)
        self.num_qo_heads = self.qkv_proj.num_qo_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        width = config.num_qo_heads * config.head_dim
        self.o_proj = RowParallelLinear(width, hidden, place, bias=style.output_bias)
        self.qk_norm: QKNorm | None = None
        if style.qk_norm:
            mine = (self.num_qo_heads, self.num_kv_heads, config.head_dim)
            self.qk_norm = QKNorm(*mine, config.rms_norm_eps, place)

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
