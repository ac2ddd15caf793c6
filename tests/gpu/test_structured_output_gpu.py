"""Grammars on a GPU: valid answers from recorded and eager steps, and what a neighbour pays.

`python3 -m tests.gpu.test_structured_output_gpu [MODEL]` measures; without a model, the embedded
one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import jsonschema
import pytest
import torch

from minisgl import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 16)], ids=["eager", "recorded"])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_valid_and_neighbours_as_without_them(
    sizes: tuple[int, ...], overlap: bool
) -> None:
    asked = [SamplingParams(max_tokens=24)] * 4
    for seed in range(6):
        hot = {"temperature": 1.0, "seed": seed} if seed % 2 else {}
        asked.append(SamplingParams(json_schema=SCHEMA, max_tokens=80, **hot))
        asked.append(SamplingParams(regex="[a-z]{3}-[0-9]{2}", max_tokens=40, **hot))
    talks = [[{"role": "user", "content": f"What is {n} + 5?"}] for n in range(len(asked))]
    free = [*asked[:4], *[SamplingParams(max_tokens=24)] * (len(asked) - 4)]
    with LLM(device="cuda", num_pages=2048, cuda_graph_bs=sizes, overlap=overlap) as llm:
        outs, without = llm.chat(talks, asked), llm.chat(talks, free)
    for params, out, other in zip(asked, outs, without):
        if params.json_schema is not None and out["finish_reason"] == "stop":
            jsonschema.validate(json.loads(out["text"]), SCHEMA)
        elif params.regex is not None:
            assert out["finish_reason"] == "stop" and len(out["text"]) == 6
        elif params.regex is None and params.json_schema is None:
            assert out["text"] == other["text"]


def measure(model: str | None, batch_sizes: tuple[int, ...] = (8, 32, 64)) -> None:
    """Milliseconds of a token: all free, with one constrained request, with all constrained."""
    count = 128
    free = SamplingParams(max_tokens=count, ignore_eos=True)
    words = SamplingParams(regex="[a-z ]{1000}", max_tokens=count)
    with LLM(model, device="cuda", cuda_graph_max_bs=64) as llm:

        def ms(params: list[SamplingParams]) -> float:
            start = time.perf_counter()
            prompts: list[Any] = [[9, 8, 7, n] for n in range(len(params))]
            llm.generate(prompts, params)
            return 1e3 * (time.perf_counter() - start) / count

        for size in batch_sizes:
            mixes = ([free] * size, [free] * (size - 1) + [words], [words] * size)
            rounds = [[ms(mix) for mix in mixes] for _ in range(7)]
            none, one, every = (statistics.median(column) for column in zip(*rounds))
            more = statistics.median(row[1] / row[0] - 1 for row in rounds)
            print(f"batch {size}: {none:.3f} ms free, {one:.3f} beside one grammar ({more:+.1%})")
            print(f"batch {size}: {every:.3f} ms all with grammars")


if __name__ == "__main__":
    measure(sys.argv[1] if len(sys.argv) > 1 else None)
