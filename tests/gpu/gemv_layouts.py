"""Products of one row: the weight's layout, and how much of it a kernel requests before it waits.

`python3 -m tests.gpu.gemv_layouts --out FILE`: layers of four products, each on what the one before
made, recorded as one graph with early launch. The variants are
  now            `gemv` with its rule and the GPU's table
  rows PRE       one tile [BN, BK] after another; PRE of them are requested before the wait
  packed PRE     the same, from a weight stored as [output block, k vector, row, 8]
after the study msaroufim/megakernels-vs-cuda-graphs.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from tqdm import tqdm
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.benchmark.report import save
from minisgl.kernels.linear import gemv
from minisgl.kernels.pdl import launch_options

SHAPES = {  # [outputs, inputs], gated or not
    "Qwen3-0.6B": ((4096, 1024, 0), (1024, 2048, 0), (3072, 1024, 1), (1024, 3072, 0)),
    "Llama-3.2-1B": ((3072, 2048, 0), (2048, 2048, 0), (8192, 2048, 1), (2048, 8192, 0)),
}
TILES = [
    (4, 1024, 4),
    (4, 2048, 4),
    (8, 1024, 4),
    (2, 2048, 4),
    (4, 2048, 8),
    (2, 1024, 4),
    (8, 1024, 8),
    (1, 2048, 4),
    (8, 512, 4),
    (8, 2048, 8),
    (2, 1024, 2),
    (4, 512, 4),
]
MOST = 4  # tiles that may be on their way before the wait


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def place(t, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """Return the offsets of tile t of this program's rows: [BK / 8, BN, 8]."""
    k = tl.arange(0, BK // 8)[:, None, None]
    row = tl.arange(0, BN)[None, :, None]
    last = tl.arange(0, 8)[None, None, :]
    if PACKED:
        return (tl.program_id(0).to(tl.int64) * (K // BK) + t) * BN * BK + (k * BN + row) * 8 + last
    return (tl.program_id(0).to(tl.int64) * BN + row) * K + t * BK + k * 8 + last


@triton.jit
def tile_sum(w, x_ptr, t, BK: tl.constexpr):
    """Return tile w [BK / 8, BN, 8] times its part of x, added up over the last axis."""
    x = tl.load(x_ptr + t * BK + tl.arange(0, BK // 8)[:, None, None] * 8
                + tl.arange(0, 8)[None, None, :])  # fmt: skip
    return tl.sum(w.to(tl.float32) * x.to(tl.float32), 2)


@triton.jit
def layout_kernel(
    x_ptr, w_ptr, out_ptr, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRE: tl.constexpr, PACKED: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs; PRE tiles are requested before the kernel waits for its input."""
    if PDL:
        gdc_launch_dependents()
    size: tl.constexpr = K
    w0 = tl.load(w_ptr + place(0, N, size, BN, BK, PACKED))
    w1 = tl.load(w_ptr + place(1, N, size, BN, BK, PACKED)) if PRE > 1 else w0
    w2 = tl.load(w_ptr + place(2, N, size, BN, BK, PACKED)) if PRE > 2 else w0
    w3 = tl.load(w_ptr + place(3, N, size, BN, BK, PACKED)) if PRE > 3 else w0
    other = w_ptr + N * K
    u0 = tl.load(other + place(0, N, size, BN, BK, PACKED)) if GATED else w0
    u1 = tl.load(other + place(1, N, size, BN, BK, PACKED)) if GATED and PRE > 1 else w0
    u2 = tl.load(other + place(2, N, size, BN, BK, PACKED)) if GATED and PRE > 2 else w0
    u3 = tl.load(other + place(3, N, size, BN, BK, PACKED)) if GATED and PRE > 3 else w0
    if PDL:
        gdc_wait()
    y = tile_sum(w0, x_ptr, 0, BK)
    up = tile_sum(u0, x_ptr, 0, BK) if GATED else y
    if PRE > 1:
        y += tile_sum(w1, x_ptr, 1, BK)
        up = up + tile_sum(u1, x_ptr, 1, BK) if GATED else y
    if PRE > 2:
        y += tile_sum(w2, x_ptr, 2, BK)
        up = up + tile_sum(u2, x_ptr, 2, BK) if GATED else y
    if PRE > 3:
        y += tile_sum(w3, x_ptr, 3, BK)
        up = up + tile_sum(u3, x_ptr, 3, BK) if GATED else y
    for t in range(PRE, K // BK):
        w = tl.load(w_ptr + place(t, N, size, BN, BK, PACKED))
        y += tile_sum(w, x_ptr, t, BK)
        if GATED:
            u = tl.load(other + place(t, N, size, BN, BK, PACKED))
            up += tile_sum(u, x_ptr, t, BK)
    total = tl.sum(y, 0)
    if GATED:
        total = total * tl.sigmoid(total) * tl.sum(up, 0)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty))


def pack(weight: Tensor, bn: int, bk: int) -> Tensor:
    """Store weight [n, k] as [n / bn, k / bk, bk / 8, bn, 8]."""
    n, k = weight.shape
    tiles = weight.view(n // bn, bn, k // bk, bk // 8, 8)
    return tiles.permute(0, 2, 3, 1, 4).contiguous()


Product = Callable[[Tensor], Tensor]


def laid_out(weight: Tensor, gated: bool, tile: tuple[int, int, int], packed: bool) -> Product:
    """Return the product with `weight` by `layout_kernel`, up to `MOST` tiles ahead."""
    (bn, bk, warps), k = tile, weight.shape[1]
    n = weight.shape[0] // (2 if gated else 1)
    halves = weight.split(n)
    stored = torch.cat([pack(half, bn, bk).view(-1) for half in halves]) if packed else weight
    pre = min(MOST, k // bk)

    def product(x: Tensor) -> Tensor:
        out = torch.empty(1, n, dtype=x.dtype, device=x.device)
        layout_kernel[(n // bn,)](
            x, stored, out, n, K=k, BN=bn, BK=bk, PRE=pre, PACKED=packed, GATED=gated,
            num_warps=warps, **launch_options(x),
        )  # fmt: skip
        return out

    return product


def chain_ms(products: list[list[Product]], x: Tensor, inputs: list[int]) -> float:
    """Return the milliseconds of all layers: the median of 30 replays of one graph."""

    def chain() -> Tensor:
        y = x
        for layer in products:
            for product, k in zip(layer, inputs, strict=True):
                y = product(y[:, :k])
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def alone_ms(product: Product, x: Tensor, copies: list[Product]) -> float:
    """Return the milliseconds of one product over weights that no cache holds."""
    return chain_ms([[p] for p in copies], x, [x.shape[1]]) / len(copies)


def variants(
    n: int, k: int, gated: bool, weights: list[Tensor], x: Tensor, deadline: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Measure a product alone, `len(weights)` weights in turn, for every tile and both layouts."""
    now = [lambda x, w=w: gemv(x, w, gated=gated) for w in weights]
    yield {"variant": "now", "tile": [], "ms": alone_ms(now[0], x, now)}
    want = torch.nn.functional.linear(x.double(), weights[0].double())
    if gated:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    for tile in TILES:
        bn, bk, warps = tile
        held = bn * min(MOST * bk, k) * (2 if gated else 1) // (64 * warps)  # registers a thread
        if n % bn or k % bk or not 4 <= held <= 128 or deadline():
            continue
        for packed in (False, True):
            try:
                made = [laid_out(w, gated, tile, packed) for w in weights]
                error = (made[0](x).double() - want).abs().max() / want.abs().max()
                ms = alone_ms(made[0], x, made)
            except Exception as reason:  # a tile that does not compile is no candidate
                print(tile, packed, str(reason).splitlines()[:1], flush=True)
                continue
            name = "packed" if packed else "rows"
            yield {"variant": name, "tile": list(tile), "ms": ms, "error": float(error)}


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Find the best tile for each product and layout, then measure whole layers with them."""
    torch.manual_seed(0)
    shapes, layers, rows = SHAPES[name], 8, []
    best: dict[str, list[list[Product]]] = {
        v: [[] for _ in range(layers)] for v in ("now", "rows", "packed", "best")
    }
    inputs = [k for _, k, _ in shapes]
    for n, k, gate in tqdm(shapes, desc=name):
        end = time.monotonic() + seconds / len(shapes)
        gated, scale = bool(gate), k**-0.5
        weights = [
            torch.randn(n * (1 + gate), k, device="cuda").mul_(scale).bfloat16()
            for _ in range(layers)
        ]
        x = torch.randn(1, k, device="cuda").bfloat16()
        found = list(variants(n, k, gated, weights, x, lambda: time.monotonic() > end))
        bound = n * (1 + gate) * k * 2
        rows += [
            {"shape": [n, k, gate], "gb_per_s": round(bound / r["ms"] / 1e6), **r} for r in found
        ]
        for variant in best:
            some = [r for r in found if variant in (r["variant"], "best")]
            first = min(some or found, key=lambda r: r["ms"])
            for layer, w in zip(best[variant], weights, strict=True):
                if first["variant"] == "now":
                    layer.append(lambda x, w=w, gated=gated: gemv(x, w, gated=gated))
                else:
                    layer.append(
                        laid_out(w, gated, tuple(first["tile"]), first["variant"] == "packed")
                    )
    x = torch.randn(1, inputs[0], device="cuda").bfloat16()
    whole = {}
    for variant in [*best, *best]:
        whole.setdefault(variant, []).append(round(chain_ms(best[variant], x, inputs) / layers, 5))
    return {"model": name, "layer_ms": whole, "rows": rows}


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=40, help="for each model (default %(default)s)"
    )
    args = parser.parse_args()
    results = [measure(name, args.seconds) for name in SHAPES]
    for result in results:
        print(result["model"], result["layer_ms"], flush=True)
    save(args.out, results, shlex.join(["python3", "-m", "tests.gpu.gemv_layouts", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
