"""Rotary positions: frequencies, one float32 table, and the turn itself.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minisgl.config.model import RotaryConfig

# Frequencies [head_dim / 2] float32, and a factor on all cosines and sines.
Frequencies = Callable[[RotaryConfig], tuple[torch.Tensor, float]]


def base_frequencies(config: RotaryConfig) -> torch.Tensor:
    """Return each plane's angle per position: base ** (-2 i / head_dim), float32 [head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.base**exponent


def plain_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Return the unscaled frequencies; raise ValueError for a config with rope scaling."""
    if config.scaling is not None:
        raise ValueError(f"rope_scaling: {config.scaling.kind!r} needs its own frequencies")
    return base_frequencies(config), 1.0


class RotaryTable(nn.Module):
    """The cosines and sines of every position, computed once, owned by the model.

    table: float32 [max_position, head_dim], the cosines of all planes, then their sines.
    forward: positions int64 [n] to (cos, sin), each [n, 1, head_dim], ready for `apply_rotary`.
    """

    table: torch.Tensor

    def __init__(
        self,
        config: RotaryConfig,
        frequencies: Frequencies = plain_frequencies,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        inv_freq, factor = frequencies(config)
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
