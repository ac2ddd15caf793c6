"""A radix tree over token ids, in whole pages, that shares computed pages between requests.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minisgl import events
from minisgl.config.rules import check_positive
from minisgl.core import CacheHandle, IntArray
from minisgl.kvcache.prefix_cache import NO_SLOTS, TOKEN_BYTES, InsertResult, Salt, check_evictable


def page_bytes(ids: IntArray, page_size: int) -> bytes:
    """Return the whole pages of `ids` [n] as raw bytes."""
    tokens = np.asarray(ids, np.int32)
    return tokens[: len(tokens) // page_size * page_size].tobytes()


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """A run of whole pages and the number of its locks."""

    tokens: bytes  # token ids, int32 as raw bytes
    slots: IntArray  # [num_tokens]
    parent: Node | None  # None: the root, or a node that was evicted
    key: bytes = b""  # its place in `parent.children`: see `page_key`
    children: dict[bytes, Node] = field(default_factory=dict)
    ref_count: int = 0  # locks on this node or below it

    @property
    def num_tokens(self) -> int:
        """Length of the run."""
        return len(self.slots)


class RadixCache:
    """Cached prefixes as a tree over token ids."""

    def __init__(self, page_size: int) -> None:
        check_positive(page_size=page_size)
        self.page_size, self.page_bytes = page_size, page_size * TOKEN_BYTES
        self.emit: events.Emit | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, locks included."""
        self.root = Node(b"", NO_SLOTS, None)
        self.lru: OrderedDict[Node, None] = OrderedDict()  # unlocked nodes, the oldest first
        self.evictable_tokens = self.protected_tokens = 0

    def page_key(self, tokens: bytes, start: int, salt: Salt) -> bytes:
        """Return the key of the child at byte `start`: a page; the salt precedes the first."""
        page = tokens[start : start + self.page_bytes]
        return page if start or not page or salt is None else b":" + salt.encode() + page

    def walk(self, tokens: bytes, salt: Salt) -> tuple[Node, int]:
        """Follow whole pages of `tokens` down; return the last node and the matched length."""
        node, start = self.root, 0
        while child := node.children.get(self.page_key(tokens, start, salt)):
            if not tokens.startswith(child.tokens, start):  # they differ inside this run
                rest = np.frombuffer(tokens, np.int32, offset=start)
                same = common_prefix(np.frombuffer(child.tokens, np.int32), rest, self.page_size)
                return self.split(child, same), start // TOKEN_BYTES + same
            node, start = child, start + len(child.tokens)
        return node, start // TOKEN_BYTES

    def split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` tokens and return the upper half, which is not in `lru` yet."""
        assert node.parent is not None and 0 < at < node.num_tokens and at % self.page_size == 0
        cut = at * TOKEN_BYTES
        upper = Node(node.tokens[:cut], node.slots[:at].copy(), node.parent, node.key)
        upper.ref_count = node.ref_count  # a lock on the lower half holds the upper one
        node.parent.children[upper.key] = upper
        node.tokens, node.slots, node.parent = node.tokens[cut:], node.slots[at:].copy(), upper
        node.key = node.tokens[: self.page_bytes]
        upper.children[node.key] = node
        if self.emit is not None:
            self.emit(events.NodeSplit(self.first_page(upper), at // self.page_size))
        return upper

    def first_page(self, node: Node) -> int:
        """Return the page that names a node in events; -1 for the root."""
        return int(node.slots[0]) // self.page_size if node.parent is not None else -1

    def touch(self, node: Node) -> None:
        """Mark the path from `node` up to the root as just used, each parent behind its child."""
        if self.emit is not None:
            self.emit(events.NodeUsed(self.first_page(node)))
        while node.parent is not None:
            if node.ref_count == 0:
                self.lru[node] = None
                self.lru.move_to_end(node)
            node = node.parent

    def match_prefix(self, ids: IntArray, salt: Salt = None) -> CacheHandle:
        """Find the longest cached prefix of `ids` [n]; may split a node, keeps cached contents."""
        node, length = self.walk(page_bytes(ids, self.page_size), salt)
        self.touch(node)
        return RadixHandle(node, length)

    def insert_prefix(self, ids: IntArray, slots: IntArray, salt: Salt = None) -> InsertResult:
        """Cache the whole pages of `ids` [n] at `slots` [n]; pages cached before stay."""
        tokens = page_bytes(ids, self.page_size)
        length = len(tokens) // TOKEN_BYTES
        if len(slots) < length:
            raise ValueError(f"slots: {len(slots)} slots for {length} tokens")
        node, cached = self.walk(tokens, salt)
        if cached < length:
            fresh = np.array(slots[cached:length], np.int32)  # a copy: the caller's row will change
            start = cached * TOKEN_BYTES
            leaf = Node(tokens[start:], fresh, node, self.page_key(tokens, start, salt))
            node.children[leaf.key] = leaf
            self.evictable_tokens += length - cached
            if self.emit is not None:
                pages = events.pages_of(fresh, self.page_size)
                self.emit(events.NodeAdded(self.first_page(node), pages))
            node = leaf
        self.touch(node)
        return InsertResult(RadixHandle(node, length), cached)

    def evict(self, num_tokens: int) -> IntArray:
        """Evict unlocked pages, the oldest first, and no more than needed; return their slots."""
        check_evictable(self, num_tokens)
        missing = -(-num_tokens // self.page_size) * self.page_size
        self.evictable_tokens -= missing
        freed = [NO_SLOTS]
        while missing > 0:
            leaf = next(iter(self.lru))
            assert leaf.parent is not None and not leaf.children
            kept = max(0, leaf.num_tokens - missing)
            freed.append(leaf.slots[kept:])
            missing -= leaf.num_tokens - kept
            if self.emit is not None:
                gone = (leaf.num_tokens - kept) // self.page_size
                self.emit(events.NodeEvicted(self.first_page(leaf), gone))
            if kept == 0:
                del self.lru[leaf], leaf.parent.children[leaf.key]
                leaf.parent = None
            leaf.tokens, leaf.slots = leaf.tokens[: kept * TOKEN_BYTES], leaf.slots[:kept].copy()
        return np.concatenate(freed)

    def nodes(self) -> list[Node]:
        """Return all nodes, each parent before its children; walks the whole tree."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found

    def pages(self) -> IntArray:
        """Return every page of the tree, int32."""
        return np.concatenate([n.slots[:: self.page_size] for n in self.nodes()]) // self.page_size

    def unlocked_tokens(self, handle: CacheHandle) -> int:
        """Return the tokens of a prefix that no lock protects; change nothing."""
        return sum(node.num_tokens for node in path_of(handle) if node.ref_count == 0)

    def lock(self, handle: CacheHandle) -> None:
        """Protect a prefix: add a lock to every node on its path."""
        path = path_of(handle)
        if self.emit is not None and path:
            self.emit(events.NodeLocked(self.first_page(path[0]), 1))
        for node in path:
            if node.ref_count == 0:
                del self.lru[node]
                self.evictable_tokens -= node.num_tokens
                self.protected_tokens += node.num_tokens
            node.ref_count += 1

    def unlock(self, handle: CacheHandle) -> None:
        """Remove one lock and mark the path as just used."""
        path = path_of(handle)
        if path and path[0].ref_count == 0:
            raise RuntimeError(f"handle: of {handle.cached_len} tokens, is not locked")
        if self.emit is not None and path:
            self.emit(events.NodeLocked(self.first_page(path[0]), -1))
        for node in path:
            node.ref_count -= 1
            if node.ref_count == 0:
                self.evictable_tokens += node.num_tokens
                self.protected_tokens -= node.num_tokens
        if path:
            self.touch(path[0])


def common_prefix(a: IntArray, b: IntArray, page_size: int) -> int:
    """Count the leading tokens that `a` and `b` share, rounded down to whole pages."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // page_size * page_size


class RadixHandle(NamedTuple):
    """A cached prefix: the path from the root down to `node`."""

    node: Node
    cached_len: int

    def slots(self) -> IntArray:
        """Return the prefix's slots, int32 [cached_len]; raise RuntimeError if any was evicted."""
        return np.concatenate([NO_SLOTS, *(node.slots for node in reversed(path_of(self)))])


def path_of(handle: CacheHandle) -> list[Node]:
    """Return a prefix's nodes but the root, the last one first; RuntimeError if one was evicted."""
    if not isinstance(handle, RadixHandle):
        raise TypeError(f"handle: not from a radix cache: {handle!r}")
    path: list[Node] = []
    node = handle.node
    while node.parent is not None:
        path.append(node)
        node = node.parent
    if sum(node.num_tokens for node in path) != handle.cached_len:
        raise RuntimeError(f"handle: of its {handle.cached_len} tokens some were evicted")
    return path
