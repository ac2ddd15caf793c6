"""Loads that arrive by the clock, simulated (chapter 13da) or run by engines in this process.

python3 -m tests.gpu.paced predict FILE
python3 -m tests.gpu.paced measure FILE [--engines 8B/1 0.6B/1 …] [--seconds 150]

`predict` writes a summary of each load for every kind of GPU, `measure` for the GPU at hand; no
engine is started after `--seconds`, and none that needs more GPUs than there are. A prediction is
committed before the run that it is about. Each load runs twice, the second run counts; `built`
counts the Triton kernels that were compiled or loaded in it, `steps` has the mean times of its
steps by kind, and `first_run` describes the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton import knobs

from minisgl.benchmark import options, report
from minisgl.benchmark.load import LoadRun, online_workload
from minisgl.benchmark.simulate import Arrivals, Device, simulate, with_burst
from minisgl.benchmark.step_cost import GPUS
from minisgl.benchmark.summary import summarize
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.engine import SchedulerConfig
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Batch
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM
from minisgl.scheduler.build import Parts, build_prefill
from minisgl.scheduler.mixed import MixedPrefill


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


class Setting(NamedTuple):
    """A scheduling policy, its token budget, and the loads to run with them."""

    policy: str
    budget: int
    loads: tuple[Load, ...]


class Engine(NamedTuple):
    """A model on `tp` GPUs; with several GPUs, one setting."""

    model: str
    tp: int
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        """Return its name on the command line: the size of the model, and the GPUs."""
        return f"{self.model.removeprefix('Qwen3-')}/{self.tp}"


class Measured(NamedTuple):
    """A run, the Triton kernels that were compiled or loaded in it, and its steps."""

    run: LoadRun
    built: dict[str, int]
    steps: dict[str, dict[str, float]]


OFFLINE = Load(192, None, (64, 512), (64, 256))
BUSY = Load(160, 20.0, (16, 128), (100, 300))  # most prompts join running requests in a step
BURST = Load(72, 8.0, (64, 256), (64, 192), burst=20)
ENGINES = [
    Engine("Qwen3-8B", 1, (
        Setting("fcfs", 8192, (
            OFFLINE, Load(96, 12.0, (200, 800), (50, 250)), Load(16, 2.5, (4000, 12000), (32, 128)),
            BURST,
        )),
        Setting("fair", 8192, (BUSY, BURST)),
        Setting("fair", 512, (BURST,)),
    )),
    Engine("Qwen3-8B", 2, (
        Setting("fcfs", 8192, (OFFLINE, Load(160, 24.0, (200, 800), (50, 250)))),
    )),
    Engine("Qwen3-30B-A3B", 2, (
        Setting("fcfs", 8192, (OFFLINE, Load(80, 10.0, (200, 800), (50, 250)))),
    )),
    Engine("Qwen3-0.6B", 1, (
        Setting("fcfs", 8192, (OFFLINE, Load(240, 40.0, (200, 800), (50, 250)))),
    )),
    Engine("Qwen3-30B-A3B", 1, (
        Setting("fcfs", 8192, (OFFLINE, Load(80, 10.0, (200, 800), (50, 250)))),
    )),
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


@contextmanager
def built_kernels() -> Iterator[Counter[str]]:
    """Count the variants of Triton kernels that this process compiles or loads in the block."""
    found = Counter[str]()

    def note(*, fn: Any, **_: Any) -> None:
        found[fn.name] += 1

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield found


class Stopwatch:
    """Mean milliseconds of steps by kind: of the host, of the device, and until it began.

    In the stream, the mark before a step's layout passes when the step before it is done; `idle` is
    the time from there to the first kernel.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.rows = engine, list[tuple[str, int, float, list[Any]]]()
        self.first: tuple[float, Any] = 0.0, None  # of the step that is laid out

    def mark(self) -> Any:
        """Return a mark in the engine's stream; None on a CPU."""
        if self.engine.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.engine.stream)
        return event

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note the steps of the block."""
        prepare, step = self.engine.prepare, self.engine.step

        def timed_prepare(batch: Batch) -> Any:
            self.first = time.perf_counter(), self.mark()
            return prepare(batch)

        def timed_step(inputs: Any) -> Any:
            begin, first = self.first
            marks = [first, self.mark()]
            output = step(inputs)
            marks.append(self.mark())
            reqs = inputs.batch.reqs
            running = sum(req.cached_len >= req.prefill_len for req in reqs)
            kind = "mixed" if 0 < running < len(reqs) else inputs.batch.phase.value
            kind += " uncaptured" if inputs.runner is None else ""
            tokens = sum(req.extend_len for req in reqs)
            self.rows.append((kind, tokens, time.perf_counter() - begin, marks))
            return output

        with mock.patch.multiple(self.engine, prepare=timed_prepare, step=timed_step):
            yield

    def means(self) -> dict[str, dict[str, float]]:
        """Return count and mean milliseconds by kind, when the device is done."""
        if self.engine.stream is not None:
            self.engine.stream.synchronize()
        found: dict[str, dict[str, float]] = {}
        for kind in sorted({row[0] for row in self.rows}):
            _, tokens, host, marks = zip(*(row for row in self.rows if row[0] == kind))
            found[kind] = {"count": len(host), "tokens": round(statistics.mean(tokens), 1)}
            found[kind]["host_ms"] = round(1e3 * statistics.mean(host), 3)
            if self.engine.stream is not None:
                for name, at in (("idle_ms", 0), ("device_ms", 1)):
                    times = [m[at].elapsed_time(m[at + 1]) for m in marks]
                    found[kind][name] = round(statistics.mean(times), 3)
        return found


def measured(llm: LLM, requests: Sequence[RandomRequest]) -> Measured:
    """Run requests through the engine as they come; with several ranks, on all of them."""
    scheduler, before = llm.scheduler, llm.scheduler.channel
    watch = Stopwatch(scheduler.engine)
    with frozen_heap(), built_kernels() as built, watch.running():
        arrivals = Arrivals(WallClock(), requests)
        scheduler.channel = arrivals if llm.ranks is None else llm.ranks.channel(arrivals)
        while arrivals.waiting or scheduler.has_work:
            scheduler.step_overlap(block=True)
    scheduler.channel = before
    return Measured(LoadRun(arrivals.records, 0.0, False), dict(built), watch.means())


def use(llm: LLM, config: SchedulerConfig) -> None:
    """Give an idle engine of one GPU the queue, admission and empty cache of `config`."""
    scheduler, before = llm.scheduler, llm.scheduler.prefill
    prefill = build_prefill(config, scheduler.engine, Parts(), None)
    assert isinstance(prefill, MixedPrefill) and isinstance(before, MixedPrefill)
    prefill.max_tokens = min(before.max_tokens, config.max_extend_tokens or 0)
    prefill.max_requests = before.max_requests
    scheduler.prefill, scheduler.cache, scheduler.decode = prefill, prefill.cache, prefill.decode
    scheduler.interleave = config.schedule_policy == "fair"


def run_twice(
    llm: LLM, requests: Sequence[RandomRequest], config: SchedulerConfig | None = None
) -> Iterator[Measured]:
    """Run requests with their prompts reversed, then as they are, which finds no cached prefix."""
    other = [replace(request, input_ids=request.input_ids[::-1]) for request in requests]
    for given in (other, requests):
        if config is not None:
            use(llm, config)
        yield measured(llm, given)


def config_of(setting: Setting) -> SchedulerConfig:
    """Return the config of a setting."""
    fields: dict[str, Any] = {"schedule_policy": setting.policy}
    return SchedulerConfig(device="cpu", max_extend_tokens=setting.budget, **fields)


def simulated(engine: Engine, gpu: str) -> Iterator[tuple[Setting, Load, LoadRun, dict[str, Any]]]:
    """Simulate the loads of an engine, one after the other."""
    shape = ModelConfig.from_hf(KNOWN_CONFIGS[f"Qwen/{engine.model}"])
    for setting, seed, load in loads_of(engine):
        config, requests = config_of(setting), load.make(seed)
        found = simulate(shape, GPUS[gpu], requests, config=config, tp=engine.tp)
        yield setting, load, found.run, {}


def run_all(
    engine: Engine, **fields: Any
) -> Iterator[tuple[Setting, Load, LoadRun, dict[str, Any]]]:
    """Run the loads of an engine, each twice; yield the second run, and facts about both."""
    first = engine.settings[0]
    fields |= {"schedule_policy": first.policy, "max_extend_tokens": first.budget}
    with (
        options.model_folder(f"Qwen/{engine.model}", True) as folder,
        LLM(folder, use_dummy_weight=True, tensor_parallel_size=engine.tp, **fields) as llm,
    ):
        for setting, seed, load in loads_of(engine):
            requests = load.make(seed)
            runs = list(run_twice(llm, requests, config_of(setting) if engine.tp == 1 else None))
            summary = summary_of(runs[0].run, requests)
            facts = {name: summary[name] for name in ("output_tokens_per_s", "ms")}
            about = {"built": runs[1].built, "steps": runs[1].steps}
            about["first_run"] = {"built": runs[0].built, **facts}
            yield setting, load, runs[1].run, about


def loads_of(engine: Engine) -> Iterator[tuple[Setting, int, Load]]:
    """Return setting, seed and load of each run; the same load has the same seed."""
    for setting in engine.settings:
        for load in setting.loads:
            yield setting, load.requests, load


def summary_of(run: LoadRun, requests: Sequence[RandomRequest]) -> dict[str, Any]:
    """Return the summary of a run; of a burst's load, that of all others."""
    kept = [record for record, request in zip(run.records, requests) if request.client != "burst"]
    return summarize(run._replace(records=kept))


def main(what: str, file: str, engines: Sequence[str], seconds: float) -> None:
    """Write the summaries, after each load."""
    start, rows = time.perf_counter(), list[dict[str, Any]]()
    chosen = [engine for engine in ENGINES if engine.name in engines]
    here = torch.cuda.get_device_name().lower() if what == "measure" else ""
    for gpu, engine in product([name for name in GPUS if name in here or not here], chosen):
        late = time.perf_counter() - start > seconds
        if here and (late or engine.tp > torch.cuda.device_count()):
            continue
        for setting, load, run, about in run_all(engine) if here else simulated(engine, gpu):
            rows.append({
                "gpu": gpu, "model": engine.model, "tp": engine.tp, "policy": setting.policy,
                "budget": setting.budget, "load": load._asdict(),
                **summary_of(run, load.make(load.requests)), **about,
            })  # fmt: skip
            print(round(time.perf_counter() - start, 1), rows[-1], flush=True)
            report.save(Path(file), {"rows": rows}, f"python3 -m tests.gpu.paced {what} FILE")


if __name__ == "__main__":
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("file")
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    main(**vars(parser.parse_args()))
