"""Weights in float8_e4m3fn beside their scales: how they are made, filled and multiplied.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config.rules import refuse
from minisgl.models.shards import ShardSpec, parameter_shards
from minisgl.models.weights import Index, fill, fill_randomly, new_like

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [n, k] as float8_e4m3fn [n, k] and scales float32 [n, ceil(k / group)]: x is their product.

    The largest number of each `group` columns of a row becomes 448.
    """
    wide = F.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scale).flatten(1)[:, : x.shape[1]].to(FP8), scale[..., 0]


class Stored(NamedTuple):
    """How a checkpoint stores scales: the end of their names, and the block that shares one."""

    suffix: str
    rows: int
    columns: int | None  # None: all of a row's


class Fp8Weight(nn.Parameter):
    """A weight [n, k] in float8_e4m3fn. `scale` float32 [n, groups]: of each `group` columns.

    The scales of a column of groups lie side by side in memory. `stored` is None if the checkpoint
    has the weight in more bits: then it is quantized while it is read.
    """

    scale: Tensor
    group: int
    stored: Stored | None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the weight and its scales."""
        return self.numel() + self.scale.nbytes

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers that it stands for, [n, k]."""
        scale = self.scale
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        return (self.float() * scale).to(dtype)

    def has_scaled_mm(self, dtype: torch.dtype) -> bool:
        """True if torch multiplies by this weight without a copy of it in more bits."""
        (n, k), whole = self.shape, self.scale.shape[1] == 1
        if not self.is_cuda or dtype is not torch.bfloat16 or n % 16 or k % (16 if whole else 128):
            return False
        return (whole or self.group == 128) and can_multiply(self.device.index or 0, whole)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [m, k] by it, plus bias [n]: [m, n]; on tensor cores of eight bits where there are."""
        if not self.has_scaled_mm(x.dtype):
            return F.linear(x, self.dequantized(x.dtype), bias)
        product: Tensor = import_module("minisgl.kernels.scaled_mm").scaled_linear(x, self, bias)
        return product


def fp8_weight(
    n: int, k: int, stored: Stored | None, device: torch.device | str = "meta", group: int = 0
) -> Fp8Weight:
    """Zeros [n, k] with scales of one; a group is the whole row unless it is given."""
    weight = Fp8Weight(torch.zeros(n, k, dtype=FP8, device=device), requires_grad=False)
    weight.group, weight.stored = group or k, stored
    weight.scale = torch.ones(-(-k // weight.group), n, device=device).t()
    return weight


@new_like.register
def new_fp8_weight(old: Fp8Weight, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Of eight bits, whatever the dtype of the others."""
    n, k = old.shape
    return fp8_weight(n, k, old.stored, device, old.group)


@fill.register
def fill_fp8(weight: Fp8Weight, target: Index, part: Tensor) -> None:
    """Quantize a part, unless the checkpoint has done it."""
    values = part.to(weight.device)
    if weight.stored is None:
        values, weight.scale[target] = quantize(values, weight.group)
    weight[target].copy_(values)


@fill_randomly.register
def fill_fp8_randomly(weight: Fp8Weight, generator: torch.Generator) -> None:
    """The same numbers as in other weights, rounded."""
    numbers = torch.empty(weight.shape, device=weight.device).normal_(
        0.0, 0.02, generator=generator
    )
    values, scale = quantize(numbers, weight.group)
    weight.copy_(values)
    weight.scale.copy_(scale)


@parameter_shards.register
def fp8_shards(weight: Fp8Weight, spec: ShardSpec) -> Iterator[ShardSpec]:
    """The tensor itself, and the scales that a checkpoint has beside it."""
    stored = weight.stored
    if stored is None:
        yield spec
        return
    yield replace(spec, dtypes=("F8_E4M3",))
    (n, k), (rows, columns) = spec.shape, (*spec.source, slice(0, spec.shape[1]))[:2]
    width, first, last = stored.columns or k, columns.start or 0, columns.stop or k
    yield replace(
        spec, name=spec.name.removesuffix("weight") + stored.suffix, param=f"{spec.param}.scale",
        shape=(-(-n // stored.rows), -(-k // width)), repeat=stored.rows,
        source=(slice(*rows.indices(n)), slice(first // width, -(-last // width))),
    )  # fmt: skip


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of GPU number `index`."""
    return torch.cuda.get_device_capability(index)


def check_device(field: str, device: torch.device | str) -> None:
    """ValueError that names the field if a GPU has no instructions for eight-bit floats."""
    device = torch.device(device)
    if device.type == "cuda" and capability(device.index or 0) < (8, 9):
        found = ".".join(map(str, capability(device.index or 0)))
        raise refuse(field, "none on a GPU of compute capability below 8.9", f"fp8 on {found}")


@cache
def can_multiply(index: int, whole: bool) -> bool:
    """Whether `scaled_mm` takes scales of whole rows, or of 128 columns, on GPU number `index`."""
    device = torch.device("cuda", index)
    weight = fp8_weight(256, 256, None, device, 256 if whole else 128)
    weight.copy_(torch.ones(256, 256, device=device))
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
    try:
        got: Tensor = import_module("minisgl.kernels.scaled_mm").scaled_linear(x, weight)
    except (ImportError, RuntimeError, ValueError):
        return False
    return bool((got == 256).all())
