"""Summary of a run under load: throughput, distribution of latencies, errors.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minisgl.benchmark.load import LoadRun, Record

TIMES = {
    "ttft": "sending to first text",
    "tpot": "each later token",
    "itl": "gaps between chunks",
    "e2e": "sending to last text",
    "late": "sent after due",
}


def spread_ms(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum in milliseconds; None if there are no values."""
    ms = np.array([1e3 * s for s in seconds if s is not None])
    if not len(ms):
        return None
    p50, p90, p99 = np.percentile(ms, [50, 90, 99])
    named = {"mean": ms.mean(), "p50": p50, "p90": p90, "p99": p99, "max": ms.max()}
    return {name: round(float(value), 3) for name, value in named.items()}


def times_ms(done: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """Return the spread of every time in `TIMES` over answered requests."""
    return {
        "ttft": spread_ms(r.ttft for r in done),
        "tpot": spread_ms(r.tpot for r in done),
        "itl": spread_ms(gap for r in done for gap in np.diff(r.arrivals)),
        "e2e": spread_ms(r.e2e for r in done),
        "late": spread_ms(r.sent - r.due for r in done),
    }


def peak(done: Sequence[Record]) -> int:
    """Return the largest number of requests in flight at once."""
    steps = [(r.sent, 1) for r in done] + [(r.arrivals[-1], -1) for r in done]
    return int(max(np.cumsum([step for _, step in sorted(steps)]), default=0))


def summarize(run: LoadRun) -> dict[str, Any]:
    """Summarize a run; tokens and times count answered requests, all others are errors."""
    done = [r for r in run.records if r.error is None]
    first = min((r.sent for r in done), default=0.0)
    seconds = max((r.arrivals[-1] for r in done), default=0.0) - first
    per_s = 1 / seconds if seconds > 0 else 0.0
    tokens_in = sum(r.prompt_tokens for r in done)
    tokens_out = sum(r.output_tokens for r in done)
    chunks, cached = sum(len(r.arrivals) for r in done), [r.cached_tokens for r in done]
    return {
        "requests": len(run.records),
        "completed": len(done),
        "errors": dict(Counter(r.error for r in run.records if r.error is not None)),
        "interrupted": run.interrupted,
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(done) * per_s, 4),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "output_tokens_per_s": round(tokens_out * per_s, 2),
        "cached_tokens": None if None in cached else sum(c or 0 for c in cached),
        "tokens_counted_by": "usage" if all(r.counted for r in done) else "chunks",
        "tokens_per_chunk": round(tokens_out / chunks, 3) if chunks else None,
        "peak_running": peak(done),
        "client_cpu_s": round(run.client_cpu_s, 3),
        "ms": times_ms(done),
    }


def table(s: dict[str, Any]) -> str:
    """Format a summary as a table for the terminal."""
    columns = ("mean", "p50", "p90", "p99", "max")
    lines = [
        f"{s['completed']} of {s['requests']} requests in {s['seconds']:.2f} s: "
        f"{s['requests_per_s']:.2f} requests/s, {s['output_tokens_per_s']:,.1f} output tokens/s "
        f"(counted by {s['tokens_counted_by']}); at most {s['peak_running']} at once",
    ]
    if s["errors"]:
        lines.append("errors: " + ", ".join(f"{k} {n}" for k, n in sorted(s["errors"].items())))
    if s["completed"]:
        lines.append(f"{'ms':10}" + "".join(f"{name:>11}" for name in columns))
    for name, what in TIMES.items():
        if (row := s["ms"][name]) is not None:
            cells = "".join(f"{row[column]:11,.2f}" for column in columns)
            lines.append(f"{name.upper() if len(name) < 5 else name:10}{cells}   {what}")
    cached = s["cached_tokens"]
    said = "not reported" if cached is None else f"{cached} of {s['input_tokens']}"
    chunk, cpu = s["tokens_per_chunk"], s["client_cpu_s"]
    lines.append(f"cached prompt tokens {said}; tokens a chunk {chunk}; client {cpu:.2f} s of CPU")
    return "\n".join(lines)
