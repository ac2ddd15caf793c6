"""FlashInfer's two wrappers, as far as our backend uses them, on a CPU.

Constructors and `plan` take the arguments of flashinfer-python 0.6.13 in its order. A plan keeps
only what the real one keeps; `run` reads the pages that the plan names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.torch_backend import causal_mask, grouped_attention


class Wrapper:
    """What both wrappers share: workspaces, static buffers, a run over the planned pages."""

    def __init__(self, floats: Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        assert kv_layout == "NHD" and floats.dtype == torch.uint8 and not floats.any()
        self._float_workspace_buffer = floats
        self._int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self.use_cuda_graph = use_cuda_graph
        self.hosts_used: list[int] = []

    def keep(self, qo_indptr: Tensor, problem: dict[str, Any], **options: Any) -> None:
        known = {"sm_scale", "q_data_type", "kv_data_type", "causal"}
        assert options.keys() <= known
        self.hosts_used.append(self._pin_memory_int_workspace_buffer.data_ptr())
        self.qo_indptr, self.problem, self.options = qo_indptr, problem, options

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert q.is_contiguous() and q.dtype == self.options["q_data_type"]
        page_size = self.problem["page_size"]
        out = torch.empty_like(q)
        for i in range(len(self.qo_indptr) - 1):
            rows = slice(*self.qo_indptr[i : i + 2].tolist())
            pages = self._paged_kv_indices_buf[slice(*self._paged_kv_indptr_buf[i : i + 2])]
            length = (len(pages) - 1) * page_size + int(self._paged_kv_last_page_len_buf[i])
            k, v = (cache[pages.long()].flatten(0, 1)[:length] for cache in paged_kv_cache)
            assert k.shape[1:] == (self.problem["num_kv_heads"], self.problem["head_dim"])
            mask = None
            if self.options.get("causal"):
                mask = causal_mask(rows.stop - rows.start, length, q.device)
            scale = self.options["sm_scale"]
            out[rows] = grouped_attention(q[rows], k, v, scale=scale, mask=mask)
        return out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, False)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self._paged_kv_indptr_buf = paged_kv_indptr.clone()
        self._paged_kv_indices_buf = paged_kv_indices.clone()
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len.clone()
        problem = {"num_kv_heads": num_kv_heads, "head_dim": head_dim_qk, "page_size": page_size}
        self.keep(qo_indptr.clone(), problem, **options)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        if self.use_cuda_graph:
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr.clone()
            self._paged_kv_last_page_len_buf = last_page_len.clone()
            self._paged_kv_indices_buf = indices.clone()
        problem = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
        self.keep(torch.arange(len(indptr)), problem, **options)
