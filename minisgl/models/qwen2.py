"""Qwen2 and Qwen2.5.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.layers.attention import AttentionStyle
from minisgl.models.base import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """Queries, keys and values have a bias, the output projection has none."""

    def attention_style(self) -> AttentionStyle:
        return AttentionStyle(qkv_bias=True)
