"""A trace of steady decode steps, and how long the device was idle in it.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from minisgl.benchmark.latency import SAMPLING, SKIP, start_together
from minisgl.llm import LLM

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """Something the device did: from when to when in microseconds, and who launched it."""

    start: float
    end: float
    launch: int


def device_intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """What a Chrome trace says of the device: kernels, copies and fills."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    return [
        Interval(e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("correlation", -1))
        for e in found
    ]


class Idle(NamedTuple):
    """Microseconds of a window: all of it, and the idle parts inside and between launches."""

    window: float
    inside: float
    between: float

    @property
    def share(self) -> float:
        """Idle part of the window, 0 to 1."""
        return (self.inside + self.between) / self.window if self.window else 0.0


def idle_times(events: Iterable[Interval]) -> Idle:
    """The gaps in the union of all intervals; the window is from the first start to the last end.

    A gap belongs to a launch if the intervals on both of its sides do.
    """
    ordered = sorted(events)
    if not ordered:
        raise ValueError("events: the trace shows nothing on a device")
    start, reach, launch = ordered[0]
    inside = between = 0.0
    for event in ordered:
        gap = event.start - reach
        if gap > 0:
            inside, between = (
                (inside + gap, between) if event.launch == launch else (inside, between + gap)
            )
        if event.end >= reach:
            reach, launch = event.end, event.launch
    return Idle(reach - start, inside, between)


def idle_share(events: Iterable[Interval]) -> float:
    """Share of the window in which no interval lies, 0 to 1."""
    return idle_times(events).share


def profile_decode(
    llm: LLM, batch: int, path: Path, *, prompt_len: int, steps: int, sampling: str = "greedy"
) -> dict[str, Any]:
    """Write a Chrome trace of `steps` steady decode steps to `path`; the device's idle share."""
    on_gpu = llm.scheduler.engine.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    turn = llm.scheduler.step_overlap if llm.scheduler.overlap else llm.scheduler.step
    output_len = steps + 4 * SKIP
    start_together(llm, batch, prompt_len, output_len, SAMPLING[sampling], seed=batch)
    full = 0
    while full <= SKIP:
        turn()
        full += len(llm.channel.take_replies()) == batch
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            turn()
        if on_gpu:
            torch.cuda.synchronize(llm.scheduler.engine.device)
    while llm.scheduler.has_work:
        turn()
    llm.channel.take_replies()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return trace_row(path, batch, steps, sampling)


def trace_row(path: Path, batch: int, steps: int, sampling: str) -> dict[str, Any]:
    """What a trace says: milliseconds of a step, and idle shares; none if no device is in it."""
    row: dict[str, Any] = {"batch": batch, "steps": steps, "sampling": sampling, "trace": path.name}
    events = device_intervals(json.loads(path.read_text()))
    if not events:
        return row
    idle = idle_times(events)
    return row | {
        "step_ms": round(idle.window / steps / 1e3, 4),
        "kernels_per_step": round(len(events) / steps, 1),
        "idle_share": round(idle.share, 4),
        "idle_between_launches": round(idle.between / idle.window, 4),
        "idle_inside_graphs": round(idle.inside / idle.window, 4),
    }


def middle_trace(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trace with the median idle share, with the shares of all; the first without a device."""
    if "idle_share" not in rows[0]:
        return rows[0]
    ordered = sorted(rows, key=lambda row: row["idle_share"])
    return {**ordered[len(rows) // 2], "all_idle_shares": [row["idle_share"] for row in rows]}
