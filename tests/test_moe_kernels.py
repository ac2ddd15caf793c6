"""Chapter 11b: blocks of pairs against brute force, grouped GEMMs against chapter 11."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.fp8 import fp8_weight
from minisgl.kernels import moe, moe_row
from minisgl.kernels.linear import Tiling
from minisgl.kernels.moe import (
    align,
    expert_parts,
    expert_sum,
    fit_tiling,
    max_blocks,
)
from minisgl.kernels.moe_row import experts_gemv, fits_row
from minisgl.kernels.norm import DeferredNorm
from minisgl.layers.moe import MoE, grouped_experts, route
from tests.fused_cases import check_model, few_programs, small_model
from tests.moe_cases import check_blocks, check_row, skewed_logits
from tests.turns import in_turns

__all__ = ["few_programs"]  # a fixture
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, Triton does not interpret kernels on a CPU"
)


@settings(max_examples=12)
@given(
    st.integers(1, 150), st.integers(1, 12), st.sampled_from(["even", "hot", "empty"]),
    st.sampled_from([4, 16]), st.booleans(), st.data(),
)  # fmt: skip
def test_blocks_hold_every_pair_once(
    n: int, experts: int, kind: str, size: int, normalize: bool, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, min(experts, 4)))
    logits = skewed_logits(n, experts, kind, n)
    blocks = align(logits[None], top_k, normalize, size)
    assert len(blocks.rows) == max_blocks(n * top_k, experts, size)
    check_blocks(blocks, logits, top_k, normalize)


@pytest.mark.parametrize(("n", "tokens"), [(1, 1), (5, 8), (16, 16), (17, 8), (513, 32)])
def test_blocks_of_programs_of_all_sizes(n: int, tokens: int) -> None:
    assert moe.tokens_of_program(n) == tokens
    logits = skewed_logits(n, 6, "hot", n)
    check_blocks(align(logits[None], 2, True, 16), logits, 2, True)


@pytest.mark.parametrize(("n", "kind"), [(3, "even"), (70, "hot"), (20, "empty")])
def test_blocks_of_other_ranks_are_marked(n: int, kind: str) -> None:
    logits = skewed_logits(n, 6, kind, n)
    for first in (0, 2, 4):
        blocks = align(logits[None], 2, True, 4, first, 2)
        check_blocks(blocks, logits, 2, True, range(first, first + 2))


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize(("n", "kind"), [(1, "even"), (20, "empty")])
def test_parts_of_all_ranks_add_up(
    monkeypatch: pytest.MonkeyPatch, row: int, n: int, kind: str
) -> None:
    """Zeros for experts of others, also where the memory was full of something else."""
    monkeypatch.setattr(moe, "TILINGS", ((float("inf"), *moe.TILINGS[row][1:]),))
    dirty = lambda *shape, **how: real(*shape, **how).fill_(7)  # noqa: E731
    real = torch.empty
    monkeypatch.setattr(torch, "empty", dirty)
    x, logits = torch.randn(n, 64), skewed_logits(n, 6, kind, n)
    gate_up, down = torch.randn(6, 64, 64) / 8, torch.randn(6, 64, 32) / 6
    total = torch.zeros(n, 64)
    for first in (0, 3):
        mine = slice(first, first + 3)
        total += expert_sum(x, logits[None], gate_up[mine], down[mine], 2, True, first=first)
    want = grouped_experts(x, *route(logits, 2, True), gate_up, down)
    torch.testing.assert_close(total, want, atol=1e-4, rtol=1e-4)


def test_split_logits_are_added_up() -> None:
    logits = skewed_logits(5, 6, "even", 0)
    blocks = align(torch.stack((logits - 1, torch.ones(5, 6))), 2, True, 16)
    check_blocks(blocks, logits, 2, True)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.sampled_from([1, 4, 16]))
def test_most_blocks_is_enough_for_every_routing(counts: list[int], size: int) -> None:
    needed = sum(-(-count // size) for count in counts)
    assert needed <= max_blocks(sum(counts), len(counts), size)


@pytest.mark.parametrize("row", moe.TILINGS)
@pytest.mark.parametrize(("n", "kind"), [(1, "even"), (9, "hot"), (20, "empty")])
def test_parts_add_up_to_the_oracle(
    monkeypatch: pytest.MonkeyPatch, row: tuple[float, Tiling, Tiling], n: int, kind: str
) -> None:
    """All tilings, whatever the batch that they are meant for."""
    monkeypatch.setattr(moe, "TILINGS", ((float("inf"), *row[1:]),))
    gen = torch.Generator().manual_seed(n)
    x, logits = torch.randn(n, 64, generator=gen), skewed_logits(n, 5, kind, n)
    gate_up = torch.randn(5, 64, 64, generator=gen) / 8
    down = torch.randn(5, 64, 32, generator=gen) / 6
    parts = expert_parts(x, logits[None], gate_up, down, 2, True)
    assert parts.shape == (2, n, 64)
    want = grouped_experts(x, *route(logits, 2, True), gate_up, down)
    torch.testing.assert_close(parts.sum(0), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["even", "hot", "empty"])
@pytest.mark.parametrize("shape", [(5, 512, 48), (8, 1024, 64)])
@pytest.mark.parametrize(("top_k", "normalize"), [(1, True), (3, False), (4, True)])
def test_one_token_equals_the_oracle(
    shape: tuple[int, int, int], top_k: int, normalize: bool, kind: str
) -> None:
    check_row(shape, top_k, normalize, kind)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_one_token_of_sixteen_bits(dtype: torch.dtype, limit: float) -> None:
    check_row((6, 768, 64), 2, True, "even", "cpu", dtype, limit)


def test_all_logits_are_stored_before_a_program_chooses() -> None:
    """The interpreter runs one program after the other, and sees no race."""
    body = inspect.getsource(moe_row.route_row_kernel.fn)
    marks = "tl.store(logits_ptr", "tl.debug_barrier()", 'sem="acq_rel"', "choose_experts("
    places = [body.index(mark) for mark in marks]
    assert places == sorted(places)


def test_of_equal_experts_the_first_ones_get_a_token() -> None:
    """As blocks have it: whether a token is alone must not change where it goes."""
    check_row((12, 512, 32), 3, True, "equal")


def test_a_token_without_experts_reads_those_that_there_are() -> None:
    """Of logits that are no numbers none is chosen, and what memory held before is no expert."""
    x, shares = torch.ones(1, 512), torch.ones(2)
    weights = torch.randn(5, 64, 512), torch.randn(5, 512, 32)
    row = DeferredNorm(x, x, x.view(-1, 8).sum(1))
    one, other = (
        experts_gemv(row, torch.tensor(ids, dtype=torch.int32), shares, *weights, x[0], 1e-6)
        for ids in ([10**9, -(10**9)], [4, 0])
    )
    assert torch.equal(one.total, other.total)


def test_other_weights_are_not_for_one_token() -> None:
    down = torch.ones(8, 512, 64)
    assert fits_row(torch.ones(8, 128, 512), down)
    assert not fits_row(torch.ones(8, 128, 96), torch.ones(8, 96, 64))
    assert not fits_row(torch.ones(8, 48, 512), torch.ones(8, 512, 24))
    assert not fits_row(fp8_weight(8, 128, 512, device="cpu"), down)
    assert not fits_row(torch.ones(8, 128, 512), fp8_weight(8, 512, 64, device="cpu"))


def test_a_token_alone_gets_the_same_bits_where_that_is_asked_for() -> None:
    gen = torch.Generator().manual_seed(0)
    x, logits = torch.randn(20, 32, generator=gen), skewed_logits(20, 4, "hot", 0)
    weights = torch.randn(4, 32, 32, generator=gen), torch.randn(4, 32, 16, generator=gen)
    together = expert_parts(x, logits[None], *weights, 2, True, fixed=True)
    for rows in (slice(0, 1), slice(7, 20)):
        alone = expert_parts(x[rows], logits[None, rows], *weights, 2, True, fixed=True)
        assert torch.equal(alone, together[:, rows])


def test_tiles_divide_the_weights_and_fit_the_device() -> None:
    wanted = Tiling(128, 128, 64, 8, 4, False)
    assert fit_tiling(wanted, 768, 2048, True, 232_448, 2) == wanted
    small = fit_tiling(wanted, 192, 96, True, 101_376, 2)
    assert (small.bn, small.bk) == (64, 32) and 192 % small.bn == 0 and 96 % small.bk == 0
    stage = (128 + 2 * 64) * 32 * 2
    assert small.stages * stage <= 101_376
    assert fit_tiling(wanted, 2048, 768, True, 101_376, 2).stages == 2
    tiny = fit_tiling(wanted, 2048, 768, True, 49_152, 2)
    assert tiny.bn < 64 and tiny.stages * (128 + 2 * tiny.bn) * 64 * 2 <= 49_152
    with pytest.raises(ValueError, match="multiples of 16, got 24 and 64"):
        fit_tiling(wanted, 24, 64, False, 232_448, 2)


@pytest.mark.parametrize("arch", in_turns(2, ["qwen3_moe", "mixtral"]))
def test_fused_model_equals_the_plain_one(arch: str, few_programs: None) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 4, "intermediate_size": 128}
    if arch == "qwen3_moe":  # with one dense layer
        sizes = {"moe_intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [0]}
    sizes["num_experts_per_tok"] = 2
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model = small_model(arch, num_hidden_layers=2, **sizes, **heads)
    for layer in model.model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate.data *= 20  # so that experts differ in weight
    with patch.object(moe_row, "experts_gemv", wraps=experts_gemv) as seen:
        check_model(model, [9], None)
    assert seen.call_count == 2 * sum(isinstance(layer.mlp, MoE) for layer in model.model.layers)
    check_model(model, [5, 20], None)
    check_model(model, [2, 3, 6], [2, 1, 3])
