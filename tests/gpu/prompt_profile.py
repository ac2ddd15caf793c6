"""The GPU's time in a long prompt: kernels, their speed, power and clock.

`python3 -m tests.gpu.prompt_profile --out FILE`
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.profiler import ProfilerActivity

from minisgl import LLM
from minisgl.benchmark import latency
from minisgl.benchmark.report import save
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from tests.gpu.trials import engine

MODEL, BUDGET = "Qwen/Qwen3-8B", 8192  # tokens of a step
KINDS = {"attention": r"^prefill_kernel", "GEMM": r"nvjet|gemm|cutlass", "silu": r"^silu",
         "norm": r"^add_norm", "rotary": r"^rotate"}  # fmt: skip


@contextmanager
def watched(of: dict[str, Any]) -> Iterator[None]:
    """Sample the power and the clock of the GPU."""
    pynvml.nvmlInit()
    gpu, seen, done = pynvml.nvmlDeviceGetHandleByIndex(0), [], threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            seen.append((pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, clock))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        of["watts"], of["mhz"] = (statistics.median(values) for values in zip(*seen))


def first_ms(llm: LLM, length: int, seed: int) -> float:
    """Milliseconds to the first token of a new prompt; no token follows."""
    latency.start_together(llm, 1, length, 1, 0.0, seed)
    return latency.first_token_seconds(latency.drive(llm), 1)[-1] * 1e3


def kernels_of(llm: LLM, length: int, seed: int) -> dict[str, Any]:
    """Milliseconds of the GPU by kind of kernel, and TFLOP/s of the GEMMs of each shape."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
        first_ms(llm, length, seed)
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    for event in trace.key_averages():
        if event.device_type.name == "CUDA":
            found = [kind for kind, name in KINDS.items() if re.search(name, event.key)]
            kinds[found[0] if found else "other"] += event.device_time_total / 1e3
    gemms = {}
    for event in trace.key_averages(group_by_input_shape=True):
        if event.key == "aten::mm":
            (rows, k), (_, n) = ast.literal_eval(str(event.input_shapes))
            if rows > 1:
                ms = event.device_time_total / 1e3
                gemms[f"{rows} x {k} x {n}"] = {
                    "count": event.count, "ms": round(ms, 2),
                    "tflops": round(2 * rows * k * n * event.count / ms / 1e9, 1),
                }  # fmt: skip
    return {"ms": {kind: round(ms, 2) for kind, ms in kinds.items()}, "gemms": gemms}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    model, rows = ModelConfig.from_hf(KNOWN_CONFIGS[MODEL]), []
    heads, layers = model.num_qo_heads * model.head_dim, model.num_layers
    with engine(MODEL, cuda_graph_max_bs=8) as llm:
        for length in args.lengths:
            row: dict[str, Any] = {"tokens": length}
            times = [first_ms(llm, length, length + n) for n in range(2)]
            with watched(row):
                times = [first_ms(llm, length, 2 * length + n) for n in range(args.repeats)]
            row |= {"all_ms": times, **kernels_of(llm, length, 3 * length)}
            row["ttft_ms"] = round(statistics.median(times), 2)
            attention = 4 * length * (length + 1) / 2 * heads * layers
            row["attention_tflops"] = round(attention / row["ms"]["attention"] / 1e9, 1)
            row["gemm_tflop"] = round(
                sum(g["tflops"] * g["ms"] for g in row["gemms"].values()) / 1e3, 1
            )
            row["gemm_tflops"] = round(row["gemm_tflop"] / row["ms"]["GEMM"] * 1e3, 1)
            rows.append(row)
            print(row, flush=True)
    command = f"python3 -m tests.gpu.prompt_profile --out {args.out.name}"
    save(args.out, {"model": MODEL, "budget": BUDGET, "rows": rows}, command)


if __name__ == "__main__":
    main()
