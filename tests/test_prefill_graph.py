"""Captured prefill: sizes, buffers, padding, captured batches, and equality with eager steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import RecordingGraph

from minisgl.config.engine import EngineConfig, SchedulerConfig, TPInfo
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.engine import Engine, build_engine
from minisgl.engine.prefill_graph import (
    MAX_REQUESTS,
    PrefillRunner,
    num_tiles,
    num_words,
    prefill_plans,
    prefill_sizes,
    prefill_tokens,
    view_prefill,
)
from tests.attention_worlds import Shape, make_world
from tests.checkpoints import make_checkpoint
from tests.dense import dense_batch
from tests.test_engine import WARM, WAYS
from tests.turns import in_turns

# ------------------------------------------------------------------------------ what is recorded


def test_sizes() -> None:
    assert prefill_sizes(0) == ()
    assert prefill_sizes(50) == (50,)
    assert prefill_sizes(300) == (64, 128, 256, 300)
    assert prefill_sizes(2048) == (64, 128, 256, 512, 768, 1024, 1536, 2048)


def known(name: str) -> ModelConfig:
    return ModelConfig.from_hf(KNOWN_CONFIGS[name])


def test_as_many_tokens_as_the_host_is_slower_than_the_gpu() -> None:
    gpu = EngineConfig(device="cuda:0", prefill_graph_max_tokens=None)
    small, large = known("Qwen/Qwen3-0.6B"), known("Qwen/Qwen3-8B")
    assert prefill_tokens(gpu, small) == 4096
    assert prefill_tokens(gpu, large) == 512
    for rank in (TPInfo(0, 2), TPInfo(1, 2)):
        assert prefill_tokens(replace(gpu, tp=rank), large) == 1024
        assert prefill_tokens(replace(gpu, tp=rank, device="cpu"), large) == 0
        asked = replace(gpu, tp=rank, prefill_graph_max_tokens=300)
        assert prefill_tokens(asked, large) == 300
    assert prefill_tokens(replace(gpu, device="cpu"), small) == 0
    assert prefill_tokens(replace(gpu, prefill_graph_max_tokens=300), large) == 300
    assert prefill_tokens(replace(gpu, deterministic=True), small) == 0
    budget = SchedulerConfig(device="cuda:0", prefill_graph_max_tokens=None, max_extend_tokens=1000)
    assert prefill_tokens(budget, small) == 1000


def test_backends_that_can_be_recorded() -> None:
    model = known("Qwen/Qwen3-0.6B")
    for name, device in (("torch", "cuda:0"), ("triton,fused", "cpu")):
        config = EngineConfig(device=device, attention_backend=name)
        assert prefill_plans(config, model, None, None) is None  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the buffers


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([16, 64, 128]))
def test_buffers_share_no_word(size: int, group: int, rows: int) -> None:
    tiles = num_tiles(size, group, rows)
    memory = torch.zeros(num_words(size, tiles), dtype=torch.int64)
    static, of_attention = view_prefill(memory, size, tiles)
    assert [len(part) for part in (*static[:5], static.temperature, static.last_idx)] == [
        size, MAX_REQUESTS, size, size, size, MAX_REQUESTS, MAX_REQUESTS
    ]  # fmt: skip
    parts: list[torch.Tensor] = [part for part in (*static, *of_attention) if part is not None]
    for part in parts:
        assert not part.any(), "another part lies here, too"
        part.fill_(1)
    assert len(parts) == 13 and len(memory) % size == 0


@given(st.lists(st.integers(1, 90), min_size=1, max_size=MAX_REQUESTS), st.integers(1, 8))
def test_there_is_room_for_all_tiles(lengths: list[int], group: int) -> None:
    for rows in (16, 64, 128):
        size = next(n for n in prefill_sizes(2048) if n >= sum(lengths))
        assert sum(-(-n * group // rows) for n in lengths) <= num_tiles(size, group, rows)


# ------------------------------------------------------------------------------ an engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("prefill"), "qwen3", seed=1, vocab_size=64, hidden_size=32,
        intermediate_size=48, max_position_embeddings=128,
    )  # fmt: skip


def make(folder: Path, most: int, **fields: Any) -> Engine:
    how: dict[str, Any] = {"page_size": 4, "num_pages": 160, "max_running_req": MAX_REQUESTS + 4}
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        prefill_graph_max_tokens=most,
        cuda_graph_bs=(1,),
        **how | fields,
    )
    return build_engine(config, progress=False, new_graph=RecordingGraph)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Engine, Engine]:
    """An engine that records prefill of 8, 24 and 40 tokens, and one that does not."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {0: (), 40: (8, 24, 40)}
        patch.setattr("minisgl.engine.prefill_graph.prefill_sizes", sizes.__getitem__)
        return make(folder, 40), make(folder, 0)


def runner_of(engine: Engine) -> PrefillRunner:
    assert engine.runners.prefill is not None
    return engine.runners.prefill


def admit(
    engine: Engine, texts: Sequence[Sequence[int]], ways: Sequence[SamplingParams] = ()
) -> list[Req]:
    """Requests with 32 slots each, in the rows of an engine that has no others."""
    engine.tables._free_rows = list(range(engine.tables.num_rows))[::-1]
    reqs = []
    for index, text in enumerate(texts):
        way = ways[index] if ways else SamplingParams()
        req = Req(
            uid=index, input_ids=np.array(text, np.int32), max_new_tokens=8, sampling_params=way,
            table_idx=engine.tables.allocate(),
        )  # fmt: skip
        slots = np.arange(index * 32, index * 32 + 32, dtype=np.int32)
        engine.tables.write(req.table_idx, 0, slots)
        engine.tables.write_tokens(req.table_idx, 0, req.input_ids)
        reqs.append(req)
    return reqs


def prefill(engine: Engine, reqs: list[Req]) -> list[int]:
    """One prefill step; its tokens."""
    output = engine.step(engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL)))
    for req in reqs:
        req.advance()
    return output.wait().ids


def dense_next(engine: Engine, ids: Sequence[int]) -> int:
    with torch.inference_mode():
        return int(engine.model(dense_batch([ids], last_only=True))[0].argmax())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_recorded_equals_eager_and_dense(pair: tuple[Engine, Engine], seed: int) -> None:
    """Prompts in random chunks and company; some begin with pages of another one."""
    r = random.Random(seed)
    texts = [[r.randrange(64) for _ in range(r.randrange(1, 20))] for _ in range(r.randrange(1, 5))]
    twin = texts[0] + [r.randrange(64) for _ in range(5)]
    plan: list[list[tuple[int, int]]] = []  # steps of (request, end)
    done = [0] * len(texts)
    while any(d < len(t) for d, t in zip(done, texts)):
        step = []
        for i, text in enumerate(texts):
            if done[i] < len(text) and r.random() < 0.7:
                done[i] = r.randrange(done[i] + 1, len(text) + 1)
                step.append((i, done[i]))
        plan += [step] if step else []
    found: list[list[int]] = []
    for engine in pair:
        reqs, tokens = admit(engine, [*texts, twin]), []
        for step in plan:
            for i, end in step:
                reqs[i].schedule(end)
            tokens += prefill(engine, [reqs[i] for i, _ in step])
        shared = len(texts[0]) // 4 * 4
        if shared:  # a prefix hit: the slots are those of another request
            slots = engine.tables.page_table[reqs[0].table_idx, :shared].copy()
            engine.tables.write(reqs[-1].table_idx, 0, slots)
            reqs[-1].cached_len = shared
        tokens += prefill(engine, [reqs[-1]])
        found.append(tokens)
    ends = [i for step in plan for i, end in step if end == len(texts[i])]
    assert found[0] == found[1]
    assert found[0] == [dense_next(pair[0], texts[i]) for i in ends] + [dense_next(pair[0], twin)]


def test_tiles_of_padding_do_nothing(pair: tuple[Engine, Engine]) -> None:
    """They belong to the request behind the last, which has no tokens."""
    engine, runner = pair[0], runner_of(pair[0])
    fi = engine.prepare(Batch(reqs=admit(engine, [[1, 2, 3], [4]]), phase=Phase.PREFILL))
    assert fi.packed is not None
    _, tiles = runner.view(torch.from_numpy(fi.packed).view(-1), 8)
    assert tiles.qo_indptr.tolist() == [0, 3] + [4] * MAX_REQUESTS
    assert tiles.request.tolist() == [0, 1] + [MAX_REQUESTS] * (len(tiles.request) - 2)
    assert tiles.last.tolist() == [2, 0] + [-1] * (MAX_REQUESTS - 1)
    assert tiles.table_idx.tolist()[2:] == [engine.tables.dummy_row] * (MAX_REQUESTS - 1)


def test_it_was_replayed(pair: tuple[Engine, Engine]) -> None:
    runner = runner_of(pair[0])
    before = runner.replays
    prefill(pair[0], admit(pair[0], [[1, 2, 3]]))
    assert runner.replays == before + 1 and pair[1].runners.prefill is None


MIX = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9]]


def test_a_replay_is_its_step_bit_for_bit(pair: tuple[Engine, Engine]) -> None:
    engine, runner = pair[0], runner_of(pair[0])
    fi = engine.prepare(Batch(reqs=admit(engine, MIX), phase=Phase.PREFILL))
    assert fi.packed is not None
    ids = runner.replay(fi.packed)[:3].clone()
    places = torch.from_numpy(fi.out_loc.astype(np.int64))
    stored = engine.pool.buffer.flatten(2, 3)
    logits, written = runner.logits[:3].clone(), stored[:, :, places]
    stored[:, :, places] = 7.0
    step = runner.steps[24]
    with torch.inference_mode():
        runner.run_step(step.static, step.plan)
    assert torch.equal(runner.logits[:3], logits) and torch.equal(runner.next_ids[:3], ids)
    assert torch.equal(stored[:, :, places], written)
    assert torch.equal(logits.argmax(-1), ids)


def test_nothing_of_a_larger_step_is_left(pair: tuple[Engine, Engine]) -> None:
    """Not in the static buffers, nor where padding wrote: poison changes nothing."""
    engine, runner = pair[0], runner_of(pair[0])
    fi = engine.prepare(Batch(reqs=admit(engine, [[7, 8, 9]]), phase=Phase.PREFILL))
    assert fi.packed is not None
    wanted, sent = (runner.replay(fi.packed)[:1].clone(), runner.logits[:1].clone()), fi.packed + 0
    prefill(engine, admit(engine, [list(range(1, 20)), [5] * 20]))
    prefill(engine, admit(engine, [[5] * 5, [6] * 3]))
    fi = engine.prepare(Batch(reqs=admit(engine, [[7, 8, 9]]), phase=Phase.PREFILL))
    assert fi.packed is not None and np.array_equal(fi.packed, sent)
    runner.memory.fill_(10**6)
    engine.pool.buffer[:, :, engine.num_pages :] = 50.0
    runner.logits.fill_(torch.nan)
    assert torch.equal(runner.replay(fi.packed)[:1], wanted[0])
    assert torch.equal(runner.logits[:1], wanted[1])


def test_padding_writes_only_to_the_dummy_row_and_page(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    reqs = admit(engine, MIX)
    reqs[2].schedule(4)
    fi = engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL))
    engine.pool.buffer.fill_(3.0)
    tokens = engine.tables.token_pool.clone()
    ids = engine.step(fi).wait().ids
    untouched = np.ones(engine.num_pages * 4, bool)
    untouched[fi.out_loc] = False
    stored = engine.pool.buffer.flatten(2, 3)[:, :, : len(untouched)]
    assert (stored[:, :, torch.from_numpy(untouched)] == 3.0).all()
    tokens[fi.write_rows, fi.write_positions] = torch.tensor(ids)
    assert len(ids) == 2 and torch.equal(engine.tables.token_pool[:-1], tokens[:-1])
    assert torch.equal(engine.tables.token_pool[-1, 1:], tokens[-1, 1:])


@pytest.mark.parametrize("ways", [WAYS, [WARM] * 5, [SamplingParams()] * 5])
def test_draws_are_those_of_eager_steps(
    pair: tuple[Engine, Engine], ways: list[SamplingParams]
) -> None:
    """Rows with filters, penalties or log probabilities are sampled again from captured logits."""
    texts = [[3 * i + 1, *range(i)] for i in range(1, 6)]
    ways = [*ways[:4], replace(ways[4], repetition_penalty=1.5)]
    outs = []
    for engine in pair:
        reqs = admit(engine, texts, ways)
        out = engine.step(engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL))).wait()
        outs.append((out.ids, out.top_ids))
        for req, token in zip(reqs, out.ids):
            assert engine.tables.token_pool[req.table_idx, req.device_len] == token
    assert outs[0] == outs[1]


def test_who_is_computed_eagerly(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]

    def packed(texts: list[list[int]], phase: Phase = Phase.PREFILL, **way: Any) -> bool:
        reqs = admit(engine, texts, [SamplingParams(**way)] * len(texts))
        return engine.prepare(Batch(reqs=reqs, phase=phase)).packed is not None

    assert packed([[1] * 20, [2] * 20])
    assert not packed([[1] * 20, [2] * 21]), "more tokens than any size has"
    runner, crowd = runner_of(engine), admit(engine, [[1]] * (MAX_REQUESTS + 1))
    with mock.patch.object(runner, "bucket", lambda tokens: tokens):
        assert runner.size_for(Batch(reqs=crowd[1:], phase=Phase.PREFILL)) == MAX_REQUESTS
        assert runner.size_for(Batch(reqs=crowd, phase=Phase.PREFILL)) is None, "too many requests"
    assert not packed([[1, 2]], prompt_logprobs=1), "logits of all tokens are wanted"
    fi = engine.prepare(Batch(reqs=admit(engine, [[1], [2]]), phase=Phase.DECODE))
    assert fi.packed is None and fi.runner is None


def test_sizes_share_one_memory_and_all_leave_together(folder: Path) -> None:
    engine = make(folder, 8)
    runner, graph = runner_of(engine), engine.runners.decode
    assert graph is not None and runner.sizes == [8] and list(runner.steps) == [8]
    assert runner.logits.shape == (MAX_REQUESTS, 64)
    assert not engine.pool.buffer[:, :, : engine.num_pages].any(), "a capture wrote to a page"
    assert not engine.tables.token_pool[:-1].any()
    engine.shutdown()
    assert engine.runners.prefill is None
    assert make(folder, 8, deterministic=True, attention_backend="torch").runners.prefill is None


# ------------------------------------------------------------------------------ the kernel

LENS = [
    ((0, 5), (9, 3), (0, 1)),
    ((130, 7), (0, 2)),
    ((0, 24),),
    tuple((i, 1) for i in range(MAX_REQUESTS)),
    ((300, 20), (40, 4)),
]


def check_tiles(group: int, tile: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recorded plan serves batch after batch; answers of padding stay numbers."""
    from minisgl.engine import tiled_prefill
    from tests.prefill_tiles import check_recorded_tiles

    monkeypatch.setattr(tiled_prefill.TiledPrefill, "tile_rows", lambda self, size: tile)
    monkeypatch.setattr(tiled_prefill.TiledPrefill, "programs", lambda *_: 16 // splits)
    for seed, lens in enumerate(LENS):
        world = make_world(Shape(lens=(*lens, (2, 2)), group=group, seed=seed))
        if world.meta.batch_size <= MAX_REQUESTS:
            assert check_recorded_tiles(world, 32, 2e-4).splits == splits


@pytest.mark.parametrize(
    ("group", "tile", "splits"), in_turns(2, [(1, 16, 1), (3, 16, 4), (2, 64, 2)])
)
def test_tiles_equal_the_oracle(
    group: int, tile: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tiles(group, tile, splits, monkeypatch)
