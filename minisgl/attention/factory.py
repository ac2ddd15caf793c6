"""Build an attention backend by name.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from torch import Tensor

from minisgl.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    DecodeBuffers,
)
from minisgl.core import Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


class HybridBackend:
    """One backend for prefill, another for decode, and one for captured decode steps."""

    def __init__(
        self,
        name: str,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        captured: AttentionBackend,
    ) -> None:
        self.name, self.prefill, self.decode, self.captured = name, prefill, decode, captured

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Plan with the backend of this batch's phase."""
        chosen = self.decode if meta.phase is Phase.DECODE else self.prefill
        return chosen.plan(meta, out_loc)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Plan CUDA-graph replays with the backend that supports capture."""
        return self.captured.graph_plan(batch_size, buffers)


BACKENDS = {
    "torch": "minisgl.attention.torch_backend:TorchBackend",
    "triton": "minisgl.attention.hopper_backend:HopperBackend",  # TritonBackend and chapter 04c
    "fi": "minisgl.attention.flashinfer_backend:FlashInferBackend",
    "fused": "minisgl.attention.fused_backend:FusedBackend",  # decode only
    "store_first": "minisgl.attention.fused_backend:VerifyBackend",  # "fused" for drafts
}
INVARIANT = {  # for deterministic engines: see chapter 05f
    "torch": "minisgl.attention.invariant_torch:InvariantTorchBackend",
    "triton": "minisgl.attention.invariant_triton:InvariantTritonBackend",
}


def backend_pair(name: str) -> tuple[str, str]:
    """Split a name or a pair into the prefill and decode backends; ValueError if unknown."""
    prefill, comma, decode = name.partition(",")
    parts = prefill, decode if comma else prefill
    if not BACKENDS.keys() >= set(parts):
        known = ", ".join(BACKENDS)
        raise ValueError(f"attention_backend: must be one of {known} or a pair, got {name!r}")
    return parts


def load(name: str, deterministic: bool = False) -> Any:
    """Import the class of a backend; its library may be missing, which raises ImportError."""
    module, cls = (INVARIANT if deterministic else BACKENDS)[name].split(":")
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise ImportError(
            f"attention_backend: {name!r} needs {error.name}, which is not installed; "
            "try pip install 'minisgl[cuda]', or choose 'torch'"
        ) from error


logger = logging.getLogger("minisgl.attention")


def create_backend(
    name: str,
    *,
    pool: KVPool,
    tables: TableManager,
    num_qo_heads: int,
    sm_scale: float | None = None,
    deterministic: bool = False,
) -> AttentionBackend:
    """Create backend `name`, or a pair `"prefill,decode"`; `sm_scale` defaults to head_dim^-0.5.

    Raise ValueError for an unknown name, or for one that is not batch-invariant if `deterministic`
    requires that, and ImportError when a backend's library is missing.
    """
    prefill, decode = backend_pair(name)
    if deterministic and name not in INVARIANT:
        raise ValueError(f"attention_backend: must be torch or triton for deterministic: {name!r}")
    captured = "fused" if decode == "fi" else decode
    scale = pool.head_dim**-0.5 if sm_scale is None else sm_scale
    built: dict[str, AttentionBackend] = {
        part: load(part, deterministic)(pool, tables, num_qo_heads, scale)
        for part in dict.fromkeys((prefill, decode, captured))
    }
    if len(built) == 1:
        return built[prefill]
    if captured != decode:
        logger.info("attention_backend: FlashInfer decodes eager steps, %r captured ones", captured)
    return HybridBackend(name, built[prefill], built[decode], built[captured])
