"""A radix tree over token ids, in whole pages: what one request computed serves the next.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.config.rules import integer
from minisgl.core import IntArray
from minisgl.kvcache.prefix_cache import (
    TOKEN_BYTES,
    CacheHandle,
    InsertResult,
    IntegrityError,
    Link,
    UseOrder,
    check_evictable,
    joined_slots,
    page_bytes,
    require,
    slots_of_pages,
)


class Node(Link):
    """An edge of the tree: a run of whole pages, and how many locks protect it."""

    __slots__ = ("children", "parent", "ref_count", "slot_bytes", "tokens")

    def __init__(self, tokens: bytes, slot_bytes: bytes, parent: Node | None) -> None:
        self.older = self.newer = self
        self.tokens = tokens  # token ids, int32 as raw bytes
        self.slot_bytes = slot_bytes  # their slots, likewise
        self.parent = parent  # None: the root, or a node that was evicted
        self.children: dict[bytes, Node] = {}  # by their first page
        self.ref_count = 0  # locks on this node or below it

    @property
    def key(self) -> IntArray:
        """Token ids, int32 [num_tokens], a view."""
        return np.frombuffer(self.tokens, np.int32)

    @property
    def slots(self) -> IntArray:
        """Slots, int32 [num_tokens], a view."""
        return np.frombuffer(self.slot_bytes, np.int32)

    @property
    def num_tokens(self) -> int:
        """Length of the run."""
        return len(self.tokens) // TOKEN_BYTES


def common_prefix(a: IntArray, b: IntArray, page_size: int) -> int:
    """Number of leading tokens that `a` and `b` share, rounded down to whole pages."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    same = int(differ[0]) if len(differ) else shorter
    return same // page_size * page_size


class RadixCache:
    """Cached prefixes as a tree over token ids."""

    def __init__(self, page_size: int) -> None:
        self.page_size = integer(1)("page_size", page_size)
        self.page_bytes = page_size * TOKEN_BYTES
        self.clear()

    def clear(self) -> None:
        """Start with a bare root."""
        self.root = Node(b"", b"", None)
        self.order = UseOrder()  # every unlocked node, each parent newer than its children
        self.evictable_tokens = 0
        self.protected_tokens = 0

    def split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` tokens; `node` stays the lower half, the new upper half returns."""
        assert node.parent is not None and 0 < at < node.num_tokens and at % self.page_size == 0
        cut = at * TOKEN_BYTES
        upper = Node(node.tokens[:cut], node.slot_bytes[:cut], node.parent)
        node.parent.children[upper.tokens[: self.page_bytes]] = upper
        node.tokens, node.slot_bytes, node.parent = node.tokens[cut:], node.slot_bytes[cut:], upper
        upper.children[node.tokens[: self.page_bytes]] = node
        upper.ref_count = node.ref_count  # who holds the lower half holds the upper one
        if upper.ref_count == 0:
            self.order.put_behind(upper, node)
        return upper

    def walk(self, tokens: bytes) -> tuple[Node, int]:
        """Follow whole pages of `tokens` down; returns the last node and the matched length."""
        node, start = self.root, 0
        while child := node.children.get(tokens[start : start + self.page_bytes]):
            if not tokens.startswith(child.tokens, start):  # they part inside this node
                rest = np.frombuffer(tokens, np.int32, offset=start)
                same = common_prefix(child.key, rest, self.page_size)
                return self.split(child, same), start // TOKEN_BYTES + same
            node, start = child, start + len(child.tokens)
        return node, start // TOKEN_BYTES

    def touch(self, node: Node) -> None:
        """Mark the path from `node` up to the root as just used, each parent behind its child."""
        while node.parent is not None:
            if node.ref_count == 0:
                self.order.push(node)
            node = node.parent

    def match_prefix(self, ids: IntArray) -> CacheHandle:
        """Longest cached prefix of `ids` [n]; may split a node, changes nothing that is cached."""
        node, length = self.walk(page_bytes(ids, self.page_size))
        self.touch(node)
        return RadixHandle(node, length)

    def insert_prefix(self, ids: IntArray, slots: IntArray) -> InsertResult:
        """Cache the whole pages of `ids` [n] at `slots` [n]; pages cached before stay."""
        tokens = page_bytes(ids, self.page_size)
        length = len(tokens) // TOKEN_BYTES
        if len(slots) < length:
            raise ValueError(f"slots: {len(slots)} slots for {length} tokens")
        node, cached = self.walk(tokens)
        if cached < length:
            fresh = np.asarray(slots[cached:length], np.int32).tobytes()
            leaf = Node(tokens[cached * TOKEN_BYTES :], fresh, node)
            node.children[leaf.tokens[: self.page_bytes]] = leaf
            self.evictable_tokens += length - cached
            node = leaf
        self.touch(node)
        return InsertResult(RadixHandle(node, length), cached)

    def lock(self, handle: CacheHandle) -> None:
        """Protect a prefix, that is every node on its path."""
        node = self.own(handle)
        while node.parent is not None:
            if node.ref_count == 0:
                self.order.drop(node)
                self.evictable_tokens -= node.num_tokens
                self.protected_tokens += node.num_tokens
            node.ref_count += 1
            node = node.parent

    def own(self, handle: CacheHandle) -> Node:
        """The node of a handle, if this tree still holds it."""
        if not isinstance(handle, RadixHandle):
            raise TypeError(f"handle: not from a radix cache: {handle!r}")
        if handle.node.parent is None and handle.node is not self.root:
            raise RuntimeError("handle: its prefix was evicted before it was locked")
        return handle.node

    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock back and mark the path as just used."""
        node = bottom = self.own(handle)
        if node.parent is not None and node.ref_count == 0:
            raise RuntimeError(
                f"handle: unlocked more often than locked ({handle.cached_len} tokens)"
            )
        while node.parent is not None:
            node.ref_count -= 1
            if node.ref_count == 0:
                self.evictable_tokens += node.num_tokens
                self.protected_tokens -= node.num_tokens
            node = node.parent
        self.touch(bottom)

    def evict(self, num_tokens: int) -> IntArray:
        """Forget `num_tokens` unlocked tokens or more, oldest first; returns their slots, int32."""
        check_evictable(self, num_tokens)
        freed: list[bytes] = []
        count = 0
        while count < num_tokens:
            leaf = self.order.pop()
            assert isinstance(leaf, Node) and leaf.parent is not None and not leaf.children
            del leaf.parent.children[leaf.tokens[: self.page_bytes]]
            leaf.parent = None
            freed.append(leaf.slot_bytes)
            count += leaf.num_tokens
        self.evictable_tokens -= count
        return joined_slots(freed)

    def reset(self) -> None:
        """Forget everything; RuntimeError while a lock is held."""
        if self.protected_tokens:
            raise RuntimeError(f"reset: {self.protected_tokens} tokens are still locked")
        self.clear()

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first; walks the whole tree."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def cached_slots(self) -> IntArray:
        """Every slot in the tree, int32."""
        return joined_slots([node.slot_bytes for node in self.nodes()])

    def node_fault(self, node: Node) -> str:
        """What is wrong with a node, its parent, its children or its locks; empty if nothing."""
        parent, size = node.parent, len(node.tokens)
        if parent is None or parent.children.get(node.tokens[: self.page_bytes]) is not node:
            return "its parent does not know it"
        if size == 0 or size % self.page_bytes:
            return "not whole pages"
        if size != len(node.slot_bytes):
            return "tokens and slots differ in number"
        if node.ref_count < sum(child.ref_count for child in node.children.values()):
            return "fewer locks than below it"
        if (node.newer is node) == (node.ref_count == 0):
            return "locks and order of use disagree"
        return ""

    def check_integrity(self, locked: Sequence[CacheHandle] | None = None) -> None:
        """Recount the tree; given all locked handles, every lock too. Raises IntegrityError."""
        nodes = list(self.nodes())
        for node in nodes:
            if fault := self.node_fault(node):
                raise IntegrityError(f"node of {node.num_tokens} tokens: {fault}")
        slots = self.cached_slots()
        pages = slots[:: self.page_size] // self.page_size
        require(len(np.unique(pages)) == len(pages), "a page is cached twice")
        whole = np.array_equal(slots, slots_of_pages(pages, self.page_size))
        require(whole, "slots are not whole pages")
        free = sum(node.num_tokens for node in nodes if node.ref_count == 0)
        sizes, counted = (self.evictable_tokens, self.protected_tokens), (free, len(slots) - free)
        require(sizes == counted, f"evictable and protected tokens: {sizes}, counted {counted}")
        place: dict[Link | None, int] = {link: i for i, link in enumerate(self.order)}
        require(place.keys() <= set(nodes), "the order of use names a node that is not in the tree")
        late = all(place.get(n.parent, len(place)) > place.get(n, -1) for n in nodes)
        require(late, "order of use: a parent goes before its child")  # a locked one never goes
        held = count_locks(locked or ())
        wrong = [n for n in nodes if n.ref_count != held[n]] if locked is not None else []
        for node in wrong[:1]:
            raise IntegrityError(f"ref_count: {node.ref_count} locks, but {held[node]} handles")


class RadixHandle(NamedTuple):
    """A cached prefix: the path from the root down to `node`."""

    node: Node
    cached_len: int

    def slots(self) -> IntArray:
        """Slots of the prefix, int32 [cached_len]; RuntimeError if it was evicted meanwhile."""
        pieces: list[bytes] = []
        node = self.node
        while node.parent is not None:
            pieces.append(node.slot_bytes)
            node = node.parent
        slots = joined_slots(pieces[::-1])
        if len(slots) != self.cached_len:
            raise RuntimeError("handle: its prefix was evicted; lock it before anything may evict")
        return slots


def count_locks(locked: Sequence[CacheHandle]) -> Counter[Node]:
    """How many of these handles lie on or below each node."""
    held: Counter[Node] = Counter()
    for handle in locked:
        node = handle.node if isinstance(handle, RadixHandle) else None
        while node is not None and node.parent is not None:
            held[node] += 1
            node = node.parent
    return held
