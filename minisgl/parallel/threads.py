"""Ranks as threads of one process: the protocol of `Comm`, for lessons and tests.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from minisgl.parallel.comm import Comm


class Meeting:
    """The place where the ranks of one group lay down what they have; made once per group."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.table: list[Any] = [None] * size


class ThreadComm:
    """One rank of a group of threads; every call is made by all ranks, in the same order."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank laid down, in the order of the ranks."""
        self.meeting.table[self.rank] = mine
        self.meeting.barrier.wait()  # everything lies there
        everything = list(self.meeting.table)
        self.meeting.barrier.wait()  # everybody has read it: the table may be used again
        return everything

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(x)).sum(0)  # new memory: others still read `x`

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim)

    def barrier(self) -> None:
        self.exchange(None)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.exchange(obj)[src]

    def min_ints(self, values: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self.exchange(list(values)))]


def run_threads(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call `function(comm, *args)` on `size` ranks; their results in order, or the first error."""
    meeting = Meeting(size, timeout)

    def rank(comm: Comm) -> Any:
        try:
            return function(comm, *args)
        except BaseException:
            meeting.barrier.abort()  # nobody waits for a rank that will not come
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, ThreadComm(meeting, index)) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
