"""Attention with plain PyTorch: the oracle on every device, and what serves on a CPU.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, AttentionPlan, DecodeBuffers
from minisgl.core import IntArray, Phase
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
        seq_lens: IntArray | None = None,
    ) -> None:  # fmt: skip
        """Plan over `page_table`, int32 [rows, width].

        seq_lens: [bs], if the inputs stay as they are: only these positions are read, and slots
        and masks of the first layer serve all. None: whole rows are read.
        """
        self.pool, self.page_table, self.scale = pool, page_table, scale
        self.buffers, self.out_loc = buffers, buffers.out_loc
        self.fixed, self.found = seq_lens is not None, list[tuple[Tensor, Tensor]]()
        if seq_lens is None:
            seq_lens = np.full(len(self.out_loc), page_table.shape[1])
        self.slices, lens = list[tuple[Tensor, int]](), np.sort(seq_lens).tolist()
        left = torch.from_numpy(np.argsort(-seq_lens, kind="stable")).to(self.out_loc.device)
        while len(left):  # the longest first
            width = lens[len(left) - 1]
            count = max(1, POSITIONS // width)
            self.slices.append((left[:count], width))
            left = left[count:]

    def find_slots(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return slots [some, width] of some requests at a time, and what is added to scores."""
        rows, last, found = self.buffers.rows, self.buffers.positions, []
        for some, width in self.slices:
            seen = torch.arange(width, device=last.device) <= last[some, None]
            slots = self.page_table[:, :width].index_select(0, rows[some])
            slots = torch.where(seen, slots, slots[:, :1])  # past its end a row names anything
            bias = torch.zeros_like(slots, dtype=dtype).masked_fill_(~seen, -torch.inf)
            found.append((slots, bias[:, None, None]))  # [some, 1, 1, width]
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend for some requests at a time, padded to one width and masked; read the pool."""
        grouped = q.unflatten(1, (self.pool.num_kv_heads, -1))  # [bs, kv_heads, group, d]
        found, out = self.found or self.find_slots(q.dtype), torch.empty_like(grouped)
        if self.fixed:
            self.found = found
        for (some, _), (slots, bias) in zip(self.slices, found, strict=True):
            loaded = self.pool.load_kv(slots, layer_id, q.dtype)
            keys, values = (part.transpose(1, 2) for part in loaded)
            queries = grouped.index_select(0, some)
            heads = F.scaled_dot_product_attention(queries, keys, values, bias, scale=self.scale)
            out.index_copy_(0, some, heads)
        return out.flatten(1, 2)


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
        table, buffers = self.tables.device_page_table, DecodeBuffers.of(meta, out_loc)
        return DecodePlan(self.pool, table, buffers, self.scale, meta.seq_lens)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Decode at one batch size over the caller's buffers; reads whole rows."""
        return DecodePlan(self.pool, self.tables.device_page_table, buffers, self.scale)
