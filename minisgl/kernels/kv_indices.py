"""Triton kernel that lists the pages of a batch from the page table on the device.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # pages that one program copies


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def kv_indices_kernel(
    page_table_ptr, rows_ptr, kv_indptr_ptr, out_ptr, table_stride,
    PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Grid (requests, blocks of pages): copy one block of a row, as pages, to its place."""
    request, block = tl.program_id(0), tl.program_id(1)
    start = tl.load(kv_indptr_ptr + request)
    num_pages = tl.load(kv_indptr_ptr + request + 1) - start
    page = block * PAGES + tl.arange(0, PAGES)
    inside = page < num_pages
    row = tl.load(rows_ptr + request).to(tl.int64)
    slots_ptr = page_table_ptr + row * table_stride + page * PAGE_SIZE
    slots = tl.load(slots_ptr, mask=inside, other=0)
    tl.store(out_ptr + start + page, slots // PAGE_SIZE, mask=inside)


def write_kv_indices(
    page_table: Tensor,
    rows: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
    *,
    page_size: int,
    max_pages: int,
) -> None:
    """Write the pages of all requests, end to end, to the start of `out` int32.

    `page_table` int32 [all rows, max_len] holds slots; `rows` int [bs]; `kv_indptr` int32 [bs + 1].
    `max_pages` is a number on the host, no less than the pages of any request.
    """
    grid = (len(rows), triton.cdiv(max_pages, BLOCK))
    kv_indices_kernel[grid](
        page_table, rows, kv_indptr, out, page_table.stride(0), PAGE_SIZE=page_size, PAGES=BLOCK
    )


def kv_indices_reference(
    page_table: Tensor, rows: Tensor, kv_indptr: Tensor, page_size: int
) -> Tensor:
    """What `write_kv_indices` must write, in plain torch: the oracle of its tests."""
    counts = kv_indptr.diff().tolist()
    parts = [page_table[r, : n * page_size : page_size] for r, n in zip(rows.tolist(), counts)]
    return torch.cat(parts) // page_size
