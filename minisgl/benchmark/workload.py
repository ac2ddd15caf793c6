"""A workload of random token ids, determined by a seed.

Generated from notebooks/13_benchmark.ipynb: edit there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from minisgl.config.rules import refuse
from minisgl.core import IntArray


@dataclass(frozen=True)
class RandomRequest:
    """A prompt of random ids, int32 [n], and the exact number of tokens to produce.

    `due` is its time in an online run, in seconds after the start; `client` is the sender.
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
    """Sample requests with uniform lengths between both ends, as engines' benchmarks do."""
    rng = random.Random(seed)
    top = min(vocab_size - 1, 10_000)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(*input_len))] for _ in range(count)]
    lengths = [rng.randint(*output_len) for _ in range(count)]
    return [
        RandomRequest(np.array(ids, dtype=np.int32), n)
        for ids, n in zip(prompts, lengths, strict=True)
    ]
