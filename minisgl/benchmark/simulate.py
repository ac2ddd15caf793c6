"""The real scheduler over a virtual clock: the cost of a load on GPUs you do not have.

Generated from notebooks/13da_simulator.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark.load import SAFE_VOCAB, LoadRun, Record, online_workload
from minisgl.benchmark.step_cost import (
    FITTED,
    GPUS,
    Gpu,
    StepCost,
    StepTimes,
    Times,
    cost_on,
    times_of,
)
from minisgl.benchmark.summary import summarize
from minisgl.benchmark.trace import TraceShape, read_trace, requests_of, synthesize
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.engine import SchedulerConfig
from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.engine.prefill_graph import MAX_REQUESTS
from minisgl.engine.runners import MAX_MIXED_TOKENS
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.kvcache.pool import kv_bytes_per_token
from minisgl.scheduler.build import Parts, build_prefill
from minisgl.scheduler.messages import Msg, Reply, TokenReply, UserMsg
from minisgl.scheduler.mixed import MixedPrefill
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.retraction import make_room
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulated import SimulatedExecutor


class Device:
    """A clock that jumps, and the time at which the device has done all that was launched."""

    def __init__(self, host_s: float = 1e-4) -> None:
        """Start at 0; `host_s` is the scheduler's own work in each step, in seconds."""
        self.now = self.free_at = self.busy = 0.0
        self.host_s, self.steps = host_s, 0

    def launch(self, times: StepTimes) -> float:
        """Return the end of a step launched now; no step ends before its last launch."""
        device, host, launch = (float(seconds) for seconds in times)
        begin = self.now + self.host_s + host
        self.now = begin + launch
        self.free_at = max(max(begin, self.free_at) + device, self.now)
        self.busy, self.steps = self.busy + device, self.steps + 1
        return self.free_at


class Timed(ForwardOutput):
    """The output of a simulated step; `wait` advances the clock."""

    def __init__(self, device: Device, at: float, count: int) -> None:
        self.device, self.at, self.count = device, at, count

    def wait(self) -> SampledTokens:
        """Set the clock to the end of the step and return its tokens."""
        self.device.now = max(self.device.now, self.at)
        return SampledTokens([0] * self.count)


class TimedExecutor(SimulatedExecutor):
    """Lays steps out as the engine does, and computes nothing but their duration."""

    def __init__(self, cost: StepCost, device: Device, **sizes: Any) -> None:
        super().__init__(vocab_size=cost.model.vocab_size, **sizes)
        self.cost, self.device = cost, device

    def step(self, inputs: ForwardInput) -> ForwardOutput:
        """Launch a step on the device."""
        meta, count = inputs.meta, len(inputs.sampled)
        assert meta is not None
        extend = meta.extend_lens.astype(np.int64)
        columns = self.cost.columns(extend, meta.seq_lens - extend, count)
        return Timed(self.device, self.device.launch(times_of(columns, FITTED)), count)


@lru_cache(4096)
def params_of(output_len: int) -> SamplingParams:
    """Return parameters for an answer of exactly this length."""
    return SamplingParams(max_tokens=output_len, ignore_eos=True)


class Arrivals:
    """Requests that arrive at their due times, or when one of `clients` gets its last answer."""

    def __init__(
        self, device: Device, requests: Sequence[RandomRequest], clients: int | None = None
    ) -> None:
        self.device, self.clients = device, clients
        self.waiting = deque(enumerate(requests))
        self.records = [Record(due=request.due) for request in requests]
        self.running = 0

    def recv(self, block: bool) -> list[Msg]:
        """Return the due requests; with `block`, jump to the next one."""
        device, found = self.device, list[Msg]()
        if block and self.waiting and self.clients is None:
            device.now = max(device.now, self.waiting[0][1].due)
        while self.waiting and (
            self.waiting[0][1].due <= device.now if self.clients is None
            else self.running < self.clients
        ):  # fmt: skip
            uid, request = self.waiting.popleft()
            record, self.running = self.records[uid], self.running + 1
            record.sent = device.now if self.clients is not None else request.due
            record.due = record.sent
            params = params_of(request.output_len)
            found.append(UserMsg(uid, request.input_ids.tolist(), params, request.client))
        return found

    def send(self, replies: Sequence[Reply]) -> None:
        """Note each token's time."""
        for reply in replies:
            record = self.records[reply.uid]
            if not isinstance(reply, TokenReply):
                record.fail("refused", reply.message)
                self.running -= 1
                continue
            record.arrivals.append(self.device.now)
            if reply.finished:
                record.error, record.counted = None, True
                record.prompt_tokens = reply.prompt_tokens
                record.cached_tokens = reply.cached_tokens
                record.output_tokens = len(record.arrivals)
                self.running -= 1


def with_burst(
    requests: Sequence[RandomRequest], burst: Sequence[RandomRequest], at: float
) -> list[RandomRequest]:
    """Return requests of a client each, and those that the client "burst" sends `at` seconds."""
    others = [replace(request, client=str(uid)) for uid, request in enumerate(requests)]
    all_at_once = [replace(request, client="burst", due=at) for request in burst]
    return sorted(others + all_at_once, key=lambda request: request.due)


class Simulated(NamedTuple):
    """A simulated run: the load test's view, and the device's activity."""

    run: LoadRun
    device: Device
    retractions: int


def count_pages(model: ModelConfig, gpu: Gpu, tp: int, page_size: int) -> int:
    """Return the KV pages that fit beside the weights; ValueError if none does."""
    left = gpu.nbytes * tp - 2 * model.num_parameters
    pages = int(left // (kv_bytes_per_token(model, 2) * page_size))
    if pages < 1:
        raise ValueError(f"gpu: must have room for the weights and a page, got {left / 1e9:.0f} GB")
    return pages


def simulate(
    model: ModelConfig, gpu: Gpu, requests: Sequence[RandomRequest], *, config: SchedulerConfig,
    tp: int = 1, clients: int | None = None, mixed_tokens: int = MAX_MIXED_TOKENS,
) -> Simulated:  # fmt: skip
    """Run all requests through the real scheduler; `config` as for an engine on a GPU.

    mixed_tokens: most new tokens of a step with prompts and running requests; 0: none is mixed.
    """
    longest = max(len(request.input_ids) + request.output_len for request in requests)
    pages = config.num_pages or count_pages(model, gpu, tp, config.page_size)
    device, cost = Device(), cost_on(model, gpu, tp, config.max_extend_tokens)
    engine = TimedExecutor(
        cost, device, num_pages=pages, page_size=config.page_size, max_seq_len=longest + 1,
        max_running_req=config.max_running_req,
    )  # fmt: skip
    prefill = build_prefill(replace(config, device="cuda"), engine, Parts(), None)
    if isinstance(prefill, MixedPrefill) and cost.captured:
        prefill.max_tokens = min(mixed_tokens, cost.captured[-1])
        prefill.max_requests = MAX_REQUESTS
    limits = Limits(longest + 1, pages * config.page_size, model.vocab_size)
    arrivals = Arrivals(device, requests, clients)
    scheduler = Scheduler(
        engine, prefill.cache, prefill, prefill.decode, arrivals,
        make_req=partial(make_req, limits=limits), make_room=make_room,
        interleave=config.schedule_policy == "fair",
    )  # fmt: skip
    while arrivals.waiting or scheduler.has_work:
        scheduler.step_overlap(block=True)
    return Simulated(LoadRun(arrivals.records, 0.0, False), device, scheduler.retractions)


ROUTERS = ("random", "round-robin", "prefix")
HEAD = 64  # prompt tokens that decide its replica


def replica_arrivals(count: int, rate: float, replicas: int, router: str, seed: int) -> Times:
    """Return the seconds of `count` arrivals at one of many replicas; `rate` is that of all."""
    rng = np.random.default_rng([seed, count])
    if router == "round-robin":
        gaps = rng.gamma(replicas, 1 / rate, count)
    else:
        gaps = rng.exponential(replicas / rate, count)
    return np.cumsum(gaps) - gaps[0]


def share_of(
    requests: Sequence[RandomRequest], replicas: int, router: str, seed: int
) -> list[RandomRequest]:
    """Return the recorded requests that go to the first of many replicas."""
    if router == "round-robin":
        return list(requests[::replicas])
    if router == "prefix":
        heads = [zlib.crc32(request.input_ids[:HEAD].tobytes()) for request in requests]
        return [request for request, head in zip(requests, heads) if head % replicas == 0]
    chosen = np.random.default_rng(seed).integers(replicas, size=len(requests)) == 0
    return [request for request, mine in zip(requests, chosen) if mine]


def min_replicas(meets: Callable[[int], bool], most: int = 2**14) -> int:
    """Return the fewest replicas that meet a target; ValueError if `most` do not."""
    high = 1
    while not meets(high):
        high *= 2
        if high > most:
            raise ValueError(f"target: must be possible, got none with {most} replicas")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def summary_of(found: Simulated, gpu: Gpu, tp: int, price: float | None) -> dict[str, Any]:
    """Return `online`'s summary, with energy and cost per token; `price`: of a GPU-hour."""
    summary, device = summarize(found.run), found.device
    tokens = max(1, summary["output_tokens"])
    summary["steps"], summary["retractions"] = device.steps, found.retractions
    summary["busy"] = round(device.busy / device.now, 4)
    summary["joules_per_token"] = round(device.busy * gpu.watts * tp / tokens, 5)
    per_token = None if price is None else price * tp * summary["seconds"] / 3600 / tokens
    summary["cost_per_million"] = None if per_token is None else round(1e6 * per_token, 4)
    return summary


def load_of(args: argparse.Namespace, replicas: int) -> list[RandomRequest]:
    """Return one replica's share of the load that the flags describe."""
    finite = bool(np.isfinite(args.rate))
    if args.trace is not None or args.sessions is not None:
        shape = TraceShape(sessions=args.sessions or 1, rate=args.rate if finite else 1.0)
        recorded = None if args.trace is None else read_trace(args.trace)
        lines = recorded or synthesize(shape, args.seed)
        return share_of(requests_of(lines), replicas, args.router, args.seed)
    lengths = tuple(args.input_len), tuple(args.output_len)
    requests = online_workload(args.requests, *lengths, args.seed)
    shared = np.arange(args.shared, dtype=np.int32) % SAFE_VOCAB
    due = np.zeros(args.requests)
    if finite:
        due = replica_arrivals(args.requests, args.rate, replicas, args.router, args.seed)
    return [
        RandomRequest(np.concatenate([shared, r.input_ids]), r.output_len, float(when))
        for r, when in zip(requests, due)
    ]


def simulate_flags(model: ModelConfig, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas, given or needed for a target, and one's summary."""
    gpu, limits = GPUS[args.gpu], {"ttft": args.ttft_ms, "tpot": args.tpot_ms}
    config = SchedulerConfig(
        device="cpu", max_running_req=args.max_running_req, schedule_policy=args.schedule_policy,
        max_extend_tokens=args.max_prefill_length,
    )  # fmt: skip

    def run(replicas: int) -> dict[str, Any]:
        found = simulate(model, gpu, load_of(args, replicas), config=config, tp=args.tp,
                         clients=args.concurrency)  # fmt: skip
        return summary_of(found, gpu, args.tp, args.price)

    def meets(replicas: int) -> bool:
        times = run(replicas)["ms"]
        return all(limit is None or times[name]["p99"] <= limit for name, limit in limits.items())

    asked = any(limit is not None for limit in limits.values())
    replicas = min_replicas(meets) if asked else args.replicas
    return replicas, run(replicas)
