"""Attention by FlashInfer's kernels: its wrappers, their workspaces, and plans for CUDA graphs.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionPlan, DecodeBuffers, GraphPlan
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.attention.staging import Event, StagingRing, mark
from minisgl.core import Phase
from minisgl.kernels.kv_indices import write_kv_indices
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

    def __init__(self, device: torch.device, float_mib: int = 256, int_mib: int = 8) -> None:
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


RAGGED_TOKENS = 4096  # new tokens from which on a prefill without prefix leaves the pages aside


def reads_batch(meta: AttentionMetadata) -> bool:
    """True if prefill should read k and v as they come: nothing is cached, and there are many."""
    return meta.phase is Phase.PREFILL and meta.no_prefix and meta.num_tokens >= RAGGED_TOKENS


class FlashInferBackend:
    """Attention by FlashInfer; decode uses tensor cores at every group size by default."""

    name = "fi"

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float,
        use_tensor_cores: bool = True,
    ) -> None:  # fmt: skip
        library = self.flashinfer = import_flashinfer()
        self.pool, self.tables = pool, tables
        cache = pool.k_cache(0)
        self.page_size, num_kv_heads, head_dim = cache.shape[1:]
        self.heads = (num_qo_heads, num_kv_heads, head_dim)
        self.scale, self.use_tensor_cores = sm_scale, use_tensor_cores
        self.device, self.dtype = cache.device, cache.dtype
        self.workspace, self.ring = Workspace(self.device), StagingRing(self.device)
        make, floats = self.workspace.adopt, self.workspace.floats
        self.prefill = make(library.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD"))
        self.ragged = make(library.BatchPrefillWithRaggedKVCacheWrapper(floats, "NHD"))
        decode = library.BatchDecodeWithPagedKVCacheWrapper
        self.decode = make(decode(floats, "NHD", use_tensor_cores=use_tensor_cores))
        self.lists_on_device = self.device.type == "cuda"  # who makes kv_indices for a graph
        self.graph_ints = torch.empty(0, dtype=torch.int32, device=self.device)

    def model_args(self) -> dict[str, Any]:
        """Keyword arguments that `plan` of every wrapper takes."""
        num_qo_heads, num_kv_heads, _ = self.heads
        return {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }

    def send_pages(self, meta: AttentionMetadata) -> torch.Tensor:
        """The batch's `kv_indices` in a new tensor on the device."""
        indices = torch.empty(len(meta.kv_indices), dtype=torch.int32, device=self.device)
        self.ring.send([meta.kv_indices], indices)
        return indices

    def plan_prefill(self, meta: AttentionMetadata) -> None:
        """Plan the paged prefill wrapper; its mask is causal behind the cached tokens."""
        self.prefill.plan(
            torch.from_numpy(meta.qo_indptr),
            torch.from_numpy(meta.kv_indptr),
            self.send_pages(meta),
            torch.from_numpy(meta.last_page_len),
            head_dim_qk=self.heads[2],
            page_size=self.page_size,
            causal=True,
            **self.model_args(),
        )

    def plan_ragged(self, meta: AttentionMetadata) -> None:
        """Plan the ragged prefill wrapper: queries and keys are the same rows."""
        rows = torch.from_numpy(meta.qo_indptr)
        args = self.model_args()
        self.ragged.plan(rows, rows, head_dim_qk=self.heads[2], causal=True, **args)

    def plan_decode(self, wrapper: Any, meta: AttentionMetadata, indices: torch.Tensor) -> None:
        """Plan a decode wrapper; the small arrays stay on the host, where it reads them."""
        wrapper.plan(
            torch.from_numpy(meta.kv_indptr),
            indices,
            torch.from_numpy(meta.last_page_len),
            head_dim=self.heads[2],
            page_size=self.page_size,
            **self.model_args(),
        )

    def plan_pages(self, meta: AttentionMetadata, out_loc: Tensor) -> FlashInferPlan:
        """Plan the paged prefill wrapper."""
        self.workspace.plan(self.prefill, lambda: self.plan_prefill(meta))
        return FlashInferPlan(self.pool, self.prefill, out_loc)

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Plan the wrapper that fits: decode, prefill over pages, or prefill without them."""
        if meta.phase is Phase.DECODE:
            indices = self.send_pages(meta)
            self.workspace.plan(self.decode, lambda: self.plan_decode(self.decode, meta, indices))
            return FlashInferPlan(self.pool, self.decode, out_loc)
        if reads_batch(meta):
            self.workspace.plan(self.ragged, lambda: self.plan_ragged(meta))
            return RaggedPlan(self, meta, out_loc)
        return self.plan_pages(meta, out_loc)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> GraphPlan:
        """A wrapper for CUDA graphs; ask for the largest size first: all share its buffer."""
        most = 2 * batch_size + 1 + batch_size * (self.tables.page_table.shape[1] // self.page_size)
        if len(self.graph_ints) < most:
            self.graph_ints = torch.empty(most, dtype=torch.int32, device=self.device)
        return FlashInferGraphPlan(self, batch_size, buffers)


class FlashInferPlan:
    """A paged wrapper that has been planned for one batch."""

    def __init__(self, pool: KVPool, wrapper: Any, out_loc: Tensor) -> None:
        self.pool, self.wrapper, self.out_loc = pool, wrapper, out_loc

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v, then attend; returns a tensor of q's shape."""
        store_kv(k, v, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id), self.out_loc)
        return self.attend(q, layer_id, k, v)

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """One call of the wrapper over the pool; k and v are not looked at."""
        cache = (self.pool.k_cache(layer_id), self.pool.v_cache(layer_id))
        q = q.contiguous()
        out = torch.empty_like(q)  # the wrapper's own would be filled with zeros first
        self.wrapper.run(q, cache, out=out)
        return out


class RaggedPlan(FlashInferPlan):
    """A prefill without any prefix: reads the batch's own k and v as long as it is given them."""

    def __init__(
        self, backend: FlashInferBackend, meta: AttentionMetadata, out_loc: Tensor
    ) -> None:
        super().__init__(backend.pool, backend.ragged, out_loc)
        self.backend, self.meta = backend, meta
        self.paged: FlashInferPlan | None = None

    def attend(
        self, q: Tensor, layer_id: int, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Attend to k and v; without them, now or in a layer before, to the pool."""
        if self.paged is None and (k is None or v is None):
            self.paged = self.backend.plan_pages(self.meta, self.out_loc)
        if self.paged is not None:
            return self.paged.attend(q, layer_id)
        assert k is not None and v is not None
        out: Tensor = self.wrapper.run(q.contiguous(), k.contiguous(), v.contiguous())
        return out


def fast_plan(
    wrapper: Any,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_lens: Tensor,
    *,
    heads: tuple[int, int, int],
    page_size: int,
) -> Any:
    """Only the planner behind a captured tensor-core decode wrapper; returns its plan info.

    The arrays are int32 on the host; `heads` is (query heads, KV heads, head_dim). Works on private
    parts of FlashInfer 0.6, after a first public `plan`; another version raises what it likes.
    """
    num_qo_heads, num_kv_heads, head_dim = heads
    batch_size = len(kv_lens)
    own_split = (-1, False, 0) if wrapper._backend == "fa2" else ()
    return wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        qo_indptr, kv_indptr, kv_lens, batch_size, batch_size,
        num_qo_heads, num_kv_heads, page_size,
        True, head_dim, head_dim, False, -1, *own_split,
    )  # fmt: skip


def agrees(wrapper: Any, call: Callable[[], Any]) -> bool:
    """Whether a short way to plan answers what the wrapper's public `plan` has just answered."""
    try:
        return [int(x) for x in call()] == [int(x) for x in wrapper._plan_info]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


class FlashInferGraphPlan(FlashInferPlan):
    """A decode wrapper over static buffers, so that a CUDA graph can hold it."""

    def __init__(self, backend: FlashInferBackend, batch_size: int, buffers: DecodeBuffers) -> None:
        self.backend, self.batch_size, self.buffers = backend, batch_size, buffers
        self.ints = backend.graph_ints
        sizes = [batch_size + 1, batch_size, len(self.ints) - 2 * batch_size - 1]
        self.kv_indptr, last_page_len, self.indices = self.ints.split(sizes)
        self.qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32)
        wrapper = backend.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace.floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=backend.use_tensor_cores,
            paged_kv_indptr_buffer=self.kv_indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        super().__init__(backend.pool, backend.workspace.adopt(wrapper), buffers.out_loc)
        self.fast = False
        self.fast = backend.use_tensor_cores and self.try_fast_plan()

    def try_fast_plan(self) -> bool:
        """Plan dummy requests the public way and the short way; True if both answer the same."""
        rows = np.full(self.batch_size, self.backend.tables.dummy_row, dtype=np.int32)
        ones = np.ones(self.batch_size, dtype=np.int32)
        table, page_size = self.backend.tables.page_table, self.backend.page_size
        dummies = build_metadata(Phase.DECODE, rows, ones, ones, table, page_size)
        self.update(dummies)
        found: list[bool] = []
        self.backend.workspace.plan(
            self.wrapper,
            lambda: found.append(agrees(self.wrapper, lambda: self.plan_fast(dummies))),
        )
        return found[0]

    def plan_fast(self, meta: AttentionMetadata) -> Any:
        """The planner's answer for a batch."""
        numbers = torch.from_numpy(meta.kv_indptr), torch.from_numpy(meta.seq_lens)
        heads, page_size = self.backend.heads, self.backend.page_size
        return fast_plan(self.wrapper, self.qo_indptr, *numbers, heads=heads, page_size=page_size)

    def write_arrays(self, meta: AttentionMetadata) -> None:
        """Bring row pointers, last lengths and pages into the static buffer."""
        backend, short = self.backend, [meta.kv_indptr, meta.last_page_len]
        if not backend.lists_on_device:
            backend.ring.send([*short, meta.kv_indices], self.ints)
            return
        backend.ring.send(short, self.ints)
        write_kv_indices(
            backend.tables.device_page_table,
            self.buffers.rows,
            self.kv_indptr,
            self.indices,
            page_size=backend.page_size,
            max_pages=-(-meta.max_seq_len // backend.page_size),
        )

    def update(self, meta: AttentionMetadata) -> None:
        """Write this batch's arrays and plan it; outside of the graph, behind the running step."""
        if meta.batch_size != self.batch_size:
            raise ValueError(f"batch_size: must be {self.batch_size}, got {meta.batch_size}")
        self.write_arrays(meta)
        self.backend.workspace.plan(self.wrapper, lambda: self.plan_numbers(meta))

    def plan_numbers(self, meta: AttentionMetadata) -> None:
        """Plan the short way if it works here, else the public way, which copies once more."""
        if self.fast:
            self.wrapper._plan_info = self.plan_fast(meta)
            return
        indices = self.indices[: int(meta.kv_indptr[-1])]
        self.backend.plan_decode(self.wrapper, meta, indices)
