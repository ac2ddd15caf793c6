"""What every layer is told when it is made.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.parallel.comm import Comm


@dataclass(frozen=True)
class ParallelContext:
    """The ranks, dtype and device of a model under construction."""

    comm: Comm
    dtype: torch.dtype
    device: torch.device | str = "meta"

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter without values or gradient; on the `meta` device it takes no memory."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
