"""Qwen3, dense.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.layers.attention import AttentionStyle
from minisgl.models.base import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Every query and key head is normalised before it is turned."""

    def attention_style(self) -> AttentionStyle:
        bias = self.config.qkv_bias
        return AttentionStyle(qkv_bias=bias, output_bias=bias, qk_norm=True)
