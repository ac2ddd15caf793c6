"""A decode step of one request, all layers in one kernel whose programs stay: trial and numbers.

`python3 -m tests.gpu.persistent_step --out FILE`. Each way to run it is compared with the engine's
chain of kernels, then both are timed in CUDA graphs, by turns. Times are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import ForwardBatch
from minisgl.benchmark.kernels import make_decode
from minisgl.benchmark.report import save
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.kernels.norm import add_norm
from minisgl.models.fused import FusedModel
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights
from minisgl.parallel.comm import SingleRank
from tests.gpu.persistent_kernel import (
    launch,
    request_of,
    score_scale,
    shape_of,
    shared,
    stack,
    step_kernel,
)  # fmt: skip
from tests.gpu.persistent_parts import Request, Shared, Weights

WAYS: dict[str, dict[str, Any]] = {
    "barrier": {},
    "barrier, registers": {"early": True},
    "barrier, registers and L2": {"early": True, "ahead": 1},
    "barrier, registers and L2 two ahead": {"early": True, "ahead": 2},
    "data": {"sync": 2},
    "data, registers": {"sync": 2, "early": True},
    "data, registers and L2": {"sync": 2, "early": True, "ahead": 1},
    "barrier, registers and L2, two programs an SM": {
        "early": True, "ahead": 1, "programs": 256, "warps": 4,
    },
    "data, registers, two programs an SM": {
        "sync": 2, "early": True, "programs": 256, "warps": 4,
    },
    "nobody waits": {"sync": 0, "early": True},
    "barriers alone": {"work": 0},
}  # fmt: skip
SENSELESS = ("nobody waits", "barriers alone")  # timed, but they compute nothing
MODEL, CALLS, REPLAYS = "Qwen/Qwen3-0.6B", 4, 15


def compile_way(way: str) -> float:
    """Compile one way in a process of its own, which leaves it in Triton's cache; its seconds."""
    model, start = ModelConfig.from_hf(KNOWN_CONFIGS[MODEL]), time.monotonic()
    low, wide, int32, int64 = (
        torch.empty(16, dtype=t, device="cuda")
        for t in (torch.bfloat16, torch.float32, torch.int32, torch.int64)
    )
    s = shape_of(model, **WAYS[way])
    step_kernel.warmup(
        Weights(*[low] * 8), Request(low, low, int32, int64, int64, int64, wide, 656, 640),
        Shared(low, low, wide, wide, wide, low, int32), score_scale(s), 0,
        s.layers, S=s, FIRST=0, LAST=4, grid=(1,), num_warps=s.warps, num_stages=1,
        launch_cooperative_grid=True,
    )  # fmt: skip
    return round(time.monotonic() - start, 1)


def median_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call, from replays of a CUDA graph that holds some."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(CALLS)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    graph.replay()
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    del kept
    return round(statistics.median(a.elapsed_time(b) for a, b in marks) * 1e3 / CALLS, 2)


def gap(got: Tensor, want: Tensor) -> float:
    """Relative distance."""
    return float((got.double() - want.double()).norm() / want.double().norm())


class Trial:
    """A request of so many tokens, the newest one included, and what the engine makes of it."""

    def __init__(self, tokens: int, fused: FusedModel, w: Weights) -> None:
        model, device = fused.model.config, torch.device("cuda")
        case = make_decode(model, "fused", 16, np.array([tokens], np.int32), torch.bfloat16,
                           device, layers=model.num_layers)  # fmt: skip
        plan: Any = case.plan
        to = plan.buffers
        self.fused, self.w, self.model = fused, w, model
        self.fb = ForwardBatch(Phase.DECODE, to.rows, to.positions, to.out_loc, None, plan)
        self.request = request_of(case, fused.layers[0].attention.table)
        self.x, self.other = torch.randn(2, 1, model.hidden_size, device=device).div(50).bfloat16()
        self.new = plan.pool.buffer.flatten(2, 3)[:, :, int(to.out_loc)]  # keys and values
        self.want, self.kv = self.chain(), self.new.clone()

    def chain(self) -> Tensor:
        """All layers by the engine's kernels."""
        y = self.fused.all_one_row(self.x, self.fb)
        assert y is not None
        return y

    def head(self, y: Tensor) -> Tensor:
        """Logits of what came out of the layers."""
        y = add_norm(None, y, self.fused.final_norm, self.fused.eps)[0]
        logits: Tensor = self.fused.model.lm_head(y)
        return logits

    def prepare(self, way: str) -> tuple[dict[str, Any], Callable[[], Tensor]]:
        """How far one way is from the chain, on its second input; and the call to be timed."""
        s = shape_of(self.model, **WAYS[way])
        b = shared(s, self.other)
        launch(self.w, self.request, b, s)  # leaves its results behind
        b.x[0] = self.x[0] + 0.0
        self.new.zero_()
        got = launch(self.w, self.request, b, s)
        row = {
            "gap": gap(got, self.want), "kv_gap": gap(self.new, self.kv),
            "kv_equal": float((self.new == self.kv).double().mean()), "gave_up": int(b.counts[2]),
        }  # fmt: skip
        return row, lambda: launch(self.w, self.request, b, s)


@torch.inference_mode()
def measure(tokens: int, ways: Sequence[str], fused: FusedModel, w: Weights) -> dict[str, Any]:
    """All ways that compute the right thing, timed; the chain of kernels first and last."""
    trial, chain = Trial(tokens, fused, w), "chain of kernels"
    calls, rows = {chain: trial.chain}, dict[str, dict[str, Any]]({chain: {}})
    for way in ways:
        try:
            rows[way], call = trial.prepare(way)
        except Exception as error:  # it does not compile, or not all programs fit at once
            rows[way] = {"failed": repr(error)[:300]}
            continue
        if way in SENSELESS or (rows[way]["gap"] < 6e-2 and not rows[way]["gave_up"]):
            calls[way] = call
        print(tokens, way, rows[way], flush=True)

    def with_head(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: trial.head(call())

    trial.head(trial.chain())  # cuBLAS cannot start while a graph is recorded
    for name, call in calls.items():
        rows[name]["us"] = median_us(call)
        if name not in SENSELESS:
            rows[name]["with_head_us"] = median_us(with_head(call))
        print(tokens, name, rows[name], flush=True)
    rows[chain]["us_again"] = median_us(trial.chain)
    return {"tokens": tokens, "ways": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, compare, time, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[640, 4096])
    args = parser.parse_args(argv)
    with multiprocessing.get_context("spawn").Pool(min(16, len(args.ways))) as pool:
        compiling = pool.map_async(compile_way, args.ways)
        model = ModelConfig.from_hf(KNOWN_CONFIGS[MODEL])
        torch.manual_seed(0)
        net = build_model(model, SingleRank(), dtype=torch.bfloat16)
        load_dummy_weights(net, device="cuda", dtype=torch.bfloat16)
        fused = FusedModel(net)
        w = stack(fused)
        compiling.wait(60)  # a way that fails does so again below, and is stored
    results: dict[str, Any] = {"model": MODEL, "rows": []}
    given = list(sys.argv[1:] if argv is None else argv)
    given = [Path(word).name if Path(word).is_absolute() else word for word in given]
    for tokens in args.tokens:
        results["rows"].append(measure(tokens, args.ways, fused, w))
        save(args.out, results, shlex.join(["python3", "-m", "tests.gpu.persistent_step", *given]))


if __name__ == "__main__":
    main()
