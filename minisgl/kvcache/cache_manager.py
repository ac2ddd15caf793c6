"""Owners of pages: each page belongs to the free list, the prefix cache, or one request.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl import events
from minisgl.core import CacheHandle, IntArray, Req
from minisgl.kvcache.page_table import OutOfPages, PageAllocator, TableManager, slots_of_pages
from minisgl.kvcache.prefix_cache import PrefixCache


class CacheManager:
    """Record of the owner of each page; `lock`, `unlock` and `emit` are the prefix cache's."""

    def __init__(
        self, num_pages: int, tables: TableManager, prefix_cache: PrefixCache,
        emit: events.Emit | None = None,
    ) -> None:  # fmt: skip
        self.num_pages, self.page_size = num_pages, prefix_cache.page_size
        if tables.page_size != self.page_size:
            raise ValueError(f"page_size: {self.page_size}, but of tables {tables.page_size}")
        self.tables, self.prefix_cache = tables, prefix_cache
        self.allocator = PageAllocator(num_pages, self.page_size)
        self.allocated_len: dict[Req, int] = {}  # positions of a row that have pages, whole pages
        self.emit = prefix_cache.emit = emit
        self.lock, self.unlock = prefix_cache.lock, prefix_cache.unlock

    @property
    def available_tokens(self) -> int:
        """Tokens that could be allocated now, if the whole unlocked cache were evicted."""
        return self.allocator.free_pages * self.page_size + self.prefix_cache.evictable_tokens

    def match_req(self, req: Req) -> CacheHandle:
        """Find a request's longest cached prefix; its last token is always computed."""
        ids = req.input_ids[: 0 if req.scores_prompt else -1]  # scores need all of them: 08a
        return self.prefix_cache.match_prefix(ids, req.sampling_params.cache_salt)

    def admit(self, req: Req, handle: CacheHandle) -> None:
        """Write a request's locked prefix into a new row; set `matched_len` the first time."""
        slots, req.table_idx, req.cache_handle = handle.slots(), self.tables.allocate(), handle
        if not req.retracted:  # a retracted one may match pages that it computed
            req.matched_len = handle.cached_len
        self.tables.write(req.table_idx, 0, slots)
        self.tables.write_tokens(req.table_idx, 0, req.input_ids)
        if self.emit is not None:
            pages = events.pages_of(slots, self.page_size)
            self.emit(events.RequestAdmitted(req.uid, req.table_idx, pages))

    def take_pages(self, num_pages: int) -> IntArray:
        """Take pages, int32 [num_pages]; evict if too few are free, or raise and change nothing."""
        free, rest = self.allocator.free_pages, self.prefix_cache.evictable_tokens // self.page_size
        if num_pages > free + rest:
            raise OutOfPages(f"num_pages: {num_pages} wanted, {free} free and {rest} evictable")
        if num_pages > free:
            self.free_slots(self.prefix_cache.evict((num_pages - free) * self.page_size))
        return self.allocator.allocate(num_pages)

    def free_slots(self, slots: IntArray) -> None:
        """Free whole pages, given by their slots."""
        self.allocator.free(slots[:: self.page_size] // self.page_size)
        if self.emit is not None and len(slots):
            self.emit(events.PagesFreed(events.pages_of(slots, self.page_size)))

    def reset(self) -> None:
        """Free all pages and rows, and empty the prefix cache."""
        self.tables.reset()
        self.prefix_cache.reset()
        self.allocator.reset()
        self.allocated_len.clear()

    def allocate_paged(self, reqs: Sequence[Req]) -> None:
        """Allocate each request's pages up to `device_len` and fill its row; all or none."""
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
        pages = self.take_pages(sum(end - start for _, start, end in plan) // self.page_size)
        slots = slots_of_pages(pages, self.page_size)
        for req, start, end in plan:
            fresh, slots = np.split(slots, [end - start])
            self.tables.write(req.table_idx, start, fresh)
            self.allocated_len[req] = end
            if self.emit is not None:
                self.emit(events.PagesTaken(req.uid, events.pages_of(fresh, self.page_size)))

    def cache_req(self, req: Req, finished: bool) -> None:
        """Insert a request's computed pages into the prefix cache; if finished, free its others."""
        old = req.cache_handle
        if old is None:
            raise RuntimeError(f"req {req.uid}: holds no cache handle; was it released before?")
        row = self.tables.page_table[req.table_idx]
        again = req.matcher is not None and not finished  # the last token may come again
        known = min(req.cached_len, req.host_len - again) // self.page_size * self.page_size
        salt = req.sampling_params.cache_salt
        new, already = self.prefix_cache.insert_prefix(req.input_ids[:known], row[:known], salt)
        duplicates = row[old.cached_len : already].copy()  # cached before this request inserts
        if finished:
            kept = max(old.cached_len, new.cached_len)
            self.free_slots(row[kept : self.allocated_len.pop(req, kept)])
            self.prefix_cache.unlock(old)
            req.cache_handle = None
        else:
            self.prefix_cache.lock(new)
            self.prefix_cache.unlock(old)
            if len(duplicates):  # the row must not name pages freed below
                self.tables.write(
                    req.table_idx, old.cached_len, new.slots()[old.cached_len : already]
                )
            req.cache_handle = new
            if self.emit is not None:
                self.emit(events.PagesCached(req.uid, events.pages_of(new.slots(), self.page_size)))
        self.free_slots(duplicates)
