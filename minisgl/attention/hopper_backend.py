"""The Triton backend, with a Hopper kernel for the wide query tiles of long prompts.

Generated from notebooks/04c_prefill_attention.ipynb: edit there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.triton_backend import LOG2_E, KernelArgs, TritonBackend, TritonPlan
from minisgl.kernels.device import device_limits
from minisgl.kernels.prefill_attention import (
    ROWS,
    TILE_KV,
    TensorMaps,
    prefill_attention,
    tensor_map,
)
from minisgl.kernels.store_kv import rows_contiguous
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


def fits_hopper(pool: KVPool) -> bool:
    """Return True if the kernel reads a pool: 16-bit heads of 64 or 128, whole boxes in a page."""
    device, box = pool.buffer.device, math.gcd(pool.page_size, TILE_KV.value)
    plain = pool.buffer.itemsize == 2 and not pool.quantized and pool.head_dim in (64, 128)
    return plain and box >= 8 and device.type != "cpu" and device_limits(device).capability == 90


class HopperPlan(TritonPlan):
    """A batch in tiles of 2 * ROWS query rows."""

    def __init__(
        self, backend: TritonBackend, out_loc: Tensor, args: KernelArgs, tile_q: int,
        boxes: Sequence[TensorMaps],
    ) -> None:  # fmt: skip
        super().__init__(backend, out_loc, args, tile_q, 1)
        self.boxes = boxes
        self.compiled: Any = None  # set by the first layer; all have the same argument types

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend over the pool."""
        args, q = self.args, rows_contiguous(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if self.out is None else self.out
        self.compiled = prefill_attention(
            q, self.boxes[layer_id], out, self.tables.device_page_table,
            (args.rows, args.last, args.qo_indptr, args.request, args.tile), self.scale * LOG2_E,
            self.num_sms, self.compiled,
        )  # fmt: skip
        return out


class HopperBackend(TritonBackend):
    """The Triton backend; on a Hopper GPU its wide tiles run in their own kernel."""

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        super().__init__(pool, tables, num_qo_heads, sm_scale)
        self.fits = fits_hopper(pool)

    @cached_property
    def boxes(self) -> list[TensorMaps]:
        """Tensor maps of K and V, by layer; the pool never moves."""
        layers, pool = range(self.pool.num_layers), self.pool
        return [(tensor_map(pool.k_cache(n)), tensor_map(pool.v_cache(n))) for n in layers]

    def make_plan(
        self, out_loc: Tensor, args: KernelArgs, tile_q: int, splits: int, programs: int
    ) -> TritonPlan:
        """Return a plan of the Hopper kernel if there is work for more than all SMs."""
        if self.fits and tile_q == 2 * ROWS.value and programs > self.num_sms:
            return HopperPlan(self, out_loc, args, tile_q, self.boxes)
        return super().make_plan(out_loc, args, tile_q, splits, programs)
