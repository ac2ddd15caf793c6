"""Interface of a prefix cache: match, insert, lock, unlock, evict.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from minisgl.core import CacheHandle, IntArray
from minisgl.events import Emit


class InsertResult(NamedTuple):
    """Result of an insertion; both lengths are whole pages, `already_cached_len <= cached_len`."""

    handle: CacheHandle  # the part of these tokens that the cache now holds
    already_cached_len: int  # leading tokens that it held before: your copies are duplicates


Salt = str | None  # requests share prefixes only under equal salts


class PrefixCache(Protocol):
    """Maps token prefixes to slots, in whole pages."""

    page_size: int
    emit: Emit | None
    evictable_tokens: int  # cached tokens that no lock protects
    protected_tokens: int  # cached tokens that a lock protects

    def match_prefix(self, ids: IntArray, salt: Salt = None) -> CacheHandle:
        """Find the longest cached prefix of `ids` [n]; change neither contents nor sizes."""

    def insert_prefix(self, ids: IntArray, slots: IntArray, salt: Salt = None) -> InsertResult:
        """Insert the slots [n] of the tokens `ids` [n]; do not change pages cached before."""

    def pages(self) -> IntArray:
        """Return every page that the cache holds, int32, in any order."""

    def unlocked_tokens(self, handle: CacheHandle) -> int:
        """Return the tokens of a prefix that no lock protects: those that `lock` would move."""

    def lock(self, handle: CacheHandle) -> None:
        """Protect a prefix from eviction; locks add up."""

    def unlock(self, handle: CacheHandle) -> None:
        """Remove one lock and mark the prefix as used; RuntimeError if it has none."""

    def evict(self, num_tokens: int) -> IntArray:
        """Evict unlocked pages of `num_tokens` tokens, the oldest first; return their slots."""

    def reset(self) -> None:
        """Forget everything, locks included. All earlier handles become invalid."""


class NotEvictable(RuntimeError):
    """An eviction of more tokens than are cached and unlocked."""


def check_evictable(cache: PrefixCache, num_tokens: int) -> None:
    """Refuse an eviction that cannot be served, before anything is changed."""
    if num_tokens < 0:
        raise ValueError(f"num_tokens: must not be negative, got {num_tokens}")
    if num_tokens > cache.evictable_tokens:
        rest = f"{cache.evictable_tokens} are unlocked ({cache.protected_tokens} are protected)"
        raise NotEvictable(f"num_tokens: {num_tokens} to evict, but only {rest}")


TOKEN_BYTES = 4  # an int32
NO_SLOTS: IntArray = np.empty(0, np.int32)
