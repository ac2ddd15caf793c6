"""Fused kernels against plain PyTorch, in Triton's interpreter; tests/gpu has them on a GPU."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fused_cases import (
    World,
    check_decode,
    check_drafts,
    check_drafts_of_model,
    check_model,
    check_rotate,
    close,
    few_programs,
    small_model,
)

pytest.importorskip("triton")
from minisgl.attention.fused_backend import FusedBackend, StoreFirstBackend
from minisgl.kernels import linear as kernels
from minisgl.kernels.decode_attention import TILES, splits_of, tile_of, waves
from minisgl.kernels.device import H200, DeviceLimits
from minisgl.kernels.embedding import embed
from minisgl.kernels.norm import add_norm
from tests.compile_cards import CARDS
from tests.turns import in_turns

__all__ = ["few_programs"]  # the fixture
FEW_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_with_norm(gated: bool, bias: bool) -> None:
    n, k = 32, 1024
    x, w, norm = normal(1, k), normal(2 * n if gated else n, k, seed=1), normal(k, seed=2)
    b = normal(n, seed=3) if bias and not gated else None
    got = kernels.row_linear(x, w, norm=norm, eps=1e-5, bias=b, gated=gated)
    y = rms(x, norm, 1e-5) @ w.T
    want = torch.nn.functional.silu(y[:, :n]) * y[:, n:] if gated else y
    assert got is not None
    close(got, want if b is None else want + b, 1e-5)


def test_row_linear_adds_the_residual_and_declines_odd_sizes() -> None:
    x, w, add = normal(1, 2048), normal(16, 2048, seed=1), normal(1, 16, seed=2)
    got = kernels.row_linear(x, w, add=add)
    assert got is not None
    close(got, add + x @ w.T, 1e-5)
    assert kernels.row_linear(normal(1, 96), normal(16, 96)) is None
    assert kernels.row_linear(normal(2, 1024), normal(16, 1024)) is None


@pytest.mark.parametrize("rows", [1, 7, 16, 20, 33, 64, 65, 130])
def test_gemms_of_few_rows(rows: int) -> None:
    x, w, bias = normal(rows, 512), normal(128, 512, seed=1), normal(128, seed=2)
    close(kernels.linear(x, w, bias), x @ w.T + bias, 1e-5)
    parts = kernels.split_k_linear(x, w)
    assert parts.shape[1:] == (rows, 128)
    close(parts.sum(0), x @ w.T, 1e-5)
    y = x @ w.T
    close(kernels.gated_linear(x, w), torch.nn.functional.silu(y[:, :64]) * y[:, 64:], 1e-5)


def test_tiling_fills_the_gpu_and_divides_the_work() -> None:
    for m in (1, 8, 16, 32, 64, 128, 256):
        for n, k in ((1024, 2048), (1024, 3072), (4096, 4096), (4096, 12288), (5120, 17408)):
            cut = kernels.choose_tiling(m, n, k, gated=False, split_k=True)
            if cut is not None:
                assert n % cut.bn == 0 and k % (cut.splits * cut.bk) == 0
                assert m <= kernels.FEW_ROWS or 2 * m * n * k <= kernels.SMALL_FLOPS
    assert kernels.choose_tiling(8, 1024, 2048, gated=False, split_k=True).splits == 8
    assert kernels.choose_tiling(256, 4096, 1024, gated=False, split_k=False) is None
    assert kernels.choose_tiling(8, 100, 1024, gated=False, split_k=False) is None


@pytest.mark.parametrize("card", CARDS)
def test_tiles_fit_into_the_shared_memory_of_a_card(card: str) -> None:
    limits, endless = CARDS[card], replace(H200, shared_memory=2**30)
    for m, gated in itertools.product((8, 32, 64, 128), (False, True)):
        for n, k in ((1024, 3072), (3072, 1024), (4096, 4096)):
            how: dict[str, Any] = {"gated": gated, "split_k": True}
            cut = kernels.choose_tiling(m, n, k, **how, limits=limits)
            if cut is not None:
                weights, rows = cut.bn * (4 if gated else 2), 2 * cut.bm
                assert cut.stages * (rows + weights) * cut.bk <= limits.shared_memory
                assert cut.stages >= 2 and cut.splits * n // cut.bn * -(-m // cut.bm) <= max(
                    limits.sms, n // cut.bn * -(-m // cut.bm)
                )
            if card == "H200":  # for which they were chosen
                assert cut == kernels.choose_tiling(m, n, k, **how, limits=endless)


@pytest.mark.parametrize("parts", [None, 1, 3])
def test_add_norm(parts: int | None) -> None:
    residual, norm = normal(5, 96), normal(96, seed=1)
    pieces = None if parts is None else normal(parts, 5, 96, seed=2)
    before = residual.clone()
    got, total = add_norm(pieces, residual, norm, 1e-6)
    want = residual if pieces is None else residual + pieces.sum(0)
    close(total, want, 1e-6)
    close(got, rms(want, norm, 1e-6), 1e-5)
    assert torch.equal(residual, before)


def test_embedding_of_a_shard() -> None:
    weight, ids = normal(10, 48), torch.tensor([0, 9, 10, 19, 25])
    got = embed(ids, weight, first=10)
    assert torch.equal(got[2:4], weight[[0, 9]])
    assert not got[[0, 1, 4]].any()
    assert torch.equal(embed(ids[:2], weight), weight[[0, 9]])


@settings(max_examples=5, deadline=None)
@given(
    lens=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (8, 2), (5, 1)]),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_decode_equals_the_oracle(lens: list[int], heads: tuple[int, int], page_size: int) -> None:
    check_decode(lens, qo=heads[0], kv=heads[1], dim=32, page_size=page_size)


def test_decode_of_one_long_request() -> None:
    check_decode([700], qo=4, kv=1, dim=64, page_size=16)


@settings(max_examples=4, deadline=None)
@given(
    lens=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (5, 1)]),
    normed=st.booleans(),
)
def test_decode_turns_what_comes_raw(lens: list[int], heads: tuple[int, int], normed: bool) -> None:
    check_decode(lens, qo=heads[0], kv=heads[1], dim=32, turned=True, normed=normed)


@settings(max_examples=4, deadline=None)
@given(
    lens=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (4, 2), (5, 1), (3, 3)]),
    normed=st.booleans(),
)
def test_rotate_and_store(lens: list[int], heads: tuple[int, int], normed: bool) -> None:
    check_rotate(lens, qo=heads[0], kv=heads[1], dim=32, normed=normed)


def test_few_requests_are_split_until_the_gpu_is_full() -> None:
    assert splits_of(1, 8) == (16, 1) and splits_of(8, 8) == (4, 1) and splits_of(16, 8) == (2, 1)
    assert splits_of(32, 8) == splits_of(49, 8) == (2, 1)
    assert splits_of(50, 8) == splits_of(256, 8) == (2, 2048)
    assert tile_of(1, 8, 128, 4)[0] < tile_of(1, 8, 128, 2)[0]


def test_tiles_fill_one_wave_if_they_can() -> None:
    chosen = {size: tile_of(size, 8, 128, 2) for size in (1, 2, 4, *range(8, 408, 8))}
    large, middle, small = (shape for shape, _ in TILES)
    for first, last, shape in ((1, 48, large), (56, 64, middle), (72, 400, small)):
        found = {tile for size, tile in chosen.items() if first <= size <= last}
        assert found == {shape}, (first, last)


def test_decode_is_cut_for_the_card_it_runs_on() -> None:
    at_once = {card: [count for _, count in waves(limits)] for card, limits in CARDS.items()}
    assert at_once == {"A100": [216, 432, 432], "L4": [58, 116, 116], "H200": [396, 528, 792]}
    small = DeviceLimits(40, 65_536, 75)  # too little for the largest tile
    assert [shape for shape, _ in waves(small)] == [shape for shape, _ in TILES[1:]]
    assert splits_of(1, 8, CARDS["L4"]) == (8, 1) and splits_of(8, 8, CARDS["L4"]) == (2, 2048)
    assert tile_of(8, 8, 128, 2, CARDS["L4"]) == TILES[1][0]


@pytest.mark.parametrize("arch", in_turns(2, ["llama", "qwen3", "qwen2"]))
def test_fused_model_equals_the_plain_one(arch: str, few_programs: None) -> None:
    layers = 2 if arch == "qwen3" else 1  # one architecture shows that layers follow each other
    model = small_model(arch, num_hidden_layers=layers, **FEW_HEADS)
    check_model(model, [9], None)
    check_model(model, [5, 20], None)
    check_model(model, [2, 3, 6], [2, 1, 3])


def test_odd_sizes_fall_back() -> None:
    model = small_model("qwen3", hidden_size=96, intermediate_size=160, head_dim=32)
    check_model(model, [9], None)
    check_model(model, [9, 4], [3, 4])


BEFORE_THE_LAYERS = {  # what a kernel may read before it waits: no kernel of the chain writes it
    "row_kernel": {"w_ptr"},
    "rows_kernel": {"w_ptr"},
    "silu_mul_kernel": set(),
    "add_norm_kernel": {"norm_ptr"},
    "all_reduce_kernel": {"addresses_ptr", "norm_ptr"},
    "rotate_store_kernel": set(),
    "quantize_rows_kernel": set(),
    "decode_kernel": {"positions_ptr", "rows_ptr", "table_ptr"},
    "align_kernel": set(),
}
BEFORE_THE_LAST = {  # what is complete when the kernel before began with `wait_then_launch`
    "expert_kernel": {"rows_ptr", "experts_ptr", "pairs_ptr", "w_ptr"},
}


WAITS = ("gdc_wait", "wait_then_launch")


def kernel_sources() -> dict[str, ast.FunctionDef]:
    """The kernels of this package, by name."""
    folder = Path(kernels.__file__).parent
    trees = [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]
    found = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in found if node.name.endswith("_kernel")}


def calls_until_wait(kernel: ast.FunctionDef) -> list[ast.Call]:
    """The calls of a kernel that its text has before its last wait."""
    body = [node for statement in kernel.body for node in ast.walk(statement)]
    calls = [node for node in body if isinstance(node, ast.Call)]
    *_, wait = (call for call in calls if ast.unparse(call.func) in WAITS)
    return [call for call in calls if call.lineno < wait.lineno]


def pointers_in(node: ast.AST) -> set[str]:
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {name for name in names if name.endswith("_ptr")}


def test_a_kernel_touches_before_its_wait_only_what_no_kernel_of_the_chain_writes() -> None:
    harmless = {"range", "gdc_launch_dependents", "max", "min", "wait_then_launch"}
    expected = BEFORE_THE_LAYERS | BEFORE_THE_LAST
    early = {name: node for name, node in kernel_sources().items() if "PDL" in ast.unparse(node)}
    assert early.keys() == expected.keys()
    for name, node in early.items():
        seen: set[str] = set()
        for call in calls_until_wait(node):
            function = ast.unparse(call.func)
            if function in ("tl.load", "prefetch", "load_angles"):
                seen |= pointers_in(call)
            else:
                writes = function.startswith(("tl.store", "tl.atomic"))
                known = function.startswith("tl.") or function.endswith(".to")
                assert not writes and (known or function in harmless), f"{name}: {function}"
        assert seen == expected[name], name


def test_who_is_followed_by_an_early_reader_launches_it_after_its_own_wait() -> None:
    """Else the reader could begin while the kernel before both still writes."""
    body = ast.unparse(kernel_sources()["expert_kernel"])
    first = min(body.index(call) for call in ("wait_then_launch()", "tl.load(", "tl.store("))
    assert body[first:].startswith("wait_then_launch()")
    text = (Path(kernels.__file__).parent / "moe.py").read_text()
    helper = text[text.index("def wait_then_launch") :]
    assert 0 < helper.index("gdc_wait()") < helper.index("gdc_launch_dependents()")


def test_what_lies_before_the_embedding_is_complete_behind_it() -> None:
    for name in ("embed_kernel", "store_kv_kernel"):
        assert "gdc" not in ast.unparse(kernel_sources()[name])
    text = (Path(kernels.__file__).parent / "embedding.py").read_text()
    assert "launch_options" not in text and "launch_pdl" not in text


def test_rows_of_one_request_see_each_other_where_all_are_stored_first() -> None:
    """One launch that stores and attends at once reads what is not there yet."""
    check_drafts(StoreFirstBackend, qo=2, kv=1, dim=32)
    with pytest.raises(AssertionError):
        check_drafts(FusedBackend, qo=2, kv=1, dim=32)


def test_scratch_suits_many_drafts_of_few_requests() -> None:
    world = World([4], kv=2, dim=32, qo=4)
    scratch = world.backend(StoreFirstBackend).scratch
    assert len(scratch.done) >= max(bs * 2 * splits_of(bs, 2)[0] for bs in range(1, 33))


def test_the_fused_model_verifies_drafts(few_programs: None) -> None:
    check_drafts_of_model(small_model("qwen3", num_hidden_layers=1, **FEW_HEADS))
