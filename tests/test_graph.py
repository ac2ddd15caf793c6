"""Graphs: sizes, a capture that keeps addresses, and captured steps that equal eager ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import RecordingGraph
from torch import Tensor

from minisgl.attention.metadata import DecodeBuffers, ForwardBatch
from minisgl.engine.graph import GraphRunner, bucket_sizes, choose_sizes, dummy_step, pack
from minisgl.kvcache.page_table import TableManager

# ------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("max_bs", "want"),
    [
        (0, ()), (1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)  # fmt: skip
def test_bucket_sizes(max_bs: int, want: tuple[int, ...]) -> None:
    assert bucket_sizes(max_bs) == want


def test_choose_sizes() -> None:
    assert choose_sizes((4, 1, 4, 99), None, 8) == (1, 4)
    assert choose_sizes((), None, 8) == ()
    assert choose_sizes(None, 0, 8) == ()
    assert choose_sizes(None, 4, 256) == (1, 2, 4)
    assert choose_sizes(None, None, 1000)[-1] == 256
    assert choose_sizes(None, None, 5) == (1, 2, 4, 5)


# ------------------------------------------------------------------------------ the recorder


def graph_of(function: object) -> RecordingGraph:
    """Record one call of a function without arguments."""
    graph = RecordingGraph()
    graph.capture_begin()
    try:
        function()  # type: ignore[operator]
    finally:
        graph.capture_end()
    return graph


def test_a_graph_keeps_addresses_not_values() -> None:
    x, out, seen = torch.ones(3), torch.zeros(3), []
    factor = 2

    def region() -> None:
        seen.append("called")
        out.copy_(x * factor + 1)

    graph = graph_of(region)
    address, factor = x, 7  # Python is frozen
    x.fill_(10)  # in place: the graph sees it
    graph.replay()
    assert out.tolist() == [21, 21, 21] and seen == ["called"]
    x = torch.full((3,), 100.0)  # another tensor under the old name
    graph.replay()
    assert out.tolist() == [21, 21, 21] and address.tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    "region",
    [
        lambda x: x.sum().item(),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.ones(3).repeat_interleave(torch.tensor([1, 2, 1])),
    ],
)
def test_values_on_the_host_are_refused(region: object) -> None:
    with pytest.raises(RuntimeError, match="needs a value on the host"):
        graph_of(lambda: region(torch.ones(3)))  # type: ignore[operator]


def test_states_are_checked() -> None:
    graph = RecordingGraph()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()
    with pytest.raises(RuntimeError, match="without capture_begin"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="captured already"):
        graph_of(torch.ones(1).neg).capture_begin()


STEPS = {
    "scale": lambda t: t * 1.5,
    "tanh_": lambda t: t.tanh_(),
    "matmul": lambda t: t @ t.t() @ t,
    "view": lambda t: t.view(-1).view(3, 4),
    "transpose": lambda t: t.t().contiguous().view(3, 4),
    "gather": lambda t: t[torch.tensor([2, 0, 1])],
    "sort": lambda t: t.sort()[0],
    "scratch": lambda t: torch.add(t, 1, out=torch.empty_like(t)),
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
            torch.testing.assert_close(box["out"], program(fresh), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------ the runner

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class ToyPlan:
    """Writes k to its slots and returns what the pool holds there, and the request's length."""

    pool: Tensor
    buffers: DecodeBuffers

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        slots, lens = self.buffers.out_loc, self.buffers.positions[:, None] + 1
        self.pool.index_copy_(0, slots, k)
        return q + self.pool.index_select(0, slots) + lens


@dataclass
class ToyBackend:
    """Plans over a pool [slots, 1]."""

    pool: Tensor

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> ToyPlan:
        return ToyPlan(self.pool, buffers)


def toy_forward(fb: ForwardBatch) -> Tensor:
    x = (fb.input_ids + 100 * fb.positions)[:, None].float()
    y = fb.attn.run(x, x, x, 0)
    return torch.cat([y, -y, y * 0 + 1], dim=1)


def toy_runner(sizes: tuple[int, ...] = (1, 2, 4), device: str = "cpu") -> GraphRunner:
    tables = TableManager(8, 16, 4, dummy_page=9, device=device)
    new_graph = RecordingGraph if device == "cpu" else torch.cuda.CUDAGraph
    return GraphRunner(
        forward=toy_forward, sample=lambda logits, keys, temperature: logits[:, 0].long() % 50,
        backend=ToyBackend(torch.full((40, 1), -1.0, device=device)), tables=tables, sizes=sizes,
        vocab_size=3, dtype=torch.float32, new_graph=new_graph,
    )  # fmt: skip


def test_bucket() -> None:
    runner = toy_runner((4, 1, 2, 2))
    assert runner.bucket(1) is None, "nothing is captured yet"
    runner.capture(progress=False)
    assert [runner.bucket(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    for bad in ((), (0, 1)):
        with pytest.raises(ValueError, match="sizes: must be positive"):
            toy_runner(bad)


def toy_step(
    runner: GraphRunner, rows: list[int], positions: list[int], slots: list[int], count: int
) -> Tensor:
    """Replay a step of these requests, of which the first `count` are real; its ids."""
    r, p, s = (np.array(part, np.int32) for part in (rows, positions, slots))
    return runner.replay(pack(r, p, s, runner.tables.width, count, None))


@pytest.mark.parametrize("device", DEVICES)
def test_replay_reads_new_values_and_keeps_its_address(device: str) -> None:
    runner = toy_runner(device=device)
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream):
        runner.capture(progress=False)
    tokens, addresses = runner.tables.token_pool, set()
    for n in range(3):
        tokens[:2, n] = torch.tensor([n + 5, n + 8], device=device)
        ids = toy_step(runner, [0, 1], [n, n], [n, n + 8], 2)
        x = torch.tensor([n + 5 + 100 * n, n + 8 + 100 * n], device=device).float()
        want = 2 * x + n + 1
        assert torch.equal(runner.logits[:2, 0], want) and torch.equal(runner.logits[:2, 1], -want)
        assert ids.tolist() == (want.long() % 50).tolist() == tokens[:2, n + 1].tolist()
        assert runner.backend.pool[[n, n + 8], 0].tolist() == x.tolist()
        addresses.add(ids.data_ptr())
    assert len(addresses) == 1 and runner.replays == 3
    with pytest.raises(ValueError, match="3 was not captured"):
        toy_step(runner, [0, 1, 2], [0, 0, 0], [1, 2, 3], 3)


def test_captures_and_padding_touch_only_the_dummy_row_and_page() -> None:
    runner = toy_runner()
    runner.capture(progress=False)
    tables = runner.tables
    assert (runner.backend.pool[:36] == -1).all() and not tables.token_pool[:-1].any()
    toy_step(runner, [2, 8, 8, 8], [3, 0, 0, 0], [7, 36, 36, 36], 1)
    kept = runner.backend.pool[:36, 0] != -1
    assert kept.nonzero().flatten().tolist() == [7]
    assert tables.token_pool[:-1].nonzero().tolist() == [[2, 4]]


def test_a_capture_that_fails_ends() -> None:
    runner, calls = toy_runner((1,)), [0]
    forward = runner.forward

    def fails_the_second_time(fb: ForwardBatch) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("out of memory")
        return forward(fb)

    made: list[RecordingGraph] = []
    runner.forward = fails_the_second_time
    runner.new_graph = lambda: made.append(RecordingGraph()) or made[-1]  # type: ignore
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture(progress=False)
    assert made[0].recorder is None and not runner.steps


def test_a_dummy_step_is_one_token_in_the_dummy_row() -> None:
    tables = TableManager(3, 8, 4, dummy_page=5, device="cpu")
    packed = dummy_step(3, tables)
    assert packed.shape == (7, 3) and not packed[5:].any()
    assert packed[:5].T.tolist() == [[24, 24, 3, 0, 20]] * 3
