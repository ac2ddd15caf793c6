"""Trials behind choices of the engine, side by side in one process on one GPU.

`python3 -m tests.gpu.trials TRIAL --out FILE`, where TRIAL is one of
  cuts      the time of a decode step for each batch size and each way to cut decode attention
  parts     the time of decode attention alone for few requests, cut into more and fewer parts
  backends  the same as cuts for each pair of attention backends
  prefill   the time to the first token of prompts of several lengths, for two pairs of backends
  attempts  throughput of a large model, as it is and changed, and the kernels of its steps
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from minisgl import LLM, SamplingParams
from minisgl.benchmark import latency, offline
from minisgl.benchmark.kernels import decode_rows, measure_rows
from minisgl.benchmark.latency import ON_DEVICE, profile_decode
from minisgl.benchmark.options import Parser, model_folder
from minisgl.benchmark.report import save
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.engine import engine as engine_module
from minisgl.kernels import decode_attention
from minisgl.scheduler.messages import UserMsg

WAYS = (
    "128-4-2 uncut", "64-2-2 uncut", "32-1-6 uncut", "32-1-4 uncut", "128-4-2 2", "64-2-2 2", "now",
)  # fmt: skip
SHAPES = ("128-4-2", "64-2-2", "64-4-2", "32-1-4", "32-2-3", "16-1-4")
PARTS = [f"{shape} {parts}" for shape in SHAPES for parts in (1, 2, 3, 4)]
BACKENDS = ("fi,fused", "triton,fused", "triton", "fi,fused")
SMS = 132  # of an H200
MOST, VOCAB = 256, 10_001  # as many ids as the offline workload draws from: other lengths else


@contextmanager
def engine(model: str, **fields: Any) -> Iterator[LLM]:
    """An engine with dummy weights; its memory is free again afterwards."""
    with model_folder(model, True) as folder, LLM(folder, use_dummy_weight=True, **fields) as llm:
        yield llm
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def cut(way: str) -> Iterator[None]:
    """Patch decode attention's tiles by `way`: TILE-warps-stages, splits per SM; or leave them."""
    if way == "now":
        yield
        return
    shape, _, parts = way.partition(" ")
    tile, warps, stages = map(int, shape.split("-"))
    usual = decode_attention.choose_shape

    def choose_shape(bs: int, kv: int, *of: Any) -> tuple[tuple[int, int, int, bool], int]:
        early = usual(bs, kv)[0][3]
        return (tile, warps, stages, early), 1 if parts == "uncut" else int(parts) * SMS // kv

    with mock.patch.object(decode_attention, "choose_shape", choose_shape):
        yield


Steps = dict[int, tuple[float, float, int]]  # median ms, ms in all, how many; by captured size


def steps_of(line: latency.Timeline) -> Steps:
    """Decode steps of a run by the size that the batch was padded to; others are left out."""
    times, tokens = np.array(line.seconds), np.array(line.tokens)
    buckets = -(-tokens // 8) * 8
    gaps: dict[int, list[float]] = defaultdict(list)
    start = int(np.searchsorted(np.cumsum(tokens), MOST)) + latency.SKIP
    for i in range(start, len(times) - 1):
        if tokens[i + 1] and buckets[i] == buckets[i + 1]:
            gaps[int(buckets[i])].append((times[i + 1] - times[i]) * 1e3)
    return {
        size: (round(float(np.median(ms)), 4), round(sum(ms), 2), len(ms))
        for size, ms in sorted(gaps.items())
    }


def run(llm: LLM, prompts: Sequence[Any], new: Sequence[int]) -> latency.Timeline:
    """Run all requests at once, with `new` tokens each."""
    first = llm.next_uid
    llm.next_uid += len(prompts)
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in new]
    asked = enumerate(zip(prompts, params, strict=True))
    llm.channel.put_messages(*(UserMsg(first + i, list(ids), how) for i, (ids, how) in asked))
    return latency.drive(llm)


def asked_for(requests: Sequence[RandomRequest]) -> tuple[list[Any], list[int]]:
    """Return prompts, and the number of new tokens of each."""
    return [r.input_ids for r in requests], [r.output_len for r in requests]


def step_times(llm: LLM) -> dict[str, Any]:
    """The offline workload, and prompts of one length whose answers end in eights."""
    workload = offline.resample(random_workload(VOCAB, MOST), VOCAB, 5)
    uniform = np.random.default_rng(5).integers(0, VOCAB, (MOST, 700)).tolist()
    ragged = run(llm, *asked_for(workload))
    even = run(llm, uniform, [30 + 10 * (i // 8) for i in range(MOST)])
    times = {"offline_s": ragged.seconds[-1], "ragged": steps_of(ragged)}
    return times | {"uniform": steps_of(even)}


def cuts(args: argparse.Namespace) -> dict[str, Any]:
    """Every way to cut."""
    rows = []
    for way in tqdm(args.ways or WAYS, desc="ways"):
        with cut(way), engine(args.model) as llm:
            rows.append({"variant": way, **step_times(llm)})
    return {"model": args.model, "rows": rows}


def parts(args: argparse.Namespace) -> dict[str, Any]:
    """Few requests, all shapes of tiles and numbers of parts, beside what the rule takes."""
    device, model = torch.device("cuda"), ModelConfig.from_hf(KNOWN_CONFIGS[args.model])
    rows = []
    for batch in (1, 2, 4, 8, 16):
        lengths = np.full(batch, 640, np.int32)
        for way in tqdm(args.ways or ["now", *PARTS], desc=f"batch {batch}"):
            with cut(way):
                case = decode_rows(model, ["fused"], [16], lengths, torch.bfloat16, device)
                rows += [{"variant": way, **row} for row in measure_rows(case, device)]
    return {"model": args.model, "rows": rows}


def backends(args: argparse.Namespace) -> dict[str, Any]:
    """Every pair of backends, the default one first and last."""
    rows = []
    for name in tqdm(args.ways or BACKENDS, desc="backends"):
        with engine(args.model, attention_backend=name) as llm:
            rows.append({"variant": name, **step_times(llm)})
    return {"model": args.model, "rows": rows}


FIRST_TOKENS = (1, 512), (16, 512), (1, 4096), (4, 4096), (1, 16384)  # how many, how long
REUSED = 4096  # tokens that a prompt shares with one before it


def first_token_ms(llm: LLM, prompts: list[list[int]]) -> float:
    """Milliseconds until each of the prompts has its first token."""
    line = run(llm, prompts, [1] * len(prompts))
    return round(line.seconds[-1] * 1e3, 3)


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """FlashInfer and our Triton kernels; five times each, after one or two that may compile."""
    rows, rng = [], np.random.default_rng(5)
    for name in tqdm(args.ways or ("fi,fused", "triton,fused", "fi,fused"), desc="backends"):
        row: dict[str, Any] = {"variant": name}
        with engine(args.model, attention_backend=name) as llm:
            for count, length in FIRST_TOKENS:
                draws = (rng.integers(0, VOCAB, (count, length)).tolist() for _ in range(6))
                row[f"{count} x {length}"] = [first_token_ms(llm, prompts) for prompts in draws][1:]
            stem = rng.integers(0, VOCAB, REUSED).tolist()
            tails = (rng.integers(0, VOCAB, 512).tolist() for _ in range(7))
            times = [first_token_ms(llm, [stem + tail]) for tail in tails]
            row[f"1 x 512 behind {REUSED} cached"] = times[2:]
        rows.append(row)
    return {"model": args.model, "rows": rows}


ATTEMPTS: dict[str, dict[str, Any]] = {  # what is changed, as fields of the engine
    "as it is": {},
    "torch multiplies": {"kernels": "torch"},
    "prefill steps of 4,096 tokens": {"max_extend_tokens": 4096},
    "prefill steps of 16,384 tokens": {"max_extend_tokens": 16384},
    "at most 192 requests at once": {"max_running_req": 192},
    "cuBLASLt multiplies": {},
    "weights of zero": {},  # these two are not for serving: the same kernels on other numbers
    "weights from -0.001 to 0.001": {},  # as vLLM fills models without a checkpoint
}
FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "weights of zero": nn.init.zeros_,
    "weights from -0.001 to 0.001": partial(nn.init.uniform_, a=-1e-3, b=1e-3),
}
TRACED, TRACE_STEPS = (8, 32, 64, 96, 128, 160, 192, 256), 10


def kernel_times(path: Path, steps: int) -> dict[str, float]:
    """Microseconds of a step by kernel, the longest first; a name without its parameters."""
    found: dict[str, float] = defaultdict(float)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            found[event["name"].partition("<")[0][:80]] += event["dur"] / steps
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {name: round(us, 1) for name, us in ordered}


def traced_kernels(llm: LLM, batch: int) -> dict[str, Any]:
    """Which kernels a greedy decode step of `batch` requests consists of."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        row = profile_decode(llm, batch, path, prompt_len=512, steps=TRACE_STEPS)
        return {**row, "kernels_us": kernel_times(path, TRACE_STEPS)}


@contextmanager
def multiplied(name: str) -> Iterator[None]:
    """Products by the library named in `name`, if there is one."""
    before = torch.backends.cuda.preferred_blas_library()
    if name == "cuBLASLt multiplies":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def filled(name: str) -> Iterator[None]:
    """Dummy weights of all engines made here in the format named in `name`, if there is one."""
    plain = engine_module.load_dummy_weights

    def load(model: nn.Module, **how: Any) -> None:
        plain(model, **how)
        for parameter in model.parameters():
            FILLED[name](parameter)

    with mock.patch.object(engine_module, "load_dummy_weights", load if name in FILLED else plain):
        yield


def attempts(args: argparse.Namespace) -> dict[str, Any]:
    """The offline workload, changed in one way at a time; of the engine as it is traces, too."""
    rows, more = [], dict[str, Any]()
    requests = random_workload(VOCAB, args.requests)
    for name in tqdm(args.ways or ATTEMPTS, desc="attempts"):
        with filled(name), multiplied(name), engine(args.model, **ATTEMPTS[name]) as llm:
            found = offline.measure_offline(llm, requests, temperature=0.6, repeats=1, seed=5)
            rows.append({"attempt": name, "fields": ATTEMPTS[name], **found})
            if name == "as it is":
                line = run(llm, *asked_for(offline.resample(requests, VOCAB, 99)))
                first = int(np.searchsorted(np.cumsum(line.tokens), len(requests)))
                more["prefill_seconds"] = round(line.seconds[first], 3)
                more["traces"] = [traced_kernels(llm, n) for n in TRACED if n <= args.requests]
    return {"model": args.model, "rows": rows, **more}


ALL = (cuts, parts, backends, prefill, attempts)
TRIALS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {f.__name__: f for f in ALL}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one trial and store it."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--model", default="Qwen/Qwen3-0.6B", help="its shapes (default %(default)s)"
    )
    ways = (
        "only these cuts ('128-4-2 uncut', '64-2-2 2'), backends ('fi,fused') or attempts, by name"
    )
    parser.add_argument("--ways", nargs="+", default=None, metavar="WAY", help=ways)
    parser.add_argument(
        "--requests", type=int, default=MOST, help="of the attempts (default %(default)s)"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("trials need an NVIDIA GPU; torch finds none here")
    given = list(sys.argv[1:] if argv is None else argv)
    given = [Path(word).name if Path(word).is_absolute() else word for word in given]
    results = TRIALS[args.trial](args)
    save(args.out, results, shlex.join(["python3", "-m", "tests.gpu.trials", *given]))


if __name__ == "__main__":
    main()
