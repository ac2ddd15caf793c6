"""Ranks with a GPU each: CUDA tensors travel over NCCL, everything else over gloo.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from minisgl.parallel.gloo import GlooComm, c10d


class NcclComm(GlooComm):
    """Like `GlooComm`, and CUDA tensors stay on the GPUs. Its calls can be captured in a graph.

    An operation is put into the current stream and returns at once; the stream keeps the order.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, timeout: float = 60.0
    ) -> None:
        super().__init__(store, rank, size, timeout)
        torch.cuda.set_device(device)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self.device = device
        self.nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)
        first = torch.zeros(1, device=device)  # fails on a GPU that is full or not ours
        self.barrier()  # a rank that failed is noticed here, and within our own timeout
        self.all_reduce(first)  # the first call connects, and takes long
        torch.cuda.synchronize(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return GlooComm.all_reduce(self, x)
        x = x.contiguous()
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        with self.attempt("all_reduce"):
            work = self.nccl.allreduce([x], options)
            if work is not None:
                work.wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if not x.is_cuda:
            return GlooComm.all_gather(self, x, dim)
        x = x.contiguous()
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        options = c10d.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        with self.attempt("all_gather"):
            work = self.nccl._allgather_base(out, x, options)
            if work is not None:
                work.wait()
        return torch.cat(out.unbind(0), dim)

    def close(self) -> None:
        """Leave the group; all ranks call this, when their graphs are gone."""
        leaving = threading.Thread(target=leave, args=(self.nccl,), daemon=True, name="leave NCCL")
        leaving.start()
        leaving.join(LEAVE_SECONDS)


LEAVE_SECONDS = 3.0  # of waiting for ranks that may have died


def leave(group: Any) -> None:
    """Shut a group down. Errors tell of ranks that left in another way; nobody can act on them."""
    with suppress(RuntimeError):
        group.shutdown()
