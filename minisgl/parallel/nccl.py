"""Ranks with a GPU each: sums by our own kernels or NCCL, everything else over sockets.

Generated from notebooks/10a_gpu_all_reduce.ipynb: edit there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from minisgl.parallel.comm import Comm
from minisgl.parallel.sockets import SocketComm

CLOSE_SECONDS = 3.0  # to wait for ranks that may have died
logger = logging.getLogger("minisgl.parallel")


def map_buffers(mine: Tensor, comm: Comm) -> list[Tensor]:
    """Map the buffers of all ranks, in order, into this rank's GPU; [] if that fails."""
    index, why = mine.device.index, None
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    torch.cuda.synchronize(mine.device)
    try:
        if not all(torch.cuda.can_device_access_peer(index, other) for other in others):
            raise RuntimeError("this GPU has no access to the memory of another one")
        handle = reduce_tensor(mine)[1]
    except RuntimeError as error:
        handle, why = None, error
    sent = handle and handle[7:14]  # the place of the memory; the types before it are our own
    handles = [comm.broadcast_object(sent, src=rank) for rank in range(comm.size)]
    found = []
    try:
        for rank, where in enumerate(handles if handle and all(handles) else []):
            # Mapped for our own GPU, or theirs would get a context of ours; no event to await.
            # No public call maps for a GPU other than the sender's: these are a pickle's arguments.
            args = [*handle[:6], index, *where, False]
            found.append(mine if rank == comm.rank else rebuild_cuda_tensor(*args))
    except RuntimeError as error:
        found, why = [], error
    if comm.min_ints([len(found)]) == [comm.size]:
        return found
    if why is not None:
        logger.warning("all-reduce: NCCL sums everything on rank %d: %s", comm.rank, why)
    return []


def use_loopback() -> None:
    """Connect ranks inside this machine only, unless NCCL_SOCKET_IFNAME names an interface."""
    names = {name for _, name in socket.if_nameindex()}
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def leave_group() -> None:
    """Leave the NCCL group of this process, if any, without waiting long for dead ranks."""

    def leave() -> None:
        with suppress(RuntimeError):  # ranks left in another way: nothing to do
            dist.destroy_process_group()

    if dist.is_initialized():
        leaving = threading.Thread(target=leave, daemon=True, name="leave group")
        leaving.start()
        leaving.join(CLOSE_SECONDS)


class NcclComm(SocketComm):
    """A `SocketComm` whose CUDA tensors stay on the GPUs; its calls can be captured in a graph.

    An operation is put into the current stream and returns at once; the stream keeps the order.
    Sums of few rows use our own kernel if every GPU can write to the others' memory.
    """

    def __init__(
        self, links: Sequence[socket.socket], rank: int, size: int, device: torch.device,
        timeout: float = 60.0,
    ) -> None:  # fmt: skip
        torch.cuda.set_device(device)
        super().__init__(links, rank, size, timeout)
        use_loopback()
        self.folder = TemporaryDirectory(prefix="minisgl-ranks-") if rank == 0 else None
        folder = self.broadcast_object(self.folder and self.folder.name, kind=str)
        store: Any = dist.FileStore(os.path.join(folder, "store"), -1)  # type: ignore[attr-defined]
        limit = timedelta(seconds=timeout)
        with self.attempt("connect"):
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit)
        from minisgl.kernels import all_reduce  # Triton may be missing

        self.kernels, self.device = all_reduce, device
        self.peers: dict[tuple[int, torch.dtype], Any] = {}
        self.views: list[Tensor] = []  # memory of all ranks, ours and mapped
        self.quit = torch.zeros(1, dtype=torch.int32, device=device)  # fails on a full GPU
        self.one = torch.ones(1, dtype=torch.int32).pin_memory()
        self.barrier()  # a failed rank is detected here, within our own timeout
        self.all_reduce(self.quit)  # the first call connects, which takes long
        torch.cuda.synchronize(device)

    def peers_for(self, x: Tensor) -> Any:
        """Return the shared memory for an all-reduce of x [m, n], or None.

        All ranks allocate it at the first call: the first sum of a width must not be captured.
        """
        few = x.is_cuda and x.ndim == 2 and 0 < len(x) <= self.kernels.MAX_ROWS
        usual = x.is_floating_point() and x.itemsize in self.kernels.BITS
        if not (few and usual and x.shape[1] <= self.kernels.MAX_WIDTH):
            return None
        key = x.shape[1], x.dtype
        if key not in self.peers:
            self.peers[key] = self.share(*key)
        return self.peers[key]

    def share(self, width: int, dtype: torch.dtype) -> Any:
        """Allocate buffers for rows of one width that all ranks map; None if they cannot."""
        rows, empty = self.kernels.MAX_ROWS, self.kernels.empty_entry(dtype)
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        mine = torch.full((3, self.size, rows, width), empty, dtype=bits, device=self.device)
        views = map_buffers(mine, self)
        if not views:
            return None
        self.views += views
        addresses = torch.tensor([view.data_ptr() for view in views], device=self.device)
        turns = torch.zeros(rows, dtype=torch.int32, device=self.device)
        return self.kernels.PeerBuffers(addresses, turns, self.quit, self.rank, width)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks; it may be overwritten, and the sum may be new memory."""
        if not x.is_cuda:
            return SocketComm.all_reduce(self, x)
        x = x.contiguous()
        if (peers := self.peers_for(x)) is None:
            with self.attempt("all_reduce"):
                dist.all_reduce(x)
            return x
        total: Tensor = self.kernels.all_reduce(x, peers)
        return total

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' `x`, equal in shape and dtype, along `dim`."""
        if not x.is_cuda:
            return SocketComm.all_gather(self, x, dim)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.attempt("all_gather"):
            dist.all_gather(parts, x)
        return torch.cat(parts, dim)

    def all_reduce_add_norm(
        self, parts: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return (RMSNorm of the sum, the sum) of all ranks' parts [p, m, n] and residual [m, n].

        Return None if our kernels do not support the sizes.
        """
        peers = self.peers_for(residual)
        if peers is None:
            return None
        both: tuple[Tensor, Tensor] = self.kernels.all_reduce_add_norm(
            parts, residual, norm, eps, peers
        )
        return both

    def abort(self) -> None:
        """Free the GPU from waiting for a rank that died; from now on it computes garbage."""
        with suppress(RuntimeError):  # the GPU may be lost too
            torch.cuda.set_device(self.device)  # of this thread
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                self.quit.copy_(self.one, non_blocking=True)  # the copy engine is free
            if (group := dist.group.WORLD) is not None:
                # Its kernels end at once, the call itself with the last graph that contains one.
                threading.Thread(target=group.abort, daemon=True, name="abort NCCL").start()

    def close(self) -> None:
        """Unmap the other ranks' memory and leave the group; all ranks call this."""
        self.peers.clear()
        self.views.clear()
        leave_group()
        for link in self.links if self.folder is not None else ():
            with suppress(OSError):  # a rank that hangs
                link.settimeout(CLOSE_SECONDS)
                link.recv(1)  # its end: the rank has left the store, too
        SocketComm.close(self)
        if self.folder is not None:
            self.folder.cleanup()
