"""Llama 2 and 3.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.layers.attention import AttentionStyle
from minisgl.models.base import CausalLM


class LlamaForCausalLM(CausalLM):
    """`attention_bias` of the config gives all four projections a bias."""

    def attention_style(self) -> AttentionStyle:
        return AttentionStyle(qkv_bias=self.config.qkv_bias, output_bias=self.config.qkv_bias)
