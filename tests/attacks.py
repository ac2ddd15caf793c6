"""`python -m tests.attacks OUT.json [--tree FOLDER]`: known attacks, and what each costs others.

Each is sent to a server of the package in FOLDER. A canary, another client, reads one stream after
the other. A row holds its longest wait for an event, the processor time that the server's busiest
process spent in a wait, the growth of memory, and the answer to the attacker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.hostile import memory, spent

MIB, PATIENCE = 2**20, 45.0  # bytes, seconds after which an attack is given up
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def fill(item: str, before: str, after: str) -> bytes:
    """Return a body of 1 MiB: as many items as fit."""
    count = (MIB - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 1, **fields}).encode()


def numbered(form: str, count: int) -> str:
    return ",".join(form % index for index in range(count))


IDS = [300] * 2**18
MESSAGE = '{"messages":[{"role":"user","content":'
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "t1 prompt of objects": (COMPLETIONS, lambda: fill("{}", '{"prompt":[', "]}")),
    "t1 prompt of lists of objects": (COMPLETIONS, lambda: fill("{}", '{"prompt":[[', "]]}")),
    "t1 prompt of empty lists": (COMPLETIONS, lambda: fill("[]", '{"prompt":[', "]}")),
    "t1 prompt of too many ids": (COMPLETIONS, lambda: fill("300", '{"prompt":[', "]}")),
    "t1 parts that are objects": (CHAT, lambda: fill("{}", MESSAGE + "[", "]}]}")),
    "t1 messages that are objects": (CHAT, lambda: fill("{}", '{"messages":[', "]}")),
    "t1 inputs that are objects": (RESPONSES, lambda: fill("{}", '{"input":[', "]}")),
    "t1 half an input": (RESPONSES, lambda: fill('{"role":""}', '{"input":[', "]}")),
    "t1 bad allowed ids": (
        COMPLETIONS,
        lambda: fill("-1", '{"prompt":"x","allowed_token_ids":[', "]}"),
    ),
    "t1 unknown fields": (
        COMPLETIONS,
        lambda: ("{" + numbered('"k%d":1', MIB // 12) + ',"prompt":"x"}').encode(),
    ),
    "t1 bad biases": (
        COMPLETIONS,
        lambda: ('{"prompt":"x","logit_bias":{' + numbered('"a%d":"x"', MIB // 13) + "}}").encode(),
    ),
    "t4 allowed ids, 1 answer": (COMPLETIONS, lambda: body(allowed_token_ids=IDS)),
    "t4 allowed ids, n=16": (COMPLETIONS, lambda: body(allowed_token_ids=IDS, n=16)),
    "t4 60 kB prompt, n=128": (COMPLETIONS, lambda: body(prompt="word " * 12000, n=128)),
    "t4 1,024 biases, n=128": (
        COMPLETIONS,
        lambda: body(logit_bias={str(i): 1 for i in range(1024)}, n=128, max_tokens=2),
    ),
    "t4 20 logprobs, n=128": (
        COMPLETIONS,
        lambda: body(logprobs=20, n=128, max_tokens=60, ignore_eos=True),
    ),
    "t4 echo of 1,024 prompts": (
        COMPLETIONS,
        lambda: body(prompt=["once upon a time " * 20] * 1024, logprobs=20, echo=True),
    ),
    "t4 64 long stops, n=128": (
        COMPLETIONS,
        lambda: body(stop=[f"x{i}" + "y" * 1000 for i in range(64)], n=128, max_tokens=60),
    ),
    "t5 allowed ids, 256 prompts": (
        COMPLETIONS,
        lambda: body(prompt=["hi"] * 256, allowed_token_ids=IDS),
    ),
    "t9 a million brackets": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * MIB),
    "t12 a stored text of 7.5 MB": (
        RESPONSES,
        lambda: json.dumps(
            {"input": "x", "max_output_tokens": 1, "text": {"format": {
                "type": "json_schema", "name": "a", "description": "d" * 7_500_000,
                "schema": {"type": "object"}}}}
        ).encode(),
    ),
}  # fmt: skip


class Server:
    """A server of the package in a folder, and the canary that reads its streams."""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, "-m", "minisgl", "--port", "0", "--log-format", "none"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(
            command, cwd=tree, env=env, start_new_session=True, **pipes
        )  # as they are in the tree
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        self.url = "http://127.0.0.1:" + line.split(" on ")[-1].rsplit(":", 1)[1].split("/")[0]
        parent = psutil.Process(self.process.pid)
        self.processes = [parent, *parent.children(recursive=True)]
        self.waits: list[tuple[float, float]] = []  # seconds, and those of work
        self.since, self.stopped = time.monotonic(), False
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def work(self) -> list[int]:
        return [spent(p) for p in self.processes if p.is_running()]

    def client(self) -> httpx.Client:
        """Return a client of another address than the attacker's."""
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        return httpx.Client(transport=other, timeout=300)

    def read(self) -> None:
        """Read streams until `stopped`."""
        fields = {"prompt": "Once upon", "max_tokens": 200, "stream": True, "ignore_eos": True}
        while not self.stopped:
            before, self.since = self.work(), time.monotonic()
            with suppress(httpx.HTTPError), self.client() as client, client.stream(
                "POST", self.url + COMPLETIONS, json=fields
            ) as response:  # fmt: skip
                for line in response.iter_lines():
                    if line.startswith("data"):
                        now, work = time.monotonic(), self.work()
                        most = max((b - a for a, b in zip(before, work)), default=0) / 1e9
                        self.waits.append((now - self.since, most))
                        self.since, before = now, work

    def during(self, action: Callable[[], str | None]) -> dict[str, Any]:
        """Return what an action does to the canary."""
        del self.waits[:]
        size, start = memory([p for p in self.processes if p.is_running()]), time.monotonic()
        outcome = action()
        seconds = time.monotonic() - start
        deadline, seen = time.monotonic() + PATIENCE - min(seconds, PATIENCE - 5), len(self.waits)
        while len(self.waits) < seen + 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        waits = [*self.waits, (time.monotonic() - self.since, 0.0)]
        grown = memory([p for p in self.processes if p.is_running()]) - size
        return {
            "outcome": outcome, "seconds": round(seconds, 2),
            "gap": round(max(gap for gap, _ in waits), 3),
            "work": round(max(work for _, work in waits), 3), "grown_mb": round(grown / 1e6),
        }  # fmt: skip

    def ask(self, path: str, data: bytes) -> str:
        """Send an attack; return the status."""
        headers = {"content-type": "application/json"}
        try:
            answer = httpx.post(self.url + path, content=data, headers=headers, timeout=PATIENCE)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} after {PATIENCE:.0f} s"
        return str(answer.status_code)

    def close(self) -> None:
        self.stopped = True
        for process in self.processes:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


def warm(tree: Path) -> Server:
    """Start a server and use many rows, since the pages of its KV cache count when first used."""
    server = Server(tree)
    for _ in range(2):
        server.ask(COMPLETIONS, body(n=128, max_tokens=60, ignore_eos=True))
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description="Send known attacks; write what each costs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--only", default="", help="a part of the names")
    args = parser.parse_args()
    rows, server = [], warm(args.tree)
    for name, (path, make) in ATTACKS.items():
        if args.only not in name:
            continue
        quiet = server.during(partial(time.sleep, 3))
        found = server.during(partial(server.ask, path, make()))
        alive = server.process.poll() is None
        before = {"quiet_gap": quiet["gap"], "quiet_work": quiet["work"]}
        row = {"attack": name, **before, **found, "alive": alive}
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        if not row["alive"] or row["gap"] > 20:
            server.close()
            server = warm(args.tree)
    server.close()


if __name__ == "__main__":
    main()
