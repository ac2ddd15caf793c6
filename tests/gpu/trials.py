"""Trials behind two choices of the engine, side by side in one process on one GPU.

`python3 -m tests.gpu.trials cuts --out FILE` gives the time of a decode step for each batch size
and each way to cut decode attention; `... mailbox --out FILE` the time per token, the host's work
and the device's idle share with and without the mailbox of recorded steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from minisgl import LLM, SamplingParams
from minisgl.attention import fused_backend
from minisgl.benchmark import latency, offline
from minisgl.benchmark.options import Parser, model_folder
from minisgl.benchmark.profile import profile_decode
from minisgl.benchmark.report import save
from minisgl.benchmark.workload import random_workload
from minisgl.engine import step_graph
from minisgl.kernels import decode_attention
from minisgl.scheduler.messages import UserMsg

WAYS = (
    "128-4-2 uncut", "64-2-2 uncut", "32-1-6 uncut", "32-1-4 uncut",
    "128-4-2 two", "64-2-2 two", "now",
)  # fmt: skip
SPLITS = {"uncut": (2, 2048), "two": (2, 1), "four": (4, 1)}
MOST, VOCAB = 256, 10_001  # as many ids as the offline workload draws from: other lengths else
CASES = [(batch, name) for batch in (1, 8, 64) for name in latency.SAMPLING]


@contextmanager
def engine(model: str, **fields: Any) -> Iterator[LLM]:
    """An engine with dummy weights; its memory is free again afterwards."""
    with model_folder(model, True) as folder, LLM(folder, use_dummy_weight=True, **fields) as llm:
        yield llm
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def cut(way: str) -> Iterator[None]:
    """Decode attention cut as `way` says: TILE-warps-stages, and into how many parts; or as now."""
    if way == "now":
        yield
        return
    shape, _, parts = way.partition(" ")
    tile, warps, stages = map(int, shape.split("-"))

    def tile_of(bs: int, kv: int, dim: int, itemsize: int) -> tuple[int, ...]:
        return max(16, tile * 256 // max(256, dim * itemsize)), warps, stages

    def splits_of(bs: int, kv: int) -> tuple[int, int]:
        return SPLITS[parts]

    with (
        mock.patch.object(decode_attention, "tile_of", tile_of),
        mock.patch.object(decode_attention, "splits_of", splits_of),
        mock.patch.object(fused_backend, "splits_of", splits_of),
    ):
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
    """All requests at once, with as many new tokens each as `new` says."""
    first = llm.next_uid
    llm.next_uid += len(prompts)
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in new]
    asked = enumerate(zip(prompts, params, strict=True))
    llm.channel.put(*(UserMsg(first + i, list(ids), how) for i, (ids, how) in asked))
    return latency.drive(llm)


def cuts(args: argparse.Namespace) -> dict[str, Any]:
    """Every way on the offline workload, and with prompts of one length that end in eights."""
    rows, rng = [], np.random.default_rng(5)
    workload = offline.redraw(random_workload(VOCAB, MOST), VOCAB, 5)
    uniform = rng.integers(0, VOCAB, (MOST, 700)).tolist()
    for way in tqdm(args.ways, desc="ways"):
        with cut(way), engine(args.model) as llm:
            ragged = run(llm, [r.input_ids for r in workload], [r.output_len for r in workload])
            even = run(llm, uniform, [30 + 10 * (i // 8) for i in range(MOST)])
        row = {"variant": way, "offline_s": ragged.seconds[-1], "ragged": steps_of(ragged)}
        rows.append(row | {"uniform": steps_of(even)})
    return {"model": args.model, "rows": rows}


def host_times(llm: LLM, batch: int, name: str) -> dict[str, Any]:
    """TPOT of two runs, and of a third one what each part of a turn takes the host, in µs."""
    parts: dict[str, list[float]] = defaultdict(list)
    tpot = []
    for number in range(3):
        if number == 2:
            llm.scheduler.trace = lambda e: parts[e.name].append((e.end - e.start) * 1e6)
        seed = 100 * batch + 10 * (name == "sampled") + number
        latency.start_together(llm, batch, 512, 160, latency.SAMPLING[name], seed)
        row = latency.latency_row(latency.drive(llm), batch)
        if number < 2:
            tpot.append(row["tpot_ms"])
    llm.scheduler.trace = None
    skip = 2 * latency.SKIP
    host = {
        part: [round(float(np.percentile(us[skip:], q)), 1) for q in (50, 99)]
        for part, us in parts.items()
    }
    return {"tpot": tpot, "host_us": host}


def mailbox(args: argparse.Namespace) -> dict[str, Any]:
    """With and without, in turns."""
    rows = []
    for number, used in tqdm([(n, used) for n in range(2) for used in (True, False)]):
        load = step_graph.load_mailbox if used else lambda most, device: None
        sizes = sorted({batch for batch, _ in CASES})
        how: dict[str, Any] = {"cuda_graph_bs": sizes, "max_running_req": sizes[-1]}
        row: dict[str, Any] = {"mailbox": used, "round": number}
        with mock.patch.object(step_graph, "load_mailbox", load), engine(args.model, **how) as llm:
            for batch, name in CASES:
                row[f"{batch} {name}"] = host_times(llm, batch, name)
            for batch, name in CASES[:4]:
                row[f"profile {batch} {name}"] = [traced(llm, batch, name) for _ in range(3)]
        rows.append(row)
    return {"model": args.model, "rows": rows}


def traced(llm: LLM, batch: int, name: str) -> list[float]:
    """Idle share of 40 steps, the part of it between launches, milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        row = profile_decode(llm, batch, path, prompt_len=512, steps=40, sampling=name)
    return [row["idle_share"], row["idle_between_launches"], row["step_ms"]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one trial and store it."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=("cuts", "mailbox"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--model", default="Qwen/Qwen3-0.6B", help="its shapes (default %(default)s)"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, help="cuts, such as '128-4-2 uncut'")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("trials need an NVIDIA GPU; torch finds none here")
    results = cuts(args) if args.trial == "cuts" else mailbox(args)
    save(args.out, results, f"python3 -m tests.gpu.trials {args.trial} --out {args.out.name}")


if __name__ == "__main__":
    main()
