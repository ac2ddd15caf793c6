"""Who may start: admission by two budgets, in order of arrival, and prompts cut into chunks.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from collections import deque

from minisgl.core import Batch, Phase, Req
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import TableManager
from minisgl.scheduler.decode import DecodeManager, pages_to_come


class PrefillAdder:
    """Fills one prefill step: counts down tokens of the step and pages of the pool."""

    def __init__(
        self, cache: CacheManager, tables: TableManager, page_size: int, *,
        budget: int, reserved: int, min_shared: int,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.tables = tables
        self.page_size = page_size
        self.budget = budget  # tokens that this step may still compute
        self.reserved = reserved  # pages promised to requests admitted so far
        self.min_shared = -(-min_shared // page_size) * page_size  # whole pages are cached
        self.reqs: list[Req] = []
        self.beginnings: set[bytes] = set()  # what this step computes first, of each request

    def pages_left(self) -> int:
        """Pages that are free or evictable, and promised to nobody."""
        return self.cache.available_tokens // self.page_size - self.reserved

    def add_chunk(self, req: Req) -> None:
        """Compute as much of an admitted prompt as the step's budget allows."""
        length = min(self.budget, req.prompt_len - req.cached_len)
        req.schedule(req.cached_len + length)
        self.budget -= length
        self.reqs.append(req)
        if self.min_shared:
            self.beginnings.add(self.beginning(req, req.matched_len))

    def beginning(self, req: Req, matched_len: int) -> bytes:
        """The matched prefix of a prompt and the next `min_shared` tokens, as a key."""
        return req.input_ids[: min(matched_len + self.min_shared, req.prompt_len - 1)].tobytes()

    def is_being_computed(self, req: Req, matched_len: int) -> bool:
        """True if a request of this very step computes a beginning that `req` could soon match."""
        long_enough = req.prompt_len - 1 - matched_len >= self.min_shared > 0
        return long_enough and self.beginning(req, matched_len) in self.beginnings

    def try_admit(self, req: Req) -> bool:
        """Give a waiting request its prefix, its row and a promise of pages, or change nothing."""
        if self.budget <= 0 or self.tables.free_rows == 0:
            return False
        handle = self.cache.match_req(req.input_ids)
        if self.is_being_computed(req, handle.cached_len):
            return False
        req.cached_len = handle.cached_len
        # Locked pages are not evictable any more: lock first, then count what is left.
        self.cache.lock(handle)
        needed = pages_to_come(req, self.page_size)
        if needed > self.pages_left():
            self.cache.unlock(handle)
            req.cached_len = 0
            return False
        req.cache_handle, req.matched_len = handle, handle.cached_len
        req.table_idx = self.tables.allocate()
        self.tables.write(req.table_idx, 0, handle.slots())
        self.tables.write_tokens(req.table_idx, 0, req.input_ids)
        self.reserved += needed
        self.add_chunk(req)
        return True


class PrefillManager:
    """Requests that wait, in order of arrival, and the one whose prompt is half done."""

    def __init__(
        self, cache: CacheManager, tables: TableManager, decode: DecodeManager, *,
        page_size: int, max_extend_tokens: int, min_shared: int = 32,
    ) -> None:  # fmt: skip
        self.cache, self.tables, self.decode = cache, tables, decode
        self.page_size = page_size
        self.max_extend_tokens = max_extend_tokens  # of one step
        self.min_shared = min_shared  # tokens; 0 if the cache never remembers
        self.waiting: deque[Req] = deque()
        self.chunked: Req | None = None

    def add(self, req: Req) -> None:
        self.waiting.append(req)

    def remove(self, req: Req) -> None:
        """Forget a request, wherever it stands; what it holds is released by the caller."""
        if req is self.chunked:
            self.chunked = None
        elif req.table_idx < 0:  # not admitted yet
            self.waiting.remove(req)

    def adder(self) -> PrefillAdder:
        """A fresh step: a full token budget; what running requests may still need is set aside."""
        reserved = self.decode.pages_to_come(self.page_size)
        if self.chunked is not None:
            reserved += pages_to_come(self.chunked, self.page_size)
        return PrefillAdder(
            self.cache, self.tables, self.page_size,
            budget=self.max_extend_tokens, reserved=reserved, min_shared=self.min_shared,
        )  # fmt: skip

    def schedule(self) -> Batch | None:
        """The next prefill step: the half-done prompt first, then whoever waited longest."""
        if not self.waiting and self.chunked is None:
            return None
        adder = self.adder()
        if self.chunked is not None:
            adder.add_chunk(self.chunked)
        while self.waiting and adder.try_admit(self.waiting[0]):
            self.waiting.popleft()
        if not adder.reqs:
            return None
        last = adder.reqs[-1]  # only the last one can have met the end of the budget
        self.chunked = last if last.is_chunked else None
        return Batch(reqs=adder.reqs, phase=Phase.PREFILL)
