"""Requests side by side: mixed steps, chunks of long prompts, and turns of long contexts."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import RecordingGraph

from minisgl.config.engine import SchedulerConfig
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.engine import Engine, build_engine
from minisgl.engine.graph import GraphRunner
from minisgl.engine.prefill_graph import MAX_REQUESTS, PrefillRunner
from minisgl.engine.runners import MAX_MIXED_TOKENS
from minisgl.llm import LLM
from minisgl.scheduler import mixed
from minisgl.scheduler.build import Parts, build_prefill, build_scheduler
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import UserMsg
from minisgl.scheduler.mixed import (
    CPU_CHUNK,
    CPU_CONTEXT,
    GPU_CHUNK,
    GPU_CONTEXT,
    MixedPrefill,
    SharedDecode,
)
from minisgl.scheduler.queue import ANSWER_WEIGHT, FairQueue
from tests.adversary import Ask, Script, Turn, play
from tests.fakes import Driver, FakeEngine, expected, record_on_a_cpu

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "fair"])


def started(driver: Driver, running: int = 3, **params: Any) -> Driver:
    """Start some requests, and decode twice."""
    for uid in range(running):
        driver.ask(uid, [uid + 1] * 5, max_tokens=40, ignore_eos=True, **params)
    driver.go(3)
    driver.engine.steps.clear()
    return driver


def is_mixed(driver: Driver, prompt: int = 6, **params: Any) -> bool:
    """Ask once more; True if the running requests got a token in the prompt's step."""
    driver.ask(99, [9] * prompt, max_tokens=4, **params)
    while not (steps := [step for step in driver.engine.steps if 99 in step.uids]):
        driver.go()
    assert steps[0].phase == "prefill"
    return len(steps[0].uids) > 1


@POLICIES
@pytest.mark.parametrize("overlap", [False, True])
def test_a_short_prompt_joins_the_running_requests(policy: str, overlap: bool) -> None:
    driver = started(Driver(policy=policy, overlap=overlap, mixed=(9, 4)))
    driver.ask(99, [9] * 6, max_tokens=4)
    driver.go()
    (step,) = driver.engine.steps[-1:]
    assert (step.uids, step.extend) == ([99, 0, 1, 2], [6, 1, 1, 1])
    assert sorted(step.sampled) == [0, 1, 2, 99]
    driver.drain()


@pytest.mark.parametrize(
    ("limits", "prompt", "joins"),
    [((9, 4), 6, True), ((8, 4), 6, False), ((9, 3), 6, False), ((0, 0), 1, False)],
)
def test_limits_of_a_mixed_step(limits: tuple[int, int], prompt: int, joins: bool) -> None:
    assert is_mixed(started(Driver(mixed=limits)), prompt) is joins


def test_context_is_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def contexts(driver: Driver) -> int:
        return 6 + sum(req.device_len for req in driver.scheduler.decode.running.values())

    most = contexts(started(Driver(mixed=(64, 8))))
    monkeypatch.setattr(mixed, "MAX_CONTEXT", most)
    assert is_mixed(started(Driver(mixed=(64, 8))))
    monkeypatch.setattr(mixed, "MAX_CONTEXT", most - 1)
    assert not is_mixed(started(Driver(mixed=(64, 8))))


def test_wanted_scores_of_a_prompt_keep_its_step_apart() -> None:
    assert not is_mixed(started(Driver(mixed=(64, 8))), prompt_logprobs=1)


def test_no_page_is_promised_twice() -> None:
    """Three answers that each need a page now, and as many pages as the prompt alone takes."""
    driver = Driver(mixed=(64, 8), num_pages=8, reserve=1)
    started(driver, 3)
    while any(
        driver.cache.allocated_len[req] >= req.device_len
        for req in driver.scheduler.decode.running.values()
    ):
        driver.go()
    prefill = driver.scheduler.prefill
    assert isinstance(prefill, MixedPrefill)
    running = list(driver.scheduler.decode.running.values())
    free = driver.cache.available_tokens // driver.cache.page_size
    assert prefill.has_pages(running[:free]) and not prefill.has_pages((running * 4)[: free + 1])
    driver.ask(99, [9] * 6, max_tokens=4)
    driver.drain()
    assert [r.token for r in driver.replies[99]] == expected([9] * 6, 4)


def test_only_prompts_that_end_go_to_the_prefix_cache() -> None:
    driver = started(Driver(mixed=(64, 8)))
    with mock.patch.object(driver.cache, "cache_req", wraps=driver.cache.cache_req) as cached:
        assert is_mixed(driver)
    assert [call.args[0].uid for call in cached.call_args_list] == [99]


def test_each_pays_for_what_it_computes() -> None:
    driver = started(Driver(policy="fair", mixed=(64, 8)))
    queue = driver.scheduler.prefill.waiting
    assert isinstance(queue, FairQueue)
    plain, paid = queue.charge, list[dict[str, int]]()

    def charge(batch: Batch) -> None:
        before = {client: share.served for client, share in queue._shares.items()}
        plain(batch)
        after = {client: share.served for client, share in queue._shares.items()}
        paid.append({client: served - before[client] for client, served in after.items()})

    with mock.patch.object(queue, "charge", charge):
        driver.ask(99, [9] * 6, client="new", max_tokens=4)
        while not any(99 in step.uids for step in driver.engine.steps):
            driver.go()
    assert paid[-1] == {"": 3 * ANSWER_WEIGHT, "new": 6}


@pytest.mark.parametrize(("policy", "running"), [("fair", 1), ("fair", 0), ("fcfs", 1)])
def test_a_long_prompt_gets_small_chunks_beside_others(
    policy: str, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixedPrefill, "long_chunk", 16)
    driver = started(Driver(policy=policy, mixed_prefill_threshold=2), running)
    driver.ask(99, [9] * 70, max_tokens=2, ignore_eos=True)
    driver.drain()
    sizes = [n for s in driver.engine.steps for uid, n in zip(s.uids, s.extend) if uid == 99]
    small = policy == "fair" and running
    assert sizes[:-1] == ([16, 16, 16, 16, 6] if small else [64, 6])


@pytest.mark.parametrize("prompts", [(20, 70), (5, 40, 40), (16, 17), (3, 70, 3), (33, 33, 33)])
@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 0}])
def test_a_long_prompt_behind_another_gets_what_is_left_of_a_chunk(
    prompts: tuple[int, ...], scores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of the first is short: the others do not fill up the step."""
    monkeypatch.setattr(MixedPrefill, "long_chunk", 16)
    driver = started(Driver(policy="fair", mixed_prefill_threshold=2))
    for uid, length in enumerate(prompts, 90):
        driver.ask(uid, [uid] * length, max_tokens=1, **scores)
    driver.drain()
    found = dict.fromkeys(range(90, 90 + len(prompts)), 0)
    for step in driver.engine.steps:
        new = {uid: n for uid, n in zip(step.uids, step.extend) if uid >= 90}
        long = [uid for uid in new if prompts[uid - 90] - found[uid] > 16]
        assert not long or sum(new.values()) <= 16, step
        found = {uid: count + new.get(uid, 0) for uid, count in found.items()}
    assert tuple(found.values()) == prompts


def test_a_short_prompt_beside_others_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedPrefill, "long_chunk", 16)
    driver = started(Driver(policy="fair"))
    for uid in (90, 91, 92):
        driver.ask(uid, [uid] * 16, max_tokens=2)
    driver.go(2)
    assert [90, 91, 92] in [step.uids for step in driver.engine.steps]


@pytest.mark.parametrize(("fields", "limits"), [
    ({}, (8, MAX_REQUESTS)),
    ({"prefill_graph_max_tokens": 4096}, (MAX_MIXED_TOKENS, MAX_REQUESTS)),
    ({"prefill_graph_max_tokens": 0}, (0, 0)),
    ({"num_speculative_tokens": 2}, (0, 0)),
    ({"deterministic": True, "attention_backend": "torch"}, (0, 0)),
])  # fmt: skip
def test_limits_come_from_the_recorded_steps(
    fields: dict[str, Any], limits: tuple[int, int]
) -> None:
    config = SchedulerConfig(**{
        "device": "cpu", "page_size": 4, "num_pages": 64, "max_running_req": 4, "overlap": True,
        "cuda_graph_bs": (1, 2), "prefill_graph_max_tokens": 8, "max_extend_tokens": 4096, **fields,
    })  # fmt: skip
    parts = Parts(engine=partial(build_engine, new_graph=RecordingGraph))
    with mock.patch.object(PrefillRunner, "capture"), mock.patch.object(GraphRunner, "capture"):
        prefill = build_scheduler(config, InProcessChannel(), parts=parts).prefill
    assert isinstance(prefill, MixedPrefill)
    assert (prefill.max_tokens, prefill.max_requests) == limits


def test_chunks_are_shorter_on_a_cpu() -> None:
    config = SchedulerConfig(device="cpu", page_size=4, num_pages=64, schedule_policy="fair")
    prefill = build_scheduler(config, InProcessChannel()).prefill
    assert isinstance(prefill, MixedPrefill) and prefill.long_chunk == CPU_CHUNK < GPU_CHUNK
    assert MixedPrefill.long_chunk == GPU_CHUNK


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS, overlap=st.booleans(), policy=st.sampled_from(["fcfs", "fair"]),
    pages=st.integers(12, 40), limits=st.tuples(st.integers(0, 40), st.integers(0, 9)),
    chunk=st.integers(4, 20), salt=st.integers(1, 3),
)  # fmt: skip
def test_answers_do_not_depend_on_what_is_mixed(
    arrivals: list[tuple[int, int, int]], overlap: bool, policy: str, pages: int,
    limits: tuple[int, int], chunk: int, salt: int,
) -> None:  # fmt: skip
    """Any arrivals, pools so small that requests are retracted, and limits of all sizes."""
    with mock.patch.object(MixedPrefill, "long_chunk", chunk):
        driver = Driver(overlap=overlap, policy=policy, num_pages=pages, reserve=1, mixed=limits)
        want = {}
        for uid, (steps, prompt, new) in enumerate(arrivals):
            ids = [1 + (uid * salt + i) % 5 for i in range(prompt)]
            want[uid] = expected(ids, new)
            driver.ask(uid, ids, max_tokens=new)
            driver.go(steps)
        driver.drain()
    assert {uid: [r.token for r in driver.replies[uid]] for uid in want} == want


@pytest.mark.parametrize("recorded", [False, True])
def test_the_engine_answers_as_without(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, sampled and greedy, with log probabilities and penalties."""
    how: dict[str, Any] = {"device": "cpu", "page_size": 4, "num_pages": 96}
    how["max_seq_len_override"] = 48
    if recorded:
        record_on_a_cpu(monkeypatch)
        how |= {"cuda_graph_bs": (4, 8), "prefill_graph_max_tokens": 64}

    def answers(limits: tuple[int, int]) -> tuple[dict[int, list[Any]], int]:
        mixed_steps = 0
        found: dict[int, list[Any]] = {}
        with LLM(schedule_policy="fair", **how) as llm:
            prefill, engine = llm.scheduler.prefill, llm.scheduler.engine
            assert isinstance(prefill, MixedPrefill) and isinstance(engine, Engine)
            assert (prefill.max_tokens > 0) is recorded
            prefill.max_tokens, prefill.max_requests = limits
            plain = engine.prepare

            def prepare(batch: Batch) -> Any:
                nonlocal mixed_steps
                old = sum(req.cached_len >= req.prefill_len for req in batch.reqs)
                inputs = plain(batch)
                if batch.phase is Phase.PREFILL and old > 0:
                    mixed_steps += 1
                    assert (inputs.runner is not None) is recorded
                return inputs

            monkeypatch.setattr(engine, "prepare", prepare)
            for uid in range(8):
                params = SamplingParams(
                    temperature=0.8 * (uid % 2), seed=uid, max_tokens=14, ignore_eos=True,
                    logprobs=2 if uid % 3 == 0 else None,
                    frequency_penalty=0.5 if uid % 3 == 1 else 0.0,
                )  # fmt: skip
                ids = llm.tokenizer.encode(f"Question {uid}: what is {uid} plus one?")
                llm.channel.put_messages(UserMsg(uid, list(ids), params))
                for _ in range(3):
                    llm.scheduler.step_overlap()
            while llm.scheduler.has_work:
                llm.scheduler.step_overlap()
            for reply in llm.channel.take_replies():
                found.setdefault(reply.uid, []).append(reply.token)  # type: ignore[union-attr]
        return found, mixed_steps

    apart, none = answers((0, 0))
    together, some = answers((256, 16))
    assert (none, apart) == (0, together) and some >= 5


def test_a_mixed_step_leaves_pages_for_the_rest_of_a_prompt() -> None:
    """The second chunk of a prompt needs the last pages; a running request must not take them."""
    first, second = (Ask(uid=9, text=1, length=49, max_tokens=8),
                     Ask(uid=11, text=1, length=34, max_tokens=1))  # fmt: skip
    play(Script((first, Turn(7), second), page_size=1, num_pages=88, window=61, budget=25,
                cache="naive", overlap=False, reserve=0, mixed=40))  # fmt: skip


# ------------------------------------------------------------------ many long contexts


@pytest.mark.parametrize("overlap", [False, True])
def test_long_contexts_take_turns(overlap: bool) -> None:
    """Six long requests of one client, of which few fit beside its first and another client's."""
    driver = Driver(overlap=overlap, policy="fair", max_context=120, num_pages=200, budget=256)
    driver.ask(9, [9] * 5, client="other", max_tokens=40, ignore_eos=True)
    for uid in range(6):
        driver.ask(uid, [uid + 1] * 24, max_tokens=12, ignore_eos=True)
    driver.drain()
    steps = [step for step in driver.engine.steps if step.phase == "decode"]
    assert all(sum(step.seq_lens) - max(step.seq_lens) <= 120 for step in steps)
    assert all(9 in step.uids for step in steps)
    members = [step.uids for step in steps]
    assert members[2:4] == [[9, 0, 1, 2, 3, 4], [9, 0, 1, 2, 3, 5]]
    assert members[4] == [9, 0, 1, 2, 4, 5]
    for uid in range(6):
        assert driver.tokens(uid) == expected([uid + 1] * 24, 12, ignore_eos=True)
    assert driver.tokens(9) == expected([9] * 5, 40, ignore_eos=True)


def running(lengths: list[tuple[int, str]], most: int) -> tuple[SharedDecode, list[Req]]:
    """Return a decode manager with requests of these lengths and clients."""
    decode = SharedDecode(max_context=most)
    reqs = [
        Req(uid=uid, input_ids=np.ones(length, np.int32), sampling_params=SamplingParams(),
            max_new_tokens=400, client=client)
        for uid, (length, client) in enumerate(lengths)
    ]  # fmt: skip
    for req in reqs:
        req.advance()
        decode.update([req])
    return decode, reqs


def chosen(decode: SharedDecode, launched: bool = True) -> list[int]:
    """Return the members of a step, and compute it."""
    batch = decode.schedule()
    assert batch is not None and batch.phase is Phase.DECODE
    if launched:
        for req in batch.reqs:
            req.advance()
        decode.update(batch.reqs)
    return [req.uid for req in batch.reqs]


def test_all_requests_within_the_bound_are_in_the_step() -> None:
    lengths = [(9, "a"), (9, "a"), (9, "a"), (9, "b")]
    assert chosen(running(lengths, 40)[0]) == [0, 1, 2, 3]  # each has its next token
    assert chosen(running(lengths, 29)[0]) == [0, 1, 3]


def test_first_requests_beyond_the_bound_take_turns() -> None:
    decode, _ = running([(50, name) for name in "abcd"], 60)
    assert [chosen(decode) for _ in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_request_longer_than_the_bound_gets_its_token() -> None:
    decode, _ = running([(9, "a"), (500, "b"), (500, "a")], 60)
    assert [chosen(decode) for _ in range(5)] == [[0], [0, 1], [0, 2], [0, 1], [0, 2]]


def test_a_step_that_is_not_launched_takes_no_turn() -> None:
    decode, _ = running([(20, "a")] * 5, 60)
    first = chosen(decode, launched=False)
    assert first == chosen(decode) != chosen(decode)


def test_short_requests_do_not_wait_for_the_long_ones_of_another() -> None:
    decode, _ = running([(40, "long")] * 6 + [(5, "short")] * 3, 120)
    steps = [chosen(decode) for _ in range(6)]
    assert all({6, 7, 8} <= {*step} for step in steps)
    assert {uid for step in steps for uid in step} == {*range(9)}


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.sampled_from("abc")), min_size=1, max_size=9),
    most=st.integers(0, 300), leaving=st.lists(st.integers(0, 30), max_size=4),
)  # fmt: skip
def test_each_request_gets_its_turn(
    lengths: list[tuple[int, str]], most: int, leaving: list[int]
) -> None:
    """Nobody waits for more steps than there are requests, while others leave and come back."""
    decode, reqs = running(lengths, most)
    waits = dict.fromkeys(reqs, 0)
    for step in range(40):
        if leaving and step % 8 == 7:
            gone = reqs[leaving.pop() % len(reqs)]
            decode.remove(gone)
            if decode.running:
                chosen(decode)
            decode.update([gone])  # as after its prefill step
            waits = dict.fromkeys(reqs, 0)
        context = {req.uid: req.device_len for req in reqs}
        order = [*decode.running]
        uids = chosen(decode)
        assert uids == [uid for uid in order if uid in uids], "not in the order of joining"
        tokens = [context[uid] for uid in uids]
        assert sum(tokens) - max(tokens) <= most
        own: dict[str, list[int]] = {}
        for uid in order:
            own.setdefault(reqs[uid].client, []).append(context[uid])
        for client, sizes in own.items():
            others = [each for name, each in own.items() if name != client]
            if max(sizes) + sum(max(each) for each in others) <= most:
                assert any(reqs[uid].client == client for uid in uids)
            total = sum(sizes)
            if total + sum(max(*each, total) for each in others) <= most:  # short beside long ones
                assert sum(reqs[uid].client == client for uid in uids) == len(sizes)
        waits = {req: 0 if req.uid in uids else waits[req] + 1 for req in reqs}
        assert max(waits.values()) < len(reqs)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_turns_change_no_answer(overlap: bool, drafts: int) -> None:
    """The embedded model, with a row that is not in every step."""

    def answers(most: int) -> tuple[dict[int, list[Any]], bool]:
        found: dict[int, list[Any]] = {}
        left_out = False
        with LLM(device="cpu", page_size=4, num_pages=256, schedule_policy="fair", overlap=overlap,
                 num_speculative_tokens=drafts) as llm:  # fmt: skip
            decode = llm.scheduler.decode
            assert isinstance(decode, SharedDecode) and decode.max_context == CPU_CONTEXT
            decode.max_context = most
            for uid in range(6):
                params = SamplingParams(
                    temperature=0.8 * (uid % 2), seed=uid, max_tokens=16, ignore_eos=True,
                    frequency_penalty=0.5 if uid % 3 == 1 else 0.0,
                    logprobs=1 if uid == 2 else None,
                )  # fmt: skip
                ids = llm.tokenizer.encode(f"one two three one two three {uid} one two")
                llm.channel.put_messages(UserMsg(uid, list(ids), params, f"client {uid % 2}"))
            while llm.scheduler.has_work or llm.channel.waiting:
                if (batch := decode.schedule()) is not None:
                    left_out |= batch.size < len(decode.running)
                (llm.scheduler.step_overlap if overlap else llm.scheduler.step)()
                for reply in llm.channel.take_replies():
                    found.setdefault(reply.uid, []).append(reply.token)  # type: ignore[union-attr]
            assert not decode.running
        return found, left_out

    plain, none = answers(GPU_CONTEXT)
    bounded, some = answers(60)
    assert plain == bounded and some and not none


@pytest.mark.parametrize(("device", "policy", "most"), [
    ("cpu", "fair", CPU_CONTEXT), ("cuda:0", "fair", GPU_CONTEXT), ("cpu", "fcfs", None),
])  # fmt: skip
def test_the_bound_depends_on_the_device(device: str, policy: str, most: int | None) -> None:
    config = SchedulerConfig(device=device, schedule_policy=policy, max_extend_tokens=64)
    decode = build_prefill(config, FakeEngine(), Parts(), None).decode
    assert isinstance(decode, SharedDecode) is (policy == "fair")
    assert getattr(decode, "max_context", None) == most


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefill_step_has_a_bounded_context(overlap: bool) -> None:
    """Answers to one cached prompt start in several steps; the first of a step always starts."""
    driver = Driver(policy="fair", overlap=overlap, num_pages=400, page_size=4, max_context=100)
    prompt = [1 + i % 50 for i in range(40)]
    driver.ask(0, prompt, max_tokens=1)
    driver.drain()
    for uid in range(1, 8):
        driver.ask(uid, prompt, max_tokens=3, ignore_eos=True)
    driver.ask(8, [7] * 120, max_tokens=3, ignore_eos=True)
    driver.drain()
    starts = [s for s in driver.engine.steps if s.phase == "prefill"]
    assert any(len(s.uids) == 2 for s in starts)
    assert all(len(s.uids) == 1 or sum(s.seq_lens) <= 100 for s in starts)
    for uid in range(1, 8):
        assert driver.tokens(uid) == expected(prompt, 3, ignore_eos=True)
    assert driver.tokens(8) == expected([7] * 120, 3, ignore_eos=True)
