"""The scheduler without a model: admission, chunks, both loops, aborts, refusals."""

from __future__ import annotations

import itertools
import math
import random
import threading
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl import events
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.kvcache.audit import IntegrityError
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import TableManager, slots_of_pages
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import (
    AbortMsg,
    ErrorReply,
    ExitMsg,
    InvalidRequestError,
    Msg,
    Reply,
    TokenReply,
    UserMsg,
)
from minisgl.scheduler.observe import StageClock
from minisgl.scheduler.phases import DecodeManager, PrefillAdder, PrefillLimits, future_pages
from minisgl.scheduler.requests import Limits, check_prompt, clamp_notice, finish_reason
from minisgl.scheduler.requests import make_req as req_of
from tests.fakes import EOS, VOCAB, Driver, FakeEngine, expected

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def make_req(prompt_len: int, max_new: int, **fields: Any) -> Req:
    return Req(
        uid=1,
        input_ids=np.ones(prompt_len, np.int32),
        sampling_params=SamplingParams(**fields),
        max_new_tokens=max_new,
    )


# ------------------------------------------------------------------ arithmetic and refusals


@pytest.mark.parametrize(
    ("ids", "message", "code"),
    [
        ([], "at least one token", "invalid_request"),
        ([3, -1], "0..999, got -1", "invalid_request"),
        ([3, 1000], "0..999, got 1000", "invalid_request"),
        ([1] * 128, "window is 128 tokens", "context_length_exceeded"),
        ([1] * 130, "130 tokens", "context_length_exceeded"),
        ([1] * 100, "the KV cache holds 64 tokens", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_prompts_are_refused_with_reasons(ids: list[int], message: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(ids, Limits(128, 64, VOCAB))
    assert message in caught.value.message and caught.value.code == code


@pytest.mark.parametrize(
    "ids", [[[1], [2]], [1.5], "text", [None], [1, [2]], [2**40], [-(2**40)], [2**70], 5, [True]]
)
def test_token_arrays_are_flat_and_integer(ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: "):
        check_prompt(ids, Limits(128, 128, VOCAB))


def test_token_arrays_keep_their_values() -> None:
    for ids in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8)):
        array = check_prompt(ids, Limits(128, 128, VOCAB))
        assert array.tolist() == [1, 2, 3] and array.dtype == np.int32


def test_the_longest_prompt_leaves_one_token() -> None:
    limits = Limits(max_seq_len=10, pool_tokens=64, vocab_size=VOCAB)

    def room(count: int, wanted: int | None, limits: Limits) -> tuple[int, str | None]:
        req = req_of(UserMsg(1, [1] * count, SamplingParams(max_tokens=wanted)), limits)
        return req.max_device_len - count, clamp_notice(req)

    assert room(9, None, limits) == (1, None)
    assert room(9, 1, limits) == (1, None)
    count, notice = room(9, 5, limits)
    assert count == 1 and notice is not None and "from 5 to 1" in notice and "room for 10" in notice
    count, notice = room(3, 100, replace(limits, pool_tokens=8))
    assert count == 5 and notice is not None and "room for 8" in notice


@pytest.mark.parametrize(
    ("token", "fields", "reason"),
    [
        (EOS, {}, "stop"),
        (EOS, {"ignore_eos": True}, None),
        (7, {}, None),
        (7, {"stop_token_ids": [7, 8]}, "stop"),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, "stop"),
    ],
)
def test_finish_reasons(token: int, fields: dict[str, Any], reason: str | None) -> None:
    req = make_req(3, 2, **fields)
    req.append(token)
    assert finish_reason(req, token, frozenset([EOS])) == reason
    req.append(token)
    assert finish_reason(req, token, frozenset([EOS])) == (reason or "length")


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_promised_pages_are_exactly_what_a_life_takes(prompt: int, new: int, size: int) -> None:
    """Follow a request step by step: the promise plus what it has never changes, and ends at 0."""
    req = make_req(prompt, new)
    total = future_pages(req, size)
    assert total == math.ceil((prompt + new - 1) / size)
    while True:
        req.schedule(req.device_len)
        owned = math.ceil(req.device_len / size)
        req.advance()
        assert owned + future_pages(req, size) == total
        if not req.can_decode:
            break
    assert future_pages(req, size) == 0


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), stop_token_ids=(3,), seed=7)
    for message in (UserMsg(1, [1, 2], params), AbortMsg(1), ExitMsg()):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Msg)
        assert again == message
    error = ErrorReply(uid=1, message="no", code="invalid_request", param="prompt")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(error), type=Reply) == error
    bad = msgspec.msgpack.encode({"type": "UserMsg", "uid": "x"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(bad, type=Msg)


# ------------------------------------------------------------------ one request, then many


@LOOPS
def test_one_request(overlap: bool) -> None:
    d = Driver(overlap=overlap)
    d.ask(7, [1, 2, 2], max_tokens=4)
    d.drain()
    assert d.tokens(7) == expected([1, 2, 2], 4)
    assert d.reason(7) == "length"
    assert [s.phase for s in d.engine.steps] == ["prefill"] + ["decode"] * 3
    assert [r.finished for r in d.replies[7]] == [False, False, False, True]
    assert all(r.prompt_tokens == 3 for r in d.replies[7])


def test_what_is_constant_travels_once() -> None:
    """Stop strings and the notice come with the first token, whatever comes later."""
    d = Driver()
    d.ask(1, [1, 2, 2], max_tokens=999, stop=("ab", "c"), ignore_eos=True)
    d.drain()
    said = [reply for reply in d.replies[1] if isinstance(reply, TokenReply)]
    assert said[0].stop == ("ab", "c") and "clamped from 999" in (said[0].notice or "")
    assert len(said) > 9 and not any(reply.stop or reply.notice for reply in said[1:])


@LOOPS
def test_end_token_stops_and_the_extra_token_is_dropped(overlap: bool) -> None:
    prompt = [3, 3, 3]  # the answer ends at its third token
    d = Driver(overlap=overlap)
    d.ask(1, prompt, max_tokens=20)
    d.ask(2, prompt, max_tokens=20, ignore_eos=True)
    d.drain()
    assert d.tokens(1)[-1] == EOS and len(d.tokens(1)) == 3
    assert d.reason(1) == "stop" and d.reason(2) == "length"
    assert d.tokens(2) == expected(prompt, 20, ignore_eos=True)
    # The overlapped loop learns of the end one step late, and only then.
    computed = sum(1 in s.sampled for s in d.engine.steps)
    assert computed == (4 if overlap else 3)


@LOOPS
def test_one_token_answers(overlap: bool) -> None:
    """A request whose first token is its last never enters a decode batch."""
    d = Driver(overlap=overlap)
    for uid in range(5):
        d.ask(uid, [1 + uid], max_tokens=1)
    d.drain()
    assert all(d.tokens(u) == expected([1 + u], 1) for u in range(5))
    assert [s.phase for s in d.engine.steps] == ["prefill"]


@LOOPS
def test_more_requests_than_rows(overlap: bool) -> None:
    d = Driver(overlap=overlap, max_running_req=2)
    for uid in range(10):
        d.ask(uid, [uid + 1] * 3, max_tokens=3)
    d.drain()
    assert all(d.tokens(u) == expected([u + 1] * 3, 3) for u in range(10))
    assert max(len(s.uids) for s in d.engine.steps) == 2


def test_decode_batches_keep_the_order_of_arrival() -> None:
    d = Driver(budget=8)
    for uid in (5, 3, 9, 1):
        d.ask(uid, [uid, uid, uid, uid], max_tokens=6, ignore_eos=True)
    d.drain()
    orders = {tuple(s.uids) for s in d.engine.steps if s.phase == "decode" and len(s.uids) == 4}
    assert orders == {(5, 3, 9, 1)}
    assert isinstance(DecodeManager().running, dict)


@LOOPS
def test_a_second_request_finds_the_prefix(overlap: bool) -> None:
    d = Driver(overlap=overlap, page_size=4)
    prompt = [1] * 11
    d.ask(1, prompt, max_tokens=2)
    d.drain()
    d.ask(9, [900], max_tokens=30, ignore_eos=True)  # takes the row that 1 left behind
    d.go()
    d.ask(2, prompt, max_tokens=2)
    d.drain()
    assert d.replies[1][-1].cached_tokens == 0
    assert d.replies[2][-1].cached_tokens == 8
    assert d.tokens(1) == d.tokens(2)
    prefills = [s for s in d.engine.steps if s.phase == "prefill"]
    assert [s.extend for s in prefills] == [[11], [1], [3]]


# ------------------------------------------------------------------ budgets and chunks


def test_pitfall_07_chunks_of_1200_at_256() -> None:
    d = Driver(budget=256, num_pages=400, max_seq_len=1400)
    d.ask(1, [i % 990 for i in range(1200)], max_tokens=2)
    d.drain()
    chunks = [s for s in d.engine.steps if s.phase == "prefill"]
    assert [s.extend for s in chunks] == [[256]] * 4 + [[176]]
    assert [s.seq_lens for s in chunks] == [[256], [512], [768], [1024], [1200]]
    assert [s.sampled for s in chunks] == [[], [], [], [], [1]]
    assert len(d.tokens(1)) == 2


def test_pitfall_07_a_full_match_leaves_one_token_to_compute() -> None:
    for size in (1, 4):
        d = Driver(page_size=size)
        for uid in (1, 2, 3):
            d.ask(uid, [1] * 8, max_tokens=1)
            d.drain()
        computed = [s.extend[0] for s in d.engine.steps]
        assert computed == ([8, 1, 1] if size == 1 else [8, 4, 4])


def test_budget_is_shared_and_the_chunk_goes_first() -> None:
    d = Driver(budget=10)
    d.ask(1, [1] * 6, max_tokens=3, ignore_eos=True)
    d.ask(2, [2] * 12, max_tokens=3, ignore_eos=True)
    d.ask(3, [4] * 3, max_tokens=3, ignore_eos=True)
    d.drain()
    first, second = d.engine.steps[:2]
    assert (first.uids, first.extend) == ([1, 2], [6, 4])
    assert (second.uids, second.extend) == ([2, 3], [8, 2])  # 3 is cut in its turn
    assert first.sampled == [1] and second.sampled == [2]
    assert all(sum(s.extend) <= 10 for s in d.engine.steps if s.phase == "prefill")


@LOOPS
def test_a_chunked_request_reserves_its_pages_from_the_start(overlap: bool) -> None:
    """Others are admitted beside a half-done prompt only if its end still fits."""
    d = Driver(overlap=overlap, budget=4, num_pages=8, page_size=4)
    d.ask(1, list(range(20)), max_tokens=9, ignore_eos=True)  # 28 tokens with K and V: 7 pages
    d.ask(2, [50] * 5, max_tokens=4, ignore_eos=True)  # 2 pages: must wait
    d.ask(3, [60] * 3, max_tokens=2, ignore_eos=True)  # 1 page: fits, but stands behind 2
    d.drain()
    order = [u for s in d.engine.steps if s.phase == "prefill" for u in s.sampled]
    assert order == [1, 2, 3]
    assert d.tokens(1) == expected(range(20), 9, ignore_eos=True)


@LOOPS
def test_a_half_done_prompt_keeps_its_pages(overlap: bool) -> None:
    """Its last chunk leaves budget for another, whose pages are free, but promised."""
    d = Driver(overlap=overlap, budget=16, num_pages=8, page_size=4)
    d.ask(1, list(range(20)), max_tokens=12, ignore_eos=True)  # 8 pages, 4 of them later
    d.go()
    d.ask(2, [60] * 9, max_tokens=4, ignore_eos=True)
    d.drain()
    assert d.tokens(1) == expected(range(20), 12, ignore_eos=True)


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """Small requests keep coming; the large one waits for pages, and none overtakes it."""
    d = Driver(num_pages=8, page_size=4)
    for uid in range(4):
        d.ask(uid, [uid] * 5, max_tokens=8, ignore_eos=True)
    d.go()
    d.ask(100, [9] * 20, max_tokens=10, ignore_eos=True)  # 8 pages: the whole pool
    for turn in range(60):
        d.ask(200 + turn, [turn] * 4, max_tokens=2, ignore_eos=True)
        d.go()
        if d.tokens(100):
            break
    assert d.tokens(100), "the large request starved"
    large = next(i for i, s in enumerate(d.engine.steps) if s.uids[0] == 100)
    assert all(max(s.uids) < 200 for s in d.engine.steps[:large])
    d.drain()


def test_a_matched_prefix_does_not_count_as_room() -> None:
    """The pages of the match look available until they are locked: then they are not."""
    d = Driver(num_pages=8, page_size=4)
    d.ask(1, list(range(15)), max_tokens=2, ignore_eos=True)
    d.drain()  # four pages are cached, four are free
    d.ask(2, [500] * 8, max_tokens=5, ignore_eos=True)  # three pages
    d.go()
    # Three pages matched and three more: with those of 2 that makes nine.
    prompt = [*range(12), *([600] * 8)]
    d.ask(3, prompt, max_tokens=5, ignore_eos=True)
    d.go()
    assert d.tokens(3) == []
    d.drain()
    assert d.tokens(3) == expected(prompt, 5, ignore_eos=True)
    assert d.replies[3][-1].cached_tokens == 12


@LOOPS
def test_running_requests_keep_what_they_may_still_need(overlap: bool) -> None:
    d = Driver(overlap=overlap, num_pages=8, page_size=4)
    d.ask(1, [1] * 4, max_tokens=25, ignore_eos=True)  # seven pages, one of them now
    d.go(2)
    d.ask(2, [2] * 17, max_tokens=8, ignore_eos=True)  # six pages: free they are, and promised
    d.drain()
    assert d.tokens(1) == expected([1] * 4, 25, ignore_eos=True)
    assert d.tokens(2) == expected([2] * 17, 8, ignore_eos=True)


@pytest.mark.parametrize("size", [1, 4, 16])
@LOOPS
def test_pages_are_rounded_right(overlap: bool, size: int) -> None:
    """A request that fits to the last page is served; the pool never runs dry in mid-answer."""
    for extra in range(size + 1):
        d = Driver(overlap=overlap, page_size=size, num_pages=4, max_seq_len=200)
        prompt, new = [7] * (2 * size + extra), size
        if len(prompt) + new > 4 * size:
            new = 4 * size - len(prompt)
        d.ask(1, prompt, max_tokens=new, ignore_eos=True)
        d.ask(2, [8] * size, max_tokens=2 * size, ignore_eos=True)
        d.drain()
        assert len(d.tokens(1)) == new and len(d.tokens(2)) == 2 * size


def test_a_beginning_that_is_being_computed_is_waited_for() -> None:
    """Eight requests with one system prompt arrive together: it is computed once."""
    d = Driver(budget=500, num_pages=200, max_running_req=16)
    for uid in range(8):
        d.ask(uid, [5] * 40 + [uid] * 3, max_tokens=2)
    d.ask(8, [6] * 3, max_tokens=2)
    d.drain()
    first, second = d.engine.steps[:2]
    assert (first.uids, first.extend) == ([0], [43])
    assert (second.uids, second.extend) == ([1, 2, 3, 4, 5, 6, 7, 8], [3] * 8)
    assert [d.replies[uid][-1].cached_tokens for uid in range(9)] == [0] + [40] * 7 + [0]


@pytest.mark.parametrize("budget", [20, 30, 41])
def test_a_beginning_is_waited_for_until_its_last_chunk(budget: int) -> None:
    """The second step has room for another prompt, whose beginning is not cached yet."""
    d = Driver(budget=budget, num_pages=200, max_running_req=16)
    for uid in range(3):
        d.ask(uid, [5] * 40 + [uid] * 3, max_tokens=2)
    d.drain()
    prefills = [step for step in d.engine.steps if step.phase == "prefill"]
    assert sum(sum(step.extend) for step in prefills) == 43 + 3 + 3
    assert [step.uids for step in prefills][-1] == [1, 2]


def test_prompts_that_are_scored_wait_for_no_beginning() -> None:
    d = Driver(budget=500, num_pages=200, max_running_req=16)
    for uid in range(3):
        d.ask(uid, [5] * 43, max_tokens=2, prompt_logprobs=0)
    d.ask(3, [5] * 43, max_tokens=2)
    d.scheduler.receive(False)
    batch = d.scheduler.prefill.schedule()
    assert batch is not None and [req.uid for req in batch.reqs] == [0, 1, 2]


@LOOPS
def test_requests_share_prefixes_of_their_salt_alone(overlap: bool) -> None:
    """Neither the cache nor a prompt of the same step is shared between salts, and salts share."""
    d = Driver(overlap=overlap, budget=500, num_pages=200, max_running_req=16)
    salts = [None, "a", "b", None, "a", "b"]
    for uid, salt in enumerate(salts):
        d.ask(uid, [5] * 40 + [uid] * 3, max_tokens=2, cache_salt=salt)
    d.drain()
    assert [step.uids for step in d.engine.steps[:2]] == [[0, 1, 2], [3, 4, 5]]
    for uid, salt in enumerate(salts):
        d.ask(10 + uid, [5] * 43 + [uid], max_tokens=2, cache_salt=salt and salt * 2)
        d.drain()
    cached = [d.replies[uid][-1].cached_tokens for uid in [*range(6), *range(10, 16)]]
    assert cached == [0, 0, 0, 40, 40, 40, 40, 0, 0, 40, 40, 40]


@pytest.mark.parametrize(
    ("shared", "own", "cache_type"),
    [(31, 9, "radix"), (40, 3, "naive"), (0, 40, "radix"), (40, 0, "radix")],
)
def test_waiting_has_to_be_worth_it(shared: int, own: int, cache_type: str) -> None:
    """Short common beginnings, or a cache that does not remember: all of them at once."""
    d = Driver(budget=500, num_pages=200, cache_type=cache_type)
    for uid in range(4):
        d.ask(uid, [5] * shared + [uid + 6] * own, max_tokens=2)
    d.drain()
    at_once = len(d.engine.steps[0].uids)
    assert at_once == (1 if (shared, own) == (40, 0) else 4)
    # Twins: the second step computes the last page of all others, not one a step.
    assert len([s for s in d.engine.steps if s.phase == "prefill"]) == (2 if own == 0 else 1)


# ------------------------------------------------------------------ refusals reach their caller


@LOOPS
def test_pitfall_10_larger_than_the_pool(overlap: bool) -> None:
    d = Driver(overlap=overlap, num_pages=8, page_size=4, max_seq_len=128)
    d.ask(1, [1] * 4, max_tokens=6, ignore_eos=True)
    d.ask(2, [2] * 32, max_tokens=1)
    d.ask(3, [4] * 31, max_tokens=50)
    d.drain()
    assert d.reason(2) == "context_length_exceeded" and len(d.replies[2]) == 1
    assert "KV cache holds 32" in d.replies[2][0].message
    assert len(d.tokens(3)) == 1 and "from 50 to 1" in d.replies[3][0].notice
    assert d.tokens(1) == expected([1] * 4, 6, ignore_eos=True)


@LOOPS
def test_pitfall_11_longer_than_the_window(overlap: bool) -> None:
    d = Driver(overlap=overlap, max_seq_len=16)
    d.ask(1, [1] * 16, max_tokens=1)
    d.ask(2, [1] * 15, max_tokens=1)
    d.drain()
    assert d.reason(1) == "context_length_exceeded"
    assert "16 tokens are too many" in d.replies[1][0].message
    assert d.replies[1][0].param == "prompt"
    assert len(d.tokens(2)) == 1


@LOOPS
def test_pitfall_12_bad_requests_harm_nobody(overlap: bool) -> None:
    d = Driver(overlap=overlap)
    d.ask(0, [1, 2, 3], max_tokens=8, ignore_eos=True)
    bad = {
        1: UserMsg(1, [], SamplingParams()),
        2: UserMsg(2, [1, -5], SamplingParams()),
        3: UserMsg(3, [VOCAB], SamplingParams()),
        7: UserMsg(7, [1.5], SamplingParams()),  # type: ignore[list-item]
        8: UserMsg(8, [2**80], SamplingParams()),
        0: UserMsg(0, [1], SamplingParams()),
    }
    d.go(2)
    uids = sorted(bad.keys() - {0})
    for uid in uids:
        d.channel.put_messages(bad[uid])
        d.go()
    d.drain()
    for uid in uids:
        assert len(d.replies[uid]) == 1 and isinstance(d.replies[uid][0], ErrorReply), uid
    assert d.tokens(0) == expected([1, 2, 3], 8, ignore_eos=True)


def test_a_uid_belongs_to_one_request_at_a_time() -> None:
    d = Driver()
    d.ask(1, [1, 1], max_tokens=5, ignore_eos=True)
    d.channel.put_messages(UserMsg(1, [2, 2], SamplingParams()))
    d.step()
    errors = [r for r in d.channel.take_replies() if isinstance(r, ErrorReply)]
    assert len(errors) == 1 and errors[0].param == "uid"
    d.drain()
    d.ask(1, [2, 2], max_tokens=2, ignore_eos=True)  # free again
    d.replies.clear()
    d.drain()
    assert d.tokens(1) == expected([2, 2], 2, ignore_eos=True)


# ------------------------------------------------------------------ aborts


def spy_releases(d: Driver) -> list[int]:
    """Uids in the order of their release."""
    released: list[int] = []
    original = d.cache.cache_req

    def cache_req(req: Req, finished: bool) -> None:
        if finished:
            released.append(req.uid)
        original(req, finished)

    d.cache.cache_req = cache_req  # type: ignore[method-assign]
    return released


@LOOPS
@pytest.mark.parametrize("turns", range(12))
def test_abort_at_every_moment(overlap: bool, turns: int) -> None:
    """Queued, in mid-prefill, decoding, on its way, finished: one last word, one release."""
    d = Driver(overlap=overlap, budget=4)
    released = spy_releases(d)
    d.ask(1, [5] * 3, max_tokens=8, ignore_eos=True)
    d.ask(2, list(range(14)), max_tokens=4, ignore_eos=True)
    d.ask(3, [6] * 3, max_tokens=4, ignore_eos=True)
    d.go(turns)
    d.channel.put_messages(AbortMsg(2), AbortMsg(2), AbortMsg(77))
    d.drain()
    assert d.tokens(1) == expected([5] * 3, 8, ignore_eos=True)
    assert d.tokens(3) == expected([6] * 3, 4, ignore_eos=True)
    answer = expected(range(14), 4, ignore_eos=True)
    assert d.tokens(2) == answer[: len(d.tokens(2))]
    assert d.reason(2) in ("abort", "length")
    assert sum(r.finished for r in d.replies.get(2, [])) == 1
    assert released.count(2) <= 1 and sorted(set(released)) == sorted(released)
    assert 77 not in d.replies


def test_pitfall_03_aborted_in_flight_is_released_once() -> None:
    d = Driver(overlap=True)
    released = spy_releases(d)
    d.ask(1, [1, 1, 2], max_tokens=20, ignore_eos=True)
    d.go(3)
    flying = d.scheduler.in_flight
    assert flying is not None and [r.uid for r in flying.inputs.sampled] == [1]
    d.channel.put_messages(AbortMsg(1))
    d.go()
    assert released == [1]
    d.drain()
    assert released == [1] and d.reason(1) == "abort"
    # The same for the step that is under way when the end token is seen.
    d.ask(2, [3, 3, 3], max_tokens=20)
    d.drain()
    assert released == [1, 2]


def test_pitfall_03_a_new_request_with_an_old_uid_is_another_request() -> None:
    """The old request's token, still on its way, must not reach the new one."""
    d = Driver(overlap=True)
    d.ask(1, [1, 1, 2], max_tokens=20, ignore_eos=True)
    d.go(3)
    d.channel.put_messages(AbortMsg(1))
    d.channel.put_messages(UserMsg(1, [9, 9], SamplingParams(max_tokens=3, ignore_eos=True)))
    d.step()
    before = d.channel.take_replies()
    assert [getattr(r, "finish_reason", None) for r in before] == ["abort"]
    d.replies.clear()
    d.drain()
    assert d.tokens(1) == expected([9, 9], 3, ignore_eos=True)


def test_abort_in_mid_prefill_keeps_the_prefix() -> None:
    d = Driver(budget=8, page_size=4)
    d.ask(1, list(range(30)), max_tokens=4)
    d.go(2)
    assert d.scheduler.prefill.chunked_req is not None
    d.channel.put_messages(AbortMsg(1))
    d.drain()
    assert d.scheduler.prefill.chunked_req is None
    d.ask(2, list(range(30)), max_tokens=1)
    d.drain()
    assert d.replies[2][-1].cached_tokens == 16


# ------------------------------------------------------------------ memory is taken back


@LOOPS
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_the_youngest_is_taken_back_and_goes_on(overlap: bool, cache_type: str) -> None:
    """Three answers that do not fit together: all are complete, and no token is sent twice."""
    d = Driver(overlap=overlap, cache_type=cache_type, reserve=1, num_pages=10, page_size=4)
    for uid in range(3):
        d.ask(uid, [uid + 1] * 5, max_tokens=20, ignore_eos=True)
    d.drain()
    assert d.scheduler.retractions > 0
    for uid in range(3):
        assert d.tokens(uid) == expected([uid + 1] * 5, 20, ignore_eos=True)
        assert all(r.prompt_tokens == 5 and r.cached_tokens == 0 for r in d.replies[uid])
    ends = [s.uids for s in d.engine.steps if s.phase == "decode"]
    assert all(0 in uids for uids in ends[:19])  # the oldest never waits


@LOOPS
def test_who_is_taken_back_comes_before_newcomers(overlap: bool) -> None:
    d = Driver(overlap=overlap, reserve=1, num_pages=10, page_size=4, max_running_req=2)
    for uid in range(2):
        d.ask(uid, [uid + 1] * 5, max_tokens=28, ignore_eos=True)
    d.go(4)
    for uid in range(2, 12):
        d.ask(uid, [uid + 1] * 3, max_tokens=2, ignore_eos=True)
    while d.scheduler.retractions == 0:
        d.go()
    assert d.scheduler.prefill.waiting.first() is d.scheduler.reqs[1]
    d.drain()
    assert d.tokens(1) == expected([2] * 5, 28, ignore_eos=True)


@LOOPS
def test_what_was_computed_is_found_again(overlap: bool) -> None:
    """Pages of a request that was taken back stay cached until somebody needs them."""
    d = Driver(overlap=overlap, reserve=1, num_pages=10, page_size=4)
    d.ask(0, [1] * 5, max_tokens=20, ignore_eos=True)
    d.ask(1, [2] * 5, max_tokens=30, ignore_eos=True)
    d.drain()
    again = [s for s in d.engine.steps if s.phase == "prefill" and s.uids == [1]]
    assert d.scheduler.retractions == 1 and len(again) == 1
    assert again[0].extend[0] < again[0].seq_lens[0]  # some pages had been evicted, not all


@LOOPS
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_abort_of_a_request_that_was_taken_back(overlap: bool, policy: str) -> None:
    d = Driver(overlap=overlap, reserve=1, num_pages=10, page_size=4, policy=policy)
    for uid in range(3):
        d.ask(uid, [uid + 1] * 5, max_tokens=20, ignore_eos=True)
    while d.scheduler.retractions == 0:
        d.go()
    back = d.scheduler.prefill.waiting.first()
    assert back is not None and back.table_idx < 0
    d.channel.put_messages(AbortMsg(back.uid))
    d.drain()
    assert d.reason(back.uid) == "abort"


@LOOPS
def test_whoever_ends_in_the_step_on_its_way_leaves_pages(overlap: bool) -> None:
    """The last page is held by an answer whose last token is being computed: no need to go."""
    d = Driver(overlap=overlap, reserve=1, num_pages=3, page_size=4)
    d.ask(0, [1] * 4, max_tokens=8, ignore_eos=True)
    d.go(4)  # seven tokens have key and value
    d.ask(1, [2] * 3, max_tokens=2, ignore_eos=True)
    d.drain()
    together = next(i for i, s in enumerate(d.engine.steps) if s.uids == [0, 1])
    assert d.engine.steps[together].seq_lens == [8, 4]  # full pages, all three
    assert d.scheduler.retractions == 0
    assert d.tokens(0) == expected([1] * 4, 8, ignore_eos=True)
    assert d.tokens(1) == expected([2] * 3, 2, ignore_eos=True)


@LOOPS
def test_a_client_without_a_row_gets_one_of_a_client_with_several(overlap: bool) -> None:
    """All rows are taken by long answers; the youngest yields, and is complete all the same."""
    d = Driver(overlap=overlap, policy="fair", max_running_req=4, num_pages=200, page_size=4)
    for uid in range(8):
        d.ask(uid, [uid + 1] * 5, "crowd", max_tokens=60, ignore_eos=True)
    d.go(6)
    d.ask(8, [9] * 5, "one", max_tokens=3, ignore_eos=True)
    d.ask(9, [9] * 6, "one", max_tokens=3, ignore_eos=True)
    steps = len(d.engine.steps)
    d.go(4)
    assert [8] in [s.uids for s in d.engine.steps[steps:] if s.phase == "prefill"]
    assert d.scheduler.retractions == 1 and 3 not in d.scheduler.decode.running
    d.drain()
    assert d.scheduler.retractions == 1  # the second request waits for a row that becomes free
    for uid, length in [*((uid, 5) for uid in range(8)), (8, 5), (9, 6)]:
        prompt = [min(uid, 8) + 1] * length
        assert d.tokens(uid) == expected(prompt, 60 if uid < 8 else 3, ignore_eos=True)
    end = {uid: max(i for i, s in enumerate(d.engine.steps) if uid in s.uids) for uid in (8, 9, 3)}
    assert end[8] < end[9] < end[3]


@LOOPS
@pytest.mark.parametrize("reserve", [None, 4])
def test_as_many_yield_as_the_prompt_needs(overlap: bool, reserve: int | None) -> None:
    d = Driver(overlap=overlap, policy="fair", reserve=reserve, num_pages=24, page_size=4)
    for uid in range(4):
        d.ask(uid, [uid + 1] * 8, "crowd", max_tokens=17, ignore_eos=True)
    d.go(14)
    assert len(d.scheduler.decode.running) == 4 and d.cache.available_tokens == 0
    d.ask(4, [9] * 30, "one", max_tokens=2, ignore_eos=True)  # eight pages; each of four has six
    d.go(3)
    assert d.scheduler.retractions == 2
    d.drain()
    for uid in range(4):
        assert d.tokens(uid) == expected([uid + 1] * 8, 17, ignore_eos=True)


@LOOPS
def test_a_row_is_enough_while_pages_are_free(overlap: bool) -> None:
    """What was promised to answers that may yield does not bind a client's first request."""
    d = Driver(overlap=overlap, policy="fair", max_running_req=6, num_pages=31, page_size=4)
    for uid in range(3):
        d.ask(uid, [uid + 1] * 5, "crowd", max_tokens=32, ignore_eos=True)  # nine pages each
    d.go(3)
    for uid in (4, 5):
        d.ask(uid, [uid + 1] * 21, "one", max_tokens=4, ignore_eos=True)  # six pages each
    d.go(4)
    assert d.tokens(4) and not d.tokens(5) and d.scheduler.retractions == 0
    d.drain()
    assert d.scheduler.retractions == 0
    for uid in range(3):
        assert d.tokens(uid) == expected([uid + 1] * 5, 32, ignore_eos=True)


@LOOPS
@pytest.mark.parametrize(("own", "displaced"), [(1, 2), (2, 1), (3, 0)])
def test_a_client_with_few_rows_displaces_one_of_a_client_with_many(
    overlap: bool, own: int, displaced: int
) -> None:
    """Of eight rows one client has the others; more than twice as many are too many."""
    d = Driver(overlap=overlap, policy="fair", max_running_req=8, num_pages=400, page_size=4)
    for uid in range(own):
        d.ask(uid, [uid + 1] * 5, "few", max_tokens=60, ignore_eos=True)
    d.go(2)
    for uid in range(10, 30):
        d.ask(uid, [uid + 1] * 5, "many", max_tokens=60, ignore_eos=True)
    d.go(4)
    for uid in range(own, own + 3):
        d.ask(uid, [uid + 1] * 5, "few", max_tokens=60, ignore_eos=True)
    d.go(20)
    assert d.scheduler.retractions == displaced
    assert sum(uid < 10 for uid in d.scheduler.decode.running) == own + displaced
    d.drain(2000)
    for uid in range(own + 3):
        assert d.tokens(uid) == expected([uid + 1] * 5, 60, ignore_eos=True)


def test_a_half_done_prompt_keeps_its_pages_from_a_newcomer() -> None:
    """No decode step, which would make room, need come before its next chunk."""
    d = Driver(policy="fair", budget=8, num_pages=40, page_size=4, mixed_prefill_threshold=8)
    d.ask(0, [1] * 4, "crowd", max_tokens=20, ignore_eos=True)
    d.go(2)
    d.ask(1, [2] * 32, "crowd", max_tokens=2, ignore_eos=True)
    d.go(2)
    running, half_done = d.scheduler.prefill.admitted()
    assert d.scheduler.prefill.chunked_req is half_done and d.scheduler.decode.running == {
        0: running
    }
    d.ask(2, [3] * 4, "one", max_tokens=2, ignore_eos=True)
    d.scheduler.receive(block=False)
    assert d.scheduler.prefill.waiting.displaceable([running, half_done]) == [half_done]
    assert d.scheduler.prefill.adder().yielding == 0
    d.drain()


@LOOPS
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_half_done_prompt_yields_its_pages(overlap: bool, turn: int) -> None:
    """A newcomer waits for two steps of a prompt that holds the pool, in each of its turns."""
    d = Driver(policy="fair", overlap=overlap, num_pages=128, page_size=4, max_seq_len=512)
    d.ask(0, list(range(3, 83)) * 6, max_tokens=20, ignore_eos=True)
    for uid in range(1, turn + 1):
        while not d.half_done(0) or d.computed(0) < uid * 100:
            d.go()
        before = d.computed(0)
        d.ask(uid, [uid] * 8, f"client {uid}", max_tokens=20, ignore_eos=True)
        while not d.tokens(uid):
            d.go()
        assert d.computed(0) - before <= 2 * 64
        assert d.scheduler.retractions == uid
    d.drain()
    assert d.computed(0) <= 480 + 19 + turn * (8 + 20)
    assert d.tokens(0) == expected(list(range(3, 83)) * 6, 20, ignore_eos=True)


@LOOPS
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_prompt_that_yields_again_and_again_ends(overlap: bool, data: st.DataObject) -> None:
    """Whatever others send meanwhile, each token is computed three times at the most."""
    cache, clients = data.draw(st.sampled_from(["radix", "naive"])), data.draw(st.integers(1, 4))
    sizes = {"num_pages": 100, "page_size": 4, "max_seq_len": 400, "budget": 16, "turn": 8}
    d = Driver(policy="fair", overlap=overlap, cache_type=cache, reserve=8, **sizes)
    asked = {0: (list(range(3, 83)) * 4 + [7] * data.draw(st.integers(0, 70)), 2)}
    d.ask(0, asked[0][0], "long", max_tokens=2, ignore_eos=True)
    last = dict.fromkeys(range(clients), 0)
    while d.reason(0) is None:
        for client in range(clients):
            if last[client] == 0 or d.reason(last[client]) is not None:
                last[client] = uid = len(asked)
                asked[uid] = [uid % 80 + 3] * data.draw(st.integers(1, 40)), 12
                d.ask(uid, asked[uid][0], f"client {client}", max_tokens=12, ignore_eos=True)
        d.go(data.draw(st.integers(1, 9)))
        assert len(d.engine.steps) < 4000
    d.drain()
    assert d.computed(0) <= 3 * (len(asked[0][0]) + 1)
    for uid, (prompt, count) in asked.items():
        assert d.tokens(uid) == expected(prompt, count, ignore_eos=True)


@LOOPS
@pytest.mark.parametrize("large", [40, 41])
def test_nobody_stops_in_vain(overlap: bool, large: int) -> None:
    """Two clients keep ten pages with one request each; forty tokens fit beside them, 41 do not."""
    d = Driver(overlap=overlap, policy="fair", num_pages=20, page_size=4)
    d.ask(0, [1] * 5, "a", max_tokens=20, ignore_eos=True)  # six pages
    d.ask(1, [2] * 3, "b", max_tokens=14, ignore_eos=True)  # four pages
    for uid in (2, 3):
        d.ask(uid, [uid + 1] * 3, "b", max_tokens=14, ignore_eos=True)
    d.go(6)
    assert len(d.scheduler.decode.running) == 4
    d.ask(4, [9] * (large - 1), "c", max_tokens=2, ignore_eos=True)
    d.go(4)
    assert d.scheduler.retractions == (2 if large == 40 else 0)
    d.drain()
    assert d.tokens(1) == expected([2] * 3, 14, ignore_eos=True)


@LOOPS
@pytest.mark.parametrize("shared", [16, 12])
def test_pages_that_stay_cached_count_once(overlap: bool, shared: int) -> None:
    """The newcomer's prefix is held by a request that stays: it fits beside it only for that."""
    d = Driver(overlap=overlap, policy="fair", num_pages=24, page_size=4)
    d.ask(0, [1] * 17, "a", max_tokens=8, ignore_eos=True)  # six pages
    for uid in (1, 2):
        d.ask(uid, [uid + 1] * 13, "b", max_tokens=20, ignore_eos=True)  # eight pages each
    d.go(3)
    d.ask(3, [1] * shared + [9] * (55 - shared), "c", max_tokens=2, ignore_eos=True)  # 14 pages
    d.go(2)
    assert d.scheduler.retractions == (shared == 16)
    d.drain()
    assert d.tokens(2) == expected([3] * 13, 20, ignore_eos=True)


@LOOPS
def test_who_has_most_requests_gives_pages_back(overlap: bool) -> None:
    """The request of a client with one never waits, although it joined last."""
    d = Driver(overlap=overlap, policy="fair", reserve=1, num_pages=24, page_size=4)
    for uid in range(5):
        d.ask(uid, [uid + 1] * 5, "crowd", max_tokens=30, ignore_eos=True)
    d.go(4)
    d.ask(9, [9] * 5, "one", max_tokens=30, ignore_eos=True)
    d.drain()
    assert d.scheduler.retractions > 1
    steps = [i for i, s in enumerate(d.engine.steps) if s.phase == "decode"]
    own = [i for i in steps if 9 in d.engine.steps[i].uids]
    assert len(own) == 29 and own == [i for i in steps if own[0] <= i <= own[-1]]
    for uid in (*range(5), 9):
        assert d.tokens(uid) == expected(
            [min(uid, 8) + 1 if uid < 9 else 9] * 5, 30, ignore_eos=True
        )


@LOOPS
def test_a_displaced_request_is_not_displaced_again_at_once(overlap: bool) -> None:
    """Prompts come one after the other; each answer yields once, and again after its turn."""
    d = Driver(
        overlap=overlap, policy="fair", max_running_req=3, num_pages=100, page_size=4, turn=40
    )
    for uid in range(3):
        d.ask(uid, [uid + 1] * 5, "answers", max_tokens=100, ignore_eos=True)
    d.go(4)
    for uid in range(3, 9):
        d.ask(uid, [uid + 1] * 5, "prompts", max_tokens=1)
        d.go(8)
    assert d.scheduler.retractions == 3  # 2, 1, and 0, whose turn is over
    d.drain(500)
    for uid in range(3):
        assert d.tokens(uid) == expected([uid + 1] * 5, 100, ignore_eos=True)


def gaps(d: Driver, uid: int) -> list[int]:
    """Return the numbers of steps from one step of a request to its next."""
    own = [i for i, step in enumerate(d.engine.steps) if uid in step.uids]
    return [after - before for before, after in itertools.pairwise(own)]


@LOOPS
@pytest.mark.parametrize("sizes", [{"max_running_req": 1}, {"num_pages": 14}], ids=["row", "pages"])
def test_clients_with_one_request_each_take_turns(overlap: bool, sizes: dict[str, int]) -> None:
    """There is room for one of three; no answer waits longer than two turns."""
    d = Driver(overlap=overlap, policy="fair", **{"num_pages": 100, **sizes}, page_size=4, turn=8)
    for uid in range(3):
        d.ask(uid, [uid + 1] * 5, f"client {uid}", max_tokens=40, ignore_eos=True)
    d.drain(1000)
    assert d.scheduler.retractions >= 9
    first = [min(i for i, s in enumerate(d.engine.steps) if uid in s.uids) for uid in range(3)]
    assert max(first) <= 2 * (8 + 3)
    for uid in range(3):
        assert max(gaps(d, uid)) <= 2 * (8 + 3 + 2)  # turns grow with the text
        assert d.tokens(uid) == expected([uid + 1] * 5, 40, ignore_eos=True)


@LOOPS
def test_a_client_that_comes_again_and_again_is_no_new_one(overlap: bool) -> None:
    """It sends one prompt of a step's budget after the other; the answers of others go on."""
    d = Driver(
        overlap=overlap, policy="fair", max_running_req=2, num_pages=100, page_size=4, turn=8
    )
    for uid in range(2):
        d.ask(uid, [uid + 1] * 5, "answers", max_tokens=100, ignore_eos=True)
    d.go(30)
    for uid in range(2, 30):
        d.ask(uid, [uid + 1] * 64, "prompts", max_tokens=1)
        while not d.replies.get(uid):
            d.go(1)
    d.drain(500)
    for uid in range(2):
        assert max(gaps(d, uid)) <= 8
        assert d.tokens(uid) == expected([uid + 1] * 5, 100, ignore_eos=True)


@LOOPS
def test_nobody_who_yielded_waits_behind_those_who_come_later(overlap: bool) -> None:
    """One row; six others have one request each, and for each that ends a new client comes."""
    d = Driver(overlap=overlap, policy="fair", max_running_req=1, num_pages=100, turn=8, budget=999)
    d.ask(0, [1] * 5, "long", max_tokens=60, ignore_eos=True)
    d.go(3)
    asked = 0
    while asked < 60:
        if asked - sum(d.replies[uid][-1].finished for uid in d.replies if uid) < 6:
            asked += 1
            d.ask(asked, [2], f"short {asked}", max_tokens=3, ignore_eos=True)
        d.go()
    d.drain(1000)
    assert max(gaps(d, 0)) <= 6 * (3 + 1) + 5
    assert d.tokens(0) == expected([1] * 5, 60, ignore_eos=True)


@LOOPS
def test_a_request_that_needs_all_pages_waits_for_turns_not_for_answers(overlap: bool) -> None:
    """It is the first, and others wait behind it, for as long as a turn."""
    d = Driver(overlap=overlap, policy="fair", num_pages=24, page_size=4, turn=8)
    d.ask(0, [1] * 4, "stream", max_tokens=80, ignore_eos=True)
    d.go(3)
    d.ask(1, [2] * 60, "large", max_tokens=30, ignore_eos=True)
    for uid in range(2, 12):
        d.go(4)
        d.ask(uid, [uid + 1] * 3, "small", max_tokens=2, ignore_eos=True)
    d.drain(1000)
    for uid in range(2, 12):
        place = next(i for i, s in enumerate(d.engine.steps) if uid in s.uids)
        asked = 3 + 4 * (uid - 1)
        assert place - asked < 60, (uid, place, asked)
    assert d.tokens(0) == expected([1] * 4, 80, ignore_eos=True)
    assert d.tokens(1) == expected([2] * 60, 30, ignore_eos=True)


def half_done_and_taken_back(overlap: bool, most: int) -> Driver:
    """Request 0 answers with `most` tokens; the prompt of request 1 must make room for it."""
    d = Driver(
        overlap=overlap,
        policy="fair",
        reserve=1,
        budget=2,
        num_pages=9,
        page_size=4,
        mixed_prefill_threshold=1,
    )
    d.ask(0, [1] * 4, max_tokens=most, ignore_eos=True)
    d.go(2)
    d.ask(1, list(range(24)), max_tokens=4, ignore_eos=True)
    d.drain()
    assert d.scheduler.retractions > 0
    return d


@LOOPS
def test_a_half_done_prompt_is_taken_back_first(overlap: bool) -> None:
    """Between its chunks others decode, and need the page that it was promised."""
    d = half_done_and_taken_back(overlap, 28)
    assert d.tokens(0) == expected([1] * 4, 28, ignore_eos=True)
    assert d.tokens(1) == expected(range(24), 4, ignore_eos=True)
    assert sum(s.uids == [0] for s in d.engine.steps if s.phase == "prefill") == 2  # 4 tokens


@LOOPS
def test_what_a_request_computed_itself_is_no_hit(overlap: bool) -> None:
    """A half-done prompt finds pages of its own when it comes back, and does not report them."""
    d = half_done_and_taken_back(overlap, 16)
    computed = sum(s.extend[s.uids.index(1)] for s in d.engine.steps if 1 in s.uids)
    assert computed == 24 + 3  # nothing twice
    assert all(r.cached_tokens == 0 for r in d.replies[1])


@LOOPS
def test_a_half_done_prompt_that_found_no_room_goes_on_later(overlap: bool) -> None:
    d = Driver(overlap=overlap, policy="fair", budget=8, mixed_prefill_threshold=1, min_shared=0)
    d.ask(0, [1] * 24, max_tokens=2, ignore_eos=True)
    d.go()
    for uid in (1, 2):
        d.ask(uid, [uid + 1] * 4, max_tokens=2, ignore_eos=True)
    d.drain()
    full = d.engine.steps[1]
    assert (full.uids, full.extend) == ([1, 2], [4, 4])
    assert d.tokens(0) == expected([1] * 24, 2, ignore_eos=True)


def crowded(overlap: bool, newcomers: int, *, every: int = 2, prompt: int = 3) -> Driver:
    """Run 96 requests in 96 rows, one of which ends every `every` steps; others wait."""
    d = Driver(overlap=overlap, max_running_req=96, num_pages=9000, max_seq_len=400)
    for uid in range(96):
        d.ask(uid, [uid % 7 + 1] * 3, max_tokens=6 + every * uid, ignore_eos=True)
    while d.engine.tables.free_rows:
        d.go()
    for uid in range(96, 96 + newcomers):
        d.ask(uid, [uid % 7 + 1] * prompt, max_tokens=100, ignore_eos=True)
    return d


def prefills(d: Driver) -> list[tuple[int, list[int]]]:
    """The prefill steps until all are answered: number of the step, tokens of each prompt."""
    before = len(d.engine.steps)
    d.drain()
    late = enumerate(d.engine.steps[before:], before)
    return [(index, step.extend) for index, step in late if step.phase == "prefill"]


@LOOPS
def test_full_rows_are_given_again_by_groups(overlap: bool) -> None:
    """1/32 of 96 rows: three requests come in at once, as soon as three have ended."""
    d = crowded(overlap, 20)
    steps = prefills(d)
    assert [len(prompts) for _, prompts in steps] == [3] * 6 + [2]  # none is behind the last two
    assert all(b - a == 7 for (a, _), (b, _) in itertools.pairwise(steps[:6]))  # six of decode
    for uid in range(116):
        most = 6 + 2 * uid if uid < 96 else 100
        assert d.tokens(uid) == expected([uid % 7 + 1] * 3, most, ignore_eos=True)


@LOOPS
def test_who_waits_alone_comes_in_with_the_first_free_row(overlap: bool) -> None:
    """Three who wait are a group of three, one is a group of one."""
    d = crowded(overlap, 3)
    assert [len(prompts) for _, prompts in prefills(d)] == [3]
    d = crowded(overlap, 1)  # five steps of prefill, then the five that are left to request 0
    assert prefills(d) == [(10 + overlap, [3])]


@LOOPS
def test_nobody_waits_long_for_a_group(overlap: bool) -> None:
    """A row is free every 12 steps, and somebody comes in every 16, as step 4 was the last."""
    d = crowded(overlap, 6, every=12)
    assert prefills(d)[:3] == [(20, [3]), (36, [3, 3]), (52, [3])]


@LOOPS
def test_a_prefill_that_leaves_rows_free_is_followed_by_the_next(overlap: bool) -> None:
    """Three rows are free, and two prompts are all that a step may compute."""
    d = crowded(overlap, 20, prompt=4)
    limits = d.scheduler.prefill.limits
    d.scheduler.prefill.limits = replace(limits, max_extend_tokens=8)
    steps = prefills(d)
    assert [prompts for _, prompts in steps[:2]] == [[4, 4], [4]]
    assert steps[1][0] - steps[0][0] == 1


@LOOPS
def test_half_done_prompts_do_not_wait_for_free_rows(overlap: bool) -> None:
    """Three prompts of 40 tokens, four steps in a row, though fewer rows are free after each."""
    d = crowded(overlap, 6, prompt=40)
    limits = d.scheduler.prefill.limits
    d.scheduler.prefill.limits = replace(limits, max_extend_tokens=32)
    own = [index for index, _ in prefills(d)]
    assert [b - a for a, b in itertools.pairwise(own[:4])] == [1] * 3


def test_no_promise_is_cut_without_a_reserve() -> None:
    d = Driver(num_pages=10, page_size=4)
    for uid in range(6):
        d.ask(uid, [uid + 1] * 5, max_tokens=20, ignore_eos=True)
    d.drain()
    assert d.scheduler.retractions == 0


def test_a_reserve_lets_more_run_at_once() -> None:
    """Callers who leave max_tokens open are not promised the whole window."""
    most = {}
    for reserve in (None, 4):
        d = Driver(num_pages=32, page_size=4, reserve=reserve)
        for uid in range(8):
            d.ask(uid, [3, 3, uid * 3])  # these answers end by themselves, early
        d.drain()
        most[reserve] = max(len(s.uids) for s in d.engine.steps)
    assert most[None] <= 2 and most[4] == 8


# ------------------------------------------------------------------ a fair order


@LOOPS
def test_a_short_request_behind_fifty_long_ones(overlap: bool) -> None:
    """It is in the next step, and that step is short."""
    d = Driver(
        overlap=overlap, policy="fair", budget=64, num_pages=2000, max_running_req=64,
        mixed_prefill_threshold=16, min_shared=0,
    )  # fmt: skip
    for uid in range(50):
        d.ask(uid, [uid + 1] * 100, "flood", max_tokens=1)
    d.go(5)
    before = len(d.engine.steps)
    d.ask(99, [5] * 6, "chat", max_tokens=1)
    d.go()
    step = d.engine.steps[before]
    assert step.uids[0] == 99 and sum(step.extend) <= 16
    d.drain()
    assert all(len(d.tokens(uid)) == 1 for uid in range(50))


def test_a_step_holds_prompts_of_about_one_length() -> None:
    d = Driver(policy="fair", budget=1000, num_pages=2000, max_running_req=64, max_seq_len=1200,
               mixed_prefill_threshold=16, min_shared=0)  # fmt: skip
    for uid, tokens in enumerate((30, 25, 500, 50, 51, 5, 11)):
        d.ask(uid, [uid + 1] * tokens, max_tokens=1)
    d.go()
    d.drain()
    steps = [step for step in d.engine.steps if step.phase == "prefill"]
    assert [step.extend for step in steps] == [
        [5, 11],  # 16 are no trouble
        [25, 30, 50],
        [51],
        [500],
    ]


@LOOPS
@pytest.mark.parametrize("client", ["writer", "chat", "another each time"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_document_goes_on_behind_a_trickle(overlap: bool, client: str, begun: bool) -> None:
    """A short prompt comes every turn, for as long as it takes: each step has a piece to spare."""
    d = Driver(overlap=overlap, policy="fair", budget=256, num_pages=20_000, max_running_req=64,
               max_seq_len=1200, mixed_prefill_threshold=16, min_shared=0)  # fmt: skip
    d.ask(0, [7] * 1000, "writer", max_tokens=1)
    if begun:
        d.go()
    for uid in range(1, 400):
        d.ask(uid, [1 + uid % 90, 2 + uid // 90], client.replace("each", str(uid)), max_tokens=1)
        d.go()
        if d.tokens(0):
            break
    assert uid < 1000 / (16 - 2) * 2 + 10  # pieces of 14 tokens, every other turn is a decode step
    d.drain()


def test_a_rest_counts_as_what_it_is_of() -> None:
    """The end of a document is short; what joins it and a short prompt must not be long."""
    d = Driver(policy="fair", budget=256, num_pages=20_000, max_running_req=64, max_seq_len=1200,
               mixed_prefill_threshold=16, min_shared=0)  # fmt: skip
    for uid in range(3):
        d.ask(uid, [7 + uid] * 261, "writer", max_tokens=1)
    d.go()
    d.ask(99, [5] * 8, "chat", max_tokens=1)
    d.drain()
    steps = [step for step in d.engine.steps if step.phase == "prefill"]
    assert steps[1].extend == [5, 8, 3]


@pytest.mark.parametrize("low, high", [(100, 1024), (600, 610), (1, 3000)])
def test_a_crowd_is_computed_in_full_steps(low: int, high: int) -> None:
    """One client's burst: fairness costs a few steps, not the batching."""
    count, budget, rng = 120, 4096, np.random.default_rng(0)
    lengths = rng.integers(low, high, count)
    d = Driver(policy="fair", budget=budget, num_pages=200_000, max_running_req=count,
               max_seq_len=4000, mixed_prefill_threshold=budget // 32)  # fmt: skip
    for uid, length in enumerate(lengths):
        d.ask(uid, [1 + uid % 90, uid // 90, *[3] * (length - 1)], max_tokens=1)
    d.drain()
    steps = [step for step in d.engine.steps if step.phase == "prefill"]
    kinds = 1 + int(np.log2(high / max(low, budget // 32)))
    assert len(steps) <= lengths.sum() / budget + 2 * kinds + 1


def step_of(budget: int) -> PrefillAdder:
    """An empty step over an empty pool, under the fair order."""
    tables = TableManager(8, 400, 4, 400, "cpu")
    cache = CacheManager(400, tables, RadixCache(4))
    return PrefillAdder(cache, PrefillLimits(budget, 0, 16), reserved=0)


def test_a_prompt_that_was_cut_is_the_last_of_its_step() -> None:
    """Only one can be half done, and only the last is remembered."""
    step = step_of(64)
    first, document, late = make_req(4, 2), make_req(100, 2), make_req(4, 2)
    for req in (first, document):
        found = step.check(req)
        assert found is not None
        step.admit(req, found)
    assert [req.extend_len for req in step.reqs] == [4, 12] and document.is_chunked
    assert step.check(late) is None and not step.add_chunk(document)


def test_who_must_fit_whole_is_not_cut() -> None:
    step, long, short = step_of(64), make_req(65, 2), make_req(64, 2)
    assert step.check(long) is not None and step.check(long, whole=True) is None
    found = step.check(short, whole=True)
    assert found is not None
    step.admit(short, found)
    assert not short.is_chunked


@pytest.mark.parametrize("fits", [False, True])
def test_a_decision_changes_nothing(fits: bool) -> None:
    """Also where the prefix is found, and the rest has no room."""
    step, req, said = step_of(64), make_req(40, 2 if fits else 1600), list[events.Event]()
    cache = step.cache
    req.prompt_ids[:36] = np.arange(36)
    cache.prefix_cache.insert_prefix(req.input_ids[:36], slots_of_pages(cache.take_pages(9), 4))
    cache.prefix_cache.emit = said.append

    def state() -> str:
        fields = vars(step) | {name: getattr(req, name) for name in Req.__slots__}
        return repr((fields, cache.available_tokens, cache.prefix_cache.protected_tokens))

    before = state()
    found = step.check(req)
    assert (found is not None) == fits and (found is None or found.cached_len == 36)
    assert state() == before and not any(isinstance(e, events.NodeLocked) for e in said)


@LOOPS
def test_running_requests_get_a_token_between_prompts(overlap: bool) -> None:
    phases = {}
    for policy in ("fcfs", "fair"):
        d = Driver(overlap=overlap, policy=policy, budget=16, num_pages=500, max_running_req=32)
        d.ask(0, [1] * 4, max_tokens=20, ignore_eos=True)
        d.go(2)
        start = len(d.engine.steps)
        for uid in range(1, 9):
            d.ask(uid, [uid + 1] * 16, max_tokens=2, ignore_eos=True)
        d.drain()
        phases[policy] = [s.phase[0] for s in d.engine.steps[start:]][:10]
    assert phases["fcfs"][:6] == list("pppppp")
    assert "pp" not in "".join(phases["fair"])


# ------------------------------------------------------------------ rows that name freed slots


@LOOPS
def test_pitfall_01_rows_follow_their_prefix(overlap: bool) -> None:
    """Twins prefilled together: the second frees its copies and must name the first one's slots."""
    d = Driver(overlap=overlap, page_size=4)
    prompt = list(range(12))
    for uid in range(3):
        d.ask(uid, prompt, max_tokens=6, ignore_eos=True)
    d.go(2)
    rows = [r.table_idx for r in d.live()]
    table = d.engine.tables.page_table
    assert len(rows) == 3
    assert all(np.array_equal(table[rows[0], :12], table[row, :12]) for row in rows)
    free = set(d.cache.allocator.free_set().tolist())
    for req in d.live():
        used = table[req.table_idx, : req.cached_len] // 4
        assert not free & set(used.tolist())
    d.drain()
    assert all(d.tokens(u) == expected(prompt, 6, ignore_eos=True) for u in range(3))


# ------------------------------------------------------------------ the loops


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("seed", range(4))
def test_both_loops_give_the_same_tokens(cache_type: str, seed: int) -> None:
    answers = []
    for overlap in (False, True):
        r = random.Random(seed)
        d = Driver(
            overlap=overlap, cache_type=cache_type, budget=7, num_pages=12, max_running_req=3
        )
        for uid in range(25):
            prompt = [5] * r.randrange(6) + [r.randrange(4) for _ in range(r.randrange(1, 20))]
            d.ask(uid, prompt, max_tokens=r.randrange(1, 12))
            if r.random() < 0.5:
                d.go()
        d.drain()
        answers.append({uid: (d.tokens(uid), d.reason(uid)) for uid in range(25)})
    assert answers[0] == answers[1]


@LOOPS
def test_run_until_told_to_exit(overlap: bool) -> None:
    """The blocking loop, fed from another thread, as a server does it."""
    d = Driver(overlap=overlap)
    thread = threading.Thread(target=d.scheduler.run, daemon=True)
    thread.start()
    said: list[Any] = []
    for uid in range(3):
        d.ask(uid, [uid + 1] * 2, max_tokens=3, ignore_eos=True)
        while sum(r.uid == uid and r.finished for r in said) == 0:
            said += d.channel.take_replies()
    d.ask(9, [4] * 2, max_tokens=100, ignore_eos=True)
    d.channel.put_messages(ExitMsg())
    thread.join(timeout=100)
    assert not thread.is_alive()
    said += d.channel.take_replies()
    assert [r.finish_reason for r in said if r.uid == 9][-1] == "abort"
    assert d.cache.available_tokens == d.engine.num_pages * d.engine.page_size


@LOOPS
def test_idle_checks_that_no_page_is_lost(overlap: bool) -> None:
    d = Driver(overlap=overlap)
    d.ask(1, [1, 2], max_tokens=2)
    d.drain()
    d.cache.allocator.allocate(1)  # a page without an owner
    with pytest.raises(IntegrityError, match="lost"):
        d.step(block=True)


def test_idle_blocks_and_work_does_not() -> None:
    asked: list[bool] = []

    class Channel(InProcessChannel):
        def recv(self, block: bool) -> list[Msg]:
            asked.append(block)
            return super().recv(block=False)

    d = Driver()
    d.scheduler.channel = d.channel = Channel()
    d.ask(1, [1, 2], max_tokens=2, ignore_eos=True)
    for _ in range(4):
        d.scheduler.step(block=True)
    assert asked == [True, False, True, True]


def test_channel_blocks_until_there_is_a_message() -> None:
    channel = InProcessChannel()
    threading.Timer(0.05, lambda: channel.put_messages(AbortMsg(1), AbortMsg(2))).start()
    got = channel.recv(block=True)
    got += channel.recv(block=False) if len(got) == 1 else []
    assert got == [AbortMsg(1), AbortMsg(2)]
    assert channel.recv(block=False) == []


def test_trace_tells_what_was_done_for_which_step() -> None:
    events: list[Any] = []
    d = Driver(emit=StageClock(events.append))
    d.ask(1, [1, 1], max_tokens=3, ignore_eos=True)
    d.drain()
    names = [e.name for e in events]
    assert names[:5] == ["receive", "schedule", "launch", "wait", "process"]
    assert {e.step for e in events} == {0, 1, 2}
    assert all(e.start <= e.end for e in events)
    assert all(a.end == b.start for a, b in itertools.pairwise(events))


def test_overlap_launches_before_it_waits() -> None:
    events: list[Any] = []
    d = Driver(emit=StageClock(events.append), overlap=True)
    d.ask(1, [1, 1], max_tokens=4, ignore_eos=True)
    d.drain()
    order = [(e.name, e.step) for e in events if e.name in ("launch", "wait")]
    assert order.index(("launch", 1)) < order.index(("wait", 0))
    assert order.index(("launch", 2)) < order.index(("wait", 1))


def test_overlap_is_idle_only_when_nothing_flies() -> None:
    """The step after an end token is still on its way when the last reply is out."""
    d = Driver(overlap=True)
    d.ask(1, [3, 3, 3], max_tokens=20)
    while not d.tokens(1) or d.tokens(1)[-1] != EOS:
        d.go()
    assert d.scheduler.in_flight is not None and d.scheduler.has_work
    d.drain()
    assert d.scheduler.in_flight is None


def test_host_work_is_linear_in_the_batch() -> None:
    """Bookkeeping of the decode order costs a dictionary entry, and no search."""
    d = Driver(max_running_req=256, num_pages=2048, max_seq_len=64, budget=4096)
    for uid in range(256):
        d.ask(uid, [uid] * 4, max_tokens=8, ignore_eos=True)
    while d.channel.waiting or d.scheduler.has_work:
        d.step()
    assert max(len(s.uids) for s in d.engine.steps) == 256
    assert len(d.engine.steps) == 8


@LOOPS
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_after_a_reset_everything_is_as_in_a_new_scheduler(overlap: bool, policy: str) -> None:
    """At any moment: no page, row, message or plan is left, and the next steps are the same."""

    def new() -> Driver:
        share = 1 if policy == "fcfs" else None
        sizes = {"num_pages": 14, "max_running_req": 3, "reserve": 1, "share": share}
        return Driver(overlap=overlap, policy=policy, budget=16, **sizes)  # type: ignore[arg-type]

    def ask(d: Driver) -> None:
        for uid, length in enumerate([20, 3, 5, 9, 4]):
            d.ask(uid, [4] * length + [uid], str(uid), max_tokens=12, ignore_eos=True)

    fresh = new()
    ask(fresh)
    fresh.drain()
    for turns in range(1, len(fresh.engine.steps)):
        d = new()
        ask(d)
        d.go(turns)
        d.scheduler.reset()
        d.replies.clear()
        d.engine.steps.clear()
        d.check()
        assert not d.scheduler.has_work and len(d.scheduler.prefill.waiting) == 0
        assert d.cache.allocator.free_pages == 14
        ask(d)
        d.drain()
        assert d.engine.steps == fresh.engine.steps and d.replies == fresh.replies


# ------------------------------------------------------------------ any sequence of events


class Events(RuleBasedStateMachine):
    """Requests and aborts at any time, in any order, on a tight pool."""

    answer = staticmethod(expected)

    @initialize(
        overlap=st.booleans(),
        cache_type=st.sampled_from(["radix", "naive"]),
        budget=st.sampled_from([3, 8, 64]),
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(3, 10),
        rows=st.integers(1, 4),
        share=st.sampled_from([1, 2, 32]),
        policy=st.sampled_from(["fcfs", "fair"]),
        reserve=st.sampled_from([None, 1, 6]),
        mixed_prefill_threshold=st.sampled_from([1, 16]),
    )
    def start(self, **how: Any) -> None:
        how["num_pages"] = how.pop("pages") * (4 if how["page_size"] == 1 else 1)
        how["max_running_req"] = how.pop("rows")
        self.d = Driver(max_seq_len=48, **how)
        self.wanted: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.lost: set[int] = set()  # by a reset: they get no last reply

    @rule(same=st.integers(0, 12), own=st.lists(st.integers(0, 2), min_size=1, max_size=12),
          new=st.integers(1, 12), ignore=st.booleans(), client=st.sampled_from("ab"))  # fmt: skip
    def ask(self, same: int, own: list[int], new: int, ignore: bool, client: str) -> None:
        prompt = [4] * same + own
        limit = self.d.limits.total
        uid = len(self.wanted)
        room = limit - len(prompt)
        self.wanted[uid] = self.answer(prompt, min(new, room), ignore) if room > 0 else []
        self.d.ask(uid, prompt, client, max_tokens=new, ignore_eos=ignore)

    @precondition(lambda self: getattr(self, "wanted", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.integers(0, len(self.wanted) - 1))
        self.aborted.add(uid)
        self.d.channel.put_messages(AbortMsg(uid))

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        self.d.go(turns)

    @precondition(lambda self: getattr(self, "wanted", None))
    @rule(place=st.sampled_from(["tables.write", "cache.prefix_cache.lock", "cache.take_pages",
                                 "engine.step", "decode.update", "prefill.remove", "release"]),
          after=st.booleans())  # fmt: skip
    def fail(self, place: str, after: bool) -> None:
        """An exception before or after the next call of a method, if it is called in two turns."""
        *path, name = place.replace("tables", "cache.tables").split(".")
        part = attrgetter(".".join(path))(self.d.scheduler) if path else self.d.scheduler
        real = getattr(part, name)

        def broken(*args: Any) -> None:
            if after:
                real(*args)
            raise KeyboardInterrupt

        setattr(part, name, broken)
        try:
            self.d.go(2)
        except KeyboardInterrupt:
            self.lost.update(self.wanted)
            self.d.scheduler.reset()
            self.d.channel.recv(block=False)
            self.d.channel.take_replies()
        finally:
            delattr(part, name)
        self.d.check()

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        self.d.drain()
        for uid, wanted in self.wanted.items():
            got = self.d.tokens(uid)
            ended = uid in self.aborted | self.lost
            assert got == wanted or (ended and got == wanted[: len(got)])
            last = None if uid in self.lost else self.d.replies[uid][-1]
            assert last is None or isinstance(last, ErrorReply) or last.finished


TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def test_fake_engine_notices_shared_slots() -> None:
    """The oracle itself: two rows that write one slot are an error."""
    engine = FakeEngine()
    reqs = [make_req(2, 2), make_req(2, 2)]
    for row, req in enumerate(reqs):
        req.table_idx = row
        engine.tables.write(row, 0, np.array([4, 5], np.int32))
    with pytest.raises(AssertionError, match="share a slot"):
        engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL))
