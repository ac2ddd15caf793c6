"""FP8 weights of a model: selecting, creating, filling and sharding them.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config.paths import read_json
from minisgl.config.rules import refuse
from minisgl.fp8 import Fp8Weight, Stored, check_device, fp8_weight, quantize
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from minisgl.models.shards import ShardSpec, layer_shards, parameter_shards
from minisgl.models.weights import Index, fill, fill_randomly, new_like


@new_like.register
def new_fp8_weight(old: Fp8Weight, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Make an FP8 weight, independent of the other parameters' `dtype`."""
    return fp8_weight(*old.shape, stored=old.stored, device=device, group=old.group)


@fill.register
def fill_fp8(weight: Fp8Weight, target: Index, part: Tensor) -> None:
    """Quantize a part, unless the checkpoint has done it."""
    values = part.to(weight.device)
    if weight.stored is None:
        values, weight.scale[target] = quantize(values, weight.group)
    weight[target].copy_(values)


@fill_randomly.register
def fill_fp8_randomly(weight: Fp8Weight, generator: torch.Generator) -> None:
    """Fill with quantized random numbers."""
    numbers = torch.empty(weight.shape, device=weight.device).normal_(
        0.0, 0.02, generator=generator
    )
    values, scale = quantize(numbers, weight.group)
    weight.copy_(values)
    weight.scale.copy_(scale)


@parameter_shards.register
def fp8_shards(weight: Fp8Weight, spec: ShardSpec) -> Iterator[ShardSpec]:
    """Yield the tensor itself, and the scales that a checkpoint stores beside it.

    Raise ValueError, on all ranks alike, if ranks would cut a block.
    """
    stored = weight.stored
    if stored is None:
        yield spec
        return
    yield replace(spec, dtypes=("F8_E4M3",))
    *experts, n, k = spec.shape
    *some, rows, columns = (*spec.source, *[slice(None)] * (len(spec.shape) - len(spec.source)))
    width, (start, stop, _) = stored.columns or k, columns.indices(k)
    if stored.columns and stop - start < k and (stop - start) % width:
        rule = f"such that {k} columns of {spec.name} are cut between blocks of {width}"
        raise refuse("tp_size", rule, k // (stop - start))
    base = spec.name.removesuffix(".weight")
    mark = "." if base != spec.name else "_"  # experts in one tensor have no ".weight"
    yield replace(
        spec, name=base + mark + stored.suffix[len("weight_") * (mark == "_") :],
        param=f"{spec.param}.scale", shape=(*experts, -(-n // stored.rows), -(-k // width)),
        source=(*some, slice(*rows.indices(n)), slice(start // width, -(-stop // width))),
        repeat=stored.rows,
    )  # fmt: skip


FORMATS = "fp8 with weight_block_size, compressed-tensors of 8-bit floats by channel or block"


def read_stored(folder: Path) -> Stored | None:
    """Read how a checkpoint stores FP8, or None; raise ValueError for other quantization."""
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


def find_unquantized(folder: Path) -> tuple[str, ...]:
    """List modules that an FP8 checkpoint does not quantize: names, or `re:` and a pattern."""
    config = read_json(folder / "config.json").get("quantization_config") or {}
    keys = ("modules_to_not_convert", "ignored_layers", "ignore")
    return tuple(name for key in keys for name in config.get(key) or ())


def is_unquantized(module: str, kept: Iterable[str]) -> bool:
    """Return True if a module, a parent or a child is named, or if a pattern matches it."""
    return any(
        re.match(name[3:], module) if name.startswith("re:") else f".{name}." in f".{module}."
        for name in kept
    )


def on_dequantized(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the same product, of a weight that is dequantized at each call."""

    def product(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight.dequantized(x.dtype), bias)

    return product


def quantize_linears(model: nn.Module, stored: Stored | None, kept: Iterable[str] = ()) -> None:
    """Replace weights of linear layers and experts by FP8, in a model without values.

    Embedding, head, the router of experts and what is `kept` stay as they are. Raise ValueError if
    a layer of several projections would have to keep some.
    """
    for path, layer in model.named_modules():
        linear = isinstance(layer, MergedColumnParallelLinear | RowParallelLinear)
        for name, old in list(layer.named_parameters(recurse=False)):
            if not (old.dim() == 3 or (linear and name == "weight")):  # three dimensions: experts
                continue
            specs = [spec.name for spec in layer_shards(layer, path) if spec.param == name]
            wide = [spec for spec in specs if is_unquantized(spec.removesuffix(".weight"), kept)]
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
    """Register the kernels of chapter 05d for FP8 weights, if this is a GPU that has them.

    whole: weights have one scale a row. Torch's support is probed now, not during capture.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from minisgl.kernels.fp8_linear import can_multiply  # Triton is not everywhere

        can_multiply(device.index or 0, whole)


def quantize_model(
    model: Any, quantization: str, folder: Path, device: torch.device | str = "cpu"
) -> None:
    """Quantize the linear layers if the checkpoint in `folder` is FP8 or `quantization` is."""
    stored = read_stored(folder)
    if stored is None and quantization != "fp8":
        return
    check_device("quantization_config" if stored else "quantization", device)
    quantize_linears(model, stored, find_unquantized(folder))
    load_kernels(torch.device(device), whole=stored is None or stored.columns is None)
