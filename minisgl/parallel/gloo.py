"""Ranks as processes: collective operations on CPU tensors and Python objects over gloo.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

FOREVER = timedelta(days=3650)
PACKET = 1024  # bytes of a message in the first packet
CLOSE_SECONDS = 3.0  # to wait for ranks that may have died


class CommError(RuntimeError):
    """A collective operation failed: another rank died, hangs, or made a different call."""


def use_loopback() -> None:
    """Connect ranks inside this machine only, unless the environment names an interface.

    The variables are GLOO_SOCKET_IFNAME and, for chapter 10a, NCCL_SOCKET_IFNAME.
    """
    names = {name for _, name in socket.if_nameindex()}
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def file_store(folder: str) -> Any:
    """Return the store of a group in `folder`, which no other user can read."""
    store: Any = dist.FileStore  # type: ignore[attr-defined]
    return store(os.path.join(folder, "store"), -1)


class GlooComm:
    """One rank of a group of processes; a process is in one such group at a time.

    Operations on tensors give up after `timeout` seconds, because all ranks compute at the same
    pace. `broadcast_object` has no timeout; a dead rank's connection closes and ends that wait.
    `on_failure()` is called when an operation fails; it may raise a better error than CommError.
    When `__init__` returns, the rank has joined the group of `backend` and met all others.
    """

    backend = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self.on_failure: Callable[[], None] = lambda: None
        self.packet = torch.zeros(PACKET, dtype=torch.uint8)
        use_loopback()
        limit = timedelta(seconds=timeout)
        with self.attempt("connect"):
            dist.init_process_group(
                self.backend, store=store, rank=rank, world_size=size, timeout=limit
            )
            self.barrier()
            self.messages = dist.new_group(timeout=FOREVER, backend="gloo")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Turn the transport's errors into CommError."""
        try:
            yield
        except RuntimeError as error:
            self.on_failure()
            raise CommError(f"{what} on rank {self.rank} of {self.size}: {error}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks; a contiguous `x` is overwritten."""
        x = x.contiguous()
        with self.attempt("all_reduce"):
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x`, equal in shape and dtype, along `dim`."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.attempt("all_gather"):
            dist.all_gather(parts, x)
        return torch.cat(parts, dim)

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over the ranks; all pass the same number of values."""
        x = torch.tensor(list(values), dtype=torch.int64)
        with self.attempt("min_ints"):
            dist.all_reduce(x, op=dist.ReduceOp.MIN)
        lowest: list[int] = x.tolist()
        return lowest

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        self.min_ints([0])

    def broadcast_object(self, obj: Any, src: int = 0, kind: Any = Any) -> Any:
        """Return the message of rank `src` on every rank; receivers check that it is a `kind`.

        The format is MessagePack; a short message takes one packet, its length first. Rank `src`
        gets `obj` itself; another kind raises msgspec.ValidationError on the others.
        """
        content = msgspec.msgpack.encode(obj) if self.rank == src else b""
        start = bytearray(len(content).to_bytes(8, "little") + content[: PACKET - 8])
        self.packet[: len(start)] = torch.frombuffer(start, dtype=torch.uint8)
        self._send(self.packet, src)
        found = self.packet.numpy().tobytes()
        length, found = int.from_bytes(found[:8], "little"), found[8:]
        if length > len(found):
            whole = content if self.rank == src else bytes(length)
            rest = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
            self._send(rest, src)
            found = rest.numpy().tobytes()
        return obj if self.rank == src else msgspec.msgpack.decode(found[:length], type=kind)

    def _send(self, x: torch.Tensor, src: int) -> None:
        """Copy `x` of rank `src` into the `x` of all others; wait without a timeout."""
        with self.attempt("broadcast"):
            dist.broadcast(x, src, group=self.messages)

    def close(self) -> None:
        """Leave the group; all ranks call this once nothing uses it."""
        leave_group()


def leave_group() -> None:
    """Leave the group that this process is in, if any, without waiting long for dead ranks."""

    def leave() -> None:
        with suppress(RuntimeError):  # ranks left in another way: nothing to do
            dist.destroy_process_group()

    if dist.is_initialized():
        leaving = threading.Thread(target=leave, daemon=True, name="leave group")
        leaving.start()
        leaving.join(CLOSE_SECONDS)
