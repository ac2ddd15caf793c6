"""Latency: time to the first token, and time per token at fixed batch sizes.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from minisgl.benchmark.roofline import Roofline
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.scheduler.messages import ErrorReply, UserMsg

SAMPLING = {"greedy": 0.0, "sampled": 0.6}  # name to temperature


class Timeline(NamedTuple):
    """When tokens reached the host: seconds since the start, and how many they were."""

    seconds: list[float]
    tokens: list[int]


def start_together(
    llm: LLM, batch: int, prompt_len: int, output_len: int, temperature: float, seed: int
) -> None:
    """Queue `batch` requests with random prompts; nothing runs yet."""
    rng = np.random.default_rng(seed)
    limits = llm.limits
    each, room = prompt_len + output_len, limits.pool_tokens
    if each > limits.max_seq_len:
        raise ValueError(f"output-len: a request of {each} tokens, window {limits.max_seq_len}")
    if batch * each > room:
        raise ValueError(f"batch-sizes: {batch} need {batch * each} KV tokens, there are {room}")
    params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)
    prompts = rng.integers(0, min(limits.vocab_size, 10_001), (batch, prompt_len)).tolist()
    first = llm.next_uid
    llm.next_uid += batch
    llm.channel.put_messages(*(UserMsg(first + i, ids, params) for i, ids in enumerate(prompts)))


def drive(llm: LLM) -> Timeline:
    """Run the scheduler until nothing is left to do; one look at the clock for each step."""
    turn = llm.scheduler.step_overlap if llm.scheduler.overlap else llm.scheduler.step
    line, start = Timeline([], []), time.perf_counter()
    while llm.channel.waiting or llm.scheduler.has_work:
        turn()
        if replies := llm.channel.take_replies():
            line.seconds.append(time.perf_counter() - start)
            line.tokens.append(len(replies))
            if isinstance(replies[0], ErrorReply):
                raise ValueError(replies[0].message)
    return line


SKIP = 4  # decode steps before the batch counts as steady


def first_token_seconds(line: Timeline, batch: int) -> list[float]:
    """Seconds to the first token of each request, ascending: [batch]."""
    times = np.repeat(line.seconds, line.tokens)
    return [float(t) for t in times[:batch]]


def steady_gaps(line: Timeline, batch: int, skip: int = SKIP) -> list[float]:
    """Seconds between the tokens of successive steps that both decode the whole batch."""
    after = int(np.searchsorted(np.cumsum(line.tokens), batch))  # the step of the last first token
    times, full = np.array(line.seconds)[after + 1 :], np.array(line.tokens)[after + 1 :] == batch
    gaps = np.diff(times)[full[1:] & full[:-1]]
    return [float(gap) for gap in gaps[skip:]]


def percentiles(seconds: Sequence[float], *which: int) -> dict[str, float]:
    """Percentiles in milliseconds, by name: p50, p99."""
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 4) for p in which}


def latency_row(line: Timeline, batch: int) -> dict[str, Any]:
    """TTFT and TPOT of one run, in milliseconds; ValueError if too few steps were steady."""
    gaps = steady_gaps(line, batch)
    if not gaps:
        raise ValueError(f"output-len: batch {batch} had no steady decode step; ask for more")
    return {
        "batch": batch,
        "tpot_ms": round(sum(gaps) / len(gaps) * 1e3, 4),
        "gap_ms": percentiles(gaps, 50, 99),
        "ttft_ms": percentiles(first_token_seconds(line, batch), 50, 99),
        "steps": len(gaps),
    }


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repetition with the median TPOT, with the TPOT of all."""
    ordered = sorted(rows, key=lambda row: row["tpot_ms"])
    return {**ordered[len(rows) // 2], "all_tpot_ms": [row["tpot_ms"] for row in rows]}


def measure_latency(
    llm: LLM, batch_sizes: Sequence[int], *, prompt_len: int, output_len: int,
    sampling: Sequence[str], repeats: int, seed: int = 0, roof: Roofline | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each batch size and way of sampling: the median of `repeats` runs after one more.

    `floor_ms` is the bound of a step in the middle of the answer, if there is a roofline.
    """
    cases = [(batch, name) for batch in batch_sizes for name in sampling]
    rows = []
    for batch, name in tqdm(cases, desc="batch sizes", disable=None):
        runs = []
        for _ in range(repeats + 1):
            seed += 1
            start_together(llm, batch, prompt_len, output_len, SAMPLING[name], seed)
            runs.append(latency_row(drive(llm), batch))
        row = {**middle(runs[1:]), "sampling": name}
        if roof is not None:
            lengths = np.full(batch, prompt_len + output_len // 2)
            row["floor_ms"] = round(roof.decode(lengths) * 1e3, 4)
        rows.append(row)
    return rows
