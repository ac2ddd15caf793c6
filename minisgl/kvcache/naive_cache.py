"""A prefix cache that stores nothing.

Generated from notebooks/03b_prefix_caches.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.config.rules import check_positive
from minisgl.core import CacheHandle, IntArray
from minisgl.events import Emit
from minisgl.kvcache.prefix_cache import NO_SLOTS, InsertResult, Salt, check_evictable


class EmptyHandle:
    """The handle of a cache that stores nothing."""

    cached_len = 0

    def slots(self) -> IntArray:
        """Return no slots, int32 [0]."""
        return NO_SLOTS


class NaiveCache:
    """A prefix cache that stores nothing: matches are empty, pages stay with their request."""

    evictable_tokens = 0
    protected_tokens = 0

    def __init__(self, page_size: int) -> None:
        check_positive(page_size=page_size)
        self.page_size = page_size
        self.emit: Emit | None = None  # never called

    def match_prefix(self, ids: IntArray, salt: Salt = None) -> CacheHandle:
        """Find nothing."""
        return EmptyHandle()

    def insert_prefix(self, ids: IntArray, slots: IntArray, salt: Salt = None) -> InsertResult:
        """Take nothing: the slots stay with the caller."""
        return InsertResult(EmptyHandle(), 0)

    def pages(self) -> IntArray:
        """Return no pages, int32 [0]."""
        return NO_SLOTS

    def unlocked_tokens(self, handle: CacheHandle) -> int:
        """Return 0: no page is cached."""
        return 0

    def lock(self, handle: CacheHandle) -> None:
        """Do nothing: no page is cached, so none needs protection."""

    def unlock(self, handle: CacheHandle) -> None:
        """Do nothing: no page is locked."""

    def evict(self, num_tokens: int) -> IntArray:
        """Evict nothing: only `evict(0)` succeeds."""
        check_evictable(self, num_tokens)
        return NO_SLOTS

    def reset(self) -> None:
        """Do nothing: no prefix is cached."""
