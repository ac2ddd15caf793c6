"""A busy server with and without prefill in groups (chapter 09c), to $OUT/delay_SIZE.json.

python3 tests/gpu/delayed_prefill.py MODEL REQUESTS SECONDS VARIANT...

MODEL is a model name of the benchmarks, with random weights; the variants, "plain" or
"delayed", run one after the other in one engine, as long as SECONDS have not passed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark import offline, options, report
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.core import Batch, Phase
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM
from minisgl.scheduler.phases import PrefillManager
from minisgl.scheduler.scheduler import Launched, Scheduler


class Step(NamedTuple):
    """A launch: its time, its step, and the waiting and running requests."""

    time: float
    phase: Phase
    requests: int
    waiting: int
    running: int


def watch(scheduler: Scheduler) -> list[Step]:
    """A list that grows by one entry with every launch."""
    log: list[Step] = []
    plain = scheduler.launch

    def launch(batch: Batch) -> Launched:
        waiting, running = len(scheduler.prefill.waiting), len(scheduler.decode.running)
        log.append(Step(time.perf_counter(), batch.phase, batch.size, waiting, running))
        return plain(batch)

    scheduler.launch = launch  # type: ignore[method-assign]
    return log


def row_of(variant: str, log: Sequence[Step], seconds: float, tokens: int) -> dict[str, Any]:
    """One run; "busy" is the part in which somebody waits, from 200 running requests on."""
    first = next(i for i, step in enumerate(log) if step.running >= 200)
    last = max(i for i, step in enumerate(log) if step.waiting > 0)
    took, made = log[last].time - log[first].time, sum(s.requests for s in log[first:last])
    decodes = [step.time for step in log if step.phase is Phase.DECODE]
    gaps = np.diff(decodes) * 1e3
    pauses = {"p50": np.median(gaps), "p99": np.percentile(gaps, 99), "max": gaps.max()}
    return {
        "variant": variant, "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "busy": {"seconds": round(took, 3), "tokens": made, "tokens_per_s": round(made / took, 1)},
        "decode_steps": len(decodes), "prefill_steps": len(log) - len(decodes),
        "gap_ms": {name: round(float(gap), 2) for name, gap in pauses.items()},
    }  # fmt: skip


def measure(name: str, requests: int, limit: float, variants: Sequence[str]) -> None:
    """Run the variants, and store the results after each."""
    begin, path = (
        time.perf_counter(),
        Path(os.environ["OUT"]) / f"delay_{name.split('-', 1)[1]}.json",
    )
    with options.model_folder(name, True) as folder, LLM(folder, use_dummy_weight=True) as llm:
        prefill, log, rows = llm.scheduler.prefill, watch(llm.scheduler), list[dict[str, Any]]()
        schedules = {"plain": MethodType(PrefillManager.schedule, prefill)}
        schedules["delayed"] = prefill.schedule
        work = random_workload(llm.limits.vocab_size, requests, (100, 1024), (100, 1024), 0)
        short = [RandomRequest(w.input_ids, 6) for w in work[:300]]
        with frozen_heap():
            offline.run_once(llm, offline.resample(short, llm.limits.vocab_size, 99), 0.0)
            for index, variant in enumerate(variants):
                if time.perf_counter() - begin > limit:
                    break
                prefill.schedule = schedules[variant]  # type: ignore[method-assign]
                log.clear()
                fresh = offline.resample(work, llm.limits.vocab_size, 1000 + index)
                seconds = offline.run_once(llm, fresh, 0.0)
                rows.append(row_of(variant, log, seconds, sum(w.output_len for w in work)))
                print(json.dumps(rows[-1]), flush=True)
                results = {
                    "model": name, "requests": requests, "rows": rows,
                    "attention_backend": llm.scheduler.engine.config.attention_backend,
                }  # fmt: skip
                command = "python3 tests/gpu/delayed_prefill.py " + " ".join(sys.argv[1:])
                report.save(path, results, command)


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
