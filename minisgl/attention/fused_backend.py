"""Decode attention without a host plan: all its inputs are tensors on the device.

Generated from notebooks/05e_decode_attention.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, AttentionPlan, DecodeBuffers
from minisgl.core import Phase
from minisgl.kernels.decode_attention import Scratch, decode_attention, max_splits
from minisgl.kernels.device import device_limits
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


class FusedPlan:
    """Decode over the rows of the page table; eager and captured steps use the same object."""

    def __init__(self, backend: Any, buffers: DecodeBuffers, drafts: bool = False) -> None:
        self.backend, self.buffers, self.drafts = backend, buffers, drafts
        self.pool, self.out_loc = backend.pool, buffers.out_loc

    def decode(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, **raw: Any) -> Tensor:
        """Run `decode_attention` over one layer; `raw` holds norms and table for raw q and k."""
        to, backend = self.buffers, self.backend
        return decode_attention(
            q, k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id),
            backend.tables.device_page_table, to.rows, to.positions, to.out_loc, backend.scratch,
            backend.scale, kv_scales=self.pool.scales(layer_id), drafts=self.drafts, **raw,
        )  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, attend, return a tensor of q's shape."""
        return self.decode(q, k, v, layer_id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend as `decode` does: the kernel folds k and v in and stores them again."""
        return self.decode(q, k, v, layer_id)


class FusedBackend:
    """Decode without a plan; prefill belongs to another backend."""

    name = "fused"
    plan_type: type[Any] = FusedPlan

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        """Allocate scratch memory for as many requests as the tables have rows."""
        self.pool, self.tables, self.scale = pool, tables, sm_scale
        kv, rows = pool.num_kv_heads, max(tables.num_rows, 32) + 1  # few may have many drafts
        most = kv * (rows + max_splits(kv, device_limits(pool.buffer.device)))
        self.scratch = Scratch(most, num_qo_heads // kv, pool.head_dim, pool.buffer.device)

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Plan an eager decode step; raise ValueError for a prefill."""
        if meta.phase is not Phase.DECODE:
            raise ValueError("attention_backend: 'fused' decodes only; pair it, as in 'fi,fused'")
        return self.graph_plan(meta.batch_size, DecodeBuffers.of(meta, out_loc))

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Decode over static buffers."""
        plan: AttentionPlan = self.plan_type(self, buffers)
        return plan


class VerifyPlan(AttentionPlan):
    """Decode that verifies drafts: rows may share a request, so K and V are stored first."""

    def __init__(self, backend: Any, buffers: DecodeBuffers) -> None:
        self.fused = FusedPlan(backend, buffers, drafts=True)
        self.pool, self.out_loc = self.fused.pool, self.fused.out_loc

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend with the kernel that finds earlier rows in the pool; k and v as stored."""
        return self.fused.decode(q, k, v, layer_id)


class VerifyBackend(FusedBackend):
    """The fused kernel after a separate store, in captured steps too."""

    name = "store_first"
    plan_type = VerifyPlan
