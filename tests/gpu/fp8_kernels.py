"""Measure products with weights of eight bits on one GPU, tile by tile, beside cuBLAS.

`python3 -m tests.gpu.fp8_kernels --out FILE [--seconds 40] [--then "latency ..."]`: for the
weights of a layer of Qwen3-8B. `--then` runs a benchmark afterwards, with the fastest tiles.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minisgl.kernels.fp8_linear  # noqa: F401, registers weights of eight bits
from minisgl.benchmark.__main__ import main as benchmark
from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.kernels import linear
from minisgl.kernels.scaled_mm import quantize_rows, scaled_linear
from minisgl.layers.fp8 import fp8_weight

DEVICE = torch.device("cuda")
SHAPES = {  # (n, k) of the weight, n of both halves where it is gated
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
}  # fmt: skip
ENOUGH = 1 << 28  # bytes of different weights, more than a cache holds
Block = tuple[int, int, int, int]
Case = tuple[str, int, int, Any]  # name, rows, group (-1: 16 bits), candidate


def weights_of(name: str, group: int) -> list[Any]:
    """Copies of a random weight, to be multiplied in turn."""
    n, k = SHAPES[name]
    made: list[Any] = []
    for _ in range(-(-ENOUGH // (n * k))):
        values = torch.randn(n, k, device=DEVICE)
        if group < 0:
            made.append(values.bfloat16())
            continue
        weight = fp8_weight(n, k, device=DEVICE, group=group)
        weight.copy_((values * 50).to(torch.float8_e4m3fn))
        weight.scale.fill_(1e-4)
        made.append(weight)
    return made


def one_row(name: str, x: Tensor) -> Callable[[Tensor], Any]:
    """The product of one row as the fused model asks for it."""
    if name in ("qkv", "gate_up"):
        norm = torch.ones_like(x[0])
        return lambda w: linear.row_linear(x, w, norm=norm, eps=1e-6, gated=name == "gate_up")
    add = torch.ones(1, SHAPES[name][0], device=DEVICE, dtype=x.dtype)
    return lambda w: linear.row_linear(x, w, add=add)


BLOCKS = [(8, 1024, 4, 16), (4, 1024, 4, 16), (16, 1024, 4, 16), (8, 512, 4, 16), (4, 2048, 4, 16),
          (8, 1024, 4, 1), (8, 512, 4, 1)]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every kernel that is measured."""
    for name in SHAPES:
        gated = name == "gate_up"
        n, k = SHAPES[name][0] // (2 if gated else 1), SHAPES[name][1]
        yield from ((name, 1, 0, block) for block in BLOCKS)
        yield from ((name, 1, 128, block) for block in BLOCKS)
        now = linear.row_block(n, k, name in ("qkv", "gate_up"), gated)
        assert now is not None
        yield from ((name, 1, -1, block) for block in {now, (*now[:3], 8), (4, 1024, 4, 8)})


def call_of(case: Case, weights: list[Any]) -> Callable[[], Any]:
    """The launch of a case over all copies of its weight."""
    name, rows, _, candidate = case
    x = torch.randn(rows, SHAPES[name][1], device=DEVICE, dtype=torch.bfloat16)
    linear.row_block = lambda *args: candidate
    one = one_row(name, x)
    return lambda: [one(weight) for weight in weights]


def signature(case: Case) -> tuple[Any, ...]:
    """What decides which kernel is compiled: shapes share it."""
    name, _, group, candidate = case
    scales = SHAPES[name][1] if group > 0 else group  # the number of scales is a constant
    return (name == "gate_up", name in ("qkv", "gate_up"), scales, candidate)


def compile_some(some: list[Case]) -> None:
    """Compile kernels in another process; the disk's cache has them then."""
    for case in some:
        name, _, group, _ = case
        n, k = SHAPES[name]
        weight: Any = torch.zeros(n, k, device=DEVICE, dtype=torch.bfloat16)
        try:
            call_of(case, [weight if group < 0 else fp8_weight(n, k, device=DEVICE, group=group)])()
        except Exception:  # too much shared memory, say: measured as skipped below
            continue
    torch.cuda.synchronize()


def compile_all(wanted: list[Case]) -> None:
    """All kernels at once, in as many processes as there are cores."""
    different = list({signature(case): case for case in wanted}.values())
    count = max(1, min(16, os.cpu_count() or 1))
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        list(pool.map(compile_some, [different[i::count] for i in range(count)]))


def measured(call: Callable[[], Any], copies: int, nbytes: int, flops: int) -> dict[str, Any]:
    """Microseconds of one product, and what that is in bytes and operations."""
    try:
        seconds = graph_seconds(call, DEVICE) / copies
    except Exception as error:
        return {"skipped": str(error).splitlines()[0][:200]}
    return {
        "us": round(seconds * 1e6, 2),
        "tb_per_s": round(nbytes / seconds / 1e12, 3),
        "tflop_per_s": round(flops / seconds / 1e12, 1),
    }


def few_rows(wanted: list[Case], deadline: float) -> list[dict[str, Any]]:
    """Each case in turn."""
    found: list[dict[str, Any]] = []
    kept: tuple[str, int] | None = None
    weights: list[Any] = []
    for case in sorted(wanted, key=lambda case: (case[2] != 0, case[2], case[0])):
        name, rows, group, candidate = case
        if kept != (name, group):
            kept, weights = (name, group), []
            weights = weights_of(name, group)
        n, k = SHAPES[name]
        row = {"name": name, "rows": rows, "group": group, "tiles": list(candidate)}
        if time.monotonic() > deadline:
            found.append({**row, "skipped": "out of time"})
            continue
        nbytes = n * k * (2 if group < 0 else 1)
        times = measured(call_of(case, weights), len(weights), nbytes, 2 * rows * n * k)
        found.append({**row, **times})
    return found


def many_rows() -> list[dict[str, Any]]:
    """Ways to multiply by eight bits in the library, and bf16 beside them."""
    found = []
    for name in SHAPES:
        n, k = SHAPES[name]
        whole = weights_of(name, 0)
        wide: list[Tensor] = [weight.dequantized(torch.bfloat16) for weight in whole]
        for rows in (8, 64, 128, 256):
            x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            ways: dict[str, Callable[[], Any]] = {
                "bf16": lambda: [F.linear(x, w) for w in wide],
                "quantize rows": lambda: [quantize_rows(x, k) for _ in whole],
                "scaled_mm": lambda: [scaled_linear(x, w) for w in whole],
            }
            for way, call in ways.items():
                nbytes = n * k * (2 if way == "bf16" else 1)
                times = measured(call, len(whole), nbytes, 2 * rows * n * k)
                found.append({"name": name, "rows": rows, "way": way, **times})
    return found


def right() -> list[dict[str, Any]]:
    """Relative errors of the kernels in use, against the dequantized weight in float64."""
    found = []
    gen = torch.Generator("cuda").manual_seed(0)
    n, k = SHAPES["o"]
    for group, rows in product((0, 128), (1, 7, 33, 64, 65, 71, 300)):
        weight = fp8_weight(n, k, device=DEVICE, group=group)
        weight.copy_((torch.randn(n, k, device=DEVICE, generator=gen) * 50).to(weight.dtype))
        weight.scale.uniform_(1e-5, 1e-3, generator=gen)
        x = torch.randn(rows, k, device=DEVICE, generator=gen).bfloat16()
        bias = torch.randn(n, device=DEVICE, generator=gen).bfloat16() if rows > 64 else None
        want = x.double() @ weight.dequantized(torch.float64).T
        want += 0.0 if bias is None else bias.double()
        row: dict[str, Any] = {"group": group, "rows": rows}
        try:
            row["error"] = float((linear.linear(x, weight, bias).double() - want).norm())
            row["error"] /= float(want.norm())
        except RuntimeError as error:
            row["failed"] = str(error)[:100]
        found.append(row)
    return found


def best_of(result: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The fastest of each name and group."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["few"]:
        key = (row["name"], row["group"])
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    return best


def use_best(best: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Let one row take the fastest blocks, where it has one scale."""
    names = {(n // 2 if name == "gate_up" else n, k): name for name, (n, k) in SHAPES.items()}

    def block(n: int, k: int, *rest: Any) -> Any:
        return tuple(best[names[n, k], 0]["tiles"])

    linear.row_block = block  # type: ignore[assignment]


def main() -> None:
    """Compile, check, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0, help="for the few rows' part")
    parser.add_argument("--then", action="append", default=[], metavar="COMMAND")
    args = parser.parse_args()
    start = time.monotonic()
    wanted = list(cases())
    compile_all(wanted)
    result: dict[str, Any] = {"compiled_s": round(time.monotonic() - start, 1)}
    print(f"compiled in {result['compiled_s']} s", flush=True)
    result["errors"] = right()
    print(*result["errors"], sep="\n", flush=True)
    result["few"] = few_rows(wanted, time.monotonic() + args.seconds)
    result["many"] = many_rows()
    result["seconds"] = round(time.monotonic() - start, 1)
    save(args.out, result, "python3 -m tests.gpu.fp8_kernels")
    print(*result["many"], sep="\n")
    best = best_of(result)
    print(*best.values(), sep="\n")
    print(f"trials took {result['seconds']} s", flush=True)
    use_best(best)
    for command in args.then:
        gc.collect()
        torch.cuda.empty_cache()
        benchmark(shlex.split(command))
        print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
