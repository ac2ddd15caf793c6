"""The gated MLP.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import GateUpLinear, RowParallelLinear
from minisgl.layers.placement import Placement


class GatedMLP(nn.Module):
    """silu(x gate) * (x up), then down: [n, hidden] to [n, hidden]."""

    def __init__(self, hidden: int, intermediate: int, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(hidden, intermediate, place)
        self.down_proj = RowParallelLinear(intermediate, hidden, place, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
