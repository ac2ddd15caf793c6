"""Which weights of a model are of eight bits, by the config or by the checkpoint.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config.paths import read_json
from minisgl.config.rules import refuse
from minisgl.layers.fp8 import Fp8Weight, Stored, can_multiply, check_device, fp8_weight
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear

FORMATS = "fp8 with weight_block_size, compressed-tensors of 8-bit floats by channel or block"


def read_stored(folder: Path) -> Stored | None:
    """How a checkpoint stores eight bits, or None; ValueError for any other quantization."""
    config = read_json(folder / "config.json").get("quantization_config")
    if not config:
        return None
    if config.get("quant_method") == "fp8" and config.get("weight_block_size"):
        return Stored("weight_scale_inv", *config["weight_block_size"])
    groups = config.get("config_groups") or {"": {}}
    kinds = [group.get("weights") or {} for group in groups.values()]
    if all((kind.get("num_bits"), kind.get("type")) == (8, "float") for kind in kinds):
        if kinds[0].get("strategy") == "channel":
            return Stored("weight_scale", 1, None)
        if kinds[0].get("strategy") == "block":
            return Stored("weight_scale", *kinds[0]["block_structure"])
    raise refuse("quantization_config", f"one of {FORMATS}", config)


def on_dequantized(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same product of a weight that is dequantized at each call."""

    def product(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight.dequantized(x.dtype), bias)

    return product


def quantize_linears(model: nn.Module, stored: Stored | None) -> None:
    """Linear layers of a model without values get weights of eight bits, stored so or not.

    Embedding and head stay as they are. ValueError if a rank would cut a block of the checkpoint.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, MergedColumnParallelLinear | RowParallelLinear):
            n, k = layer.weight.shape
            group = stored.columns if stored and stored.columns else k
            full = layer.full_shape[1] if isinstance(layer, RowParallelLinear) else k
            if k % group and group < full and k < full:
                rule = f"such that {full} columns of {path} are cut between blocks of {group}"
                raise refuse("tp_size", rule, full // k)
            layer.weight = fp8_weight(n, k, stored, group=min(group, k))
            layer.linear = on_dequantized(layer.linear)


def quantize_model(
    model: Any, quantization: str, folder: Path, device: torch.device | str = "cpu"
) -> None:
    """`quantize_linears`, if the checkpoint in `folder` has eight bits or the config wants them."""
    stored = read_stored(folder)
    if stored is None and quantization != "fp8":
        return
    field = "quantization_config" if stored else "quantization"
    if model.config.moe is not None:
        raise refuse(field, "none for a mixture of experts", "fp8")
    check_device(field, device)
    quantize_linears(model, stored)
    if torch.device(device).type == "cuda":  # found out now, not while steps are recorded
        can_multiply(torch.device(device).index or 0, stored is None or stored.columns is None)
