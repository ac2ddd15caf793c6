"""The time of a sum over GPUs in a CUDA graph, by size and method.

`python3 -m tests.gpu.all_reduce --out FILE [--size 2] [--width 5120]`; microseconds for rows of
`width` numbers of 16 bits:
  nccl, ours          the sum alone
  one_shot, two_shot  by `torch.ops.symm_mem`, in place in symmetric memory
  nccl+norm, two_shot+norm, ours+norm   with the residual and the norm, in two kernels
  fused               with both, in one
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.runtime.ranks import RankProcesses
from tests.tp_drills import results

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def symmetric(shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, str]:
    """A tensor in PyTorch's symmetric memory, and the name of its group."""
    import torch.distributed._symmetric_memory as symm_mem

    buffer = symm_mem.empty(*shape, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(buffer, dist.group.WORLD)
    return buffer, dist.group.WORLD.group_name


def ways(comm: Any, rows: int, width: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Every way to sum `rows` rows."""
    from minisgl.kernels.norm import add_norm

    x, residual = torch.zeros(2, rows, width, dtype=torch.bfloat16, device=device)
    norm = torch.ones(width, dtype=torch.bfloat16, device=device)
    buffer, group = symmetric((rows, width), device)
    buffer.zero_()
    ops = torch.ops.symm_mem

    def then_norm(call: Callable[[], torch.Tensor]) -> object:
        return add_norm(call()[None], residual, norm, 1e-6)

    found: dict[str, Callable[[], Any]] = {
        "nccl": lambda: dist.all_reduce(x),
        "one_shot": lambda: ops.one_shot_all_reduce(buffer, "sum", group),
        "two_shot": lambda: ops.two_shot_all_reduce_(buffer, "sum", group),
        "ours": lambda: comm.all_reduce(x),
        "fused": lambda: comm.all_reduce_add_norm(x[None], residual, norm, 1e-6),
    }
    for name in ("nccl", "two_shot", "ours"):
        found[f"{name}+norm"] = partial(then_norm, found[name])
    return found


def measure(comm: Any, width: int) -> list[dict[str, Any]]:
    """Microseconds of each way for each number of rows; all ranks call this."""
    comm.kernels.MAX_ROWS = max(ROWS)
    device, table = torch.device("cuda", comm.rank), []
    for rows in ROWS:
        row: dict[str, Any] = {"rows": rows, "kib": rows * width * 2 / 1024}
        for name, call in ways(comm, rows, width, device).items():
            comm.barrier()
            row[name] = round(graph_seconds(call, device) * 1e6, 2)
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    args = parser.parse_args()
    devices = [f"cuda:{rank}" for rank in range(args.size)]
    group = RankProcesses(
        measure, (args.width,), ranks=range(args.size), size=args.size, devices=devices
    )
    with group:
        table, *_ = results(group, 300)
    for row in table:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    found = {"benchmark": "all_reduce", "size": args.size, "width": args.width, "rows": table}
    save(args.out, found, shlex.join(["python", "-m", "tests.gpu.all_reduce", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
