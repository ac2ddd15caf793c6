"""The whole engine on a GPU: every backend, graphs and overlap give the right answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SUMS = [(a, b) for a in (7, 31, 208) for b in (5, 44, 130)]
TALKS = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in SUMS] + [
    [{"role": "user", "content": "Tell me a story about a fox."}],
    [{"role": "user", "content": "Sort these: 9, 4, 7, 1"}],
]


def run(**fields: Any) -> list[dict[str, Any]]:
    """Answers of an engine of its own, which loses no page."""
    with LLM(**{"device": "cuda", "num_pages": 2048, **fields}) as llm:
        outs = llm.chat(TALKS, SamplingParams(temperature=0.0, max_tokens=64))
        again = llm.chat(TALKS, SamplingParams(temperature=0.0, max_tokens=64))
        llm.scheduler.cache.check_integrity()
        assert sum(out["cached_tokens"] for out in again) > 0
        return outs


def assert_sums_are_right(outs: list[dict[str, Any]]) -> None:
    for (a, b), out in zip(SUMS, outs, strict=False):
        assert str(a + b) in out["text"], (a, b, out["text"])


@pytest.mark.parametrize("backend", ["torch", "triton", "fi", "fi,triton", "triton,fi"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_backend_answers(backend: str, page_size: int) -> None:
    outs = run(attention_backend=backend, dtype="float16", page_size=page_size, num_pages=8192)
    assert_sums_are_right(outs)
    assert outs[-1]["text"].count(",") == 3 and "1, 4, 7, 9" in outs[-1]["text"]


@pytest.mark.parametrize("backend", ["triton", "fi"])
def test_replay_answers_like_eager(backend: str) -> None:
    eager = run(attention_backend=backend, dtype="float16", cuda_graph_max_bs=0)
    replay = run(attention_backend=backend, dtype="float16", cuda_graph_max_bs=16)
    assert_sums_are_right(replay)
    same = sum(a["text"] == b["text"] for a, b in zip(eager, replay, strict=True))
    assert same >= len(TALKS) - 1  # half precision may turn one word of the story


def test_overlap_changes_nothing() -> None:
    texts = [
        [out["text"] for out in run(attention_backend="triton", dtype="float16", overlap=overlap)]
        for overlap in (True, False)
    ]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(TALKS) - 1
    assert_sums_are_right([{"text": text} for text in texts[0]])


def test_gpu_and_cpu_agree() -> None:
    gpu = run(dtype="bfloat16")
    cpu = run(device="cpu", dtype="float32")
    assert_sums_are_right(gpu)
    assert [o["text"] for o in gpu[:9]] == [o["text"] for o in cpu[:9]]
