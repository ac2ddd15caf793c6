"""The least time that a model needs on a device, from bytes and operations alone.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minisgl.config.model import ModelConfig
from minisgl.core import IntArray
from minisgl.kvcache.pool import kv_bytes_per_token


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best: bytes per second from memory, operations per second."""

    bytes_per_s: float
    flops_per_s: float


def head_parameters(model: ModelConfig) -> int:
    """Weights of the output head, which is the embedding table where both are tied."""
    return model.vocab_size * model.hidden_size


def body_parameters(model: ModelConfig) -> int:
    """Weights of all layers."""
    tables = head_parameters(model) * (1 if model.tie_word_embeddings else 2)
    return model.num_parameters - tables


@dataclass(frozen=True)
class Roofline:
    """Least seconds of a model on one device; `itemsize` is the bytes of a weight, K and V."""

    model: ModelConfig
    ceilings: Ceilings
    itemsize: int = 2

    def linear(self, tokens: int, sampled: int, extra_flops: int = 0) -> float:
        """All linear layers over `tokens` rows, the head over `sampled` of them."""
        model, head = self.model, head_parameters(self.model)
        body = body_parameters(model)
        weights, used = body + head * (sampled > 0), tokens * body + sampled * head
        return max(
            weights * self.itemsize / self.ceilings.bytes_per_s,
            (2 * used + extra_flops) / self.ceilings.flops_per_s,
        )

    def kv(self, tokens: int) -> float:
        """Read the keys and values of so many tokens in all layers."""
        nbytes = kv_bytes_per_token(self.model, self.itemsize) * tokens
        return nbytes / self.ceilings.bytes_per_s

    def prefill(self, lengths: Sequence[int] | IntArray) -> float:
        """Prompts of these lengths with nothing cached; one row of each goes to the head."""
        n = np.asarray(lengths, dtype=np.int64)
        pairs = int((n * (n + 1) // 2).sum())  # causal: token i looks at i tokens
        heads = self.model.num_layers * self.model.num_qo_heads
        return self.linear(
            int(n.sum()), len(n), extra_flops=4 * heads * self.model.head_dim * pairs
        )

    def decode(self, lengths: Sequence[int] | IntArray) -> float:
        """One token for each request; `lengths` counts the tokens that it attends to."""
        return self.linear(len(lengths), len(lengths)) + self.kv(int(np.sum(lengths)))

    def workload(
        self, prompts: Sequence[int], outputs: Sequence[int], max_running: int = 256
    ) -> Floor:
        """All prompts computed in one go, then every decode step at its bound."""
        linear = kv = 0.0
        for lengths in decode_lengths(prompts, outputs, max_running):
            linear += self.linear(len(lengths), len(lengths))
            kv += self.kv(int(lengths.sum()))
        return Floor(self.prefill(prompts), linear, kv)


def decode_lengths(
    prompts: Sequence[int], outputs: Sequence[int], max_running: int
) -> Iterator[IntArray]:
    """Lengths of all running requests at each decode step, if prefill took no time at all."""
    waiting = list(zip(prompts, outputs, strict=True))[::-1]
    running = np.empty((0, 2), dtype=np.int64)  # length now, steps to go; a prefill gave the first
    while waiting or len(running):
        free = max_running - len(running)
        started = [waiting.pop() for _ in range(min(free, len(waiting)))]
        fresh = np.array(started, dtype=np.int64).reshape(-1, 2) - [0, 1]
        running = np.concatenate([running, fresh])
        running = running[running[:, 1] > 0]
        if len(running):
            running += [1, -1]
            yield running[:, 0].astype(np.int32)


class Floor(NamedTuple):
    """The least seconds of a workload and where they go."""

    prefill: float
    linear: float  # of decode steps
    kv: float  # of decode steps

    @property
    def seconds(self) -> float:
        return self.prefill + self.linear + self.kv
