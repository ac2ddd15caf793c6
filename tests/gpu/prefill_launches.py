"""Prefill attention in batches of short prompts: the host's time, the GPU's, and the user's.

`python3 -m tests.gpu.prefill_launches --out FILE`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.hopper_backend import HopperBackend, HopperPlan
from minisgl.attention.triton_backend import TritonBackend
from minisgl.benchmark import latency
from minisgl.benchmark.report import save
from minisgl.engine.heap import frozen_heap
from minisgl.kernels.prefill_attention import tensor_map
from tests.gpu.prefill_attention import DEVICE, DIM, Case, timed, world
from tests.gpu.trials import engine

WAYS = ("chapter 04b", "maps and search in each layer", "search in each layer", "as it is")
CASES: dict[str, Case] = {
    f"{count} x {new:,}" + (f" behind {cached:,}" if cached else ""):
        ([new] * count, [cached] * count, 16, 8)
    for count, new, cached in ((16, 256, 0), (8, 512, 0), (16, 512, 0), (8, 512, 1536),
                               (8, 1024, 0), (1, 2048, 0), (4, 2048, 0), (1, 8192, 0))
}  # fmt: skip
LAUNCHES, ROUNDS, REPEATS, WARM = 20, 40, 9, 2
MODEL, PROMPT = "Qwen/Qwen3-0.6B", 512


@contextmanager
def launched(way: str) -> Iterator[None]:
    """Plans that are made, and launch, in this way."""
    attend = HopperPlan.attend

    def slow(self: HopperPlan, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        self.compiled = None
        if way.startswith("maps"):
            caches = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)
            self.boxes: Any = {layer_id: tuple(tensor_map(cache) for cache in caches)}
        return attend(self, q, k, v, layer_id)

    with (
        mock.patch.object(HopperPlan, "attend", attend if way == WAYS[-1] else slow),
        mock.patch.object(
            HopperBackend,
            "make_plan",
            (TritonBackend if way == WAYS[0] else HopperBackend).make_plan,
        ),
    ):
        yield


def layer(case: Case) -> dict[str, Callable[[], Tensor]]:
    """A layer's attention by chapter 04b's kernel, and by that for Hopper GPUs."""
    new, cached, heads, kv_heads = case
    pool, tables, meta = world(new, cached, kv_heads, adjacent=False)
    q = torch.randn(meta.num_tokens, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    calls = {}
    for way in (WAYS[0], WAYS[-1]):
        with launched(way):
            plan = HopperBackend(pool, tables, heads, DIM**-0.5).plan(meta, slots)
        assert isinstance(plan, HopperPlan) == (way == WAYS[-1])
        calls[way] = lambda plan=plan: plan.attend(q, q, q, 0)
    return calls


def device_us(case: Case) -> dict[str, float]:
    """Microseconds of the GPU for a layer."""
    return {way: round(ms * 1e3, 1) for way, ms in timed(layer(case), LAUNCHES, 5).items()}


def host_us(case: Case) -> dict[str, float]:
    """Microseconds of the host for a launch, the median of many rounds in turns."""
    calls, times = layer(case), {way: list[float]() for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            call = calls[way if way == WAYS[0] else WAYS[-1]]
            torch.cuda.synchronize()
            with launched(way):
                start = time.perf_counter()
                for _ in range(LAUNCHES):
                    call()
                times[way].append((time.perf_counter() - start) / LAUNCHES * 1e6)
    return {way: round(statistics.median(all_of), 1) for way, all_of in times.items()}


def first_tokens(most: int) -> list[dict[str, Any]]:
    """Median milliseconds to the first token of half of a batch, eager above `most` tokens."""
    rows = []
    with engine(MODEL, prefill_graph_max_tokens=most) as llm, frozen_heap():
        for batch in (1, 8, 64):
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(WARM + REPEATS):
                for way in np.random.default_rng(turn).permutation(WAYS).tolist():
                    llm.scheduler.reset()
                    for count in (1, batch):  # one in front, that sends the empty tables
                        latency.start_together(llm, count, PROMPT, 4, 0.0, llm.next_uid)
                        with launched(way):
                            line = latency.drive(llm)
                    seconds = latency.first_token_seconds(line, batch)
                    times[way].append(float(np.percentile(seconds, 50)) * 1e3)
            ways = {way: round(statistics.median(ms[WARM:]), 2) for way, ms in times.items()}
            rows.append({"recorded_tokens": most, "batch": batch, "ttft_ms": ways, "all_ms": times})
            print(most, batch, ways, flush=True)
    return rows


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"host_us": host_us(CASES["8 x 512"]), "device_us": {}}
    print(results["host_us"], flush=True)
    for name, case in CASES.items():
        results["device_us"][name] = device_us(case)
        print(name, results["device_us"][name], flush=True)
    rows = [row for most in (2048, 4096) for row in first_tokens(most)]
    results |= {"model": MODEL, "prompt": PROMPT, "first_tokens": rows}
    save(args.out, results, f"python3 -m tests.gpu.prefill_launches --out {args.out.name}")


if __name__ == "__main__":
    main()
