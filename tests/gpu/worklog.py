"""Measure the kernels of the chapters 05c, 05d and 05e on one GPU, stage by stage.

`python3 -m tests.gpu.worklog memory|gemm|attention --out FILE`. The kernels stand in the chapters,
in cells tagged `worklog`, where a CPU runs them against their oracle; here they run for time.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.kernels import decode_attention as decode
from minisgl.kernels import linear
from minisgl.kernels import norm as norms
from minisgl.kernels import rotate_store as rotate

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEVICE = torch.device("cuda")


def load_stages(stem: str, head: str = "") -> ModuleType:
    """The cells tagged `worklog` of a chapter as a module; Triton reads a kernel from its file.

    head: imports of what the chapter defines in other cells.
    """
    text = (NOTEBOOKS / f"{stem}.md").read_text(encoding="utf-8")
    cells = [cell for cell in CELL.findall(text) if re.match(r":tags: \[.*worklog.*\]", cell)]
    path = Path(tempfile.mkdtemp()) / f"stages_{stem}.py"
    path.write_text(head + "\n\n".join(cell.split("\n", 1)[1] for cell in cells), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of one call inside a CUDA graph."""
    return graph_seconds(call, DEVICE)


# ------------------------------------------------------------------ 05c: memory


def device_facts() -> dict[str, int]:
    """Return the driver's facts about the GPU."""
    about = torch.cuda.get_device_properties(DEVICE)
    return {
        "SMs": about.multi_processor_count,
        "L2 bytes": about.L2_cache_size,
        "HBM bytes": about.total_memory,
        "32-bit registers of an SM": about.regs_per_multiprocessor,
        "bytes of shared memory of an SM": about.shared_memory_per_multiprocessor,
        "threads that fit on an SM": about.max_threads_per_multi_processor,
    }


def chase_seconds(stages: ModuleType, table: Tensor, steps: int, flush: Tensor) -> float:
    """Seconds of one walk of `steps` loads; a large table is not in any cache when it starts."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if table.nbytes > flush.nbytes // 16:
        flush.zero_()
    else:
        stages.chase_kernel[(1,)](table, out, 40_000, num_warps=1)  # bring it into the cache
    before.record()
    stages.chase_kernel[(1,)](table, out, steps, num_warps=1)
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def measure_latency(stages: ModuleType, flush: Tensor) -> list[dict[str, float]]:
    """Nanoseconds of one dependent load, for growing tables."""
    rows = []
    few, many = 2_000, 22_000
    for kib in (16, 64, 128, 512, 4096, 16384, 131072, 524288, 1048576):
        table = stages.links(kib * 8, DEVICE)
        times = [
            [chase_seconds(stages, table, steps, flush) for steps in (few, many)] for _ in range(6)
        ]
        each = statistics.median((b - a) / (many - few) for a, b in times[1:])
        rows.append({"bytes": kib * 1024, "ns": round(each * 1e9, 1)})
    return rows


def once_seconds(call: Callable[[int], object], count: int) -> float:
    """Median seconds of single launches, each on its own part of memory."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    call(0)
    for number, (before, after) in enumerate(marks):
        before.record()
        call(number)
        after.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks) / 1e3


def measure_in_flight(stages: ModuleType, x: Tensor) -> list[dict[str, Any]]:
    """Bandwidth by programs and block: 200 rounds of all programs, from HBM."""
    rows = []
    for block, warps in ((256, 1), (1024, 4), (4096, 4), (8192, 8)):
        for programs in (1, 4, 16, 64, 132, 264, 512, 1024, 2048, 4096):
            size = min(x.numel() // 4, programs * block * 200) // (programs * block)
            size *= programs * block
            parts = x[: x.numel() // size * size].split(size)
            x.zero_()  # whatever L2 held is gone

            def one(number: int) -> None:
                stages.read(parts[number % len(parts)], programs, block, warps)

            took = once_seconds(one, 8)
            speed = round(4 * size / took / 1e12, 5)
            rows.append({"programs": programs, "block": block, "tb_per_s": speed})
    return sorted(rows, key=lambda row: row["programs"] * row["block"])


def measure_memory() -> dict[str, Any]:
    """Everything that chapter 05c shows."""
    stages = load_stages("05c_gpu_memory")
    x = torch.zeros(1 << 28, dtype=torch.int32, device=DEVICE)  # 1 GiB
    in_flight = measure_in_flight(stages, x)
    stride = []
    for step in (1, 2, 4, 8, 16, 32):
        took = seconds(lambda: stages.strided(x.view(torch.float32), step))
        stride.append({"stride": step, "useful_tb_per_s": round(x.nbytes / step / took / 1e12, 4)})
    working_set = []
    for mib in (4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 1024):
        part = x[: mib << 18]
        took = seconds(lambda: stages.read(part, 1024, 1024, 4))
        working_set.append({"bytes": part.nbytes, "tb_per_s": round(part.nbytes / took / 1e12, 3)})
    return {
        "device": device_facts(), "latency": measure_latency(stages, x), "in_flight": in_flight,
        "stride": stride, "working_set": working_set, "chain": measure_chain(stages),
        "gemm_size": 4096, "gemm": measure_gemm(4096),
    }  # fmt: skip


def measure_chain(stages: ModuleType) -> list[dict[str, Any]]:
    """Microseconds of a kernel that does nothing, in a chain of dependent ones."""
    one, length = torch.zeros(1, device=DEVICE), 200
    stages.chain(one, length, False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        stages.chain(one, length, False)
    torch.cuda.synchronize()
    rows = [
        {"how": "launched by the host", "us": (time.perf_counter() - start) / 20 / length * 1e6}
    ]
    for how, early in (("in a CUDA graph", False), ("in a CUDA graph, launched early (PDL)", True)):
        rows.append(
            {"how": how, "us": seconds(lambda: stages.chain(one, length, early)) / length * 1e6}
        )
    return [{**row, "us": round(row["us"], 3)} for row in rows]


def measure_gemm(size: int) -> list[dict[str, float]]:
    """A linear layer of `size` inputs and outputs for growing rows, over weights from HBM."""
    weights = [torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(16)]
    rows = []
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        x = torch.randn(m, size, dtype=torch.bfloat16, device=DEVICE)
        took = seconds(lambda: [x @ w.T for w in weights]) / len(weights)
        rows.append({
            "m": m, "us": round(took * 1e6, 2),
            "tflop_per_s": round(2 * m * size * size / took / 1e12, 2),
            "weight_tb_per_s": round(2 * size * size / took / 1e12, 3),
        })  # fmt: skip
    return rows


# ------------------------------------------------------------------ 05d: GEMMs with few rows

BF16 = torch.bfloat16
Stage = tuple[str, Callable[[Tensor, Tensor], object]]


def peak_read() -> float:
    """TB/s of the plainest read, a sum over 1 GiB."""
    x = torch.ones(1 << 28, device=DEVICE)
    return round(x.nbytes / seconds(x.sum) / 1e12, 3)


def weights_of(n: int, k: int) -> list[Tensor]:
    """Different weights of one shape, together far larger than L2."""
    return [
        torch.randn(n, k, dtype=BF16, device=DEVICE) / k**0.5
        for _ in range(max(8, (1 << 29) // (2 * n * k)))
    ]


def gemv_stages(stages: ModuleType) -> list[Stage]:
    """The ladder of one row."""
    norm = torch.ones(1024, dtype=BF16, device=DEVICE)

    squares = torch.ones(512, device=DEVICE)  # of the 512 programs in front

    def factor_last(x: Tensor, w: Tensor) -> object:
        return linear.gemv(norms.DeferredNorm(x, x, squares), w, eps=1e-6)

    def norm_apart(x: Tensor, w: Tensor) -> object:
        return linear.gemv(norms.add_norm(None, x, norm, 1e-6)[0], w)

    return [
        ("1 narrow, 128 numbers at a time", lambda x, w: stages.run_narrow(x, w, 128, 1)),
        ("2 narrow, 1,024 numbers at a time", lambda x, w: stages.run_narrow(x, w, 1024, 4)),
        ("3 a block of 4 outputs", lambda x, w: stages.run_block(x, w, 4, 512, 4)),
        ("3 a block of 8 outputs", lambda x, w: stages.run_block(x, w, 8, 1024, 2)),
        ("3 a block of 16 outputs", lambda x, w: stages.run_block(x, w, 16, 512, 4)),
        ("4 launched early", linear.gemv),
        ("5 with the factor of a norm", factor_last),
        ("4 and a norm of its own before", norm_apart),
        ("cuBLAS", lambda x, w: F.linear(x, w)),
        ("cuBLAS and a norm before", lambda x, w: F.linear(F.rms_norm(x, (1024,), norm, 1e-6), w)),
    ]  # fmt: skip


def rows_stage(tiles: Any, early: bool) -> Callable[[Tensor, Tensor], object]:
    """`rows_kernel` with these tiles, launched early or not."""

    def run(x: Tensor, w: Tensor) -> object:
        m, k, n = *x.shape, w.shape[0]
        part = k // tiles.splits
        dtype = torch.float32 if tiles.splits > 1 else BF16
        out = torch.empty(tiles.splits, m, n, dtype=dtype, device=DEVICE)
        options = linear.launch_options(x) if early else {"PDL": False}
        linear.rows_kernel[(n // tiles.bn, -(-m // tiles.bm), tiles.splits)](
            x, x, w, x, x, out, m, n, k, part, BM=tiles.bm, BN=tiles.bn, BK=tiles.bk, GATED=False,
            BIAS=False, SCALES=0, SWAP=tiles.swap, EVEN=m % tiles.bm == 0,
            AHEAD=min(8, 1 << (part // 64).bit_length() - 1), STAGES=tiles.stages,
            num_warps=tiles.warps, **options,
        )  # fmt: skip
        return out

    return run


def rows_stages(m: int, split_k: bool, n: int, k: int) -> list[Stage]:
    """Stages of a few-row GEMM: the tiling of `choose_tiling`, then one feature less at a time."""
    best = linear.choose_tiling(m, n, k, gated=False, split_k=split_k)
    whole = replace(best, splits=1)
    stages: list[Stage] = []
    if best.swap:
        rows = max(16, best.bm)
        flat = linear.Tiling(rows, 64, 128, 4, 4, False)
        stages.append(("1 rows first, weights second", rows_stage(flat, False)))
    stages.append(("2 swapped" if best.swap else "1 weights second", rows_stage(whole, False)))
    if best.splits > 1:
        stages.append((f"3 split-K by {best.splits}", rows_stage(best, False)))
    stages.append(("4 launched early, with prefetch", rows_stage(best, True)))
    return [*stages, ("cuBLAS", lambda x, w: F.linear(x, w))]


def measure_stages(stages: list[Stage], m: int, n: int, k: int) -> list[dict[str, Any]]:
    """Time of each stage over many weights, in one graph."""
    weights, x = weights_of(n, k), torch.randn(m, k, dtype=BF16, device=DEVICE)
    rows = []
    for name, run in stages:
        took = seconds(lambda: [run(x, w) for w in weights]) / len(weights)
        row = {
            "name": name,
            "us": round(took * 1e6, 2),
            "tb_per_s": round(2 * n * k / took / 1e12, 3),
        }
        rows.append(row)
    return rows


GEMMS = (
    (8, False, 4096, 1024),
    (8, True, 1024, 2048),
    (64, False, 4096, 1024),
    (64, True, 1024, 3072),
)


def measure_gemms() -> dict[str, Any]:
    """Everything that chapter 05d shows."""
    stages = load_stages("05d_gemm")
    return {
        "peak_tb_per_s": peak_read(),
        "gemv": with_profile("gemv", measure_stages(gemv_stages(stages), 1, 4096, 1024)),
        "gemm": [
            {"rows": m, "weight": [n, k], "steps": with_profile(
                f"gemm{i}", measure_stages(rows_stages(m, split_k, n, k), m, n, k))}
            for i, (m, split_k, n, k) in enumerate(GEMMS)
        ],
    }  # fmt: skip


# ------------------------------------------------------------------ 05e: decode attention


class Cache:
    """Requests of one length with random pages of 16, in as many layers as L2 cannot hold."""

    def __init__(self, batch: int, tokens: int, kv: int = 8, qo: int = 16, dim: int = 128) -> None:
        self.nbytes = batch * tokens * 2 * kv * dim * 2
        self.layers = max(4, (1 << 28) // self.nbytes)
        pages = -(-tokens // 16)
        size = (self.layers, batch * pages, 16, kv, dim)
        self.k, self.v = (torch.randn(size, dtype=BF16, device=DEVICE) for _ in range(2))
        order = torch.randperm(batch * pages, device=DEVICE).view(batch, pages, 1) * 16
        self.table = (order + torch.arange(16, device=DEVICE)).view(batch, -1).int()
        self.rows = torch.arange(batch, device=DEVICE)
        self.positions = torch.full((batch,), tokens - 1, device=DEVICE)
        self.slots = self.table[:, tokens - 1].long()
        self.qkv = torch.randn(batch, (qo + 2 * kv), dim, dtype=BF16, device=DEVICE)
        self.norms = torch.ones(2, dim, dtype=BF16, device=DEVICE).unbind(0)
        self.angles = torch.rand(tokens, dim, device=DEVICE)
        self.scratch = decode.Scratch(
            (16 * batch + decode.max_splits(kv)) * kv, qo // kv, dim, DEVICE
        )
        self.qo, self.kv, self.batch, self.tokens, self.scale = qo, kv, batch, tokens, dim**-0.5

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the projection's output."""
        qo, kv = self.qo, self.kv
        return self.qkv[:, :qo], self.qkv[:, qo : qo + kv], self.qkv[:, qo + kv :]


def attention_stages(stages: ModuleType, c: Cache) -> list[tuple[str, Callable[[int], object]]]:
    """The ladder of decode attention; each call works on one layer."""
    shape, parts = decode.choose_shape(c.batch, c.kv)
    shape, splits = shape[:3], max(1, min(16, parts // c.batch))
    to = (c.table, c.rows, c.positions)

    def rotated(i: int) -> Tensor:
        flat = c.qkv.view(c.batch, -1)
        return rotate.rotate_and_store(
            flat, c.norms, 1e-6, c.angles, c.positions, c.slots, c.k[i], c.v[i], c.qo
        )[0]

    def apart(i: int, parts: int, tile: tuple[int, ...] = shape) -> object:
        q = rotated(i)
        caches = c.k[i], c.v[i]
        if parts == 1:
            return stages.whole_attention(q, caches, *to, c.scale, tile)
        return stages.split_attention(q, caches, *to, c.scratch, c.scale, parts, tile)

    def merged(i: int) -> object:
        q = rotated(i)
        _, k, v = c.heads()
        return decode.decode_attention(q, k, v, c.k[i], c.v[i], *to, c.slots, c.scratch, c.scale)

    def fused(i: int) -> object:
        return decode.decode_attention(
            *c.heads(), c.k[i], c.v[i], *to, c.slots, c.scratch, c.scale,
            norms=c.norms, eps=1e-6, table=c.angles,
        )  # fmt: skip

    return [
        ("1 one program a head, tiles of 64", lambda i: apart(i, 1, (64, 4, 2))),
        (
            f"2 in {splits} parts, a second kernel merges"
            if splits > 1
            else "2 the tile that fits, nothing to split",
            lambda i: apart(i, splits),
        ),
        ("3 the last program merges", merged),
        ("4 norm, rotation and store inside", fused),
    ]


def measure_attention() -> dict[str, Any]:
    """Everything that chapter 05e shows of kernels alone."""
    names = "attend_cached, merge_partials, empty_state, write_partial"
    stages = load_stages(
        "05e_decode_attention", f"from minisgl.kernels.decode_attention import {names}\n"
    )
    found = []
    for batch in (1, 8, 64, 256):
        c = Cache(batch, 640)
        rows = []
        for name, run in attention_stages(stages, c):
            took = seconds(lambda: [run(i) for i in range(c.layers)]) / c.layers
            rows.append(
                {
                    "name": name,
                    "us": round(took * 1e6, 2),
                    "tb_per_s": round(c.nbytes / took / 1e12, 3),
                }
            )
        rows = with_profile(f"attention{batch}", rows)
        found.append({"batch": batch, "tokens": 640, "mb": c.nbytes / 1e6, "steps": rows})
    return {"peak_tb_per_s": peak_read(), "attention": found}


# ------------------------------------------------------------------ one reading of the profiler

METRICS = {
    "gpu__time_duration.sum": "ns", "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_active",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_busy",
    "launch__occupancy_limit_registers": "limit_registers",
    "launch__occupancy_limit_shared_mem": "limit_shared_memory",
}  # fmt: skip


def once(ladder: str) -> None:
    """Run each stage of a ladder once, for the profiler, after a run that compiles it."""
    calls: list[Callable[[], object]] = []
    if ladder.startswith("attention"):
        c = Cache(int(ladder.removeprefix("attention")), 640)
        names = "attend_cached, merge_partials, empty_state, write_partial"
        stages = load_stages(
            "05e_decode_attention", f"from minisgl.kernels.decode_attention import {names}\n"
        )
        calls = [partial(run, 0) for _, run in attention_stages(stages, c)]
    else:
        stages = load_stages("05d_gemm")
        m, split_k, n, k = (1, False, 4096, 1024) if ladder == "gemv" else GEMMS[int(ladder[-1])]
        w, x = weights_of(n, k)[0], torch.randn(m, k, dtype=BF16, device=DEVICE)
        some = gemv_stages(stages) if ladder == "gemv" else rows_stages(m, split_k, n, k)
        calls = [partial(run, x, w) for _, run in some]
    for call in calls:
        call()
    torch.cuda.synchronize()
    for i, call in enumerate(calls):
        torch.cuda.nvtx.range_push(f"stage{i}")
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


def with_profile(ladder: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each stage what Nsight Compute reads of its longest kernel, where it can be run."""
    if shutil.which("ncu") is None:
        return rows
    command = [
        "ncu", "--csv", "--page", "raw", "--nvtx", "--print-nvtx-rename", "kernel",
        "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", ",".join(METRICS),
        sys.executable, "-m", "tests.gpu.worklog", "once", "--ladder", ladder,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    longest: dict[int, dict[str, float]] = {}
    for entry in table:
        text = " ".join(str(value) for value in entry.values())
        match = re.search(r"stage(\d+)", text)
        if match is None or not entry.get("gpu__time_duration.sum"):
            continue
        try:
            seen = {
                short: float(entry[name].replace(",", ""))
                for name, short in METRICS.items()
                if entry.get(name)
            }
        except ValueError:
            continue
        if seen.get("ns", 0) > longest.get(int(match[1]), {}).get("ns", 0):
            longest[int(match[1])] = seen
    if not longest:
        print(f"ncu gave no reading of {ladder}:", done.stdout[-1500:], done.stderr[-1500:])
    return [row | ({"profile": longest[i]} if i in longest else {}) for i, row in enumerate(rows)]


MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": measure_memory,
    "gemm": measure_gemms,
    "attention": measure_attention,
}


def main() -> int:
    """Measure one chapter's stages and store them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", choices=(*MEASURES, "once"))
    parser.add_argument("--out", type=Path, default=Path("worklog.json"))
    parser.add_argument("--ladder", default="gemv", help="of `once`, which the profiler runs")
    args = parser.parse_args()
    with torch.inference_mode():
        if args.chapter == "once":
            once(args.ladder)
            return 0
        save(args.out, MEASURES[args.chapter](), f"python3 -m tests.gpu.worklog {args.chapter}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
