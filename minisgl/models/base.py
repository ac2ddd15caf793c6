"""The model that all families share: decoder layers between an embedding and a head.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import torch
from torch import nn

from minisgl.attention.metadata import ForwardBatch
from minisgl.config.model import ModelConfig
from minisgl.layers.attention import (
    Attention,
    Frequencies,
    RMSNorm,
    RotaryTable,
    Rotation,
    plain_frequencies,
)
from minisgl.layers.linear import GatedMLP, LMHead, VocabParallelEmbedding
from minisgl.parallel.comm import ParallelContext


class DecoderLayer(nn.Module):
    """Attention and MLP, a norm before each: (x, residual) [n, hidden] to (x, residual).

    Attributes: input_layernorm, self_attn, post_attention_layernorm, mlp.
    """

    def __init__(
        self, config: ModelConfig, layer_id: int, mlp: nn.Module, ctx: ParallelContext
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, ctx)
        self.self_attn = Attention(config, layer_id, ctx)
        self.post_attention_layernorm = RMSNorm(size, eps, ctx)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, fb: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, fb)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm: a ForwardBatch to [rows wanted, hidden].

    Attributes: embed_tokens, layers, norm, rotary; its table is on the CPU if parameters are meta.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[DecoderLayer],
        ctx: ParallelContext,
        frequencies: Frequencies,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        real = "cpu" if torch.device(ctx.device).type == "meta" else ctx.device
        self.rotary = RotaryTable(config.rotary, frequencies, real)

    def forward(self, fb: ForwardBatch) -> torch.Tensor:
        rotation = self.rotary(fb.positions)
        x, residual = self.embed_tokens(fb.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, fb)
        if fb.last_idx is not None:  # the head is wide: compute it only for sampled rows
            x = x[fb.last_idx]
            residual = None if residual is None else residual[fb.last_idx]
        return self.norm(x, residual)[0]


class CausalLM(nn.Module):
    """A decoder and its head: ForwardBatch to logits [rows wanted, vocab_size] on every rank.

    A family with another MLP overrides `make_mlp`. Attributes: config, ctx, model, lm_head.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        frequencies: Frequencies = plain_frequencies,
    ) -> None:
        super().__init__()
        self.config, self.ctx = config, ctx
        layers = [DecoderLayer(config, i, self.make_mlp(i), ctx) for i in range(config.num_layers)]
        self.model = Decoder(config, layers, ctx, frequencies)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, ctx, tied)

    def make_mlp(self, layer_id: int) -> nn.Module:
        """Build the MLP of one layer."""
        return GatedMLP(self.config.hidden_size, self.config.intermediate_size, self.ctx)

    def forward(self, fb: ForwardBatch) -> torch.Tensor:
        return self.lm_head(self.model(fb), fb.logits)
