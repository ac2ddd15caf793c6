"""Build an attention backend by name.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionPlan, DecodeBuffers, GraphPlan
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
        self.plan_free = bool(getattr(decode, "plan_free", False))

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """The plan of the backend that owns this batch's phase."""
        chosen = self.decode if meta.phase is Phase.DECODE else self.prefill
        return chosen.plan(meta, out_loc)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> GraphPlan:
        """The decode backend's graph plan: only decode is captured."""
        return self.decode.graph_plan(batch_size, buffers)


BACKENDS = {
    "torch": "minisgl.attention.torch_backend:TorchBackend",
    "triton": "minisgl.attention.triton_backend:TritonBackend",
    "fi": "minisgl.attention.flashinfer_backend:FlashInferBackend",
    "fused": "minisgl.attention.fused_backend:FusedBackend",  # of chapter 05d; decode only
}
LIBRARIES = {
    "torch": (), "triton": ("triton",), "fi": ("triton", "flashinfer"), "fused": ("triton",)
}  # fmt: skip


def parts_of(name: str) -> tuple[str, str]:
    """Backends for prefill and for decode; ValueError for a name that is neither one nor a pair."""
    prefill, comma, decode = name.partition(",")
    parts = prefill, decode if comma else prefill
    if not BACKENDS.keys() >= set(parts):
        raise ValueError(
            f"attention_backend: must be one of {', '.join(BACKENDS)} or a pair, got {name!r}"
        )
    return parts


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


def available(name: str) -> bool:
    """True if the libraries of a backend, or of both of a pair, are installed; imports none.

    Raises ValueError for an unknown name. Whether there is a GPU is not asked.
    """
    wanted = [library for part in parts_of(name) for library in LIBRARIES[part]]
    return all(find_spec(library) is not None for library in wanted)


def create_backend(
    name: str,
    *,
    pool: KVPool,
    tables: TableManager,
    num_qo_heads: int,
    sm_scale: float | None = None,
    use_tensor_cores: bool = True,
) -> AttentionBackend:
    """The backend `name`, or `"prefill,decode"` for a pair; `sm_scale` defaults to head_dim^-0.5.

    `use_tensor_cores` is for FlashInfer's decode kernels; the others do not look at it.
    Raises ValueError for an unknown name and ImportError when a backend's library is missing.
    """
    prefill, decode = parts_of(name)
    scale = pool.k_cache(0).shape[-1] ** -0.5 if sm_scale is None else sm_scale

    def build(part: str) -> AttentionBackend:
        options = {"use_tensor_cores": use_tensor_cores} if part == "fi" else {}
        built: AttentionBackend = load(part)(pool, tables, num_qo_heads, scale, **options)
        return built

    first = build(prefill)
    return first if prefill == decode else PairBackend(first, build(decode))
