"""Build an attention backend by name.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionPlan, GraphPlan
from minisgl.attention.metadata import AttentionMetadata
from minisgl.core import Phase
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool


class PairBackend:
    """One backend for prefill, another for decode and its graphs."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name},{decode.name}"
        self.prefill = prefill
        self.decode = decode

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """The plan of the backend that owns this batch's phase."""
        chosen = self.decode if meta.phase is Phase.DECODE else self.prefill
        return chosen.plan(meta, out_loc)

    def graph_plan(self, batch_size: int, out_loc: Tensor) -> GraphPlan:
        """The decode backend's graph plan: only decode is captured."""
        return self.decode.graph_plan(batch_size, out_loc)


BACKENDS = {
    "torch": "minisgl.attention.torch_backend:TorchBackend",
    "triton": "minisgl.attention.triton_backend:TritonBackend",
    "fi": "minisgl.attention.flashinfer_backend:FlashInferBackend",
}


def load(name: str) -> Any:
    """The class of a backend; imported here, because its library may not be installed."""
    module, cls = BACKENDS[name].split(":")
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise ImportError(
            f"attention_backend: {name!r} needs {error.name}, which is not installed; "
            "try pip install 'minisgl[cuda]', or choose 'torch'"
        ) from error


def create_backend(
    name: str,
    *,
    pool: KVPool,
    tables: TableManager,
    num_qo_heads: int,
    sm_scale: float | None = None,
) -> AttentionBackend:
    """The backend `name`, or `"prefill,decode"` for a pair; `sm_scale` defaults to head_dim^-0.5.

    Raises ValueError for an unknown name and ImportError when a backend's library is missing.
    """
    prefill, comma, decode = name.partition(",")
    unknown = {prefill, decode if comma else prefill} - BACKENDS.keys()
    if unknown:
        raise ValueError(
            f"attention_backend: must be one of {', '.join(BACKENDS)} or a pair, got {name!r}"
        )
    scale = pool.k_cache(0).shape[-1] ** -0.5 if sm_scale is None else sm_scale

    def build(part: str) -> AttentionBackend:
        built: AttentionBackend = load(part)(pool, tables, num_qo_heads, scale)
        return built

    if not comma or prefill == decode:
        return build(prefill)
    return PairBackend(build(prefill), build(decode))
