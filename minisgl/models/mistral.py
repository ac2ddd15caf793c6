"""Mistral.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.layers.attention import AttentionStyle
from minisgl.models.base import CausalLM


class MistralForCausalLM(CausalLM):
    """Llama without any bias."""

    def attention_style(self) -> AttentionStyle:
        return AttentionStyle()
