"""A mixture of experts: routing of tokens, and the experts' work, grouped by expert.

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
from minisgl.fp8 import Fp8Weight
from minisgl.layers.linear import even_shard
from minisgl.parallel.comm import ParallelContext, SingleRank


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: logits [n, experts] to ids, float32 weights, [n, top_k] each.

    normalize: scale the weights of a token to add up to 1.
    """
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def sort_by_expert(ids: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, list[int]]:
    """Sort the pairs of `num_experts` experts from `first` on; count those of each; ids [n, top_k].

    Pair `p` is choice `p % top_k` of token `p // top_k`; pairs of one expert keep their order.
    """
    flat = ids.flatten() - first
    flat = flat.where((flat >= 0) & (flat < num_experts), num_experts)  # all others: one extra
    counts: list[int] = flat.bincount(minlength=num_experts + 1).tolist()[:-1]
    return flat.argsort(stable=True)[: sum(counts)], counts


def one_expert(weights: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of an expert, [n, k]; an FP8 weight is dequantized to `dtype`."""
    if isinstance(weights, Fp8Weight):
        return weights.dequantized(dtype, expert)
    return weights[expert]


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    linear: Callable[..., Tensor] = F.linear, silu: Callable[[Tensor], Tensor] = F.silu,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """Compute weighted sums over the experts of each token: x [n, hidden] to [n, hidden].

    ids, weights: [n, top_k], by `route`. gate_up [experts, 2 width, hidden] and
    down [experts, hidden, width]: the experts from `first` on; other experts add nothing.
    linear, silu: the functions to compute with.
    """
    order, counts = sort_by_expert(ids, len(gate_up), first)
    blocks = x[order // ids.shape[1]].split(counts)
    out = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    for expert, (block, pairs) in enumerate(zip(blocks, order.split(counts), strict=True)):
        if len(pairs):
            gate, up = linear(block, one_expert(gate_up, expert, x.dtype)).chunk(2, dim=-1)
            out[pairs] = linear(silu(gate).mul_(up), one_expert(down, expert, x.dtype)).float()
    parts = out.view(*ids.shape, x.shape[1]) * weights[..., None]
    return parts.sum(1).to(x.dtype)


class MoE(nn.Module):
    """Routed experts in place of an MLP: x [n, hidden] to [n, hidden].

    Each rank holds an equal slice of the width of every expert, or, if `ctx.expert_parallel`, an
    equal number of whole experts; ValueError if the ranks do not divide that size.
    """

    layout: Literal["packed", "qwen", "mixtral"] = "qwen"  # of the checkpoint: see `models.moe`

    def __init__(self, hidden: int, config: MoEConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.config, self.comm, self.linear, self.silu = config, ctx.comm, ctx.linear, ctx.silu
        cut, whole = ctx.comm, SingleRank()
        by_expert, by_width = (cut, whole) if ctx.expert_parallel else (whole, cut)
        self.experts = even_shard("num_experts", config.num_experts, by_expert)
        self.shard = even_shard("moe_intermediate_size", config.intermediate_size, by_width)
        experts, width = self.experts.size, self.shard.size
        self.gate = ctx.parameter(config.num_experts, hidden)
        self.gate_up = ctx.parameter(experts, 2 * width, hidden)
        self.down = ctx.parameter(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        logits, weights = self.linear(x, self.gate), (self.gate_up, self.down)
        how, first = (self.config.top_k, self.config.norm_topk_prob), self.experts.start
        if x.is_cuda:
            kernels = load_kernels()
            fixed = self.linear is not F.linear  # deterministic, of chapter 05f
            y: Tensor = kernels.expert_sum(
                x, logits[None], *weights, *how, first=first, fixed=fixed
            )
        else:
            y = grouped_experts(x, *route(logits, *how), *weights, self.linear, self.silu, first)
        return self.comm.all_reduce(y)

    def fuse(self) -> Any:
        """Return this rank's experts for the fused model of chapter 05e.

        They are a `FusedExperts` of `minisgl.kernels.moe_row`: the parameters, `top_k`,
        `norm_topk_prob`, the number of the first expert here, and an int32 zero on the device.
        """
        how = self.config.top_k, self.config.norm_topk_prob, self.experts.start
        done = torch.zeros(1, dtype=torch.int32, device=self.gate.device)
        kernels = import_module("minisgl.kernels.moe_row")
        return kernels.FusedExperts(self.gate, self.gate_up, self.down, *how, done)


@cache
def load_kernels() -> Any:
    """Import `minisgl.kernels.moe` of chapter 11b, on first use because it needs Triton."""
    return import_module("minisgl.kernels.moe")
