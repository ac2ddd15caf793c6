"""Speculative decoding on a GPU: the same tokens from recorded and eager steps, and what it saves.

`python3 -m tests.gpu.test_speculative_gpu [MODEL]` measures; without a model, the embedded one.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.kvcache.audit import check_integrity
from minisgl.scheduler.speculative import SpeculativeScheduler

COPY = "Copy this: red green blue red green blue red green blue red green."
STORY = "Tell me a story about a fox."

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 16, 32)], ids=["eager", "recorded"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_same_tokens_as_without(sizes: tuple[int, ...], overlap: bool, backend: str) -> None:
    """All in float32; in bfloat16 a batch's size may turn a close choice, and a copy has none."""
    dtype = "float32" if backend == "triton" else "bfloat16"
    fields: dict[str, Any] = {"device": "cuda", "num_pages": 2048, "cuda_graph_bs": sizes}
    fields |= {"overlap": overlap, "attention_backend": backend, "dtype": dtype}
    asked = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.7, seed=1),
             SamplingParams(max_tokens=40, repetition_penalty=1.1, logprobs=1)]  # fmt: skip
    talks = [talk(COPY), talk(COPY), talk(COPY)]
    answers = []
    for drafts in (0, 7):
        with LLM(num_speculative_tokens=drafts, **fields) as llm:
            answers.append([out["token_ids"] for out in llm.chat(talks, asked)])
            alone = llm.chat(talk(COPY), asked[0])[0]["token_ids"]
            answers[-1].append(alone)
            check_integrity(llm.scheduler.cache)
            if drafts:
                assert isinstance(llm.scheduler, SpeculativeScheduler)
                assert llm.scheduler.accepted > 20
                graph = llm.scheduler.engine.runners.decode
                assert (graph is not None and graph.replays > 0) == bool(sizes)
    sure = slice(None) if dtype == "float32" else slice(0, None, 3)  # those without a sample
    assert answers[0][sure] == answers[1][sure]


def measure(model: str | None, drafts: tuple[int, ...] = (3, 7)) -> None:
    """Tokens a step and milliseconds a token, without and with speculation, in turns."""
    made = {n: LLM(model, device="cuda", num_speculative_tokens=n, memory_ratio=0.9 / (3 - i),
                   cuda_graph_max_bs=32) for i, n in enumerate((0, *drafts))}  # fmt: skip
    params = SamplingParams(max_tokens=200)
    for name, text in (("copy", COPY * 4), ("story", STORY)):
        times: dict[int, list[float]] = {n: [] for n in made}
        steps = {}
        for turn in range(8):
            for n, llm in made.items():
                before, start = llm.scheduler.step_count, time.perf_counter()
                out = llm.chat(talk(text), params)[0]
                took = 1e3 * (time.perf_counter() - start) / len(out["token_ids"])
                steps[n] = len(out["token_ids"]) / (llm.scheduler.step_count - before)
                if turn:
                    times[n].append(took)
        for n in made:
            ratio = statistics.median(a / b for a, b in zip(times[0], times[n]))
            took = statistics.median(times[n])
            print(f"{name}, {n} drafts: {steps[n]:.2f} tokens a step, {took:.3f} ms a token")
            print(f"{name}, {n} drafts: {ratio:.2f} times as fast")


if __name__ == "__main__":
    measure(sys.argv[1] if len(sys.argv) > 1 else None)
