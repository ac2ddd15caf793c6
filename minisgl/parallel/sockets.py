"""Ranks as processes: collective operations on CPU tensors and Python objects over sockets.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

START_SECONDS = 600.0  # for a process to start and import torch on a busy machine


class CommError(RuntimeError):
    """A collective operation failed: another rank died, hangs, or made a different call."""


def socket_pairs(size: int) -> list[list[socket.socket]]:
    """Connect rank 0 with each other rank; return the sockets of each rank.

    A rank's process closes those of the others, or their end would not be noticed.
    """
    pairs = [socket.socketpair() for _ in range(size - 1)]
    return [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]


def memory_of(x: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def fill(link: socket.socket, into: memoryview) -> None:
    """Read as many bytes as `into` has; raise ConnectionError if the other process has ended."""
    while len(into):
        count = link.recv_into(into)
        if count == 0:
            raise ConnectionError("connection closed by the other rank")
        into = into[count:]


def send(link: socket.socket, content: bytes | memoryview) -> None:
    """Send a message: its length in 8 bytes, then its content."""
    link.sendall(len(content).to_bytes(8, "little"))
    link.sendall(content)


def receive(link: socket.socket, into: memoryview | None = None) -> memoryview:
    """Return a message, read into the given memory; ConnectionError for another length."""
    fill(link, memoryview(head := bytearray(8)))
    length = int.from_bytes(head, "little")
    into = memoryview(bytearray(length)) if into is None else into
    if length != len(into):
        raise ConnectionError(f"{length} bytes in place of {len(into)}: ranks call differently")
    fill(link, into)
    return into


class SocketComm:
    """One rank of a group of processes, with the sockets of `socket_pairs`.

    Operations on tensors give up after `timeout` seconds, because all ranks compute at the same
    pace. `broadcast_object` has no timeout; a dead rank's connection closes and ends that wait.
    `on_failure()` is called when an operation fails; it may raise a better error than CommError.
    When `__init__` returns, all ranks are there.
    """

    def __init__(
        self, links: Sequence[socket.socket], rank: int, size: int, timeout: float = 60.0
    ) -> None:
        self.links, self.rank, self.size = list(links), rank, size
        self.on_failure: Callable[[], None] = lambda: None
        self.timeout = START_SECONDS  # processes start at different speeds
        self.barrier()
        self.timeout = timeout

    @contextmanager
    def attempt(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Bound each wait of the block, and turn its errors into CommError."""
        try:
            for link in self.links:
                link.settimeout(timeout)
            yield
        except (OSError, RuntimeError) as error:
            self.on_failure()
            raise CommError(f"{what} on rank {self.rank} of {self.size}: {error}") from error

    def _await(self, link: socket.socket) -> None:
        """Wait for a message on one socket; raise ConnectionError if any rank has ended."""
        poll, limit = select.poll(), link.gettimeout()
        for each in self.links:
            poll.register(each, select.POLLIN if each is link else 0)  # a hang-up always shows
        events = dict(poll.poll(None if limit is None else 1000 * limit))
        if not events:
            raise TimeoutError("timed out")
        if link.fileno() not in events:
            raise ConnectionError("connection closed by another rank")

    def _collect(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Send `x` to rank 0, which gets a tensor like its `x` from each other rank, in order."""
        for link in self.links:
            if self.rank == 0:
                part = torch.empty_like(x)
                self._await(link)
                receive(link, memory_of(part))
                yield part
            else:
                send(link, memory_of(x))

    def _spread(self, x: torch.Tensor) -> None:
        """Copy `x` of rank 0 into the `x` of all others."""
        for link in self.links:
            if self.rank == 0:
                send(link, memory_of(x))
            else:
                receive(link, memory_of(x))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks; a contiguous `x` is overwritten."""
        x = x.contiguous()
        with self.attempt("all_reduce", self.timeout):
            for part in self._collect(x):
                x += part
            self._spread(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x`, equal in shape and dtype, along `dim`."""
        together = x.new_empty(self.size, *x.shape)
        with self.attempt("all_gather", self.timeout):
            together[0] = x
            for rank, part in enumerate(self._collect(x.contiguous()), 1):
                together[rank] = part
            self._spread(together)
        return torch.cat(together.unbind(), dim)

    def min_ints(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over the ranks; all pass the same number of values."""
        x = torch.tensor(list(values), dtype=torch.int64)
        with self.attempt("min_ints", self.timeout):
            for part in self._collect(x):
                x = torch.minimum(x, part)
            self._spread(x)
        lowest: list[int] = x.tolist()
        return lowest

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        self.min_ints([0])

    def broadcast_object(self, obj: Any, src: int = 0, kind: Any = Any) -> Any:
        """Return the message of rank `src` on every rank; receivers check that it is a `kind`.

        The format is MessagePack. Rank `src` gets `obj` itself; another kind raises
        msgspec.ValidationError on the others.
        """
        content: bytes | memoryview = msgspec.msgpack.encode(obj) if self.rank == src else b""
        with self.attempt("broadcast"):
            if self.rank == src != 0:
                send(self.links[0], content)
            elif self.rank == 0 != src:
                self._await(self.links[src - 1])
                content = receive(self.links[src - 1])
            for link in self.links:
                if self.rank == 0:
                    send(link, content)
                else:
                    content = receive(link)
        return obj if self.rank == src else msgspec.msgpack.decode(content, type=kind)

    def close(self) -> None:
        """Leave the group; all ranks call this once nothing uses it."""
        for link in self.links:
            link.close()
