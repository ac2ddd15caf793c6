"""Linear layers cut over ranks: by output, by input, and with several projections in one.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.placement import Piece, Placement
from minisgl.parallel.comm import Comm


@dataclass(frozen=True)
class RowShard:
    """Rows `[start, start + size)` of a projection with `full` rows: what one rank holds."""

    name: str  # of the projection in the checkpoint; "" for the name of the layer itself
    full: int
    start: int
    size: int


def even_shard(name: str, full: int, comm: Comm) -> RowShard:
    """This rank's equal share of `full` rows; ValueError if the ranks do not divide them."""
    if full % comm.size:
        raise ValueError(f"{name}: {full} rows cannot be cut into {comm.size} equal parts")
    size = full // comm.size
    return RowShard(name, full, comm.rank * size, size)


def head_shard(name: str, heads: int, head_dim: int, comm: Comm) -> RowShard:
    """This rank's heads, as rows; with fewer heads than ranks, neighbours share a copy of one."""
    if heads >= comm.size:
        if heads % comm.size:
            raise ValueError(f"{name}: {heads} heads cannot be cut into {comm.size} equal parts")
        count = heads // comm.size
        first = comm.rank * count
    else:
        if comm.size % heads:
            raise ValueError(f"{name}: {heads} heads cannot be copied evenly to {comm.size} ranks")
        count = 1
        first = comm.rank * heads // comm.size
    return RowShard(name, heads * head_dim, first * head_dim, count * head_dim)


class MergedColumnParallelLinear(nn.Module):
    """Several projections of one input as a single product; each rank holds rows of every one.

    forward: x [n, in_features] to [n, rows of this rank], the projections side by side.
    """

    def __init__(
        self, in_features: int, shards: Sequence[RowShard], place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = tuple(shards)
        rows = sum(shard.size for shard in shards)
        self.weight = place.parameter(rows, in_features)
        self.bias = place.parameter(rows) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[Piece]:
        """The projections that fill this layer; `path` is its name in the model."""
        start = 0
        for shard in self.shards:
            name = f"{path.rpartition('.')[0]}.{shard.name}" if shard.name else path
            source = (slice(shard.start, shard.start + shard.size),)
            target = (slice(start, start + shard.size),)
            yield Piece(f"{name}.weight", (shard.full, self.in_features), source, target)
            if self.bias is not None:
                yield Piece(f"{name}.bias", (shard.full,), source, target, "bias")
            start += shard.size


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One projection cut by output: x [n, in_features] to [n, out_features / ranks]."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> None:
        shards = [even_shard("", out_features, place.comm)]
        super().__init__(in_features, shards, place, bias=bias)


class GateUpLinear(MergedColumnParallelLinear):
    """The two projections of a gated MLP: x [n, hidden] to [n, 2 * intermediate / ranks]."""

    def __init__(self, hidden: int, intermediate: int, place: Placement) -> None:
        shards = [even_shard(name, intermediate, place.comm) for name in ("gate_proj", "up_proj")]
        super().__init__(hidden, shards, place, bias=False)


class QKVLinear(MergedColumnParallelLinear):
    """Queries, keys and values of this rank's heads: [n, hidden] to [n, (qo + 2 kv) * head_dim]."""

    def __init__(
        self, hidden: int, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        place: Placement, *, bias: bool,
    ) -> None:  # fmt: skip
        q = head_shard("q_proj", num_qo_heads, head_dim, place.comm)
        k = head_shard("k_proj", num_kv_heads, head_dim, place.comm)
        v = head_shard("v_proj", num_kv_heads, head_dim, place.comm)
        super().__init__(hidden, [q, k, v], place, bias=bias)
        self.num_qo_heads, self.num_kv_heads = q.size // head_dim, k.size // head_dim


class RowParallelLinear(nn.Module):
    """One projection cut by input: x [n, in_features / ranks] to the full [n, out_features].

    Each rank multiplies its columns; the sum over the ranks is the product. The bias must be
    added once, so rank 0 alone holds it.
    """

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self.comm, self.has_bias = place.comm, bias
        self.full = (out_features, in_features)
        self.shard = even_shard("in_features", in_features, place.comm)
        self.weight = place.parameter(out_features, self.shard.size)
        held = bias and place.comm.rank == 0
        self.bias = place.parameter(out_features) if held else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(F.linear(x, self.weight, self.bias))

    def pieces(self, path: str) -> Iterator[Piece]:
        columns = slice(self.shard.start, self.shard.start + self.shard.size)
        yield Piece(f"{path}.weight", self.full, (slice(None), columns))
        if self.has_bias:
            # Other ranks name it too, reading nothing: every rank checks the same checkpoint.
            part = () if self.bias is not None else (slice(0, 0),)
            yield Piece(f"{path}.bias", self.full[:1], part, (), "bias")
