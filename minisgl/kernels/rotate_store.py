"""Norm and rotation of queries and keys, and the store of keys and values, in one pass.

Generated from notebooks/05e_decode_attention.ipynb: edit there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.pdl import launch_options


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def rotate(a, b, norm_a, norm_b, cos, sin, eps,
           HEAD_DIM: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Rotate heads, float32 halves a, b [heads, HEAD_DIM / 2], after RMSNorm if NORM."""
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        a = (a * scale * norm_a).to(DTYPE).to(tl.float32)
        b = (b * scale * norm_b).to(DTYPE).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def store_halves(ptr, a, b, scale, mask, HALF: tl.constexpr):
    """Store both halves of heads, divided by a scale; `ptr` points at the first halves."""
    a, b = a.to(tl.float32) / scale, b.to(tl.float32) / scale
    tl.store(ptr, a.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + HALF, b.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, table_ptr, positions_ptr, slots_ptr, q_ptr, k_cache_ptr,
    v_cache_ptr, scales_ptr, eps, QO: tl.constexpr, KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr, KVS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate one token's queries into q, its keys into qkv and its slot; store its values."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    cols, real, is_q = tl.arange(0, KVS), head < QO + KV, head < QO
    is_k, is_v = real & (head >= QO), cols < KV * HEAD_DIM
    k_scale = 1.0 if scales_ptr is None else tl.load(scales_ptr + head - QO, is_k, 1.0)
    v_scale = 1.0 if scales_ptr is None else tl.load(scales_ptr + KV + cols // HEAD_DIM, is_v, 1.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position, slot = tl.load(positions_ptr + token), tl.load(slots_ptr + token)
    cos = tl.load(table_ptr + position * HEAD_DIM + dim)
    sin = tl.load(table_ptr + position * HEAD_DIM + HALF + dim)
    qkv_ptr += token * (QO + 2 * KV) * HEAD_DIM
    a = tl.load(qkv_ptr + head * HEAD_DIM + dim, mask=real, other=0.0)
    b = tl.load(qkv_ptr + head * HEAD_DIM + HALF + dim, mask=real, other=0.0)
    norm_a, norm_b = cos, sin
    if NORM:
        norm_a = tl.where(is_q, tl.load(q_norm_ptr + dim), tl.load(k_norm_ptr + dim))
        norm_b = tl.where(is_q, tl.load(q_norm_ptr + HALF + dim), tl.load(k_norm_ptr + HALF + dim))
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    a, b = rotate(
        a.to(tl.float32), b.to(tl.float32), norm_a.to(tl.float32), norm_b.to(tl.float32),
        cos, sin, eps, HEAD_DIM, NORM, DTYPE,
    )  # fmt: skip
    a, b = a.to(DTYPE), b.to(DTYPE)
    store_halves(q_ptr + token * QO * HEAD_DIM + head * HEAD_DIM + dim, a, b, 1.0, is_q, HALF)
    store_halves(qkv_ptr + head * HEAD_DIM + dim, a, b, 1.0, is_k, HALF)
    k_place = k_cache_ptr + slot * KV * HEAD_DIM + (head - QO) * HEAD_DIM + dim
    store_halves(k_place, a, b, k_scale, is_k, HALF)
    v = tl.load(qkv_ptr + (QO + KV) * HEAD_DIM + cols, mask=is_v).to(tl.float32) / v_scale
    v_place = v_cache_ptr + slot * KV * HEAD_DIM + cols
    tl.store(v_place, v.to(v_cache_ptr.dtype.element_ty), mask=is_v)


def rotate_and_store(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, table: Tensor,
    positions: Tensor, out_loc: Tensor, k_cache: Tensor, v_cache: Tensor, num_qo_heads: int,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (q, k, v) of the new tokens, normalised and rotated; store k and v in the pool.

    qkv [n, (qo + 2 kv) * head_dim] is changed in place: k and v are views of it. norms: the weights
    [head_dim] of queries and keys. table float32 [max_position, head_dim]: cosines, then sines.
    """
    n, (kv, dim) = len(qkv), k_cache.shape[-2:]
    q = torch.empty(n, num_qo_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms if norms is not None else (table, table)
    rotate_store_kernel[(n,)](
        qkv, q_norm, k_norm, table, positions, out_loc, q, k_cache, v_cache, kv_scales, eps,
        QO=num_qo_heads, KV=kv, HEAD_DIM=dim, HEADS=triton.next_power_of_2(num_qo_heads + kv),
        KVS=triton.next_power_of_2(kv * dim), NORM=norms is not None, num_warps=4,
        **launch_options(qkv),
    )  # fmt: skip
    heads = qkv.view(n, num_qo_heads + 2 * kv, dim)
    return q, heads[:, num_qo_heads : num_qo_heads + kv], heads[:, num_qo_heads + kv :]
