"""Small jobs for ranks, importable by the processes that this chapter starts.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from minisgl.parallel.comm import Comm


def greet(comm: Comm) -> dict[str, Any]:
    """Every operation once, and what this rank got."""
    x = torch.tensor([1.0, 10.0]) * (comm.rank + 1)
    comm.barrier()
    return {
        "all_gather": comm.all_gather(x).tolist(),
        "all_reduce": comm.all_reduce(x).tolist(),
        "broadcast_object": comm.broadcast_object({"from": comm.rank}),
        "min_ints": comm.min_ints([comm.rank, -comm.rank]),
    }


def shortest(comm: Comm, function: Any, repeats: int) -> float:
    """Shortest time of `repeats` calls that all ranks make together, in seconds."""
    times = []
    for _ in range(repeats):
        comm.barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def greet_and_time(comm: Comm, counts: Sequence[int]) -> tuple[dict[str, Any], list[float], float]:
    """`greet`, then seconds of an all-reduce of each count of float32, and of an empty message."""
    seen = greet(comm)
    reduced = []
    for x in (torch.ones(n) for n in counts):
        reduced.append(shortest(comm, functools.partial(comm.all_reduce, x), 30))
    return seen, reduced, shortest(comm, functools.partial(comm.broadcast_object, []), 30)


def fail_on(comm: Comm, rank: int) -> None:
    """One rank has a bug; the others wait for its part of a sum."""
    if comm.rank == rank:
        raise ZeroDivisionError("a bug on one rank")
    comm.all_reduce(torch.ones(1))
