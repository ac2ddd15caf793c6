"""The cost of HTTP and text: the offline engine and our server on the same requests, in turns.

Generated from notebooks/13d_overhead.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from minisgl.benchmark.load import Target
from minisgl.benchmark.offline import resample, run_once
from minisgl.benchmark.serving import Child
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.model import ModelConfig
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM
from minisgl.server.chat.client import base_url
from minisgl.tokenizer import has_tokenizer


def check_answer(tail: bytes, tokens: int) -> None:
    """Raise `ValueError` unless a stream's last bytes are its end and report `tokens` tokens."""
    counts = re.findall(rb'"completion_tokens": ?(\d+)', tail)
    if b"[DONE]" not in tail or not counts:
        said = (tail or b"nothing").decode(errors="replace")[-300:]
        raise ValueError(f"server: a stream did not end well, it ends {said!r}")
    if int(counts[-1]) != tokens:
        raise ValueError(f"server: {tokens} tokens were asked for, got {int(counts[-1])}")


async def last_bytes(url: str, body: Mapping[str, Any]) -> bytes:
    """Return the last KiB of one streamed answer, read without an HTTP library to save CPU time."""
    place, data = urlsplit(f"{base_url(url)}completions"), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = (f"POST {place.path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {len(data)}")  # fmt: skip
    writer.write("\r\n".join((*head, "", "")).encode() + data)
    tail = b""
    while part := await reader.read(65_536):
        tail = (tail + part)[-1024:]
    writer.close()
    return tail


class Timed(NamedTuple):
    """Seconds until the last request was done, and each part's CPU seconds in that time."""

    seconds: float
    cpu: dict[str, float]


async def flood(url: str, bodies: Sequence[Mapping[str, Any]]) -> Timed:
    """Send all requests at once and wait for all ends; raise `ValueError` for a bad answer."""
    start, cpu = time.perf_counter(), time.process_time()
    tails = await asyncio.gather(*(last_bytes(url, body) for body in bodies))
    timed = Timed(time.perf_counter() - start, {"client": time.process_time() - cpu})
    for body, tail in zip(bodies, tails, strict=True):
        check_answer(tail, body["max_tokens"])
    return timed


def run_engine(llm: LLM, requests: Sequence[RandomRequest], temperature: float) -> Timed:
    """Run all requests at once, offline."""
    cpu = time.process_time()
    seconds = run_once(llm, requests, temperature)
    return Timed(seconds, {"engine alone": time.process_time() - cpu})


def run_ids(llm: LLM, requests: Sequence[RandomRequest], temperature: float) -> Timed:
    """Run all requests at once, offline and without text."""
    tokenizer, llm.tokenizer = llm.tokenizer, None
    try:
        return run_engine(llm, requests, temperature)
    finally:
        llm.tokenizer = tokenizer


def run_server(child: Child, requests: Sequence[RandomRequest], temperature: float) -> Timed:
    """Send all requests over HTTP; return the CPU seconds of the client and each process."""
    target, before = Target("", temperature=temperature), child.cpu_seconds()
    timed = asyncio.run(flood(child.url, [target.body(request) for request in requests]))
    spent = {name: cpu - before.get(name, 0.0) for name, cpu in child.cpu_seconds().items()}
    return Timed(timed.seconds, timed.cpu | spent)


def measure_overhead(
    llm: LLM,
    child: Child,
    requests: Sequence[RandomRequest],
    temperature: float,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Measure every side in turns, on fresh prompts; return a row of medians."""
    vocab = llm.scheduler.engine.vocab_size
    runs: dict[str, Callable[[Sequence[RandomRequest]], Timed]] = {
        "engine": lambda fresh: run_ids(llm, fresh, temperature),
        "engine and text": lambda fresh: run_engine(llm, fresh, temperature),
        "server": lambda fresh: run_server(child, fresh, temperature),
    }
    found: dict[str, list[Timed]] = {side: [] for side in runs}
    with frozen_heap():  # a pause here would look like one of the server's
        for index in tqdm(range(repeats + 1), desc="repetitions", disable=None):
            for number, side in list(enumerate(runs))[:: -1 if index % 2 else 1]:
                fresh = resample(requests, vocab, seed + len(runs) * index + number)
                found[side].append(runs[side](fresh))
    return overhead_row(requests, {side: timed[1:] for side, timed in found.items()})


def overhead_row(
    requests: Sequence[RandomRequest], found: Mapping[str, Sequence[Timed]]
) -> dict[str, Any]:
    """Return the medians of all sides, and the server's share of the engine's speed."""
    tokens = sum(r.output_len for r in requests)
    seconds = {side: [t.seconds for t in timed] for side, timed in found.items()}
    medians = {side: statistics.median(all_) for side, all_ in seconds.items()}
    spent = [e.cpu | s.cpu for e, s in zip(found["engine"], found["server"], strict=True)]
    return {
        "streams": len(requests),
        "output_tokens": tokens,
        "input_tokens": sum(len(r.input_ids) for r in requests),
        "seconds": {side: [round(s, 4) for s in all_] for side, all_ in seconds.items()},
        "tokens_per_s": {side: round(tokens / s, 1) for side, s in medians.items()},
        "ratio": round(medians["engine"] / medians["server"], 4),
        "best_ratio": round(min(seconds["engine"]) / min(seconds["server"]), 4),
        "cpu_s": {name: round(statistics.median(c[name] for c in spent), 3) for name in spent[0]},
        "wall_s": round(medians["server"], 4),
    }


def overhead_text(row: Mapping[str, Any]) -> str:
    """Format the comparison for the terminal."""
    lines = [f"{row['streams']} streams, {row['output_tokens']} tokens a run"]
    for side, speed in row["tokens_per_s"].items():
        share = speed / row["tokens_per_s"]["engine"]
        lines.append(f"{side:16} {speed:10,.1f} tokens/s  {share:7.1%}  {row['seconds'][side]} s")
    spent = ", ".join(f"{name} {s:.2f}" for name, s in row["cpu_s"].items())
    lines.append(f"CPU seconds of a run ({row['wall_s']:.2f} s with the server): {spent}")
    return "\n".join(lines)


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a byte-level tokenizer of `vocab_size` tokens; raise `ValueError` for less than 257."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size: must be at least 257 for 256 bytes, got {vocab_size}")
    strings = ("Ġ" + "".join(s) for n in count(1) for s in product(ascii_lowercase, repeat=n))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *islice(strings, vocab_size - 257)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


@contextmanager
def with_tokenizer(folder: Path, dummy_weight: bool) -> Iterator[tuple[Path, str]]:
    """Yield a model folder with a tokenizer, and its origin: "the model's" or "synthetic".

    With `dummy_weight`, the config of a folder without one is copied to a temporary folder with a
    synthetic tokenizer. Raise `ValueError` if weights are needed and there is no tokenizer.
    """
    if has_tokenizer(folder):
        yield folder, "the model's"
        return
    if not dummy_weight:
        raise ValueError(f"model: {folder} has no tokenizer, and a server needs one")
    with TemporaryDirectory(prefix="minisgl-") as name:
        copy = Path(name)
        shutil.copy(folder / "config.json", copy)
        size = ModelConfig.from_path(folder).vocab_size
        synthetic_tokenizer(size).save(str(copy / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
        yield copy, "synthetic"
