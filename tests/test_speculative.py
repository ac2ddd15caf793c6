"""Speculative decoding: the same tokens as without it, in fewer steps, whatever else happens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from recorder import RecordingGraph

from minisgl.attention.metadata import build_metadata
from minisgl.config.engine import EngineConfig, SchedulerConfig
from minisgl.core import Batch, IntArray, Phase, Req, SamplingParams
from minisgl.engine.engine import Engine, allocate_memory, build_engine
from minisgl.engine.runners import Runners
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import SampledTokens
from minisgl.kvcache.audit import check_integrity
from minisgl.llm import LLM
from minisgl.scheduler.messages import AbortMsg, UserMsg
from minisgl.scheduler.observe import StageClock
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.speculative import (
    LONGEST,
    NGramProposer,
    SpeculativeScheduler,
    VerifyBatch,
    count_accepted,
    join_rows,
    prompt_lookup,
    verify_batch,
)
from minisgl.server.workers.scheduler_process import stats_of
from tests import test_scheduler
from tests.checkpoints import make_checkpoint
from tests.fakes import EOS, Driver, FakeEngine, record_on_a_cpu

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


# ------------------------------------------------------------------ the look-up


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),  # goes on in its period
        ([1, 2, 3, 9, 2, 4, 2], []),  # one token is not enough
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2, 4]),  # a longer match, though earlier
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4, 1]),  # of equal ones the last
        ([5, 5, 5], [5] * 5),
        ([5, 5], []),
        ([5], []),
    ],
)
def test_look_up(text: list[int], want: list[int]) -> None:
    found = prompt_lookup(ids(*text), 2, 5)
    assert found.tolist() == want and found.dtype == np.int32


def slow_lookup(text: list[int], at_least: int, most: int) -> list[int]:
    """The same by trying everything."""
    best, start = 0, 0
    for end in range(len(text) - 1):
        length = 0
        while length < min(LONGEST, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length >= max(best, at_least):
            best, start = length, end + 1
    return list(itertools.islice(itertools.cycle(text[start:]), most)) if best else []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_look_up_finds_what_a_slow_search_finds(text: list[int], low: int, most: int) -> None:
    assert prompt_lookup(ids(*text), low, most).tolist() == slow_lookup(text, low, most)


class Asked:
    """As much of a request as a proposer looks at."""

    input_ids: IntArray


def test_each_miss_wants_a_longer_match_and_a_hit_starts_anew() -> None:
    """Up to the longest that is looked for, which is always good for a guess."""
    proposer, texts = NGramProposer(), [ids(*range(n), 99, *range(n)) for n in range(1, 12)]
    req: Any = Asked()

    def shortest() -> int:
        for n, text in enumerate(texts, 1):
            req.input_ids = text
            if len(proposer.propose([req], [4])[0]):
                return n
        raise AssertionError("no match is long enough")

    seen = []
    for _ in range(9):
        seen.append(shortest())
        proposer.update(req, 4, 0)
    assert seen == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    proposer.update(req, 4, 1)
    assert shortest() == 2
    proposer.release(req)
    proposer.release(req)
    assert not proposer.misses
    proposer.update(req, 3, 0)
    proposer.reset()
    assert not proposer.misses


# ------------------------------------------------------------------ an engine that keeps its books


def next_token(context: Sequence[int]) -> int:
    """A model of few tokens, which repeats itself now and then, and ends one answer in some."""
    if sum(context) % 29 == 0:
        return EOS
    return (context[-1] * 5 + context[len(context) // 2] + len(context) // 6) % 7


def answer(prompt: list[int], most: int, ignore_eos: bool) -> list[int]:
    """The whole answer to a prompt, token by token."""
    text = list(prompt)
    while len(text) < len(prompt) + most:
        text.append(next_token(text))
        if text[-1] == EOS and not ignore_eos:
            break
    return text[len(prompt) :]


class CacheEngine(FakeEngine):
    """Its tokens depend on what stands in the slots of a row's page table, and nothing else."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.slots = np.full(self.num_pages * self.page_size, -1)

    def prepare(self, batch: Batch) -> Any:
        if batch.phase is not Phase.DECODE:
            return super().prepare(batch)
        batch = replace(batch, reqs=sorted(batch.reqs, key=lambda req: -req.device_len))
        return replace(super().prepare(batch), meta=None)  # as one that captures

    def step(self, inputs: Any) -> Any:
        pool, table = self.tables.token_pool.numpy(), self.tables.page_table
        self.slots[inputs.out_loc] = pool[inputs.token_rows, inputs.positions]
        drawn = [next_token(self.slots[table[row, :end]].tolist())
                 for row, end in zip(inputs.write_rows, inputs.write_positions)]  # fmt: skip
        pool[inputs.write_rows, inputs.write_positions] = drawn
        return SimpleNamespace(wait=lambda: SampledTokens(drawn))


class Oracle(NGramProposer):
    """A source of right drafts; of every `wrong_at` drafts it spoils one."""

    def __init__(self, wrong_at: int = 10**9) -> None:
        super().__init__()
        self.wrong_at, self.learned = wrong_at, list[tuple[int, int]]()

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
        found = []
        for req, most in zip(reqs, limits):
            drafts = ids(*answer(req.input_ids.tolist(), most, True))
            drafts[(np.arange(most) + req.host_len) % self.wrong_at == 0] = 8
            found.append(drafts)
        return found

    def update(self, req: Req, drafted: int, accepted: int) -> None:
        super().update(req, drafted, accepted)
        self.learned.append((drafted, accepted))


def driver(proposer: Any = None, drafts: int = 4, **how: Any) -> Driver:
    """A scheduler that speculates, over an engine that notices stale keys and values."""
    sizes = {name: how.pop(name) for name in
             {"num_pages", "page_size", "max_seq_len", "max_running_req"} & how.keys()}  # fmt: skip
    rows = how.pop("max_rows", 32)
    return Driver(
        engine=CacheEngine(**sizes),
        scheduler=partial(
            SpeculativeScheduler, proposer=proposer or NGramProposer(),
            num_speculative_tokens=drafts, max_rows=rows,
        ),
        **how,
    )  # fmt: skip


class SpeculativeEvents(test_scheduler.Events):
    """Requests and aborts at any time, in any order, on a tight pool, with drafts of all kinds."""

    answer = staticmethod(answer)

    @initialize(
        overlap=st.booleans(),
        cache_type=st.sampled_from(["radix", "naive"]),
        budget=st.sampled_from([3, 64]),
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(3, 10),
        rows=st.integers(1, 4),
        share=st.sampled_from([1, 2, 32]),
        policy=st.sampled_from(["fcfs", "fair"]),
        reserve=st.sampled_from([None, 1, 6]),
        drafts=st.sampled_from([1, 3, 7]),
        max_rows=st.sampled_from([4, 32]),
        wrong_at=st.sampled_from([0, 2, 5, 10**9]),
    )
    def start(self, **how: Any) -> None:
        how["num_pages"] = how.pop("pages") * (4 if how["page_size"] == 1 else 1)
        how["max_running_req"] = how.pop("rows")
        wrong_at = how.pop("wrong_at")
        proposer = Oracle(wrong_at) if wrong_at else None
        self.d = driver(proposer, max_seq_len=48, **how)
        self.wanted: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.lost: set[int] = set()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "d"):
            assert not self.d.scheduler.proposer.misses  # type: ignore[attr-defined]


TestSpeculativeEvents = SpeculativeEvents.TestCase
TestSpeculativeEvents.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@LOOPS
def test_right_drafts_save_steps_and_wrong_ones_cost_none(overlap: bool) -> None:
    steps = {}
    for wrong_at in (1, 3, 10**9):
        d = driver(Oracle(wrong_at), overlap=overlap)
        d.ask(0, [1, 2, 3], max_tokens=31, ignore_eos=True)
        d.drain()
        assert d.tokens(0) == answer([1, 2, 3], 31, True) and d.reason(0) == "length"
        steps[wrong_at] = len(d.engine.steps)
    assert steps[1] == 31 and steps[10**9] == 1 + 30 // 5
    assert steps[10**9] < steps[3] < steps[1]


@LOOPS
def test_an_end_inside_of_accepted_drafts_ends_the_answer(overlap: bool) -> None:
    prompt = next([9, n] for n in range(99) if 2 < len(answer([9, n], 40, False)) < 6)
    d = driver(Oracle(), drafts=7, overlap=overlap)
    d.ask(0, prompt, max_tokens=40)
    d.drain()
    assert d.tokens(0) == answer(prompt, 40, False) and d.reason(0) == "stop"
    assert len(d.engine.steps) == 2


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_no_draft_lies_behind_the_last_token_that_is_wanted(most: int) -> None:
    d = driver(Oracle(), drafts=7)
    d.ask(0, [1, 2], max_tokens=most, ignore_eos=True)
    d.drain()
    assert len(d.tokens(0)) == most
    assert max(max(step.seq_lens) for step in d.engine.steps) == max(2, 2 + most - 1)


@LOOPS
def test_what_was_rejected_is_not_cached(overlap: bool) -> None:
    """A second request finds the whole first text, and the right keys and values in it."""
    d = driver(Oracle(2), overlap=overlap, page_size=1, num_pages=200)
    d.ask(0, [1, 2, 3], max_tokens=20, ignore_eos=True)
    d.drain()
    text = [1, 2, 3, *d.tokens(0)]
    d.ask(1, [*text, 4], max_tokens=20, ignore_eos=True)
    d.drain()
    assert d.tokens(1) == answer([*text, 4], 20, True)
    assert d.replies[1][0].cached_tokens == len(text) - 1  # type: ignore[union-attr]


@LOOPS
def test_abort_at_every_moment(overlap: bool) -> None:
    """The aborted request gets no more replies, its neighbour gets all of its own."""
    whole = [answer([1, n], 14, True) for n in range(2)]
    for turns in range(1, 9):
        d = driver(Oracle(4), overlap=overlap)
        for uid in range(2):
            d.ask(uid, [1, uid], max_tokens=14, ignore_eos=True)
        d.go(turns)
        d.channel.put_messages(AbortMsg(0))
        d.drain()
        assert d.tokens(1) == whole[1] and d.tokens(0) == whole[0][: len(d.tokens(0))]
        assert d.scheduler.proposer.misses == {}  # type: ignore[attr-defined]


def test_drafts_are_shared_by_a_batch_and_end_where_it_is_large() -> None:
    """As many rows as `max_rows`; the tokens are always the same."""
    most = {}
    for count in (1, 2, 4, 5):
        d = driver(Oracle(), drafts=7, max_rows=8, num_pages=200)
        for uid in range(count):
            d.ask(uid, [uid], max_tokens=9, ignore_eos=True)
        d.go(2)
        most[count] = len(d.engine.steps[-1].uids)
        d.drain()
        assert all(d.tokens(uid) == answer([uid], 9, True) for uid in range(count))
    assert most == {1: 8, 2: 8, 4: 8, 5: 5}


def test_where_pages_are_short_drafts_are_left_out_and_nobody_is_retracted() -> None:
    """The pool is what both need without drafts; once the short one is done, the other has some."""
    d, most = driver(Oracle(), drafts=7, page_size=1, num_pages=14, reserve=1), {0: 6, 1: 12}
    for uid, new in most.items():
        d.ask(uid, [uid, 2], max_tokens=new, ignore_eos=True)
    d.drain()
    assert d.scheduler.retractions == 0
    assert [step.uids for step in d.engine.steps[1:6]] == [[0, 1]] * 5
    assert len(d.engine.steps[6].uids) == 6
    assert all(d.tokens(uid) == answer([uid, 2], new, True) for uid, new in most.items())


def test_the_rest_of_a_half_done_prompt_keeps_its_pages() -> None:
    """Drafts between two chunks leave alone what the next chunks need."""
    d = driver(Oracle(), drafts=7, page_size=1, num_pages=30, budget=8, policy="fair", reserve=1)
    d.ask(0, [1, 2], "a", max_tokens=24, ignore_eos=True)
    d.go(2)
    d.ask(1, [3] * 18, "b", max_tokens=1, ignore_eos=True)
    d.drain()
    assert d.tokens(0) == answer([1, 2], 24, True) and d.tokens(1) == answer([3] * 18, 1, True)
    assert d.scheduler.retractions == 0


def test_pages_of_rejected_drafts_are_used_by_the_next_tokens() -> None:
    """They are the request's own: to take them for missing would retract it without need."""
    d = driver(Oracle(1), drafts=7, page_size=4, num_pages=4, reserve=1)
    d.ask(0, [1, 2, 3], max_tokens=13, ignore_eos=True)
    d.drain()
    assert d.tokens(0) == answer([1, 2, 3], 13, True)
    assert d.scheduler.retractions == 0


def test_the_fair_queue_charges_tokens_and_not_guesses() -> None:
    charged = {}
    for drafts in (0, 5):
        d = driver(Oracle(3), drafts=drafts, policy="fair", num_pages=200)
        d.ask(0, [1], "a", max_tokens=20, ignore_eos=True)
        d.ask(1, [2], "a", max_tokens=40, ignore_eos=True)
        while len(d.tokens(0)) < 20:
            d.go()
        share = d.scheduler.prefill.waiting._shares["a"]  # type: ignore[attr-defined]
        charged[drafts] = share.served - 2 * len(d.tokens(1))
        d.drain()
    assert charged[0] == charged[5]


def test_the_overlapped_loop_waits_only_for_steps_with_drafts() -> None:
    """Without drafts the next step is launched before the last is looked at, as ever."""
    for proposer, waits_first in ((Oracle(), True), (NGramProposer(), False)):
        events: list[Any] = []
        d = driver(proposer, overlap=True, emit=StageClock(events.append))
        d.ask(0, [1, 2, 3, 4], max_tokens=9, ignore_eos=True)
        if not waits_first:
            d.scheduler.proposer.propose = lambda reqs, limits: [ids()] * len(reqs)  # type: ignore[attr-defined]
        d.drain()
        order = [(e.name, e.step) for e in events if e.name in ("launch", "wait")]
        late = order.index(("launch", 2)) > order.index(("wait", 1))
        assert late == waits_first
        assert d.tokens(0) == answer([1, 2, 3, 4], 9, True)


def test_a_guess_that_a_token_too_early_allowed_is_made_again() -> None:
    """Drafts continue the newest token, not the one of an earlier look-up."""
    seen = []

    class Spy(Oracle):
        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
            seen.extend(req.device_len - req.host_len for req in reqs)
            return super().propose(reqs, limits)

    d = driver(Spy(), overlap=True)
    d.ask(0, [1, 2], max_tokens=9, ignore_eos=True)
    d.drain()
    assert seen == [1, 0, 0]
    assert [len(step.uids) for step in d.engine.steps] == [1, 5, 3]


@LOOPS
def test_the_step_behind_one_with_drafts_knows_where_its_requests_stand(overlap: bool) -> None:
    """Also if it has no drafts itself."""

    class Rarely(Oracle):
        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
            found = super().propose(reqs, limits)
            return [ids() if req.device_len % 4 else drafts for req, drafts in zip(reqs, found)]

    d = driver(Rarely(), overlap=overlap)
    d.ask(0, [1, 2, 3], max_tokens=20, ignore_eos=True)
    d.drain()
    assert d.tokens(0) == answer([1, 2, 3], 20, True)


# ------------------------------------------------------------------ a real model


def serve(**fields: Any) -> LLM:
    """The embedded model in a small engine on a CPU."""
    fields = {"num_speculative_tokens": 4, **fields}
    return LLM(**{"device": "cpu", "page_size": 4, "num_pages": 2000, "seed": 0, **fields})


COPY = "Copy this: red green blue red green blue red green blue red green."
STORY = "Tell me a story about a fox."
ASKED: list[tuple[str, SamplingParams]] = [
    (COPY, SamplingParams(max_tokens=24)),
    (COPY, SamplingParams(max_tokens=20, temperature=0.7, seed=1)),
    (COPY, SamplingParams(max_tokens=20, temperature=0.7, seed=2, top_k=20, top_p=0.9)),
    (COPY, SamplingParams(max_tokens=20, temperature=2.0)),
    (COPY, SamplingParams(max_tokens=20, logprobs=2)),
    (COPY, SamplingParams(max_tokens=20, presence_penalty=0.5, repetition_penalty=1.1)),
    (COPY, SamplingParams(max_tokens=20, frequency_penalty=1.0, temperature=0.5, seed=4)),
    (COPY, SamplingParams(max_tokens=40, min_tokens=30, bad_words=["blue red"])),
    (COPY, SamplingParams(max_tokens=40, stop=["blue red green b"])),
    (COPY, SamplingParams(max_tokens=20, choice=["red green blue red green", "no"])),
    (COPY, SamplingParams(max_tokens=1)),
    (COPY, SamplingParams(max_tokens=2, ignore_eos=True)),
    (STORY, SamplingParams(max_tokens=24, temperature=1.0, seed=3)),
    (STORY, SamplingParams(max_tokens=16, regex="(red )+")),
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "recorded": {"overlap": True, "cuda_graph_bs": (4, 8, 16), "max_seq_len_override": 96},
    "naive cache": {"cache_type": "naive", "page_size": 1},
    "retracted": {"overlap": True, "num_pages": 40, "reserve_tokens": 1},
}


def talks() -> list[Any]:
    return [[{"role": "user", "content": text}] for text, _ in ASKED]


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, Any]]:
    """Return the answers without speculation, together and alone."""
    with serve(num_speculative_tokens=0) as llm:
        assert type(llm.scheduler) is Scheduler
        return llm.chat(talks(), [params for _, params in ASKED])


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """All that a caller sees, but for what depends on the cache."""
    for key in ("text", "token_ids", "finish_reason", "prompt_tokens"):
        assert got[key] == want[key]
    for one, other in zip(got.get("logprobs", []), want.get("logprobs", []), strict=True):
        assert one["token_id"] == other["token_id"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert len(one["top_logprobs"]) == len(other["top_logprobs"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_answers_as_without(
    kind: str, wanted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "recorded":
        record_on_a_cpu(monkeypatch)
    with serve(max_running_req=8, **KINDS[kind]) as llm:
        scheduler, params = llm.scheduler, [params for _, params in ASKED]
        for got, want in zip(llm.chat(talks(), params), wanted, strict=True):
            same(got, want)
        assert isinstance(scheduler, SpeculativeScheduler)
        assert 0 < scheduler.accepted <= scheduler.drafted
        assert (scheduler.retractions > 0) == (kind == "retracted")
        graph = scheduler.engine.runners.decode
        assert graph is None or graph.replays > scheduler.step_count // 2
        check_integrity(scheduler.cache)
        alone = llm.chat(talks()[0], params[0])[0]  # one stream: all rows are its own
        same(alone, wanted[0])


def test_copying_takes_fewer_steps_and_a_story_no_more() -> None:
    with serve(num_speculative_tokens=7) as llm:
        for text, most in ((COPY, 0.5), (STORY, 1.0)):
            before = llm.scheduler.step_count
            params = SamplingParams(max_tokens=40)
            out = llm.chat([{"role": "user", "content": text}], params)[0]
            assert llm.scheduler.step_count - before <= most * len(out["token_ids"])
        stats = stats_of(llm.scheduler)
        assert isinstance(llm.scheduler, SpeculativeScheduler)
        names = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
        counted = tuple(stats.counts[name] for name in names)
        assert counted == (llm.scheduler.drafted, llm.scheduler.accepted) and min(counted) > 0


def test_limits_of_drafts() -> None:
    """Steps with drafts are no larger than the largest captured one."""
    few: Any = SimpleNamespace(sizes=[1, 2, 6])
    assert Runners().max_draft_rows == 32
    assert Runners(decode=few).max_draft_rows == 6
    with pytest.raises(ValueError, match="num_speculative_tokens: must be"):
        SchedulerConfig(num_speculative_tokens=32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs without a GPU")
@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_with_drafts_store_first(tmp_path: Path, drafts: int) -> None:
    """An engine that drafts captures no step that stores and attends in one launch."""
    pytest.importorskip("triton")
    from minisgl.attention.fused_backend import FusedPlan, VerifyPlan

    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, head_dim=32)
    config = EngineConfig(model_path=str(path), device="cpu", num_pages=8,
                          max_running_req=2, num_speculative_tokens=drafts)  # fmt: skip
    made = build_engine(config, progress=False)
    how: dict[str, Any] = {"attention_backend": "torch,fused", "cuda_graph_bs": (1, 2)}
    config = replace(made.config, **how)
    memory = allocate_memory(config, made.model_config, 8)
    engine = Engine(config, made.model_config, made.model, *memory, new_graph=RecordingGraph)
    graph = engine.runners.decode
    assert graph is not None and engine.runners.max_draft_rows == 2
    kind = VerifyPlan if drafts else FusedPlan
    assert {type(step.plan) for step in graph.steps.values()} == {kind}
    for batch in (Batch, VerifyBatch):
        engine.step(engine.prepare(batch([engine.dummy_req], Phase.DECODE)))
    pages = SimpleNamespace(free_pages=8, evictable_tokens=0)
    cache = SimpleNamespace(allocator=pages, prefix_cache=pages, page_size=16)
    asked: Any = SimpleNamespace(engine=engine, cache=cache, reqs={}, step_count=2, retractions=0)
    assert stats_of(asked).counts["graph_replays"] == 2


def test_one_running_request_may_have_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps for as many rows are recorded, though there is one request at a time."""
    record_on_a_cpu(monkeypatch)
    with serve(max_running_req=1, max_seq_len_override=96) as llm:
        graph = llm.scheduler.engine.runners.decode
        assert graph is not None and graph.sizes == [1, 2, 4, 5]
        llm.chat(talks()[0], ASKED[0][1])
        assert llm.scheduler.accepted > 0  # type: ignore[attr-defined]
        assert graph.replays == llm.scheduler.step_count - 1


# ------------------------------------------------------------------ the distribution

VOCAB, COUNT = 4, 12_000
MATRIX = np.array([[6, 2, 1, 1], [1, 5, 3, 1], [2, 2, 2, 4], [1, 3, 1, 5]]) / 10.0
DRAFTS = (1, 2)  # for each of many requests whose last token is 0


def drawn_rows() -> np.ndarray:
    """Sample many requests of a Markov chain; return the tokens and their rows, [COUNT, 3]."""
    sampler = Sampler(VOCAB, "cpu", seed=5)
    drawn = []
    for ahead, last in enumerate((0, *DRAFTS)):
        params = SamplingParams(temperature=1.0)
        reqs = []
        for uid in range(COUNT):
            req = Req(uid=uid, input_ids=ids(0), sampling_params=params, max_new_tokens=9)
            req.device_len += ahead
            reqs.append(req)
        logits = torch.tensor(np.log(MATRIX[last]), dtype=torch.float32).repeat(COUNT, 1)
        drawn.append(sampler.sample(logits, sampler.prepare(reqs)).next_ids.numpy())
    return np.stack(drawn, 1)


def distance(counts: np.ndarray) -> float:
    """Pearson's chi-square of first and second tokens against the chain, per degree of freedom."""
    wanted = COUNT * MATRIX[0][:, None] * MATRIX
    return float(((counts - wanted) ** 2 / wanted).sum() / (VOCAB * VOCAB - 1))


def test_what_is_kept_has_the_models_distribution() -> None:
    """And the test is sharp: two rules that sound right fail it by far."""
    rows, rng = drawn_rows(), np.random.default_rng(0)
    draft, chance = DRAFTS[0], MATRIX[0, DRAFTS[0]]
    after = np.array([rng.choice(VOCAB, COUNT, p=row) for row in MATRIX])  # drawn a step later

    def pairs(first: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        second = np.where(accepted, rows[:, 1], after[first, np.arange(COUNT)])
        return np.bincount(VOCAB * first + second, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)

    kept = np.array([count_accepted(DRAFTS, drawn) > 0 for drawn in rows.tolist()])
    lucky = rng.random(COUNT) < chance  # the draft with its probability, else any draw
    sure = np.full(COUNT, chance >= 0.2)  # the draft if the model finds it likely enough
    assert distance(pairs(rows[:, 0], kept)) < 2.5
    for wrong in (lucky, sure):
        assert distance(pairs(np.where(wrong, draft, rows[:, 0]), wrong)) > 25


def test_rows_are_the_request_at_later_positions() -> None:
    """They share row and tokens, and nothing that the step changes."""
    req = Req(uid=3, input_ids=ids(1, 2), sampling_params=SamplingParams(), max_new_tokens=9)
    req.cached_len, req.device_len, req.table_idx = 2, 3, 5
    other = Req(uid=4, input_ids=ids(1), sampling_params=SamplingParams(), max_new_tokens=9)
    batch = verify_batch({req: ids(7, 8), other: ids()})
    assert isinstance(batch, VerifyBatch) and batch.phase is Phase.DECODE
    assert [(r.uid, r.table_idx, r.cached_len, r.device_len) for r in batch.reqs] == [
        (3, 5, 2, 3), (3, 5, 3, 4), (3, 5, 4, 5), (4, -1, 0, 1),
    ]  # fmt: skip
    assert batch.reqs[0] is req and batch.reqs[3] is other
    req.advance()
    assert batch.reqs[1].device_len == 4 and batch.reqs[1].extend_len == 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 7)), min_size=1, max_size=6))
def test_rows_of_a_request_are_joined_to_a_piece_of_its_text(texts: list[tuple[int, int]]) -> None:
    """`texts`: cached tokens and drafts of each request."""
    cached, drafts = np.array(texts, np.int32).T
    table = np.arange(6 * 64, dtype=np.int32).reshape(6, 64)
    rows = np.random.default_rng(0).permutation(6)[: len(texts)].astype(np.int32)
    extend = drafts + 1
    want = build_metadata(Phase.PREFILL, rows, extend, cached + extend, table, 4)
    apart = np.concatenate([np.arange(c + 1, c + e + 1) for c, e in zip(cached, extend)])
    ones = np.ones(len(apart), np.int32)
    meta = build_metadata(Phase.DECODE, rows.repeat(extend), ones, apart, table, 4)
    got = vars(join_rows(meta))
    for name, value in vars(want).items():
        np.testing.assert_array_equal(got[name], value, name)


@pytest.mark.parametrize(
    ("drafts", "drawn", "want"),
    [((), (5,), 0), ((5,), (5, 6), 1), ((5,), (6, 6), 0), ((5, 6, 7), (5, 9, 7, 8), 1),
     ((5, 6), (5, 6, 7), 2)],
)  # fmt: skip
def test_drafts_count_up_to_the_first_wrong_one(
    drafts: tuple[int, ...], drawn: tuple[int, ...], want: int
) -> None:
    assert count_accepted(drafts, drawn) == want


def test_every_rank_guesses_the_same() -> None:
    """Drafts are a function of the text: two schedulers propose the same."""
    made = []
    for _ in range(2):
        d = driver()
        for uid in range(3):
            d.channel.put_messages(UserMsg(uid, [1, 2, uid], SamplingParams(max_tokens=30)))
        d.drain()
        made.append([step.seq_lens for step in d.engine.steps])
    assert made[0] == made[1]
