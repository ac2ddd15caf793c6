"""The simplest attention plan: dense attention over whole sequences that start at position 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention.metadata import ForwardBatch
from minisgl.core import Phase


class DensePlan:
    """Attention of every sequence to itself, without pages and without a cache."""

    def __init__(self, lens: Sequence[int]) -> None:
        owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
        same = owner[:, None] == owner[None, :]
        self.mask = same & torch.ones_like(same).tril()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int) -> torch.Tensor:
        """q [n, qo_heads, dim], k and v [n, kv_heads, dim] to [n, qo_heads, dim]."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask.to(q.device), enable_gqa=True
        )
        return out.transpose(0, 1)


def dense_batch(
    sequences: Sequence[Sequence[int]], last_only: bool = False, device: str = "cpu"
) -> ForwardBatch:
    """A prefill of whole sequences, laid end to end."""
    lens = [len(ids) for ids in sequences]
    flat = [token for ids in sequences for token in ids]
    positions = [position for n in lens for position in range(n)]
    last = torch.tensor(lens).cumsum(0) - 1 if last_only else None
    return ForwardBatch(
        phase=Phase.PREFILL,
        input_ids=torch.tensor(flat, device=device),
        positions=torch.tensor(positions, device=device),
        out_loc=torch.arange(len(flat), device=device),
        last_idx=last,
        attn=DensePlan(lens),
    )
