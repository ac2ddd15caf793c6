"""Hostile requests of every kind, sent to a server beside the stream of another client.

`python -m tests.hostile 2000 --seed 7` sends 2,000. A run fails on a status of 500 or above, on a
process that dies, on memory that grows, and on a stream that has to wait. The wait is measured as
processor time that a process of the server takes between two events of the stream, which does not
grow when the machine is busy with something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic import BaseModel

from minisgl.server.http.schemas import ChatRequest, CompletionRequest, GenerateRequest
from minisgl.server.responses.schemas import ResponsesRequest
from tests.bodies import ODD
from tests.serving import Served, last_event, stream

ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/generate": (GenerateRequest, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
}
ITEMS: tuple[Any, ...] = ({}, [], "", "x", -1, 5, 300, None, {"role": ""}, {"type": "text"}, [[]])
MEDIANS, LEAST = 10, 0.5  # limits of a stream's wait: in undisturbed waits, and in seconds
GROWTH = 150 * 2**20  # bytes; bodies in flight and what allocators keep of them are below


def many(rng: random.Random) -> Any:
    """Return a list or an object of many items."""
    count = rng.choice([100, 5_000, 40_000, 200_000])
    item = rng.choice(ITEMS)
    return [item] * count if rng.random() < 0.7 else {f"k{i}": item for i in range(count)}


def deep(rng: random.Random) -> Any:
    """Return nested lists or objects; what is too deep for Python's encoder is added as text."""
    value: Any = rng.choice(ITEMS)
    for _ in range(rng.choice([10, 100, 400])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def long(rng: random.Random) -> Any:
    """Return a long text."""
    piece = rng.choice(["x", "🙂", "\x00", " hi", "<|end|>", "a,[{", '"\\'])
    return piece * rng.choice([1_000, 50_000, 300_000])


def encoded(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Encode a body, rarely as JSON in UTF-8 that ends where it should."""
    pairs = list(body.items())
    rng.shuffle(pairs)
    if rng.random() < 0.1:  # the same fields twice
        pairs += [(name, rng.choice(ODD)) for name, _ in pairs]
    fields = (f"{json.dumps(n)}:{json.dumps(v, ensure_ascii=rng.random() < 0.9)}" for n, v in pairs)
    text = "{" + ",".join(fields) + "}"
    form = rng.random()
    if form < 0.05:
        return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]), "surrogatepass")
    data = text.encode("utf-8", "surrogatepass")
    if form < 0.10:
        return data[: rng.randrange(len(data))]
    if form < 0.15:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.choice([1, 4, 1000])) + data[at:]
    if form < 0.20:
        return rng.choice([b"[", b'{"a":', b"[{", b"1"]) * rng.choice([1_000, 300_000])
    return data


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """Return a path and a body: fields of its schema with values of the wrong kind or size."""
    path = rng.choice(list(ROUTES))
    model, body = ROUTES[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**body, limit: 2, "store": False} if "store" in model.model_fields else dict(body)
    body.setdefault(limit, 2)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        name = rng.choice([*model.model_fields, "unknown"])
        make = rng.choice([many, deep, long, None, None])
        body[name] = rng.choice(ODD) if make is None else make(rng)
    return path, encoded(rng, body)


async def send(port: int, rng: random.Random, path: str, body: bytes) -> str:
    """Send a request, perhaps slowly or in part; return the status, or how it went."""
    manner = rng.choice(["whole"] * 6 + ["slow", "chunked", "cut", "left"])
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    size = f"content-length: {len(body)}\r\n\r\n"
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if manner == "chunked":
            writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            for at in range(0, min(len(body), 200_000), 997):
                piece = body[at : at + 997]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")
        elif manner == "cut":
            writer.write((head + size).encode() + body[: rng.randrange(len(body) + 1)])
            return manner
        elif manner == "slow":
            writer.write((head + size).encode())
            for at in range(0, len(body), max(1, len(body) // 5)):
                writer.write(body[at : at + max(1, len(body) // 5)])
                await asyncio.sleep(0.01)
        else:
            writer.write((head + size).encode() + body)
        await writer.drain()
        if manner == "left":
            await asyncio.sleep(rng.random() * 0.05)
            return manner
        line = await asyncio.wait_for(reader.readline(), 60)
        return line.split()[1].decode() if line else "closed"
    except OSError:
        return "closed"
    finally:
        if writer is not None:
            writer.transport.abort()


def spent(process: psutil.Process) -> int:
    """Return the processor time of all threads of a process, in nanoseconds."""
    total = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total


@dataclass
class Canary:
    """A client of another address, which reads streams, and what the server spends meanwhile."""

    url: str
    processes: list[psutil.Process]
    disturbed: bool = False
    waits: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    errors: list[str] = field(default_factory=list)
    stop: bool = False

    def run(self) -> None:
        """Read streams until `stop`."""
        client = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"))
        while not self.stop:
            before = [spent(p) for p in self.processes]
            with stream(self.url, client, max_tokens=100, user="canary") as response:
                lines = []
                for line in filter(None, response.iter_lines()):
                    now = [spent(p) for p in self.processes]
                    most = max(b - a for a, b in zip(before, now, strict=True)) / 1e9
                    self.waits[self.disturbed].append(most)
                    lines, before = [*lines[-3:], line], now
                if response.status_code != 200 or last_event(lines) != "data: [DONE]":
                    self.errors.append(f"{response.status_code}: {lines}")


def memory(processes: list[psutil.Process]) -> int:
    """Return the bytes that processes hold."""
    return sum(process.memory_info().rss for process in processes)


async def volley(port: int, rng: random.Random, requests: list[tuple[str, bytes]]) -> list[str]:
    """Send requests, four at a time; return what became of each."""
    gate = asyncio.Semaphore(4)

    async def one(path: str, body: bytes) -> str:
        async with gate:
            return await send(port, rng, path, body)

    return await asyncio.gather(*(one(path, body) for path, body in requests))


def attack(url: str, processes: list[psutil.Process], count: int, seed: int) -> Counter[str]:
    """Send `count` hostile requests beside a canary; raise an `AssertionError` on any harm."""
    rng, outcomes = random.Random(seed), Counter[str]()
    port = int(url.split(":")[2].split("/")[0])
    canary = Canary(url, processes)
    thread = threading.Thread(target=canary.run, daemon=True)
    thread.start()
    size, sent = 0, 0
    try:
        while sent < count:
            time.sleep(0.5)  # undisturbed
            requests = [hostile(rng) for _ in range(min(25, count - sent))]
            canary.disturbed = True
            answers = asyncio.run(volley(port, rng, requests))
            canary.disturbed = False
            outcomes.update(answers)
            for (path, body), answer in zip(requests, answers, strict=True):
                assert not answer.startswith("5"), f"{answer}: POST {path} {body[:500]!r}"
            assert all(p.is_running() for p in processes), "a process died"
            size = size or memory(processes)  # what the first requests load stays
            sent += len(requests)
    finally:
        canary.stop = True
        thread.join(100)
    assert not canary.errors and not thread.is_alive(), canary.errors
    assert httpx.get(f"{url.removesuffix('/v1')}/health", timeout=100).status_code == 200
    median, most = statistics.median(canary.waits[False]), max(canary.waits[True])
    growth = memory(processes) - size
    print(
        f"{count} requests: {dict(outcomes)}; processor time between two events of the stream: "
        f"median {1e3 * median:.0f} ms, at most {1e3 * most:.0f} ms; {growth >> 20} MiB more"
    )
    harms = []
    if most >= max(MEDIANS * median, LEAST):
        harms.append(f"the stream waited for {most:.2f} s of work")
    if growth >= GROWTH:
        harms.append(f"memory grew by {growth >> 20} MiB")
    assert not harms, "; ".join(harms)
    return outcomes


def run(
    folder: Path, model: Path | None, count: int, seed: int, script: Path | None = None
) -> Counter[str]:
    """Attack a server of its own; `script` stands in for the package."""
    print(f"python -m tests.hostile {count} --seed {seed}")
    flags = [] if model is None else ["--model", str(model)]
    served = Served(
        folder, *flags, "--log-format", "none", "--device", "cpu", real=True, script=script
    )
    url = served.ready()
    processes = [psutil.Process(served.process.pid), *served.workers()]
    try:
        outcomes = attack(url, processes, count, seed)
    except AssertionError:
        served.process.kill()  # its workers leave with it
        served.process.communicate()
        raise
    children = served.children()
    served.process.terminate()
    served.ended(children)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Send hostile requests to a server.")
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), None, args.count, args.seed)


if __name__ == "__main__":
    main()
