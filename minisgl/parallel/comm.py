"""What layers ask of the other ranks: a protocol, and a group of one.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Comm(Protocol):
    """A group of ranks that compute one model together; every call is made by all of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, equal on all of them; may overwrite `x`."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' `x`, equal in shape, side by side along `dim` in the order of the ranks."""

    def barrier(self) -> None: ...

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The `obj` of rank `src`, on every rank; what the others pass is ignored."""

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum of `values` over the ranks."""


class SingleRank:
    """A group of one: every operation hands back what it was given."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def barrier(self) -> None:
        return None

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def min_ints(self, values: Sequence[int]) -> list[int]:
        return list(values)
