"""Batch invariance: a request gets the same bits alone, in any batch, however it is computed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.attention.factory import create_backend
from minisgl.attention.invariant_torch import InvariantTorchBackend
from minisgl.attention.metadata import AttentionBackend, DecodeBuffers, build_metadata
from minisgl.config.engine import SchedulerConfig, resolve
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Phase, SamplingParams
from minisgl.layers.invariant import OrderedSum, block_linear, linear, silu
from minisgl.llm import LLM
from minisgl.models.registry import build_model
from minisgl.parallel.comm import SingleRank
from tests.attention_worlds import Shape, World, assert_close, dense_oracle, make_world
from tests.checkpoints import make_checkpoint
from tests.fakes import record_on_a_cpu
from tests.turns import in_turns

GEN = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GEN).to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def changes(function: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[int, int]]:
    """Slices (start, rows) of x in which a row gets other bits than among all rows."""
    whole = function(x)
    places = [(s, m) for s in (0, 1, 5) for m in [*range(1, 36), 63, 64, 65] if s + m <= len(x)]
    return [(s, m) for s, m in places if not torch.equal(function(x[s : s + m]), whole[s : s + m])]


# ----------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), in_turns(2, [(320, 64), (100, 33), (1000, 333), (256, 640)])
)
def test_rows_of_a_product_do_not_depend_on_the_others(
    outputs: int, inputs: int, dtype: torch.dtype, count: int
) -> None:
    weight, bias = normal(outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    x = normal(70, inputs, dtype=dtype)
    with threads(count):
        assert changes(lambda x: block_linear(x, weight, bias), x) == []
        assert torch.equal(linear(x, weight), block_linear(x, weight))
        rtol, atol = (1e-4, 1e-4) if dtype is torch.float32 else (3e-2, 3e-1)
        torch.testing.assert_close(
            block_linear(x, weight, bias), F.linear(x, weight, bias), rtol=rtol, atol=atol
        )


def test_the_library_s_own_product_depends_on_them() -> None:
    """Otherwise the test above proves nothing; where this fails, blocks are not needed."""
    weight, x = normal(1280, 256), normal(70, 256)
    assert changes(lambda x: F.linear(x, weight), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_does_not_depend_on_the_rows_and_is_silu(dtype: torch.dtype) -> None:
    x = normal(128, 2 * 1000, dtype=dtype) * 4
    with threads(2):  # then a loop ends in the midst of a row
        assert changes(lambda x: silu(x.chunk(2, -1)[0]), x) == []
    torch.testing.assert_close(silu(x), F.silu(x), rtol=1e-2, atol=1e-6)
    ends = torch.tensor([-1e4, -100.0, 0.0, 100.0], dtype=dtype)
    assert silu(ends).tolist() == F.silu(ends).tolist()


def test_norms_and_log_softmax_do_not_depend_on_the_rows() -> None:
    """They are PyTorch's, and the engine relies on them."""
    for size in (64, 256, 1000, 1792):
        x = normal(128, size)
        for count in (1, 2):
            with threads(count):
                assert changes(lambda x: F.rms_norm(x, x.shape[-1:]), x) == []
                assert changes(lambda x: x.log_softmax(-1), x) == []


def test_ranks_are_added_in_their_order() -> None:
    parts = normal(5, 7, 64)
    comm = SimpleNamespace(rank=3, size=5, all_gather=lambda x, dim: parts)
    group = OrderedSum(comm)  # type: ignore[arg-type]
    want = parts[0]
    for part in parts[1:]:
        want = want + part
    assert torch.equal(group.all_reduce(parts[3]), want)
    assert not torch.equal(want, sum(reversed(parts)))  # type: ignore[arg-type]
    assert (group.rank, group.size) == (3, 5)
    alone = OrderedSum(SingleRank())
    assert torch.equal(alone.all_reduce(parts[0]), parts[0])


def test_a_model_is_built_from_them() -> None:
    config = ModelConfig.from_hf(KNOWN_CONFIGS["Qwen/Qwen3-0.6B"])
    model = build_model(config, SingleRank(), dtype=torch.float32, deterministic=True)
    layer: Any = model.model.layers[0]  # type: ignore[union-attr, index]
    multiply = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj)
    assert all(part.linear is linear for part in (*multiply, model.lm_head))
    assert layer.mlp.silu is silu and isinstance(layer.mlp.down_proj.comm, OrderedSum)
    plain: Any = build_model(config, SingleRank(), dtype=torch.float32)
    assert plain.lm_head.linear is F.linear and isinstance(plain.lm_head.comm, SingleRank)


# -------------------------------------------------------------------------------- attention


def backend_of(world: World, name: str) -> AttentionBackend:
    heads = world.shape.kv_heads * world.shape.group
    return create_backend(
        name, pool=world.pool, tables=world.tables, num_qo_heads=heads, deterministic=True
    )


DECODE = Shape(lens=((6, 1), (0, 1), (129, 1)), page_size=4)
CHUNKS = Shape(lens=((4, 9), (0, 1), (62, 70)), kv_heads=1, group=3, page_size=16)


@pytest.mark.parametrize("shape", [DECODE, CHUNKS])
def test_attention_is_dense(shape: Shape) -> None:
    world = make_world(shape)
    plan = backend_of(world, "torch").plan(world.meta, world.out_loc)
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world), 1e-4)


def pieces(world: World, name: str, cuts: list[int], beside: int, layer: int = 1) -> Tensor:
    """Attention of request 0, computed in chunks that end at `cuts`, each beside other requests."""
    backend, found, lens = backend_of(world, name), [], world.meta.seq_lens
    world.pool.store_kv(world.k, world.v, world.out_loc, layer)
    starts = world.meta.qo_indptr
    for start, stop in zip([0, *cuts[:-1]], cuts):
        batch = [(0, stop - start, stop), *((i, 1, lens[i]) for i in range(1, beside + 1))]
        order = [*batch[1:], batch[0]]  # request 0 is the last
        rows, new, ends = (np.array(column) for column in zip(*order))
        phase = Phase.DECODE if stop - start == 1 else Phase.PREFILL
        meta = build_metadata(
            phase, world.meta.table_idx[rows], new, ends, world.tables.page_table,
            world.shape.page_size,
        )  # fmt: skip
        last = [starts[i + 1] - 1 for i in range(1, beside + 1)]
        index = torch.tensor([*last, *range(start, stop)])
        q, k, v, out_loc = (part[index] for part in (world.q, world.k, world.v, world.out_loc))
        plan = backend.plan(meta, out_loc)
        found.append(plan.run(q, k, v, layer)[beside:])
    return torch.cat(found)


LONG = Shape(lens=((0, 140), (0, 9), (0, 75), (0, 3)), kv_heads=2, group=2, page_size=4)


@pytest.mark.parametrize("shape", [LONG, Shape(lens=((0, 70), (0, 130)), kv_heads=1, group=3)])
def test_attention_of_a_position_does_not_depend_on_the_rest(shape: Shape) -> None:
    world, length = make_world(shape), shape.lens[0][1]
    whole = pieces(world, "torch", [length], 0)
    for step, beside in ((1, 0), (1, len(shape.lens) - 1), (7, 1), (64, 0)):
        cuts = [*range(step, length, step), length]
        assert torch.equal(pieces(world, "torch", cuts, beside), whole), (step, beside)


def test_recorded_attention_has_the_bits_of_eager() -> None:
    world = make_world(Shape(lens=((133, 1), (4, 1), (0, 1)), page_size=4))
    backend = backend_of(world, "torch")
    eager = backend.plan(world.meta, world.out_loc).run(world.q, world.k, world.v, 1)
    positions = torch.tensor(world.meta.seq_lens - 1, dtype=torch.int64)
    rows = torch.tensor(world.meta.table_idx, dtype=torch.int64)
    recorded = backend.graph_plan(3, DecodeBuffers(rows, positions, world.out_loc))
    assert torch.equal(recorded.run(world.q, world.k, world.v, 1), eager)


def test_slots_behind_a_request_s_end_are_not_read() -> None:
    world = make_world(Shape(lens=((5, 3),), page_size=4))
    width = world.tables.device_page_table.shape[1]
    world.tables.device_page_table[:, 8:width] = -(2**30)  # a row may name anything there
    plan = backend_of(world, "torch").plan(world.meta, world.out_loc)
    assert_close(plan.run(world.q, world.k, world.v, 1), dense_oracle(world), 1e-4)


# ---------------------------------------------------------------------- Triton's interpreter


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tl.dot` that treats all rows alike, as a tensor core does; NumPy's does not."""
    from triton.runtime import interpreter

    def alike(a: Any, b: Any, dtype: Any) -> Any:
        out = np.zeros((a.shape[0], b.shape[1]), dtype)
        for column, row in zip(a.T, b):
            out += column[:, None] * row
        return out

    fake = SimpleNamespace(**{**vars(np), "matmul": alike})
    monkeypatch.setattr(interpreter, "np", fake)


def test_tiled_gemm(rows_alike: None) -> None:
    from minisgl.kernels.tiled_linear import tiled_linear

    weight, bias, x = normal(48, 80), normal(48), normal(100, 80)
    whole = tiled_linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for start, rows in ((0, 1), (7, 1), (3, 16), (7, 64), (1, 65)):
        got = tiled_linear(x[start : start + rows], weight, bias)
        assert torch.equal(got, whole[start : start + rows])


def test_tiles_follow_the_weight_alone() -> None:
    from minisgl.kernels.tiled_linear import fixed_tiling

    tiles = fixed_tiling(1792, 272)
    assert (tiles.bn, tiles.bk, tiles.splits) == (64, 16, 1)
    for n, k in ((100, 64), (64, 100), (64, 48)):
        with pytest.raises(ValueError, match=f"deterministic: a weight's sizes .* got {n}, {k}"):
            fixed_tiling(n, k)


def test_triton_attention_does_not_depend_on_the_rest(rows_alike: None) -> None:
    shape = Shape(lens=((0, 140), (0, 75)), kv_heads=1, group=2, page_size=4, head_dim=16)
    world = make_world(shape)
    whole = pieces(world, "triton", [140], 0)
    assert_close(whole, dense_oracle(world)[:140], 1e-4)
    for cuts, beside in (([133, 140], 1), ([63, 64, 65, 139, 140], 0), ([139, 140], 1)):
        assert torch.equal(pieces(world, "triton", cuts, beside), whole)
    backend: Any = backend_of(world, "triton")
    assert backend.plan(world.meta, world.out_loc).splits == 1
    assert {backend.query_rows(rows) for rows in (1, 50, 1000)} == {64}


# ----------------------------------------------------------------------------------- engine

VOCAB, WINDOW = 64, 200


@cache
def folder(arch: str) -> Path:
    """A small random model whose layers are wide enough for products to differ."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return make_checkpoint(
        tempfile.mkdtemp(prefix="minisgl-"), arch, seed=3, vocab_size=VOCAB,
        max_position_embeddings=WINDOW, **sizes,
    )  # fmt: skip


Bits = list[tuple[int, float]]


def bits(answer: dict[str, Any]) -> Bits:
    return [(entry["token_id"], entry["logprob"]) for entry in answer["logprobs"]]


def start(arch: str | None, deterministic: bool = True, **fields: Any) -> LLM:
    fields = {"num_pages": 400, "max_running_req": 8, **fields}
    model = None if arch is None else folder(arch)
    return LLM(model, device="cpu", deterministic=deterministic, **fields)


ENGINES: dict[str, LLM] = {}


@pytest.fixture(autouse=True, scope="module")
def stop_engines() -> Iterator[None]:
    """Shut down what `lone_engine` started."""
    yield
    while ENGINES:
        ENGINES.popitem()[1].shutdown()


def lone_engine(arch: str) -> LLM:
    """Serves one request at a time, eager, without a cache: what all others must equal."""
    if arch not in ENGINES:
        ENGINES[arch] = start(arch, cache_type="naive")
    return ENGINES[arch]


WAYS = st.fixed_dictionaries(
    {
        "max_extend_tokens": st.sampled_from([5, 23, 64, 1024]),
        "page_size": st.sampled_from([1, 4, 16]),
        "overlap": st.booleans(),
        "cache_type": st.sampled_from(["radix", "naive"]),
        "cuda_graph_bs": st.sampled_from([[], [1, 2, 4], [3, 8]]),
    }
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 100),  # tokens that it shares with others
        st.integers(1, 60),  # tokens of its own
        st.integers(1, 12),  # tokens of the answer
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


def as_requests(
    shapes: list[tuple[int, int, int, float]],
) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(len(shapes))
    stem = rng.integers(0, VOCAB, 100).tolist()
    prompts = [stem[:shared] + rng.integers(0, VOCAB, own).tolist() for shared, own, *_ in shapes]
    params = [
        SamplingParams(max_tokens=answer, temperature=heat, seed=i, logprobs=1, ignore_eos=True)
        for i, (*_, answer, heat) in enumerate(shapes)
    ]
    return prompts, params


@pytest.mark.parametrize("arch", in_turns(2, ["llama", "qwen2"]))
@settings(max_examples=5)
@given(shapes=REQUESTS, way=WAYS)
def test_any_way_to_serve_gives_the_same_bits(
    arch: str, shapes: list[tuple[int, int, int, float]], way: dict[str, Any]
) -> None:
    prompts, params = as_requests(shapes)
    want = [bits(lone_engine(arch).generate([p], [s])[0]) for p, s in zip(prompts, params)]
    with pytest.MonkeyPatch.context() as patch:
        record_on_a_cpu(patch)
        with start(arch, **way) as llm:
            assert [bits(answer) for answer in llm.generate(prompts, params)] == want
            again = llm.generate(prompts[::-1], params[::-1])[
                ::-1
            ]  # from the cache, if there is one
            assert [bits(answer) for answer in again] == want
            recorded = llm.scheduler.engine.runners.decode
            assert (recorded is None) == (not way["cuda_graph_bs"])


def fixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    return as_requests([(40, 60, 24, 0.0), (0, 3, 24, 1.0), (40, 30, 24, 1.0), (90, 7, 24, 0.0)])


@pytest.mark.parametrize("arch", in_turns(2, ["qwen3", None]))
def test_a_retracted_request_goes_on_with_the_same_bits(arch: str | None) -> None:
    prompts, params = fixed_requests()
    with start(arch, cache_type="naive") as llm:
        want = [bits(llm.generate([p], [s])[0]) for p, s in zip(prompts, params)]
    tight = {"num_pages": 58, "page_size": 4, "reserve_tokens": 1, "max_extend_tokens": 50}
    with start(arch, **tight) as llm:
        assert [bits(answer) for answer in llm.generate(prompts, params)] == want
        assert llm.scheduler.retractions > 0


@pytest.mark.parametrize("dtype", in_turns(2, ["float32", "bfloat16"]))
def test_bits_differ_without_the_flag_and_not_with_it(dtype: str) -> None:
    prompts, params = fixed_requests()
    differ = {}
    for flag in (False, True):
        with start("llama", flag, dtype=dtype, cache_type="naive") as llm:
            alone = [bits(llm.generate([p], [s])[0]) for p, s in zip(prompts, params)]
            differ[flag] = [bits(a) for a in llm.generate(prompts, params)] != alone
    assert differ == {False: True, True: False}


# ----------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda:0", "attention_backend": "fi"}, "attention_backend: must be triton"),
        ({"device": "cuda:0", "attention_backend": "torch"}, "attention_backend: must be triton"),
        ({"device": "cuda:0", "attention_backend": "fi,fused"}, "got 'fi,fused'"),
        ({"device": "cuda:0", "attention_backend": "triton,fused"}, "got 'triton,fused'"),
        ({"device": "cpu", "attention_backend": "triton"}, "attention_backend: must be torch"),
        ({"device": "cpu", "attention_backend": "torch,triton"}, "got 'torch,triton'"),
        ({"device": "cuda:0", "kernels": "triton"}, "kernels: must be auto or torch"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(fields: dict[str, str], message: str) -> None:
    model = ModelConfig.from_hf(KNOWN_CONFIGS["Qwen/Qwen3-0.6B"])
    with pytest.raises(ValueError, match=message):
        resolve(SchedulerConfig(deterministic=True, **fields), model)  # type: ignore[arg-type]


def test_auto_takes_what_can_be() -> None:
    model = ModelConfig.from_hf(KNOWN_CONFIGS["Qwen/Qwen3-0.6B"])
    for device, backend in (("cpu", "torch"), ("cuda:0", "triton")):
        settled = resolve(SchedulerConfig(deterministic=True, device=device), model)
        assert (settled.attention_backend, settled.kernels) == (backend, "torch")
        assert resolve(settled, model) == settled


def test_the_factory_refuses_backends_that_are_not_invariant() -> None:
    world = make_world(DECODE)
    assert isinstance(backend_of(world, "torch"), InvariantTorchBackend)
    for name in ("fi", "triton,torch"):
        with pytest.raises(ValueError, match="attention_backend: must be torch or triton"):
            backend_of(world, name)
