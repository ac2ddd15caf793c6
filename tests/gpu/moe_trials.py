"""Which tiles for the experts: grouped GEMMs of Qwen3-30B-A3B timed in CUDA graphs, as JSON.

`python -m tests.gpu.moe_trials --out FILE [--seconds 60]`: for several numbers
of tokens, every candidate for both GEMMs, with the bytes of the touched experts per second; and
the whole layer. `--then "latency ..."` runs a benchmark afterwards, with the fastest tiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark.__main__ import main as benchmark
from minisgl.benchmark.report import circumstances
from minisgl.kernels import moe
from minisgl.kernels.device import device_limits
from minisgl.kernels.linear import Tiling
from minisgl.kernels.moe import (
    align,
    fit_tiling,
    launch_experts,
)
from minisgl.kernels.moe_row import FusedExperts

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
SHAPES = (  # of the tile of a weight, warps, stages: for few rows, transposed
    (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4),
    (64, 64, 4, 6), (128, 64, 4, 3), (128, 64, 8, 4), (64, 256, 4, 2), (32, 128, 4, 4),
)  # fmt: skip
FEW = [Tiling(bm, *shape, swap=True) for bm in (16, 32) for shape in SHAPES]
MANY = [
    Tiling(64, 64, 64, 4, 4, False), Tiling(64, 128, 64, 8, 3, False),
    Tiling(128, 64, 64, 4, 3, False), Tiling(128, 64, 64, 8, 3, False),
    Tiling(128, 64, 64, 8, 4, False), Tiling(128, 128, 64, 8, 3, False),
    Tiling(128, 128, 64, 8, 4, False), Tiling(128, 256, 64, 8, 3, False),
]  # fmt: skip
PROCESSES = 12  # that compile


def graph_us(call: Callable[[], Any], launches: int) -> float:
    """Median time of one of `launches` calls inside a CUDA graph, in microseconds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    del kept
    return 1e3 * sorted(times)[len(times) // 2] / launches


class Layers:
    """Weights of some layers, and tokens with even routing."""

    def __init__(self, count: int) -> None:
        self.count = count
        gen = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return out.normal_(0.0, 0.02, generator=gen)

        self.gate_up = [normal(EXPERTS, 2 * WIDTH, HIDDEN) for _ in range(count)]
        self.down = [normal(EXPERTS, HIDDEN, WIDTH) for _ in range(count)]
        self.router = [normal(EXPERTS, HIDDEN) for _ in range(count)]
        self.normal = normal

    def trial(self, n: int, tiles: Tiling, gated: bool, once: bool = False) -> dict[str, Any]:
        """One GEMM of every layer, the blocks being there; `once`: without timing."""
        x = self.normal(n, HIDDEN) * 50
        logits = [(x @ router.T).float()[None] for router in self.router]
        out, k = (WIDTH, HIDDEN) if gated else (HIDDEN, WIDTH)
        fitted = fit_tiling(tiles, out, k, gated, device_limits(x.device).shared_memory, 2)
        blocks = [align(one, TOP_K, True, fitted.bm) for one in logits]
        mids = [self.normal(len(one.pairs), WIDTH) for one in blocks]
        parts = torch.empty(TOP_K, n, HIDDEN, dtype=torch.float32, device="cuda")

        def step() -> None:
            for i in range(self.count):
                w = self.gate_up[i] if gated else self.down[i]
                launch_experts(
                    x if gated else mids[i], w, mids[i] if gated else parts, blocks[i], fitted,
                    TOP_K, gated,
                )  # fmt: skip

        if once:
            step()
            return {}
        us = graph_us(step, self.count)
        touched = sum(len(one[0].topk(TOP_K).indices.unique()) for one in logits) / self.count
        nbytes = touched * out * k * 2 * (2 if gated else 1)
        flops = 2 * n * TOP_K * out * k * (2 if gated else 1)
        return {
            "tokens": n, "gemm": "gate_up" if gated else "down", "us": us,
            "tiles": vars(fitted), "touched": touched,
            "tb_per_s": nbytes / us / 1e6, "tflop_per_s": flops / us / 1e6,
        }  # fmt: skip

    def whole(self, n: int) -> dict[str, Any]:
        """Router, blocks and both GEMMs as the fused model calls them."""
        x = self.normal(n, HIDDEN) * 50
        each = [FusedExperts(r, g, d, TOP_K, True, 0, r)
                for r, g, d in zip(self.router, self.gate_up, self.down, strict=True)]  # fmt: skip
        found = {"tokens": n, "parts_us": graph_us(lambda: [e.parts(x) for e in each], self.count)}
        logits = [(x @ router.T)[None] for router in self.router]
        blocks = lambda: [align(one, TOP_K, True, 16) for one in logits]  # noqa: E731
        found["align_us"] = graph_us(blocks, self.count)
        return found


def candidates() -> Iterator[tuple[int, Tiling, bool]]:
    """Return the kernels to time, the most interesting first."""
    for n, bm in ((64, 16), (256, 32), (1, 16), (8, 16)):
        for tiles in FEW:
            if tiles.bm == bm:
                yield from ((n, tiles, gated) for gated in (True, False))
    for n in (512, 8192):
        for tiles in MANY:
            yield from ((n, tiles, gated) for gated in (True, False))


def compile_part(part: int) -> None:
    """Run a share of the candidates once: what they compile to stays in Triton's cache."""
    layers, seen = Layers(1), set()
    for index, (n, tiles, gated) in enumerate(candidates()):
        if index % PROCESSES == part and (tiles, gated) not in seen:
            seen.add((tiles, gated))
            with suppress(Exception):
                layers.trial(n, tiles, gated, once=True)


def use_best(trials: list[dict[str, Any]]) -> list[Any]:
    """Put the fastest tiles into the table that the kernels use."""
    table = []
    for (most, *old), n in zip(moe.TILINGS, (64, 256, 512, 8192), strict=True):
        pair = []
        for gemm, before in zip(("gate_up", "down"), old, strict=True):
            rows = [r for r in trials if r["tokens"] == n and r["gemm"] == gemm]
            bm = {r["tiles"]["bm"] for r in rows} & {before.bm}
            rows = [r for r in rows if r["tiles"]["bm"] in bm]
            best = min(rows, key=lambda r: r["us"], default=None)
            fields = before if best is None else best["tiles"]
            pair.append(before if best is None else Tiling(**fields))
        table.append((most, *pair))
    moe.TILINGS = tuple(table)
    return table


def main() -> None:
    """Compile, time, and then measure the engine with the best tiles."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compile", type=int, default=None)
    parser.add_argument("--then", action="append", default=[], metavar="COMMAND")
    args = parser.parse_args()
    if args.compile is not None:
        compile_part(args.compile)
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu.moe_trials", "--compile"]
    with ExitStack() as stack:
        for part in range(PROCESSES):
            stack.enter_context(subprocess.Popen([*command, str(part)]))
    print(f"compiled in {time.monotonic() - start:.0f} s")
    layers = Layers(4)
    found: dict[str, Any] = {"trials": [], "whole": [], "failed": []}
    for n, tiles, gated in candidates():
        if time.monotonic() - start > args.seconds:
            found["out_of_time"] = True
            break
        try:
            found["trials"].append(layers.trial(n, tiles, gated))
        except Exception as error:  # a tile that does not fit or compile is an answer too
            found["failed"].append(
                [n, vars(tiles), gated, f"{type(error).__name__}: {error}"[:200]]
            )
    found["table"] = [[str(part) for part in row] for row in use_best(found["trials"])]
    found["whole"] = [layers.whole(n) for n in (1, 8, 64, 256, 2048)]
    args.out.write_text(json.dumps({"circumstances": circumstances(), **found}, default=str))
    for row in sorted(found["trials"], key=lambda r: (r["tokens"], r["gemm"], r["us"])):
        tiles = row["tiles"]
        shape = [tiles[name] for name in ("bm", "bn", "bk", "warps", "stages")]
        speed = f"{row['tb_per_s']:.2f} TB/s {row['tflop_per_s']:.0f} TFLOP/s"
        print(row["tokens"], row["gemm"], shape, f"{row['us']:.1f} us {speed}")
    for whole in found["whole"]:
        print(whole)
    print(len(found["failed"]), "failed:", found["failed"][:3])
    print(f"trials took {time.monotonic() - start:.0f} s")
    sys.stdout.flush()
    del layers
    for command_line in args.then:
        gc.collect()
        torch.cuda.empty_cache()
        benchmark(shlex.split(command_line))
        print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
