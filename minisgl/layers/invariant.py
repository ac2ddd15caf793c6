"""Functions for the layers of a deterministic engine: no row depends on the others.

Generated from notebooks/05f_batch_invariance.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F

from minisgl.parallel.comm import Comm, ParallelContext

BLOCK = 16  # rows of every call: a compromise between one row of a decode and many of a prefill


def block_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x [m, k] by weight [n, k], plus bias: [m, n]; each library call has BLOCK rows."""
    padded = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).contiguous()
    return torch.cat([F.linear(rows, weight, bias) for rows in padded.split(BLOCK)])[: len(x)]


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x)) by float32 operations that round vectors and remainders alike."""
    wide = x.float()
    return (wide / (1 + (-wide).exp())).to(x.dtype)


class OrderedSum:
    """A group of ranks that adds in rank order, for every size of the message."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped group."""
        return getattr(self.comm, name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, with equal bits on all of them."""
        total, *others = self.comm.all_gather(x[None], dim=0)
        for part in others:
            total = total + part
        return total


@cache
def load_tiled_linear() -> Callable[..., torch.Tensor]:
    """Import `minisgl.kernels.tiled_linear.tiled_linear`, on first use because it needs Triton."""
    found: Callable[..., torch.Tensor] = import_module("minisgl.kernels.tiled_linear").tiled_linear
    return found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [m, k] by weight [n, k] and add bias [n]: [m, n], on either device."""
    return load_tiled_linear()(x, weight, bias) if x.is_cuda else block_linear(x, weight, bias)


def make_invariant(ctx: ParallelContext) -> ParallelContext:
    """Return the context with batch-invariant functions and sums."""
    return replace(ctx, comm=cast(Comm, OrderedSum(ctx.comm)), linear=linear, silu=silu)
