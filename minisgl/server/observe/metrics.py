"""Prometheus metrics: requests, tokens, latencies, and the state of the pool.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Scope

from minisgl.server.frontend import Observer, Prompt
from minisgl.server.http.access import KEY_NAME
from minisgl.server.workers.messages import StatsEvent, StatsMsg, UserReply

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
GAUGES = {
    "running": "requests that hold a row",
    "waiting": "requests that wait for one",
    "free_pages": "pages of the pool that are free",
    "cached_pages": "pages that only the prefix cache holds",
    "used_pages": "pages that requests hold",
}
COUNTS = {
    "steps": "steps of the scheduler",
    "graph_replays": "steps that replayed a CUDA graph",
    "retractions": "requests that gave their pages back and ran again",
    "spec_decode_num_draft_tokens": "tokens that speculation guessed",
    "spec_decode_num_accepted_tokens": "guesses that were right",
}


@dataclass
class Times:
    """Times of one request's events, in seconds of the clock."""

    opened: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class Metrics(Observer):
    """Counts, gauges and histograms of one server, in a registry of its own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.registry = registry = CollectorRegistry()
        self._clock, self._live = clock, dict[int, Times]()
        self._before = StatsMsg()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"minisgl_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"minisgl_{name}_seconds", text, buckets=buckets, registry=registry)

        self._requests = counter("requests", "finished requests by outcome", "outcome")
        self._refusals = counter("refusals", "HTTP requests answered with an error", "code")
        self._keyed = counter("keyed_requests", "HTTP requests with a named key", "key", "code")
        self._prompt = counter("prompt_tokens", "tokens of prompts, once for each answer")
        self._cached = counter("cached_prompt_tokens", "tokens of prompts found in the cache")
        self._tokens = counter("completion_tokens", "tokens of answers")
        self._ttft = histogram("time_to_first_token", "from arrival to the first token", SECONDS)
        self._tpot = histogram("time_per_output_token", "mean time of later tokens", PER_TOKEN)
        self._e2e = histogram("request", "from arrival to the last token", SECONDS)
        self._counts = {name: counter(name, text) for name, text in COUNTS.items()}
        self._gauges = {
            name: Gauge(f"minisgl_{name}", text, registry=registry) for name, text in GAUGES.items()
        }
        usage = "share of the pool that requests hold, 0 to 1; what is only cached can be evicted"
        self._usage = Gauge("minisgl_kv_cache_usage", usage, registry=registry)
        open_now = Gauge("minisgl_open_requests", "answers in flight", registry=registry)
        open_now.set_function(lambda: len(self._live))

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        self._live[uid] = Times(self._clock())

    def replied(self, uid: int, reply: UserReply) -> None:
        times, now = self._live[uid], self._clock()
        if times.first is None:
            times.first = now
            self._ttft.observe(now - times.opened)
            self._prompt.inc(reply.prompt_tokens)
            self._cached.inc(reply.cached_tokens)
        times.last = now
        times.tokens += len(reply.token_ids)
        self._tokens.inc(len(reply.token_ids))

    def closed(self, uid: int, outcome: str) -> None:
        times = self._live.pop(uid)
        self._requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self._e2e.observe(self._clock() - times.opened)
        if times.first is not None and times.tokens > 1:
            self._tpot.observe((times.last - times.first) / (times.tokens - 1))

    def reported(self, msg: StatsEvent) -> None:
        if isinstance(msg, StatsMsg):
            for name, gauge in self._gauges.items():
                gauge.set(getattr(msg, name))
            pages = msg.used_pages + msg.cached_pages + msg.free_pages
            self._usage.set(msg.used_pages / max(1, pages))
            for name, counter in self._counts.items():
                counter.inc(msg.counts.get(name, 0) - self._before.counts.get(name, 0))
            self._before = msg

    def refused(self, status: int) -> None:
        self._refusals.labels(status).inc()

    def ended(self, scope: Scope, status: int, seconds: float) -> None:
        if name := scope.get(KEY_NAME):
            self._keyed.labels(name, status).inc()


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    """Add `GET /metrics` in Prometheus' format."""

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
