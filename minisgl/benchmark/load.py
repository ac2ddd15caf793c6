"""Send many requests: by the clock, by a number of clients, or all at once.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minisgl.benchmark.client import Api, Record
from minisgl.benchmark.dialect import HIGH, LOW, Dialect
from minisgl.core import IntArray


@dataclass(frozen=True)
class Ask:
    """A prompt, int32 [n] of ids; the number of new tokens; when it is due, in seconds."""

    ids: IntArray
    max_tokens: int
    due: float = 0.0


def poisson_arrivals(count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Seconds of `count` arrivals, `rate` a second on average; the first is at 0."""
    gaps = np.random.default_rng([seed, count]).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def random_asks(
    count: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int,
    rate: float | None = None,
) -> list[Ask]:  # fmt: skip
    """Prompts of random ids, lengths uniform between both ends, due by `rate` or all at 0."""
    rng = np.random.default_rng(seed)
    due = np.zeros(count) if rate is None else poisson_arrivals(count, rate, seed)
    inputs = rng.integers(input_len[0], input_len[1] + 1, count)
    outputs = rng.integers(output_len[0], output_len[1] + 1, count)
    return [
        Ask(rng.integers(LOW, HIGH, n, dtype=np.int32), int(m), float(when))
        for n, m, when in zip(inputs, outputs, due, strict=True)
    ]


class Outcome(NamedTuple):
    """All records of a run, its seconds, the client's own CPU seconds, whether Ctrl-C ended it."""

    records: list[Record]
    seconds: float
    client_cpu_s: float
    interrupted: bool


Send = Callable[[Ask, Record], Awaitable[None]]
Clock = Callable[[], float]


async def open_loop(send: Send, asks: Sequence[Ask], records: Sequence[Record], now: Clock) -> None:
    """Send each request when it is due."""

    async def one(ask: Ask, record: Record) -> None:
        await asyncio.sleep(max(0.0, ask.due - now()))
        await send(ask, record)

    await asyncio.gather(*map(one, asks, records))


async def closed_loop(
    send: Send, asks: Sequence[Ask], records: Sequence[Record], clients: int
) -> None:
    """So many clients; each sends its next request when its last is answered."""
    row = iter(zip(asks, records, strict=True))

    async def client() -> None:
        for ask, record in row:
            await send(ask, record)

    await asyncio.gather(*(client() for _ in range(min(clients, len(asks)))))


async def run_load(
    api: Api, dialect: Dialect, asks: Sequence[Ask], clients: int | None = None,
    progress: bool = False,
) -> Outcome:  # fmt: skip
    """Send all requests, by their time or by so many `clients`, and wait for all answers."""
    records, interrupted = [Record(due=ask.due) for ask in asks], False
    start, cpu = time.perf_counter(), time.process_time()

    def now() -> float:
        return time.perf_counter() - start

    with tqdm(total=len(asks), desc="requests", disable=not progress) as bar:

        async def send(ask: Ask, record: Record) -> None:
            record.due = record.due if clients is None else now()
            body = dialect.body(ask.ids.tolist(), ask.max_tokens)
            await api.send(dialect.path, body, record, now)
            bar.update()

        if clients is None:
            whole = asyncio.ensure_future(open_loop(send, asks, records, now))
        else:
            whole = asyncio.ensure_future(closed_loop(send, asks, records, clients))
        try:
            await whole
        except asyncio.CancelledError:  # Ctrl-C: what was measured so far still counts
            interrupted = True
    return Outcome(records, now(), time.process_time() - cpu, interrupted)
