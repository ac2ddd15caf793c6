"""Load on an OpenAI-compatible server: timed streams of requests, in an open or closed loop.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.server.chat.client import ApiClient, ServerError


@dataclass
class Record:
    """One request: the times when it was due, when it was sent and when text came, and its end.

    Times are seconds since the start of the run. `error` is the kind of a failure, or None.
    """

    due: float = 0.0
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of chunks with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: not reported
    counted: bool = False  # tokens are counted by the server; else they are chunks
    error: str | None = "not sent"
    detail: str = ""

    def fail(self, kind: str, detail: object) -> None:
        """Record a failure of this kind."""
        self.error, self.detail = kind, str(detail)[:500]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text; only for an answered request."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last text."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for fewer than two tokens."""
        after_first = self.output_tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / after_first if after_first > 0 else None

    def take(self, event: dict[str, Any], now: float) -> None:
        """Record one event of a stream."""
        if any(has_text(choice) for choice in event.get("choices") or ()):
            self.arrivals.append(now)
        if usage := event.get("usage"):
            self.counted = True
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.output_tokens = usage.get("completion_tokens") or 0
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def has_text(choice: dict[str, Any]) -> bool:
    """Return True if a choice of a chunk has text in any of the usual fields."""
    delta, names = choice.get("delta") or {}, ("content", "reasoning_content", "reasoning")
    return bool(choice.get("text") or any(delta.get(name) for name in names))


Clock = Callable[[], float]


async def send(
    client: ApiClient, path: str, body: dict[str, Any], record: Record, clock: Clock, timeout: float
) -> None:
    """Send one streamed request of at most `timeout` seconds; every failure is recorded."""
    record.sent = clock()
    record.fail("interrupted", "the run was stopped")
    try:
        async with asyncio.timeout(timeout), aclosing(client.stream(path, body)) as events:
            async for event in events:
                record.take(event, clock())
        if not record.arrivals:
            raise ServerError("empty", "the answer has no text")
        record.error, record.detail = None, ""
        if not record.counted:
            record.output_tokens = len(record.arrivals)
    except ServerError as error:
        record.fail(error.kind, error)
    except TimeoutError:
        record.fail("timeout", f"no end within {timeout:g} s")
    except Exception as error:  # an unknown server can send anything
        record.fail("bad answer", f"{type(error).__name__}: {error}")


COMMON = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work night point
home water room mother area money story fact month lot right study book eye job word business
issue side kind head house service friend father power hour game line end member law car city
"""
WORDS = COMMON.split()


@dataclass(frozen=True)
class Target:
    """Form of requests to a server: model, chats of words or completions of ids, `ignore_eos`."""

    model: str
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0

    @property
    def path(self) -> str:
        return "chat/completions" if self.chat else "completions"

    def body(self, request: RandomRequest) -> dict[str, Any]:
        """Build the body of one streamed request."""
        ids = request.input_ids.tolist()
        text = " ".join(WORDS[token % len(WORDS)] for token in ids) if self.chat else ""
        prompt = {"messages": [{"role": "user", "content": text}]} if text else {"prompt": ids}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        full = {"ignore_eos": True} if self.ignore_eos else {}
        numbers = {"max_tokens": request.output_len, "temperature": self.temperature}
        return {"model": self.model, **prompt, **numbers, **usage, **full}


async def first_model(client: ApiClient) -> str:
    """Return the first name in `/v1/models`; raise `ConnectionError` if there is none."""
    try:
        return str((await client.models())[0]["id"])
    except (ServerError, LookupError) as error:
        why = f"{getattr(error, 'kind', 'no model')}: {error}"
        raise ConnectionError(f"url: {client.url}models does not help ({why})") from None


SAFE_VOCAB = 1100  # every vocabulary has at least that many


def poisson_arrivals(count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Sample `count` Poisson arrivals in seconds, `rate` a second on average; the first at 0."""
    gaps = np.random.default_rng([seed, count]).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def online_workload(
    count: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
    rate: float | None = None,
) -> list[RandomRequest]:
    """Sample random prompts, lengths uniform between both ends, due by `rate` or all at 0."""
    requests = random_workload(SAFE_VOCAB, count, input_len, output_len, seed)
    due = np.zeros(count) if rate is None else poisson_arrivals(count, rate, seed)
    return [replace(r, due=float(when)) for r, when in zip(requests, due, strict=True)]


class LoadRun(NamedTuple):
    """All records of a run, the client's CPU seconds, and True if Ctrl-C ended it."""

    records: list[Record]
    client_cpu_s: float
    interrupted: bool


Send = Callable[[RandomRequest, Record], Awaitable[None]]
Work = Sequence[tuple[RandomRequest, Record]]


async def open_loop(send: Send, work: Work, now: Clock) -> None:
    """Send each request when it is due."""

    async def one(request: RandomRequest, record: Record) -> None:
        await asyncio.sleep(max(0.0, request.due - now()))
        await send(request, record)

    await asyncio.gather(*(one(*pair) for pair in work))


async def closed_loop(send: Send, work: Work, now: Clock, clients: int) -> None:
    """Send from `clients` clients, each its next request after its last one has ended."""
    line = iter(work)

    async def client() -> None:
        for request, record in line:
            record.due = now()
            await send(request, record)

    await asyncio.gather(*(client() for _ in range(min(clients, len(work)))))


async def run_load(
    client: ApiClient,
    target: Target,
    requests: Sequence[RandomRequest],
    clients: int | None = None,
    timeout: float = 600.0,
    progress: bool = False,
) -> LoadRun:
    """Send all requests, when they are due or from `clients` clients, and wait for all answers."""
    work = [(request, Record(due=request.due)) for request in requests]
    start, cpu, interrupted = time.perf_counter(), time.process_time(), False

    def now() -> float:
        return time.perf_counter() - start

    with tqdm(total=len(work), desc="requests", disable=not progress) as bar:

        async def send_one(request: RandomRequest, record: Record) -> None:
            await send(client, target.path, target.body(request), record, now, timeout)
            bar.update()

        try:
            if clients is None:
                await open_loop(send_one, work, now)
            else:
                await closed_loop(send_one, work, now, clients)
        except asyncio.CancelledError:  # Ctrl-C: the measurements so far still count
            interrupted = True
    return LoadRun([record for _, record in work], time.process_time() - cpu, interrupted)
