"""The group of ranks that layers compute with, a group of one, and the context of each layer.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Comm(Protocol):
    """A group of ranks that compute one model together; every call is made by all of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, equal on all of them; may overwrite `x`."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x`, equal in shape, along `dim` in the order of the ranks."""

    def barrier(self) -> None: ...  # this and the rest are for start-up and messages: chapter 10b

    def broadcast_object(self, obj: Any, src: int = 0, kind: Any = Any) -> Any:
        """Return the message of rank `src`, of type `kind`, on every rank."""

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum of `values` over the ranks."""


class SingleRank:
    """A group of one rank: every operation returns its input."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def barrier(self) -> None:
        return None

    def broadcast_object(self, obj: Any, src: int = 0, kind: Any = Any) -> Any:
        return obj

    def min_ints(self, values: Sequence[int]) -> list[int]:
        return list(values)


@dataclass(frozen=True)
class ParallelContext:
    """The ranks, dtype and device of a model under construction, and its layers' operations."""

    comm: Comm
    dtype: torch.dtype
    device: torch.device | str = "meta"
    linear: Callable[..., torch.Tensor] = F.linear
    silu: Callable[[torch.Tensor], torch.Tensor] = F.silu
    expert_parallel: bool = False  # whole experts on each rank: chapter 11

    def parameter(self, *shape: int) -> nn.Parameter:
        """Make a parameter without values or gradient; on device `meta` it takes no memory."""
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)
