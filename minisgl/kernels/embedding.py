"""Vectors of token ids from one rank's shard of the vocabulary.

Generated from notebooks/05d_gemm.ipynb: edit there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def embed_kernel(ids_ptr, weight_ptr, out_ptr, first, rows, WIDTH, BLOCK: tl.constexpr):
    """Copy BLOCK columns of one token's vector; ids of other ranks' shards give zeros."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + token) - first
    inside = cols < WIDTH
    mine = (local >= 0) & (local < rows)
    place = tl.where(mine, local, 0) * WIDTH + cols
    vector = tl.load(weight_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + token * WIDTH + cols, tl.where(mine, vector, 0.0), mask=inside)


def embed(ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Gather vectors [n, width] of ids int64 [n]; weight [rows, width] starts at id `first`."""
    rows, width = weight.shape
    out = torch.empty(len(ids), width, dtype=weight.dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(width))
    embed_kernel[(len(ids), triton.cdiv(width, block))](
        ids, weight, out, first, rows, width, BLOCK=block
    )
    return out
