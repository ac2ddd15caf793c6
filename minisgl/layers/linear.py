"""Layers split over ranks: linear layers by output or input, the gated MLP, the vocabulary.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        y = self.linear(x, self.weight)
        return y if self.comm.size == 1 else self.comm.all_reduce(y)


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


class VocabParallelEmbedding(nn.Module):
    """Vectors of token ids: int64 [n] to [n, hidden]; each rank holds an equal range of ids.

    The vocabulary is padded to a multiple of the number of ranks; the loader zeroes padding rows.
    Attributes: vocab_size, hidden, start and rows (of this rank's range), weight [rows, hidden].
    """

    def __init__(self, vocab_size: int, hidden: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.vocab_size, self.hidden, self.comm = vocab_size, hidden, ctx.comm
        self.rows = -(-vocab_size // self.comm.size)  # rounded up
        self.start = self.comm.rank * self.rows
        self.weight = ctx.parameter(self.rows, hidden)
        self.lookup: Callable[..., torch.Tensor] = F.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return self.lookup(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.rows)
        vectors = self.lookup(local.clamp_(0, self.rows - 1), self.weight)
        return self.comm.all_reduce(vectors.mul_(mine.unsqueeze(-1)))


class LMHead(VocabParallelEmbedding):
    """Logits: x [n, hidden] to [n, vocab_size] on every rank; uses the weight of `tied`, if given.

    A single rank writes them to `out` [n, vocab_size], if it is given and `linear` is PyTorch's.
    The attribute `tied` is True if the weight is the embedding's.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        ctx: ParallelContext,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden, ctx)
        self.linear = ctx.linear
        self.tied = tied is not None
        if tied is not None:
            self.weight = tied.weight

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        # A captured step, chapter 07, has a buffer for its logits.
        if out is not None and self.comm.size == 1 and self.linear is F.linear:
            return torch.mm(x, self.weight.T, out=out)
        logits = self.linear(x, self.weight)
        if self.comm.size > 1:
            logits = self.comm.all_gather(logits)
        return logits[:, : self.vocab_size]  # without the padding
