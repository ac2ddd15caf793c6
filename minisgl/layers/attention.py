"""The attention layer: projections and rotation here, keys and values behind the plan.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
from torch import nn

from minisgl.attention.base import ForwardBatch
from minisgl.config.model import ModelConfig
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear, head_shard
from minisgl.layers.norm import QKNorm
from minisgl.layers.rotary import apply_rotary
from minisgl.parallel.comm import ParallelContext

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
