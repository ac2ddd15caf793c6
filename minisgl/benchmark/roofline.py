"""Roofline bounds of a model on a device, from bytes and operations alone.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.kernels import Ceilings
from minisgl.config.model import ModelConfig
from minisgl.core import IntArray
from minisgl.kvcache.pool import kv_bytes_per_token


class Work(NamedTuple):
    """Unavoidable work of a computation: bytes read from memory, and operations."""

    nbytes: int
    flops: int


def head_parameters(model: ModelConfig) -> int:
    """Count the weights of the output head, which is the embedding table where both are tied."""
    return model.vocab_size * model.hidden_size


def body_parameters(model: ModelConfig) -> int:
    """Count the weights of all layers."""
    tables = head_parameters(model) * (1 if model.tie_word_embeddings else 2)
    return model.num_parameters - tables


@dataclass(frozen=True)
class Roofline:
    """Least work and seconds of a model on a device; `itemsize`: bytes of a weight, K or V.

    eight_bits: "quantization" and "kv_cache_dtype", as far as they are fp8. Then the layers'
    weights have one byte and products of them count half, keys and values have one byte.
    """

    model: ModelConfig
    ceilings: Ceilings
    itemsize: int = 2
    eight_bits: frozenset[str] = frozenset()

    def seconds(self, work: Work) -> float:
        """Return the larger of its two times: reading and computing overlap perfectly within it."""
        reading = work.nbytes / self.ceilings.bytes_per_s
        return max(reading, work.flops / self.ceilings.flops_per_s)

    def forward(self, tokens: int, sampled: int, kv_read: int, pairs: int) -> Work:
        """Count the work of one forward pass over `tokens` rows, of which the head takes `sampled`.

        `kv_read` tokens of K and V are read; attention computes `pairs` of query and key.
        """
        model, head = self.model, head_parameters(self.model)
        body, experts = body_parameters(model), model.expert_parameters
        active, unread = body, 0  # weights used by a token; weights that no token uses
        if model.moe is not None:  # if every expert is equally likely
            share = model.moe.top_k / model.moe.num_experts
            active -= round((1 - share) * experts)
            unread = round((1 - share) ** tokens * experts)
        quantized = "quantization" in self.eight_bits
        kv_itemsize = 1 if "kv_cache_dtype" in self.eight_bits else self.itemsize
        nbytes = (body - unread) * (1 if quantized else self.itemsize)
        nbytes += head * (sampled > 0) * self.itemsize
        nbytes += kv_bytes_per_token(model, kv_itemsize) * kv_read
        per_pair = 4 * model.num_layers * model.num_qo_heads * model.head_dim  # q kᵀ, weights v
        products = tokens * active * (1 if quantized else 2) + 2 * sampled * head
        return Work(nbytes, products + per_pair * pairs)

    def prefill_work(self, lengths: Sequence[int] | IntArray) -> Work:
        """Count the work of prompts of these lengths, none cached; the head takes one row each."""
        n = np.asarray(lengths, dtype=np.int64)
        pairs = int((n * (n + 1) // 2).sum())  # causal: token i looks at i tokens
        return self.forward(int(n.sum()), len(n), 0, pairs)

    def decode_work(self, lengths: Sequence[int] | IntArray) -> Work:
        """Count the work of a decode step; `lengths` counts the tokens that each attends to."""
        total = int(np.sum(lengths))
        return self.forward(len(lengths), len(lengths), total, total)

    def decode(self, lengths: Sequence[int] | IntArray) -> float:
        """Return the least seconds of one decode step."""
        return self.seconds(self.decode_work(lengths))

    def workload(
        self, prompts: Sequence[int], outputs: Sequence[int], max_running: int = 256
    ) -> Floors:
        """Return the least seconds for all prompts in one step and every decode step after it."""
        steps = [self.prefill_work(prompts)]
        played = decode_lengths(prompts, outputs, max_running)
        steps += [self.decode_work(lengths) for lengths in played]
        total = Work(*(sum(column) for column in zip(*steps)))
        return Floors(sum(self.seconds(step) for step in steps), self.seconds(total))


def decode_lengths(
    prompts: Sequence[int], outputs: Sequence[int], max_running: int
) -> Iterator[IntArray]:
    """Yield the lengths of all running requests at each decode step, int32 [running]."""
    waiting = list(zip(prompts, outputs, strict=True))[::-1]
    running = np.empty((0, 2), dtype=np.int64)  # length, remaining steps; token 1 is prefilled
    while waiting or len(running):
        free = max_running - len(running)
        started = [waiting.pop() for _ in range(min(free, len(waiting)))]
        fresh = np.array(started, dtype=np.int64).reshape(-1, 2) - [0, 1]
        running = np.concatenate([running, fresh])
        running = running[running[:, 1] > 0]
        if len(running):
            running += [1, -1]
            yield running[:, 0].astype(np.int32)


class Floors(NamedTuple):
    """Least seconds of a workload, by what may overlap."""

    step: float  # reading and computing within one step, but no two steps
    overlap: float  # all reading with all computing
