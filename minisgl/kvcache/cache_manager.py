"""Who owns each page: the free list, the prefix cache, or one request.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import IntArray, Req
from minisgl.kvcache.hash_cache import HashCache
from minisgl.kvcache.page_table import OutOfPages, PageAllocator, TableManager
from minisgl.kvcache.prefix_cache import (
    CacheHandle,
    NaiveCache,
    PrefixCache,
    require,
    slots_of_pages,
)
from minisgl.kvcache.radix_cache import RadixCache


def create_prefix_cache(cache_type: str, page_size: int) -> PrefixCache:
    """The prefix cache called "radix", "hash" or "naive"."""
    makers = {"radix": RadixCache, "hash": HashCache, "naive": NaiveCache}
    if cache_type not in makers:
        raise ValueError(f"cache_type: must be one of {', '.join(makers)}, got {cache_type!r}")
    return makers[cache_type](page_size)


class CacheManager:
    """Knows the owner of every page: the free list, the prefix cache, or one request."""

    def __init__(
        self, num_pages: int, page_size: int, tables: TableManager, cache_type: str = "radix"
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.tables = tables
        self.allocator = PageAllocator(num_pages, page_size)
        self.prefix_cache = create_prefix_cache(cache_type, page_size)
        self.allocated_len: dict[Req, int] = {}  # positions of a row that have pages, whole pages

    @property
    def available_tokens(self) -> int:
        """Tokens that could be allocated now, if the whole unlocked cache were evicted."""
        return self.allocator.free_pages * self.page_size + self.prefix_cache.evictable_tokens

    def match_req(self, input_ids: IntArray) -> CacheHandle:
        """Longest cached prefix of a prompt [n], its last token excepted: one must be computed."""
        return self.prefix_cache.match_prefix(input_ids[:-1])

    def lock(self, handle: CacheHandle) -> None:
        """Protect a matched prefix until `unlock`, or until its request finishes."""
        self.prefix_cache.lock(handle)

    def unlock(self, handle: CacheHandle) -> None:
        """Give a lock back, for a request that was matched and then not admitted."""
        self.prefix_cache.unlock(handle)

    def take_pages(self, num_pages: int) -> IntArray:
        """Free pages, int32 [num_pages]; evicts what is missing, or raises and changes nothing."""
        if num_pages * self.page_size > self.available_tokens:
            raise OutOfPages(
                f"num_pages: {num_pages} wanted, {self.allocator.free_pages} free and "
                f"{self.prefix_cache.evictable_tokens // self.page_size} evictable"
            )
        missing = num_pages - self.allocator.free_pages
        if missing > 0:
            self.free_slots(self.prefix_cache.evict(missing * self.page_size))
        return self.allocator.allocate(num_pages)

    def free_slots(self, slots: IntArray) -> None:
        """Give whole pages back, named by their slots."""
        if len(slots):
            self.allocator.free(slots[:: self.page_size] // self.page_size)

    def allocate_paged(self, reqs: Sequence[Req]) -> None:
        """Give each request pages up to `device_len`, written into its row; all or none."""
        plan: list[tuple[Req, int, int]] = []  # request, first and last position, whole pages
        for req in reqs:
            if req.cache_handle is None:
                raise ValueError(f"req {req.uid}: has no cache handle; match and lock it first")
            start = self.allocated_len.get(req, req.cache_handle.cached_len)
            end = -(-req.device_len // self.page_size) * self.page_size
            if req.table_idx < 0 or end > self.tables.width:
                raise ValueError(f"req {req.uid}: row {req.table_idx} has no position {end - 1}")
            if end > start:
                plan.append((req, start, end))
        if not plan:
            return
        pages = self.take_pages(sum(end - start for _, start, end in plan) // self.page_size)
        slots = slots_of_pages(pages, self.page_size)
        used = 0
        for req, start, end in plan:
            self.tables.write(req.table_idx, start, slots[used : used + end - start])
            self.allocated_len[req] = end
            used += end - start

    def cache_req(self, req: Req, finished: bool) -> None:
        """Hand a request's computed pages to the prefix cache; if finished, free all its others."""
        old = req.cache_handle
        if old is None:
            raise RuntimeError(f"req {req.uid}: holds no cache handle; was it released before?")
        row = self.tables.page_table[req.table_idx]
        known = min(req.cached_len, len(req.input_ids)) // self.page_size * self.page_size
        new, already = self.prefix_cache.insert_prefix(req.input_ids[:known], row[:known])
        duplicates = row[old.cached_len : already].copy()  # the cache had these pages before us
        if finished:
            self.release(req, max(old.cached_len, new.cached_len))
        else:
            self.prefix_cache.lock(new)
            self.prefix_cache.unlock(old)
            if len(duplicates):  # the row must not name what is freed below
                self.tables.write(
                    req.table_idx, old.cached_len, new.slots()[old.cached_len : already]
                )
            req.cache_handle = new
        self.free_slots(duplicates)

    def release(self, req: Req, kept_len: int) -> None:
        """Unlock a request's prefix and free its pages from position `kept_len` on."""
        handle, req.cache_handle = req.cache_handle, None
        end = self.allocated_len.pop(req, kept_len)
        self.free_slots(self.tables.page_table[req.table_idx, kept_len:end])
        self.prefix_cache.unlock(handle)

    def check_integrity(self, live: Sequence[Req] = ()) -> None:
        """Recount pages, rows and locks, given all that hold any; raises IntegrityError."""
        holders = [req for req in live if req.cache_handle is not None]
        rows = [req.table_idx for req in holders if req.table_idx >= 0]
        require(len(set(rows)) == len(rows), f"rows {rows}: two requests share one")
        self.prefix_cache.check_integrity([req.cache_handle for req in holders])
        owners = PageOwners(self.num_pages)
        owners.claim(self.allocator.free_set(), "the free list")
        cached = self.prefix_cache.cached_slots()
        owners.claim(cached[:: self.page_size] // self.page_size, "the prefix cache")
        for req in self.allocated_len:
            require(req in holders, f"req {req.uid}: has pages but is not live")
        for req in holders:
            self.check_row(req, owners)
        lost = np.flatnonzero(owners.owner < 0).tolist()
        require(not lost, f"pages {lost}: lost, neither free nor cached nor any request's")

    def check_row(self, req: Req, owners: PageOwners) -> None:
        """A row names the cache's slots as far as its handle reaches, then pages of its own."""
        handle = req.cache_handle
        row, kept = self.tables.page_table[req.table_idx], handle.cached_len
        end = self.allocated_len.get(req, kept)
        if req.table_idx < 0:  # matched and locked, but not yet admitted
            require(end == kept, f"req {req.uid}: has pages but no row")
            return
        ours = np.array_equal(row[:kept], handle.slots())
        require(ours, f"req {req.uid}: its row differs from the slots of its cached prefix")
        pages = row[kept : end : self.page_size] // self.page_size
        whole = np.array_equal(row[kept:end], slots_of_pages(pages, self.page_size))
        require(whole, f"req {req.uid}: its row does not name whole pages")
        owners.claim(pages, f"req {req.uid}")


class PageOwners:
    """A ledger for checks: each page is claimed once."""

    def __init__(self, num_pages: int) -> None:
        self.names: list[str] = []
        self.owner = np.full(num_pages, -1)

    def claim(self, pages: IntArray, name: str) -> None:
        """Enter the owner of pages [k]; IntegrityError if one is unknown or has an owner."""
        bad = pages[(pages < 0) | (pages >= len(self.owner))]
        require(not len(bad), f"{name}: names pages {bad.tolist()}, which do not exist")
        require(len(np.unique(pages)) == len(pages), f"{name}: names a page twice")
        for page in pages[self.owner[pages] >= 0]:
            require(False, f"page {page}: owned by {self.names[self.owner[page]]} and by {name}")
        self.owner[pages] = len(self.names)
        self.names.append(name)
