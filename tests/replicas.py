"""Replicas behind a gateway: what routing buys in cache, and what clients see when one fails.

`python -m tests.replicas cache|faults [FILE]` starts servers of the embedded model and `smg` on
ports from 19410, prints what it measures, and writes it to FILE if that is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from minisgl.benchmark.report import save

PORT = 19410  # of the gateway; its replicas and its metrics have the ports above
CHATS, TURNS, STREAMS = 12, 4, 64
PATIENCE = 60.0  # seconds without an event, keep-alives not counted, after which a stream hangs


class Replica:
    """`python -m minisgl` on a port of its own."""

    def __init__(self, port: int, *flags: str) -> None:
        self.port, self.url, self._flags = port, f"http://127.0.0.1:{port}", flags

    def start(self) -> None:
        """Start the process without waiting for it."""
        command = ["nice", sys.executable, "-m", "minisgl", "--port", str(self.port)]
        command += ["--device", "cpu", "--log-format", "none", *self._flags]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, start_new_session=True, **quiet)

    def scheduler(self) -> int:
        """Return the process id of its scheduler, which is started first."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return next(child.pid for child in found if "spawn_main" in " ".join(child.cmdline()))

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.process.pid, sig)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def replicas(count: int, *flags: str) -> Iterator[list[Replica]]:
    """Servers that are ready, started one after the other: two cores load one model faster."""
    started = [Replica(PORT + 1 + i, *flags) for i in range(count)]
    try:
        for replica in started:
            replica.start()
            wait_until_ready([replica.url])
        yield started
    finally:
        for replica in started:
            replica.stop()


def wait_until_ready(urls: Sequence[str], seconds: float = 300.0) -> None:
    """Poll `/health` of each server."""
    deadline = time.monotonic() + seconds
    for url in urls:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} was not ready within {seconds:g} s")
            time.sleep(0.1)


@contextmanager
def gateway(
    urls: Sequence[str], policy: str, *flags: str, ports: tuple[int, int] = (PORT, PORT + 9)
) -> Iterator[str]:
    """The URL of `smg` over servers that are ready, once it has registered them all."""
    port, metrics = map(str, ports)
    url = f"http://127.0.0.1:{port}"
    command = ["nice", sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1"]
    command += ["--port", port, "--worker-urls", *urls, "--policy", policy]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
    command += ["--disable-tokenizer-autoload", "--log-level", "error", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready([url])
        while len(usable(url)) < len(urls):
            time.sleep(0.1)
        if process.poll() is not None:
            raise RuntimeError(f"port {port} is taken: the gateway ended at once")
        yield url
    finally:
        process.kill()  # its own grace period is for streams, which have no reader here
        process.wait()


def usable(url: str) -> list[str]:
    """List the replicas to which the gateway sends requests."""
    workers = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
    return [worker["url"] for worker in workers if worker["is_healthy"]]


def retries(port: int = PORT + 9) -> float:
    """Sum the requests that the gateway has sent again."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "worker_retries_total{" in line)


# What routing buys in cache

POLICY_FLAGS = {"prefix_hash": ("--prefix-token-count", "16")}  # 64 characters: within each first


def long_question(rng: np.random.Generator) -> str:
    """A list of 20 to 60 pairs, and a question about one of them."""
    names = rng.choice(900, size=int(rng.integers(20, 60)), replace=False) + 100
    pairs = "\n".join(f"k{name} = {rng.integers(100, 1000)}" for name in names)
    return f"Here is a list:\n{pairs}\nWhat is the value of k{rng.choice(names)}?"


async def converse(url: str, seed: int = 0, scattered: bool = False) -> dict[str, Any]:
    """Hold conversations, four at a time; return the share of prompt tokens found in a cache.

    If they are `scattered`, each request claims in `x-session-id` to be another conversation.
    """
    found: Counter[str] = Counter()
    limit, rng = asyncio.Semaphore(4), np.random.default_rng(seed)
    firsts = [f"Conversation {seed} {chat}. {long_question(rng)}" for chat in range(CHATS)]
    histories: list[list[dict[str, str]]] = [[] for _ in firsts]

    async def turn(client: httpx.AsyncClient, chat: int, text: str) -> None:
        messages = histories[chat]
        messages.append({"role": "user", "content": text})
        body = {"model": "minisgl-tiny", "messages": messages, "max_tokens": 24, "seed": 0}
        named = {"x-session-id": f"{rng.random()}"} if scattered else {}
        async with limit:
            response = await client.post(f"{url}/v1/chat/completions", json=body, headers=named)
        response.raise_for_status()
        answer = response.json()
        messages.append(answer["choices"][0]["message"])
        found["prompt_tokens"] += answer["usage"]["prompt_tokens"]
        found["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        for number in range(TURNS):
            sums = [f"What is {a} + {b}?" for a, b in rng.integers(0, 500, size=(CHATS, 2))]
            texts = sums if number else firsts
            order = rng.permutation(CHATS).tolist()  # users do not take turns
            await asyncio.gather(*(turn(client, chat, texts[chat]) for chat in order))
    share = round(found["cached"] / found["prompt_tokens"], 3)
    return {"cached_share": share, "prompt_tokens": found["prompt_tokens"]}


def measure_cache(pages: int, policies: Sequence[str]) -> dict[str, Any]:
    """Measure each policy with servers whose caches are empty."""
    found: dict[str, Any] = {}
    for policy in ("one server", *policies):
        count = 1 if policy == "one server" else 2
        with replicas(count, "--num-pages", str(pages)) as started:
            urls = [replica.url for replica in started]
            if count == 1:
                found[policy] = asyncio.run(converse(urls[0]))
            else:
                with gateway(urls, policy, *POLICY_FLAGS.get(policy, ())) as url:
                    found[policy] = asyncio.run(converse(url))
        print(pages, policy, found[policy], flush=True)
    return found


# What clients see when a replica fails


class End(NamedTuple):
    """End of a stream: its last event, its replica, and seconds after the fault."""

    kind: str
    replica: str
    seconds: float
    message: str = ""


def error_of(events: Sequence[str]) -> str | None:
    """Return the message of the first error among events."""
    bodies = [json.loads(event) for event in events if event.startswith('{"error"')]
    return str(bodies[0]["error"].get("message")) if bodies else None


class Watch:
    """Clients of a gateway, from before a fault until all of them have an end."""

    def __init__(self, url: str, tokens: int, answers: int = 1) -> None:
        self.url, self.tokens, self.answers = url, tokens, answers
        self.started = 0  # streams with a first token
        self.fault = 0.0
        self.late: list[tuple[float, float, int]] = []  # of probes: sent, seconds, status

    async def stream(self, client: httpx.AsyncClient, number: int) -> End:
        """Read a stream to its end, and name that end."""
        body = {"model": "minisgl-tiny", "prompt": f"{number}: a fox", "max_tokens": self.tokens}
        body |= {"n": self.answers, "stream": True, "ignore_eos": True, "seed": number}
        end = End("closed without an end", "", 0.0)
        try:
            async with (
                asyncio.timeout(PATIENCE) as limit,
                client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
            ):
                end = end._replace(replica=response.headers.get("x-smg-routed-worker-id", "")[-5:])
                if response.status_code != 200:
                    end = end._replace(kind=f"status {response.status_code}")
                lines = [line async for line in self.lines(response, limit)]
                if (message := error_of(lines)) is not None:
                    end = end._replace(kind="error event", message=message)
                elif lines and lines[-1] == "[DONE]":
                    end = end._replace(kind="complete")
        except TimeoutError:
            end = end._replace(kind="hangs")
        except httpx.HTTPError as error:
            end = end._replace(kind=f"connection: {type(error).__name__}")
        return end._replace(seconds=time.monotonic() - self.fault)

    async def lines(self, response: httpx.Response, limit: asyncio.Timeout) -> AsyncIterator[str]:
        """Yield the data of a stream's events, which move the limit; count the first."""
        first, loop = 1, asyncio.get_running_loop()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                self.started, first = self.started + first, 0
                limit.reschedule(loop.time() + PATIENCE)
                yield line.removeprefix("data: ")

    async def probe(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Send a small request ten times a second, each whether or not others have an answer."""

        async def one() -> None:
            sent, status = time.monotonic(), 0
            body = {"model": "minisgl-tiny", "prompt": f"probe {sent}", "max_tokens": 1}
            with suppress(httpx.HTTPError):
                status = (await client.post(f"{self.url}/v1/completions", json=body)).status_code
            self.late.append((sent - self.fault, time.monotonic() - sent, status))

        tasks = []
        while time.monotonic() < self.fault + seconds:
            tasks.append(asyncio.ensure_future(one()))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)


FAULTS = {
    "killed": lambda replica: replica.signal(signal.SIGKILL),
    "stopped": lambda replica: replica.signal(signal.SIGSTOP),
    "scheduler killed": lambda replica: os.kill(replica.scheduler(), signal.SIGKILL),
    "drained": lambda replica: replica.process.terminate(),
    "drained, 2 s": lambda replica: replica.process.terminate(),
}


async def suffer(url: str, replica: Replica, fault: str, tokens: int) -> dict[str, Any]:
    """Open streams, do harm to one replica, and return what their clients saw."""
    watch = Watch(url, tokens)
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(timeout=300, trust_env=False, limits=limits)
    unhealthy: float | None = None
    last_retry, before = 0.0, retries()
    async with client:
        streams = [asyncio.ensure_future(watch.stream(client, i)) for i in range(STREAMS)]
        while watch.started < STREAMS:
            await asyncio.sleep(0.05)
        watch.fault = time.monotonic()
        FAULTS[fault](replica)
        if fault == "stopped":  # what a supervisor does whose probe had no answer
            asyncio.get_running_loop().call_later(15.0, replica.signal, signal.SIGKILL)
        probing = asyncio.ensure_future(watch.probe(client, 20.0))
        while not all(task.done() for task in (*streams, probing)):
            await asyncio.sleep(0.1)
            now = time.monotonic() - watch.fault
            if unhealthy is None and replica.url not in await asyncio.to_thread(usable, url):
                unhealthy = round(now, 1)
            if (count := await asyncio.to_thread(retries)) > before:
                last_retry, before = round(now, 1), count
        ends = [task.result() for task in streams]
    return report(watch, ends, str(replica.port)) | {
        "unhealthy_after_s": unhealthy, "last_retry_s": last_retry
    }  # fmt: skip


def report(watch: Watch, ends: Sequence[End], port: str) -> dict[str, Any]:
    """Sum up the ends of streams and the fate of the probes."""
    by_place = {
        place: dict(Counter(end.kind for end in ends if (end.replica == port) == (place == "hit")))
        for place in ("hit", "other")
    }
    bad = [sent for sent, _, status in watch.late if status != 200]
    slow = [sent for sent, took, status in watch.late if status == 200 and took > 2.0]
    return {
        "streams": by_place,
        "messages": sorted({end.message for end in ends if end.message}),
        "last_end_s": round(max(end.seconds for end in ends if end.replica == port), 1),
        "probes": len(watch.late),
        "probes_failed": dict(Counter(status for _, _, status in watch.late if status != 200)),
        "last_failed_probe_s": round(max(bad), 1) if bad else None,
        "slow_probes": len(slow),
        "last_slow_probe_s": round(max(slow), 1) if slow else None,
        "slowest_probe_s": round(max(took for _, took, _ in watch.late), 1),
    }


async def until_served(url: str, port: int) -> float:
    """Return the seconds until a replica answers through the gateway."""
    start = time.monotonic()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        while time.monotonic() < start + 300:
            body = {"model": "minisgl-tiny", "prompt": f"{time.monotonic()}", "max_tokens": 1}
            with suppress(httpx.HTTPError):
                response = await client.post(f"{url}/v1/completions", json=body)
                if response.headers.get("x-smg-routed-worker-id", "").endswith(str(port)):
                    return round(time.monotonic() - start, 1)
            await asyncio.sleep(0.1)
    raise TimeoutError(f"the gateway did not use {port} again")


def measure_faults(faults: Sequence[str], tokens: int, *flags: str) -> dict[str, Any]:
    """Do each harm to a fresh pair of replicas behind a gateway with these flags."""
    found: dict[str, Any] = {}
    for fault in faults:
        drain = "2" if fault == "drained, 2 s" else "120"
        with ExitStack() as stack:
            sizes = "--num-pages", "8000", "--drain-timeout", drain
            started = stack.enter_context(replicas(2, *sizes))
            urls = [replica.url for replica in started]
            url = stack.enter_context(gateway(urls, "round_robin", *flags))
            found[fault] = asyncio.run(suffer(url, started[0], fault, tokens))
            if fault in ("killed", "drained"):
                started[0].process.wait()
                begun = time.monotonic()
                started[0].start()
                wait_until_ready(urls)
                ready = round(time.monotonic() - begun, 1)
                back = asyncio.run(until_served(url, started[0].port))
                found[fault]["restart"] = {"ready_s": ready, "used_after_ready_s": back}
        print(fault, json.dumps(found[fault]), flush=True)
    return found


PROBING = (
    "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1",
    "--health-failure-threshold", "2", "--health-success-threshold", "1",
)  # fmt: skip


def main() -> None:
    """Measure, print, and store."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or what was started would stay
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cache", "faults"])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    args = parser.parse_args()
    if args.what == "cache":
        policies = ("round_robin", "cache_aware", "prefix_hash")
        results = {f"{pages} pages": measure_cache(pages, policies) for pages in (2000, 240)}
    else:
        results = measure_faults(args.faults, args.tokens, *PROBING)
    if args.file is not None:
        command = f"python -m tests.replicas {args.what} # smg {version('smg')}"
        save(args.file, results, command)


if __name__ == "__main__":
    main()
