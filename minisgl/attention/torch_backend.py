"""Attention with plain PyTorch: the oracle on every device and the fast path on a CPU.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import AttentionPlan, DecodeBuffers, GraphPlan
from minisgl.attention.metadata import AttentionMetadata, indptr
from minisgl.core import IntArray, Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of q [n, qo_heads, d] over k, v [m, kv_heads, d]: [n, qo_heads, d].

    Query head h reads KV head `h // group`; KV heads are broadcast, never copied.
    `mask` is bool [n, m], True where attention is allowed.
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


def causal_mask(extend_len: int, seq_len: int, device: torch.device) -> Tensor:
    """Bool [extend_len, seq_len]: the new tokens are the last ones, and each looks back only."""
    cached_len = seq_len - extend_len
    positions = torch.arange(seq_len, device=device)
    return positions <= (cached_len + torch.arange(extend_len, device=device))[:, None]


class PerRequestPlan:
    """One attention call per request: prefill, and decode where nothing faster is at hand."""

    def __init__(
        self, pool: KVPool, meta: AttentionMetadata, out_loc: Tensor, scale: float
    ) -> None:
        self.pool = pool
        self.out_loc = out_loc
        self.scale = scale
        self.bounds = meta.qo_indptr.tolist()
        self.hits = [self.hit(meta, i) for i in range(meta.batch_size)]

    def hit(self, meta: AttentionMetadata, i: int) -> tuple[Tensor, Tensor | None] | None:
        """Slots and mask of a request that has cached tokens; None for one that has none."""
        extend_len, seq_len = int(meta.extend_lens[i]), int(meta.seq_lens[i])
        if extend_len == seq_len:
            return None
        device = self.out_loc.device
        slots = torch.tensor(meta.slots_of(i), dtype=torch.int64, device=device)
        return slots, None if extend_len == 1 else causal_mask(extend_len, seq_len, device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend request by request; returns a tensor of q's shape."""
        self.pool.store_kv(k, v, self.out_loc, layer_id)
        return self.attend(q, layer_id, k, v)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Attend request by request; k and v save a request without a hit the way to the pool."""
        k_slots = self.pool.k_cache(layer_id).flatten(0, 1)
        v_slots = self.pool.v_cache(layer_id).flatten(0, 1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start, stop, hit in zip(self.bounds[:-1], self.bounds[1:], self.hits, strict=True):
            rows = slice(start, stop)
            if hit is None and k is not None and v is not None:
                keys, values, mask = k[rows], v[rows], None
            else:
                slots, mask = hit or (self.out_loc[rows], None)
                keys, values = k_slots.index_select(0, slots), v_slots.index_select(0, slots)
            out[rows] = grouped_attention(
                q[rows], keys, values, scale=self.scale, mask=mask, causal=hit is None
            )
        return out


MIN_SHARED = 32  # tokens; below this, reading a shared prefix apart costs more than it saves


def shared_prefix(meta: AttentionMetadata) -> int:
    """Leading positions at which all requests of a decode batch name the same slots.

    At least one position of every request is its own, and 0 is the answer for less than
    `MIN_SHARED` tokens or a single request.
    """
    limit = int(meta.seq_lens.min()) - 1
    if meta.batch_size == 1 or limit < MIN_SHARED:
        return 0
    slots = meta.page_table[meta.table_idx, :limit]
    differs = (slots != slots[0]).any(axis=0)
    shared = int(differs.argmax()) if differs.any() else limit
    return shared if shared >= MIN_SHARED else 0


def rows_read(meta: AttentionMetadata, skip: int, num_kv_heads: int, num_qo_heads: int) -> IntArray:
    """Rows of the pool seen as [slots * kv_heads, d] that each query head of each request reads.

    Positions before `skip` are left out; int32 [sum of (seq_lens - skip) * qo_heads].
    """
    group = num_qo_heads // num_kv_heads
    out = np.empty(int((meta.seq_lens - skip).sum()) * num_qo_heads, dtype=np.int32)
    heads = np.arange(num_kv_heads, dtype=np.int32)[:, None, None]
    start = 0
    for i, length in enumerate((meta.seq_lens - skip).tolist()):
        stop = start + length * num_qo_heads
        view = out[start:stop].reshape(num_kv_heads, group, length)
        view[:] = meta.slots_of(i)[skip:] * num_kv_heads + heads
        start = stop
    return out


def sampled_pattern(
    columns: IntArray, starts: IntArray, num_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both arrays as tensors, and the sparse CSR matrix of zeros that they describe."""
    index, offsets = torch.from_numpy(columns), torch.from_numpy(starts)
    size = (len(starts) - 1, num_columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR layout a beta
        matrix = torch.sparse_csr_tensor(
            offsets, index, torch.zeros(len(columns)), size, check_invariants=False
        )
    return index, offsets, matrix


class RaggedDecodePlan:
    """Decode on a CPU, all requests at once, with no padding and no copy of a key or a value.

    One list names, for every query head of every request, the rows of the pool that it reads.
    Scores are dot products sampled at the list, outputs are weighted sums of the rows it names.
    A prefix that the whole batch shares is read once, by matrix products.
    """

    def __init__(
        self, pool: KVPool, meta: AttentionMetadata, out_loc: Tensor,
        num_qo_heads: int, scale: float,
    ) -> None:  # fmt: skip
        self.pool, self.out_loc, self.scale = pool, out_loc, scale
        num_pages, page_size, num_kv_heads, _ = pool.k_cache(0).shape
        self.heads = (num_kv_heads, num_qo_heads // num_kv_heads)
        self.shared = shared_prefix(meta)
        self.shared_slots = torch.tensor(meta.slots_of(0)[: self.shared], dtype=torch.int64)
        lengths = np.repeat(meta.seq_lens, num_qo_heads)  # one row per request and query head
        self.columns, self.starts, self.sampled = sampled_pattern(
            rows_read(meta, self.shared, num_kv_heads, num_qo_heads),
            indptr(lengths - self.shared),
            num_pages * page_size * num_kv_heads,
        )
        positions = np.arange(meta.max_seq_len)
        own = (positions >= self.shared) & (positions < lengths[:, None])
        self.places = torch.from_numpy(np.flatnonzero(own))
        self.scores = torch.full(own.shape, float("-inf"))

    def score_shared(self, q: Tensor, k_slots: Tensor) -> None:
        """Scores of all queries against the shared prefix, one matrix product per KV head."""
        num_kv_heads, group = self.heads
        keys = k_slots.index_select(0, self.shared_slots).permute(1, 2, 0)
        queries = q.unflatten(1, self.heads).transpose(0, 1).reshape(num_kv_heads, -1, q.shape[-1])
        scores = torch.bmm(queries, keys).mul_(self.scale)
        target = self.scores[:, : self.shared].view(-1, num_kv_heads, group, self.shared)
        target.copy_(scores.unflatten(1, (-1, group)).transpose(0, 1))

    def sum_shared(self, weights: Tensor, v_slots: Tensor) -> Tensor:
        """What the shared prefix adds to the output of every query: [bs, kv_heads, group, d]."""
        num_kv_heads, group = self.heads
        values = v_slots.index_select(0, self.shared_slots).transpose(0, 1)
        of_heads = weights[:, : self.shared].unflatten(0, (-1, num_kv_heads, group)).transpose(0, 1)
        out = torch.bmm(of_heads.flatten(1, 2), values)
        return out.unflatten(1, (-1, group)).transpose(0, 1)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend; returns a tensor of q's shape."""
        self.pool.store_kv(k, v, self.out_loc, layer_id)
        return self.attend(q, layer_id)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Three passes over the pool: scores, softmax, weighted sums; k and v are not looked at."""
        k_slots = self.pool.k_cache(layer_id).flatten(0, 1)
        v_slots = self.pool.v_cache(layer_id).flatten(0, 1)
        dim = q.shape[-1]
        queries, keys = q.reshape(-1, dim), k_slots.view(-1, dim).T
        torch.sparse.sampled_addmm(
            self.sampled, queries, keys, beta=0.0, alpha=self.scale, out=self.sampled
        )
        self.scores.view(-1).index_copy_(0, self.places, self.sampled.values())
        if self.shared:
            self.score_shared(q, k_slots)
        weights = self.scores.softmax(-1)
        out = F.embedding_bag(
            self.columns,
            v_slots.view(-1, dim),
            self.starts,
            mode="sum",
            per_sample_weights=weights.view(-1).index_select(0, self.places),
            include_last_offset=True,
        ).view(q.shape)
        if self.shared:
            out.unflatten(1, self.heads).add_(self.sum_shared(weights, v_slots))
        return out


class TorchGraphPlan:
    """Decode at a fixed batch size: reads whole rows of the device's page table and masks them."""

    def __init__(
        self,
        pool: KVPool,
        tables: TableManager,
        batch_size: int,
        buffers: DecodeBuffers,
        scale: float,
    ) -> None:
        self.pool = pool
        self.page_table = tables.device_page_table
        self.batch_size, self.buffers = batch_size, buffers
        self.out_loc = buffers.out_loc
        self.scale = scale
        self.positions = torch.arange(self.page_table.shape[1], device=self.out_loc.device)

    def update(self, meta: AttentionMetadata) -> None:
        """Nothing to do but to refuse a batch of another size: all is read from the buffers."""
        if meta.batch_size != self.batch_size:
            raise ValueError(f"batch_size: must be {self.batch_size}, got {meta.batch_size}")

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend; returns a tensor of q's shape."""
        self.pool.store_kv(k, v, self.out_loc, layer_id)
        return self.attend(q, layer_id)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Attend over `max_len` positions of every request, masked; k and v are not looked at."""
        k_slots = self.pool.k_cache(layer_id).flatten(0, 1)
        v_slots = self.pool.v_cache(layer_id).flatten(0, 1)
        slots = self.page_table.index_select(0, self.buffers.rows)
        masks = self.positions <= self.buffers.positions[:, None]
        slots = slots * masks  # a row beyond its length may hold anything: read slot 0 instead
        out = []
        for i in range(self.batch_size):
            keys, values = k_slots.index_select(0, slots[i]), v_slots.index_select(0, slots[i])
            out.append(
                grouped_attention(
                    q[i : i + 1], keys, values, scale=self.scale, mask=masks[i : i + 1]
                )
            )
        return torch.cat(out)


class TorchBackend:
    """Attention in plain PyTorch over a paged pool."""

    name = "torch"

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.num_qo_heads = num_qo_heads
        self.scale = sm_scale
        cache = pool.k_cache(0)
        self.ragged = cache.device.type == "cpu" and cache.dtype == torch.float32

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """The ragged plan for decode in float32 on a CPU, else one call per request."""
        if self.ragged and meta.phase is Phase.DECODE:
            return RaggedDecodePlan(self.pool, meta, out_loc, self.num_qo_heads, self.scale)
        return PerRequestPlan(self.pool, meta, out_loc, self.scale)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> GraphPlan:
        """Decode at one batch size over the caller's static buffers."""
        return TorchGraphPlan(self.pool, self.tables, batch_size, buffers, self.scale)
