"""Attention in plain PyTorch whose bits depend on a query and its keys alone.

Generated from notebooks/05f_batch_invariance.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.metadata import (
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    ragged_arange,
)
from minisgl.attention.torch_backend import TorchBackend
from minisgl.kvcache.pool import KVPool

TILE_Q, TILE_KV = 8, 64  # positions of a query block, and of a tile of keys


def attend_tile(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, m: Tensor, total: Tensor, acc: Tensor
) -> None:
    """Fold one tile of keys into the running maximum, sum and weighted sum of each row, in place.

    q [b, rows, d]; k and v [b, TILE_KV, d]; hidden bool [b, rows, TILE_KV]; m and total
    [b, rows, 1]; acc [b, rows, d]. A row must see a key in its first tile.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).masked_fill_(hidden, -torch.inf)
    top = torch.maximum(m, scores.amax(-1, keepdim=True))
    weights, rescale = (scores - top).exp_(), (m - top).exp_()
    total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
    acc.mul_(rescale).add_(torch.bmm(weights, v))
    m.copy_(top)


@dataclass
class InvariantTorchPlan(AttentionPlan):
    """One batch as blocks of queries; reads keys and values from the pool."""

    pool: KVPool
    page_table: Tensor  # int32 [rows, width], the device's
    scale: float
    out_loc: Tensor
    rows: Tensor  # int64 [blocks], row of the page table
    last: Tensor  # int64 [blocks], position of a block's last query: no later key is read
    live: list[int]  # number of leading blocks that fold each tile of keys
    place: Tensor | None = None  # int64 [n], of each token; None: one token in each block

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend tile by tile, in one order, for all blocks at once."""
        kv_heads, blocks, device = self.pool.num_kv_heads, len(self.last), q.device
        place = self.place
        if place is None:
            place = torch.arange(blocks, device=device) * TILE_Q + self.last % TILE_Q
        queries, limit = self.block_queries(q, place)
        m = torch.full_like(queries[..., :1], -torch.inf)
        total, acc = torch.zeros_like(m), torch.zeros_like(queries)
        for tile, live in enumerate(self.live):
            seen = torch.arange(tile * TILE_KV, (tile + 1) * TILE_KV, device=device)
            keys, values = self.read_tile(layer_id, seen, live)
            b = slice(live * kv_heads)
            attend_tile(queries[b], keys, values, seen > limit[b], m[b], total[b], acc[b])
        out = (acc / total).view(blocks, kv_heads, TILE_Q, -1, q.shape[2]).transpose(1, 2)
        return out.reshape(-1, *q.shape[1:]).index_select(0, place).to(q.dtype)

    def block_queries(self, q: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled queries float32 [blocks * heads, TILE_Q * group, d] and row positions."""
        kv_heads, (heads, dim) = self.pool.num_kv_heads, q.shape[1:]
        queries = torch.zeros(len(self.last) * TILE_Q, heads, dim, device=q.device)
        queries.index_copy_(0, place, q.float() * self.scale)
        queries = queries.view(-1, TILE_Q, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        first = self.last // TILE_Q * TILE_Q
        limit = first[:, None] + torch.arange(TILE_Q, device=q.device)
        limit = limit.repeat_interleave(kv_heads, 0).repeat_interleave(heads // kv_heads, 1)
        return queries.reshape(len(limit), -1, dim), limit[:, :, None]

    def read_tile(self, layer_id: int, seen: Tensor, live: int) -> list[Tensor]:
        """Load keys and values of these positions, float32 [live * KV heads, TILE_KV, d] each."""
        positions = torch.minimum(seen, self.last[:live, None])  # later positions are masked anyway
        slots = self.page_table[self.rows[:live, None], positions]
        found = self.pool.load_kv(slots, layer_id, torch.float32)
        return [part.transpose(1, 2).flatten(0, 1) for part in found]


class InvariantTorchBackend(TorchBackend):
    """Backend that computes a position in one way in prefill, decode and captured steps."""

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Cut each request's new tokens at multiples of TILE_Q; the longest blocks come first."""
        positions = ragged_arange(meta.seq_lens - meta.extend_lens, meta.extend_lens)
        begins = positions % TILE_Q == 0
        begins[meta.qo_indptr[:-1]] = True
        ends = np.append(np.flatnonzero(begins)[1:], len(positions)) - 1  # last token of a block
        order = np.argsort(-positions[ends], kind="stable")
        block = np.argsort(order)[np.cumsum(begins) - 1]  # of each token
        last = positions[ends][order]
        rows = np.repeat(meta.table_idx, meta.extend_lens)[ends][order]
        live = [int((last >= start).sum()) for start in range(0, int(last[0]) + 1, TILE_KV)]
        blocks_rows, blocks_last, place = (
            torch.tensor(part, dtype=torch.int64, device=out_loc.device)
            for part in (rows, last, block * TILE_Q + positions % TILE_Q)
        )
        return self.make_plan(out_loc, blocks_rows, blocks_last, place, live)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Decode over the caller's buffers; read whole rows."""
        tiles = -(-self.tables.page_table.shape[1] // TILE_KV)
        live = [batch_size] * tiles
        return self.make_plan(buffers.out_loc, buffers.rows, buffers.positions, None, live)

    def make_plan(
        self, out_loc: Tensor, rows: Tensor, last: Tensor, place: Tensor | None, live: list[int]
    ) -> InvariantTorchPlan:
        """Make a plan over the backend's pool and page table."""
        table = self.tables.device_page_table
        return InvariantTorchPlan(self.pool, table, self.scale, out_loc, rows, last, live, place)
