"""What the ranks of the tensor-parallel tests do; importable, because processes are spawned."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.config.model import ModelConfig
from minisgl.models.registry import build_model
from minisgl.models.weights import load_weights
from minisgl.parallel.comm import Comm
from minisgl.runtime.launch import RankProcesses, join
from tests.dense import dense_batch


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
        group.gather()


def orphan() -> None:
    """Start another rank, print its process id, and die without closing anything."""
    group = RankProcesses(sleep_long, ranks=range(1, 2), size=2)
    join(group.store, 0, 2, 60.0, "cpu")
    print(group.processes[1].pid, flush=True)
    os.kill(os.getpid(), 9)
