"""The cost of `deterministic=True` on a CPU, in all and of attention alone, in CPU seconds.

python -m tests.deterministic_cost [FILE]: prints, and writes FILE if it is given.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM

ROUNDS = 5
# Requests, tokens of each prompt and of each answer.
CASES = {
    "decode of 1": (1, 4, 96),
    "decode of 4": (4, 4, 48),
    "decode of 16": (16, 4, 24),
    "prefill of 4 x 256": (4, 256, 1),
    "both, 8 requests": (8, 128, 32),
}


def cpu_name() -> str:
    """Model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def prompts(count: int, length: int) -> Iterator[list[int]]:
    """Random prompts, new ones at every call: no cache helps."""
    rng = np.random.default_rng(time.monotonic_ns())
    for _ in range(count):
        yield rng.integers(1, 1700, length).tolist()


def speed(llm: LLM, count: int, length: int, answer: int) -> float:
    """Tokens per CPU second, of prompts and answers."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    listed = list(prompts(count, length))
    start = time.process_time()
    llm.generate(listed, params)
    return count * (length + answer) / (time.process_time() - start)


def measure() -> dict[str, Any]:
    """The median of each case's rounds, for all engines in turns."""
    torch.set_num_threads(1)  # a thread that waits would burn seconds, too
    start = partial(LLM, device="cpu", num_pages=500, cache_type="naive")
    with mock.patch("minisgl.layers.invariant.make_invariant", lambda ctx: ctx):
        attention = start(deterministic=True)
    engines = {"plain": start(), "attention": attention, "deterministic": start(deterministic=True)}
    results = {}
    for case, sizes in CASES.items():
        rounds = [
            {name: speed(llm, *sizes) for name, llm in engines.items()} for _ in range(ROUNDS + 1)
        ]
        results[case] = {
            name: round(statistics.median(found[name] for found in rounds[1:]), 1)
            for name in engines
        }
    for llm in engines.values():
        llm.shutdown()
    return results


def main() -> None:
    """Measure, print, and store."""
    machine = f"{cpu_name()}, 1 thread, torch {torch.__version__}"
    found = {
        "command": "python -m tests.deterministic_cost",
        "machine": machine,
        "date": date.today().isoformat(),
        "results": measure(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
