"""Rotary positions: frequencies, scaling rules, one float32 table, and the turn itself.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from minisgl.config.model import RopeScaling, RotaryConfig


def base_frequencies(config: RotaryConfig) -> torch.Tensor:
    """Angle per position of each of the head_dim / 2 planes: base ** (-2 i / head_dim), float32."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.base**exponent


def llama3_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep fast planes, divide slow ones by the factor, blend linearly between the two bounds.

    A plane is judged by how often it turns within the original window: more than
    `high_freq_factor` times is fast, less than `low_freq_factor` times is slow.
    """
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)


def yarn_frequencies(inv_freq: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    """Like llama3, but the blend is linear in the plane's index, between rounded bounds."""
    scaling = config.scaling
    assert scaling is not None

    def plane_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.base))

    first, last = plane_that_turns(scaling.beta_fast), plane_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = (last - first) or 0.001  # no division by zero when the bounds meet
    index = torch.arange(len(inv_freq), dtype=torch.float32)
    slow = ((index - first) / width).clamp(0, 1)
    return inv_freq / scaling.factor * slow + inv_freq * (1 - slow)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """What YaRN multiplies cos and sin by, so that attention over more tokens stays as sharp."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grow(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grow(scaling.mscale) / grow(scaling.mscale_all_dim)
    return grow(1.0)


def scaled_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim / 2] after scaling, and the factor on cos and sin."""
    inv_freq, scaling = base_frequencies(config), config.scaling
    if scaling is None:
        return inv_freq, 1.0
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return llama3_frequencies(inv_freq, scaling), 1.0
    if scaling.kind == "yarn":
        return yarn_frequencies(inv_freq, config), yarn_attention_factor(scaling)
    raise ValueError(f"rotary scaling: unknown kind {scaling.kind!r}; known: linear, llama3, yarn")


class RotaryTable(nn.Module):
    """The cosines and sines of every position, computed once, owned by the model.

    table: float32 [max_position, head_dim], the cosines of all planes, then their sines.
    forward: positions int64 [n] to (cos, sin), each [n, 1, head_dim], ready for `apply_rotary`.
    """

    table: torch.Tensor

    def __init__(self, config: RotaryConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        inv_freq, factor = scaled_frequencies(config)
        positions = torch.arange(config.max_position, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head: x [n, heads, head_dim], plane i lies in dimensions i and i + head_dim / 2.

    The arithmetic is float32, the result has the dtype of `x`.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)
