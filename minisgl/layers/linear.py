"""Linear layers cut over ranks: by output, with several projections in one, and by input.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minisgl.parallel.comm import Comm, ParallelContext


@dataclass(frozen=True)
class RowShard:
    """Rows `[start, start + size)` of the projection `name` with `full` rows: one rank's part."""

    name: str
    full: int
    start: int
    size: int


def even_shard(name: str, full: int, comm: Comm) -> RowShard:
    """Return this rank's equal share of `full` rows; ValueError if they do not divide evenly."""
    if full % comm.size:
        raise ValueError(f"{name}: {full} rows cannot be cut into {comm.size} equal parts")
    size = full // comm.size
    return RowShard(name, full, comm.rank * size, size)


def head_shard(name: str, heads: int, head_dim: int, comm: Comm) -> RowShard:
    """Return this rank's heads as rows; if heads are fewer than ranks, neighbours share copies."""
    if heads % comm.size and comm.size % heads:
        raise ValueError(f"{name}: {heads} heads cannot be shared evenly by {comm.size} ranks")
    count, first = max(1, heads // comm.size), comm.rank * heads // comm.size
    return RowShard(name, heads * head_dim, first * head_dim, count * head_dim)


class MergedColumnParallelLinear(nn.Module):
    """Several projections of one input as a single GEMM; each rank holds rows of every one.

    forward: x [n, in_features] to [n, rows of this rank], the projections side by side.
    Attributes: in_features, shards, weight [rows, in_features], bias [rows] or None.
    """

    def __init__(
        self, in_features: int, shards: Sequence[RowShard], ctx: ParallelContext, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.shards = in_features, tuple(shards)
        rows = sum(shard.size for shard in shards)
        self.weight = ctx.parameter(rows, in_features)
        self.bias = ctx.parameter(rows) if bias else None
        self.linear = ctx.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """One projection cut by input: x [n, in_features / ranks] to the full [n, out_features].

    Attributes: shard (of the columns), full_shape (out_features, in_features), weight.
    """

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.comm, self.linear = ctx.comm, ctx.linear
        self.full_shape = (out_features, in_features)
        self.shard = even_shard("in_features", in_features, ctx.comm)
        self.weight = ctx.parameter(out_features, self.shard.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(self.linear(x, self.weight))
