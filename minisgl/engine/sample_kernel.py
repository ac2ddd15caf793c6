"""The sampling kernel for the engine, where there is a GPU and Triton.

Generated from notebooks/06c_sampling_kernel.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor


def load_sample_kernel(device: torch.device | str) -> Callable[..., Tensor] | None:
    """Import `minisgl.kernels.sample.sample_logits`; None on a CPU or without Triton."""
    if torch.device(device).type != "cuda" or find_spec("triton") is None:
        return None
    kernel: Callable[..., Tensor] = import_module("minisgl.kernels.sample").sample_logits
    return kernel
