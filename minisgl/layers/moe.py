"""A mixture of experts: which experts compute a token, and their work, grouped by expert.

Generated from notebooks/11_mixture_of_experts.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config.model import MoEConfig
from minisgl.layers.linear import even_shard
from minisgl.parallel.comm import ParallelContext


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token: logits [n, experts] to ids and float32 weights, [n, top_k] each.

    normalize: scale the weights of a token to add up to 1.
    """
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Pairs in the order of their experts, and how many each has; ids [n, top_k].

    Pair `p` is choice `p % top_k` of token `p // top_k`; those of an expert keep their order.
    """
    flat = ids.flatten()
    counts: list[int] = flat.bincount(minlength=num_experts).tolist()
    return flat.argsort(stable=True), counts


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    linear: Callable[..., Tensor] = F.linear, silu: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:  # fmt: skip
    """Weighted sums over the experts of each token: x [n, hidden] to [n, hidden].

    ids, weights: [n, top_k], by `route`. gate_up [experts, 2 width, hidden] and
    down [experts, hidden, width]: the experts' weights. linear, silu: what they compute by.
    """
    order, counts = sort_by_expert(ids, len(gate_up))
    blocks = x[order // ids.shape[1]].split(counts)
    out = torch.empty(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    for expert, (block, pairs) in enumerate(zip(blocks, order.split(counts), strict=True)):
        if len(pairs):
            gate, up = linear(block, gate_up[expert]).chunk(2, dim=-1)
            out[pairs] = linear(silu(gate).mul_(up), down[expert]).float()
    parts = out.view(*ids.shape, x.shape[1]) * weights[..., None]
    return parts.sum(1).to(x.dtype)


class MoE(nn.Module):
    """Routed experts in place of an MLP: x [n, hidden] to [n, hidden].

    Each rank holds an equal slice of the width of every expert; ValueError if there is none.
    """

    layout: Literal["packed", "qwen", "mixtral"] = "qwen"  # of the checkpoint: see `models.moe`

    def __init__(self, hidden: int, config: MoEConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.config, self.comm, self.linear, self.silu = config, ctx.comm, ctx.linear, ctx.silu
        self.shard = even_shard("moe_intermediate_size", config.intermediate_size, ctx.comm)
        experts, width = config.num_experts, self.shard.size
        self.gate = ctx.parameter(experts, hidden)
        self.gate_up = ctx.parameter(experts, 2 * width, hidden)
        self.down = ctx.parameter(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x, self.gate)
        how = self.config.top_k, self.config.norm_topk_prob
        if x.is_cuda:
            fixed = self.linear is not F.linear  # by functions of a deterministic engine
            weights = (self.gate_up, self.down)
            y: Tensor = load_kernels().expert_sum(x, logits[None], *weights, *how, fixed=fixed)
        else:
            functions = (self.linear, self.silu)
            y = grouped_experts(x, *route(logits, *how), self.gate_up, self.down, *functions)
        return self.comm.all_reduce(y)

    def fuse(self) -> Any:
        """The experts of this rank for the fused model of chapter 05e."""
        how = self.config.top_k, self.config.norm_topk_prob
        return load_kernels().FusedExperts(self.gate, self.gate_up, self.down, *how)


@cache
def load_kernels() -> Any:
    """The kernels of chapter 11b; imported here, because they need Triton."""
    return import_module("minisgl.kernels.moe")
