"""The waiting queue: fair in tokens between clients, bounded, without leftovers."""

from __future__ import annotations

import random
from collections.abc import Sized
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minisgl.core import Batch, IntArray, Phase, Req, SamplingParams
from minisgl.scheduler.queue import ANSWER_WEIGHT, MOST_GONE, ArrivalOrder, FairQueue, WaitingQueue
from tests.reference import Fairness

STEP = 100


def make_req(uid: int, tokens: int, client: str = "") -> Req:
    return Req(
        uid=uid, input_ids=np.ones(tokens, np.int32), sampling_params=SamplingParams(),
        max_new_tokens=500, client=client,
    )  # fmt: skip


def computed(queue: WaitingQueue, req: Req, tokens: int, phase: Phase = Phase.PREFILL) -> None:
    """Charge a step of `tokens` tokens of one request."""
    req.schedule(req.cached_len + tokens)
    queue.charge(Batch(reqs=[req], phase=phase))
    req.cached_len += tokens


def admit(queue: WaitingQueue) -> Req:
    """Take the first in, and compute its prompt."""
    req = queue.first()
    assert req is not None
    queue.remove(req)
    computed(queue, req, req.prefill_len)
    return req


def drain(queue: WaitingQueue) -> list[int]:
    """Admit everybody, one after the other; the order of their numbers."""
    order = []
    while len(queue):
        req = admit(queue)
        queue.release(req)
        order.append(req.uid)
    return order


def test_arrival_order() -> None:
    queue = ArrivalOrder()
    reqs = [make_req(i, 10 - i) for i in range(4)]
    for req in reqs:
        queue.add(req)
    assert queue.chunk_comes_first(make_req(9, 1)) and list(queue) == reqs
    queue.remove(reqs[1])
    queue.resume(reqs[1])
    assert drain(queue) == [1, 0, 2, 3] and queue.first() is None


def test_a_short_request_passes_the_long_ones_of_its_client() -> None:
    queue = FairQueue(STEP)
    for uid in range(50):
        queue.add(make_req(uid, 400))
    queue.add(make_req(99, 20))
    assert drain(queue)[0] == 99


def test_equal_requests_keep_their_order() -> None:
    queue = FairQueue(STEP)
    for uid in range(20):
        queue.add(make_req(uid, 30))
    assert drain(queue) == list(range(20))


def test_nobody_starves_behind_short_requests() -> None:
    """A long request waits while short ones keep arriving; its wait is bounded."""
    queue = FairQueue(STEP)
    queue.add(make_req(0, 400))
    for turn in range(1, 200):
        queue.add(make_req(turn, 10))
        req = admit(queue)
        queue.release(req)
        if req.uid == 0:
            break
    # Two wait at any time, so the clock moves by five tokens a turn, to 390.
    assert 60 <= turn <= 90


@pytest.mark.parametrize("clients", [1, 3, 10**9], ids=["one", "three", "new"])
def test_nobody_starves_behind_clients_that_come_once(clients: int) -> None:
    """Short requests fill every step; their clients are forgotten as soon as they are served."""
    queue = FairQueue(STEP)
    queue.add(make_req(0, 400, "document"))
    for turn in range(1, 500):
        for uid in (2 * turn, 2 * turn + 1):  # two come, one is served
            queue.add(make_req(uid, 50, str(uid % clients)))
        req = admit(queue)
        queue.release(req)
        if req.uid == 0:
            break
    assert turn < 100


def test_a_new_client_is_not_behind_those_who_wait() -> None:
    """Three floods took turns; a new client starts at their level, and goes first if short."""
    queue = FairQueue(STEP)
    for uid in range(30):
        queue.add(make_req(uid, 300, f"flood {uid % 3}"))
    for _ in range(12):
        queue.release(admit(queue))
    queue.add(make_req(99, 20, "chat"))
    first = queue.first()
    assert first is not None and first.uid == 99


def test_a_newcomer_has_no_credit_for_the_answers_of_others() -> None:
    queue = FairQueue(STEP)
    talker = make_req(0, 10, "talker")
    queue.add(talker)
    admit(queue)
    for uid in range(1, 11):
        queue.add(make_req(uid, 300, "talker"))
    for _ in range(400):
        computed(queue, talker, 1, Phase.DECODE)
    for uid in range(100, 110):
        queue.add(make_req(uid, 300, "new"))
    order = [admit(queue).uid for _ in range(8)]
    assert sum(uid >= 100 for uid in order) == 4


def test_a_new_client_goes_before_a_flood() -> None:
    queue = FairQueue(STEP)
    for uid in range(50):
        queue.add(make_req(uid, 400, "flood"))
    admit(queue)
    queue.add(make_req(99, 20, "chat"))
    first = queue.first()
    assert first is not None and first.uid == 99


def test_two_floods_share_by_tokens_not_by_requests() -> None:
    queue = FairQueue(STEP)
    for i in range(100):
        queue.add(make_req(i, 100, "short"))
    for i in range(100, 125):
        queue.add(make_req(i, 400, "long"))
    order = drain(queue)
    for end in range(10, 100):
        tokens = {"short": 0, "long": 0}
        for uid in order[:end]:
            tokens["short" if uid < 100 else "long"] += 100 if uid < 100 else 400
        assert abs(tokens["short"] - tokens["long"]) <= 400 + STEP


def test_who_was_away_has_no_credit() -> None:
    queue = FairQueue(STEP)
    other = make_req(0, 10, "away")
    queue.add(other)
    admit(queue)  # it still runs, so that its share is remembered
    for uid in range(1, 30):
        queue.add(make_req(uid, 300, "busy"))
    for _ in range(10):
        admit(queue)
    for uid in range(100, 110):
        queue.add(make_req(uid, 300, "away"))
    order = [admit(queue).uid for _ in range(12)]
    assert abs(sum(uid >= 100 for uid in order) - 6) <= 1  # in turns from now on


def test_answers_are_charged_and_twice() -> None:
    queue = FairQueue(STEP)
    talker = make_req(0, 10, "talker")
    for req in (talker, make_req(3, 20, "b"), make_req(1, 100, "b")):
        queue.add(req)
    assert admit(queue) is talker and admit(queue).uid == 3  # both have a row
    for _ in range(STEP):
        computed(queue, talker, 1, Phase.DECODE)
    queue.add(make_req(2, 10, "talker"))
    assert ANSWER_WEIGHT == 2
    first = queue.first()
    assert first is not None and first.uid == 1  # two steps ahead of b


@pytest.mark.parametrize("before", [0, 80])
@pytest.mark.parametrize(("ahead", "equal"), [(30, True), (99, True), (100, False)])
def test_less_than_a_step_apart_counts_as_equal(before: int, ahead: int, equal: bool) -> None:
    """Wherever the two stand: 80 and 110 are as near as 0 and 30."""
    queue = FairQueue(STEP)
    for uid, client in enumerate("ab"):
        queue.add(make_req(uid, before + (ahead if client == "a" else 0) or 1, client))
        queue.add(make_req(10 + uid, 30 if client == "a" else 140, client))
    for req in [req for req in queue if req.uid < 2]:
        queue.remove(req)
        if tokens := before + (ahead if req.client == "a" else 0):
            computed(queue, req, tokens)
    first = queue.first()
    assert first is not None and first.uid == (10 if equal else 11)


def test_a_half_done_prompt_and_clients_a_few_tokens_apart() -> None:
    queue = FairQueue(STEP)
    half = make_req(0, 60, "a")
    queue.add(half)
    queue.add(make_req(1, 300, "b"))
    queue.remove(half)
    computed(queue, half, 30)
    assert queue.chunk_comes_first(half)  # 30 tokens ahead of b, and the shorter one
    talker = make_req(2, 10, "a")
    queue.add(talker)
    queue.remove(talker)
    for _ in range(40):
        computed(queue, talker, 1, Phase.DECODE)
    assert not queue.chunk_comes_first(half)  # 110 tokens ahead


@pytest.mark.parametrize("client", ["same", "other"])
def test_a_short_request_passes_a_half_done_one(client: str) -> None:
    queue = FairQueue(STEP)
    queue.add(make_req(0, 1000, "same"))
    queue.add(make_req(1, 1000, "same"))
    half = queue.first()
    assert half is not None
    queue.remove(half)
    computed(queue, half, 90)
    assert queue.chunk_comes_first(half)
    queue.add(make_req(2, 20, client))
    assert not queue.chunk_comes_first(half)
    queue.remove(first := queue.first())  # type: ignore[arg-type]
    assert first is not None and first.uid == 2 and queue.chunk_comes_first(half)


def test_who_was_taken_back_comes_first() -> None:
    queue = FairQueue(STEP)
    old, young = make_req(0, 50), make_req(1, 50)
    for req in (old, young):
        queue.add(req)
        queue.remove(req)
    queue.add(make_req(2, 5))
    queue.resume(young)  # the youngest is taken back first
    queue.resume(old)
    half = make_req(3, 500)
    queue.add(half)
    queue.remove(half)
    assert not queue.chunk_comes_first(half)
    assert sorted(req.uid for req in queue) == [0, 1, 2] and len(queue) == 3
    order = []
    while len(queue):
        queue.remove(first := queue.first())  # type: ignore[arg-type]
        order.append(first.uid)  # type: ignore[union-attr]
    assert order == [0, 1, 2]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    steps=st.lists(st.integers(1, 50), min_size=12, max_size=12),
)
def test_tags_are_those_of_a_device_that_works_side_by_side(
    lengths: list[int], steps: list[int]
) -> None:
    """Against exact fractions: a clock that each computed token moves by 1 / present."""
    queue, worker = FairQueue(10**9), make_req(1000, 10**5)
    queue.add(worker)
    queue.remove(worker)
    clock, tags = Fraction(0), {}
    for uid, (tokens, taken) in enumerate(zip(lengths, steps)):
        tags[uid] = clock + tokens
        queue.add(make_req(uid, tokens))
        computed(queue, worker, taken)
        clock += Fraction(taken, uid + 2)
    order = []
    while len(queue):
        queue.remove(first := queue.first())  # type: ignore[arg-type]
        order.append(first.uid)  # type: ignore[union-attr]
    for a, b in pairwise(order):
        assert (float(tags[a]), a) <= (float(tags[b]) + 1e-6, b) or abs(tags[a] - tags[b]) < 1e-6


def test_requests_that_leave_early_are_forgotten() -> None:
    """One waits with the tag of a retracted one while a thousand others are aborted."""
    queue = FairQueue(STEP)
    back = make_req(0, 5)
    queue.add(back)
    queue.remove(back)
    queue.resume(back)
    queue.add(make_req(1, 300))
    for uid in range(2, 1000):
        queue.add(req := make_req(uid, 400))
        queue.remove(req)
        queue.release(req)
    assert sum(len(share.heap) for share in queue._shares.values()) <= 70
    assert drain(queue) == [0, 1]


@pytest.mark.parametrize(("ahead", "count"), [(99, 1), (100, 0)])
def test_who_is_a_step_ahead_displaces_nobody(ahead: int, count: int) -> None:
    queue = FairQueue(STEP)
    for uid in range(2):
        queue.add(make_req(uid, 1, "several"))
        queue.remove(req := queue.first())  # type: ignore[arg-type]
    running = list(queue._tags)
    queue.add(make_req(2, ahead, "ahead"))
    queue.add(make_req(3, 100, "ahead"))
    queue.release(admit(queue))
    assert req is running[1]
    assert queue.displaceable(running) == running[1:][:count]


@pytest.mark.parametrize(("others", "prompt", "tokens"), [
    (1, 100, 20), (1, 101, 20), (1, 500, 76), (1, 1000, 201), (3, 1000, 101),
])  # fmt: skip
def test_a_long_prompt_waits_until_others_were_served(
    others: int, prompt: int, tokens: int
) -> None:
    """What all were served since it came is taken off its length; a short request passes it."""
    queue = FairQueue(STEP, turn=20)
    for uid in range(others):
        queue.add(make_req(uid, 1, f"answers {uid}"))
    running = [admit(queue) for _ in range(others)]
    queue.add(make_req(10, prompt, "prompt"))
    waited = 0
    while not queue.displaceable(running):
        waited += 1
        for req in running:
            computed(queue, req, 1, Phase.DECODE)
    assert waited == tokens and queue.displaceable(running) == running
    queue.add(make_req(11, 50, "later"))
    first = queue.first()
    assert first is not None and first.uid == 11 and queue.displaceable(running) == running


@pytest.mark.parametrize(("reached", "cached", "short", "yields_at"), [
    (0, 0, 20, STEP), (0, 40, 20, 40 + STEP), (0, 0, 70, 140), (200, 160, 20, 160 + STEP),
    (200, 160, 70, 200 + 140), (200, 40, 20, 200 + 160), (200, 0, 1, 200 + 200),
    (200, 600, 20, 600 + STEP), (200, 600, 70, 600 + 140), (0, 0, 160, None),
])  # fmt: skip
def test_a_half_done_prompt_yields_when_enough_is_new(
    reached: int, cached: int, short: int, yields_at: int | None
) -> None:
    """A step ahead, with twice the newcomer's tokens, and as many as it computed again."""
    queue = FairQueue(STEP)
    queue.add(long := make_req(0, 300 if yields_at is None else 1000, "long"))
    if reached:
        queue.remove(long)
        computed(queue, long, reached)
        queue.resume(long)
        long.restart()
    queue.remove(long)
    long.cached_len, long.cache_handle = cached, Prefix(cached)
    queue.add(newcomer := make_req(1, short, "newcomer"))
    while not queue.displaceable([long]) and long.cached_len < long.prefill_len:
        computed(queue, long, 4)
    assert long.cached_len == (yields_at or long.prefill_len)
    if yields_at is not None:
        queue.resume(long)
        assert queue.first() is newcomer


@pytest.mark.parametrize("left", [0, 1, 5])
def test_requests_that_left_are_not_kept(left: int) -> None:
    """Each may hold a grammar, whose characters count until it is gone."""
    queue = FairQueue(STEP)
    queue.add(runs := make_req(99, 5, "a"))
    queue.remove(runs)
    reqs = [make_req(uid, 5 + uid, "a") for uid in range(20)]
    for req in reqs:
        queue.add(req)
    for req in reqs[left:]:
        queue.remove(req)
        queue.release(req)
    assert len(queue._shares["a"].heap) <= 2 * left
    assert (queue.first() is None) == (left == 0)


def test_clients_that_left_are_remembered_but_not_all() -> None:
    queue = FairQueue(STEP)
    queue.add(stays := make_req(0, 5, "stays"))
    queue.remove(stays)
    for uid in range(1, MOST_GONE + 10):
        queue.add(make_req(uid, 1, f"client {uid}"))
        req = admit(queue)
        for _ in range(STEP if uid == 1033 else 0):
            computed(queue, req, 1, Phase.DECODE)
        queue.release(req)
    assert len(queue._gone) == MOST_GONE and "client 9" not in queue._gone
    queue.add(make_req(2001, 100, "new"))
    queue.add(make_req(2000, 1, "client 1033"))  # two steps ahead of the newcomer
    first = queue.first()
    assert first is not None and first.uid == 2001
    for req in [*queue]:
        queue.remove(req)
        queue.release(req)
    queue.release(stays)
    assert not queue._gone


def test_an_end_may_change_who_is_first() -> None:
    queue = FairQueue(STEP)
    for uid, client in enumerate("ab"):
        queue.add(make_req(uid, 10, client))
    running = [admit(queue), admit(queue)]
    queue.add(make_req(2, 20, "a"))
    queue.add(make_req(3, 30, "b"))
    assert [req.uid for req in running] == [0, 1] and queue.first().uid == 2  # type: ignore[union-attr]
    queue.release(running[1])
    assert queue.first().uid == 3  # type: ignore[union-attr]


def test_who_ran_alone_is_not_behind_newcomers() -> None:
    """While nobody waited, its tokens were nobody else's."""
    queue = FairQueue(STEP)
    queue.add(make_req(0, 10, "alone"))
    alone = admit(queue)
    for _ in range(STEP):
        computed(queue, alone, 1, Phase.DECODE)
    queue.add(make_req(1, 10, "new"))
    queue.resume(alone)
    assert queue.first() is alone


def test_who_yielded_has_no_credit() -> None:
    queue = FairQueue(STEP, turn=20)
    queue.add(make_req(0, 10, "yields"))
    yields = admit(queue)
    queue.add(make_req(1, 3 * STEP, "long"))
    long = admit(queue)
    for _ in range(20):
        computed(queue, yields, 1, Phase.DECODE)
    queue.add(make_req(2, 10, "long"))
    queue.release(long)
    queue.resume(yields)  # two steps behind the other client, whose turn it is now
    assert drain(queue) == [2, 0]


@pytest.mark.parametrize("tokens", [30, 300])
def test_tiny_requests_do_not_pass_for_ever(tokens: int) -> None:
    """A step costs as much as a 32nd of its budget, and clients get prompt tokens side by side."""
    queue = FairQueue(640)
    for uid in range(200):
        queue.add(make_req(uid, 1, "tiny"))
    queue.add(make_req(1000, tokens, "other"))
    before = drain(queue).index(1000)
    assert before <= tokens // 20 + 2


def test_a_turn_is_longer_for_a_longer_text() -> None:
    queue = FairQueue(STEP, turn=10)
    for tokens, turn in ((31, 10), (32, 11), (640, 30)):
        req = make_req(0, tokens)
        req.device_len += turn - 1
        assert not queue.turn_is_over(req)
        req.device_len += 1
        assert queue.turn_is_over(req)


@dataclass
class Prefix:
    """A cached prefix."""

    cached_len: int

    def slots(self) -> IntArray:
        return np.arange(self.cached_len, dtype=np.int32)


class AnyHistory(RuleBasedStateMachine):
    """In any history no request is lost, and finished ones leave no state."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.oracle = FairQueue(STEP, turn=20), Fairness(STEP, turn=20)
        self.waiting: dict[int, Req] = {}
        self.running: dict[int, Req] = {}
        self.uid = 0

    @rule(tokens=st.integers(1, 300), client=st.sampled_from("abc"))
    def add(self, tokens: int, client: str) -> None:
        self.waiting[self.uid] = make_req(self.uid, tokens, client)
        self.queue.add(self.waiting[self.uid])
        self.oracle.add(self.waiting[self.uid])
        self.uid += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        req = self.queue.first()
        assert req is not None
        self.running[req.uid] = self.waiting.pop(req.uid)
        self.queue.remove(req)
        self.oracle.remove(req)
        self.compute(req, req.prefill_len)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), cached=st.integers(0, 200))
    def begin(self, data: st.DataObject, cached: int) -> None:
        req = self.queue.first()
        assert req is not None
        self.running[req.uid] = self.waiting.pop(req.uid)
        self.queue.remove(req)
        self.oracle.remove(req)
        req.cached_len = min(cached, req.prefill_len - 1)
        req.cache_handle = Prefix(req.cached_len)
        self.compute(req, data.draw(st.integers(1, req.prefill_len - req.cached_len)))

    @precondition(lambda self: self.half_done())
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        req = data.draw(st.sampled_from(self.half_done()))
        self.compute(req, data.draw(st.integers(1, req.prefill_len - req.cached_len)))

    def half_done(self) -> list[Req]:
        return [req for req in self.running.values() if req.cached_len < req.prefill_len]

    def compute(self, req: Req, tokens: int) -> None:
        """Compute a chunk."""
        req.schedule(req.cached_len + tokens)
        self.oracle.charge(Phase.PREFILL, [req])
        self.queue.charge(Batch(reqs=[req], phase=Phase.PREFILL))
        req.advance()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.running)))
        req = self.waiting[uid] = self.running.pop(uid)
        self.queue.resume(req)
        self.oracle.resume(req)
        req.retracted = True
        req.restart()

    @precondition(lambda self: len(self.half_done()) < len(self.running))
    @rule(data=st.data(), tokens=st.integers(1, 40))
    def answer(self, data: st.DataObject, tokens: int) -> None:
        reqs = [req for req in self.running.values() if req not in self.half_done()]
        req = data.draw(st.sampled_from(reqs))
        for _ in range(min(tokens, req.max_device_len - req.device_len)):
            req.append(1)
            req.device_len += 1
            self.queue.charge(Batch(reqs=[req], phase=Phase.DECODE))
            self.oracle.charge(Phase.DECODE, [req])

    @invariant()
    def is_like_the_oracle(self) -> None:
        first, rows = self.queue.first(), list(self.running.values())
        assert first is self.oracle.first()
        order, left = self.queue.retraction_order(rows), list(rows)
        for req in order:
            assert req is self.oracle.next_retracted(left)
            left.remove(req)
        assert not left
        displaced = self.queue.displaceable(rows)
        assert set(displaced) == set(self.oracle.displaced(first, rows))
        if displaced:
            assert displaced[0] is self.oracle.next_displaced(first, rows)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted({**self.waiting, **self.running})))
        req = self.waiting.pop(uid, None)
        if req is not None:
            self.queue.remove(req)
        else:
            req = self.running.pop(uid)
        self.queue.release(req)
        self.oracle.release(req)

    def teardown(self) -> None:
        assert len(self.queue) == len(self.waiting) == len(set(self.queue))
        seen = set()
        while len(self.queue):
            first = self.queue.first()
            assert first is not None
            self.queue.remove(first)
            seen.add(first.uid)
        assert seen == set(self.waiting)
        for req in [*self.waiting.values(), *self.running.values()]:
            self.queue.release(req)
        assert not any(len(kept) for kept in vars(self.queue).values() if isinstance(kept, Sized))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_ranks_agree() -> None:
    """Two queues with the same messages give the same order, whatever the objects' addresses."""
    orders = []
    for _ in range(2):
        draw, queue, order = random.Random(3), FairQueue(STEP), list[int]()
        for uid in range(200):
            queue.add(make_req(uid, draw.randrange(1, 300), str(draw.randrange(5))))
            if draw.random() < 0.6:
                order.append(admit(queue).uid)
        orders.append(order + drain(queue))
    assert orders[0] == orders[1]
