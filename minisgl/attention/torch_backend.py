"""Attention with plain PyTorch: the oracle on every device, and what serves on a CPU.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, AttentionPlan, DecodeBuffers
from minisgl.core import Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


def causal_mask(extend_len: int, seq_len: int, device: torch.device) -> Tensor:
    """Return a bool mask [extend_len, seq_len]: the new tokens come last, and each looks back."""
    cached_len = seq_len - extend_len
    positions = torch.arange(seq_len, device=device)
    return positions <= (cached_len + torch.arange(extend_len, device=device))[:, None]


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend with q [n, qo_heads, d] to k, v [m, kv_heads, d]: [n, qo_heads, d].

    Query head h reads KV head `h // group`. `mask` is bool [n, m], True where attention is allowed.
    """
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    queries = q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    values = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


class PerRequestPlan(AttentionPlan):
    """One attention call per request, for a batch of any kind: the oracle of all other plans."""

    def __init__(
        self, pool: KVPool, meta: AttentionMetadata, out_loc: Tensor, scale: float
    ) -> None:
        self.pool, self.out_loc, self.scale = pool, out_loc, scale
        self.bounds = meta.qo_indptr.tolist()
        self.hits = [self.cached_slots(meta, i) for i in range(meta.batch_size)]

    def cached_slots(self, meta: AttentionMetadata, i: int) -> tuple[Tensor, Tensor] | None:
        """Return slots and mask of a request that reads the pool; None if k and v are enough."""
        extend_len, seq_len = int(meta.extend_lens[i]), int(meta.seq_lens[i])
        if extend_len == seq_len and not self.pool.quantized:
            return None
        device = self.out_loc.device
        slots = torch.tensor(meta.slots_of(i), dtype=torch.int64, device=device)
        return slots, causal_mask(extend_len, seq_len, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend request by request; without a cached prefix read k and v, else the pool."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start, stop, hit in zip(self.bounds[:-1], self.bounds[1:], self.hits, strict=True):
            rows, mask = slice(start, stop), None
            keys, values = k[rows], v[rows]
            if hit is not None:
                slots, mask = hit
                keys, values = self.pool.load_kv(slots, layer_id, q.dtype)
            out[rows] = grouped_attention(
                q[rows], keys, values, scale=self.scale, mask=mask, causal=hit is None
            )
        return out


POSITIONS = 2048  # of one call: the copies of their keys and values stay in a core's cache


class DecodePlan(AttentionPlan):
    """Decode over the rows of the device's page table; all inputs are in the buffers."""

    def __init__(
        self, pool: KVPool, page_table: Tensor, buffers: DecodeBuffers, scale: float,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        """Plan over `page_table`, int32 [rows, width]: `width` positions of each row are read.

        fixed: the inputs stay as they are, so slots and masks of the first layer serve all.
        """
        self.pool, self.page_table, self.scale = pool, page_table, scale
        self.buffers, self.out_loc = buffers, buffers.out_loc
        width = page_table.shape[1]
        self.positions = torch.arange(width, device=self.out_loc.device)
        self.at_once = max(1, POSITIONS // width)
        self.fixed, self.found = fixed, list[tuple[Tensor, Tensor]]()

    def find_slots(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return slots [some, width] of some requests at a time, and what is added to scores."""
        rows, last = self.buffers.rows, self.buffers.positions
        found = []
        for row, end in zip(rows.split(self.at_once), last.split(self.at_once), strict=True):
            seen = self.positions <= end[:, None]
            slots = self.page_table.index_select(0, row)
            slots = torch.where(seen, slots, slots[:, :1])  # past its end a row names anything
            bias = torch.zeros_like(slots, dtype=dtype).masked_fill_(~seen, -torch.inf)
            found.append((slots, bias[:, None, None]))  # [some, 1, 1, width]
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend for some requests at a time, padded to one width and masked; read the pool."""
        grouped = q.unflatten(1, (self.pool.num_kv_heads, -1))  # [bs, kv_heads, group, d]
        found = self.found or self.find_slots(q.dtype)
        if self.fixed:
            self.found = found
        out = []
        for queries, (slots, bias) in zip(grouped.split(self.at_once), found, strict=True):
            keys, values = self.pool.load_kv(slots, layer_id, q.dtype)
            out.append(
                F.scaled_dot_product_attention(
                    queries, keys.transpose(1, 2), values.transpose(1, 2), bias, scale=self.scale
                )
            )
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1, 2)


class TorchBackend:
    """Attention in plain PyTorch over a paged pool."""

    name = "torch"

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        """Keep the pool and tables; `num_qo_heads` is unused, q has it."""
        self.pool, self.tables, self.scale = pool, tables, sm_scale

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Decode in a few calls, prefill in one call per request."""
        if meta.phase is Phase.PREFILL:
            return PerRequestPlan(self.pool, meta, out_loc, self.scale)
        table = self.tables.device_page_table[:, : int(meta.seq_lens.max())]
        buffers = DecodeBuffers.of(meta, out_loc)
        return DecodePlan(self.pool, table, buffers, self.scale, fixed=True)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Decode at one batch size over the caller's buffers; reads whole rows."""
        return DecodePlan(self.pool, self.tables.device_page_table, buffers, self.scale)
