"""The parts of a decoder between attention calls, compiled; attention stays as it is.

Generated from notebooks/05c_compile.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import ForwardBatch
from minisgl.core import Phase
from minisgl.layers.rotary import apply_rotary


class Before(NamedTuple):
    """What comes before attention: norm, projection, and the norms of heads."""

    norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    heads_norm: Tensor | None  # [qo + kv heads, head_dim]


class After(NamedTuple):
    """What comes after it: the projection back, norm, and the gated MLP."""

    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor


def weights_of(layer: Any) -> tuple[Before, After]:
    """The weights of a `DecoderLayer` of one rank, as they are: nothing is copied."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = None if attention.qk_norm is None else attention.qk_norm.weight
    qkv = attention.qkv_proj
    return (
        Before(layer.input_layernorm.weight, qkv.weight, qkv.bias, heads),
        After(attention.o_proj.weight, layer.post_attention_layernorm.weight,
              mlp.gate_up_proj.weight, mlp.down_proj.weight),
    )  # fmt: skip


Rotation = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """Numbers that the pieces need; they are constants to the compiler."""

    num_qo: int
    num_kv: int
    head_dim: int
    eps: float


def before(x: Tensor, w: Before, rotation: Rotation, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [n, heads, head_dim] of the residual stream x [n, hidden]."""
    y = F.linear(F.rms_norm(x, x.shape[-1:], w.norm, sizes.eps), w.qkv, w.bias)
    heads = y.view(len(x), -1, sizes.head_dim)
    turned = sizes.num_qo + sizes.num_kv
    qk, v = heads[:, :turned], heads[:, turned:]
    if w.heads_norm is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, sizes.eps) * w.heads_norm
    qk = apply_rotary(qk, *rotation)
    return qk[:, : sizes.num_qo], qk[:, sizes.num_qo :], v


def after(y: Tensor, x: Tensor, w: After, sizes: Sizes) -> Tensor:
    """The residual stream behind a layer: y [n, qo heads * head_dim] is what attention gave."""
    x = x + F.linear(y, w.out)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], w.norm, sizes.eps), w.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w.down)


def between(
    y: Tensor, x: Tensor, w: After, following: Before, rotation: Rotation, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From one attention call to the next: (residual stream, q, k, v)."""
    x = after(y, x, w, sizes)
    return x, *before(x, following, rotation, sizes)


MOST_SIZES = 64  # batch sizes that may be compiled


class CompiledModel:
    """`CausalLM.forward` of one rank with gated MLPs: a ForwardBatch to logits."""

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        """`backend` is the compiler; "eager" takes the cuts and compiles nothing."""
        if model.ctx.comm.size > 1:
            raise ValueError("torch_compile_max_bs: compiles for one rank, got --tp > 1")
        self.model, self.weights = model, [weights_of(layer) for layer in model.model.layers]
        attention = model.model.layers[0].self_attn
        config = model.config
        self.sizes = Sizes(
            attention.num_qo_heads, attention.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True, "backend": backend}
        if backend == "inductor":
            options["options"] = {"coordinate_descent_tuning": True}
        self.before: Callable[..., Any] = torch.compile(before, **options)
        self.between: Callable[..., Any] = torch.compile(between, **options)
        self.after: Callable[..., Any] = torch.compile(after, **options)

    def layers(self, x: Tensor, rotation: Rotation, fb: ForwardBatch) -> Tensor:
        """The residual stream behind the last layer."""
        q, k, v = self.before(x, self.weights[0][0], rotation, self.sizes)
        for layer_id, (_, after_weights) in enumerate(self.weights):
            y = fb.attn.run(q, k, v, layer_id).reshape(len(x), -1)
            if layer_id + 1 == len(self.weights):
                return self.after(y, x, after_weights, self.sizes)
            following = self.weights[layer_id + 1][0]
            x, q, k, v = self.between(y, x, after_weights, following, rotation, self.sizes)
        return x

    def __call__(self, fb: ForwardBatch) -> Tensor:
        """Logits [rows wanted, vocab_size], in `fb.logits` if that is given."""
        decoder = self.model.model
        with torch._dynamo.config.patch(recompile_limit=MOST_SIZES):
            x = self.layers(decoder.embed_tokens(fb.input_ids), decoder.rotary(fb.positions), fb)
        if fb.last_idx is not None:
            x = x[fb.last_idx]
        logits: Tensor = self.model.lm_head(decoder.norm(x)[0], fb.logits)
        return logits


class SizeSwitch:
    """The compiled model for small decode batches, another one for the rest."""

    def __init__(
        self, compiled: Callable[[ForwardBatch], Tensor], other: Callable[[ForwardBatch], Tensor],
        max_bs: int,
    ) -> None:  # fmt: skip
        self.compiled, self.other, self.max_bs = compiled, other, max_bs

    def __call__(self, fb: ForwardBatch) -> Tensor:
        """Logits [rows wanted, vocab_size]."""
        small = fb.phase is Phase.DECODE and len(fb.positions) <= self.max_bs
        return self.compiled(fb) if small else self.other(fb)
