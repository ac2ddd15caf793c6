"""Programmatic dependent launch: when a kernel may start before its predecessor has ended.

Generated from notebooks/05d_gemm.ipynb: edit there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_dependent_launch(index: int) -> bool:
    """True if GPU number `index` can start a kernel early: compute capability 9.0 and up."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def can_launch_early(x: Tensor) -> bool:
    """True if kernels over `x` may be launched early."""
    return x.is_cuda and has_dependent_launch(x.device.index or 0)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel that calls `gdc_wait`; none where that means nothing."""
    return {"PDL": True, "launch_pdl": True} if can_launch_early(x) else {"PDL": False}
