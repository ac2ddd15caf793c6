"""Measure products with weights of eight bits on one GPU, tile by tile, beside cuBLAS.

`python3 -m tests.gpu.fp8_kernels --out FILE`, for a layer of Qwen3-8B, in a minute or two.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.kernels import linear
from minisgl.kernels.scaled_mm import quantize_rows, scaled_linear
from minisgl.layers.fp8 import Fp8Weight, fp8_weight

DEVICE = torch.device("cuda")
SHAPES = {  # (n, k) of the weight, n of both halves where it is gated
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
}  # fmt: skip
ENOUGH = 1 << 28  # bytes of different weights, more than a cache holds
Block = tuple[int, int, int]


def weights_of(name: str, group: int) -> list[Fp8Weight]:
    """Copies of a random weight, to be multiplied in turn."""
    n, k = SHAPES[name]
    made = []
    for _ in range(-(-ENOUGH // (n * k))):
        weight = fp8_weight(n, k, None, DEVICE, group)
        weight.copy_((torch.randn(n, k, device=DEVICE) * 100).to(torch.float8_e4m3fn))
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


def rows_of(name: str, x: Tensor, tiles: linear.Tiling) -> Callable[[Tensor], Any]:
    """The product of several rows by given tiles."""
    n = SHAPES[name][0] // (2 if name == "gate_up" else 1)
    wide = torch.float32 if tiles.splits > 1 else x.dtype
    out = torch.empty(tiles.splits, len(x), n, dtype=wide, device=DEVICE)
    return lambda w: linear.launch_rows(x, w, out, tiles, None, name == "gate_up")


def row_blocks(scales: int) -> list[Block]:
    """Candidates (BN, BK, warps) for one row."""
    if scales > 1:
        return [(16, 128, 2), (32, 128, 4), (64, 128, 4)]
    return [(2, 1024, 2), (4, 1024, 4), (8, 1024, 4), (16, 512, 4), (8, 512, 4), (8, 1024, 8),
            (4, 512, 2), (16, 1024, 8), (8, 512, 2)]  # fmt: skip


def tilings(rows: int, scales: int, split: bool) -> list[linear.Tiling]:
    """Candidates for several rows whose activations keep sixteen bits."""
    bm = 16 if rows <= 16 else 64
    return [linear.Tiling(bm, 64, bk, 4, stages, True, splits)
            for bk, stages in ((128, 6), (128, 3), (256, 3)) if bk == 128 or scales == 1
            for splits in ((1, 4) if split else (1,))]  # fmt: skip


Case = tuple[str, int, int, Any]  # name, rows, group, candidate


def cases() -> Iterator[Case]:
    """Every kernel that is measured."""
    for group, name in product((0, 128), SHAPES):
        k = SHAPES[name][1]
        scales = k // group if group else 1
        for block in row_blocks(scales):
            yield name, 1, group, block
        for rows in (8, 64) if not group else (8,):
            for tiles in tilings(rows, scales, name in ("o", "down")):
                yield name, rows, group, tiles


def call_of(case: Case, weights: list[Fp8Weight]) -> Callable[[], Any]:
    """The launch of a case over all copies of its weight."""
    name, rows, _, candidate = case
    x = torch.randn(rows, SHAPES[name][1], device=DEVICE, dtype=torch.bfloat16)
    if rows == 1:
        linear.row_block = lambda *args: candidate  # type: ignore[assignment]
        one = one_row(name, x)
    else:
        one = rows_of(name, x, candidate)
    return lambda: [one(weight) for weight in weights]


def signature(case: Case) -> tuple[Any, ...]:
    """What decides which kernel is compiled: shapes share it."""
    name, rows, group, candidate = case
    flags = (name == "gate_up", name in ("qkv", "gate_up") and rows == 1)
    group = SHAPES[name][1] if group else 0  # the number of scales is a constant
    parts = candidate if rows == 1 else (candidate.bm, candidate.bn, candidate.bk, candidate.warps,
                                         candidate.stages, candidate.splits > 1)  # fmt: skip
    return (*flags, rows, group, *parts)


def compile_some(some: list[Case]) -> None:
    """Compile kernels in another process; the disk's cache has them then."""
    for case in some:
        name, _, group, _ = case
        n, k = SHAPES[name]
        try:
            call_of(case, [fp8_weight(n, k, None, DEVICE, group)])()
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
    weights: list[Fp8Weight] = []
    for case in wanted:
        name, rows, group, candidate = case
        if kept != (name, group):
            kept, weights = (name, group), []
            weights = weights_of(name, group)
        n, k = SHAPES[name]
        parts = list(candidate) if rows == 1 else asdict(candidate)
        row = {"name": name, "rows": rows, "group": group, "tiles": parts}
        if time.monotonic() > deadline:
            found.append({**row, "skipped": "out of time"})
            continue
        times = measured(call_of(case, weights), len(weights), n * k, 2 * rows * n * k)
        found.append({**row, **times})
    return found


def many_rows() -> list[dict[str, Any]]:
    """Ways to multiply by eight bits where arithmetic decides, and bf16 beside them."""
    found = []
    for name in SHAPES:
        n, k = SHAPES[name]
        whole, blocks = weights_of(name, 0)[:2], weights_of(name, 128)[:2]
        wide: list[Tensor] = [weight.dequantized(torch.bfloat16) for weight in whole]
        for rows in (8, 64, 128, 256, 512, 8192):
            x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            values, scale = quantize_rows(x, k)
            ways: dict[str, Callable[[], Any]] = {
                "bf16": lambda: [F.linear(x, w) for w in wide],
                "quantize rows": lambda: [quantize_rows(x, k) for _ in whole],
                "scaled_mm": lambda: [scaled_linear(x, w) for w in whole],
                "scaled_mm alone": lambda: [
                    torch._scaled_mm(values, w.t(), scale, w.scale.t(), out_dtype=torch.bfloat16,
                                     use_fast_accum=True) for w in whole
                ],
                "scaled_mm alone, slow sums": lambda: [
                    torch._scaled_mm(values, w.t(), scale, w.scale.t(), out_dtype=torch.bfloat16)
                    for w in whole
                ],
                "scaled_mm, blocks of 128": lambda: [scaled_linear(x, w) for w in blocks],
                "dequantize": lambda: [F.linear(x, w.dequantized(x.dtype)) for w in whole],
            }  # fmt: skip
            for way, call in ways.items():
                if (way == "dequantize" or "blocks" in way) and rows not in (64, 8192):
                    continue
                times = measured(call, len(whole), n * k, 2 * rows * n * k)
                found.append({"name": name, "rows": rows, "way": way, **times})
    return found


def right() -> list[dict[str, Any]]:
    """Relative errors of the kernels in use, against the dequantized weight in float64."""
    found = []
    gen = torch.Generator("cuda").manual_seed(0)
    for group, rows in product((0, 128), (1, 8, 64, 300)):
        n, k = SHAPES["o"]
        weight = fp8_weight(n, k, None, DEVICE, group)
        weight.copy_((torch.randn(n, k, device=DEVICE, generator=gen) * 100).to(weight.dtype))
        weight.scale.uniform_(1e-5, 1e-3, generator=gen)
        x = torch.randn(rows, k, device=DEVICE, generator=gen).bfloat16()
        exact = x.double() @ weight.dequantized(torch.float64).T
        got = linear.linear(x, weight).double()
        error = float((got - exact).norm() / exact.norm())
        row: dict[str, Any] = {"group": group, "rows": rows, "linear": error}
        one = linear.row_linear(x, weight, add=torch.zeros_like(x)) if rows == 1 else None
        if one is not None:
            row["row_linear"] = float((one.double() - exact).norm() / exact.norm())
        found.append(row)
    return found


def main() -> None:
    """Compile, check, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the few rows' part")
    args = parser.parse_args()
    start = time.monotonic()
    result: dict[str, Any] = {"errors": right()}
    print(*result["errors"], sep="\n")
    result["many"] = many_rows()
    print(*result["many"], sep="\n")
    wanted = list(cases())
    compile_all(wanted)
    result["compiled_s"] = round(time.monotonic() - start, 1)
    result["few"] = few_rows(wanted, time.monotonic() + args.seconds)
    result["seconds"] = round(time.monotonic() - start, 1)
    save(args.out, result, "python3 -m tests.gpu.fp8_kernels")
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["few"]:
        key = (row["name"], row["rows"], row["group"])
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    print(*best.values(), sep="\n")


if __name__ == "__main__":
    main()
