"""Workloads that a seed fixes: chats with one system prompt, and random token ids.

Generated from notebooks/13_benchmark.ipynb: edit there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from minisgl.config.rules import refuse
from minisgl.core import IntArray

SYSTEM = (
    "You are a small assistant that lives inside a book about inference engines. "
    "Answer exactly and briefly. When a task asks for numbers, give numbers only. "
    "When a task asks for a story, tell it from beginning to end. "
    "Never make up a value that is not in the list that you were given. "
)
ANIMALS = ("fox", "bear", "owl", "mouse", "cat", "dog", "rabbit", "wolf")


@dataclass(frozen=True)
class Chat:
    """One chat request: its conversation and how many new tokens it may have."""

    messages: list[dict[str, str]]
    max_tokens: int


def question(rng: np.random.Generator, kind: str) -> str:
    """Write one task in plain words; `kind` is sum, sort, list or story."""
    if kind == "sum":
        a, b = rng.integers(0, 500, size=2)
        return f"What is {a} + {b}?"
    if kind == "sort":
        numbers = rng.choice(100, size=int(rng.integers(4, 9)), replace=False)
        return "Sort these: " + ", ".join(str(n) for n in numbers)
    if kind == "list":
        names = rng.choice(900, size=int(rng.integers(20, 60)), replace=False) + 100
        values = rng.integers(100, 1000, size=len(names))
        pairs = "\n".join(f"k{n} = {v}" for n, v in zip(names, values, strict=True))
        return f"Here is a list:\n{pairs}\nWhat is the value of k{rng.choice(names)}?"
    return f"Tell me a story about a {rng.choice(ANIMALS)}."


def chat_workload(count: int = 64, seed: int = 0) -> list[Chat]:
    """Make `count` chats with one system prompt (repeated to a realistic length), mixed tasks."""
    rng = np.random.default_rng(seed)
    system = {"role": "system", "content": SYSTEM * 4}
    kinds = rng.choice(["sum", "sort", "list", "story"], size=count, p=[0.3, 0.2, 0.2, 0.3])
    return [
        Chat([system, {"role": "user", "content": question(rng, kind)}], max_tokens=256)
        for kind in kinds
    ]


@dataclass(frozen=True)
class RandomRequest:
    """A prompt of random ids, int32 [n], and the exact number of tokens to produce.

    `due` is when an online run sends it, in seconds after its start; `client` is the sender.
    """

    input_ids: IntArray
    output_len: int
    due: float = 0.0
    client: str = ""


def check_room(flag: str, prompt: int, answer: int, room: int) -> None:
    """Raise `ValueError` for `flag` or `output-len` if prompt and output exceed `room`."""
    if prompt >= room:
        raise refuse(flag, f"below {room}, the most tokens of a request", prompt)
    if prompt + answer > room:
        must = f"at most {room - prompt}, the room behind {prompt} prompt tokens"
        raise refuse("output-len", must, answer)


def random_workload(
    vocab_size: int,
    count: int = 256,
    input_len: tuple[int, int] = (100, 1024),
    output_len: tuple[int, int] = (100, 1024),
    seed: int = 0,
) -> list[RandomRequest]:
    """Sample requests with lengths uniform between both ends, as engines' benchmarks do."""
    draw = random.Random(seed)
    top = min(vocab_size - 1, 10_000)
    prompts = [
        [draw.randint(0, top) for _ in range(draw.randint(*input_len))] for _ in range(count)
    ]
    lengths = [draw.randint(*output_len) for _ in range(count)]
    return [
        RandomRequest(np.array(ids, dtype=np.int32), n)
        for ids, n in zip(prompts, lengths, strict=True)
    ]
