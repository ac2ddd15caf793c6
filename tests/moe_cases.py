"""Routings for the experts' kernels, and what must hold of the blocks that come of them."""

from __future__ import annotations

import torch

from minisgl.kernels.moe import Blocks
from minisgl.layers.moe import route


def check_blocks(
    blocks: Blocks, logits: torch.Tensor, top_k: int, normalize: bool, held: range | None = None
) -> None:
    """Every pair once, with its weight, in a block of its expert, and those in order.

    held: the experts of this rank; blocks of others are marked with -1.
    """
    n, experts = logits.shape
    held = range(experts) if held is None else held
    ids, weights = route(logits, top_k, normalize)
    want = {
        (token, expert): weight
        for token in range(n)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True)
    }
    counts = ids.flatten().bincount(minlength=experts).tolist()
    owners = [e for e in range(experts) for _ in range(-(-counts[e] // blocks.size))]
    said = [e - held.start if e in held else -1 for e in owners]
    assert blocks.experts.tolist()[: len(owners)] == said
    rows = blocks.rows.tolist()
    assert all(rows[: len(owners)]) and not any(rows[len(owners) :]), "unused ones are at the end"
    used = list(zip(owners, rows[: len(owners)], strict=True))
    seen = []
    for index, (expert, rows) in enumerate(used):
        for place in range(index * blocks.size, index * blocks.size + rows):
            token, choice = divmod(int(blocks.pairs[place]), top_k)
            assert ids[token, choice] == expert
            assert abs(float(blocks.weights[place]) - want[token, expert]) < 1e-5
            seen.append((token, expert))
    assert sorted(seen) == sorted(want)
    assert [expert * n + token for token, expert in seen] == sorted(e * n + t for t, e in want)


def skewed_logits(n: int, experts: int, kind: str, seed: int) -> torch.Tensor:
    """Random logits without ties: even ones, one hot expert, or half of the experts unused."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randperm(n * experts, generator=gen).view(n, experts).float() / experts
    if kind == "hot":
        logits[:, experts // 2] += 10.0 * n
    if kind == "empty":
        logits[:, : experts // 2] -= 10.0 * n
    return logits / max(1.0, float(logits.std(correction=0)))
