"""The frame that all architectures share: decoder layers between an embedding and a head.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minisgl.attention.base import ForwardBatch
from minisgl.config.model import ModelConfig
from minisgl.layers.attention import Attention, AttentionStyle, Rotation
from minisgl.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.placement import Placement
from minisgl.layers.rotary import RotaryTable


class DecoderLayer(nn.Module):
    """Attention and MLP, a norm before each: (x, residual) [n, hidden] to (x, residual)."""

    def __init__(
        self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, place: Placement
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, place)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, place)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, fb: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, fb)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm: a ForwardBatch to [rows wanted, hidden]."""

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module], place: Placement) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        real = "cpu" if torch.device(place.device).type == "meta" else place.device
        self.rotary = RotaryTable(config.rotary, real)

    def forward(self, fb: ForwardBatch) -> torch.Tensor:
        rotation = self.rotary(fb.positions)
        x, residual = self.embed_tokens(fb.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, fb)
        if fb.last_idx is not None:  # the head is wide: compute it for the rows that are sampled
            x = x[fb.last_idx]
            residual = None if residual is None else residual[fb.last_idx]
        return self.norm(x, residual)[0]


class CausalLM(nn.Module):
    """A decoder and its head: ForwardBatch to logits [rows wanted, vocab_size] on every rank.

    An architecture overrides `attention_style`, or a `make_` method.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act: only 'silu' is built, got {config.hidden_act!r}")
        self.config, self.place = config, place
        layers = [
            DecoderLayer(config, self.make_attention(i), self.make_mlp(i), place)
            for i in range(config.num_layers)
        ]
        self.model = Decoder(config, layers, place)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place, tied)

    def forward(self, fb: ForwardBatch) -> torch.Tensor:
        return self.lm_head(self.model(fb), fb.logits)

    def attention_style(self) -> AttentionStyle:
        """Biases and norms of the attention layers."""
        return AttentionStyle(qkv_bias=self.config.qkv_bias, qk_norm=self.config.qk_norm)

    def make_attention(self, layer_id: int) -> nn.Module:
        """The attention of one layer."""
        style = self.attention_style()
        return Attention(self.config, style, layer_id, self.place)

    def make_mlp(self, layer_id: int) -> nn.Module:
        """The MLP of one layer."""
        sizes = self.config.hidden_size, self.config.intermediate_size
        return GatedMLP(*sizes, self.place)
