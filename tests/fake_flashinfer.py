"""FlashInfer's wrappers, as far as our backend uses them, on a CPU.

Constructors, `plan` and `run` take the arguments of flashinfer-python 0.6.13. As in the real
library `plan` keeps the batch in the wrapper, and `run` trusts what it finds there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.torch_backend import causal_mask, grouped_attention


class Wrapper:
    """Reads the pages that the last plan named."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()

    def keep(
        self, qo_indptr: Tensor, kv_indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        heads: tuple[int, int, int], page_size: int, causal: bool, **options: Any,
    ) -> None:  # fmt: skip
        arrays = (qo_indptr, kv_indptr, indices, last_page_len)
        assert {(t.dtype, t.device.type) for t in arrays} == {(torch.int32, "cpu")}
        assert options.keys() == {"sm_scale", "q_data_type", "kv_data_type"}
        assert int(kv_indptr[-1]) == len(indices)
        self.arrays = tuple(t.clone() for t in arrays)
        self.heads, self.page_size, self.causal, self.options = heads, page_size, causal, options

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        qo_indptr, kv_indptr, indices, last_page_len = self.arrays
        assert q.is_contiguous() and q.dtype == self.options["q_data_type"]
        assert q.shape == (int(qo_indptr[-1]), self.heads[0], self.heads[2])
        starts = zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True)
        for i, (rows, pages) in enumerate(starts):
            length = (pages[1] - pages[0] - 1) * self.page_size + int(last_page_len[i])
            k, v = (self.gather(cache, indices[slice(*pages)], length) for cache in paged_kv_cache)
            extend = rows[1] - rows[0]
            mask = causal_mask(extend, length, q.device) if self.causal else None
            scale = self.options["sm_scale"]
            out[slice(*rows)] = grouped_attention(q[slice(*rows)], k, v, scale=scale, mask=mask)
        return out

    def gather(self, cache: Tensor, pages: Tensor, length: int) -> Tensor:
        """Keys or values of one request."""
        assert cache.shape[1:] == (self.page_size, *self.heads[1:])
        return cache[pages.long()].flatten(0, 1)[:length]


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, causal: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.keep(qo_indptr, *pages, heads, page_size, causal, **options)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        rows = torch.arange(len(indptr), dtype=torch.int32)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self.keep(rows, indptr, indices, last_page_len, heads, page_size, False, **options)
