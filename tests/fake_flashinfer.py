"""FlashInfer's wrappers, as far as our backend uses them, on a CPU.

Constructors and `plan` take the arguments of flashinfer-python 0.6.13 in its order. As in the real
library a planner puts its numbers into the integer workspace, and `run` trusts what it finds there:
a plan that another one has overwritten gives an error here and nonsense there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.torch_backend import causal_mask, grouped_attention

MODULE = "_cached_module"  # where a planned wrapper keeps its module; another version, another name


class Planner:
    """The compiled module behind a wrapper; all wrappers of the process share it."""

    def __init__(self) -> None:
        self.hosts: list[int] = []  # addresses of the host buffers that were filled

    def plan(
        self,
        floats: Tensor, ints: Tensor, host: Tensor,
        qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, total_rows: int, batch_size: int,
        num_qo_heads: int, num_kv_heads: int, page_size: int, cuda_graph: bool,
        head_dim: int, head_dim_vo: int, causal: bool, window_left: int,
        fixed_split_size: int, disable_split_kv: bool, num_colocated_ctas: int,
    ) -> list[int]:  # fmt: skip
        arrays = (qo_indptr, kv_indptr, kv_lens)
        assert {(t.dtype, t.device.type) for t in arrays} == {(torch.int32, "cpu")}
        assert [len(t) for t in arrays] == [batch_size + 1, batch_size + 1, batch_size]
        assert floats.dtype == ints.dtype == host.dtype == torch.uint8
        assert (fixed_split_size, disable_split_kv, window_left) == (-1, False, -1)
        numbers = torch.cat([*arrays, torch.tensor([total_rows], dtype=torch.int32)])
        for buffer in (host, ints):
            buffer.view(torch.int32)[: len(numbers)] = numbers
        self.hosts.append(host.data_ptr())
        heads = [num_qo_heads, num_kv_heads, head_dim, head_dim_vo]
        return [batch_size, total_rows, *heads, page_size, int(cuda_graph), int(causal)]


PLANNER = Planner()


class Wrapper:
    """What all wrappers share: workspaces, and a plan whose numbers lie in one of them."""

    def __init__(self, floats: Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        assert kv_layout == "NHD" and floats.dtype == torch.uint8 and not floats.any()
        self._float_workspace_buffer = floats
        self._int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self.use_cuda_graph = use_cuda_graph
        self.hosts_used: list[int] = []
        self._backend = "fa2"

    def keep(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor, page_size: int,
        heads: tuple[int, int, int], causal: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        assert options.keys() == {"sm_scale", "q_data_type", "kv_data_type"}
        self.hosts_used.append(self._pin_memory_int_workspace_buffer.data_ptr())
        self.options, self.page_size, self.heads, self.causal = options, page_size, heads, causal
        setattr(self, MODULE, PLANNER)
        self._plan_info = PLANNER.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            qo_indptr, kv_indptr, kv_lens, int(qo_indptr[-1]), len(kv_lens),
            *heads[:2], page_size, self.use_cuda_graph, heads[2], heads[2], causal,
            -1, -1, False, 0,
        )  # fmt: skip

    def planned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row pointers and lengths from the workspace, where a newer plan may have been."""
        size = self._plan_info[0]
        numbers = self._int_workspace_buffer.view(torch.int32)[: 3 * size + 3]
        qo_indptr, kv_indptr, kv_lens, rows = numbers.split([size + 1, size + 1, size, 1])
        assert rows.item() == self._plan_info[1] == qo_indptr[-1], "another plan's numbers"
        return qo_indptr, kv_indptr, kv_lens

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """One dense attention per request."""
        assert q.is_contiguous() and q.dtype == self.options["q_data_type"]
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        out = torch.empty_like(q)
        for rows, k, v in zip(self.rows(q), keys, values, strict=True):
            assert k.shape[1:] == self.heads[1:]
            mask = causal_mask(rows.stop - rows.start, len(k), q.device) if self.causal else None
            scale = self.options["sm_scale"]
            out[rows] = grouped_attention(q[rows], k, v, scale=scale, mask=mask)
        return out

    def rows(self, q: Tensor) -> list[slice]:
        """Rows of q of each request."""
        bounds = self.planned()[0].tolist()
        assert bounds[-1] == len(q)
        return [slice(*pair) for pair in pairwise(bounds)]


class PagedWrapper(Wrapper):
    """Reads the pages that its buffers name, as far as the plan says."""

    _paged_kv_indptr_buf: Any
    _paged_kv_indices_buf: Any
    _paged_kv_last_page_len_buf: Any

    def lengths(self, kv_indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
        return ((kv_indptr.diff() - 1) * page_size + last_page_len).int()

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None = None
    ) -> Tensor:
        _, kv_indptr, kv_lens = self.planned()
        starts, last = self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf
        assert torch.equal(starts, kv_indptr), "planned for other pages"
        assert torch.equal(self.lengths(starts, last, self.page_size), kv_lens)
        caches: list[list[Tensor]] = [[], []]
        for i, length in enumerate(kv_lens.tolist()):
            pages = self._paged_kv_indices_buf[starts[i] : starts[i + 1]].long()
            for kept, cache in zip(caches, paged_kv_cache, strict=True):
                assert cache.shape[1] == self.page_size
                kept.append(cache[pages].flatten(0, 1)[:length])
        y = self.attend(q, *caches)
        return y if out is None else out.copy_(y)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
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
        lens = self.lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        assert options["causal"]
        self.keep(qo_indptr, paged_kv_indptr, lens, page_size, heads, **options)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, False)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> None:
        assert options["causal"]
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._kv_indptr_buf = kv_indptr.clone()
        self.keep(qo_indptr, kv_indptr, kv_indptr.diff(), 1, heads, **options)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, kv_indptr, kv_lens = self.planned()
        assert torch.equal(kv_indptr, self._kv_indptr_buf), "planned for other keys"
        counts = kv_lens.tolist()
        return self.attend(q, list(k.split(counts)), list(v.split(counts)))


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
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
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

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
        rows = torch.arange(len(indptr), dtype=torch.int32)
        lens = self.lengths(indptr, last_page_len, page_size)
        self.keep(rows, indptr, lens, page_size, (num_qo_heads, num_kv_heads, head_dim), **options)
