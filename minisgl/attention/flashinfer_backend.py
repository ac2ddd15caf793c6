"""Attention by FlashInfer's kernels: its wrappers, their workspaces, and plans for CUDA graphs.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionPlan, GraphPlan
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.attention.staging import Event, StagingRing, mark
from minisgl.core import Phase
from minisgl.kernels.store_kv import store_kv
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


def import_flashinfer() -> ModuleType:
    """The library, or an ImportError that says what to install."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            "attention_backend: 'fi' needs flashinfer-python and an NVIDIA GPU; "
            "install it with pip install 'minisgl[cuda]', or choose 'triton' or 'torch'"
        ) from error


class Workspace:
    """Scratch memory of all wrappers: they run one after the other, so one of each is enough."""

    def __init__(self, device: torch.device, float_mib: int = 128, int_mib: int = 8) -> None:
        mib = 1 << 20
        self.floats = torch.zeros(float_mib * mib, dtype=torch.uint8, device=device)
        self.ints = torch.empty(int_mib * mib, dtype=torch.uint8, device=device)
        pin = device.type == "cuda"
        self.hosts = [
            torch.empty(int_mib * mib, dtype=torch.uint8, pin_memory=pin) for _ in range(2)
        ]
        self.events: list[Event | None] = [None, None]
        self.turn = 0

    def adopt(self, wrapper: Any) -> Any:
        """Let a new wrapper use the shared buffers instead of its own; returns the wrapper."""
        wrapper._int_workspace_buffer = self.ints
        wrapper._pin_memory_int_workspace_buffer = self.hosts[0]
        return wrapper

    def plan(self, wrapper: Any, call: Callable[[], None]) -> None:
        """Call the wrapper's plan with a host buffer that no copy still reads.

        `plan` fills a pinned buffer and starts a copy from it. The copy waits behind the running
        step, and the next plan must not fill the same buffer before. So two buffers take turns.
        """
        self.turn = 1 - self.turn
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        wrapper._pin_memory_int_workspace_buffer = self.hosts[self.turn]
        call()
        self.events[self.turn] = mark(self.ints.device)


class FlashInferBackend:
    """Attention by FlashInfer; decode uses tensor cores at every group size by default."""

    name = "fi"

    def __init__(
        self,
        pool: KVPool,
        tables: TableManager,
        num_qo_heads: int,
        sm_scale: float,
        use_tensor_cores: bool = True,
    ) -> None:
        self.flashinfer = import_flashinfer()
        self.pool, self.tables = pool, tables
        cache = pool.k_cache(0)
        self.page_size, num_kv_heads, head_dim = cache.shape[1:]
        self.heads = (num_qo_heads, num_kv_heads, head_dim)
        self.scale, self.use_tensor_cores = sm_scale, use_tensor_cores
        self.device, self.dtype = cache.device, cache.dtype
        self.workspace = Workspace(self.device)
        self.ring = StagingRing(self.device)
        make, floats = self.workspace.adopt, self.workspace.floats
        self.prefill = make(self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD"))
        self.decode = make(
            self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                floats, "NHD", use_tensor_cores=use_tensor_cores
            )
        )
        self.graph_indices = torch.empty(0, dtype=torch.int32, device=self.device)

    def plan_prefill(self, meta: AttentionMetadata, indices: Tensor) -> None:
        """Plan the prefill wrapper; its mask is causal with the offset of the cached tokens."""
        num_qo_heads, num_kv_heads, head_dim = self.heads
        self.prefill.plan(
            torch.from_numpy(meta.qo_indptr),
            torch.from_numpy(meta.kv_indptr),
            indices,
            torch.from_numpy(meta.last_page_len),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            page_size=self.page_size,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def plan_decode(self, wrapper: Any, meta: AttentionMetadata, indices: Tensor) -> None:
        """Plan a decode wrapper; the small arrays stay on the host, where it reads them."""
        num_qo_heads, num_kv_heads, head_dim = self.heads
        wrapper.plan(
            torch.from_numpy(meta.kv_indptr),
            indices,
            torch.from_numpy(meta.last_page_len),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=self.page_size,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Plan the wrapper of the batch's phase."""
        indices = torch.empty(len(meta.kv_indices), dtype=torch.int32, device=self.device)
        self.ring.send([meta.kv_indices], indices)
        if meta.phase is Phase.DECODE:
            self.workspace.plan(self.decode, lambda: self.plan_decode(self.decode, meta, indices))
            return FlashInferPlan(self.pool, self.decode, out_loc)
        self.workspace.plan(self.prefill, lambda: self.plan_prefill(meta, indices))
        return FlashInferPlan(self.pool, self.prefill, out_loc)

    def graph_plan(self, batch_size: int, out_loc: Tensor) -> GraphPlan:
        """A wrapper for CUDA graphs; ask for the largest size first: all share its buffer."""
        most = batch_size * (self.tables.page_table.shape[1] // self.page_size)
        if len(self.graph_indices) < most:
            self.graph_indices = torch.empty(most, dtype=torch.int32, device=self.device)
        return FlashInferGraphPlan(self, batch_size, out_loc)


class FlashInferPlan:
    """A wrapper that has been planned for one batch."""

    def __init__(self, pool: KVPool, wrapper: Any, out_loc: Tensor) -> None:
        self.pool, self.wrapper, self.out_loc = pool, wrapper, out_loc

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then one call of the wrapper; returns a tensor of q's shape."""
        cache = (self.pool.k_cache(layer_id), self.pool.v_cache(layer_id))
        store_kv(k, v, *cache, self.out_loc)
        out: Tensor = self.wrapper.run(q.contiguous(), cache)
        return out


class FlashInferGraphPlan:
    """A decode wrapper with its indices in static buffers, so that a CUDA graph can hold it."""

    def __init__(self, backend: FlashInferBackend, batch_size: int, out_loc: Tensor) -> None:
        self.backend, self.batch_size = backend, batch_size
        self.indices = backend.graph_indices
        kv_indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=backend.device)
        last_page_len = torch.ones(batch_size, dtype=torch.int32, device=backend.device)
        self.wrapper = backend.workspace.adopt(
            backend.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                backend.workspace.floats,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=backend.use_tensor_cores,
                paged_kv_indptr_buffer=kv_indptr,
                paged_kv_indices_buffer=self.indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
        )
        self.inner = FlashInferPlan(backend.pool, self.wrapper, out_loc)
        rows = np.full(batch_size, backend.tables.dummy_row, dtype=np.int32)
        ones = np.ones(batch_size, dtype=np.int32)
        page_table = backend.tables.page_table
        self.update(build_metadata(Phase.DECODE, rows, ones, ones, page_table, backend.page_size))

    def update(self, meta: AttentionMetadata) -> None:
        """Copy this batch's pages into the static buffer and plan; outside of the graph."""
        if meta.batch_size != self.batch_size:
            raise ValueError(f"batch_size: must be {self.batch_size}, got {meta.batch_size}")
        backend = self.backend
        backend.ring.send([meta.kv_indices], self.indices)
        indices = self.indices[: len(meta.kv_indices)]
        backend.workspace.plan(
            self.wrapper, lambda: backend.plan_decode(self.wrapper, meta, indices)
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store and attend over the static buffers."""
        return self.inner.run(q, k, v, layer_id)
