"""Time to the first token, time per token, and a trace of steady decode steps.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity
from tqdm import tqdm

from minisgl.benchmark.roofline import Roofline
from minisgl.benchmark.workload import check_room
from minisgl.config.rules import refuse
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.llm import LLM
from minisgl.scheduler.messages import ErrorReply, UserMsg

SAMPLING = {"greedy": 0.0, "sampled": 0.6}  # name to temperature
SKIP = 4  # decode steps before the batch counts as steady


class Timeline(NamedTuple):
    """Arrival of tokens on the host: seconds since the start, and their numbers."""

    seconds: list[float]
    tokens: list[int]


def start_together(
    llm: LLM, batch: int, prompt_len: int, output_len: int, temperature: float, seed: int
) -> None:
    """Queue `batch` requests with random prompts, without running a step."""
    rng = np.random.default_rng(seed)
    limits, most = llm.limits, llm.config.max_running_req
    check_room("prompt-len", prompt_len, output_len, limits.max_seq_len)
    need, room = batch * (prompt_len + output_len), limits.pool_tokens
    if need > room:
        raise ValueError(f"batch-sizes: {batch} need {need} KV tokens, there are {room}")
    if batch > most:
        raise refuse("batch-sizes", f"at most {most}, which is max_running_req", batch)
    params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)
    prompts = rng.integers(0, min(limits.vocab_size, 10_001), (batch, prompt_len)).tolist()
    first = llm.next_uid
    llm.next_uid += batch
    llm.channel.put_messages(*(UserMsg(first + i, ids, params) for i, ids in enumerate(prompts)))


def step_of(llm: LLM) -> Callable[[], object]:
    """Return the scheduler's step function, overlapped if the engine overlaps."""
    return llm.scheduler.step_overlap if llm.scheduler.overlap else llm.scheduler.step


def drive(llm: LLM) -> Timeline:
    """Run the scheduler until it is idle; read the clock once per step."""
    step, line, start = step_of(llm), Timeline([], []), time.perf_counter()
    while llm.channel.waiting or llm.scheduler.has_work:
        step()
        if replies := llm.channel.take_replies():
            line.seconds.append(time.perf_counter() - start)
            line.tokens.append(len(replies))
            if isinstance(replies[0], ErrorReply):
                raise ValueError(replies[0].message)
    return line


def first_token_seconds(line: Timeline, batch: int) -> list[float]:
    """Return the seconds to the first token of each request, ascending: [batch]."""
    return [float(t) for t in np.repeat(line.seconds, line.tokens)[:batch]]


def steady_gaps(line: Timeline, batch: int, skip: int = SKIP) -> list[float]:
    """Return the seconds between successive steps that both decode the whole batch."""
    after = int(np.searchsorted(np.cumsum(line.tokens), batch))  # the step of the last first token
    times, full = np.array(line.seconds)[after + 1 :], np.array(line.tokens)[after + 1 :] == batch
    gaps = np.diff(times)[full[1:] & full[:-1]]
    return [float(gap) for gap in gaps[skip:]]


def latency_row(line: Timeline, batch: int) -> dict[str, Any]:
    """Compute TTFT and TPOT of one run in milliseconds; ValueError if no step was steady."""
    gaps = steady_gaps(line, batch)
    if not gaps:
        raise ValueError(f"output-len: batch {batch} had no steady decode step; ask for more")
    row: dict[str, Any] = {"batch": batch, "tpot_ms": round(sum(gaps) / len(gaps) * 1e3, 4)}
    for name, times in (("gap_ms", gaps), ("ttft_ms", first_token_seconds(line, batch))):
        row[name] = {f"p{p}": round(float(np.percentile(times, p)) * 1e3, 4) for p in (50, 99)}
    return row | {"steps": len(gaps)}


def median_row(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the row with the median value of `name`, and add the values of all rows."""
    ordered = sorted(rows, key=lambda row: row[name])
    return {**ordered[len(rows) // 2], f"all_{name}": [row[name] for row in rows]}


def measure_latency(
    llm: LLM, batch_sizes: Sequence[int], *, prompt_len: int, output_len: int,
    sampling: Sequence[str], repeats: int, seed: int = 0, roof: Roofline | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure each batch size and way of sampling: the median of `repeats` runs after a warm-up.

    With a roofline, add `floor_ms` and the achieved `tb_per_s` of a step halfway through.
    """
    cases = [(batch, name) for batch in batch_sizes for name in sampling]
    rows = []
    for batch, name in tqdm(cases, desc="batch sizes", disable=None):
        runs = []
        for _ in range(repeats + 1):
            seed += 1
            start_together(llm, batch, prompt_len, output_len, SAMPLING[name], seed)
            runs.append(latency_row(drive(llm), batch))
        row = {**median_row(runs[1:], "tpot_ms"), "sampling": name}
        if roof is not None:
            work = roof.decode_work(np.full(batch, prompt_len + output_len // 2))
            row["floor_ms"] = round(roof.seconds(work) * 1e3, 4)
            row["tb_per_s"] = round(work.nbytes / row["tpot_ms"] / 1e9, 4)
        rows.append(row)
    return rows


ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """Device activity: start and end in microseconds, and the launch that caused it."""

    start: float
    end: float
    launch: int


def device_intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """Return a Chrome trace's intervals on the device: kernels, copies and fills."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    return [
        Interval(e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("correlation", -1))
        for e in found
    ]


class Idle(NamedTuple):
    """Microseconds of a window: total, idle within launches, idle between launches."""

    window: float
    inside: float
    between: float


def idle_times(events: Iterable[Interval]) -> Idle:
    """Sum the gaps in the union of all intervals, from the first start to the last end."""
    ordered = sorted(events)
    if not ordered:
        raise ValueError("events: the trace shows nothing on a device")
    start, reach, launch = ordered[0]
    gaps = {True: 0.0, False: 0.0}  # within one launch, or between two
    for event in ordered:
        gaps[event.launch == launch] += max(0.0, event.start - reach)
        if event.end >= reach:
            reach, launch = event.end, event.launch
    return Idle(reach - start, gaps[True], gaps[False])


def trace_row(path: Path, batch: int, steps: int, sampling: str) -> dict[str, Any]:
    """Summarize a trace: milliseconds per step and idle shares, if it shows a device."""
    row: dict[str, Any] = {"batch": batch, "steps": steps, "sampling": sampling, "trace": path.name}
    events = device_intervals(json.loads(path.read_text()))
    if not events:
        return row
    window, inside, between = idle_times(events)
    return row | {
        "step_ms": round(window / steps / 1e3, 4),
        "kernels_per_step": round(len(events) / steps, 1),
        "idle_share": round((inside + between) / window, 4),
        "idle_between_launches": round(between / window, 4),
        "idle_inside_graphs": round(inside / window, 4),
    }


def profile_decode(
    llm: LLM, batch: int, path: Path, *, prompt_len: int, steps: int, sampling: str = "greedy"
) -> dict[str, Any]:
    """Write a Chrome trace of `steps` steady decode steps to `path`; return its summary."""
    engine, step, full = llm.scheduler.engine, step_of(llm), 0
    assert isinstance(engine, Engine)
    device = engine.device
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    start_together(llm, batch, prompt_len, steps + 4 * SKIP, SAMPLING[sampling], seed=batch)
    while full <= SKIP:
        step()
        full += len(llm.channel.take_replies()) == batch
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    drive(llm)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return trace_row(path, batch, steps, sampling)
