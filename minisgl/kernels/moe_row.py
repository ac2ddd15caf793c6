"""The experts of a single token: a router that chooses, two GEMVs, and the norm after them.

Generated from notebooks/11b_moe_kernels.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernels.linear import add_products, apply_epilogue, count_scales, split_k_linear
from minisgl.kernels.moe import expert_parts, top_experts, wait_then_launch
from minisgl.kernels.norm import DeferredNorm
from minisgl.kernels.pdl import launch_options


@triton.jit
def choose_experts(
    logits_ptr, experts_ptr, weights_ptr, E, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a token's experts and their weights, the best first: [TOP_K] each."""
    token = tl.zeros([1], tl.int32)
    choice, weights = top_experts(logits_ptr, token, 1, E, E, 1, TOP_K, NORMALIZE, WIDTH)
    chosen = choice < TOP_K
    tl.store(experts_ptr + choice, tl.arange(0, WIDTH)[None, :], mask=chosen)
    tl.store(weights_ptr + choice, weights, mask=chosen)


@triton.jit(do_not_specialize=["E"])
def route_row_kernel(
    row_ptr, squares_ptr, w_ptr, logits_ptr, done_ptr, experts_ptr, weights_ptr, K, E, eps,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, WIDTH: tl.constexpr, SQUARES: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route one token: store its experts and weights, [TOP_K] each; row [K], w [E, K]; grid (E,).

    The row lacks the factor of a norm, as in `row_kernel`.
    """
    expert, ks = tl.program_id(0), tl.arange(0, BK)
    w_ptr += expert * K + ks
    if PDL:
        gdc_launch_dependents()
    w = tl.load(w_ptr)
    if PDL:
        gdc_wait()
    part = tl.arange(0, triton.next_power_of_2(SQUARES))
    squares = tl.load(squares_ptr + part, mask=part < SQUARES, other=0.0)
    total = w.to(tl.float32) * tl.load(row_ptr + ks).to(tl.float32)
    for k in range(BK, K, BK):
        total += tl.load(w_ptr + k).to(tl.float32) * tl.load(row_ptr + k + ks).to(tl.float32)
    y = tl.sum(total, 0) * tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tl.store(logits_ptr + expert, y)
    tl.debug_barrier()  # all threads have written before one of them counts
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == E - 1:
        tl.debug_barrier()  # with `acq_rel`: all threads now see the others' stores
        choose_experts(logits_ptr, experts_ptr, weights_ptr, E, TOP_K, NORMALIZE, WIDTH)
        tl.store(done_ptr, 0)  # ready for the next step


@triton.jit
def chosen_experts(experts_ptr, slots, TOP_K: tl.constexpr, E):
    """Load the experts of these slots, clamped: if all logits are NaN, none was written."""
    experts = tl.load(experts_ptr + slots, mask=slots < TOP_K, other=0)
    return tl.minimum(tl.maximum(experts, 0), E - 1).to(tl.int64)


@triton.jit
def gate_up_row_kernel(
    row_ptr, squares_ptr, experts_ptr, weights_ptr, w_ptr, mid_ptr, N, K, E, eps,
    TOP_K: tl.constexpr, SQUARES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute `BN` weighted gate-and-up outputs of one expert: mid [TOP_K, N]; w [E, 2 N, K].

    Grid (N / BN, TOP_K). The row lacks the factor of a norm, as in `row_kernel`.
    """
    if PDL:
        wait_then_launch()
    slot, cols, ks = tl.program_id(1), tl.arange(0, BN), tl.arange(0, BK)
    cols += tl.program_id(0) * BN
    expert = chosen_experts(experts_ptr, slot, TOP_K, E)
    w_ptr += (expert * 2 * N + cols[:, None]) * K + ks[None, :]
    part = tl.arange(0, triton.next_power_of_2(SQUARES))
    squares = tl.load(squares_ptr + part, mask=part < SQUARES, other=0.0)
    total = tl.zeros([BN, BK], tl.float32)
    up = total
    for k in range(0, K, BK):
        w, u = tl.load(w_ptr + k), tl.load(w_ptr + N * K + k)
        total, up = add_products(w, u, k, total, up, row_ptr, row_ptr, N, ks, True, 0, 1)
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y, up = tl.sum(total, 1) * factor, tl.sum(up, 1) * factor
    y = apply_epilogue(y, up, row_ptr, row_ptr, N, cols, True, False, 0)
    y *= tl.load(weights_ptr + slot)
    tl.store(mid_ptr + slot * N + cols, y.to(mid_ptr.dtype.element_ty))


@triton.jit
def down_row_kernel(
    mid_ptr, experts_ptr, w_ptr, residual_ptr, norm_ptr, out_ptr, row_ptr, squares_ptr, N, K, E,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the residual and the experts' sum for `BN` outputs, with norm scaling; w [E, N, K].

    `SLOTS` is `TOP_K`, rounded up to a power of two.
    """
    if PDL:
        gdc_launch_dependents()
    cols, ks = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)[None, :]
    slots = tl.arange(0, SLOTS)
    experts, real = chosen_experts(experts_ptr, slots, TOP_K, E), (slots < TOP_K)[:, None]
    w_ptr += (experts[None, :, None] * N + cols[:, None, None]) * K + ks[None, :, :]
    w = tl.load(w_ptr, mask=real[None, :, :], other=0.0)
    norm = tl.load(norm_ptr + cols).to(tl.float32)
    residual = tl.load(residual_ptr + cols).to(tl.float32)
    if PDL:
        gdc_wait()
    mid_ptr += slots[:, None] * K + ks
    mid = tl.load(mid_ptr, mask=real, other=0.0)
    total = w.to(tl.float32) * mid.to(tl.float32)[None, :, :]
    for k in range(BK, K, BK):
        w = tl.load(w_ptr + k, mask=real[None, :, :], other=0.0)
        mid = tl.load(mid_ptr + k, mask=real, other=0.0)
        total += w.to(tl.float32) * mid.to(tl.float32)[None, :, :]
    y = residual + tl.sum(tl.sum(total, 2), 1)
    y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + cols, y.to(out_ptr.dtype.element_ty))
    tl.store(row_ptr + cols, (y * norm).to(row_ptr.dtype.element_ty))
    tl.store(squares_ptr + tl.program_id(0), tl.sum(y * y, 0))


GATE_UP = 8, 256, 2  # columns and depth of a thread block's tile, and its warps
DOWN = 4096, 128, 4  # numbers of a tile: columns x experts x depth; most depth; warps


def fits_row(gate_up: Tensor, down: Tensor) -> bool:
    """Return True if these kernels support the weights: no scales, and sizes that tiles divide."""
    if count_scales(gate_up) != 0 or count_scales(down) != 0:
        return False
    (_, hidden, width), (bn, bk, _) = down.shape, GATE_UP
    return hidden % bk == 0 and width % max(16, bn) == 0


def route_gemv(
    x: DeferredNorm, router: Tensor, done: Tensor, eps: float, top_k: int, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return the experts of one token and their weights, [top_k] each; router [experts, hidden].

    done: [1], int32, zero before and after.
    """
    experts, hidden = router.shape
    assert x.squares is not None, "the row must lack its factor"
    logits = torch.empty(experts, dtype=torch.float32, device=router.device)
    weights = torch.empty(top_k, dtype=torch.float32, device=router.device)
    chosen = torch.empty_like(weights, dtype=torch.int32)
    route_row_kernel[(experts,)](
        x.row, x.squares, router, logits, done, chosen, weights, hidden, experts, eps,
        TOP_K=top_k, NORMALIZE=normalize, WIDTH=triton.next_power_of_2(experts),
        SQUARES=len(x.squares), BK=min(2048, hidden & -hidden), num_warps=1,
        **launch_options(x.row),
    )  # fmt: skip
    return chosen, weights


def experts_gemv(
    x: DeferredNorm, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor,
    eps: float,
) -> DeferredNorm:  # fmt: skip
    """Add the experts' sum to x [1, hidden] and apply norm [hidden], deferred; see `fits_row`.

    chosen, weights [top_k]; gate_up [experts, 2 width, hidden], down [experts, hidden, width].
    """
    (experts, hidden, width), top_k = down.shape, len(chosen)
    assert x.squares is not None, "the row must lack its factor"
    mid = torch.empty(top_k, width, dtype=x.total.dtype, device=x.total.device)
    (bn, bk, warps), options = GATE_UP, launch_options(x.row)
    gate_up_row_kernel[(width // bn, top_k)](
        x.row, x.squares, chosen, weights, gate_up, mid, width, hidden, experts, eps,
        TOP_K=top_k, SQUARES=len(x.squares), BN=bn, BK=bk, num_warps=warps, **options,
    )  # fmt: skip
    numbers, most, warps = DOWN
    slots, bk = triton.next_power_of_2(top_k), min(most, width & -width)
    bn = max(1, min(16, numbers // (slots * bk)))
    out = torch.empty_like(x.total)
    sums = torch.empty(hidden // bn, dtype=torch.float32, device=out.device)
    made = DeferredNorm(out, torch.empty_like(x.row), sums)
    down_row_kernel[(hidden // bn,)](
        mid, chosen, down, x.total, norm, *made, hidden, width, experts, TOP_K=top_k,
        SLOTS=slots, BN=bn, BK=bk, num_warps=warps, **options,
    )  # fmt: skip
    return made


@dataclass(frozen=True)
class FusedExperts:
    """The weights of one layer of experts, for the fused model of chapter 05e."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    normalize: bool
    first: int  # of this rank's experts
    done: Tensor  # of `route_gemv`

    def parts(self, x: Tensor) -> Tensor:
        """Compute the experts' outputs [top_k, n, hidden] of normalised x, still to be summed."""
        weights, how = (self.gate_up, self.down), (self.top_k, self.normalize)
        return expert_parts(x, split_k_linear(x, self.router), *weights, *how, first=self.first)

    @property
    def supports_gemv(self) -> bool:
        """True if `row` has kernels for these weights."""
        return fits_row(self.gate_up, self.down)

    def row(self, x: DeferredNorm, norm: Tensor, eps: float) -> DeferredNorm:
        """Add the experts to x [1, hidden] and defer the next norm; the rank must hold them all."""
        found = route_gemv(x, self.router, self.done, eps, self.top_k, self.normalize)
        return experts_gemv(x, *found, self.gate_up, self.down, norm, eps)
