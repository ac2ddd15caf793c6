"""Frequencies of models whose rotary embedding is stretched: linear, llama3, YaRN.

Generated from notebooks/05b_weights.ipynb: edit there.
"""

from __future__ import annotations

import math

import torch

from minisgl.config.model import RopeScaling, RotaryConfig
from minisgl.layers.attention import base_frequencies


def llama3_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep fast planes, divide slow ones by the factor, blend linearly between the two bounds.

    A plane is fast if it turns more than `high_freq_factor` times within the original window, and
    slow if it turns less than `low_freq_factor` times. Input and output are radians per position,
    float32 [head_dim / 2].
    """
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)


def yarn_frequencies(config: RotaryConfig, scaling: RopeScaling) -> torch.Tensor:
    """Blend frequencies as llama3 does, but linearly in the plane's index: [head_dim / 2]."""

    def plane_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.base))

    first, last = plane_that_turns(scaling.beta_fast), plane_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = (last - first) or 0.001  # no division by zero when the bounds meet
    inv_freq = base_frequencies(config)
    index = torch.arange(len(inv_freq), dtype=torch.float32)
    slow = ((index - first) / width).clamp(0, 1)
    return inv_freq / scaling.factor * slow + inv_freq * (1 - slow)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Return YaRN's factor on cos and sin, which keeps attention over more tokens as sharp."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grow(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grow(scaling.mscale) / grow(scaling.mscale_all_dim)
    return grow(1.0)


def scaled_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Return the frequencies [head_dim / 2] after scaling, and the factor on cos and sin."""
    inv_freq, scaling = base_frequencies(config), config.scaling
    if scaling is None:
        return inv_freq, 1.0
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return llama3_frequencies(inv_freq, scaling), 1.0
    return yarn_frequencies(config, scaling), yarn_attention_factor(scaling)
