"""Attention by FlashInfer's kernels, through its public wrappers: prefill, and eager decode.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, AttentionPlan
from minisgl.attention.staging import Event, StagingRing, mark
from minisgl.core import Phase
from minisgl.kernels.store_kv import store_kv
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

WORKSPACE_MIB = 256  # scratch of both wrappers, for the parts of split requests


def import_flashinfer() -> ModuleType:
    """Import the library; raise an ImportError with the command that installs it."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            "attention_backend: 'fi' needs flashinfer-python and an NVIDIA GPU; "
            "install it with pip install 'minisgl[cuda]', or choose 'triton' or 'torch'"
        ) from error


class FlashInferBackend:
    """Attention by FlashInfer for eager steps: prefill, and decode on tensor cores."""

    name = "fi"

    def __init__(
        self, pool: KVPool, tables: TableManager, num_qo_heads: int, sm_scale: float
    ) -> None:
        library, self.pool, self.device = import_flashinfer(), pool, pool.buffer.device
        scratch = torch.zeros(WORKSPACE_MIB << 20, dtype=torch.uint8, device=self.device)
        self.prefill = library.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
        decode = library.BatchDecodeWithPagedKVCacheWrapper
        self.decode = decode(scratch, "NHD", use_tensor_cores=True)
        self.ring = StagingRing(self.device)
        self.planned: Event | None = None  # recorded after the copies of the last plan
        self.model_args = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": pool.num_kv_heads,
            "page_size": pool.page_size,
            "sm_scale": sm_scale,
            "q_data_type": pool.buffer.dtype,
            "kv_data_type": pool.buffer.dtype,
        }

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Plan the wrapper of the batch's phase; the previous plan becomes invalid."""
        if self.planned is not None:
            self.planned.synchronize()  # its copies have left the wrapper's host buffers
        (pages,) = self.ring.upload(meta.kv_indices)
        kv_indptr, last = torch.from_numpy(meta.kv_indptr), torch.from_numpy(meta.last_page_len)
        args, head_dim = self.model_args, self.pool.head_dim
        if meta.phase is Phase.DECODE:
            wrapper = self.decode
            wrapper.plan(kv_indptr, pages, last, head_dim=head_dim, **args)
        else:
            wrapper, qo_indptr = self.prefill, torch.from_numpy(meta.qo_indptr)
            wrapper.plan(
                qo_indptr, kv_indptr, pages, last, head_dim_qk=head_dim, causal=True, **args
            )
        self.planned = mark(self.device)
        return FlashInferPlan(self.pool, wrapper, out_loc)


class FlashInferPlan(AttentionPlan):
    """A wrapper with the plan of one batch."""

    def __init__(self, pool: KVPool, wrapper: Any, out_loc: Tensor) -> None:
        self.pool, self.wrapper, self.out_loc = pool, wrapper, out_loc

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v by one kernel, then attend."""
        pool, scales = self.pool, self.pool.scales(layer_id)
        store_kv(k, v, pool.k_cache(layer_id), pool.v_cache(layer_id), self.out_loc, scales)
        return self.attend(q, k, v, layer_id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend with one call of FlashInfer's wrapper over the pool."""
        cache = (self.pool.k_cache(layer_id), self.pool.v_cache(layer_id))
        q = q.contiguous()
        out = torch.empty_like(q)  # the wrapper would fill its own with zeros first
        self.wrapper.run(q, cache, out=out)
        return out
