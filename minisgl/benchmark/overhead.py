"""What HTTP and text cost: the offline engine and our server on the same requests, in turns.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.benchmark.flood import flood
from minisgl.benchmark.offline import redraw, run_once
from minisgl.benchmark.serving import Child
from minisgl.benchmark.workload import RandomRequest
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM

SIDES = ("engine", "engine and text", "server")


def engine_process(pipe: Connection, folder: Path, fields: Mapping[str, Any]) -> None:
    """A child's whole life: build the engine, then seconds for jobs, an error text instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        with LLM(folder, **fields) as llm:
            tokenizer, engine = llm.tokenizer, llm.scheduler.engine
            pipe.send({"num_pages": engine.num_pages, "page_size": engine.page_size,
                       "vocab_size": engine.model_config.vocab_size})  # fmt: skip
            with frozen_heap():
                while (job := pipe.recv()) is not None:
                    requests, temperature, text = job
                    llm.tokenizer = tokenizer if text else None
                    cpu = time.process_time()
                    seconds = run_once(llm, requests, temperature)
                    pipe.send((seconds, time.process_time() - cpu))
    except (EOFError, KeyboardInterrupt):  # the parent is gone
        pass
    except Exception as error:  # whatever it is, the parent must hear of it
        pipe.send(f"{type(error).__name__}: {error}")


class Engine:
    """The parent's side of an offline engine in a process of its own."""

    def __init__(self, folder: Path, fields: Mapping[str, Any]) -> None:
        context = get_context("spawn")  # a fork would copy a process that has threads
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=engine_process, args=(theirs, folder, dict(fields)), daemon=True
        )
        self.process.start()
        theirs.close()
        self.about: dict[str, int] = self.receive()

    def receive(self) -> Any:
        """The next message. Raises `ValueError` if the engine failed."""
        try:
            message = self.pipe.recv()
        except EOFError:
            raise ValueError("engine: its process has died") from None
        if isinstance(message, str):
            raise ValueError(f"engine: {message}")
        return message

    def run(
        self, requests: Sequence[RandomRequest], temperature: float, text: bool
    ) -> dict[str, float]:
        """Seconds for all requests at once, with text or ids alone, and CPU seconds."""
        self.pipe.send((list(requests), temperature, text))
        seconds, cpu = self.receive()
        return {"seconds": seconds, "cpu engine alone": cpu}

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def offline_engine(folder: Path, fields: Mapping[str, Any]) -> Iterator[Engine]:
    """An engine that lives as long as the block."""
    engine = Engine(folder, fields)
    try:
        yield engine
    finally:
        engine.close()


def bodies_of(
    requests: Sequence[RandomRequest], model: str, temperature: float
) -> list[dict[str, Any]]:
    """The same requests in the words of the API."""
    return [
        {"model": model, "prompt": r.input_ids.tolist(), "max_tokens": r.output_len,
         "temperature": temperature, "top_p": 1.0, "top_k": -1, "ignore_eos": True,
         "stream": True, "stream_options": {"include_usage": True}}
        for r in requests
    ]  # fmt: skip


def run_server(
    child: Child, requests: Sequence[RandomRequest], temperature: float
) -> dict[str, float]:
    """Seconds through HTTP, and the CPU seconds of the client and of each process of the server."""
    before = child.cpu_seconds()
    with frozen_heap():  # a pause of ours would look like one of the server's
        found = asyncio.run(flood(child.url, bodies_of(requests, "", temperature)))
    after = child.cpu_seconds()
    cpu = {f"cpu {name}": after[name] - before.get(name, 0.0) for name in after}
    return {"seconds": found.seconds, "cpu client": found.client_cpu_s, **cpu}


def measure_overhead(
    engine: Engine, child: Child, requests: Sequence[RandomRequest], *,
    temperature: float, repeats: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Tokens per second of all sides in turns, the ratio of medians, and the server's CPU time."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for index in tqdm(range(repeats + 1), desc="repetitions", disable=None):  # 0 warms up
        for side in SIDES[::-1] if index % 2 else SIDES:
            other = side == "engine and text"  # one engine has two turns: the second needs its own
            draw = seed + 2 * index + other
            fresh = redraw(requests, engine.about["vocab_size"], draw)
            if side == "server":
                found = run_server(child, fresh, temperature)
            else:
                found = engine.run(fresh, temperature, text=other)
            seconds[side].append(found["seconds"])
            cpu[side].append(found)
    alone = [{**e, **s} for e, s in zip(cpu["engine"][1:], cpu["server"][1:], strict=True)]
    return overhead_row(requests, {side: all_[1:] for side, all_ in seconds.items()}, alone)


def overhead_row(
    requests: Sequence[RandomRequest], seconds: Mapping[str, Sequence[float]],
    cpu: Sequence[Mapping[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """Medians of all sides, and the share of the engine's speed that the server keeps."""
    tokens = sum(r.output_len for r in requests)
    medians = {side: statistics.median(all_) for side, all_ in seconds.items()}
    parts = [name for name in cpu[0] if name != "seconds"]
    return {
        "streams": len(requests), "output_tokens": tokens,
        "input_tokens": sum(len(r.input_ids) for r in requests),
        "seconds": {side: [round(s, 4) for s in all_] for side, all_ in seconds.items()},
        "tokens_per_s": {side: round(tokens / s, 1) for side, s in medians.items()},
        "ratio": round(medians["engine"] / medians["server"], 4),
        "best_ratio": round(min(seconds["engine"]) / min(seconds["server"]), 4),
        "text_ratio": round(medians["engine"] / medians["engine and text"], 4),
        "cpu_s": {name.removeprefix("cpu "): round(statistics.median(c[name] for c in cpu), 3)
                  for name in parts},
        "wall_s": round(medians["server"], 4),
    }  # fmt: skip


def overhead_text(row: Mapping[str, Any]) -> str:
    """The comparison for the terminal."""
    lines = [f"{row['streams']} streams, {row['output_tokens']} tokens a run, medians of "
             f"{len(row['seconds']['server'])} runs"]  # fmt: skip
    for side, speed in row["tokens_per_s"].items():
        share = speed / row["tokens_per_s"]["engine"]
        lines.append(f"{side:16} {speed:10,.1f} tokens/s  {share:7.1%}  {row['seconds'][side]}")
    spent = ", ".join(f"{name} {s:.2f}" for name, s in row["cpu_s"].items())
    lines.append(
        f"HTTP and text cost {1 - row['ratio']:.1%} of the engine's speed "
        f"({1 - row['best_ratio']:.1%} from the fastest run of each side)"
    )
    lines.append(f"CPU seconds of a run ({row['wall_s']:.2f} s with the server): {spent}")
    return "\n".join(lines)
