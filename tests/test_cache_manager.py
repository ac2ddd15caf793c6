"""Page ownership: lives of requests in pools that are too small, read back through rows."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.kvcache.audit import CACHED, FREE, IntegrityError, check_integrity, owners
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import OutOfPages, TableManager
from minisgl.kvcache.radix_cache import RadixCache
from tests.prefix_oracle import CACHES
from tests.turns import in_turns

PAGE_SIZES = [1, 4, 16]
KINDS = ["radix", "naive"]


class World:
    """A manager, its tables, and a pool in which a slot's "K/V" is a fingerprint of its prefix.

    Reading a request's fingerprints through its row is the oracle: any page that was lost, shared
    by mistake, freed too early or never computed shows as a wrong fingerprint.
    """

    def __init__(
        self, num_pages: int, page_size: int, kind: str = "radix", max_len: int = 128
    ) -> None:
        self.tables = TableManager(8, max_len, page_size, num_pages, "cpu")
        self.cache = CacheManager(num_pages, self.tables, CACHES[kind](page_size))
        self.kv = np.zeros((num_pages + 1) * page_size, np.int64)
        self.truth: dict[Req, list[int]] = {}  # the device's tokens, ahead of the host
        self.uid = 0

    @property
    def live(self) -> list[Req]:
        return list(self.truth)

    def admit(self, prompt: Any, new_tokens: int = 8) -> Req | None:
        """Match, lock, then ask for room: what a prefill adder does. None if there is none."""
        params = SamplingParams()
        ids = np.asarray(prompt, np.int32)
        req = Req(uid=self.uid, input_ids=ids, sampling_params=params, max_new_tokens=new_tokens)
        handle = self.cache.match_req(req)
        assert handle.cached_len < req.prompt_len, "nothing left to compute"
        self.cache.lock(handle)
        if self.cache.available_tokens < req.prompt_len - handle.cached_len:
            self.cache.unlock(handle)
            return None
        self.uid += 1
        req.cached_len = handle.cached_len
        self.cache.admit(req, handle)
        self.truth[req] = ids.tolist()
        return req

    def row(self, req: Req) -> IntArray:
        row: IntArray = self.tables.page_table[req.table_idx]
        return row

    def launch(self, req: Req) -> None:
        """Compute [cached_len, device_len); a complete prompt gives one more token."""
        self.cache.allocate_paged([req])
        known = self.truth[req]
        for place in range(req.cached_len, req.device_len):
            self.kv[self.row(req)[place]] = hash(tuple(known[: place + 1]))
        sampled = not req.is_chunked
        req.advance()
        if sampled:
            known.append(hash(tuple(known)) % 3)

    def see(self, req: Req, behind: int = 0) -> None:
        """Give the host the tokens of all steps but the last `behind`."""
        while len(req.input_ids) < len(self.truth[req]) - behind:
            req.append(self.truth[req][len(req.input_ids)])

    def prefilled(self, prompt: Any, new_tokens: int = 8) -> Req:
        """A request that was admitted, which must succeed, and whose prompt is computed."""
        req = self.admit(prompt, new_tokens)
        assert req is not None
        self.prefill(req)
        return req

    def prefill(self, req: Req) -> None:
        req.schedule(req.prompt_len)
        self.launch(req)
        self.cache.cache_req(req, finished=False)
        self.see(req)

    def finish(self, req: Req) -> None:
        del self.truth[req]
        self.cache.cache_req(req, finished=True)
        self.tables.free(req.table_idx)

    def check(self) -> None:
        for req in self.live:
            known = self.truth[req]
            found = self.kv[self.row(req)[: req.cached_len]]
            expected = [hash(tuple(known[: place + 1])) for place in range(req.cached_len)]
            assert found.tolist() == expected, f"req {req.uid} reads K/V of others"
        check_integrity(self.cache, self.live)


# ------------------------------------------------------------------ random lives


class Lives(RuleBasedStateMachine):
    """Requests arrive, compute in chunks, decode ahead of the host, finish or are aborted."""

    kind = "radix"
    page_size = 4

    @initialize(num_pages=st.integers(6, 14))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages * max(1, 4 // self.page_size)
        self.world = World(self.num_pages, self.page_size, self.kind)

    def pick(self, number: int) -> Req:
        return self.world.live[number % len(self.world.live)]

    @precondition(lambda self: len(self.world.truth) < 4)
    @rule(pages=st.lists(st.integers(0, 1), max_size=4), tail=st.integers(0, 3), twin=st.booleans())
    def arrive(self, pages: list[int], tail: int, twin: bool) -> None:
        """Prompts that share pages; a twin is admitted before the first has computed anything."""
        prompt = [kind for kind in pages for _ in range(self.page_size)] + [1] * tail or [0]
        for _ in range(1 + twin):
            self.world.admit(prompt)

    def launch(self, req: Req) -> bool:
        """Run one pass; a request without pages is aborted, and no other is affected."""
        before = self.world.cache.available_tokens
        try:
            self.world.launch(req)
        except OutOfPages:
            assert self.world.cache.available_tokens == before
            self.world.finish(req)
            return False
        return True

    @precondition(lambda self: self.world.truth)
    @rule(number=st.integers(0, 3), share=st.floats(0.1, 1))
    def prefill(self, number: int, share: float) -> None:
        req = self.pick(number)
        if req.cached_len >= req.prompt_len:
            return
        left = req.prompt_len - req.cached_len
        req.schedule(req.cached_len + max(1, round(share * left)))
        if self.launch(req):
            self.world.cache.cache_req(req, finished=False)

    @precondition(lambda self: self.world.truth)
    @rule(number=st.integers(0, 3), behind=st.integers(0, 1))
    def decode(self, number: int, behind: int) -> None:
        req = self.pick(number)
        if req.cached_len >= req.prompt_len and req.can_decode:
            self.world.see(req, behind=1)
            if self.launch(req):
                self.world.see(req, behind)

    @precondition(lambda self: self.world.truth)
    @rule(number=st.integers(0, 3), scheduled=st.booleans())
    def finish(self, number: int, scheduled: bool) -> None:
        """Also in mid-prefill, also with pages for a pass that is never launched."""
        req = self.pick(number)
        if scheduled and req.cached_len < req.prompt_len:
            req.schedule(req.prompt_len)
            with contextlib.suppress(OutOfPages):
                self.world.cache.allocate_paged([req])
        self.world.finish(req)

    @invariant()
    def agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for req in self.world.live:
            self.world.finish(req)
        check_integrity(self.world.cache)
        assert self.world.cache.available_tokens == self.num_pages * self.page_size
        assert self.world.tables.free_rows == 8


@pytest.mark.parametrize("page_size", in_turns(2, PAGE_SIZES))
@pytest.mark.parametrize("kind", KINDS)
def test_no_page_is_lost_or_shared_in_any_sequence_of_lives(kind: str, page_size: int) -> None:
    machine = type("Machine", (Lives,), {"kind": kind, "page_size": page_size})
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    test_case = machine.TestCase  # type: ignore[attr-defined]
    test_case.settings = settings(
        max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=health
    )
    test_case("runTest").runTest()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_random_run_in_a_tight_pool(kind: str, page_size: int) -> None:
    """The same rules from a fixed seed: what the mutations are held against."""
    rng = np.random.default_rng(page_size)
    lives = Lives()
    lives.kind, lives.page_size = kind, page_size
    lives.start(num_pages=10)
    for _ in range(200):
        number = int(rng.integers(0, 4))
        action = rng.integers(0, 10)
        if action < 3 and len(lives.world.truth) < 4:
            lives.arrive(rng.integers(0, 2, rng.integers(0, 5)).tolist(), number, bool(action))
        elif action < 6 and lives.world.truth:
            lives.prefill(number, float(rng.random()))
        elif action < 9 and lives.world.truth:
            lives.decode(number, int(rng.integers(0, 2)))
        elif lives.world.truth:
            lives.finish(number, bool(rng.integers(0, 2)))
        lives.agree()
    lives.teardown()


# ------------------------------------------------------------------ named cases


def test_tables_and_cache_have_one_page_size() -> None:
    with pytest.raises(ValueError, match=r"^page_size(?=.*8)(?=.*4)"):
        CacheManager(8, TableManager(2, 32, 4, 8, "cpu"), RadixCache(8))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_full_hit_leaves_one_token(page_size: int) -> None:
    """Pitfall 7: logits come from computing the last token, so it must not be matched."""
    world = World(40, page_size)
    prompt = list(range(2 * page_size))
    first = world.prefilled(prompt)
    world.finish(first)
    again = world.admit(prompt)
    assert again is not None
    assert again.matched_len == page_size * ((2 * page_size - 1) // page_size)
    world.prefill(again)
    world.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_pitfall_01_the_row_follows_when_its_duplicates_are_freed(
    kind: str, page_size: int
) -> None:
    world = World(12, page_size, kind)
    prompt = [5] * (3 * page_size) + [6]
    twins = [world.admit(prompt), world.admit(prompt)]  # both see an empty cache
    for req in twins:
        assert req is not None
        world.prefill(req)
    first, second = twins
    assert first is not None and second is not None
    shared = 3 * page_size if kind != "naive" else 0
    same = world.row(first)[:shared].tolist() == world.row(second)[:shared].tolist()
    assert same, "the row of the second still names its freed duplicates"
    third = world.admit([8] * (4 * page_size))  # takes whatever pages were freed
    assert third is not None
    world.prefill(third)
    world.check()
    pages = {int(slot) // page_size for slot in world.row(second)[: second.cached_len]}
    assert not pages & set(world.cache.allocator.free_set().tolist()), (
        "a live row names a free slot"
    )


def manager_with_two_requests() -> tuple[World, Req, Req]:
    world = World(20, 4)
    first = world.prefilled(range(10))
    second = world.prefilled([*range(8), 50, 51, 52])
    world.check()
    return world, first, second


def row_names_a_free_slot(world: World, req: Req) -> None:
    world.row(req)[8] = int(world.cache.allocator.free_set()[0]) * 4


def row_names_a_page_of_another(world: World, req: Req) -> None:
    other = next(one for one in world.live if one is not req)
    world.row(req)[8:12] = world.row(other)[8:12]


def row_names_no_page(world: World, req: Req) -> None:
    world.row(req)[8:12] = np.arange(4) + 4 * 99


def row_left_the_tree(world: World, req: Req) -> None:
    world.row(req)[0:4] = world.row(req)[4:8]


def row_cuts_a_page(world: World, req: Req) -> None:
    world.row(req)[9] = world.row(req)[8]


def page_is_lost(world: World, req: Req) -> None:
    world.cache.allocator.allocate(1)


def page_is_free_and_used(world: World, req: Req) -> None:
    world.cache.allocator.free(world.row(req)[8:9] // 4)


def page_is_free_and_cached(world: World, req: Req) -> None:
    world.cache.allocator.free(world.row(req)[0:1] // 4)


def lock_was_dropped(world: World, req: Req) -> None:
    world.cache.unlock(req.cache_handle)


def lock_was_forgotten(world: World, req: Req) -> None:
    world.cache.lock(req.cache_handle)


def request_is_dead(world: World, req: Req) -> None:
    del world.truth[req]


def row_is_shared(world: World, req: Req) -> None:
    req.table_idx = world.live[0].table_idx


def row_is_gone(world: World, req: Req) -> None:
    req.table_idx = -1


FAULTS = [
    (row_names_a_free_slot, "whole pages"),
    (row_names_a_page_of_another, "owned by req 0 and by req 1"),
    (row_names_no_page, "do not exist"),
    (row_left_the_tree, "differs from the slots of its cached prefix"),
    (row_cuts_a_page, "whole pages"),
    (page_is_lost, "lost"),
    (page_is_free_and_used, "owned by the free list and by req 1"),
    (page_is_free_and_cached, "owned by the free list and by the prefix cache"),
    (lock_was_dropped, "locks"),
    (lock_was_forgotten, "locks"),
    (request_is_dead, "not live"),
    (row_is_shared, "two requests share one"),
    (row_is_gone, "no row"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_pitfall_02_check_integrity_checks(fault: Any, words: str) -> None:
    world, _, second = manager_with_two_requests()
    fault(world, second)
    with pytest.raises(IntegrityError, match=words):
        check_integrity(world.cache, world.live)


def test_pitfall_02_a_page_that_is_cached_twice() -> None:
    world = World(20, 4)
    req = world.prefilled(range(10))
    world.finish(req)
    node = world.cache.prefix_cache.nodes()[1]  # type: ignore[arg-type]
    node.slots = np.tile(node.slots[:4], 2)
    with pytest.raises(IntegrityError, match="prefix cache and by the prefix cache"):
        check_integrity(world.cache)


def test_owners_are_the_picture_of_the_pool() -> None:
    world = World(8, 4)
    first = world.prefilled(range(10))
    world.finish(first)
    world.prefilled([*range(8), 50, 51])
    found = owners(world.cache, world.live).tolist()
    assert sorted(found) == [CACHED] * 2 + [FREE] * 5 + [1]
    assert [page for page, owner in enumerate(found) if owner == CACHED] == sorted(
        world.cache.prefix_cache.pages().tolist()
    )


def test_pitfall_02_pages_of_a_request_that_nobody_names() -> None:
    world = World(20, 4, "naive")
    world.prefilled(range(10))
    with pytest.raises(IntegrityError, match="req 0: has pages but is not live"):
        check_integrity(world.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_released_once(kind: str) -> None:
    world = World(8, 4, kind)
    req = world.prefilled(range(10))
    world.finish(req)
    with pytest.raises(RuntimeError, match=r"^req 0"):
        world.cache.cache_req(req, finished=True)
    check_integrity(world.cache)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pitfall_06_a_lock_between_match_and_finish(page_size: int) -> None:
    """The prefix of a running request stays when others press for pages."""
    world = World(8, page_size, max_len=8 * page_size)
    first = world.prefilled([1] * (4 * page_size))
    world.finish(first)
    second = world.admit([1] * (4 * page_size) + [2])  # holds four cached pages
    assert second is not None and second.matched_len == 4 * page_size
    assert world.cache.available_tokens == 4 * page_size  # after the lock: the four free ones
    assert world.admit([3] * (5 * page_size)) is None
    world.prefill(second)
    world.prefilled([3] * (3 * page_size))
    world.check()


def test_allocation_gives_all_or_nothing() -> None:
    world = World(6, 4)
    first, second = world.admit(range(9)), world.admit(range(50, 70))
    assert first is not None and second is not None
    before = world.tables.page_table.copy()
    with pytest.raises(OutOfPages, match="8"):
        world.cache.allocate_paged([first, second])
    assert world.cache.available_tokens == 24 and (world.tables.page_table == before).all()
    world.cache.allocate_paged([first])
    world.cache.allocate_paged([first])  # again: nothing is missing, nothing is taken
    assert world.cache.available_tokens == 12
    world.check()


def test_allocation_names_a_request_that_is_not_ready() -> None:
    world = World(6, 4, max_len=16)
    req = Req(uid=7, input_ids=np.arange(20), sampling_params=SamplingParams(), max_new_tokens=1)
    with pytest.raises(ValueError, match=r"^req 7"):
        world.cache.allocate_paged([req])
    req.cache_handle = world.cache.match_req(req)
    with pytest.raises(ValueError, match=r"^req 7.*-1"):
        world.cache.allocate_paged([req])
    req.table_idx = 0
    with pytest.raises(ValueError, match=r"^req 7.*(19|20)"):
        world.cache.allocate_paged([req])
    assert world.cache.available_tokens == 24


def test_admission_fills_a_row_and_counts_the_first_match() -> None:
    world = World(10, 4)
    world.finish(world.prefilled(range(9)))
    req = world.admit(range(9))
    assert req is not None and req.matched_len == req.cache_handle.cached_len == 8
    row = req.table_idx
    assert world.tables.page_table[row, :8].tolist() == req.cache_handle.slots().tolist()
    assert world.tables.token_pool[row, :9].tolist() == list(range(9))
    world.finish(req)
    req.retracted = True  # it comes back, and finds nothing: its first match is what counts
    req.cached_len = 0
    world.cache.reset()
    world.cache.admit(req, world.cache.match_req(req))
    assert (req.matched_len, req.cache_handle.cached_len) == (8, 0)


def test_an_evicted_handle_takes_no_row() -> None:
    world = World(10, 4)
    world.finish(world.prefilled(range(9)))
    req = Req(uid=7, input_ids=np.arange(9), sampling_params=SamplingParams(), max_new_tokens=1)
    handle, free = world.cache.match_req(req), world.tables.free_rows
    world.cache.free_slots(world.cache.prefix_cache.evict(8))
    with pytest.raises(RuntimeError):
        world.cache.admit(req, handle)
    assert (world.tables.free_rows, req.table_idx, req.cache_handle) == (free, -1, None)


def test_a_prompt_that_is_scored_is_computed_in_full() -> None:
    world = World(10, 4)
    world.finish(world.prefilled(range(9)))
    for params, found in ((SamplingParams(), 8), (SamplingParams(prompt_logprobs=0), 0)):
        req = Req(uid=7, input_ids=np.arange(9), sampling_params=params, max_new_tokens=1)
        assert world.cache.match_req(req).cached_len == found


def test_only_computed_tokens_are_cached() -> None:
    """The last sampled token has no K/V; under overlap the host may have even fewer."""
    world = World(10, 4)
    req = world.prefilled(range(7))  # K/V of 7 tokens, 8 tokens known
    world.cache.cache_req(req, finished=False)
    assert req.cache_handle.cached_len == 4
    for _ in range(2):  # two passes that the host has not seen: K/V of 9 tokens, 8 known
        world.launch(req)
    assert (req.cached_len, len(req.input_ids)) == (9, 8)
    known = req.input_ids.copy()
    world.finish(req)
    assert world.cache.prefix_cache.match_prefix(np.append(known, [99, 99])).cached_len == 8
    world.check()
    assert world.cache.allocator.free_pages == 8


def test_an_abort_before_anything_was_allocated() -> None:
    world = World(10, 4)
    first = world.prefilled(range(12))
    world.finish(first)
    second = world.admit(range(12))
    assert second is not None and second.matched_len == 8
    world.finish(second)
    third = world.admit(range(12))
    assert third is not None
    third.cached_len = 0  # a scheduler that had only matched and locked
    world.finish(third)
    check_integrity(world.cache)
    assert world.cache.available_tokens == 40


def test_rows_are_written_through_the_tables() -> None:
    """Changes by allocation and by the row rewrite reach the device at the next flush."""
    tables = TableManager(2, 32, 4, 8, "cpu", share_memory=False)
    manager = CacheManager(8, tables, RadixCache(4))
    twins = []
    for uid in range(2):
        req = Req(uid=uid, input_ids=[1] * 9, sampling_params=SamplingParams(), max_new_tokens=4)
        req.cache_handle, req.table_idx = manager.match_req(req), tables.allocate()
        manager.lock(req.cache_handle)
        twins.append(req)
    manager.allocate_paged(twins)
    for req in twins:
        req.advance()
        manager.cache_req(req, finished=False)
    tables.flush()
    assert tables.device_page_table.numpy().tolist() == tables.page_table.tolist()
    assert (tables.page_table[0, :8] == tables.page_table[1, :8]).all()
