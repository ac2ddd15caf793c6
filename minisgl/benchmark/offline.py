"""Throughput: all requests at once through `LLM.generate`, with the steps that were launched.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from minisgl.benchmark.workload import RandomRequest, check_room
from minisgl.core import Batch, Phase, SamplingParams
from minisgl.llm import LLM
from minisgl.scheduler.scheduler import Launched, Scheduler


class Launch(NamedTuple):
    """One step: its phase, its requests, and the tokens it computed."""

    phase: Phase
    requests: int
    tokens: int


@contextmanager
def launches(scheduler: Scheduler) -> Iterator[list[Launch]]:
    """Yield a list that gets one entry for each step inside the `with` block."""
    log: list[Launch] = []
    plain = scheduler.launch

    def launch(batch: Batch) -> Launched:
        log.append(Launch(batch.phase, len(batch.reqs), sum(req.extend_len for req in batch.reqs)))
        return plain(batch)

    scheduler.launch = launch  # type: ignore[method-assign]
    try:
        yield log
    finally:
        scheduler.launch = plain  # type: ignore[method-assign]


def resample(requests: Sequence[RandomRequest], vocab_size: int, seed: int) -> list[RandomRequest]:
    """Sample new prompts of the same lengths, so that no prefix is cached."""
    rng = np.random.default_rng(seed)
    top = min(vocab_size, 10_001)
    return [
        RandomRequest(rng.integers(0, top, len(r.input_ids), dtype=np.int32), r.output_len)
        for r in requests
    ]


def run_once(llm: LLM, requests: Sequence[RandomRequest], temperature: float) -> float:
    """Return the seconds until all requests are complete; ValueError if one cannot be."""
    longest = max(requests, key=lambda r: len(r.input_ids) + r.output_len)
    check_room("input-len", len(longest.input_ids), longest.output_len, llm.limits.total)
    prompts = [request.input_ids for request in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=r.output_len, ignore_eos=True)
        for r in requests
    ]
    start = time.perf_counter()
    outs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(out["token_ids"]) for out in outs] == [r.output_len for r in requests]
    return seconds


def step_counts(log: Sequence[Launch]) -> dict[str, float]:
    """Count each phase's steps and tokens, and the mean number of requests in a decode step."""
    prefill = [entry.tokens for entry in log if entry.phase is Phase.PREFILL]
    decode = [entry.requests for entry in log if entry.phase is Phase.DECODE]
    return {
        "prefill_steps": len(prefill),
        "prefill_tokens": sum(prefill),
        "decode_steps": len(decode),
        "decode_tokens": sum(decode),
        "mean_batch": round(sum(decode) / max(1, len(decode)), 1),
    }


def joules_drawn(gpus: int) -> float | None:
    """Return the joules that the first `gpus` GPUs used since their driver loaded, or None.

    NVML counts them, in millijoules, on GPUs since Volta.
    """
    if not torch.cuda.is_available() or find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")  # of the package nvidia-ml-py, which comes with FlashInfer
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        uuids = [torch.cuda.get_device_properties(gpu).uuid for gpu in range(gpus)]
        handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        return sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1e3
    return None


def measure_offline(
    llm: LLM, requests: Sequence[RandomRequest], *, temperature: float, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """Measure the seconds of each repetition, the median tokens per second, and the launches.

    `joules_per_token`, over all output tokens, is None on GPUs without an energy counter.
    """
    short = [RandomRequest(r.input_ids, min(4, r.output_len)) for r in requests]
    warm_up = run_once(llm, short, temperature)
    seconds, gpus = [], llm.config.tp.size
    before = joules_drawn(gpus)
    for index in tqdm(range(repeats), desc="offline runs", disable=None):
        fresh = resample(requests, llm.limits.vocab_size, seed + 1 + index)
        with launches(llm.scheduler) as log:
            seconds.append(run_once(llm, fresh, temperature))
    after, output_tokens = joules_drawn(gpus), sum(r.output_len for r in requests)
    drawn = None if before is None or after is None else after - before
    return {
        "tokens_per_s": round(output_tokens / statistics.median(seconds), 1),
        "median_seconds": round(statistics.median(seconds), 4),
        "seconds": [round(s, 4) for s in seconds],
        "warm_up_seconds": round(warm_up, 3),
        "input_tokens": sum(len(r.input_ids) for r in requests),
        "output_tokens": output_tokens,
        "joules_per_token": drawn and round(drawn / (repeats * output_tokens), 4),
        "steps": step_counts(log),  # of the last repetition
    }
