"""Who may start: admission by two budgets, and prompts that are cut into chunks.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.core import Batch, Phase, Req
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.prefix_cache import CacheHandle
from minisgl.scheduler.decode import DecodeManager, pages_to_come
from minisgl.scheduler.queue import ArrivalOrder, WaitingQueue


class PrefillAdder:
    """Fills one prefill step: counts down tokens of the step and pages of the pool."""

    def __init__(
        self, cache: CacheManager, tables: TableManager, page_size: int, *, budget: int,
        reserved: int, min_shared: int, reserve: int | None = None,
        mixed_prefill_threshold: int | None = None,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.tables = tables
        self.page_size = page_size
        self.budget = budget  # tokens that this step may still compute
        self.taken = 0  # tokens that it computes so far
        self.sizes: list[int] = []  # tokens of its prompts, those of earlier steps included
        self.reserved = reserved  # pages promised to requests admitted so far
        self.reserve = reserve  # tokens of an answer that are promised; None: all
        self.mixed_prefill_threshold = mixed_prefill_threshold  # see `room`; None: no limit
        self.min_shared = -(-min_shared // page_size) * page_size  # whole pages are cached
        self.reqs: list[Req] = []
        self.in_batch_prefixes: set[bytes] = set()  # what this step computes first, of each request

    def pages_left(self) -> int:
        """Pages that are free or evictable, and promised to nobody."""
        return self.cache.available_tokens // self.page_size - self.reserved

    def room(self, tokens: int) -> int:
        """Tokens that this step still has for a prompt with so many left to compute."""
        if self.mixed_prefill_threshold is None or not self.sizes or tokens <= 2 * min(self.sizes):
            return self.budget
        return max(0, min(self.budget, self.mixed_prefill_threshold - self.taken))

    def add_chunk(self, req: Req) -> None:
        """Compute as much of an admitted prompt as there is room for."""
        rest = req.prefill_len - req.cached_len
        length = min(self.room(rest), rest)
        # What a retracted request finds in the cache may be its own work: `matched_len` is older.
        self.sizes.append(rest if req.retracted else req.prefill_len - req.matched_len)
        req.schedule(req.cached_len + length)
        self.budget = self.budget - length if length == rest else 0
        self.taken += length
        self.reqs.append(req)
        if self.min_shared:
            self.in_batch_prefixes.add(self.prefix_key(req, req.matched_len))

    def continue_chunk(self, chunked_req: Req) -> bool:
        """Compute more of a prompt that was cut, if there is room for it."""
        if self.room(chunked_req.prefill_len - chunked_req.cached_len) <= 0:
            return False
        self.add_chunk(chunked_req)
        return True

    def prefix_key(self, req: Req, matched_len: int) -> bytes:
        """The matched prefix of a prompt and the next `min_shared` tokens, as a key."""
        return req.input_ids[: min(matched_len + self.min_shared, req.prompt_len - 1)].tobytes()

    def is_in_batch_prefix(self, req: Req, matched_len: int) -> bool:
        """True if a request of this very step computes a beginning that `req` could soon match."""
        long_enough = req.prompt_len - 1 - matched_len >= self.min_shared > 0
        return long_enough and self.prefix_key(req, matched_len) in self.in_batch_prefixes

    def try_admit(self, req: Req, whole: bool = False) -> bool:
        """Give a waiting request its prefix, its row and a promise of pages, or change nothing.

        whole: only if all of its prompt has room in this step.
        """
        if self.budget <= 0 or self.tables.free_rows == 0:
            return False
        handle = self.cache.match_req(req.input_ids)
        if self.is_in_batch_prefix(req, handle.cached_len):
            return False
        tokens = req.host_len - handle.cached_len
        room = self.room(tokens)
        if room <= 0 or (whole and tokens > room):
            return False
        req.restart()
        req.cached_len = handle.cached_len
        # Locked pages are not evictable any more: lock first, then count what is left.
        self.cache.lock(handle)
        needed = pages_to_come(req, self.page_size, self.reserve)
        if needed > self.pages_left():
            self.cache.unlock(handle)
            req.cached_len = 0
            return False
        self.reserved += needed
        self.allocate_row(req, handle)
        self.add_chunk(req)
        return True

    def allocate_row(self, req: Req, handle: CacheHandle) -> None:
        """A row for an admitted request, with the slots of its prefix and all tokens it has."""
        req.cache_handle = handle
        if not req.retracted:  # what one that comes back finds, it may have computed itself
            req.matched_len = handle.cached_len
        req.table_idx = self.tables.allocate()
        self.tables.write(req.table_idx, 0, handle.slots())
        self.tables.write_tokens(req.table_idx, 0, req.input_ids)


class PrefillManager:
    """Requests that wait, and the one whose prompt is half done."""

    def __init__(
        self, cache: CacheManager, tables: TableManager, decode: DecodeManager, *,
        page_size: int, max_extend_tokens: int, min_shared: int = 32,
        waiting: WaitingQueue | None = None, mixed_prefill_threshold: int | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.tables, self.decode = cache, tables, decode
        self.page_size = page_size
        self.max_extend_tokens = max_extend_tokens  # of one step
        self.min_shared = min_shared  # tokens; 0 if the cache never remembers
        self.mixed_prefill_threshold = mixed_prefill_threshold
        self.waiting: WaitingQueue = ArrivalOrder() if waiting is None else waiting
        self.chunked_req: Req | None = None

    def remove(self, req: Req) -> None:
        """Forget a request, wherever it stands; what it holds is released by the caller."""
        if req is self.chunked_req:
            self.chunked_req = None
        elif req.table_idx < 0:  # not admitted yet
            self.waiting.remove(req)

    def pages_to_finish(self) -> int:
        """Pages that the rest of the half-done prompt takes, and nothing of its answer."""
        return 0 if self.chunked_req is None else pages_to_come(self.chunked_req, self.page_size, 0)

    def adder(self) -> PrefillAdder:
        """A fresh step: a full token budget; what running requests may still need is set aside."""
        reserve = self.decode.reserve
        reserved = self.decode.pages_to_come(self.page_size)
        if self.chunked_req is not None:
            reserved += pages_to_come(self.chunked_req, self.page_size, reserve)
        return PrefillAdder(
            self.cache, self.tables, self.page_size, budget=self.max_extend_tokens,
            reserved=reserved, min_shared=self.min_shared, reserve=reserve,
            mixed_prefill_threshold=self.mixed_prefill_threshold,
        )  # fmt: skip

    def schedule(self) -> Batch | None:
        """The next prefill step: the half-done prompt and those who wait, as the queue says."""
        if not self.waiting and self.chunked_req is None:
            return None
        adder, chunked_req = self.adder(), self.chunked_req
        while adder.budget > 0:
            first = self.waiting.first()
            if chunked_req is not None and (
                first is None or self.waiting.chunk_comes_first(chunked_req)
            ):
                if not adder.continue_chunk(chunked_req):
                    break
                chunked_req = None
            elif first is None or not adder.try_admit(first, whole=chunked_req is not None):
                break
            else:
                self.waiting.remove(first)
        if chunked_req is not None and adder.continue_chunk(chunked_req):
            chunked_req = None
        if not adder.reqs:
            return None
        last = adder.reqs[-1]  # only the last one can have been cut
        self.chunked_req = last if last.is_chunked else chunked_req
        return Batch(reqs=adder.reqs, phase=Phase.PREFILL)
