"""Paged, cached, chunked, evicted, overlapped, aborted: the tokens are those of the dense model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from recorder import RecordingGraph

from minisgl.config.engine import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine, build_engine
from minisgl.parallel.comm import SingleRank
from minisgl.scheduler.messages import AbortMsg, UserMsg
from tests.checkpoints import make_checkpoint
from tests.dense import dense_batch
from tests.fakes import Driver
from tests.turns import in_turns

VOCAB, EOS, WINDOW = 32, 29, 96


@cache
def folder() -> Path:
    """One small random model for all examples; its end token comes up now and then."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return make_checkpoint(
        tempfile.mkdtemp(prefix="minisgl-"), "qwen3", seed=3, vocab_size=VOCAB, eos_token_id=EOS,
        max_position_embeddings=WINDOW, **sizes,
    )  # fmt: skip


def make_engine(page_size: int, num_pages: int, rows: int, **fields: Any) -> Engine:
    config = EngineConfig(
        model_path=str(folder()), device="cpu", page_size=page_size, num_pages=num_pages,
        max_running_req=rows, **fields,
    )  # fmt: skip
    new_graph = RecordingGraph if config.cuda_graph_bs else None
    return build_engine(config, SingleRank(), progress=False, new_graph=new_graph)


@cache
def reference() -> Any:
    return make_engine(16, 1, 1).model


@cache
def dense(prompt: tuple[int, ...], count: int, ignore_eos: bool) -> list[tuple[int, float]]:
    """Greedy tokens without any cache, each with its lead over the runner-up."""
    ids, out = list(prompt), []
    for _ in range(count):
        with torch.inference_mode():
            logits = reference()(dense_batch([ids], last_only=True))[0]
        best = logits.topk(2)
        ids.append(int(best.indices[0]))
        out.append((ids[-1], float(best.values[0] - best.values[1])))
        if ids[-1] == EOS and not ignore_eos:
            break
    return out


def assert_same(got: list[int], wanted: list[tuple[int, float]], complete: bool) -> None:
    """Equal tokens; a tie that rounding may decide either way ends the comparison."""
    for token, (best, lead) in zip(got, wanted):
        if token != best:
            assert lead < 1e-4, (got, wanted)
            return
    assert len(got) == len(wanted) if complete else len(got) <= len(wanted)


class PagedEqualsDense(RuleBasedStateMachine):
    """Requests with shared prefixes and aborts, at any time, on a tight pool."""

    @initialize(
        overlap=st.booleans(),
        cache_type=st.sampled_from(["radix", "naive"]),
        budget=st.sampled_from([3, 8, 64]),
        page_size=st.sampled_from([1, 4, 16]),
        tokens=st.integers(40, 80),
        rows=st.integers(1, 4),
        graphs=st.booleans(),
        policy=st.sampled_from(["fcfs", "fair"]),
        reserve=st.sampled_from([None, 1, 4]),
        mixed_prefill_threshold=st.sampled_from([2, 16]),
    )
    def start(self, page_size: int, tokens: int, rows: int, graphs: bool, **how: Any) -> None:
        fields = {"cuda_graph_bs": (1, 3)} if graphs else {}
        engine = make_engine(page_size, -(-tokens // page_size), rows, **fields)
        self.d = Driver(engine=engine, **how)
        self.d.scheduler.eos_token_ids = frozenset([EOS])
        self.d.engine.max_running_req = rows  # type: ignore[attr-defined]
        self.asked: dict[int, tuple[tuple[int, ...], int, bool]] = {}
        self.aborted: set[int] = set()

    @rule(base=st.integers(0, 2), same=st.integers(0, 24), new=st.integers(1, 10),
          own=st.lists(st.integers(0, 2), min_size=1, max_size=8),
          ignore=st.booleans())  # fmt: skip
    def ask(self, base: int, same: int, own: list[int], new: int, ignore: bool) -> None:
        prompt = tuple([(7 * base + 3 * i) % 20 for i in range(same)] + own)
        uid = len(self.asked)
        count = min(new, self.d.limits.total - len(prompt))
        self.asked[uid] = (prompt, count, ignore)
        params = SamplingParams(max_tokens=new, ignore_eos=ignore)
        self.d.channel.put_messages(UserMsg(uid, list(prompt), params))

    @precondition(lambda self: getattr(self, "asked", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.integers(0, len(self.asked) - 1))
        self.aborted.add(uid)
        self.d.channel.put_messages(AbortMsg(uid))

    @precondition(lambda self: getattr(self, "asked", None))
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The same prompt once more: the longest possible match."""
        prompt, _, ignore = self.asked[data.draw(st.integers(0, len(self.asked) - 1))]
        self.ask_exactly(prompt, 4, ignore)

    def ask_exactly(self, prompt: tuple[int, ...], new: int, ignore: bool) -> None:
        uid = len(self.asked)
        self.asked[uid] = (prompt, min(new, self.d.limits.total - len(prompt)), ignore)
        params = SamplingParams(max_tokens=new, ignore_eos=ignore)
        self.d.channel.put_messages(UserMsg(uid, list(prompt), params))

    @rule(turns=st.integers(1, 5))
    def turn(self, turns: int) -> None:
        self.d.go(turns)

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        self.d.drain()  # fails if a page is lost, or if it never ends
        for uid, request in self.asked.items():
            assert self.d.replies[uid][-1].finished
            assert_same(self.d.tokens(uid), dense(*request), uid not in self.aborted)


TestPagedEqualsDense = PagedEqualsDense.TestCase
TestPagedEqualsDense.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("page_size", in_turns(2, [1, 4, 16]))
def test_a_crowd_with_one_prefix(page_size: int, overlap: bool, cache_type: str) -> None:
    """Twenty requests, a common beginning, four rows, a pool for two and a half of them."""
    d = Driver(
        engine=make_engine(page_size, 112 // page_size, 4), overlap=overlap,
        cache_type=cache_type, budget=13,
    )  # fmt: skip
    d.scheduler.eos_token_ids = frozenset([EOS])
    d.engine.max_running_req = 4  # type: ignore[attr-defined]
    wanted = {}
    for uid in range(20):
        prompt = tuple([5, 9, 1] * 8)[: 24 - uid % 3] + (uid % 4, uid % 7)
        wanted[uid] = (prompt, 8, uid % 2 == 0)
        d.ask(uid, prompt, max_tokens=8, ignore_eos=uid % 2 == 0)
    d.drain()
    for uid, request in wanted.items():
        assert_same(d.tokens(uid), dense(*request), complete=True)
    hits = sum(d.replies[uid][-1].cached_tokens for uid in wanted)
    assert (hits > 0) == (cache_type != "naive")


def test_the_end_token_comes_up() -> None:
    """The oracle is worth something: answers differ, and some end by themselves."""
    answers = [dense((i % 20, i // 20), 10, False) for i in range(40)]
    assert len({tuple(t for t, _ in a) for a in answers}) > 30
    ended = [a for a in answers if a[-1][0] == EOS]
    assert 0 < len(ended) < 40
