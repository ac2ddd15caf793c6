"""What every prefix cache promises, and the one that never remembers.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from minisgl.config.rules import integer
from minisgl.core import IntArray


class CacheHandle(Protocol):
    """A cached prefix that a match or an insertion found; lock it before anything may evict."""

    @property
    def cached_len(self) -> int:
        """Tokens of the prefix, a multiple of the page size."""

    def slots(self) -> IntArray:
        """Slots that hold the prefix, int32 [cached_len]."""


class InsertResult(NamedTuple):
    """What an insertion did; both lengths are whole pages, `already_cached_len <= cached_len`."""

    handle: CacheHandle  # everything of these tokens that the cache now holds
    already_cached_len: int  # leading tokens that it held before: your copies are duplicates


class PrefixCache(Protocol):
    """Maps token prefixes to slots, in whole pages."""

    page_size: int

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that no lock protects."""

    @property
    def protected_tokens(self) -> int:
        """Cached tokens that a lock protects."""

    def match_prefix(self, ids: IntArray) -> CacheHandle:
        """Longest cached prefix of `ids` [n]; changes neither what is cached nor any size."""

    def lock(self, handle: CacheHandle) -> None:
        """Protect a prefix from eviction; locks add up."""

    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock back; the prefix counts as used now. RuntimeError if it holds none."""

    def insert_prefix(self, ids: IntArray, slots: IntArray) -> InsertResult:
        """Hand over the slots [n] of the tokens `ids` [n]; what is cached already is left alone."""

    def evict(self, num_tokens: int) -> IntArray:
        """Forget `num_tokens` unlocked tokens or more, oldest first; returns their slots."""

    def reset(self) -> None:
        """Forget everything; RuntimeError while a lock is held."""

    def cached_slots(self) -> IntArray:
        """Every slot the cache holds, int32, in no promised order; walks all of it."""

    def check_integrity(self, locked: Sequence[CacheHandle] | None = None) -> None:
        """Recount everything; given all locked handles, every lock too. Raises IntegrityError."""


class NotEvictable(RuntimeError):
    """More tokens were asked back from a prefix cache than are cached and unlocked."""


class IntegrityError(RuntimeError):
    """A recount of pages, locks or sizes found a contradiction; the message names it."""


def require(fact: bool, message: str) -> None:
    """Raise IntegrityError unless the fact holds; unlike `assert` it survives `python -O`."""
    if not fact:
        raise IntegrityError(message)


def check_evictable(cache: PrefixCache, num_tokens: int) -> None:
    """Refuse an eviction that cannot be served, before anything is changed."""
    if num_tokens < 0:
        raise ValueError(f"num_tokens: must not be negative, got {num_tokens}")
    if num_tokens > cache.evictable_tokens:
        raise NotEvictable(
            f"num_tokens: asked to evict {num_tokens}, but only {cache.evictable_tokens} are "
            f"unlocked ({cache.protected_tokens} are protected)"
        )


TOKEN_BYTES = 4  # an int32
NO_SLOTS: IntArray = np.empty(0, np.int32)


def page_bytes(ids: IntArray, page_size: int) -> bytes:
    """The whole pages of `ids` [n] as raw bytes: comparing and hashing bytes is one call in C."""
    tokens = np.asarray(ids, np.int32)
    return tokens[: len(tokens) // page_size * page_size].tobytes()


def joined_slots(pieces: Sequence[bytes]) -> IntArray:
    """One writable int32 array from pieces of raw bytes."""
    return np.frombuffer(bytearray().join(pieces), np.int32)


def slots_of_pages(pages: IntArray, page_size: int) -> IntArray:
    """Slots of whole pages [k], int32 [k * page_size]."""
    inside = np.arange(page_size, dtype=np.int32)
    return (np.asarray(pages, np.int32)[:, None] * page_size + inside).ravel()


class EmptyHandle(NamedTuple):
    """The handle of a cache that holds nothing."""

    cached_len: int = 0

    def slots(self) -> IntArray:
        """No slots, int32 [0]."""
        return NO_SLOTS


class NaiveCache:
    """A prefix cache that never remembers: matches are empty, pages stay with their request."""

    evictable_tokens = 0
    protected_tokens = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = integer(1)("page_size", page_size)

    def match_prefix(self, ids: IntArray) -> CacheHandle:
        """Finds nothing."""
        return EmptyHandle()

    def insert_prefix(self, ids: IntArray, slots: IntArray) -> InsertResult:
        """Takes nothing: the slots stay with the caller."""
        return InsertResult(EmptyHandle(), 0)

    def lock(self, handle: CacheHandle) -> None:
        """Nothing to protect."""

    def unlock(self, handle: CacheHandle) -> None:
        """Nothing to release."""

    def evict(self, num_tokens: int) -> IntArray:
        """Nothing to give back: only `evict(0)` succeeds."""
        check_evictable(self, num_tokens)
        return NO_SLOTS

    def reset(self) -> None:
        """Nothing to forget."""

    def cached_slots(self) -> IntArray:
        """No slots, int32 [0]."""
        return NO_SLOTS

    def check_integrity(self, locked: Sequence[CacheHandle] | None = None) -> None:
        """Nothing can be wrong."""


class Link:
    """A member of a `UseOrder`, or of none: then it is linked to itself."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link = self
        self.newer: Link = self


class UseOrder:
    """Everything that may be evicted, oldest use first: a ring of links, each step O(1)."""

    def __init__(self) -> None:
        self.ends = Link()  # its newer is the oldest, its older the newest

    def push(self, link: Link) -> None:
        """Make a link the newest, whether it was in the ring or not."""
        self.drop(link)
        self.put_behind(link, self.ends.older)

    def put_behind(self, link: Link, other: Link) -> None:
        """Let a link that is in no ring follow directly after `other`."""
        link.older, link.newer = other, other.newer
        other.newer.older = link
        other.newer = link

    def drop(self, link: Link) -> None:
        """Take a link out of the ring, if it is in one."""
        link.older.newer, link.newer.older = link.newer, link.older
        link.older = link.newer = link

    def pop(self) -> Link:
        """Take out the oldest; IndexError if there is none."""
        oldest = self.ends.newer
        if oldest is self.ends:
            raise IndexError("nothing in use order")
        self.drop(oldest)
        return oldest

    def __iter__(self) -> Iterator[Link]:
        """From the oldest to the newest."""
        link = self.ends.newer
        while link is not self.ends:
            yield link
            link = link.newer
