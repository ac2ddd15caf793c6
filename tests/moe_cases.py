"""Routings for the experts' kernels, and what must hold of the blocks that come of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minisgl.kernels.moe import Blocks
from minisgl.kernels.moe_row import FusedExperts, route_gemv
from minisgl.kernels.norm import DeferredNorm
from minisgl.layers.moe import grouped_experts, route
from tests.fused_cases import close


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


def check_row(
    shape: tuple[int, int, int], top_k: int, normalize: bool, kind: str, device: str = "cpu",
    dtype: torch.dtype = torch.float32, limit: float = 1e-5,
) -> None:  # fmt: skip
    """One token through the GEMVs of chapter 11b: sum, norm, and its squares against chapter 11.

    shape: experts, hidden, width. kind: of `skewed_logits`, or "equal": the first experts win.
    """
    eps = 0.1
    (experts, hidden, width), gen = shape, torch.Generator(device).manual_seed(top_k)
    on: Any = {"device": device, "dtype": dtype}
    gate_up = torch.randn(experts, 2 * width, hidden, generator=gen, **on) / hidden**0.5
    down = torch.randn(experts, hidden, width, generator=gen, **on) / width**0.5
    x, before, behind = torch.randn(3, hidden, generator=gen, **on).split(1)
    wide = torch.promote_types(dtype, torch.bfloat16)
    row = DeferredNorm(x, (x * before).to(wide), x.float().square().view(-1, 8).sum(1))
    normed = F.rms_norm(x.float(), (hidden,), before[0].float(), eps)
    router = torch.zeros(experts, hidden, **on)
    ids, weights = torch.arange(top_k, device=device)[None], torch.full((1, top_k), 1 / top_k)
    if kind != "equal":  # a router with these logits
        logits = skewed_logits(1, experts, kind, top_k).to(device)
        router = (logits.T @ normed / normed.square().sum()).to(dtype)
        ids, weights = route(normed @ router.float().T, top_k, normalize)
    done = torch.zeros(1, dtype=torch.int32, device=device)
    layer = FusedExperts(router, gate_up, down, top_k, normalize, 0, done)
    assert layer.supports_gemv
    for _ in range(2):
        chosen, shares = route_gemv(row, router, done, eps, top_k, normalize)
        assert chosen.tolist() == ids[0].tolist()
        close(shares, weights[0].to(device), limit)
        assert int(done) == 0
    out = layer.row(row, behind[0], eps)
    want = x + grouped_experts(normed.to(dtype), ids, weights.to(device), gate_up, down)
    close(out.total, want, limit)
    assert out.squares is not None and out.row.dtype == wide
    close(out.row, out.total.float() * behind.float(), limit)
    close(out.squares.sum(), out.total.float().square().sum(), 1e-6)
