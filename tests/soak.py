"""A soak of the whole server: thousands of requests, many of them broken off or wrong.

`python -m tests.soak --requests 20000 --report FILE`. Everything must come home: pages, rows, uids,
file descriptors; memory must be flat over the last half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from minisgl.benchmark.report import save
from tests.checkpoints import make_checkpoint
from tests.serving import Served, metric

PAGES, WINDOW = 40, 256
WORDS = ("the", "fox", "and", "hen", "went", "out", "to", "see", "a", "red", "moon", "again")


class Soak:
    """Clients of one server and what they saw."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.done = 0

    def body(self) -> dict[str, Any]:
        """A request with random length, stops and options."""
        rng = self.rng
        words = rng.choices(WORDS, k=rng.choice([2, 5, 10, 20]))
        body: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 5, 10, 20, 40]),
            "temperature": rng.choice([0, 0, 0.7, 1.0]),
            "stream": rng.random() < 0.5,
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            body["stop"] = rng.choices(["a", "e", "th", "zz", "\n"], k=rng.choice([1, 2]))
        if rng.random() < 0.1:
            body["n"] = rng.choice([2, 3])
        if rng.random() < 0.1:
            body["logprobs"] = 2
        if rng.random() < 0.05:
            wrong = [
                ("top_p", 7),
                ("max_tokens", -1),
                ("prompt", [5] * 999),
                ("stop", ""),
                ("n", 0),
            ]
            name, value = rng.choice(wrong)
            return {**body, "prompt": " ".join(words), name: value, "wrong": True}
        return {**body, "prompt": " ".join(words)}

    async def one(self, client: httpx.AsyncClient) -> None:
        """One request; every fifth client leaves at a random moment."""
        body = self.body()
        wrong, leaves = body.pop("wrong", False), self.rng.random() < 0.2
        asking = asyncio.ensure_future(client.post("/completions", json=body))
        if leaves:
            await asyncio.wait({asking}, timeout=self.rng.random() * 0.15)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self.seen["left"] += 1
                return
        response = await asking
        ended = not body.get("stream") or response.text.endswith("data: [DONE]\n\n")
        good = response.status_code == 200 and ended and '"error"' not in response.text
        if wrong:
            assert response.status_code == 400, (body, response.text)
        else:
            assert good, (body, response.status_code, response.text[-500:])
        self.seen["wrong" if wrong else "answered"] += 1

    async def run(self, requests: int, at_once: int, every: int, look: Any) -> None:
        """`requests` in all, `at_once` under way; `look` is called after each `every`."""
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as client:

            async def clients() -> None:
                while self.done < requests:
                    self.done += 1
                    if self.done % every == 0:
                        look(self.done)
                    await self.one(client)

            await asyncio.gather(*(clients() for _ in range(at_once)))


def resources(served: Served) -> dict[str, float]:
    """Memory in MiB and descriptors of the server and its workers, summed."""
    processes = [psutil.Process(served.process.pid), *served.children()]
    return {
        "rss_mib": round(sum(p.memory_info().rss for p in processes) / 2**20, 1),
        "descriptors": sum(p.num_fds() for p in processes),
    }


def soak(requests: int, at_once: int, seed: int = 0) -> dict[str, Any]:
    """Run it all; raises AssertionError for anything that did not come home."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        checkpoint = make_checkpoint(
            folder / "model", tokenizer=True, max_position_embeddings=WINDOW
        )
        flags = ["--model", str(checkpoint), "--num-pages", str(PAGES), "--log-format", "none"]
        # Short promises: requests are taken back again and again.
        served = Served(
            folder, *flags, "--max-running-requests", "32", "--reserve-tokens", "4", real=True
        )
        stack.callback(served.process.kill)  # does nothing after a good end
        url = served.ready()
        root = url.removesuffix("/v1")
        run, start = Soak(url, seed), time.monotonic()
        asyncio.run(run.run(200, at_once, 10**9, None))  # everything has been used once
        time.sleep(1)
        before, samples = resources(served), list[dict[str, float]]()
        run.done = 0
        every = max(1, requests // 40)
        asyncio.run(
            run.run(
                requests, at_once, every,
                lambda done: samples.append({"requests": done, **resources(served)}),
            )
        )  # fmt: skip
        seconds = time.monotonic() - start
        deadline = time.monotonic() + 20
        while metric(root, "running") + metric(root, "open_requests") > 0:
            assert time.monotonic() < deadline, "requests were left"
            time.sleep(0.2)
        time.sleep(6)  # idle connections are closed after 5 s
        after = resources(served)
        pages = {kind: metric(root, f"{kind}_pages") for kind in ("free", "cached", "used")}
        retractions = metric(root, "retractions_total")
        health = httpx.get(f"{root}/health").status_code
        served.process.terminate()
        errors = served.process.communicate(timeout=30)[1]
        children_left = list(folder.glob("minisgl-*"))
    half = [sample["rss_mib"] for sample in samples[len(samples) // 2 :]]
    report = {
        "requests": requests, "at_once": at_once, "seconds": round(seconds, 1),
        "seen": dict(run.seen), "pages": pages, "retractions": int(retractions),
        "before": before, "after": after,
        "growth_of_last_half": round(max(half) / min(half) - 1, 4), "samples": samples,
    }  # fmt: skip
    assert health == 200 and served.process.returncode == 0 and not errors, errors
    assert pages["used"] == 0 and sum(pages.values()) == PAGES, pages
    assert after["descriptors"] <= before["descriptors"], (before, after)
    assert not children_left
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--report", type=Path, default=None)
    args = parser.parse_args()
    report = soak(args.requests, args.at_once)
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=2))
    assert report["growth_of_last_half"] <= 0.03, report["growth_of_last_half"]
    if args.report is not None:
        save(args.report, report, shlex.join(["python", "-m", "tests.soak", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
