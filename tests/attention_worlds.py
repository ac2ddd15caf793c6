"""Batches over a pool with scattered pages, and what attention must answer for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import torch_backend
from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    build_metadata,
)
from minisgl.core import Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: (cached tokens, new tokens) of each request, pages and heads."""

    lens: tuple[tuple[int, int], ...]
    page_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    shared_pages: int = 0  # leading pages that all requests have in common
    seed: int = 0

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if all(new == 1 for _, new in self.lens) else Phase.PREFILL


@dataclass
class World:
    """A pool with scattered pages, the batch's q, k, v, and the dense K and V of every request."""

    shape: Shape
    pool: KVPool
    tables: TableManager
    meta: AttentionMetadata
    out_loc: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dense: list[tuple[Tensor, Tensor]]

    def backend(self, name: str) -> AttentionBackend:
        heads = self.shape.kv_heads * self.shape.group
        return create_backend(name, pool=self.pool, tables=self.tables, num_qo_heads=heads)

    def plan(self, name: str) -> AttentionPlan:
        return self.backend(name).plan(self.meta, self.out_loc)

    def attend(self, name: str, layer_id: int = 1) -> Tensor:
        return self.plan(name).run(self.q, self.k, self.v, layer_id)

    def attend_stored(self, name: str, layer_id: int = 1) -> Tensor:
        """As for a fused kernel: keys and values are in the pool before attention is called."""
        plan = self.plan(name)
        assert plan.pool is self.pool and plan.out_loc is self.out_loc
        self.pool.store_kv(self.k, self.v, plan.out_loc, layer_id)
        return plan.attend(self.q, self.k, self.v, layer_id)


def make_world(shape: Shape, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> World:
    """Random keys and values; pages in random order; stale garbage in every slot not in use."""
    gen = torch.Generator().manual_seed(shape.seed)
    rng = np.random.default_rng(shape.seed)
    page = shape.page_size
    totals = [cached + new for cached, new in shape.lens]
    pages_needed = sum(-(-total // page) for total in totals)
    pool = KVPool(
        num_layers=2, num_pages=pages_needed + 3, page_size=page, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, dtype=dtype, device=device,
    )  # fmt: skip
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=gen) * 30)
    tables = TableManager(
        len(totals) + 1, max(totals) + 2 * page, page, pool.dummy_page, torch.device(device)
    )
    free = list(rng.permutation(pool.num_pages))
    shared = [free.pop() for _ in range(shape.shared_pages)]
    rows, new_slots, new_kv, dense = [], [], [], []
    for (cached, _), total in zip(shape.lens, totals, strict=True):
        common = min(shape.shared_pages, cached // page)
        own = [free.pop() for _ in range(-(-total // page) - common)]
        pages = np.array(shared[:common] + own)
        slots = (pages[:, None] * page + np.arange(page)).reshape(-1)[:total].astype(np.int32)
        rows.append(tables.allocate())
        tables.write(rows[-1], 0, slots)
        kv = torch.randn(2, total, shape.kv_heads, shape.head_dim, generator=gen)
        kv = kv.to(dtype).to(device)
        if common:
            index = torch.from_numpy(slots[: common * page].astype(np.int64)).to(device)
            if dense:
                kv[:, : common * page] = pool.buffer[:, 1].flatten(1, 2)[:, index]
        index = torch.from_numpy(slots[:cached].astype(np.int64)).to(device)
        pool.buffer[:, 1].flatten(1, 2)[:, index] = kv[:, :cached]
        dense.append((kv[0], kv[1]))
        new_slots.append(slots[cached:])
        new_kv.append(kv[:, cached:])
    tables.flush()
    extend, seq = np.array([n for _, n in shape.lens]), np.array(totals)
    meta = build_metadata(
        shape.phase, np.array(rows), extend, seq, tables.page_table, shape.page_size
    )
    k, v = torch.cat(new_kv, dim=1)
    q = torch.randn(meta.num_tokens, shape.kv_heads * shape.group, shape.head_dim, generator=gen)
    out_loc = torch.from_numpy(np.concatenate(new_slots).astype(np.int64)).to(device)
    return World(
        shape, pool, tables, meta, out_loc, q.to(dtype).to(device), k, v, dense
    )  # fmt: skip


def poison(world: World) -> None:
    """Slots that no request of the batch owns hold no number."""
    owned = np.concatenate([world.meta.slots_of(i) for i in range(world.meta.batch_size)])
    free = torch.ones(world.pool.num_slots + world.pool.page_size, dtype=torch.bool)
    free[torch.from_numpy(owned.astype(np.int64))] = False
    world.pool.buffer.flatten(2, 3)[:, :, free] = torch.nan


def dense_oracle(world: World) -> Tensor:
    """Attention by its definition: one query token and head at a time, in float64."""
    shape, out, row = world.shape, torch.empty(world.q.shape, dtype=torch.float64), 0
    q = world.q.double().cpu()
    for (cached, new), (keys, values) in zip(shape.lens, world.dense, strict=True):
        for i in range(new):
            for head in range(shape.kv_heads * shape.group):
                seen = slice(0, cached + i + 1)
                k = keys.double().cpu()[seen, head // shape.group]
                v = values.double().cpu()[seen, head // shape.group]
                scores = k @ q[row, head] / shape.head_dim**0.5
                weights = torch.exp(scores - scores.max())
                out[row, head] = (weights / weights.sum()) @ v
            row += 1
    return out


def assert_close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=0)


def static_buffers(world: World, size: int) -> DecodeBuffers:
    """Make the buffers of a captured step, filled with dummy requests."""
    values = (world.tables.dummy_row, 0, world.pool.dummy_slot)
    return DecodeBuffers(*(torch.full((size,), value, device=DEVICE) for value in values))


def fill(buffers: DecodeBuffers, world: World) -> None:
    """Write the world's batch into the buffers, in place."""
    buffers.rows.copy_(torch.from_numpy(world.meta.table_idx))
    buffers.positions.copy_(torch.from_numpy(world.meta.seq_lens - 1))
    buffers.out_loc.copy_(world.out_loc)


def per_request_float32(world: World) -> Tensor:
    """The oracle for long requests: one dense product per request, in float32 on the CPU."""
    out, row = [], 0
    for (cached, new), (keys, values) in zip(world.shape.lens, world.dense, strict=True):
        q = world.q[row : row + new].float().cpu()
        mask = torch_backend.causal_mask(new, cached + new, torch.device("cpu"))
        out.append(
            torch_backend.grouped_attention(
                q,
                keys.float().cpu(),
                values.float().cpu(),
                mask=mask,
                scale=world.shape.head_dim**-0.5,
            )
        )
        row += new
    return torch.cat(out)
