"""A prefix cache so simple that it is surely right: a dict from prefixes to pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl.core import IntArray
from minisgl.kvcache.audit import check_cache
from minisgl.kvcache.naive_cache import NaiveCache
from minisgl.kvcache.page_table import slots_of_pages
from minisgl.kvcache.prefix_cache import PrefixCache
from minisgl.kvcache.radix_cache import RadixCache

CACHES: dict[str, type[Any]] = {"radix": RadixCache, "naive": NaiveCache}
Prefix = tuple[int, ...]


class Oracle:
    """Every cached prefix of whole pages, the page that ends it and when it was last used."""

    def __init__(self, page_size: int, remembers: bool = True) -> None:
        self.page_size = page_size
        self.remembers = remembers
        self.page: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: list[tuple[Any, Prefix]] = []
        self.now = 0

    def prefixes(self, ids: IntArray) -> list[Prefix]:
        """All prefixes of whole pages, the shortest first."""
        tokens = tuple(int(token) for token in ids)
        return [tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def longest(self, ids: IntArray) -> Prefix:
        """The longest cached prefix, by asking for each one."""
        found: Prefix = ()
        for prefix in self.prefixes(ids):
            if prefix not in self.page:
                break
            found = prefix
        return found

    def slots(self, prefix: Prefix) -> list[int]:
        """The slots of a cached prefix."""
        pages = [self.page[part] for part in self.prefixes(np.array(prefix, np.int32))]
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    def use(self, prefix: Prefix) -> None:
        """Mark all pages of a prefix as used now."""
        self.now += 1
        for part in self.prefixes(np.array(prefix, np.int32)):
            self.used[part] = self.now

    def insert(self, ids: IntArray, pages: list[int]) -> int:
        """Remember all whole pages; returns how many tokens were known before."""
        if not self.remembers:
            return 0
        known = len(self.longest(ids))
        prefixes = self.prefixes(ids)
        for prefix, page in zip(prefixes, pages):
            self.page.setdefault(prefix, page)
        if prefixes:
            self.use(prefixes[-1])
        return known

    def protected(self) -> set[Prefix]:
        """Every prefix that a lock covers."""
        covered = [self.prefixes(np.array(prefix, np.int32)) for _, prefix in self.locks]
        return {prefix for parts in covered for prefix in parts}

    def evict(self, slots: IntArray) -> None:
        """Check that the victims were whole, unlocked and oldest, then forget them."""
        size = self.page_size
        pages = {int(slot) // size for slot in slots}
        assert sorted(slots.tolist()) == sorted(p * size + i for p in pages for i in range(size))
        victims = {prefix for prefix, page in self.page.items() if page in pages}
        assert len(victims) == len(pages), "a page was given back that is not cached"
        protected = self.protected()
        assert not victims & protected, "a locked page was evicted"
        rest = self.page.keys() - victims
        assert all(p[:-size] in rest for p in rest if len(p) > size), "a prefix lost its beginning"
        if victims and rest - protected:
            newest = max(self.used[victim] for victim in victims)
            assert newest <= min(self.used[prefix] for prefix in rest - protected), "not the oldest"
        for victim in victims:
            del self.page[victim], self.used[victim]

    def check(self, cache: PrefixCache) -> None:
        """All sizes and all slots agree, and the cache agrees with itself."""
        protected = len(self.protected()) * self.page_size
        assert cache.protected_tokens == protected
        assert cache.evictable_tokens == len(self.page) * self.page_size - protected
        expected = [
            p * self.page_size + i for p in self.page.values() for i in range(self.page_size)
        ]
        assert cached_slots(cache) == sorted(expected)
        check_cache(cache, [handle for handle, _ in self.locks])


def cached_slots(cache: PrefixCache) -> list[int]:
    """Every slot that a cache holds, in ascending order."""
    return sorted(slots_of_pages(cache.pages(), cache.page_size).tolist())


def tokens_of(pages: list[int], tail: int, page_size: int) -> IntArray:
    """Token ids of pages drawn from a few kinds, plus `tail` tokens that do not fill a page.

    Kinds 2k and 2k + 1 differ only in the last token of their page.
    """
    ids = [t for kind in pages for t in [kind // 2] * (page_size - 1) + [kind]]
    return np.array(ids + [7] * tail, np.int32)


def page_slots(pages: list[int], page_size: int, tail: int = 0) -> IntArray:
    """Slots of whole pages, then of the first `tail` tokens of one more page (number 10**6)."""
    slots = [page * page_size + i for page in pages for i in range(page_size)]
    return np.array(slots + [10**6 * page_size + i for i in range(tail)], np.int32)
