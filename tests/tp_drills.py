"""What the ranks of the tensor-parallel tests do; importable, because processes are spawned."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config.model import ModelConfig
from minisgl.models.registry import build_model
from minisgl.models.weights import load_weights
from minisgl.parallel.comm import Comm
from minisgl.runtime.ranks import Place, RankProcesses, join
from minisgl.runtime.supervisor import WorkerFailed
from tests.dense import dense_batch

# A server process that has imported torch once is forked for every rank: seconds less per test.
multiprocessing.set_forkserver_preload(["tests.tp_drills", "minisgl.runtime.ranks"])
QUICK: dict[str, Any] = {"method": "forkserver"}


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `Ranks` starts are forked from it, too."""
    monkeypatch.setitem(RankProcesses.__init__.__kwdefaults__, "method", "forkserver")


class ThreadComm:
    """One rank of a group of threads: the protocol of `Comm` by a table and a barrier."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.table, self.gate = rank, len(table), table, barrier

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank laid down, in the order of the ranks."""
        self.table[self.rank] = mine
        self.gate.wait()  # everything lies there
        everything = list(self.table)
        self.gate.wait()  # all have read it: the table may be used again
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
    table, barrier = [None] * size, threading.Barrier(size, timeout=timeout)

    def rank(index: int) -> Any:
        try:
            return function(ThreadComm(index, table, barrier), *args)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def results(group: RankProcesses, timeout: float) -> list[Any]:
    """What the entries of all ranks returned, in order; WorkerFailed as soon as one fails."""
    deadline = time.monotonic() + timeout
    while len(group.ended) < len(group.processes):
        group.listen(0.2)
        group.check()
        if time.monotonic() > deadline:
            raise WorkerFailed(f"no result within {timeout:g} s")
    group.check()
    return [ending.value for _, ending in sorted(group.ended.items())]


def run_ranks(entry: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `entry(comm, *args)` in `size` new CPU processes; their results in order."""
    with RankProcesses(entry, args, ranks=range(size), size=size, **QUICK) as group:
        return results(group, timeout)


def logits(comm: Comm, folder: Path, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [n, vocab] of whole sequences by this rank's part of the model."""
    model = build_model(ModelConfig.from_path(folder), comm, dtype=torch.float32)
    load_weights(model, folder, comm, device="cpu", dtype=torch.float32, progress=False)
    with torch.inference_mode():
        return model(dense_batch(sequences)).clone()


def collectives(comm: Comm) -> dict[str, Any]:
    """Every operation once."""
    x = torch.arange(6.0).view(2, 3) + 10 * comm.rank
    long = {"text": "x" * 5000, "from": comm.rank}
    comm.barrier()
    return {
        "sum": comm.all_reduce(x.clone()),
        "last": comm.all_gather(x),
        "first": comm.all_gather(x, dim=0),
        "strided": comm.all_gather(x.t()),
        "short": comm.broadcast_object(("from", comm.rank)),
        "long": comm.broadcast_object(long, src=comm.size - 1),
        "nothing": comm.broadcast_object([]),
        "min": comm.min_ints([comm.rank, -comm.rank, 7]),
    }


def collectives_and_logits(
    comm: Comm, folder: Path, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], torch.Tensor]:
    return collectives(comm), logits(comm, folder, sequences)


def cuda_collectives(comm: Comm) -> dict[str, Any]:
    """The operations on CUDA tensors over NCCL, and a sum recorded in a CUDA graph."""
    device = torch.device("cuda", comm.rank)
    x = torch.arange(6.0, device=device).view(2, 3) + 10 * comm.rank
    seen = {"sum": comm.all_reduce(x.clone()), "last": comm.all_gather(x), "cpu": collectives(comm)}
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    comm.all_reduce(static.clone())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = comm.all_reduce(static * 1.0)
    static.fill_(comm.rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    seen["replayed"] = out
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in seen.items()}


def fail_on_last(comm: Comm) -> None:
    """The last rank has a bug, the others wait for it."""
    if comm.rank == comm.size - 1:
        raise ZeroDivisionError("a bug on the last rank")
    comm.all_reduce(torch.zeros(3))


def vanish_on_last(comm: Comm) -> None:
    """The last rank ends without a word, the others wait for a message."""
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), 9)
    comm.broadcast_object(None, src=comm.size - 1)


def hang_on_last(comm: Comm) -> None:
    """The last rank never comes."""
    if comm.rank == comm.size - 1:
        time.sleep(60)
    comm.all_reduce(torch.zeros(3))


def long_silence(comm: Comm) -> str:
    """Rank 0 says something after a while."""
    if comm.rank == 0:
        time.sleep(2.5)
    return comm.broadcast_object("hello" if comm.rank == 0 else None)


def sleep_long(comm: Comm) -> None:
    """Do something that neither needs the others nor notices them."""
    time.sleep(30)


def naive_start() -> None:
    """Start a rank by spawning, as a script without a guard would."""
    with RankProcesses(sleep_long, ranks=range(1, 2), size=2) as group:
        while group.starting():
            group.listen(0.2)


def orphan() -> None:
    """Start another rank, print its process id, and die without closing anything."""
    group = RankProcesses(sleep_long, ranks=range(1, 2), size=2).__enter__()
    join(group.store, Place(0, 2, "cpu", 60.0, 0))
    print(group.processes["rank 1"].pid, flush=True)
    os.kill(os.getpid(), 9)
