"""What a model hands to attention, and what every attention backend must offer.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata
from minisgl.core import Phase
from minisgl.kvcache.pool import KVPool


class AttentionPlan(Protocol):
    """One batch of n new tokens, planned: called once per layer.

    q is [n, qo_heads, head_dim]; k and v are [n, kv_heads, head_dim]; answers have q's shape.
    """

    pool: KVPool  # where keys and values lie
    out_loc: Tensor  # [n] int64, slots of the new tokens

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v at the batch's slots, then attend."""
        self.pool.store_kv(k, v, self.out_loc, layer_id)
        return self.attend(q, k, v, layer_id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend as `run` does, without the store: k and v are in the pool already."""
        ...


@dataclass(frozen=True)
class DecodeBuffers:
    """Inputs of a decode step, one per request: device tensors, int64 [bs]."""

    rows: Tensor  # row of the page table
    positions: Tensor  # of the token that is computed now: the request's length is one more
    out_loc: Tensor  # slot that its key and value go to


class AttentionBackend(Protocol):
    """Makes plans: `plan` for one eager batch, `graph_plan` for all decode batches of one size."""

    name: str

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Prepare one batch; `out_loc` int64 [n] are the slots of its new tokens."""
        ...

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Prepare decode over buffers whose values change between runs, and addresses do not."""
        ...


@dataclass
class ForwardBatch:
    """The tensors that a model reads in one forward pass over n new tokens of bs requests."""

    phase: Phase
    input_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    out_loc: Tensor  # [n] int64, slots that the new keys and values go to
    last_idx: Tensor | None  # [bs] int64, rows whose logits are wanted; None: all rows
    attn: AttentionPlan
    logits: Tensor | None = None  # [rows wanted, vocab] to write to, if the model can
