"""Tensors in float8_e4m3fn beside their scales.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config.rules import refuse

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize x [n, k] to float8_e4m3fn [n, k] and scales float32 [n, ceil(k / group)].

    The largest magnitude of each `group` columns of a row becomes 448. n may be several dimensions.
    """
    wide = F.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scale).flatten(-2)[..., : x.shape[-1]].to(FP8), scale[..., 0]


class Stored(NamedTuple):
    """Format of a checkpoint's scales: the end of their names, and the block that shares one."""

    suffix: str
    rows: int
    columns: int | None  # None: all of a row's


class Fp8Weight(nn.Parameter):
    """A weight [n, k] in float8_e4m3fn. `scale` float32 [n, groups]: of each `group` columns.

    Experts have one more dimension in front. The scales of a column of groups lie side by side in
    memory. `stored` is None if the checkpoint has the weight in more bits: then it is quantized
    while it is read.
    """

    scale: Tensor
    group: int
    stored: Stored | None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the weight and its scales."""
        return self.numel() + self.scale.nbytes

    def dequantized(self, dtype: torch.dtype, part: int | slice = slice(None)) -> Tensor:
        """Return values * scales [n, k] in `dtype`, or those of an expert or of some rows."""
        scale = self.scale[part]
        if scale.shape[-1] > 1:
            scale = scale.repeat_interleave(self.group, -1)[..., : self.shape[-1]]
        return (self.data[part].float() * scale).to(dtype)


def fp8_weight(
    *shape: int, stored: Stored | None = None, device: torch.device | str = "meta", group: int = 0
) -> Fp8Weight:
    """Make FP8 zeros [n, k] with scales of one; a group is the whole row unless it is given."""
    weight = Fp8Weight(torch.zeros(shape, dtype=FP8, device=device), requires_grad=False)
    *experts, n, k = shape
    weight.group, weight.stored = group or k, stored
    weight.scale = torch.ones(*experts, -(-k // weight.group), n, device=device).mT
    return weight


def check_device(field: str, device: torch.device | str) -> None:
    """Raise a ValueError that names the field if a GPU has no FP8 instructions."""
    if torch.device(device).type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        rule = "none on a GPU of compute capability below 8.9"
        raise refuse(field, rule, f"fp8 on {major}.{minor}")
