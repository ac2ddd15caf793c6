"""Attention by our own Triton kernels: paged flash-decode, and prefill by the same plan.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from minisgl.attention.base import AttentionPlan, DecodeBuffers, GraphPlan
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.attention.plan_arithmetic import TilePlan, items_wanted, plan_tiles, query_tile
from minisgl.attention.staging import StagingRing
from minisgl.core import IntArray, Phase
from minisgl.kernels.paged_attention import attention_kernel, merge_kernel
from minisgl.kernels.store_kv import rows_contiguous, store_kv
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True)
class KernelArgs:
    """Integers that the kernels read, on the device, int32; views of one buffer."""

    chunk: Tensor  # [1] tokens of a KV chunk
    table_idx: Tensor  # [bs]
    qo_indptr: Tensor  # [bs + 1]
    seq_lens: Tensor  # [bs]
    request: Tensor  # [items] -1 for padding
    qo_tile: Tensor  # [items]
    kv_tile: Tensor  # [items]
    tile_indptr: Tensor  # [tiles + 1] items of each query tile


def kernel_args(
    meta: AttentionMetadata, tiles: TilePlan, num_items: int, num_tiles: int
) -> list[IntArray]:
    """The fields of `KernelArgs` on the host, padded to `num_items` items and `num_tiles` tiles."""
    starts = np.flatnonzero(tiles.kv_tile_indices == 0).astype(np.int32)
    tile_indptr = np.full(num_tiles + 1, tiles.num_items, dtype=np.int32)
    tile_indptr[: len(starts)] = starts
    request, qo_tile, kv_tile = (np.full(num_items, -1, dtype=np.int32) for _ in range(3))
    request[: tiles.num_items] = tiles.request_indices
    qo_tile[: tiles.num_items] = tiles.qo_tile_indices
    kv_tile[: tiles.num_items] = tiles.kv_tile_indices
    chunk = np.array([tiles.kv_chunk], dtype=np.int32)
    return [
        chunk, meta.table_idx, meta.qo_indptr, meta.seq_lens,
        request, qo_tile, kv_tile, tile_indptr,
    ]  # fmt: skip


def on_device(arrays: list[IntArray], ring: StagingRing, device: torch.device) -> KernelArgs:
    """Send the arrays in one copy to a new buffer and cut it into views."""
    sizes = [len(array) for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    ring.send(arrays, buffer)
    return KernelArgs(*buffer.split(sizes))


LOG2_E = 1.4426950408889634  # the kernels use exp2, which is what the hardware has


class TritonPlan:
    """One batch on the device, ready for every layer."""

    def __init__(
        self, pool: KVPool, tables: TableManager, out_loc: Tensor, args: KernelArgs,
        *, tile_q: int, split: bool, scale: float,
    ) -> None:  # fmt: skip
        self.pool, self.tables = pool, tables
        self.out_loc, self.args = out_loc, args
        self.tile_q, self.split, self.scale = tile_q, split, scale
        num_kv_heads, head_dim = pool.k_cache(0).shape[2:]
        self.dim = max(16, 1 << (head_dim - 1).bit_length())  # tl.dot wants 16 at least
        rows = len(args.request) * num_kv_heads * tile_q if split else 1
        device = out_loc.device
        self.parts = torch.empty(rows, self.dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend; returns a tensor of q's shape."""
        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), self.out_loc)
        return self.attend(q, layer_id)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Attend over the pool and merge if chunks were split; k and v are not looked at."""
        k_cache, v_cache = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)
        args, page_table = self.args, self.tables.device_page_table
        num_kv_heads, head_dim = k_cache.shape[2:]
        q = rows_contiguous(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group = q.shape[1] // num_kv_heads
        attention_kernel[(len(args.request), num_kv_heads)](
            q, k_cache, v_cache, out, self.parts, self.lse,
            page_table, args.table_idx, args.qo_indptr, args.seq_lens, args.chunk,
            args.request, args.qo_tile, args.kv_tile,
            self.scale * LOG2_E, q.stride(0), k_cache.stride(1), page_table.stride(0),
            GROUP=group, HEAD_DIM=head_dim, DIM=self.dim,
            TILE_Q=self.tile_q, TILE_KV=64, SPLIT=self.split,
        )  # fmt: skip
        if self.split:
            merge_kernel[(len(args.tile_indptr) - 1, num_kv_heads)](
                self.parts, self.lse, out,
                args.qo_indptr, args.request, args.qo_tile, args.tile_indptr,
                GROUP=group, HEAD_DIM=head_dim, DIM=self.dim, TILE_Q=self.tile_q,
            )  # fmt: skip
        return out


CPU_SMS = 4  # multiprocessors to plan for where there is no GPU, so that small batches are split


def count_sms(device: torch.device, dtype: torch.dtype) -> int:
    """Multiprocessors to plan for; RuntimeError where the kernels cannot run, or not rightly."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if isinstance(attention_kernel, triton.JITFunction):
        raise RuntimeError(
            "attention_backend: 'triton' needs a GPU; to run its kernels on a CPU, slowly, "
            "set TRITON_INTERPRET=1 before Triton is imported"
        )
    if dtype is torch.bfloat16:
        raise RuntimeError(
            "dtype: Triton's interpreter multiplies bfloat16 as if it were integers; "
            "choose float32 or float16 for attention_backend 'triton' on a CPU"
        )
    return CPU_SMS


class TritonBackend:
    """Attention by Triton kernels; on a CPU they run in Triton's interpreter, for tests."""

    name = "triton"

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        self.pool, self.tables = pool, tables
        self.num_qo_heads, self.scale = num_qo_heads, sm_scale
        self.num_kv_heads, self.head_dim = pool.k_cache(0).shape[2:]
        self.device = pool.k_cache(0).device
        self.widest_tile = 128 if pool.k_cache(0).itemsize <= 2 else 64  # rows that fit registers
        self.ring = StagingRing(self.device)
        self.num_sms = count_sms(self.device, pool.k_cache(0).dtype)

    def tiles(self, meta: AttentionMetadata, tile_q: int | None = None) -> TilePlan:
        """Cut a batch into work items for this GPU; the kernels read slots, at any page size."""
        if tile_q is None:
            rows = meta.num_tokens * (self.num_qo_heads // self.num_kv_heads)
            tile_q = min(query_tile(rows // meta.batch_size, self.head_dim), self.widest_tile)
        return plan_tiles(
            meta.extend_lens,
            meta.seq_lens,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=1,
            num_sms=self.num_sms,
            tile_q=tile_q,
        )

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Cut the batch and send the list of work items to the device in one copy."""
        tiles = self.tiles(meta)
        num_tiles = int((tiles.kv_tile_indices == 0).sum())
        arrays = kernel_args(meta, tiles, tiles.num_items, num_tiles)
        args = on_device(arrays, self.ring, self.device)
        return TritonPlan(
            self.pool, self.tables, out_loc, args,
            tile_q=tiles.tile_q, split=tiles.split, scale=self.scale,
        )  # fmt: skip

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> GraphPlan:
        """Work items for decode at one batch size; dummy requests fill them until `update`."""
        return TritonGraphPlan(self, batch_size, buffers)


class TritonGraphPlan:
    """A decode plan of fixed size: a grid that is large enough for any batch, padded with -1."""

    def __init__(self, backend: TritonBackend, batch_size: int, buffers: DecodeBuffers) -> None:
        self.backend = backend
        self.pool, self.out_loc = backend.pool, buffers.out_loc
        self.batch_size = batch_size
        group = backend.num_qo_heads // backend.num_kv_heads
        self.tile_q = query_tile(group, backend.head_dim)
        self.num_tiles = batch_size * -(-group // self.tile_q)
        wanted = items_wanted(backend.num_sms, backend.num_kv_heads)
        self.num_items = max(wanted, self.num_tiles)
        self.ring = StagingRing(backend.device)
        sizes = [1, batch_size, batch_size + 1, batch_size]
        sizes += [self.num_items] * 3 + [self.num_tiles + 1]
        self.buffer = torch.empty(sum(sizes), dtype=torch.int32, device=backend.device)
        self.inner = TritonPlan(
            self.pool, backend.tables, self.out_loc, KernelArgs(*self.buffer.split(sizes)),
            tile_q=self.tile_q, split=True, scale=backend.scale,
        )  # fmt: skip
        rows = np.full(batch_size, backend.tables.dummy_row, dtype=np.int32)
        ones = np.ones(batch_size, dtype=np.int32)
        page_table, page_size = backend.tables.page_table, backend.pool.page_size
        self.update(build_metadata(Phase.DECODE, rows, ones, ones, page_table, page_size))

    def update(self, meta: AttentionMetadata) -> None:
        """Cut this batch and copy its work items over the old ones, outside of the graph."""
        if meta.batch_size != self.batch_size:
            raise ValueError(f"batch_size: must be {self.batch_size}, got {meta.batch_size}")
        tiles = self.backend.tiles(meta, self.tile_q)
        self.ring.send(kernel_args(meta, tiles, self.num_items, self.num_tiles), self.buffer)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend; returns a tensor of q's shape."""
        return self.inner.run(q, k, v, layer_id)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """The kernels of the eager plan, over the static buffers."""
        return self.inner.attend(q, layer_id)
