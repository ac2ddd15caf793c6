"""The vocabulary cut over ranks: token ids to vectors, and vectors to logits.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.parallel.comm import ParallelContext


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

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.rows)
        vectors = F.embedding(local.clamp_(0, self.rows - 1), self.weight)
        return self.comm.all_reduce(vectors.mul_(mine.unsqueeze(-1)))


class LMHead(VocabParallelEmbedding):
    """Logits: x [n, hidden] to [n, vocab_size] on every rank; `tied` lends its weight instead.

    A single rank writes them to `out` [n, vocab_size], if it is given and `linear` is PyTorch's.
    The attribute `tied` is True if the weight is borrowed.
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
        logits = self.comm.all_gather(self.linear(x, self.weight))
        return logits[:, : self.vocab_size]  # without the padding
