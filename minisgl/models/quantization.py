"""Which weights of a model are of eight bits, by the config or by the checkpoint.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config.paths import read_json
from minisgl.config.rules import refuse
from minisgl.layers.fp8 import Fp8Weight, Stored, check_device, fp8_weight
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from minisgl.models.shards import layer_shards

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


def find_kept(folder: Path) -> tuple[str, ...]:
    """The modules that a checkpoint of eight bits leaves in more: names, or `re:` and a pattern."""
    config = read_json(folder / "config.json").get("quantization_config") or {}
    keys = ("modules_to_not_convert", "ignored_layers", "ignore")
    return tuple(name for key in keys for name in config.get(key) or ())


def is_kept(module: str, kept: Iterable[str]) -> bool:
    """Whether a module is named, by itself, with those around it or in it, or by a pattern."""
    return any(
        re.match(name[3:], module) if name.startswith("re:") else f".{name}." in f".{module}."
        for name in kept
    )


def on_dequantized(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same product of a weight that is dequantized at each call."""

    def product(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight.dequantized(x.dtype), bias)

    return product


def quantize_linears(model: nn.Module, stored: Stored | None, kept: Iterable[str] = ()) -> None:
    """Linear layers and experts of a model without values get weights of eight bits, stored or not.

    Embedding, head, the router of experts and what is `kept` stay as they are. ValueError if a
    layer of several projections would have to keep some.
    """
    for path, layer in model.named_modules():
        linear = isinstance(layer, MergedColumnParallelLinear | RowParallelLinear)
        for name, old in list(layer.named_parameters(recurse=False)):
            if not (old.dim() == 3 or (linear and name == "weight")):  # three dimensions: experts
                continue
            specs = [spec.name for spec in layer_shards(layer, path) if spec.param == name]
            wide = [spec for spec in specs if is_kept(spec.removesuffix(".weight"), kept)]
            if wide and len(wide) < len(specs):
                rule = f"such that all parts of {path}.{name} have the same number of bits"
                raise refuse("quantization_config", rule, f"more than eight for {wide[0]}")
            if wide:
                continue
            group = (stored and stored.columns) or old.shape[-1]
            new = fp8_weight(*old.shape, stored=stored, group=min(group, old.shape[-1]))
            setattr(layer, name, new)
            if linear:
                layer.linear = on_dequantized(layer.linear)


def load_kernels(device: torch.device, whole: bool) -> None:
    """Teach the kernels of chapter 05d weights of eight bits, if this is a GPU that has them.

    whole: weights have one scale a row. What torch can do is found out now, not while steps are
    recorded.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from minisgl.kernels.fp8_linear import can_multiply  # Triton is not everywhere

        can_multiply(device.index or 0, whole)


def quantize_model(
    model: Any, quantization: str, folder: Path, device: torch.device | str = "cpu"
) -> None:
    """`quantize_linears`, if the checkpoint in `folder` has eight bits or the config wants them."""
    stored = read_stored(folder)
    if stored is None and quantization != "fp8":
        return
    check_device("quantization_config" if stored else "quantization", device)
    quantize_linears(model, stored, find_kept(folder))
    load_kernels(torch.device(device), whole=stored is None or stored.columns is None)
