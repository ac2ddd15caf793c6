"""The decoder of chapter 05 as a chain of fused kernels, over the same weights.

Generated from notebooks/05e_decode_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.fused_backend import FusedPlan
from minisgl.attention.metadata import ForwardBatch
from minisgl.kernels.device import device_limits
from minisgl.kernels.linear import (
    gemv,
    gemv_add_norm,
    linear,
    mlp,
    split_k_linear,
    supports_gemv,
)
from minisgl.kernels.norm import DeferredNorm, add_norm, gemm_input
from minisgl.kernels.rotate_store import rotate_and_store
from minisgl.layers.linear import GatedMLP
from minisgl.parallel.comm import Comm


@dataclass(frozen=True)
class FusedAttention:
    """The weights of one attention layer, in the form that the kernels take."""

    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    norms: tuple[Tensor, Tensor] | None  # of queries and keys, [head_dim] each
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    table: Tensor  # cosines and sines

    def attend(self, qkv: Tensor, fb: ForwardBatch, layer_id: int) -> Tensor:
        """Attend with new tokens' q, k and v [n, (qo + 2 kv) d]: [n, qo d]."""
        n, qo, kv = len(qkv), self.num_qo_heads, self.num_kv_heads
        plan = fb.attn
        if isinstance(plan, FusedPlan):
            q, k, v = qkv.view(n, qo + 2 * kv, self.head_dim).split((qo, kv, kv), 1)
            raw = {"norms": self.norms, "eps": self.eps, "table": self.table}
            return plan.decode(q, k, v, layer_id, **raw).view(n, -1)
        caches = plan.pool.k_cache(layer_id), plan.pool.v_cache(layer_id)
        q, k, v = rotate_and_store(
            qkv, self.norms, self.eps, self.table, fb.positions, plan.out_loc, *caches, qo,
            plan.pool.scales(layer_id),
        )  # fmt: skip
        return plan.attend(q, k, v, layer_id).reshape(n, -1)


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer."""

    first_norm: Tensor
    second_norm: Tensor
    attention: FusedAttention
    gate_up: Tensor | None  # None: experts take the place of the MLP
    down: Tensor | None
    experts: Any = None  # a `FusedExperts` of chapter 11b

    @property
    def supports_gemv(self) -> bool:
        """True if there is a kernel for each product of `forward_row`."""
        own = supports_gemv(self.attention.qkv, norm=True) and supports_gemv(self.attention.out)
        if self.gate_up is None or self.down is None:
            return own and bool(self.experts.supports_gemv)
        return (
            own and supports_gemv(self.gate_up, norm=True, gated=True) and supports_gemv(self.down)
        )

    def forward_row(
        self, x: Tensor | DeferredNorm, norm: Tensor, fb: ForwardBatch, layer: int
    ) -> Any:
        """Run the layer for one token, x [1, hidden] to the next norm; it `supports_gemv`."""
        attention, eps = self.attention, self.attention.eps
        if isinstance(x, Tensor):  # no product is in front of the first layer
            x = DeferredNorm(x, add_norm(None, x, self.first_norm, eps)[0])
        qkv: Any = gemv(x, attention.qkv, eps=eps, bias=attention.bias)
        y = attention.attend(qkv, fb, layer)
        row: Any = gemv_add_norm(y, attention.out, x.total, self.second_norm)
        if self.gate_up is None or self.down is None:
            return self.experts.row(row, norm, eps)
        mid: Any = gemv(row, self.gate_up, eps=eps, gated=True)
        return gemv_add_norm(mid, self.down, row.total, norm)


def fuse_layer(layer: Any, eps: float, table: Tensor) -> FusedLayer:
    """Collect a `DecoderLayer`'s weights for the kernels."""
    attention, norms = layer.self_attn, None
    if attention.qk_norm is not None:
        weight = attention.qk_norm.weight
        norms = weight[0].contiguous(), weight[attention.num_qo_heads].contiguous()
    fused = FusedAttention(
        attention.qkv_proj.weight, attention.qkv_proj.bias, attention.o_proj.weight, norms,
        attention.num_qo_heads, attention.num_kv_heads, attention.head_dim, eps, table,
    )  # fmt: skip
    gated = isinstance(layer.mlp, GatedMLP)
    return FusedLayer(
        layer.input_layernorm.weight, layer.post_attention_layernorm.weight, fused,
        layer.mlp.gate_up_proj.weight if gated else None,
        layer.mlp.down_proj.weight if gated else None,
        None if gated else layer.mlp.fuse(),
    )  # fmt: skip


def can_fuse(model: Any) -> bool:
    """Return True if the kernels run this model: 16-bit weights, fitting head size, tiles fit."""
    weight, dim = model.model.embed_tokens.weight, model.config.head_dim
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    return dim in (32, 64, 128, 256) and device_limits(weight.device).runs_tiles


class FusedModel:
    """`CausalLM.forward`, fused: a ForwardBatch to logits [rows wanted, vocab_size]."""

    def __init__(self, model: Any) -> None:
        self.model, self.eps = model, model.config.rms_norm_eps
        self.comm: Comm = model.ctx.comm
        decoder = model.model
        table = decoder.rotary.table
        self.layers = [fuse_layer(layer, self.eps, table) for layer in decoder.layers]
        self.final_norm = decoder.norm.weight
        self.supports_gemv = self.comm.size == 1 and all(
            layer.supports_gemv for layer in self.layers
        )

    def __call__(self, fb: ForwardBatch) -> Tensor:
        """Return logits, in `fb.logits` if that is given."""
        logits: Tensor = self.model.lm_head(self.hidden(fb), fb.logits)
        return logits

    def hidden(self, fb: ForwardBatch) -> Tensor:
        """Return the input of the head, [rows wanted, hidden]."""
        x: Any = self.model.model.embed_tokens(fb.input_ids)
        if len(x) > 1 or not self.supports_gemv:
            return self.all_rows(x, fb)
        norms = [layer.first_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer_id, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            x = layer.forward_row(x, norm, fb, layer_id)
        return add_norm(None, x.total, self.final_norm, self.eps)[0]

    def all_rows(self, residual: Tensor, fb: ForwardBatch) -> Tensor:
        """Run the layers over any number of tokens, and the final norm of the selected rows."""
        parts: Tensor | None = None
        for layer_id, layer in enumerate(self.layers):
            x, residual = self.add_norm(parts, residual, layer.first_norm, layer.attention.qkv)
            qkv = linear(x, layer.attention.qkv, layer.attention.bias)
            y = layer.attention.attend(qkv, fb, layer_id)
            if layer is self.layers[-1] and fb.last_idx is not None:
                # Only the selected rows continue: the others are never read again.
                y, residual = y[fb.last_idx], residual[fb.last_idx]
            parts = split_k_linear(y, layer.attention.out)
            x, residual = self.add_norm(parts, residual, layer.second_norm, layer.gate_up)
            if layer.gate_up is None or layer.down is None:
                parts = layer.experts.parts(x)
            else:
                parts = mlp(layer.down, x, layer.gate_up)
        return self.add_norm(parts, residual, self.final_norm)[0]

    def add_norm(
        self, parts: Tensor | None, residual: Tensor, norm: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply `add_norm` to parts [p, n, hidden], all-reduced first, for a product by weight."""
        if parts is not None and self.comm.size > 1:
            fused = getattr(self.comm, "all_reduce_add_norm", None)  # of GPUs that share memory
            done = fused(parts, residual, norm, self.eps) if fused is not None else None
            if done is not None:
                both: tuple[Tensor, Tensor] = done
                return both
            one = parts[0] if len(parts) == 1 else parts.sum(0).to(residual.dtype)
            parts = self.comm.all_reduce(one)[None]
        out = None if weight is None else gemm_input(weight, residual)
        return add_norm(parts, residual, norm, self.eps, out)
