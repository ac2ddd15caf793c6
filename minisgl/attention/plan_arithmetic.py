"""How attention work is cut into tiles and chunks: FlashInfer's arithmetic in plain Python.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.attention.metadata import indptr, ragged_arange
from minisgl.core import IntArray


def query_tile(average_packed_len: int, head_dim: int) -> int:
    """Rows of one query tile: 16, 64 or 128, for the average of `tokens * group` over requests."""
    if average_packed_len > 64 and head_dim < 256:
        return 128
    return 64 if average_packed_len > 16 else 16


def items_wanted(num_sms: int, num_kv_heads: int) -> int:
    """Work items that fill the GPU: two blocks per SM, shared among the KV heads."""
    return 2 * num_sms // num_kv_heads


def search_kv_chunk(
    q_tiles: IntArray, kv_pages: IntArray, max_items: int, min_chunk_pages: int
) -> int:
    """The smallest chunk, in pages, that keeps the work items of a batch within `max_items`.

    `q_tiles` and `kv_pages` are int [bs]. If no chunk does, the answer is the longest request:
    query tiles alone fill the GPU, and nothing is split.
    """
    low, high = min_chunk_pages, max(1, int(kv_pages.max(initial=1)))
    while low < high:
        middle = (low + high) // 2
        chunks = (np.maximum(kv_pages, 1) + middle - 1) // middle
        if int((q_tiles * chunks).sum()) > max_items:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, eq=False)
class TilePlan:
    """A batch cut into work items: one query tile of one request against one chunk of its KV."""

    tile_q: int  # rows of a query tile; a row is one (token, query head of the group)
    kv_chunk: int  # tokens of a KV chunk
    split: bool  # some request has more than one chunk: partial results must be merged
    request_indices: IntArray  # [items]
    qo_tile_indices: IntArray  # [items]
    kv_tile_indices: IntArray  # [items]
    merge_indptr: IntArray  # [tokens + 1] partial results of each query token
    o_indptr: IntArray  # [bs + 1] partial results of each request

    @property
    def num_items(self) -> int:
        """Work items per KV head."""
        return len(self.request_indices)


def cut(
    qo_lens: IntArray, q_tiles: IntArray, chunks: IntArray, tile_q: int, kv_chunk: int
) -> TilePlan:
    """List the work items: requests in order, in each its query tiles, in each its KV chunks."""
    tiles_of = np.repeat(np.arange(len(q_tiles), dtype=np.int32), q_tiles)  # request of each tile
    tile_index = ragged_arange(np.zeros_like(q_tiles), q_tiles)
    chunks_of = chunks[tiles_of]  # chunks of each tile
    return TilePlan(
        tile_q=tile_q,
        kv_chunk=kv_chunk,
        split=bool((chunks > 1).any()),
        request_indices=np.repeat(tiles_of, chunks_of),
        qo_tile_indices=np.repeat(tile_index, chunks_of),
        kv_tile_indices=ragged_arange(np.zeros_like(chunks_of), chunks_of),
        merge_indptr=indptr(np.repeat(chunks, qo_lens)),
        o_indptr=indptr(qo_lens * chunks),
    )


def plan_tiles(
    qo_lens: IntArray,
    kv_lens: IntArray,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_sms: int,
    tile_q: int | None = None,
) -> TilePlan:
    """Cut a batch for a GPU of `num_sms` multiprocessors; `qo_lens`, `kv_lens` are tokens [bs].

    `tile_q` None: chosen from the average number of packed query rows.
    """
    packed = qo_lens * (num_qo_heads // num_kv_heads)
    if tile_q is None:
        tile_q = query_tile(int(packed.sum()) // len(packed), head_dim)
    q_tiles = (packed + tile_q - 1) // tile_q
    kv_pages = (kv_lens + page_size - 1) // page_size
    max_items = items_wanted(num_sms, num_kv_heads)
    pages = search_kv_chunk(q_tiles, kv_pages, max_items, max(128 // page_size, 1))
    chunks = (np.maximum(kv_pages, 1) + pages - 1) // pages
    return cut(qo_lens, q_tiles, chunks, tile_q, pages * page_size)
