"""Programmatic dependent launch: a kernel may start before its predecessor has ended.

Generated from notebooks/05d_gemm.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minisgl.kernels.device import device_limits


def can_launch_early(x: Tensor) -> bool:
    """Return True if kernels over `x` may launch early (PDL): compute capability 9.0 or above."""
    return not x.is_cpu and device_limits(x.device).capability >= 90


def launch_options(x: Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel that calls `gdc_wait`; none where PDL is missing."""
    return {"PDL": True, "launch_pdl": True} if can_launch_early(x) else {"PDL": False}
