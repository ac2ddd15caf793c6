"""Where parameters live, and which part of which checkpoint tensor fills them.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.parallel.comm import Comm


@dataclass(frozen=True)
class Placement:
    """What every layer is told when it is made: its ranks, its dtype, its device."""

    comm: Comm
    dtype: torch.dtype
    device: torch.device | str = "meta"

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter without values or gradient; on the `meta` device it takes no memory."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint, and the part of one of our parameters that it fills.

    name: of the tensor in the checkpoint. shape: it must have there, before any cut.
    source: the part of it that this rank reads. target: where that part goes in the parameter
    (it is broadcast if the target is larger). param: the module's attribute. An empty index
    means all of it.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...] = ()
    target: tuple[slice | int, ...] = ()
    param: str = "weight"
