"""Captured prefill on one GPU, side by side with eager prefill.

`python3 -m tests.gpu.prefill PART --out FILE`, where PART is one of
  attention  prefill attention of a layer inside a graph: FlashInfer, and our kernel in many shapes
  ttft       the time to the first token by prompt length, eager and captured; the cost of a start
  splits     a captured prefill of 512 tokens with other tiles, and with its keys split
  profile    the kernels of one captured prefill
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from minisgl import LLM
from minisgl.attention import triton_backend
from minisgl.attention.metadata import build_metadata
from minisgl.attention.triton_backend import TritonBackend
from minisgl.benchmark import latency
from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.prefill_graph import PrefillRunner
from minisgl.engine.step import build_forward_input
from minisgl.engine.tiled_prefill import TiledPrefill
from minisgl.kernels.paged_attention import attention_kernel
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool
from tests.gpu.trials import engine

DEVICE, PAGE, DIM, KV = torch.device("cuda"), 16, 128, 8
LENGTHS = (64, 128, 256, 512, 1024, 2048)
START = time.perf_counter()


def say(*words: object) -> None:
    """Print with the seconds since the start, at once."""
    print(f"{time.perf_counter() - START:6.1f}", *words, flush=True)


class Tuned:
    """A Triton kernel with launch options of its own."""

    def __init__(self, kernel: Any, **how: Any) -> None:
        self.kernel, self.how = kernel, how

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.kernel[grid]
        return lambda *args, **more: launch(*args, **more, **self.how)


class Shaped(TiledPrefill):
    """Fixed tiles and splits."""

    tile, splits = 64, 0

    def tile_rows(self, size: int) -> int:
        return self.tile


def one_request(size: int, cached: int) -> tuple[KVPool, TableManager, Req]:
    """A prompt of `size` new tokens behind cached ones, on random pages."""
    length = size + cached
    pages = -(-length // PAGE)
    pool = KVPool(num_layers=1, num_pages=2 * pages, page_size=PAGE, num_kv_heads=KV, head_dim=DIM,
                  dtype=torch.bfloat16, device=DEVICE)  # fmt: skip
    pool.buffer.normal_()
    tables = TableManager(2, 8192, PAGE, pool.dummy_page, DEVICE)
    row, chosen = tables.allocate(), np.random.default_rng(0).permutation(2 * pages)[:pages]
    slots = np.add.outer(chosen * PAGE, np.arange(PAGE)).ravel()[:length]
    tables.write(row, 0, slots.astype(np.int32))
    tables.flush()
    req = Req(uid=0, input_ids=np.zeros(length, np.int32), sampling_params=SamplingParams(),
              max_new_tokens=1, table_idx=row)  # fmt: skip
    req.cached_len = cached
    return pool, tables, req


SHAPES = [(tile, keys, warps, stages) for tile in (64, 128) for keys in (64, 128)
          for warps in (4, 8) for stages in (2, 3)]  # fmt: skip


@torch.inference_mode()
def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a layer for each way, by new and cached tokens and heads of a group."""
    rows = []
    shapes = [(64, 64, 4, 3)] + [shape for shape in SHAPES if shape != (64, 64, 4, 3)]
    shapes = shapes if args.part is None else shapes[args.part :: 8]
    for group in args.groups:
        for shape in [*shapes, *(["fi"] if args.part in (None, 0) else [])]:
            row: dict[str, Any] = {"group": group, "way": shape}
            cases = [(n, 0) for n in LENGTHS] + [(64, 4096), (512, 4096)]
            cases = cases if args.part is None else [(512, 0), (64, 4096)]
            for size, cached in cases:
                try:
                    row[f"{size} + {cached}"] = attention_us(group, size, cached, shape)
                except Exception as error:  # a shape that does not fit
                    row["error"] = str(error)[:200]
                    break
            rows.append(row)
            say(row)
    return {"rows": rows}


def attention_us(group: int, size: int, cached: int, shape: Any) -> float:
    pool, tables, req = one_request(size, cached)
    q = torch.randn(size, KV * group, DIM, dtype=torch.bfloat16, device=DEVICE)
    if shape == "fi":
        from minisgl.attention.flashinfer_backend import FlashInferBackend

        backend = FlashInferBackend(pool, tables, KV * group, DIM**-0.5)
        ones = np.array([1], np.int32)
        meta = build_metadata(Phase.PREFILL, ones * req.table_idx, ones * size,
                              ones * (size + cached), tables.page_table, PAGE)  # fmt: skip
        plan = backend.plan(meta, torch.zeros(size, dtype=torch.int64, device=DEVICE))
        return round(graph_seconds(lambda: plan.attend(q, q, q, 0), DEVICE) * 1e6, 2)
    tile, keys, warps, stages = shape
    tuned = Tuned(attention_kernel, num_warps=warps, num_stages=stages)
    with (
        mock.patch.object(triton_backend, "attention_kernel", tuned),
        mock.patch.object(triton_backend, "TILE_KV", keys),
    ):
        plans = Shaped(TritonBackend(pool, tables, KV * group, DIM**-0.5), torch.bfloat16)
        plans.tile = tile
        runner = PrefillRunner(
            plans=plans, forward=None, sample=None, backend=None, tables=tables, sizes=(size,),
            vocab_size=8, dtype=torch.bfloat16,
        )  # fmt: skip
        runner.steps = {size: None}  # type: ignore[dict-item]
        fi = build_forward_input(Batch([req], Phase.PREFILL), tables, PAGE)
        static, tiles = runner.view(runner.memory, size)
        plan = plans.plan(size, static, tiles)
        runner.ring.send([runner.pack(fi, size)], runner.memory)
        return round(graph_seconds(lambda: plan.attend(q, q, q, 0), DEVICE) * 1e6, 2)


def first_ms(llm: LLM, count: int, length: int, seed: int) -> float:
    """Milliseconds until all of `count` new prompts have their first token."""
    latency.start_together(llm, count, length, 2, 0.0, seed)
    line = latency.drive(llm)
    return round(latency.first_token_seconds(line, count)[-1] * 1e3, 3)


CASES = [(1, 512), (1, 64), (1, 128), (1, 256), (1, 300), (1, 768), (1, 1024), (1, 2048), (8, 64),
         (8, 200), (1, 2500), (1, 4096), (8, 512), (4, 1024)]  # fmt: skip


def recorded_start(of: dict[str, Any]) -> Any:
    """`PrefillRunner.capture`, timed."""
    original = PrefillRunner.capture

    def capture(self: PrefillRunner, *args: Any, **more: Any) -> None:
        torch.cuda.synchronize()
        start, before = time.perf_counter(), torch.cuda.memory_reserved()
        original(self, *args, **more)
        torch.cuda.synchronize()
        of["sizes"], of["capture_s"] = self.sizes, round(time.perf_counter() - start, 3)
        of["capture_mib"] = (torch.cuda.memory_reserved() - before) >> 20

    return mock.patch.object(PrefillRunner, "capture", capture)


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of seven prompts behind two that may compile."""
    rows = []
    for way in args.ways:
        backend, _, most = way.rpartition(" ")
        row: dict[str, Any] = {"model": args.model, "way": way}
        tokens = None if most == "default" else int(most)
        how = {"attention_backend": backend, "prefill_graph_max_tokens": tokens}
        with recorded_start(row), engine(args.model, cuda_graph_max_bs=8, **how) as llm:
            for count, length in CASES[: args.cases]:
                times = [first_ms(llm, count, length, 100 * length + n) for n in range(9)][2:]
                row[f"{count} x {length}"] = float(np.median(times))
                row.setdefault("all 1 x 512", times)
            graph = llm.scheduler.engine.runners.prefill
            row["replays"] = 0 if graph is None else graph.replays
        rows.append(row)
        say(row)
    return {"rows": rows}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a captured prefill of 512 tokens, by kernel."""
    how: dict[str, Any] = {"attention_backend": "triton,fused", "prefill_graph_max_tokens": 512}
    with engine(args.model, cuda_graph_max_bs=8, **how) as llm:
        for seed in range(3):
            first_ms(llm, 1, 512, seed)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            first_ms(llm, 1, 512, 9)
            torch.cuda.synchronize()
        kernels: dict[str, list[float]] = defaultdict(list)
        spans = []
        for event in trace.events():
            kernels[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
        ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
        rows = [{"kernel": name[:90], "count": len(us), "us": round(sum(us), 1)}
                for name, us in ordered]  # fmt: skip
        for row in rows[:24]:
            say(row)
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        say("span us", last - first)
    return {"rows": rows, "span_us": last - first}


def replay_ms(llm: LLM, size: int) -> float:
    """Return the median milliseconds of the device for one captured prefill."""
    engine = llm.scheduler.engine
    assert engine.runners.prefill is not None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    with engine.on_stream():
        for mark in marks:
            engine.runners.prefill.steps[size].graph.replay()
            mark.record()
    torch.cuda.synchronize()
    return round(float(np.median([a.elapsed_time(b) for a, b in pairwise(marks[1:])])), 4)


def splits(args: argparse.Namespace) -> dict[str, Any]:
    """Tiles of 64 and 128 rows, keys in one part or more: the device's time, and the user's."""
    rows, how = [], {"attention_backend": "triton,fused", "prefill_graph_max_tokens": 512}
    plan, tile_rows = TiledPrefill.plan, TiledPrefill.tile_rows
    shapes = [None, *((tile, parts) for tile in (64, 128) for parts in (1, 2, 4)), None]
    with engine(args.model, cuda_graph_max_bs=8, **how) as llm:
        parts_of_llm = llm.scheduler.engine
        assert parts_of_llm.runners.prefill is not None
        for shape in shapes:
            tile, parts = shape or (0, 0)

            def split_plan(self: TiledPrefill, size: int, *static: Any, parts: int = parts) -> Any:
                sms, self.backend.num_sms = self.backend.num_sms, parts * self.programs(size, tile)
                try:
                    return plan(self, size, *static)
                finally:
                    self.backend.num_sms = sms

            with (
                mock.patch.object(TiledPrefill, "plan", split_plan if shape else plan),
                mock.patch.object(
                    TiledPrefill, "tile_rows", (lambda *_: tile) if shape else tile_rows
                ),
                parts_of_llm.on_stream(),
            ):
                parts_of_llm.runners.prefill.capture(progress=False)
            times = [first_ms(llm, 1, 512, 50 * len(rows) + n) for n in range(12)][2:]
            way = f"tile {tile}, {parts} splits" if shape else "as it is"
            rows.append({"way": way, "replay_ms": replay_ms(llm, 512), "all_ttft_ms": times})
            say(rows[-1])
    return {"rows": rows}


PARTS = {f.__name__: f for f in (attention, ttft, splits, profile)}
WAYS = ("triton,fused 2048", "triton,fused 0", "fi,fused 0")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one part and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="backends, and tokens to record")
    parser.add_argument("--groups", nargs="+", type=int, default=[2])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    parser.add_argument("--part", type=int, default=None, help="compile an eighth of the shapes")
    args = parser.parse_args(argv)
    results = PARTS[args.what](args)
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    with suppress(OSError):
        save(args.out, results, shlex.join(["python3", "-m", "tests.gpu.prefill", *given]))


if __name__ == "__main__":
    main()
