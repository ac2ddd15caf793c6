"""GEMMs on a GPU whose tiles do not depend on the number of rows.

Generated from notebooks/05f_batch_invariance.ipynb: edit there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.linear import Tiling, launch_few_row_gemm


def fixed_tiling(n: int, k: int) -> Tiling:
    """Return tiles for a weight [n, k] and any m; raise ValueError if none divides it."""
    if n % 16 or k % 16 or k < 64:
        must = "multiples of 16, with 64 columns or more"
        raise ValueError(f"deterministic: a weight's sizes must be {must}, got {n}, {k}")
    bn, bk = (next(tile for tile in (64, 32, 16) if size % tile == 0) for size in (n, k))
    return Tiling(bm=64, bn=bn, bk=bk, warps=4, stages=4, swap=False)


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [m, k] by weight [n, k], with bias [n]; ValueError for float32 on a GPU."""
    if x.is_cuda and x.dtype is torch.float32:
        raise ValueError("deterministic: dtype must be float16 or bfloat16 on a GPU, got float32")
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    tiles = fixed_tiling(*weight.shape)
    launch_few_row_gemm(x.contiguous(), weight, out, tiles, bias, gated=False)
    return out
