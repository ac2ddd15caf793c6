"""A running server's two questions, asked of an engine in this process (chapter 13b).

`python3 -m tests.gpu.under_load long --out FILE`: one long prompt comes while 32 requests run, for
several token budgets of a prefill step: its time to the first token, and what the others lose.

`python3 -m tests.gpu.under_load busy --out FILE`: requests with cached prompts arrive at random, 20
a second: where the time of a token goes.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minisgl import LLM, SamplingParams
from minisgl.benchmark import latency
from minisgl.benchmark.report import save
from minisgl.core import Batch
from minisgl.engine.heap import frozen_heap
from minisgl.scheduler.messages import UserMsg
from minisgl.scheduler.mixed import MixedPrefill
from minisgl.scheduler.scheduler import Launched, Scheduler
from tests.gpu.trials import engine

RUNNING, PROMPT, ANSWER = 32, 512, 1024
LONG, BUDGETS = 32_768, (1024, 2048, 4096, 8192)
RATE, REQUESTS, WANTED = 20.0, 160, 220  # about 40 requests at once, at 9 ms a token
VOCAB = 10_001


class Log:
    """Tokens by request and launches by time."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokens = llm, defaultdict[int, list[float]](list)
        self.launches: list[tuple[float, str]] = []
        self.step = latency.step_of(llm)

        def launch(batch: Batch) -> Launched:
            running = sum(req.cached_len >= req.prefill_len for req in batch.reqs)
            kind = "joined" if 0 < running < batch.size else batch.phase.value
            if kind == "decode":
                kind += f" {8 * -(-batch.size // 8)}"
            self.launches.append((time.perf_counter(), kind))
            return Scheduler.launch(llm.scheduler, batch)

        llm.scheduler.launch = launch  # type: ignore[method-assign]

    def once(self) -> None:
        """Run a step and note whose tokens arrive."""
        self.step()
        if replies := self.llm.channel.take_replies():
            now = time.perf_counter()
            for reply in replies:
                self.tokens[reply.uid].append(now)

    def ask(self, ids: list[int], new: int) -> int:
        """Queue a request; return its number."""
        params = SamplingParams(temperature=0.6, max_tokens=new, ignore_eos=True)
        uid = self.llm.next_uid
        self.llm.next_uid += 1
        self.llm.channel.put_messages(UserMsg(uid, ids, params))
        return uid

    def until(self, done: Callable[[], bool]) -> None:
        """Run steps until `done`."""
        while not done():
            self.once()

    def finish(self) -> None:
        """Run steps until nothing is left."""
        self.until(lambda: not (self.llm.channel.waiting or self.llm.scheduler.has_work))


def ids_of(rng: np.random.Generator, length: int) -> list[int]:
    """Return a random prompt."""
    return [int(i) for i in rng.integers(0, VOCAB, length)]


def tpot_ms(times: list[float]) -> float:
    """Return the milliseconds for each token after the first."""
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3


def with_streams(llm: LLM, rng: np.random.Generator, long: bool) -> dict[str, Any]:
    """Run 32 requests, and the long prompt after a quarter of their tokens."""
    log = Log(llm)
    uids = [log.ask(ids_of(rng, PROMPT), ANSWER) for _ in range(RUNNING)]
    log.until(lambda: min(len(log.tokens[u]) for u in uids) >= ANSWER // 4)
    row: dict[str, Any] = {}
    if long:
        begin, uid = time.perf_counter(), log.ask(ids_of(rng, LONG), 2)
        log.until(lambda: bool(log.tokens[uid]))
        row["ttft_ms"] = round((log.tokens[uid][0] - begin) * 1e3, 1)
        during = sum(begin < t <= log.tokens[uid][0] for t in log.tokens[uids[0]])
        row["tokens_of_each_meanwhile"] = during
    log.finish()
    gaps = np.concatenate([np.diff(log.tokens[u]) for u in uids]) * 1e3
    row["gap_ms"] = {f"p{p}": round(float(np.percentile(gaps, p)), 2) for p in (50, 99, 99.9, 100)}
    row["tpot_p50_ms"] = round(statistics.median(tpot_ms(log.tokens[u]) for u in uids), 3)
    return row


def long(model: str) -> dict[str, Any]:
    """Measure the long prompt alone, the streams alone, and both for each budget."""
    rng, rows = np.random.default_rng(3), list[dict[str, Any]]()
    with (
        engine(model, schedule_policy="fair", max_extend_tokens=max(BUDGETS)) as llm,
        frozen_heap(),
    ):
        prefill = llm.scheduler.prefill
        assert isinstance(prefill, MixedPrefill)
        limits = prefill.limits
        for budget in (BUDGETS[-1], *BUDGETS):
            prefill.limits = replace(limits, max_extend_tokens=budget)
            prefill.long_chunk = budget
            alone = []
            for n in range(3):
                latency.start_together(llm, 1, LONG, 2, 0.0, 10 * budget + n)
                alone.append(latency.first_token_seconds(latency.drive(llm), 1)[0] * 1e3)
            row = {"budget": budget, "alone_ms": round(min(alone[1:]), 1)}
            row |= with_streams(llm, rng, bool(rows))
            rows.append(row)
            print(row, flush=True)
    return {"model": model, "running": RUNNING, "answer": ANSWER, "long": LONG, "rows": rows}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 99)}


def shares(log: Log) -> dict[str, Any]:
    """Divide a run's time among its launches: the time up to the next one goes to each."""
    spent: dict[str, list[float]] = defaultdict(list)
    for (begin, kind), (end, _) in zip(log.launches, log.launches[1:]):
        if end - begin < 0.1:  # else nothing ran
            spent[kind].append((end - begin) * 1e3)
    total = sum(map(sum, spent.values()))
    return {
        kind: {"count": len(ms), "median_ms": round(statistics.median(ms), 3),
               "share": round(sum(ms) / total, 4)}
        for kind, ms in sorted(spent.items())
    }  # fmt: skip


def arrive(llm: LLM, prompts: list[list[int]], rng: np.random.Generator) -> dict[str, Any]:
    """Let requests with these prompts arrive at random; summarize their times."""
    log, asked = Log(llm), dict[int, float]()
    due = time.perf_counter() + np.cumsum(rng.exponential(1 / RATE, len(prompts)))
    waiting = list(zip(due.tolist(), prompts))
    while waiting or llm.channel.waiting or llm.scheduler.has_work:
        while waiting and waiting[0][0] <= time.perf_counter():
            at, ids = waiting.pop(0)
            asked[log.ask(ids, WANTED)] = at
        log.once()
    return {
        "tpot_ms": spread([tpot_ms(log.tokens[uid]) for uid in asked]),
        "ttft_ms": spread([(log.tokens[uid][0] - at) * 1e3 for uid, at in asked.items()]),
        "gap_ms": spread([gap * 1e3 for uid in asked for gap in np.diff(log.tokens[uid])]),
        "launches": shares(log),
    }


def busy(model: str) -> dict[str, Any]:
    """Measure loads of prompts whose first 512 tokens are cached, with and without mixed steps."""
    rng, rows = np.random.default_rng(4), list[dict[str, Any]]()
    with engine(model, schedule_policy="fair") as llm, frozen_heap():
        prefixes = [ids_of(rng, PROMPT) for _ in range(REQUESTS)]
        log = Log(llm)
        for ids in prefixes:
            log.ask(ids, 2)
        log.finish()
        for more, most in ((0, 0), (0, 128), (0, 512), (100, 0), (100, 256), (100, 512), (0, 0)):
            prefill = llm.scheduler.prefill
            assert isinstance(prefill, MixedPrefill)
            prefill.max_tokens = most
            prompts = [ids + ids_of(rng, more) for ids in prefixes]
            row = {"further_tokens": more, "joined_up_to": most}
            row |= arrive(llm, prompts, np.random.default_rng(5))
            rows.append(row)
            print(row, flush=True)
    return {"model": model, "rate": RATE, "requests": REQUESTS, "answer": WANTED, "rows": rows}


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["long", "busy"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    args = parser.parse_args()
    results = {"long": long, "busy": busy}[args.what](args.model)
    save(args.out, results, shlex.join(["python3", "-m", "tests.gpu.under_load", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
