"""Prefill attention of one layer on a Hopper GPU: the kernel, and without each of its parts.

`python3 -m tests.gpu.prefill_attention --out FILE`
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from minisgl.attention import hopper_backend
from minisgl.attention.hopper_backend import HopperBackend
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.attention.triton_backend import TritonBackend
from minisgl.benchmark.report import save
from minisgl.core import Phase
from minisgl.kernels import prefill_attention
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

DEVICE, PAGE, DIM = torch.device("cuda"), 16, 128
WAIT = "    mbarrier.wait(free.index(stage), (number // STAGES & 1) ^ 1)\n"
SLOTS = "    slots = ()\n"
Change = list[tuple[str, str]]
P = "gl.convert_layout(weights.to(q.dtype), P)"
ABLATIONS: dict[str, Change] = {
    "as it is": [],
    "page table read after the wait": [
        (WAIT, ""), (SLOTS, "    stage = number % STAGES\n" + WAIT + SLOTS),
    ],
    "weights narrowed before the next round": [
        (f"        p = {P}\n        scores", "        p = weights\n        scores"),
        ("        release(values, number - 1)\n",
         f"        release(values, number - 1)\n        weights = {P}\n"),
        ("    v = wait_full(values, number)\n",
         f"    weights = {P}\n    v = wait_full(values, number)\n"),
        (f"    p = {P}\n    sums", "    p = weights\n    sums"),
    ],
    "no turns": [
        ("    mbarrier.wait(turns.index(who), (number & 1) ^ (1 - who))\n", ""),
        ("        mbarrier.arrive(turns.index(1 - who), count=1)\n", ""),
        ("    mbarrier.arrive(turns.index(1 - who), count=1)\n", ""),
    ],
    "softmax after both products": [("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(0, ")],
    "places always forwards": [("gl.where(turn % 2 == 0, program, grid - 1 - program)", "program")],
    "two stages": [("STAGES = gl.constexpr(3)", "STAGES = gl.constexpr(2)")],
    "24 registers for the loading warp": [("[232, 40]", "[240, 24]")],
    "queries in registers": [
        ("                fence_async_shared()\n                limit",
         "                held = q.load(gl.DotOperandLayout(0, S, 2))\n                limit"),
        ("first_tile(q,", "first_tile(held,"),
        ("update_tiles(state, q,", "update_tiles(state, held,"),
    ],
    "sums rescaled only when a maximum grows 256-fold": [
        ("    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)\n",
         "    m_top = gl.maximum(m, gl.max(s, 1) * scale_log2)\n"
         "    m_new = gl.where(m_top - m > 8.0, m_top, m)\n"),
        ("        acc = acc * gl.convert_layout(rescale,",
         "        if gl.min(rescale, 0) < 1.0:\n"
         "            acc = acc * gl.convert_layout(rescale,"),
    ],
    "tiles of 64 keys, six stages": [
        ("STAGES = gl.constexpr(3)", "STAGES = gl.constexpr(6)"),
        ("TILE_KV = gl.constexpr(128)", "TILE_KV = gl.constexpr(64)"),
    ],
}  # fmt: skip
Case = tuple[Sequence[int], Sequence[int], int, int]  # new and cached tokens, heads of Q and of K
CASES: dict[str, Case] = {
    "8,192": ([8192], [0], 32, 8),
    "8,192 behind 24,576": ([8192], [24576], 32, 8),
    "32,768": ([32768], [0], 32, 8),
    "2,048": ([2048], [0], 32, 8),
    "8 x 1,024": ([1024] * 8, [0] * 8, 32, 8),
    "8,192, group of 2": ([8192], [0], 16, 8),
}
CHECKS: list[Case] = [
    ([300, 5, 700, 1], [17, 1000, 0, 40], 32, 8), ([429, 364, 813], [513, 64, 129], 16, 8),
    ([2300], [2100], 8, 8), ([900], [600], 28, 4),
]  # fmt: skip


def changed(change: Change) -> ModuleType:
    """The kernel's module with its text changed."""
    source = Path(str(prefill_attention.__file__)).read_text()
    for old, new in change:
        assert old in source, old
        source = source.replace(old, new)
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("changed", file.name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def world(
    new: Sequence[int], cached: Sequence[int], kv_heads: int, adjacent: bool
) -> tuple[KVPool, TableManager, AttentionMetadata]:
    """Requests on pages in random order, or one behind the other."""
    lengths = np.array(new) + np.array(cached)
    counts = [math.ceil(n / PAGE) for n in lengths]
    pool = KVPool(num_layers=1, num_pages=sum(counts), page_size=PAGE, num_kv_heads=kv_heads,
                  head_dim=DIM, dtype=torch.bfloat16, device=DEVICE)  # fmt: skip
    pool.buffer.normal_()
    tables = TableManager(len(new), int(max(lengths)) + PAGE, PAGE, pool.dummy_page, DEVICE)
    order = np.random.default_rng(0).permutation(sum(counts))
    for pages in np.split(np.sort(order) if adjacent else order, np.cumsum(counts)[:-1]):
        slots = pages[:, None] * PAGE + np.arange(PAGE)
        tables.write(tables.allocate(), 0, slots.astype(np.int32).reshape(-1))
    tables.flush()
    rows = np.arange(len(new))
    meta = build_metadata(Phase.PREFILL, rows, np.array(new), lengths, tables.page_table, PAGE)
    return pool, tables, meta


def launcher(
    change: Change, case: Case, adjacent: bool
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return attention by a changed kernel and by that of chapter 04b, over the same world."""
    new, cached, heads, kv_heads = case
    pool, tables, meta = world(new, cached, kv_heads, adjacent)
    q = torch.randn(meta.num_tokens, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    plans = [kind(pool, tables, heads, DIM**-0.5).plan(meta, slots)
             for kind in (HopperBackend, TritonBackend)]  # fmt: skip
    launch = changed(change).prefill_attention

    def attend() -> torch.Tensor:
        with mock.patch.object(hopper_backend, "prefill_attention", launch):
            return plans[0].attend(q, q, q, 0)

    return attend, lambda: plans[1].attend(q, q, q, 0)


def check(name: str) -> str:
    """Compile, and compare with the other kernel; an empty string if all is well."""
    try:
        for number, case in enumerate(CHECKS):
            got, want = launcher(ABLATIONS[name], case, adjacent=number % 2 == 0)
            expected, found = want(), got()
            gap = float((found.float() - expected.float()).norm() / expected.float().norm())
            if not gap < 0.01:
                return f"{case}: off by {gap}"
    except Exception as error:
        return repr(error)[:300]
    return ""


def timed(calls: dict[str, Callable[[], Any]], count: int, rounds: int = 9) -> dict[str, float]:
    """Median milliseconds of each call in graphs of `count`, in turns of random order."""
    graphs = {}
    for name, call in calls.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(count):
                call()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        for name in np.random.default_rng(turn).permutation(list(graphs)).tolist():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            graphs[name].replay()
            marks[0].record()
            graphs[name].replay()
            marks[1].record()
            torch.cuda.synchronize()
            times[name].append(marks[0].elapsed_time(marks[1]) / count)
    return {name: statistics.median(all_of) for name, all_of in times.items()}


def operations(case: Case) -> float:
    """Floating-point operations of both products, masked scores left out."""
    new, cached, heads, _ = case
    return sum(4.0 * DIM * heads * (n * c + n * (n + 1) / 2) for n, c in zip(new, cached))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Check all, then time all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(ABLATIONS), help="only these")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="only these")
    args = parser.parse_args(argv)
    with multiprocessing.get_context("spawn").Pool(len(args.ways)) as pool:
        wrong = dict(zip(args.ways, pool.map(check, args.ways)))
    for name, why in wrong.items():
        print(f"{name}: {why or 'right'}", flush=True)
    ways = [name for name in args.ways if not wrong[name]]
    rows = []
    for name in args.cases:
        case, calls = CASES[name], {}
        for adjacent in (True, False):
            for way in ways:
                got, want = launcher(ABLATIONS[way], case, adjacent)
                where = "adjacent pages" if adjacent else "scattered pages"
                calls[f"{way}, {where}"] = got
                if way == "as it is":
                    calls[f"chapter 04b, {where}"] = want
        work = operations(case)
        found = timed(calls, max(1, min(40, int(2e12 / work))))
        row = {way: {"ms": round(ms, 4), "tflops": round(work / ms / 1e9, 1)}
               for way, ms in found.items()}  # fmt: skip
        rows.append({"tokens": name, "ways": row})
        print(name, *(f"{way}: {one['tflops']:.0f}" for way, one in row.items()), sep="\n  ")
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python3", "-m", "tests.gpu.prefill_attention", *given])
    save(args.out, {"rows": rows, "wrong": {k: v for k, v in wrong.items() if v}}, command)


if __name__ == "__main__":
    main(sys.argv[1:])
