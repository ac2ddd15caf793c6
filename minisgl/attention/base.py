"""What a model hands to attention, and what every attention backend must offer.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata
from minisgl.core import Phase


class AttentionPlan(Protocol):
    """One batch, planned: called once per layer."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v at the batch's slots, attend, return a tensor of q's shape.

        q is [n, qo_heads, head_dim]; k and v are [n, kv_heads, head_dim]; n new tokens in all.
        """
        ...


class GraphPlan(AttentionPlan, Protocol):
    """A plan of fixed size whose values change in place, so that a CUDA graph can hold it."""

    def update(self, meta: AttentionMetadata) -> None:
        """Write this batch's values into the static buffers; `meta` is padded to its size."""
        ...


class AttentionBackend(Protocol):
    """Makes plans: `plan` for one eager batch, `graph_plan` for all decode batches of one size."""

    name: str

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Prepare one batch; `out_loc` int64 [n] are the slots of its new tokens."""
        ...

    def graph_plan(self, batch_size: int, out_loc: Tensor) -> GraphPlan:
        """Prepare static buffers for decode at `batch_size`; `out_loc` is a static buffer too."""
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
