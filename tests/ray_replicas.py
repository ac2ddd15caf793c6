"""Replicas under Ray Serve: what affinity and the proxy do, and what clients see of a death.

`python -m tests.ray_replicas [FILE]` uses the cluster at RAY_ADDRESS or starts one, on a machine or
in a network namespace of its own: Ray listens on all interfaces. Uses ports from 19410.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from minisgl.benchmark.report import save
from minisgl.cluster import Cluster, app
from tests.replicas import PORT, STREAMS, Watch, converse

FLAGS = "--device cpu --num-pages 4000 --log-format none"
URL = f"http://127.0.0.1:{PORT}"


def engines() -> list[psutil.Process]:
    """List the processes of our replicas."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if "ServeReplica:default:Engine" in " ".join(p.info["cmdline"] or [])]


PARTS = {
    "proxy": "ProxyActor",
    "ingress": "ServeReplica:default:Ingress",
    "engine": "ServeReplica:default:Engine",
}


def cpu_per_request(count: int = 60) -> dict[str, float]:
    """Measure the CPU milliseconds that each part takes for a request of one token.

    On a busy machine times of the wall say little; what the parts use while idle is subtracted.
    """
    found = list(psutil.process_iter(["cmdline"]))
    lines = [(process, " ".join(process.info["cmdline"] or [])) for process in found]
    parts = {part: [p for p, line in lines if words in line] for part, words in PARTS.items()}

    def used() -> dict[str, float]:
        return {part: sum(sum(p.cpu_times()[:2]) for p in ps) for part, ps in parts.items()}

    def ask(client: httpx.Client) -> None:
        body = {"model": "minisgl-tiny", "prompt": "hi", "max_tokens": 1}
        client.post(f"{URL}/v1/completions", json=body).raise_for_status()

    with httpx.Client(timeout=100) as client:
        ask(client)
        marks = [(time.monotonic(), used())]
        time.sleep(4)
        marks.append((time.monotonic(), used()))
        for _ in range(count):
            ask(client)
        marks.append((time.monotonic(), used()))
    (t0, idle), (t1, before), (t2, after) = marks
    rest = {part: (before[part] - idle[part]) * (t2 - t1) / (t1 - t0) for part in parts}
    return {
        part: round(1000 * (after[part] - before[part] - rest[part]) / count, 1) for part in parts
    }


async def suffer(part: str) -> dict[str, Any]:
    """Kill a part of one replica under streams."""
    watch, victim = Watch(URL, 160), engines()[0]
    client = httpx.AsyncClient(
        timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    )
    async with client:
        streams = [asyncio.ensure_future(watch.stream(client, i)) for i in range(STREAMS)]
        while watch.started < STREAMS:
            await asyncio.sleep(0.05)
        children = victim.children(recursive=True)
        workers = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        watch.fault = time.monotonic()
        (victim if part == "replica" else workers[0]).kill()
        probing = asyncio.ensure_future(watch.probe(client, 20.0))
        ends = await asyncio.gather(*streams)
        await probing
        while len(engines()) < 2 or victim in engines():
            await asyncio.sleep(0.1)
    failed = [end for end in ends if end.kind != "complete"]
    return {
        "streams": dict(Counter(end.kind for end in ends)),
        "messages": sorted({end.message for end in ends if end.message}),
        "last_error_s": round(max((end.seconds for end in failed), default=0.0), 1),
        "probes": len(watch.late),
        "probes_failed": dict(Counter(status for _, _, status in watch.late if status != 200)),
        "last_failed_probe_s": max(
            (round(s, 1) for s, _, st in watch.late if st != 200), default=0
        ),
        "slowest_probe_s": round(max(took for _, took, _ in watch.late), 1),
    }


async def scale() -> dict[str, Any]:
    """Load one replica with more streams than it may run until a second one is there, then rest."""
    watch, start, seen = Watch(URL, 160), time.monotonic(), list[tuple[float, int]]()

    async def note_until(count: int) -> None:
        while not seen or seen[-1][1] != count:
            if not seen or seen[-1][1] != len(engines()):
                seen.append((round(time.monotonic() - start, 1), len(engines())))
            await asyncio.sleep(0.5)

    ends, enough = Counter[str](), asyncio.Event()
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:

        async def keep_asking(index: int) -> None:
            while not enough.is_set():
                ends[(await watch.stream(client, index)).kind] += 1

        streams = [asyncio.ensure_future(keep_asking(index)) for index in range(12)]
        await note_until(2)
        await asyncio.sleep(20)  # for the second to load, and to get requests
        enough.set()
        await asyncio.gather(*streams)
        rest = round(time.monotonic() - start, 1)
        await note_until(1)
    return {"streams": dict(ends), "idle_from_s": rest, "replicas": seen}


def main() -> None:
    """Deploy two replicas, measure, print, and store."""
    fresh = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False, "num_cpus": 8}
    ray.init(**fresh, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    results: dict[str, Any] = {}
    start = time.monotonic()
    try:
        serve.run(app(Cluster(flags=FLAGS, replicas=2)))
        results["deployed_s"] = round(time.monotonic() - start, 1)
        results["affinity"] = asyncio.run(converse(URL, seed=1))
        results["scattered"] = asyncio.run(converse(URL, seed=2, scattered=True))
        results["cpu_ms_of_a_request"] = cpu_per_request()
        serve.run(app(Cluster(flags=f"{FLAGS} --max-running-req 4", max_replicas=2, idle=10)))
        results["autoscaling"] = asyncio.run(scale())
        serve.run(app(Cluster(flags=FLAGS, replicas=2)))
        for part in ("worker", "replica"):
            print(json.dumps(results), flush=True)
            results[f"{part} killed"] = asyncio.run(suffer(part))
            time.sleep(30)
    finally:
        print(json.dumps(results), flush=True)
        serve.shutdown()
        ray.shutdown()
    if sys.argv[1:]:
        save(Path(sys.argv[1]), results, f"python -m tests.ray_replicas # ray {ray.__version__}")


if __name__ == "__main__":
    main()
