"""RMS norm: of hidden states with the residual added, and of single heads.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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
