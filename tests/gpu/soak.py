"""Run the scheduler for minutes at tight memory, with aborts and evictions, and recount everything.

`python -m tests.gpu.soak --minutes 3 --json OUT` runs the embedded model with graphs, overlap and
the radix cache, page sizes 1 and 16 by turns. It fails if a page, a row or a reply is lost, if
memory grows, or if too many answers differ from those of an engine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import save
from minisgl.config.engine import SchedulerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Req
from minisgl.kvcache.audit import check_integrity
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import AbortMsg, ErrorReply, TokenReply, UserMsg
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer import Tokenizer
from training.evaluate import task_cases

WINDOW, POOL, ROWS, OPEN = 512, 1536, 24, 40  # tokens, tokens, requests, requests
STATES = ("waiting", "chunked", "in flight", "decode")
CHECK_EVERY = 100  # steps
FIRST = 8  # tokens that are compared, besides the very first


@dataclass
class Asked:
    """One request from the side of its caller."""

    ids: list[int]
    params: SamplingParams
    kind: str  # a question of the model's own kind, or noise
    doomed: str | None = None  # the state in which it is aborted
    patience: int = 0  # tokens after which it is aborted whatever its state
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)


def gpu_bytes() -> int:
    """Bytes of the GPU that are taken, by whomever; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def tensor_bytes() -> int:
    """Bytes that live tensors have on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class Crowd:
    """Random requests, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        tokenizer = Tokenizer(resolve_model_path(None))
        talks = [case.messages for case in task_cases(seed, 40)]
        chats = [list(tokenizer.apply_chat(talk)) for talk in talks]
        self.questions = [ids for ids in chats if len(ids) < WINDOW // 2]  # leave room to answer
        self.stems = [self.noise(n) for n in (16, 40, 150, 300)]

    def noise(self, count: int) -> list[int]:
        """Random ids; the first five of the vocabulary are marks."""
        return [self.r.randrange(5, 2240) for _ in range(count)]

    def params(self) -> SamplingParams:
        """Half are greedy, the others have everything that can be set."""
        r = self.r
        most = r.choice([1, 2, 8, 24, 24, 64, 200, None])
        if r.random() < 0.5:
            return SamplingParams(max_tokens=most or 64)
        return SamplingParams(
            temperature=r.choice([0.3, 1.0, 2.0]), top_k=r.choice([-1, 1, 5, 100]),
            top_p=r.choice([1.0, 0.9, 0.3]), seed=r.choice([None, r.randrange(10**6)]),
            logprobs=r.choice([None, None, None, 0, 3]), ignore_eos=r.random() < 0.3,
            stop_token_ids=r.sample(range(5, 2240), r.choice([0, 0, 3])), max_tokens=most,
        )  # fmt: skip

    def ask(self) -> Asked:
        """One more request; one in five is doomed, one in a hundred cannot be served."""
        r, kind = self.r, "question"
        ids = r.choice(self.questions)
        if r.random() < 0.5:
            kind, stem = "noise", r.choice(self.stems)
            ids = stem[: r.randrange(len(stem) + 1)] + self.noise(r.choice([1, 5, 40, 120]))
        if r.random() < 0.01:
            kind, ids = "wrong", r.choice([[], self.noise(WINDOW), [2240], [-1]])
        doomed = r.choice(STATES) if r.random() < 0.2 else None
        return Asked(ids, self.params(), kind, doomed, patience=r.randrange(1, 24))


class Round:
    """One scheduler, its crowd, and the books that are kept about both."""

    def __init__(self, page_size: int, seed: int, fields: dict[str, Any], keep: int) -> None:
        self.crowd, self.r = Crowd(seed), random.Random(seed + 1)
        self.channel = InProcessChannel()
        self.policy: Literal["fcfs", "fair"] = "fair" if seed // 2 % 2 else "fcfs"
        config = SchedulerConfig(
            page_size=page_size, num_pages=POOL // page_size, max_seq_len_override=WINDOW,
            max_running_req=ROWS, max_extend_tokens=128, cache_type="radix", overlap=True,
            reserve_tokens=1, schedule_policy=self.policy, **fields,
        )  # fmt: skip
        self.scheduler: Scheduler = build_scheduler(config, self.channel)
        self.open: dict[int, Asked] = {}
        self.seen: Counter[str] = Counter()
        self.aborted_in: Counter[str] = Counter()
        self.kept: list[Asked] = []  # finished greedy ones, a fair sample of `keep`
        self.keep, self.uid, self.checked_at = keep, 0, 0
        self.samples: list[tuple[int, int, int]] = []  # resident, GPU in use, GPU in tensors
        self.count_evictions()

    def count_evictions(self) -> None:
        """Note every eviction on its way."""
        cache = self.scheduler.cache.prefix_cache
        evict = cache.evict

        def counted(tokens: int) -> Any:
            self.seen["evictions"] += 1
            return evict(tokens)

        cache.evict = counted  # type: ignore[method-assign,assignment]

    def arrive(self) -> None:
        """None, one or a handful of new requests."""
        for _ in range(self.r.choice([0, 0, 0, 1, 2, 6])):
            if len(self.open) >= OPEN:
                return
            asked = self.crowd.ask()
            self.open[self.uid] = asked
            client = self.r.choice(["ann", "bob", "bob"])
            self.channel.put_messages(UserMsg(self.uid, asked.ids, asked.params, client))
            self.uid += 1
            self.seen["requests"] += 1

    def state_of(self, uid: int) -> str | None:
        """Return the state of a request between two turns; None before it was received."""
        s = self.scheduler
        req = s.reqs.get(uid)
        if req is None:
            return None
        if req.table_idx < 0:
            return "waiting"
        if req is s.prefill.chunked_req:
            return "chunked"
        flying = s.in_flight is not None and req in s.in_flight.inputs.batch.reqs
        return "in flight" if flying else "decode"

    def abort(self) -> None:
        """Send the messages that are due to the scheduler; some arrive too late."""
        for uid, asked in self.open.items():
            if asked.doomed is None or asked.aborted:
                continue
            state = self.state_of(uid)
            if state == asked.doomed or len(asked.tokens) >= asked.patience:
                asked.aborted = True
                self.aborted_in[state or "not received"] += 1
                self.channel.put_messages(AbortMsg(uid))
        if self.uid and self.r.random() < 0.01:
            late = self.r.randrange(self.uid)
            if late not in self.open:
                self.aborted_in["finished"] += 1
                self.channel.put_messages(AbortMsg(late))

    def hear(self) -> None:
        """Every reply belongs to an open request; the last one closes it."""
        for reply in self.channel.take_replies():
            asked = self.open[reply.uid]  # a KeyError is a reply after the last one
            if isinstance(reply, ErrorReply):
                assert asked.kind == "wrong", reply
                self.seen["refused"] += 1
                del self.open[reply.uid]
                continue
            assert asked.kind != "wrong"
            if reply.token is not None:
                assert 0 <= reply.token < 2240
                asked.tokens.append(reply.token)
                self.seen["tokens"] += 1
            if reply.finished:
                self.close(reply, self.open.pop(reply.uid))

    def close(self, reply: TokenReply, asked: Asked) -> None:
        """Judge a finished request by its length, and keep some for the comparison."""
        self.seen[f"finished: {reply.finish_reason}"] += 1
        self.seen["cached tokens"] += reply.cached_tokens
        if reply.finish_reason == "abort":
            assert asked.aborted
            return
        most = min(asked.params.max_tokens or WINDOW, WINDOW - len(asked.ids))
        assert 1 <= len(asked.tokens) <= most
        assert reply.finish_reason == "stop" or len(asked.tokens) == most
        if not asked.params.is_greedy or asked.params.stop_token_ids or asked.params.ignore_eos:
            return
        self.seen["greedy"] += 1
        if len(self.kept) < self.keep:
            self.kept.append(asked)
        elif (place := self.r.randrange(self.seen["greedy"])) < self.keep:
            self.kept[place] = asked

    def check(self) -> None:
        """Every hundred steps, and in between when nothing runs: each page has one owner."""
        s = self.scheduler
        if s.step_count - self.checked_at < CHECK_EVERY and s.has_work:
            return
        live: list[Req] = [req for req in s.reqs.values() if req.table_idx >= 0]
        check_integrity(s.cache, live)
        self.checked_at = s.step_count
        self.seen["checks"] += 1

    def run(self, seconds: float, turns: int | None) -> None:
        """Run until the time is up or `turns` were made; now and then all requests finish."""
        start, drained, next_sample, count = time.monotonic(), False, 0.0, 0
        while (now := time.monotonic() - start) < seconds and (turns is None or count < turns):
            if now >= next_sample:
                next_sample = now + max(seconds / 100, 0.05)
                resident = psutil.Process().memory_info().rss
                self.samples.append((resident, gpu_bytes(), tensor_bytes()))
            drained = bool(self.open) and (drained or self.r.random() < 0.002)
            if not drained:
                self.arrive()
            self.turn()
            count += 1
        while self.open or self.scheduler.has_work:
            self.turn()

    def turn(self) -> None:
        """One turn of the overlapped loop, with all that happens around it."""
        self.abort()
        self.scheduler.step_overlap()
        self.seen["most running"] = max(
            self.seen["most running"], len(self.scheduler.decode.running)
        )
        self.hear()
        self.check()

    def settle(self) -> None:
        """Nothing is owed, and all pages and rows are home."""
        s = self.scheduler
        s.finish_in_flight()
        for uid in list(s.reqs):
            s.abort(uid)
        self.seen["retractions"] = s.retractions
        assert not self.open and not s.reqs and s.in_flight is None
        assert not s.decode.running and not s.prefill.waiting and s.prefill.chunked_req is None
        check_integrity(s.cache)
        assert s.cache.available_tokens == s.engine.num_pages * s.engine.page_size
        assert s.engine.tables.free_rows == s.engine.tables.num_rows
        assert self.channel.take_replies() == []

    def growth(self) -> dict[str, float]:
        """By how much memory rose in the last half: of its middle, least and most."""
        half = self.samples[len(self.samples) // 2 :] or self.samples
        names = ("resident", "gpu", "gpu_tensors")
        found: dict[str, float] = {}
        for name, values in zip(names, zip(*half)):
            found[f"{name}_mib"] = round(values[-1] / 2**20, 1)
            found[f"{name}_growth_mib"] = round((max(values) - values[0]) / 2**20, 2)
        return found


def compare(kept: list[Asked], fields: dict[str, Any]) -> dict[str, Any]:
    """Shares of answers that are those of an engine with one request at a time."""
    graphs = {} if fields.get("cuda_graph_bs") == () else {"cuda_graph_max_bs": 1}
    how = fields | graphs | {"max_seq_len_override": WINDOW, "num_pages": 2 * WINDOW // 16}
    shares: dict[str, Any] = {}
    with LLM(page_size=16, overlap=False, cache_type="naive", max_running_req=1, **how) as quiet:
        for kind in ("question", "noise"):
            mine = [asked for asked in kept if asked.kind == kind]
            marks: Counter[str] = Counter()
            for asked in mine:
                want = quiet.generate([asked.ids], asked.params)[0]["token_ids"]
                marks["first"] += asked.tokens[:1] == want[:1]
                marks["start"] += asked.tokens[:FIRST] == want[:FIRST]
                marks["whole"] += asked.tokens == want
            equal = {name: round(marks[name] / len(mine), 4) for name in marks} if mine else {}
            shares[kind] = {"compared": len(mine), **equal}
    return shares


def verdict(result: dict[str, Any], exact: bool) -> list[str]:
    """Return the faults of a round that lost nothing: wrong answers, or memory that grew."""
    wrong, name = [], "whole" if exact else "first"
    least = {"question": 0.99 if exact else 0.97, "noise": 0.97 if exact else 0.85}
    for kind, share in least.items():
        found = result["answers"][kind]
        if found["compared"] and found[name] < share:
            wrong.append(
                f"{kind}: {found[name]:.1%} of answers ({name}) are right, not {share:.0%}"
            )
    memory = result["memory"]
    resident = max(32.0, 0.03 * memory["resident_mib"])
    limits = {"resident": resident, "gpu": 16.0, "gpu_tensors": 16.0}
    for name, limit in limits.items():
        if memory[f"{name}_growth_mib"] > limit:
            wrong.append(f"{name}: grew by {memory[f'{name}_growth_mib']} MiB in the last half")
    return wrong


def run_round(
    page_size: int, seconds: float, seed: int, fields: dict[str, Any], *,
    keep: int = 128, turns: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One round: what happened, and under `wrong` what should not have. Losses raise."""
    one, start = Round(page_size, seed, fields, keep), time.monotonic()
    engine = one.scheduler.engine
    one.run(seconds, turns)
    one.settle()
    result: dict[str, Any] = {
        "page_size": page_size, "seed": seed, "seconds": round(time.monotonic() - start, 1),
        "steps": one.scheduler.step_count, "seen": dict(sorted(one.seen.items())),
        "aborted_in": dict(sorted(one.aborted_in.items())), "memory": one.growth(),
        "policy": one.policy, "backend": engine.config.attention_backend,
        "dtype": engine.config.dtype,
        "graphs": list(getattr(engine.runners.decode, "sizes", ())),
    }  # fmt: skip
    kept, exact = one.kept, engine.config.dtype == "float32"
    engine.shutdown()
    del one, engine
    gc.collect()
    result["answers"] = compare(kept, fields)
    result["wrong"] = verdict(result, exact)
    return result


def soak(minutes: float, seed: int, rounds: int, **fields: Any) -> dict[str, Any]:
    """Rounds with page sizes 1 and 16 by turns; raises for whatever is lost."""
    results = []
    for index in range(rounds):
        seconds = minutes * 60 / rounds
        results.append(run_round((1, 16)[index % 2], seconds, seed + index, fields))
        print(json.dumps(results[-1]), flush=True)
    wrong = [line for one in results for line in one["wrong"]]
    return {"passed": not wrong, "minutes": minutes, "wrong": wrong, "rounds": results}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4, help="each has an engine of its own")
    parser.add_argument("--attn", default="auto", help="attention backends")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    how = {"attention_backend": args.attn, "dtype": args.dtype, "device": args.device}
    result = soak(args.minutes, args.seed, args.rounds, **how)
    if args.json is not None:
        how_long = f"--minutes {args.minutes} --seed {args.seed} --rounds {args.rounds}"
        save(args.json, result, f"python3 -m tests.gpu.soak {how_long} --attn {args.attn}")
    print("passed" if result["passed"] else "\n".join(["FAILED", *result["wrong"]]))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
