"""Registry of model classes by architecture.

Generated from notebooks/05b_weights.ipynb: edit there.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from minisgl.config.model import ModelConfig
from minisgl.layers.rope_scaling import scaled_frequencies
from minisgl.parallel.comm import Comm, ParallelContext

DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SPARSE = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
MODELS: dict[str, str] = dict.fromkeys(DENSE, "minisgl.models.base:CausalLM")
MODELS |= dict.fromkeys(SPARSE, "minisgl.models.moe:MoECausalLM")  # chapter 11


def build_model(
    config: ModelConfig,
    comm: Comm,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    deterministic: bool = False,
    expert_parallel: bool = False,
) -> nn.Module:
    """Build the model of `config.architecture`, without values; ValueError for an unknown name.

    deterministic: a token's result does not depend on the rest of the batch.
    expert_parallel: a rank holds whole experts, not a slice of each.
    """
    if config.architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ValueError(f"architecture: {config.architecture!r} is unknown; known are {known}")
    module, _, name = MODELS[config.architecture].partition(":")
    build = getattr(importlib.import_module(module), name)
    ctx = ParallelContext(comm, dtype, device, expert_parallel=expert_parallel)
    if deterministic:  # by functions of chapter 05f
        ctx = importlib.import_module("minisgl.layers.invariant").make_invariant(ctx)
    model: nn.Module = build(config, ctx, scaled_frequencies)
    return model.eval()
