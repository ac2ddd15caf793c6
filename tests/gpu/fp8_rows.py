"""Rows by FP8 weights on one GPU: three ways to widen them, and the served kernel.

`python3 -m tests.gpu.fp8_rows --out FILE`: microseconds for the weights of a layer of Qwen3-8B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.benchmark.kernels import graph_seconds
from minisgl.benchmark.report import save
from minisgl.fp8 import fp8_weight
from minisgl.kernels.fp8_linear import (
    WIDENED,
    choose_fp8_tiling,
    choose_w8a8_tiling,
    fp8_few_row_gemm,
)
from minisgl.kernels.linear import (
    Tiling,
    apply_epilogue,
    gated_linear,
    linear,
    prefetch,
    silu_and_mul,
    split_k_linear,
)
from minisgl.kernels.pdl import launch_options
from minisgl.kernels.scaled_mm import scaled_linear

DEVICE = torch.device("cuda")
SHAPES = {  # (n, k) of the weight, n of both halves where it is gated
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
}  # fmt: skip
ENOUGH = 1 << 28  # bytes of different weights, more than a cache holds
WAYS = {"straight": 0, "shifts": 1, "by float32": 2}
GATED, SPLIT = {"gate_up"}, {"o", "down"}


def weights_of(name: str, group: int) -> list[Any]:
    """Copies of a random weight, to be multiplied in turn."""
    n, k = SHAPES[name]
    made: list[Any] = []
    for _ in range(-(-ENOUGH // (n * k))):
        values = torch.randn(n, k, device=DEVICE)
        if group < 0:
            made.append(values.bfloat16())
            continue
        weight = fp8_weight(n, k, device=DEVICE, group=group)
        weight.copy_((values * 50).to(torch.float8_e4m3fn))
        weight.scale.fill_(1e-4)
        made.append(weight)
    return made


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def widen(w, WAY: tl.constexpr):
    """float8_e4m3fn as bfloat16."""
    if WAY == 2:
        w = w.to(tl.float32).to(tl.bfloat16)
    elif WAY == 1:
        w = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, a, b, m;
            mov.b32 m, 0x7b807b80;
            shr.u32 t, $2, 4;
            and.b32 a, $2, 0x80808080;
            lop3.b32 a, t, 0x07070707, a, 0xea;
            shl.b32 b, $2, 4;
            and.b32 b, b, 0xf0f0f0f0;
            prmt.b32 t, b, a, 0x5140;
            mul.rn.bf16x2 $0, t, m;
            prmt.b32 t, b, a, 0x7362;
            mul.rn.bf16x2 $1, t, m;
            }
            """,
            "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        w = w.to(tl.bfloat16)
    return w


@triton.jit(do_not_specialize=["M"])
def widen_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, M, N, K, part, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GATED: tl.constexpr, WAY: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`rows_kernel`, swapped, with one scale a row and a choice of conversions."""
    cols, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    at, split, ks = tl.program_id(2) * part, tl.program_id(2), tl.arange(0, BK)[None, :]
    w_ptr += cols[:, None].to(tl.int64) * K + at
    if PDL:
        gdc_launch_dependents()
        prefetch(w_ptr + tl.arange(0, 4)[None, :] * 128)
        gdc_wait()
    x_ptr += tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + at + ks
    w_ptr += ks
    y = tl.zeros([BN, BM], tl.float32)
    up = y
    for k in tl.range(0, part, BK, num_stages=STAGES):
        x = tl.trans(tl.load(x_ptr + k))
        y = tl.dot(widen(tl.load(w_ptr + k), WAY), x, y)
        if GATED:
            up = tl.dot(widen(tl.load(w_ptr + k + N * K), WAY), x, up)
    y = apply_epilogue(tl.trans(y), tl.trans(up), scale_ptr, x_ptr, N, cols, GATED, False, 1)
    place = (split * M + rows[:, None]).to(tl.int64) * N + cols[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=rows[:, None] < M)


def converted(x: Tensor, weight: Any, tiles: Tiling, gated: bool, way: int) -> Tensor:
    """The product by these tiles and this conversion: [splits, m, n]."""
    (m, k), n = x.shape, len(weight) // (2 if gated else 1)
    dtype = torch.float32 if tiles.splits > 1 else x.dtype
    out = torch.empty(tiles.splits, m, n, dtype=dtype, device=x.device)
    widen_kernel[(n // tiles.bn, triton.cdiv(m, tiles.bm), tiles.splits)](
        x, weight, weight.scale, out, m, n, k, k // tiles.splits, BM=tiles.bm, BN=tiles.bn,
        BK=tiles.bk, GATED=gated, WAY=way, STAGES=tiles.stages, num_warps=tiles.warps,
        **launch_options(x),
    )  # fmt: skip
    return out


def served(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The product as the fused model asks for it."""
    return gated_linear if name in GATED else split_k_linear if name in SPLIT else linear


def by_kernels(product: Callable[[Tensor, Tensor], Tensor], weights: list[Any], x: Tensor) -> None:
    """All products, as the fused model asks for them."""
    for weight in weights:
        product(x, weight)


def by_library(product: Callable[[Tensor, Tensor], Tensor], weights: list[Any], x: Tensor) -> None:
    """All products by `scaled_mm`, with a gate behind them if `product` has one."""
    for weight in weights:
        y = scaled_linear(x, weight)
        if product is gated_linear:
            silu_and_mul(y)


def conversions(m: int) -> Iterator[dict[str, Any]]:
    """Tiles of 64 for every weight, so that only the conversion differs."""
    for name, (_, k) in SHAPES.items():
        gated, weights = name in GATED, weights_of(name, 0)
        x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        tiles = Tiling(8, 64, 128, 2, 5, True, 8 if name in SPLIT else 1)
        want = fp8_few_row_gemm(weights[0], x, gated=gated).sum(0)
        for way, number in WAYS.items():
            one = partial(converted, tiles=tiles, gated=gated, way=number)
            call = partial(by_kernels, one, weights, x)
            got = converted(x, weights[0], tiles, gated, number).sum(0)
            assert (got - want).norm() < 5e-3 * want.norm(), (name, way)
            us = graph_seconds(call, DEVICE) / len(weights) * 1e6
            yield {"name": name, "rows": m, "way": way, "us": round(us, 2)}


def rows(counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Products by 16-bit weights and by FP8 weights as served, and by the library in FP8."""
    for name, (n, k) in SHAPES.items():
        product = served(name)
        for way, group in (("bf16 weights", -1), ("library", 0), ("served", 0)):
            weights = weights_of(name, group)
            for m in counts:
                x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)

                how = {"product": product, "weights": weights, "x": x}
                call = partial(by_library if way == "library" else by_kernels, **how)
                us = graph_seconds(call, DEVICE) / len(weights) * 1e6
                row = {"name": name, "rows": m, "way": way, "us": round(us, 2)}
                if way == "served":
                    half = n // (2 if name in GATED else 1)
                    kind = {"gated": name in GATED, "split_k": name in SPLIT}
                    choose = choose_fp8_tiling if m <= WIDENED else choose_w8a8_tiling
                    row["tiles"] = str(choose(m, half, k, **kind))
                yield row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    counts = (2, 8, 16, 32, 64, 128, 192, 256)
    result = {"conversions": list(conversions(8)), "rows": list(rows(counts))}
    for row in result["conversions"] + result["rows"]:
        print(row, flush=True)
    save(args.out, result, "python3 -m tests.gpu.fp8_rows")


if __name__ == "__main__":
    main()
