"""Which class builds which architecture.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn

from minisgl.config.model import ModelConfig
from minisgl.layers.placement import Placement
from minisgl.parallel.comm import Comm

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "minisgl.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "minisgl.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "minisgl.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "minisgl.models.qwen3:Qwen3ForCausalLM",
}


def build_model(
    config: ModelConfig, comm: Comm, *, dtype: torch.dtype, device: torch.device | str = "meta"
) -> nn.Module:
    """The model of `config.architecture`, without values; ValueError for an unknown name."""
    place = MODELS.get(config.architecture)
    if place is None:
        known = ", ".join(sorted(MODELS))
        raise ValueError(f"architecture: {config.architecture!r} is unknown; known are {known}")
    module, _, name = place.partition(":")
    build = getattr(importlib.import_module(module), name)
    model: nn.Module = build(config, Placement(comm, dtype, device))
    return model.eval()
