"""Weights of 16 and 8 bits for a CPU, packed once for FBGEMM's kernels.

Generated from notebooks/05h_cpu_weights.ipynb: edit there.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config.rules import refuse
from minisgl.fp8 import Fp8Weight
from minisgl.layers.linear import (
    LMHead,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minisgl.models.quantization import quantize_model
from minisgl.models.weights import Index, fill, fill_randomly, new_like, seal

OPS = torch.ops.quantized


def has_kernels() -> bool:
    """Return True if this CPU and this build of PyTorch have FBGEMM's kernels."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


class HalfRows:
    """A weight [n, k] in float16. Products are float32, and independent of the batch."""

    smallest, largest = 2.0**-14, 65504.0  # its largest number, for full precision

    def __init__(self, weight: Tensor) -> None:
        self.packed, self.nbytes = OPS.linear_prepack_fp16(weight, None), 2 * weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [m, k] by the weight: [m, n]."""
        y: Tensor = OPS.linear_dynamic_fp16(x, self.packed)
        return y


def hadamard(size: int) -> Tensor:
    """Return the Hadamard matrix of a power of two: entries 1 and -1, rows orthogonal."""
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


BLOCK = 64  # columns that are mixed at most


def mixing_matrix(k: int) -> Tensor:
    """Return the Hadamard matrix for blocks of `k` columns: at least two blocks, if k is even."""
    size = min(BLOCK, k & -k)
    return hadamard(size if size < k else max(1, size // 2))


def mix(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply each block of columns of x [m, k] by a symmetric matrix: [m, k]."""
    return (x.reshape(-1, len(matrix)) @ matrix).view(x.shape)


def activation_steps() -> int:
    """Return the largest activation in int8: FBGEMM adds pairs in 16 bits unless there is VNNI."""
    return 127 if torch.cpu._is_vnni_supported() else 63


class Int8Rows:
    """A weight [n, k] in int8, a scale for each row; activations, too, are rounded by the row.

    Columns are mixed in blocks before both are rounded, so that no large one sets the scale alone.
    """

    smallest, largest = 1e-30, 1e30
    tiny = 1e-30  # of a row of zeros

    def __init__(self, weight: Tensor, steps: int | None = None) -> None:
        steps = steps or activation_steps()
        self.matrix, self.nbytes = mixing_matrix(weight.shape[1]), weight.numel() + 8 * len(weight)
        mixed = mix(weight, self.matrix / len(self.matrix))  # a power of two: the same bits
        peak = torch.maximum(mixed.amax(1), -mixed.amin(1)).clamp_(min=self.tiny)
        scale = peak.double() / 127
        with warnings.catch_warnings():  # newer releases announce another way to make these tensors
            warnings.simplefilter("ignore", UserWarning)
            zeros = torch.zeros(len(weight), dtype=torch.int64)
            rounded = torch.quantize_per_channel(mixed, scale, zeros, 0, torch.qint8)
            self.packed = OPS.linear_prepack(rounded, None)
        self.step, self.zero = 1 / steps, steps + 1

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [m, k] by the weight: [m, n]. Each row is scaled to one and rounded."""
        mixed = mix(x, self.matrix)
        peak = mixed.abs().amax(1, keepdim=True).clamp_(min=self.tiny)
        product = OPS.linear_with_input_q_dq_qweight_dq_output_fp32
        y: Tensor = product(mixed.div_(peak), self.step, self.zero, self.packed)
        return y.mul_(peak)


logger = logging.getLogger("minisgl.weights")
Product = Callable[[Tensor], Tensor]
FORMATS: dict[str, type[HalfRows] | type[Int8Rows]] = {"fp16": HalfRows, "int8": Int8Rows}


def fits(weight: Tensor, smallest: float, largest: float) -> bool:
    """Return True if the largest magnitude lies between two bounds, or all numbers are zero."""
    low, high = weight.aminmax()
    peak = max(-low.item(), high.item())
    return peak == 0 or smallest <= peak <= largest  # False for NaN


class PackedWeight(nn.Parameter):
    """The shape [n, k] of a weight whose numbers are in `product`; `staged` has them until then."""

    kind: str
    staged: Tensor | None
    product: Product | None
    packed_bytes: int

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the packed numbers."""
        return self.packed_bytes

    def pack(self, weight: Tensor) -> None:
        """Pack [n, k] float32; keep numbers that are out of the format's range as they are."""
        found = FORMATS[self.kind]
        if fits(weight, found.smallest, found.largest):
            product = found(weight)
            self.product, self.packed_bytes = product, product.nbytes
        else:
            rule = f"a weight {list(weight.shape)} is out of the range of {self.kind}"
            logger.warning("quantization: %s and stays in float32", rule)
            self.product, self.packed_bytes = lambda x: F.linear(x, weight), weight.nbytes
        self.staged = None


def packed_weight(shape: tuple[int, ...], kind: str) -> PackedWeight:
    """Make a weight [n, k] without numbers; `kind` is a key of FORMATS."""
    weight = PackedWeight(torch.empty(shape, device="meta"), requires_grad=False)
    weight.kind, weight.staged, weight.product, weight.packed_bytes = kind, None, None, 0
    return weight


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [m, k] by a packed weight [n, k] and add bias [n]: [m, n]."""
    assert weight.product is not None
    y = weight.product(x)
    return y if bias is None else y.add_(bias)


@new_like.register
def same_packed_weight(
    old: PackedWeight, device: torch.device | str, dtype: torch.dtype
) -> nn.Parameter:
    """Keep the weight: it takes no memory before it is filled."""
    return old


@fill.register
def fill_packed(weight: PackedWeight, target: Index, part: Tensor) -> None:
    """Write a part of a checkpoint's tensor to the float32 copy, which lives until `seal`."""
    if weight.staged is None:
        weight.staged = torch.zeros(weight.shape)
    weight.staged[target].copy_(part)


@fill_randomly.register
def fill_packed_randomly(weight: PackedWeight, generator: torch.Generator) -> None:
    """Keep the random numbers that other weights get until `seal`; keep those of a tied head."""
    if weight.product is None:
        weight.staged = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator)


@seal.register
def seal_packed(weight: PackedWeight) -> None:
    """Pack what has been filled; the float32 copy goes."""
    if weight.staged is not None:
        weight.pack(weight.staged)


class HalfTable(nn.Parameter):
    """An embedding in float16, or in float32 if it does not fit; `head` is tied to it."""

    head: PackedWeight | None


def half_table(
    shape: tuple[int, ...], head: PackedWeight | None, device: torch.device | str
) -> HalfTable:
    """Make a table of zeros [rows, hidden]."""
    empty = torch.zeros(shape, dtype=torch.float16, device=device)
    table = HalfTable(empty, requires_grad=False)
    table.head = head
    return table


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of a table in float32."""
    return F.embedding(ids, table).float()


@new_like.register
def new_table(old: HalfTable, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Make the table, whatever `dtype` the other parameters get."""
    return half_table(old.shape, old.head, device)


@fill.register
def fill_table(table: HalfTable, target: Index, part: Tensor) -> None:
    """Write rows; the table becomes float32 if they do not fit float16."""
    if not fits(part, HalfRows.smallest, HalfRows.largest):
        table.data = table.data.float()
    table[target].copy_(part)


@seal.register
def seal_table(table: HalfTable) -> None:
    """Pack the head that is tied to the table."""
    if table.head is not None:
        table.head.pack(table.data.float())


def replace_weights(model: nn.Module, kind: str) -> None:
    """Replace embedding, head and linear weights of a model without values by packed ones."""
    for layer in model.modules():
        if isinstance(layer, MergedColumnParallelLinear | RowParallelLinear | LMHead):
            layer.weight = packed_weight(layer.weight.shape, kind)
            layer.linear = packed_linear
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, LMHead):
            head = getattr(model, "lm_head", None)
            tied: Any = head.weight if isinstance(head, LMHead) and head.tied else None
            layer.weight, layer.lookup = half_table(layer.weight.shape, tied, "meta"), lookup


SMALL = 64 * 2**20  # bytes of float32 that a CPU's caches may hold


def gains(model: Any) -> bool:
    """Return True if packing halves what a step reads from memory, and rounds no checkpoint."""
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return model.config.dtype != "float32" and size > SMALL


def slow_choice(dtype: torch.dtype, fp8: bool) -> str | None:
    """Return what to report of a choice that makes a CPU slower than float32 does, or None."""
    if fp8:
        return "quantization: fp8 weights are dequantized at each product; int8 is faster on a CPU"
    if dtype is not torch.float32 and not torch.cpu._is_amx_tile_supported():
        return f"dtype: {dtype} is slower than float32 for prompts on a CPU without AMX"
    return None


def pack_model(model: Any, quantization: str, device: torch.device | str = "cpu") -> None:
    """Replace weights of a model without values by some that are packed once they are filled.

    "auto" packs as "fp16" where that `gains`. Raise ValueError for "fp16" or "int8" where it is
    impossible.
    """
    on_cpu = torch.device(device).type == "cpu"
    fp8 = any(isinstance(parameter, Fp8Weight) for parameter in model.parameters())
    if on_cpu and (slow := slow_choice(model.ctx.dtype, fp8)):
        logger.warning("%s", slow)
    rules = {
        "auto, none or fp8 on a GPU": on_cpu,
        "auto or none without FBGEMM, which needs an x86 CPU with AVX2": has_kernels(),
        f"auto or none for dtype {model.ctx.dtype}": model.ctx.dtype is torch.float32,
        "auto, none or fp8 for a mixture of experts": model.config.moe is None,
        "auto or none for a checkpoint in FP8": not fp8,
    }
    broken = next((rule for rule, holds in rules.items() if not holds), None)
    if quantization in FORMATS and broken is not None:
        raise refuse("quantization", broken, quantization)
    if quantization == "auto" and broken is None and gains(model):
        quantization = "fp16"
    if quantization in FORMATS:
        replace_weights(model, quantization)


def set_formats(
    model: Any, quantization: str, folder: Path, device: torch.device | str = "cpu"
) -> None:
    """Choose the formats of a model without values, by its checkpoint and `quantization`."""
    quantize_model(model, quantization, folder, device)
    pack_model(model, quantization, device)
