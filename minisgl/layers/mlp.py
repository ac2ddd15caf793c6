"""The gated MLP.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear, even_shard
from minisgl.parallel.comm import ParallelContext


class GatedMLP(nn.Module):
    """silu(x gate) * (x up), then down: [n, hidden] to [n, hidden].

    Attributes: gate_up_proj, whose shards are gate_proj and up_proj, and down_proj.
    """

    def __init__(self, hidden: int, intermediate: int, ctx: ParallelContext) -> None:
        super().__init__()
        shards = [even_shard(name, intermediate, ctx.comm) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = MergedColumnParallelLinear(hidden, shards, ctx)
        self.down_proj = RowParallelLinear(intermediate, hidden, ctx)
        self.silu = ctx.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.silu(gate).mul_(up))
