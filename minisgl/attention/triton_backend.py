"""Attention by our own Triton kernels: prefill and split-KV decode over pages.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from minisgl.attention.metadata import (
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
    ragged_arange,
)
from minisgl.attention.staging import StagingRing
from minisgl.kernels.device import device_limits
from minisgl.kernels.paged_attention import attention_kernel, merge_kernel
from minisgl.kernels.store_kv import rows_contiguous, store_kv
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True)
class KernelArgs:
    """Integers that the kernels read, on the device."""

    rows: Tensor  # [bs] row of the page table
    last: Tensor  # [bs] position of each request's last token
    qo_indptr: Tensor  # [bs + 1]
    request: Tensor  # [tiles] request of a query tile
    tile: Tensor  # [tiles] number of the tile within its request


def query_tile(average_rows: int, head_dim: int, widest: int) -> int:
    """Return a query tile's rows (16, 64 or 128) for the mean `tokens * group` of requests."""
    if average_rows > 64 and head_dim < 256:
        return min(128, widest)
    return 64 if average_rows > 16 else 16


CPU_SMS = 16  # multiprocessors to plan for without a GPU, so that small batches are split


def count_sms(device: torch.device, dtype: torch.dtype) -> int:
    """Return the SMs to plan for; raise ValueError where the kernels cannot run correctly."""
    if device.type != "cpu":
        limits = device_limits(device)
        if not limits.runs_tiles:
            raise ValueError(
                "attention_backend: 'triton' needs a GPU of compute capability 8.0 or above, got "
                f"{limits.capability / 10}; choose 'fi' or 'torch'"
            )
        return limits.sms
    if isinstance(attention_kernel, triton.JITFunction):
        raise ValueError(
            "attention_backend: 'triton' needs a GPU; to run its kernels on a CPU, slowly, "
            "set TRITON_INTERPRET=1 before Triton is imported"
        )
    if dtype is torch.bfloat16:
        raise ValueError(
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
        self.pool, self.tables, self.scale = pool, tables, sm_scale
        self.device = pool.buffer.device
        self.group = num_qo_heads // pool.num_kv_heads
        self.widest_tile = 128 if pool.buffer.itemsize <= 2 else 64  # rows that fit registers
        self.ring = StagingRing(self.device)
        self.num_sms = count_sms(self.device, pool.buffer.dtype)

    def query_rows(self, average_rows: int) -> int:
        """Return the rows of a query tile for the mean rows of a request."""
        return query_tile(average_rows, self.pool.head_dim, self.widest_tile)

    def num_splits(self, places: int, max_len: int) -> int:
        """Return the split-KV parts for `places` thread blocks and the longest request."""
        return max(1, min(2 * self.num_sms // places, -(-max_len // (2 * TILE_KV))))

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Cut the queries into tiles and send the list to the device in one copy."""
        rows = meta.extend_lens * self.group
        tile_q = self.query_rows(int(rows.sum()) // len(rows))
        if int(rows.sum()) // tile_q * self.pool.num_kv_heads < self.num_sms:
            tile_q = min(tile_q, 64)  # wide tiles would leave SMs idle
        tiles = (rows + tile_q - 1) // tile_q  # of each request
        request = np.repeat(np.arange(len(rows), dtype=np.int32), tiles)
        tile = ragged_arange(np.zeros_like(tiles), tiles)
        seen = (meta.seq_lens - meta.extend_lens)[request] + (tile + 1) * tile_q // self.group
        order = np.argsort(-seen, kind="stable")  # those with the most keys first
        parts = (meta.table_idx, meta.seq_lens - 1, meta.qo_indptr, request[order], tile[order])
        args = KernelArgs(*self.ring.upload(*parts))
        programs = int(tiles.sum()) * self.pool.num_kv_heads
        splits = self.num_splits(programs, int(meta.seq_lens.max()))
        return self.make_plan(out_loc, args, tile_q, splits, programs)

    def make_plan(
        self, out_loc: Tensor, args: KernelArgs, tile_q: int, splits: int, programs: int
    ) -> TritonPlan:
        """Return a plan; a subclass may choose its kernel by the number of programs with work."""
        return TritonPlan(self, out_loc, args, tile_q, splits)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Decode over the caller's buffers; everything else is the same for all batches."""
        tile_q = self.query_rows(self.group)
        count = -(-self.group // tile_q)  # tiles of a request
        numbers = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        args = KernelArgs(
            buffers.rows,
            buffers.positions,
            numbers,
            numbers[:-1].repeat_interleave(count),
            numbers[:count].repeat(batch_size),
        )
        places, longest = (
            batch_size * count * self.pool.num_kv_heads,
            self.tables.page_table.shape[1],
        )
        return TritonPlan(self, buffers.out_loc, args, tile_q, self.num_splits(places, longest))


LOG2_E = 1.4426950408889634  # the kernels use exp2, as the hardware does
TILE_KV = 64


class TritonPlan(AttentionPlan):
    """One batch on the device, ready for every layer."""

    def __init__(
        self, backend: TritonBackend, out_loc: Tensor, args: KernelArgs, tile_q: int, splits: int
    ) -> None:
        """Plan a batch; `splits` is the most parts that keys may be split into."""
        self.pool, self.tables, self.scale = backend.pool, backend.tables, backend.scale
        self.out_loc, self.args, self.tile_q = out_loc, args, tile_q
        self.num_sms = backend.num_sms
        self.group, self.head_dim = backend.group, self.pool.head_dim
        self.dim = max(16, 1 << (self.head_dim - 1).bit_length())  # tl.dot needs at least 16
        self.splits = splits
        self.out: Tensor | None = None  # memory for the output; None: new in each layer
        self.tile_kv, self.stages = TILE_KV, 3
        self.warps = 8 if tile_q > 64 else 4  # 8 hold wide tiles without spills
        rows = len(args.request) * self.pool.num_kv_heads * splits * tile_q if splits > 1 else 1
        self.parts = torch.empty(rows, self.dim, dtype=torch.float32, device=out_loc.device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=out_loc.device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v by one kernel, then attend."""
        pool, scales = self.pool, self.pool.scales(layer_id)
        store_kv(k, v, pool.k_cache(layer_id), pool.v_cache(layer_id), self.out_loc, scales)
        return self.attend(q, k, v, layer_id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend over the pool, and merge if keys were split."""
        k_cache, v_cache = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)
        args, page_table, kv_heads = (
            self.args,
            self.tables.device_page_table,
            self.pool.num_kv_heads,
        )
        q = rows_contiguous(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if self.out is None else self.out
        where = (args.last, args.qo_indptr, args.request, args.tile)
        sizes = {"GROUP": self.group, "HEAD_DIM": self.head_dim, "DIM": self.dim,
                 "TILE_Q": self.tile_q, "TILE_KV": self.tile_kv}  # fmt: skip
        attention_kernel[(kv_heads, len(args.request), self.splits)](
            q, k_cache, v_cache, out, self.parts, self.lse, page_table, args.rows, *where,
            self.scale * LOG2_E, self.pool.scales(layer_id),
            q.stride(0), k_cache.stride(1), page_table.stride(0),
            SPLIT=self.splits > 1, STAGES=self.stages, num_warps=self.warps, **sizes,
        )  # fmt: skip
        if self.splits > 1:
            merge_kernel[(len(args.request), kv_heads)](
                self.parts, self.lse, out, *where, self.splits, **sizes
            )
        return out
