"""Triton kernel that writes new keys and values into their slots.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_stride, v_stride, scales_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's K and V into its slot; -1 writes nothing. One thread block per token."""
    KV: tl.constexpr = k_cache_ptr.dtype.element_ty
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        k = tl.load(k_ptr + token * k_stride + column, mask=inside)
        v = tl.load(v_ptr + token * v_stride + column, mask=inside)
        if scales_ptr is not None:
            scales = scales_ptr + column // HEAD_DIM
            k = k.to(tl.float32) / tl.load(scales, mask=inside, other=1.0)
            v = v.to(tl.float32) / tl.load(scales + HEADS, mask=inside, other=1.0)
        tl.store(k_cache_ptr + slot * WIDTH + column, k.to(KV), mask=inside)
        tl.store(v_cache_ptr + slot * WIDTH + column, v.to(KV), mask=inside)


def rows_contiguous(x: Tensor) -> Tensor:
    """Return `x` [n, heads, dim] with each token's numbers contiguous; tokens may be apart."""
    heads_packed = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if heads_packed else x.contiguous()


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_loc: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write k, v [n, kv_heads, head_dim] to slots `out_loc` int64 [n]; slot -1 is skipped.

    The caches are contiguous, [pages, page_size, kv_heads, head_dim]. scales: divisors,
    float32 [2, kv_heads].
    """
    heads, dim = k.shape[1:]
    k, v = rows_contiguous(k), rows_contiguous(v)
    store_kv_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, out_loc, k.stride(0), v.stride(0), scales,
        HEADS=heads, HEAD_DIM=dim, BLOCK=triton.next_power_of_2(heads * dim),
    )  # fmt: skip
