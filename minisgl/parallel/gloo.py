"""Ranks as processes: collective operations on CPU tensors and Python objects over gloo.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # its type stubs lack most of the names that we use


class CommError(RuntimeError):
    """A collective operation failed: another rank died, hangs, or made a different call."""


def open_gloo(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Join a group over the loopback interface; returns when all ranks have joined."""
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout)
    return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, options)


FOREVER = timedelta(days=3650)


class GlooComm:
    """One rank of a group of processes; a process may be in several groups.

    Operations give up after `timeout` seconds, because all ranks compute at the same pace. A
    broadcast waits for ever, because an idle server says nothing; a death closes the connection
    and ends that wait too. `on_failure` is called when an operation fails; it may raise a better
    error.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self.group = open_gloo(store, rank, size, timeout)
        self.buffer = torch.zeros(1024, dtype=torch.uint8)
        self.on_failure: Callable[[], None] = lambda: None

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Turn the transport's errors into ours."""
        try:
            yield
        except RuntimeError as error:
            self.on_failure()
            raise CommError(f"{what} on rank {self.rank} of {self.size}: {error}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        with self.attempt("all_reduce"):
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.attempt("all_gather"):
            self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim)

    def barrier(self) -> None:
        self.min_ints([0])

    def min_ints(self, values: Sequence[int]) -> list[int]:
        x = torch.tensor(list(values), dtype=torch.int64)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        with self.attempt("min_ints"):
            self.group.allreduce([x], options).wait()
        lowest: list[int] = x.tolist()
        return lowest

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """In one packet of 1 KiB, length first; a longer object takes a second one."""
        room = len(self.buffer) - 8
        packet = b""
        if self.rank == src:
            packet = pickle.dumps(obj)
            head = len(packet).to_bytes(8, "little") + packet[:room]
            self.buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.send_from(self.buffer, src)
        if self.rank == src and len(packet) <= room:
            return obj
        head = self.buffer.numpy().tobytes()
        length = int.from_bytes(head[:8], "little")
        if length <= room:
            return pickle.loads(head[8 : 8 + length])
        rest = torch.zeros(length, dtype=torch.uint8)
        if self.rank == src:
            rest = torch.frombuffer(bytearray(packet), dtype=torch.uint8)
        self.send_from(rest, src)
        return obj if self.rank == src else pickle.loads(rest.numpy().tobytes())

    def send_from(self, x: torch.Tensor, src: int) -> None:
        """Copy `x` of rank `src` into the `x` of all others."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = src, 0, FOREVER
        with self.attempt("broadcast"):
            self.group.broadcast([x], options).wait()

    def close(self) -> None:
        """Leave the group, when nothing uses it any more; connections end with this object."""
