"""Fused kernels against plain PyTorch, in Triton's interpreter; tests/gpu has them on a GPU."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
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
import triton
import triton.language as tl

from minisgl.attention import fused_backend
from minisgl.attention.fused_backend import FusedBackend, VerifyBackend
from minisgl.attention.torch_backend import TorchBackend
from minisgl.kernels import linear as kernels
from minisgl.kernels.decode_attention import (
    SHAPES,
    SMALL,
    choose_shape,
    max_splits,
    split_kv,
    tile_shapes,
)
from minisgl.kernels.device import H200, DeviceLimits
from minisgl.kernels.norm import DeferredNorm, add_norm
from minisgl.models.fused import FusedLayer, FusedModel
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
def test_row_linear_applies_the_factor_of_a_norm(gated: bool, bias: bool) -> None:
    n, k = 32, 1024
    x, w, norm = normal(1, k) / 100, normal(2 * n if gated else n, k, seed=1), normal(k, seed=2)
    squares = torch.stack([part.square().sum() for part in x.split(400, 1)])  # by three programs
    b = normal(n, seed=3) if bias and not gated else None
    row = DeferredNorm(x, x * norm, squares)
    got = kernels.gemv(row, w, eps=1e-5, bias=b, gated=gated)
    y = rms(x, norm, 1e-5) @ w.T
    want = torch.nn.functional.silu(y[:, :n]) * y[:, n:] if gated else y
    assert got is not None
    close(got, want if b is None else want + b, 1e-5)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_deferred_to_the_product_behind_it(dtype: torch.dtype, size: float) -> None:
    """Its row may exceed what float16 can hold."""
    n, k = 512, 1024
    x, w, norm = normal(1, k) * size, normal(n, k, seed=1), normal(n, seed=2) * size
    residual, last = normal(1, n, seed=3) * size, normal(16, n, seed=4)
    x, w, norm, residual, last = (t.to(dtype) for t in (x, w, norm, residual, last))
    made = kernels.gemv_add_norm(x, w, residual, norm)
    assert made is not None and made.squares is not None
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    total = residual.double() + x.double() @ w.double().T
    close(made.total, total, limit)
    close(made.row, made.total.double() * norm.double(), limit)
    close(made.squares.sum(), made.total.double().square().sum(), 1e-5)
    got = kernels.gemv(made, last, eps=1e-5)
    assert got is not None and got.dtype == dtype
    close(got, rms(total, norm.double(), 1e-5) @ last.double().T, limit)


def test_row_linear_declines_odd_sizes() -> None:
    assert kernels.gemv(normal(1, 96), normal(16, 96)) is None
    assert kernels.gemv(normal(2, 1024), normal(16, 1024)) is None


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


def test_every_part_has_its_own_place_in_scratch_memory() -> None:
    """Here programs run one by one; on a GPU one would overwrite what another has left."""
    lens, kv = [400, 90, 300], 2
    world = World(lens, kv=kv, dim=32, qo=kv, page_size=16)
    backend = world.backend(FusedBackend)
    backend.scratch.stat.fill_(float("nan"))
    plan = backend.plan(world.meta(), world.places()[1])
    plan.run(*(world.random(3, kv, 32, seed=i) for i in range(3)), 0)
    found = shares(lens, 21, 64)
    parts = sum(split < count for _, split, count, *_ in found if count > 1)
    assert parts == 7 and int((~backend.scratch.stat.isnan()).sum()) == parts * kv * 2


@settings(max_examples=5, deadline=None)
@given(
    lens=st.lists(st.integers(1, 20) | st.integers(60, 400), min_size=2, max_size=5),
    heads=st.sampled_from([(2, 2), (5, 1)]),
)
def test_decode_of_ragged_lengths(lens: list[int], heads: tuple[int, int]) -> None:
    """Some are cut, some are not."""
    check_decode(lens, qo=heads[0], kv=heads[1], dim=32, page_size=16)


def test_what_was_never_stored_does_not_count() -> None:
    """Not even as zero times something: memory may hold NaN."""
    lens = [1, 2, 5, 70, 200]
    world = World(lens, kv=1, dim=32, qo=2, page_size=16)
    q, k, v = (world.random(5, h, 32, seed=i) for i, h in enumerate((2, 1, 1)))
    slots, out_loc = world.places(lens)[1], world.places()[1]
    old = slots[~torch.isin(slots, out_loc)]
    for layer in (world.pool.k_cache(0), world.pool.v_cache(0)):
        flat = layer.view(-1, 1, 32)
        kept = flat[old]
        flat.fill_(float("nan"))
        flat[old] = kept
    before = world.pool.buffer.clone()
    got = world.backend(FusedBackend).plan(world.meta(), out_loc).run(q, k, v, 0)
    world.pool.buffer.copy_(before)
    close(got, world.backend(TorchBackend).plan(world.meta(), out_loc).run(q, k, v, 0), 2e-5)


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


@triton.jit
def shares_kernel(
    positions_ptr, batch_size, parts, out_ptr, BATCH: tl.constexpr, TILE: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Return the part of each thread block by `split_kv`, [programs, 5]."""
    program = tl.program_id(0)
    request, split, count, part, length = split_kv(
        positions_ptr, batch_size, parts, program, BATCH, TILE
    )
    place = out_ptr + program * 5
    tl.store(place, request)
    tl.store(place + 1, split)
    tl.store(place + 2, count)
    tl.store(place + 3, part)
    tl.store(place + 4, length)


def shares(lens: list[int], parts: int, tile: int) -> list[list[int]]:
    """Return the work of each program of the grid."""
    found = torch.zeros(len(lens) + parts - 1, 5, dtype=torch.int32)
    batch = 1 if len(lens) == 1 else max(32, triton.next_power_of_2(len(lens)))
    shares_kernel[(len(found),)](
        torch.tensor(lens) - 1, len(lens), parts, found, BATCH=batch, TILE=tile
    )
    rows: list[list[int]] = found.tolist()
    return rows


@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    parts=st.integers(1, 9),
    tile=st.sampled_from([16, 64]),
)
def test_parts_hold_every_key_once_and_none_is_long(lens: list[int], parts: int, tile: int) -> None:
    share = max(tile, triton.cdiv(sum(lens), parts))
    keys: dict[int, list[int]] = {}
    for request, split, count, part, length in shares(lens, parts, tile):
        if split < count:
            assert length == lens[request] and count == triton.cdiv(length, part)
            assert part % tile == 0 and part < 2 * share + tile
            keys.setdefault(request, []).append(split)
    for request, length in enumerate(lens):
        assert sorted(keys[request]) == list(range(len(keys[request])))
        most = triton.cdiv(length, share) if len(lens) == 1 else max(1, length // share)
        assert len(keys[request]) <= most, "no more than its share of the parts"


@pytest.mark.parametrize("size", [1, 2, 5, 16, 24, 32, 33])
def test_requests_of_one_length_have_no_more_parts_than_run_at_once(size: int) -> None:
    """24 of them, cut in two, would be 48 parts in the place of 33, and a second wave."""
    used = sum(split < count for _, split, count, *_ in shares([640] * size, 33, 64))
    assert used <= 33 and used % size == 0


def test_parts_of_a_short_request_are_single_tiles() -> None:
    found = [part for _, split, count, part, _ in shares([650], 49, 64) if split < count]
    assert found == [64] * 11


def test_one_long_request_among_short_ones_is_cut() -> None:
    found = shares([4000] + [64] * 7, 33, 64)
    counts = Counter(request for request, split, count, *_ in found if split < count)
    assert counts[0] > 20 and all(counts[i] == 1 for i in range(1, 8))


def test_tiles_fill_one_wave_if_they_can() -> None:
    sizes = 1, 2, 4, *range(8, 408, 8)
    of = [shape for shape, _ in SHAPES]
    ranges = ((1, 4, SMALL[0], 49), (8, 32, of[0], 33), (40, 48, of[1], 49), (56, 64, of[2], 66))
    for first, last, shape, parts in (*ranges, (72, 400, of[3], 99)):
        found = {choose_shape(size, 8) for size in sizes if first <= size <= last}
        assert found == {(shape, parts)}, (first, last)
    assert choose_shape(64, 8, itemsize=1) == (of[3], 165), "half the bytes: more programs on an SM"
    for size, kv, itemsize in itertools.product(sizes, (1, 5, 8, 500), (1, 2)):
        assert choose_shape(size, kv, itemsize=itemsize)[1] <= max_splits(kv)


def test_decode_is_cut_for_the_card_it_runs_on() -> None:
    at_once = {card: [count for _, count in tile_shapes(limits)] for card, limits in CARDS.items()}
    assert at_once == {
        "A100": [216, 216, 432, 432],
        "L4": [58, 58, 116, 116],
        "H200": [264, 396, 528, 792],
    }
    small = DeviceLimits(40, 65_536, 75)  # too little for the largest tiles
    assert [shape for shape, _ in tile_shapes(small)] == [shape for shape, _ in SHAPES[2:]]
    assert choose_shape(8, 8, CARDS["L4"]) == (SHAPES[2][0], 14) and max_splits(5000) == 1


@pytest.mark.parametrize("arch", in_turns(2, ["llama", "qwen3", "qwen2"]))
def test_fused_model_equals_the_plain_one(arch: str, few_programs: None) -> None:
    layers = 2 if arch == "qwen3" else 1  # one architecture shows that layers follow each other
    model = small_model(arch, num_hidden_layers=layers, rms_norm_eps=0.1, **FEW_HEADS)
    check_model(model, [9], None)
    check_model(model, [5, 20], None)
    check_model(model, [2, 3, 6], [2, 1, 3])


@pytest.mark.parametrize("width", [1024, 160])  # a row has no tiles for 160
def test_a_layer_without_experts_between_two_with(few_programs: None, width: int) -> None:
    sizes = {"moe_intermediate_size": 64, "intermediate_size": width, "num_hidden_layers": 3}
    model = small_model("qwen3_moe", mlp_only_layers=[1], **sizes, **FEW_HEADS)
    check_model(model, [9], None)


@pytest.mark.parametrize("odd", [{"intermediate_size": 1120}, {"hidden_size": 96}])
def test_a_row_without_a_kernel_launches_nothing_in_vain(
    odd: dict[str, int], few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes decide at the start, also where only the last product of a layer has no kernel."""
    monkeypatch.setattr(FusedLayer, "forward_row", None)
    model = small_model("qwen3", **{**FEW_HEADS, **odd})
    assert not FusedModel(model).supports_gemv
    check_model(model, [9], None)


def test_odd_sizes_fall_back() -> None:
    model = small_model("qwen3", hidden_size=96, intermediate_size=160, head_dim=32)
    check_model(model, [9], None)
    check_model(model, [9, 4], [3, 4])


BEFORE_THE_LAYERS = {  # what a kernel may read before it waits: no kernel of the chain writes it
    "row_kernel": {"w_ptr", "norm_ptr"},
    "rows_kernel": {"w_ptr"},
    "silu_mul_kernel": set(),
    "add_norm_kernel": {"norm_ptr"},
    "all_reduce_kernel": {"addresses_ptr", "norm_ptr"},
    "rotate_store_kernel": {"scales_ptr"},
    "quantize_rows_kernel": set(),
    "decode_kernel": {  # keys and values of this step's tokens apart
        "positions_ptr",
        "rows_ptr",
        "table_ptr",
        "page_table_ptr",
        "k_cache_ptr",
        "v_cache_ptr",
        "scales_ptr",
    },
    "align_kernel": set(),
    "route_row_kernel": {"w_ptr"},
    "gate_up_row_kernel": set(),
}
BEFORE_THE_LAST = {  # what is complete when the kernel before began with `wait_then_launch`
    "expert_kernel": {"rows_ptr", "experts_ptr", "pairs_ptr", "w_ptr"},
    "down_row_kernel": {"experts_ptr", "w_ptr", "norm_ptr", "residual_ptr"},
}


WAITS = ("gdc_wait", "wait_then_launch")
READERS = ("tl.load", "prefetch", "load_angles", "load_tile", "split_kv", "chosen_experts")


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


def conditions_of_waits(kernel: ast.FunctionDef) -> set[str]:
    """Return the conditions under which a kernel waits."""
    waits = [f"{name}()" for name in WAITS]
    branches = [node for node in ast.walk(kernel) if isinstance(node, ast.If)]
    waiting = (b for b in branches if any(ast.unparse(line) in waits for line in b.body))
    return {ast.unparse(branch.test) for branch in waiting}


def pointers_in(node: ast.AST) -> set[str]:
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {name for name in names if name.endswith("_ptr")}


def test_a_kernel_touches_before_its_wait_only_what_no_kernel_of_the_chain_writes() -> None:
    harmless = {"range", "gdc_launch_dependents", "max", "min", "wait_then_launch"}
    harmless |= {"triton.next_power_of_2"}
    expected = BEFORE_THE_LAYERS | BEFORE_THE_LAST
    early = {name: node for name, node in kernel_sources().items() if "PDL" in ast.unparse(node)}
    assert early.keys() == expected.keys()
    for name, node in early.items():
        seen: set[str] = set()
        for call in calls_until_wait(node):
            function = ast.unparse(call.func)
            if function in READERS:
                seen |= pointers_in(call)
            else:
                writes = function.startswith(("tl.store", "tl.atomic"))
                known = function.startswith("tl.") or function.endswith(".to")
                assert not writes and (known or function in harmless), f"{name}: {function}"
        assert seen == expected[name], name
        always = {"GATED and PDL", "PDL and (not GATED)"} if name == "expert_kernel" else {"PDL"}
        assert conditions_of_waits(node) == always, name


def test_who_is_followed_by_an_early_reader_launches_it_after_its_own_wait() -> None:
    """Else the reader could begin while the kernel before both still writes."""
    for name in ("expert_kernel", "gate_up_row_kernel"):
        body = ast.unparse(kernel_sources()[name])
        calls = "wait_then_launch()", "tl.load(", "tl.store(", "chosen_experts("
        first = min(body.index(call) for call in calls if call in body)
        assert body[first:].startswith("wait_then_launch()"), name
    text = (Path(kernels.__file__).parent / "moe.py").read_text()
    helper = text[text.index("def wait_then_launch") :]
    assert 0 < helper.index("gdc_wait()") < helper.index("gdc_launch_dependents()")


def test_rows_of_one_request_see_each_other_where_all_are_stored_first() -> None:
    """One launch that stores and attends at once would read unwritten slots."""
    check_drafts(VerifyBackend, qo=2, kv=1, dim=32)
    with pytest.raises(AssertionError):
        check_drafts(FusedBackend, qo=2, kv=1, dim=32)


def test_scratch_suits_many_drafts_of_few_requests() -> None:
    world = World([4], kv=2, dim=32, qo=4)
    scratch = world.backend(VerifyBackend).scratch
    assert len(scratch.done) >= 2 * (32 + max_splits(2))


def test_only_rows_of_one_request_may_be_in_the_cache_since_this_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys of a request's other rows are loaded behind the launch that stores them."""
    for backend, want in ((FusedBackend, False), (VerifyBackend, True)):
        seen: list[Any] = []
        monkeypatch.setattr(
            fused_backend, "decode_attention", lambda *of, seen=seen, **how: seen.append(how)
        )
        world = World([4], kv=1, dim=32, qo=1)
        plan = world.backend(backend).plan(world.meta(), world.places()[1])
        plan.attend(*(world.random(1, 1, 32) for _ in range(3)), 0)
        assert [how["drafts"] for how in seen] == [want]


def test_the_fused_model_verifies_drafts(few_programs: None) -> None:
    check_drafts_of_model(small_model("qwen3", num_hidden_layers=1, **FEW_HEADS))
