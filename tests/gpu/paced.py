"""Loads that arrive by the clock, simulated (chapter 13da) or run by an engine in this process.

python3 -m tests.gpu.paced predict MODEL GPU FILE
python3 -m tests.gpu.paced measure MODEL GPU FILE

Both write the summary of each load. A prediction is committed before the run that it is about.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark import options, report
from minisgl.benchmark.load import LoadRun, online_workload
from minisgl.benchmark.simulate import GPUS, Arrivals, Device, simulate
from minisgl.benchmark.summary import summarize
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.engine import SchedulerConfig
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM

LOADS = [  # requests, requests a second, prompt tokens, new tokens
    (128, 4.0, (100, 1024), (100, 1024)),
    (192, 10.0, (100, 1024), (100, 1024)),
    (256, 24.0, (100, 1024), (100, 1024)),
    (192, 10.0, (1024, 3072), (32, 128)),
]


class WallClock(Device):
    """The time since the start, which nobody sets."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.perf_counter() - self.start


def measured(llm: LLM, requests: Sequence[RandomRequest]) -> LoadRun:
    """Run requests through the engine as they come."""
    scheduler = llm.scheduler
    scheduler.reset()
    before, arrivals = scheduler.channel, Arrivals(WallClock(), requests)
    scheduler.channel = arrivals
    while arrivals.waiting or scheduler.has_work:
        scheduler.step_overlap()
    scheduler.channel = before
    return LoadRun(arrivals.records, 0.0, False)


def runs(model: str, gpu: str, measure: bool) -> Iterator[LoadRun]:
    """The loads, one after the other."""
    loads = [online_workload(count, prompt, answer, seed, rate)
             for seed, (count, rate, prompt, answer) in enumerate(LOADS)]  # fmt: skip
    config = ModelConfig.from_hf(KNOWN_CONFIGS[model])
    if not measure:
        engine = SchedulerConfig(device="cpu", page_size=16, max_extend_tokens=8192)
        yield from (simulate(config, GPUS[gpu], load, config=engine).run for load in loads)
        return
    with options.model_folder(model, True) as folder, LLM(folder, use_dummy_weight=True) as llm:
        measured(llm, loads[0][:32])
        with frozen_heap():
            yield from (measured(llm, load) for load in loads)


def main(what: str, model: str, gpu: str, file: str) -> None:
    """Write the summaries."""
    rows: list[dict[str, Any]] = []
    for (count, rate, prompt, answer), run in zip(LOADS, runs(model, gpu, what == "measure")):
        load = {"requests": count, "rate": rate, "input_len": prompt, "output_len": answer}
        rows.append({"load": load, **summarize(run)})
        print(rows[-1], flush=True)
        command = f"python3 -m tests.gpu.paced {what} {model} {gpu} FILE"
        report.save(Path(file), {"model": model, "gpu": gpu, "rows": rows}, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
