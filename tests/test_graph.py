"""Graphs: bucket rules, a recorder that keeps addresses, and replay = eager on a real model."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.attention.base import DecodeBuffers, ForwardBatch
from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.engine.graph import (
    GraphBuffers,
    GraphRunner,
    RecordingGraph,
    bucket_sizes,
    capturing,
    choose_sizes,
    dummy_metadata,
    new_graph,
)
from minisgl.engine.graph_bench import main, pool_bytes
from minisgl.kvcache.page_table import PageAllocator, TableManager
from minisgl.kvcache.pool import KVPool
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights
from minisgl.parallel.comm import SingleRank

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip


# ------------------------------------------------------------------------------ bucket rules


@pytest.mark.parametrize(
    ("system", "max_bs", "want"),
    [
        ("minisgl", 32, (1, 2, 4, 8, 16, 24, 32)),
        ("minisgl", 3, (1, 2)),
        ("minisgl", 10, (1, 2, 4, 8)),
        ("sglang", 32, (1, 2, 4, 8, 16, 24, 32)),
        ("minivllm", 64, (1, 2, 4, 8, 16, 32, 48, 64)),
        ("minivllm", 15, (1, 2, 4, 8)),
        ("tokn", 64, (1, 2, 3, 4, 64)),
        ("tokn", 3, (1, 2, 3)),
        ("minisgl", 0, ()),
        ("tokn", 0, ()),
    ],
)
def test_bucket_sizes(system: str, max_bs: int, want: tuple[int, ...]) -> None:
    assert bucket_sizes(max_bs, system) == want


def test_sglang_fits_a_small_pool() -> None:
    assert bucket_sizes(160, "sglang", max_running=14) == (1, 2, 4, 8, 13, 14)
    assert bucket_sizes(160, "sglang", max_running=1) == (1,)
    assert bucket_sizes(160, "sglang", max_running=16) == (1, 2, 4, 8, 15, 16)
    assert bucket_sizes(32, "sglang", max_running=1000) == bucket_sizes(32)
    assert 13 not in bucket_sizes(160, "minisgl", max_running=14)


@given(st.integers(0, 400), st.sampled_from(["minisgl", "sglang", "minivllm", "tokn"]),
       st.one_of(st.none(), st.integers(1, 400)))  # fmt: skip
def test_bucket_sizes_are_ascending_and_in_range(
    max_bs: int, system: str, running: int | None
) -> None:
    sizes = bucket_sizes(max_bs, system, running)
    assert list(sizes) == sorted(set(sizes))
    limit = min(max_bs, running or max_bs) if system == "sglang" else max_bs
    assert all(1 <= size <= limit for size in sizes)
    assert bool(sizes) == (max_bs >= 1)


def test_choose_sizes() -> None:
    assert choose_sizes((4, 1, 4, 99, 0), None, 8, 0) == (1, 4)
    assert choose_sizes((), None, 8, 0) == ()
    assert choose_sizes(None, 0, 8, 0) == ()
    assert choose_sizes(None, 4, 256, 0) == (1, 2, 4)
    assert choose_sizes(None, None, 256, 100 << 30)[-1] == 256
    assert choose_sizes(None, None, 256, 40 << 30)[-1] == 160
    assert choose_sizes(None, None, 5, 40 << 30) == (1, 2, 4, 5)
    with pytest.raises(ValueError, match="system: must be one of"):
        bucket_sizes(8, "other")


# ------------------------------------------------------------------------------ recording


def graph_of(function: object) -> RecordingGraph:
    """Record one call of a function without arguments."""
    graph = RecordingGraph()
    with capturing(graph):
        function()  # type: ignore[operator]
    return graph


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_keeps_addresses_not_values(device: str) -> None:
    x = torch.ones(3, device=device)
    out = torch.zeros(3, device=device)
    graph = new_graph(torch.device(device))
    with capturing(graph):
        out.copy_(x * 2 + 1)
    address = x
    x.fill_(10)  # in place: the graph sees it
    graph.replay()
    assert out.tolist() == [21, 21, 21]
    x = torch.full((3,), 100.0, device=device)  # another tensor under the old name
    graph.replay()
    assert out.tolist() == [21, 21, 21] and address.tolist() == [10, 10, 10]


def test_python_is_frozen() -> None:
    x, seen = torch.ones(2), []
    factor, branch = 3, "double"
    box: dict[str, Tensor] = {}

    def region() -> None:
        seen.append("called")
        box["y"] = x * factor if branch == "double" else x - factor

    graph = graph_of(region)
    factor, branch = 5, "other"
    graph.replay()
    assert box["y"].tolist() == [3, 3] and seen == ["called"]


@pytest.mark.parametrize(
    "region",
    [
        lambda x: x.sum().item(),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.ones(3).repeat_interleave(torch.tensor([1, 2, 1])),
    ],
)
def test_values_on_the_host_are_refused(region: object) -> None:
    x = torch.ones(3)
    graph = RecordingGraph()
    with pytest.raises(RuntimeError, match="needs a value on the host"), capturing(graph):
        region(x)  # type: ignore[operator]
    assert not graph.captured and not graph.calls
    with capturing(graph):  # and it can be used again
        y = x + 1
    x.zero_()
    graph.replay()
    assert y.tolist() == [1, 1, 1]


def test_integer_indices_are_fine() -> None:
    x, index = torch.arange(5.0), torch.tensor([0, 2])
    box: dict[str, Tensor] = {}
    graph = graph_of(lambda: box.update(y=x[index]))
    index.copy_(torch.tensor([4, 1]))
    graph.replay()
    assert box["y"].tolist() == [4, 1]


def test_views_copies_and_writes() -> None:
    x = torch.arange(6.0)
    box: dict[str, Tensor] = {}

    def region() -> None:
        matrix = x.view(2, 3)
        turned = matrix.t().reshape(6)  # has to copy
        flat = matrix.reshape(6)  # need not
        scratch = torch.empty(6)
        scratch.zero_()
        torch.add(flat, 1, out=scratch)
        scratch[1:3] += 100
        box.update(turned=turned, scratch=scratch, split=scratch.split(3)[1], zeros=torch.zeros(2))

    graph = graph_of(region)
    box["zeros"].fill_(7)
    x.mul_(10)
    graph.replay()
    assert box["turned"].tolist() == [0, 30, 10, 40, 20, 50]
    assert box["scratch"].tolist() == [1, 111, 121, 31, 41, 51]
    assert box["split"].tolist() == [31, 41, 51]
    assert box["zeros"].tolist() == [0, 0]


def test_several_outputs() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    box: dict[str, Tensor] = {}
    graph = graph_of(lambda: box.update(zip("vi", x.sort())))
    x.copy_(torch.tensor([0.0, 5.0, -1.0]))
    graph.replay()
    assert box["v"].tolist() == [-1, 0, 5] and box["i"].tolist() == [2, 0, 1]


def test_states_are_checked() -> None:
    graph = RecordingGraph()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()
    with pytest.raises(RuntimeError, match=r"without capture_begin"):
        graph.capture_end()
    with capturing(graph):
        torch.ones(1)
    with pytest.raises(RuntimeError, match="captured already"):
        graph.capture_begin()
    graph.reset()
    assert not graph.calls and graph.pool() is None
    with capturing(graph):
        torch.ones(1)


STEPS = {
    "scale": lambda t: t * 1.5,
    "tanh_": lambda t: t.tanh_(),
    "softmax": lambda t: t.softmax(-1),
    "matmul": lambda t: t @ t.t() @ t,
    "roll": lambda t: t.roll(1, -1),
    "view": lambda t: t.view(-1).view(3, 4),
    "transpose": lambda t: t.t().contiguous().view(3, 4),
    "gather": lambda t: t[torch.tensor([2, 0, 1])],
    "norm": lambda t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6),
    "fill": lambda t: t.masked_fill(t < 0, 0.5),
    "cat": lambda t: torch.cat([t[:1], t[1:]]),
    "row": lambda t: t.index_add_(0, torch.tensor([1]), t[:1].clone()),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=8), st.booleans())
def test_replay_is_eager_on_random_programs(names: list[str], inference: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(3, 4, generator=generator)

    def program(value: Tensor) -> Tensor:
        t = value + 0.0
        for name in names:
            t = STEPS[name](t)
        return t

    with torch.inference_mode(inference):
        static, box = source.clone(), {}
        graph = graph_of(lambda: box.update(out=program(static)))
        for _ in range(2):
            fresh = torch.randn(3, 4, generator=generator)
            static.copy_(fresh)
            graph.replay()
            assert torch.equal(box["out"], program(fresh))


# ------------------------------------------------------------------------------ the runner, toys


@dataclass
class ToyPlan:
    """Writes k to its slots and returns what the pool holds at each request's last position."""

    pool: Tensor
    out_loc: Tensor
    lens: Tensor

    def update(self, meta: AttentionMetadata) -> None:
        self.lens.copy_(torch.from_numpy(meta.seq_lens))

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        self.pool.index_copy_(0, self.out_loc, k)
        return q + self.pool.index_select(0, self.out_loc) + self.lens[:, None]


@dataclass
class ToyBackend:
    """Plans over a pool [slots, 1]."""

    pool: Tensor
    name: str = "toy"
    made: list[int] = field(default_factory=list)

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> ToyPlan:
        self.made.append(batch_size)
        lens = torch.zeros(batch_size, dtype=torch.int64, device=buffers.out_loc.device)
        return ToyPlan(self.pool, buffers.out_loc, lens)

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> ToyPlan:
        plan = self.graph_plan(len(out_loc), DecodeBuffers(out_loc, out_loc, out_loc))
        plan.update(meta)
        return plan


def toy_forward(fb: ForwardBatch) -> Tensor:
    x = (fb.input_ids + 100 * fb.positions)[:, None].float()
    y = fb.attn.run(x, x, x, 0)
    return torch.cat([y, -y, y * 0 + 1], dim=1)


def toy_runner(sizes: tuple[int, ...] = (1, 2, 4), device: str = "cpu") -> GraphRunner:
    tables = TableManager(8, 16, 4, dummy_page=9, device=device)
    backend = ToyBackend(torch.zeros(40, 1, device=device))
    return GraphRunner(forward=toy_forward, backend=backend, tables=tables, sizes=sizes,
                       device=device, vocab_size=3)  # fmt: skip


def test_capture_goes_from_large_to_small_after_a_trial() -> None:
    runner = toy_runner((4, 1, 2, 2))
    assert not runner.can_replay(Phase.DECODE, 1), "nothing is captured yet"
    runner.capture(progress=False)
    assert runner.backend.made == [4, 4, 2, 1]
    assert list(runner.steps) == [4, 2, 1] and runner.sizes == (1, 2, 4)


def test_capture_shows_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, shown = toy_runner(), list[str]()

    class Bar:
        def set_postfix_str(self, text: str, refresh: bool) -> None:
            shown.append(text)

    bar: Any = Bar()
    runner.capture_shown(bar, 1)
    assert not shown, "a CPU has no such memory"
    monkeypatch.setattr(runner, "capture_one", lambda size: size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**29, 2**40))
    runner.device = torch.device("cuda")
    runner.capture_shown(bar, 4)
    assert shown == ["batch 4, 1.5 GiB free"]


def test_bucket_and_can_replay() -> None:
    runner = toy_runner()
    runner.capture(progress=False)
    assert [runner.bucket(n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    for bad in (0, 5, -1):
        with pytest.raises(ValueError, match=r"batch_size: must be in 1 .. 4"):
            runner.bucket(bad)
    assert [runner.can_replay(Phase.DECODE, n) for n in range(6)] == [False] + [True] * 4 + [False]
    assert not runner.can_replay(Phase.PREFILL, 1)
    with pytest.raises(ValueError, match="sizes"):
        toy_runner(())
    with pytest.raises(ValueError, match="sizes"):
        toy_runner((0, 1))


def test_buffers_start_as_dummies_and_are_shared() -> None:
    runner = toy_runner()
    assert runner.buffers.out_loc.tolist() == [36] * 4
    assert runner.buffers.rows.tolist() == [8] * 4
    first = runner.buffers.first(2)
    first.input_ids.fill_(5)
    assert runner.buffers.input_ids.tolist() == [5, 5, 0, 0]
    assert GraphBuffers.allocate(2, 3, 7, CPU).out_loc.dtype == torch.int64


@pytest.mark.parametrize("device", DEVICES)
def test_replay_reads_new_values_and_keeps_its_address(device: str) -> None:
    runner = toy_runner(device=device)
    runner.capture(progress=False)
    addresses = set()
    for n in range(3):
        ids = torch.tensor([n, n + 1], device=device)
        positions = torch.tensor([1, 2], device=device)
        out_loc = torch.tensor([n, n + 8], device=device)
        lens = np.array([n + 1, n + 2], np.int32)
        one = np.ones(2, np.int32)
        rows = np.array([0, 1], np.int32)
        table = runner.tables.page_table
        meta = build_metadata(Phase.DECODE, rows, one, lens, table, 4)
        logits = runner.replay(ids, positions, out_loc, meta)
        x = (ids + 100 * positions).float()
        want = 2 * x + torch.tensor(lens, device=device)
        assert torch.equal(logits[:, 0], want) and torch.equal(logits[:, 1], -want)
        assert runner.backend.pool[[n, n + 8], 0].tolist() == x.tolist()
        addresses.add(logits.data_ptr())
    assert len(addresses) == 1
    with pytest.raises(ValueError, match="3 was not captured"):
        runner.replay(ids.repeat(2)[:3], positions, out_loc, meta)


def test_capture_writes_only_to_the_dummy_page() -> None:
    runner = toy_runner()
    runner.backend.pool.fill_(-1)
    runner.capture(progress=False)
    assert (runner.backend.pool[:36] == -1).all()


# ------------------------------------------------------------------------------ the runner, a model


class Lab:
    """A small model with its pool and tables, and requests that decode together."""

    def __init__(self, device: str = "cpu", page_size: int = 4, seed: int = 0) -> None:
        self.config = ModelConfig.from_hf(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 61,
                "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64,
                "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 0,
            }
        )  # fmt: skip
        self.device, self.page_size = torch.device(device), page_size
        kind = {"dtype": torch.float32, "device": self.device}
        self.pool = KVPool(num_layers=2, num_pages=40, page_size=page_size, num_kv_heads=2,
                           head_dim=16, **kind)  # fmt: skip
        self.tables = TableManager(6, 24, page_size, self.pool.dummy_page, self.device)
        self.pages = PageAllocator(40, page_size)
        self.backend = create_backend("torch", pool=self.pool, tables=self.tables, num_qo_heads=4)
        self.model = build_model(self.config, SingleRank(), dtype=torch.float32, device="meta")
        load_dummy_weights(self.model, **kind, seed=seed)
        self.lens: list[int] = []

    def admit(self, prompt_len: int) -> None:
        """A new request with its whole window of pages; its prompt is computed."""
        row = self.tables.allocate()
        pages = self.pages.allocate(-(-24 // self.page_size))
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        self.tables.write(row, 0, slots.astype(np.int32)[:24])
        self.lens.append(prompt_len)
        ids = torch.arange(prompt_len, device=self.device) % 61
        self.forward(Phase.PREFILL, np.array([row]), np.array([prompt_len]), ids)

    def metadata(self, phase: Phase, rows: np.ndarray, extend: np.ndarray) -> AttentionMetadata:
        lens = np.array([(self.lens[r] if r < len(self.lens) else 1) for r in rows], np.int32)
        return build_metadata(phase, rows.astype(np.int32), extend.astype(np.int32), lens,
                              self.tables.page_table, self.page_size)  # fmt: skip

    def tensors(self, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Positions and slots of the new tokens."""
        spans = zip(meta.table_idx, meta.extend_lens, meta.seq_lens)
        places = [(row, p) for row, e, n in spans for p in range(n - e, n)]
        rows, positions = np.array(places).T
        slots = self.tables.page_table[rows, positions].astype(np.int64)
        both = torch.from_numpy(positions.astype(np.int64)), torch.from_numpy(slots)
        return both[0].to(self.device), both[1].to(self.device)

    @torch.inference_mode()
    def forward(
        self, phase: Phase, rows: np.ndarray, extend: np.ndarray, ids: Tensor,
        runner: GraphRunner | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of one pass, eagerly or by a replay."""
        self.tables.flush()
        meta = self.metadata(phase, rows, extend)
        positions, slots = self.tensors(meta)
        if runner is not None:
            return runner.replay(ids, positions, slots, meta).clone()
        fb = ForwardBatch(phase=phase, input_ids=ids, positions=positions, out_loc=slots,
                          last_idx=None, attn=self.backend.plan(meta, slots))  # fmt: skip
        return self.model(fb)

    def runner(self, sizes: tuple[int, ...]) -> GraphRunner:
        made = GraphRunner(forward=self.model, backend=self.backend, tables=self.tables,
                           sizes=sizes, device=self.device, vocab_size=61)  # fmt: skip
        made.capture(progress=False)
        return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_replay_is_eager_on_a_real_model(device: str, batch: int) -> None:
    """Eight greedy steps: the same logits on real rows, the same cache in real slots."""
    prompts = [3, 1, 8, 5, 2][:batch]
    labs = [Lab(device), Lab(device)]
    runner = labs[1].runner((1, 2, 4, 6))
    for lab in labs:
        for prompt in prompts:
            lab.admit(prompt)
    ids = torch.arange(batch, device=labs[0].device)
    size = runner.bucket(batch)
    assert size == (1, 2, 4, 6)[bisect_left((1, 2, 4, 6), batch)]
    padding = np.full(size - batch, labs[1].tables.dummy_row)
    for _ in range(8):
        for lab in labs:
            lab.lens = [n + 1 for n in lab.lens]
        rows = np.arange(batch)
        eager = labs[0].forward(Phase.DECODE, rows, np.ones(batch), ids)
        padded_ids = torch.cat([ids, torch.zeros(size - batch, dtype=torch.int64, device=device)])
        padded_rows = np.concatenate([rows, padding]).astype(np.int64)
        logits = labs[1].forward(Phase.DECODE, padded_rows, np.ones(size), padded_ids, runner)
        assert logits.shape == (size, 61)
        torch.testing.assert_close(logits[:batch], eager, atol=2e-5, rtol=1e-4)
        ids = eager.argmax(-1)
    real = slice(0, labs[0].pool.dummy_page)
    for layer in range(2):
        caches = [(lab.pool.k_cache(layer)[real], lab.pool.v_cache(layer)[real]) for lab in labs]
        for one, other in zip(*caches):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_dummy_metadata_is_one_token_in_the_dummy_row() -> None:
    tables = TableManager(3, 8, 4, dummy_page=5, device="cpu")
    meta = dummy_metadata(3, tables)
    assert meta.table_idx.tolist() == [3, 3, 3] and meta.seq_lens.tolist() == [1, 1, 1]
    assert meta.kv_indices.tolist() == [5, 5, 5] and meta.last_page_len.tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------ the measurement


def test_the_measurement_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    assert main(["--device", "cpu", "--layers", "2", "--width", "8", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["batch"] for row in found["rows"]] == [1, 4, 16, 64, 256]
    assert all(row["operations"] == 2 * 9 and row["eager"] > 0 for row in found["rows"])
    assert found["hardware"] == "CPU" and "graph_bench --device cpu" in found["command"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_pool_takes_no_more_than_a_pool_each() -> None:
    assert pool_bytes((64, 16, 1), True, 2, 1024) <= pool_bytes((64, 16, 1), False, 2, 1024)
