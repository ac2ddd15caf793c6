"""Ranks with a GPU each: CUDA tensors travel over NCCL, everything else over gloo.

Generated from notebooks/10b_ranks.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.parallel.gloo import GlooComm


class NcclComm(GlooComm):
    """Like `GlooComm`, and CUDA tensors stay on the GPUs. Its calls can be captured in a graph.

    An operation is put into the current stream and returns at once; the stream keeps the order.
    """

    backend = "cpu:gloo,cuda:nccl"

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, timeout: float = 60.0
    ) -> None:
        torch.cuda.set_device(device)
        super().__init__(store, rank, size, timeout)
        first = torch.zeros(1, device=device)  # fails on a GPU that is full or not ours
        self.barrier()  # a rank that failed is noticed here, and within our own timeout
        self.all_reduce(first)  # the first call connects, and takes long
        torch.cuda.synchronize(device)
