"""Replicas on GPUs under Ray Serve: who gets which GPU, chats, and what streams see of a death.

python3 -m tests.gpu.ray_serve [FILE] [FLAGS]

Needs two GPUs and Ray, and a machine or network namespace of its own: Ray listens on all
interfaces. FLAGS go to each replica; with `--device cpu` ranks and replicas need no GPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import torch
from ray import serve

from minisgl.benchmark.report import save
from minisgl.cluster import Cluster, app
from tests.ray_replicas import URL, engines, suffer
from tests.replicas import PORT, converse

CASES = {
    "two replicas": ("", 2),
    "one replica of two ranks": (" --tp 2", 1),
}


def gpus_of(replica: psutil.Process) -> list[str]:
    """Return the GPUs that the workers of a replica may use, as Ray has set them."""
    workers = [p.environ() for p in replica.children() if "spawn_main" in " ".join(p.cmdline())]
    return sorted({worker.get("CUDA_VISIBLE_DEVICES", "all") for worker in workers})


async def stream(count: int) -> int:
    """Return how many of `count` concurrent streams end with all of their 32 tokens."""
    body = {"model": "minisgl-tiny", "prompt": "Once", "max_tokens": 32, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip

    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:

        async def one() -> bool:
            async with client.stream("POST", f"{URL}/v1/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
            whole = answer.status_code == 200 and lines[-1] == "data: [DONE]"
            return whole and '"completion_tokens":32' in lines[-2].replace(" ", "")

        return sum(await asyncio.gather(*(one() for _ in range(count))))


def main(file: str | None = None, *flags: str) -> None:
    """Deploy, use, kill a replica, print the results after each part, and store them."""
    ray.init(
        num_cpus=8, num_gpus=torch.cuda.device_count(), include_dashboard=False,
        object_store_memory=2**28, log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    results: dict[str, Any] = {"resources": ray.cluster_resources().get("GPU", 0.0)}
    given = " ".join(("--log-format none", *flags))
    try:
        for name, (more, replicas) in CASES.items():
            start = time.monotonic()
            serve.run(app(Cluster(flags=given + more, replicas=replicas)))
            found = results[name] = {"deployed_s": round(time.monotonic() - start, 1)}
            found["gpus"] = [gpus_of(replica) for replica in engines()]
            found["chats"] = asyncio.run(converse(URL))
            found["streams_complete_of_64"] = asyncio.run(stream(64))
            print(json.dumps(results), flush=True)
            if replicas == 2:
                start = time.monotonic()
                found["replica killed"] = asyncio.run(suffer("replica"))
                found["replaced_s"] = round(time.monotonic() - start, 1)
                time.sleep(15)  # for the new replica to load
                found["gpus_after"] = [gpus_of(replica) for replica in engines()]
                found["chats_after"] = asyncio.run(converse(URL, seed=1))
                print(json.dumps(results), flush=True)
            serve.delete("default")  # the next replicas need its GPUs
    finally:
        serve.shutdown()
        ray.shutdown()
    if file:
        save(Path(file), results, f"python3 -m tests.gpu.ray_serve # ray {ray.__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
