"""The engine: memory arithmetic, the layout of a step, one step on the device, the start."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import RecordingGraph

from minisgl.config.engine import EngineConfig
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine import engine as engine_module
from minisgl.engine import memory as memory_module
from minisgl.engine.engine import Engine, build_engine, dummy_request, measure_peak
from minisgl.engine.graph import pack, view_buffers
from minisgl.engine.memory import (
    GIB,
    NotEnoughMemory,
    agree_on_free,
    cap_on_cpu,
    pages_by_peak,
    pages_by_ratio,
    pages_for,
    require_pages,
    tensor_bytes,
)
from minisgl.engine.runners import Runners
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import ForwardInput, build_forward_input, new_positions
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import kv_bytes_per_token
from minisgl.parallel.comm import SingleRank
from tests.checkpoints import make_checkpoint
from tests.dense import dense_batch

# ------------------------------------------------------------------ memory


QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "rope_theta": 1e6, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def test_pages_of_a_real_model_by_hand() -> None:
    """Qwen3-0.6B in bf16 on 80 GiB with a ratio of 0.9: 2 * 28 * 8 * 128 * 2 bytes a token."""
    model = ModelConfig.from_hf(QWEN3_06B)
    page = 16 * kv_bytes_per_token(model, 2, 1)
    assert page == 16 * 114_688
    weights = 1_192_000_000
    pages = pages_by_ratio(
        free_before=80 * GIB, model_bytes=weights, memory_ratio=0.9, page_bytes=page
    )
    available = int(80 * GIB * 0.9) - weights
    assert pages == available // page - 1  # one page is the dummy's
    assert 16 * kv_bytes_per_token(model, 2, 4) == page // 4


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(1, 10**8), st.floats(0.01, 1))
def test_ratio_never_overspends(free: int, model: int, page: int, ratio: float) -> None:
    pages = pages_by_ratio(free_before=free, model_bytes=model, memory_ratio=ratio, page_bytes=page)
    budget = int(free * ratio) - model
    assert (pages + 1) * page <= budget < (pages + 2) * page


def test_peak_keeps_what_the_largest_step_needs() -> None:
    sizes = {"free_now": 1000, "current_bytes": 300, "memory_ratio": 0.9, "page_bytes": 10}
    assert pages_by_peak(peak_bytes=300, **sizes) == 89
    assert pages_by_peak(peak_bytes=500, **sizes) == 69
    assert pages_by_peak(peak_bytes=5000, **sizes) < 0


def test_both_rules_agree_when_steps_need_nothing() -> None:
    """All free memory, no activations: the model is the only difference."""
    ratio = pages_by_ratio(free_before=1000, model_bytes=200, memory_ratio=1.0, page_bytes=10)
    peak = pages_by_peak(
        free_now=800, peak_bytes=200, current_bytes=200, memory_ratio=1.0, page_bytes=10
    )
    assert ratio == peak == 79


def test_a_cpu_gives_a_modest_share() -> None:
    how = {"page_bytes": 1 << 20, "page_size": 16, "max_running_req": 4}
    assert cap_on_cpu(10**6, max_seq_len=1600, **how) == 400  # all that could be used at once
    assert cap_on_cpu(10**6, max_seq_len=8 * 1600, **how) == 1024  # 1 GiB
    assert cap_on_cpu(10**6, max_seq_len=40 * 1600, **how) == 4000  # one window
    assert cap_on_cpu(7, max_seq_len=40 * 1600, **how) == 7


@pytest.mark.parametrize("pages", [-5, 0, 99])
def test_too_little_memory_is_said_with_numbers(pages: int) -> None:
    sizes = {"page_bytes": GIB // 100, "page_size": 16, "max_seq_len": 1600}
    with pytest.raises(NotEnoughMemory) as caught:
        require_pages(pages, **sizes)
    text = str(caught.value)
    assert f"room for {max(pages, 0)} pages of 16 tokens" in text
    assert "1600 tokens needs 100, 1.00 GiB" in text
    assert require_pages(100, **sizes) == 100


@dataclass
class TwoRanks(SingleRank):
    """This rank and one more, with known numbers."""

    other: Sequence[int]
    size = 2

    def __init__(self, other: Sequence[int]) -> None:
        self.other = other

    def min_ints(self, values: Sequence[int]) -> list[int]:
        return [min(pair) for pair in zip(values, self.other, strict=True)]


def test_free_memory_is_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_bytes", lambda device, comm: 10 * GIB)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert agree_on_free(cuda, TwoRanks([9 * GIB, -9 * GIB])) == 9 * GIB
    assert agree_on_free(cuda, TwoRanks([12 * GIB, -12 * GIB])) == 10 * GIB
    with pytest.raises(NotEnoughMemory, match=r"10\.00 GiB on the fullest, 13\.00 GiB"):
        agree_on_free(cuda, TwoRanks([13 * GIB, -13 * GIB]))
    assert agree_on_free(cpu, TwoRanks([13 * GIB, -13 * GIB])) == 10 * GIB


# ------------------------------------------------------------------ the layout of a step


def random_batch(seed: int, phase: Phase, page_size: int) -> tuple[Batch, TableManager]:
    """Requests in all stages of life, in rows full of random slots."""
    r = random.Random(seed)
    tables = TableManager(8, 64, page_size, 40, "cpu")
    reqs = []
    for uid in range(r.randrange(1, 7)):
        prompt = r.randrange(1, 30)
        req = Req(
            uid=uid, input_ids=np.ones(prompt, np.int32), sampling_params=SamplingParams(),
            max_new_tokens=30, table_idx=tables.allocate(),
        )  # fmt: skip
        tables.write(req.table_idx, 0, np.array(r.sample(range(1000), 64), np.int32))
        if phase is Phase.DECODE:
            req.device_len = prompt + r.randrange(1, 30)
            req.cached_len = req.device_len - 1
        else:
            req.cached_len = r.randrange(prompt)
            req.schedule(r.randrange(req.cached_len + 1, prompt + 1))
        reqs.append(req)
    return Batch(reqs=reqs, phase=phase), tables


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("seed", range(20))
def test_layout_equals_the_slow_way(seed: int, phase: Phase) -> None:
    batch, tables = random_batch(seed, phase, 4)
    fi = build_forward_input(batch, tables, 4)
    rows, positions, slots, last, writes = [], [], [], [], []
    for req in batch.reqs:
        for position in range(req.cached_len, req.device_len):
            rows.append(req.table_idx)
            positions.append(position)
            slots.append(int(tables.page_table[req.table_idx, position]))
        if req.device_len >= req.prompt_len:
            last.append(len(rows) - 1)
            writes.append((req.table_idx, req.device_len))
    assert fi.token_rows.tolist() == rows
    assert fi.positions.tolist() == positions
    assert fi.out_loc.tolist() == slots
    assert fi.last_idx.tolist() == (last or [len(rows) - 1])
    assert list(zip(fi.write_rows.tolist(), fi.write_positions.tolist())) == writes
    assert [r.uid for r in fi.sampled] == [r.uid for r in batch.reqs if not r.is_chunked]
    assert fi.meta.seq_lens.tolist() == [r.device_len for r in batch.reqs]
    assert all(a.dtype == np.int32 for a in (fi.token_rows, fi.positions, fi.out_loc, fi.last_idx))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=8))
def test_new_positions(pairs: list[tuple[int, int]]) -> None:
    cached = np.array([c for c, _ in pairs], np.int32)
    extend = np.array([e for _, e in pairs], np.int32)
    wanted = [p for c, e in pairs for p in range(c, c + e)]
    assert new_positions(cached, cached + extend).tolist() == wanted


def test_a_layout_is_a_snapshot() -> None:
    """Under overlap the requests move on before the step has run."""
    batch, tables = random_batch(3, Phase.DECODE, 4)
    fi = build_forward_input(batch, tables, 4)
    copies = {
        name: getattr(fi, name).copy() for name in ("positions", "out_loc", "write_positions")
    }
    for req in batch.reqs:
        req.advance()
        tables.write(req.table_idx, 0, np.zeros(64, np.int32))
    for name, before in copies.items():
        assert np.array_equal(getattr(fi, name), before), name
    assert fi.meta.seq_lens.tolist() == [r.device_len - 1 for r in batch.reqs]


# ------------------------------------------------------------------ one step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("engine"), "qwen3", seed=1, vocab_size=64, hidden_size=32,
        intermediate_size=48, max_position_embeddings=128,
    )  # fmt: skip


def make(folder: Path, **fields: Any) -> Engine:
    how = {"page_size": 4, "num_pages": 32, "max_running_req": 8, "device": "cpu"} | fields
    config = EngineConfig(model_path=str(folder), **how)
    new_graph = RecordingGraph if config.cuda_graph_bs else None
    return build_engine(config, progress=False, new_graph=new_graph)


def admit(engine: Engine, prompts: Sequence[Sequence[int]], new: int = 8) -> list[Req]:
    """Requests with a row and pages of their own, as a scheduler would make them."""
    reqs = []
    for index, prompt in enumerate(prompts):
        req = Req(
            uid=index, input_ids=np.array(prompt, np.int32), max_new_tokens=new,
            sampling_params=SamplingParams(), table_idx=engine.tables.allocate(),
        )  # fmt: skip
        slots = np.arange(index * 32, index * 32 + 32, dtype=np.int32)
        engine.tables.write(req.table_idx, 0, slots)
        engine.tables.write_tokens(req.table_idx, 0, req.input_ids)
        reqs.append(req)
    return reqs


def run(engine: Engine, reqs: list[Req], phase: Phase) -> list[int]:
    """Tokens in the order of `reqs`; the step has an order of its own."""
    inputs = engine.prepare(Batch(reqs=reqs, phase=phase))
    output = engine.step(inputs)
    for req in reqs:
        req.advance()
    tokens = dict(zip(inputs.sampled, output.wait().ids))
    return [tokens[req] for req in reqs if req in tokens]


def dense_next(engine: Engine, ids: Sequence[int]) -> int:
    with torch.inference_mode():
        return int(engine.model(dense_batch([ids], last_only=True))[0].argmax())


PROMPTS = [[1, 2, 3, 4, 5], [9], [7] * 9]


@pytest.mark.parametrize("graph_sizes", [None, (1, 2), (4,), (2, 8)])
def test_steps_equal_the_dense_model(folder: Path, graph_sizes: tuple[int, ...] | None) -> None:
    """Eager, replayed, and padded to a captured size."""
    engine = make(folder, cuda_graph_bs=graph_sizes)
    assert (engine.runners.decode is None) == (graph_sizes is None)
    reqs = admit(engine, PROMPTS)
    texts = [list(p) for p in PROMPTS]
    for step in range(6):
        # The host learns of the tokens only here: the device has gone on from its own pool.
        ids = run(engine, reqs, Phase.DECODE if step else Phase.PREFILL)
        for text, token in zip(texts, ids, strict=True):
            assert token == dense_next(engine, text)
            text.append(token)


def test_tokens_wait_in_the_pool(folder: Path) -> None:
    engine = make(folder)
    reqs = admit(engine, PROMPTS)
    ids = run(engine, reqs, Phase.PREFILL)
    pool = engine.tables.token_pool
    for req, prompt, token in zip(reqs, PROMPTS, ids):
        assert pool[req.table_idx, : len(prompt) + 1].tolist() == [*prompt, token]


def test_only_real_rows_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the padding of a graph, and not a prompt that has not reached its end."""
    engine = make(folder, cuda_graph_bs=(4,))
    shapes: list[tuple[int, ...]] = []
    original = engine.sampler.sample

    def sample(logits: torch.Tensor, args: Any) -> Any:
        shapes.append(tuple(logits.shape))
        return original(logits, args)

    monkeypatch.setattr(engine.sampler, "sample", sample)
    reqs = admit(engine, PROMPTS)
    reqs[2].schedule(4)
    run(engine, reqs, Phase.PREFILL)
    run(engine, reqs[:2], Phase.DECODE)
    reqs[2].schedule(6)
    assert run(engine, reqs[2:], Phase.PREFILL) == []
    assert [shape for shape in shapes if shape[0]] == [(2, 64)]  # the captured step drew itself
    padded = engine.prepare(Batch(reqs=reqs[:2], phase=Phase.DECODE))
    assert padded.packed is not None and len(padded.token_rows) == 4
    assert padded.out_loc[2:].tolist() == [engine.pool.dummy_slot] * 2


def test_a_captured_step_leaves_its_batch_alone(folder: Path) -> None:
    """Long requests come first and padding last in the step, and the batch keeps its order."""
    engine = make(folder, cuda_graph_bs=(4,))
    reqs = admit(engine, [[1] * 3, [2] * 9, [3] * 5])
    run(engine, reqs, Phase.PREFILL)
    batch = Batch(reqs=list(reqs), phase=Phase.DECODE)
    fi = engine.prepare(batch)
    assert batch.reqs == reqs and fi.sampled == (reqs[1], reqs[2], reqs[0])
    assert fi.runner is engine.runners.decode and fi.packed is not None
    assert fi.token_rows.tolist() == [r.table_idx for r in (*fi.sampled, engine.dummy_req)]


def test_pitfall_07_chunks_end_in_the_same_token(folder: Path) -> None:
    engine = make(folder)
    prompt = [(5 * i + 3) % 60 for i in range(23)]
    (req,) = admit(engine, [prompt])
    for end in (5, 6, 17):
        req.schedule(end)
        assert run(engine, [req], Phase.PREFILL) == []
    req.schedule(23)
    assert run(engine, [req], Phase.PREFILL) == [dense_next(engine, prompt)]


def test_flushed_before_the_gather(folder: Path) -> None:
    """With separate host and device tables, a step copies the writes to the device."""
    engine = make(folder)
    tables = engine.tables
    engine.tables = TableManager(
        tables.num_rows, tables.width, 4, engine.pool.dummy_page, "cpu", share_memory=False
    )
    engine.backend.tables = engine.tables
    reqs = admit(engine, PROMPTS)
    ids = run(engine, reqs, Phase.PREFILL)
    assert ids == [dense_next(engine, prompt) for prompt in PROMPTS]
    texts = [[*prompt, token] for prompt, token in zip(PROMPTS, ids)]
    assert run(engine, reqs, Phase.DECODE) == [dense_next(engine, text) for text in texts]


def test_nothing_is_kept_for_a_backward_pass(folder: Path) -> None:
    engine = make(folder)
    reqs = admit(engine, PROMPTS)
    forward, made = engine.forward_pass, []
    engine.forward_pass = lambda fb: made.append(forward(fb)) or made[-1]  # type: ignore[method-assign]
    output = engine.step(engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL)))
    assert made[0].is_inference()
    assert output.next_ids.is_inference() and output.next_ids.dtype == torch.int64


def test_logprobs_come_along(folder: Path) -> None:
    engine = make(folder)
    reqs = admit(engine, PROMPTS)
    reqs[1].sampling_params = SamplingParams(logprobs=3)
    output = engine.step(engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL)))
    tokens = output.wait()
    assert tokens.logprobs is not None and tokens.top_ids is not None
    assert tokens.top_ids[1][0] == tokens.ids[1] and tokens.logprobs[1] < 0


# ------------------------------------------------------------------ captured steps


def test_packed_by_hand() -> None:
    """Two requests and a dummy in a pool that is 100 wide: rows 3 and 0, the dummy's row 8."""
    args = Sampler(64, "cpu").prepare(
        [
            Req(
                uid=i, input_ids=np.ones(9, np.int32), max_new_tokens=4,
                sampling_params=SamplingParams(temperature=i * 0.5, seed=i),
            )
            for i in range(2)
        ]
    )  # fmt: skip
    rows, positions, slots = (np.array(x, np.int32) for x in ([3, 0, 8], [20, 7, 0], [66, 5, 160]))
    memory = torch.from_numpy(pack(rows, positions, slots, 100, 2, args)).view(-1)
    found = view_buffers(memory, 3)
    assert found.gather.tolist() == [320, 7, 800]
    assert found.scatter.tolist() == [321, 8, 800]  # the dummy writes over its own input
    assert found.rows.tolist() == [3, 0, 8]
    assert found.positions.tolist() == [20, 7, 0]
    assert found.out_loc.tolist() == [66, 5, 160]
    assert found.keys[:, :2].tolist() == args.keys.tolist() and not found.keys[:, 2].any()
    assert found.temperature.tolist() == [0.0, 0.5, 0.0]
    nobody = pack(rows, positions, slots, 100, 0, None)
    assert nobody[1].tolist() == nobody[0].tolist() and not nobody[5:].any()


WAYS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=30.0, top_k=2, seed=5),
    SamplingParams(temperature=5.0, top_p=0.3, seed=6),
    SamplingParams(temperature=1.0, seed=7, logprobs=2),
]
WARM = SamplingParams(temperature=2.0, seed=8)
MIXTURES = {"all": WAYS, "simple": [*WAYS[:2], WARM, WARM], "filtered": WAYS[:4]}
CROWD = [[3 * i + 1, *range(i)] for i in range(1, 6)]


def decode_steps(engine: Engine, ways: Sequence[SamplingParams], steps: int = 6) -> list[list[int]]:
    """Tokens of each request, and a check after each step of what the pool holds."""
    reqs = admit(engine, CROWD[: len(ways)])
    for req, way in zip(reqs, ways):
        req.sampling_params = way
    texts = [list(prompt) for prompt in CROWD[: len(ways)]]
    for step in range(steps):
        ids = run(engine, reqs, Phase.DECODE if step else Phase.PREFILL)
        for req, text, token in zip(reqs, texts, ids, strict=True):
            text.append(token)
            assert engine.tables.token_pool[req.table_idx, : len(text)].tolist() == text
    return texts


@pytest.mark.parametrize("sizes", [(5,), (1, 2, 8), (2, 4)])
@pytest.mark.parametrize("ways", MIXTURES.values(), ids=MIXTURES)
def test_a_mixed_batch_draws_the_same_when_recorded(
    folder: Path, sizes: tuple[int, ...], ways: list[SamplingParams]
) -> None:
    """With padding, without, and too many for any size; filtered rows are sampled again."""
    eager = decode_steps(make(folder, num_pages=40), ways)
    assert decode_steps(make(folder, num_pages=40, cuda_graph_bs=sizes), ways) == eager


def prepared(engine: Engine, count: int) -> tuple[list[Req], ForwardInput]:
    """Requests behind their prompts, and their next step; it is recorded."""
    reqs = admit(engine, CROWD[:count])
    for req, way in zip(reqs, WAYS):
        req.sampling_params = way
    run(engine, reqs, Phase.PREFILL)
    return reqs, engine.prepare(Batch(reqs=reqs, phase=Phase.DECODE))


def test_padding_writes_to_no_real_row(folder: Path) -> None:
    engine = make(folder, cuda_graph_bs=(8,))
    _, inputs = prepared(engine, 3)
    pool, before = engine.tables.token_pool, engine.tables.token_pool.clone()
    pool[-1, 0] = before[-1, 0] = 63  # the dummies have a token to lose
    ids = engine.step(inputs).wait().ids
    before[inputs.write_rows, inputs.write_positions] = torch.tensor(ids)
    assert torch.equal(pool[:-1], before[:-1])
    assert torch.equal(pool[-1, 1:], before[-1, 1:])


def test_a_recorded_step_reads_what_was_sent(folder: Path) -> None:
    """Keys and temperatures are those of the sorted requests; padding is greedy."""
    engine = make(folder, num_pages=40, cuda_graph_bs=(8,))
    _, inputs = prepared(engine, 5)
    assert engine.runners.decode is not None and inputs.sampling is not None
    assert [req.uid for req in inputs.sampled] == [4, 3, 2, 1, 0]  # long ones first
    engine.step(inputs)
    static = view_buffers(engine.runners.decode.memory, 8)
    wanted = engine.sampler.prepare(inputs.sampled)
    assert static.keys[:, :5].tolist() == wanted.keys.tolist()
    assert static.temperature.tolist() == [1.0, 5.0, 30.0, pytest.approx(0.9), 0.0, 0.0, 0.0, 0.0]
    assert static.positions.tolist() == [len(CROWD[req.uid]) for req in inputs.sampled] + [0] * 3
    assert static.rows[5:].tolist() == [engine.tables.dummy_row] * 3


def test_tokens_outlive_the_next_recorded_step(folder: Path) -> None:
    """Overlap reads a step's tokens after the next one has started."""
    engine = make(folder, cuda_graph_bs=(2,))
    reqs = admit(engine, CROWD[:2])
    for req in reqs:
        req.sampling_params = SamplingParams(temperature=30.0, seed=req.uid)
    run(engine, reqs, Phase.PREFILL)
    outputs = []
    for _ in range(4):
        inputs = engine.prepare(Batch(reqs=list(reqs), phase=Phase.DECODE))
        outputs.append((inputs, engine.step(inputs)))
        for req in reqs:
            req.advance()
    for inputs, output in outputs:
        places = zip(inputs.write_rows.tolist(), inputs.write_positions.tolist())
        assert output.wait().ids == [int(engine.tables.token_pool[place]) for place in places]


@pytest.mark.parametrize("sizes", [(4, 8), (5, 8)])
def test_recorded_logits_are_those_of_the_step(folder: Path, sizes: tuple[int, ...]) -> None:
    """A small step after a large one: what the large one left is neither read nor drawn from."""
    engine = make(folder, num_pages=40, cuda_graph_bs=sizes)
    reqs = admit(engine, CROWD)
    ids = run(engine, reqs, Phase.PREFILL)
    texts = [[*prompt, token] for prompt, token in zip(CROWD, ids)]
    for count in (5, 2, 4, 1, 5):
        ids = run(engine, reqs[:count], Phase.DECODE)
        assert engine.runners.decode is not None
        logits = engine.runners.decode.logits[:count].clone()
        longest_first = sorted(range(count), key=lambda i: len(texts[i]), reverse=True)
        for row, index in enumerate(longest_first):
            with torch.inference_mode():
                want = engine.model(dense_batch([texts[index]], last_only=True))[0]
            assert torch.allclose(logits[row], want, atol=1e-4)
        for text, token in zip(texts, ids):
            assert token == dense_next(engine, text)
            text.append(token)


def test_a_size_that_was_not_recorded_is_refused(folder: Path) -> None:
    engine = make(folder, cuda_graph_bs=(2,))
    assert engine.runners.decode is not None
    with pytest.raises(ValueError, match="batch_size: 3 was not captured"):
        engine.runners.decode.replay(np.zeros((7, 3), np.int64))


# ------------------------------------------------------------------ the start


def test_start_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is read before the weights come, and graphs are captured last."""
    calls: list[str] = []

    def spy(name: str) -> None:
        original: Callable[..., Any] = getattr(engine_module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(engine_module, name, called)

    names = ["start_device", "agree_on_free", "load_model", "decide_pages", "make_pool",
             "capture_runners"]  # fmt: skip
    for name in names:
        spy(name)
    make(folder, num_pages=None, cuda_graph_bs=(1,))
    assert calls == names


def test_auto_size_and_a_pool_that_is_too_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(folder, num_pages=None)
    assert engine.num_pages == 8 * pages_for(128, 4)  # everything eight requests could use
    token = 2 * 2 * 2 * 16 * 4
    free = int((tensor_bytes(engine.model) + 100 * token) / 0.9)
    monkeypatch.setattr(memory_module, "free_bytes", lambda *_: free)
    with pytest.raises(NotEnoughMemory, match="128 tokens needs 32"):
        make(folder, num_pages=None)


def test_all_ranks_take_the_smallest_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(SingleRank):
        def min_ints(self, values: Sequence[int]) -> list[int]:
            return [min(v, 40) for v in values] if len(values) == 1 else list(values)

    config = EngineConfig(model_path=str(folder), device="cpu", page_size=4, max_running_req=8)
    assert build_engine(config, Short(), progress=False).num_pages == 40


def test_dummy_weights_and_overrides(folder: Path) -> None:
    engine = make(folder, use_dummy_weight=True, max_seq_len_override=50, dtype="bfloat16")
    assert engine.max_seq_len == 50 and engine.pool.buffer.dtype is torch.bfloat16
    reqs = admit(engine, PROMPTS)
    assert all(0 <= t < 64 for t in run(engine, reqs, Phase.PREFILL))


def test_trial_prefill_touches_only_the_dummy_page(folder: Path) -> None:
    engine = make(folder)
    admit(engine, PROMPTS)
    batches: list[Batch] = []
    prepare = engine.prepare
    engine.prepare = lambda batch: batches.append(batch) or prepare(batch)  # type: ignore
    assert measure_peak(engine, 300) == (0, 0)
    assert sum(r.extend_len for r in batches[0].reqs) == 300
    assert max(r.extend_len for r in batches[0].reqs) < engine.max_seq_len
    assert not engine.pool.buffer[:, :, : engine.num_pages].any()
    peak = build_engine(replace(engine.config, memory_trial_tokens=64), progress=False)
    assert peak.num_pages == engine.num_pages  # given explicitly


def test_peak_rule_sizes_the_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "measure_peak", lambda engine, tokens: (100, 100 + 50_000))
    monkeypatch.setattr(memory_module, "free_bytes", lambda device, comm: 1_000_000)
    config = EngineConfig(
        model_path=str(folder), device="cpu", page_size=4, memory_ratio=0.5, memory_trial_tokens=10
    )
    engine = build_engine(config, progress=False)
    assert engine.num_pages == (500_000 - 50_000) // (engine.pool.buffer[:, :, 0].nbytes) - 1


@pytest.mark.parametrize("field", ["num_pages", "max_running_req", "memory_trial_tokens"])
def test_a_number_beyond_memory_is_refused_by_its_name(folder: Path, field: str) -> None:
    with pytest.raises(NotEnoughMemory, match=f"{field}: 1000000000000 take .* GiB"):
        make(folder, **{"num_pages": None, field: 10**12})


def test_a_trial_that_runs_out_of_memory_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "measure_peak", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(NotEnoughMemory, match="memory_trial_tokens: "):
        make(folder, num_pages=None, memory_trial_tokens=10)


def test_shutdown_lets_go_of_the_graphs(folder: Path) -> None:
    engine = make(folder, cuda_graph_bs=(1,))
    assert engine.runners.decode is not None
    req = dummy_request(engine.tables.allocate())
    fi = engine.prepare(Batch(reqs=[req], phase=Phase.DECODE))  # a traceback keeps it
    graph = weakref.ref(engine.runners.decode.steps[1].graph)
    engine.shutdown()
    gc.collect()
    assert engine.runners.decode is None and fi.runner is not None and graph() is None


def test_graphs_need_a_gpu_or_a_maker(folder: Path) -> None:
    config = EngineConfig(model_path=str(folder), device="cpu", num_pages=32, cuda_graph_bs=(2,))
    with pytest.raises(ValueError, match=r"cuda_graph_bs: CUDA graphs need a GPU, got \(2,\)"):
        build_engine(config, progress=False)
    none = replace(config, cuda_graph_bs=None, cuda_graph_max_bs=8)
    assert build_engine(none, progress=False).runners == Runners()
