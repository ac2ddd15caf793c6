"""Loads that arrive by the clock, simulated (chapter 13da) or run by engines in this process.

python3 -m tests.gpu.paced predict GPU FILE
python3 -m tests.gpu.paced measure GPU FILE [SECONDS]

Both write a summary of each load; no engine is started after SECONDS. A prediction is committed
before the run that it is about.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark import options, report
from minisgl.benchmark.load import LoadRun, online_workload
from minisgl.benchmark.simulate import Arrivals, Device, simulate, with_burst
from minisgl.benchmark.step_cost import GPUS
from minisgl.benchmark.summary import summarize
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.engine import SchedulerConfig
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM


class Load(NamedTuple):
    """`requests` random ones, all at 0 without a `rate`; `burst` long prompts of one client."""

    requests: int
    rate: float | None
    prompt: tuple[int, int]
    answer: tuple[int, int]
    burst: int = 0

    def make(self, seed: int) -> list[RandomRequest]:
        """Return the requests; those of the burst come at 3 s."""
        found = online_workload(self.requests, self.prompt, self.answer, seed, self.rate)
        longer = online_workload(self.burst, (4000, 4200), (32, 64), seed + 1)
        return with_burst(found, longer, 3.0) if self.burst else found


class Engine(NamedTuple):
    """A model on `tp` GPUs, the scheduler's policy, and what it gets to do."""

    model: str
    tp: int
    policy: str
    budget: int
    loads: tuple[Load, ...]


OFFLINE = Load(192, None, (64, 512), (64, 256))
BURST = Load(72, 8.0, (64, 256), (64, 192), burst=20)
ENGINES = [
    Engine("Qwen3-8B", 1, "fcfs", 8192, (
        OFFLINE, Load(96, 12.0, (200, 800), (50, 250)), Load(24, 2.5, (4000, 12000), (32, 128)),
        BURST,
    )),
    Engine("Qwen3-8B", 1, "fair", 512, (BURST,)),
    Engine("Qwen3-8B", 2, "fcfs", 8192, (OFFLINE, Load(192, 24.0, (200, 800), (50, 250)))),
    Engine("Qwen3-30B-A3B", 2, "fcfs", 8192, (OFFLINE, Load(80, 10.0, (200, 800), (50, 250)))),
    Engine("Qwen3-30B-A3B", 1, "fcfs", 8192, (OFFLINE, Load(80, 10.0, (200, 800), (50, 250)))),
]  # fmt: skip


class WallClock(Device):
    """The time since the start; setting it waits."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    @now.setter
    def now(self, until: float) -> None:
        time.sleep(max(0.0, until - self.now))


def measured(llm: LLM, requests: Sequence[RandomRequest]) -> LoadRun:
    """Run requests through the engine as they come; with several ranks, on all of them."""
    scheduler, arrivals = llm.scheduler, Arrivals(WallClock(), requests)
    before = scheduler.channel
    scheduler.channel = arrivals if llm.ranks is None else llm.ranks.channel(arrivals)
    while arrivals.waiting or scheduler.has_work:
        scheduler.step_overlap(block=True)
    scheduler.channel = before
    return LoadRun(arrivals.records, 0.0, False)


def runs(engine: Engine, gpu: str, measure: bool) -> Iterator[LoadRun]:
    """The loads of an engine, one after the other."""
    loads = [load.make(seed) for seed, load in enumerate(engine.loads)]
    model = f"Qwen/{engine.model}"
    fields: dict[str, Any] = {
        "schedule_policy": engine.policy, "max_extend_tokens": engine.budget,
    }  # fmt: skip
    if not measure:
        config = SchedulerConfig(device="cpu", **fields)
        shape = ModelConfig.from_hf(KNOWN_CONFIGS[model])
        for load in loads:
            yield simulate(shape, GPUS[gpu], load, config=config, tp=engine.tp).run
        return
    with options.model_folder(model, True) as folder, LLM(
        folder, use_dummy_weight=True, tensor_parallel_size=engine.tp, **fields
    ) as llm:  # fmt: skip
        measured(llm, online_workload(32, (64, 600), (8, 64), 100))
        with frozen_heap():
            yield from (measured(llm, load) for load in loads)


def summary_of(run: LoadRun, requests: Sequence[RandomRequest]) -> dict[str, Any]:
    """Return the summary of a run; of a burst's load, that of all others."""
    kept = [record for record, request in zip(run.records, requests) if request.client != "burst"]
    return summarize(run._replace(records=kept))


def main(what: str, gpu: str, file: str, seconds: str = "inf") -> None:
    """Write the summaries, after each load."""
    start, rows = time.perf_counter(), list[dict[str, Any]]()
    for engine in ENGINES:
        if time.perf_counter() - start > float(seconds):
            break
        given = {"model": engine.model, "tp": engine.tp, "policy": engine.policy,
                 "budget": engine.budget}  # fmt: skip
        found = runs(engine, gpu, what == "measure")
        for seed, (load, run) in enumerate(zip(engine.loads, found)):
            rows.append(given | {"load": load._asdict()} | summary_of(run, load.make(seed)))
            print(round(time.perf_counter() - start, 1), rows[-1], flush=True)
            command = f"python3 -m tests.gpu.paced {what} {gpu} FILE"
            report.save(Path(file), {"gpu": gpu, "rows": rows}, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
