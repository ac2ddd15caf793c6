"""A recount of pages, rows, locks and sizes: every page has exactly one owner.

Generated from notebooks/03b_prefix_caches.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from minisgl.core import IntArray, Req
from minisgl.kvcache.cache_manager import CacheManager, slots_of_pages
from minisgl.kvcache.prefix_cache import NO_SLOTS, TOKEN_BYTES, CacheHandle
from minisgl.kvcache.radix_cache import Node, RadixCache, path_of


class IntegrityError(RuntimeError):
    """A recount of pages, locks or sizes found a contradiction; the message names it."""


def require(fact: bool, message: str) -> None:
    """Raise IntegrityError unless the fact holds; unlike `assert` it survives `python -O`."""
    if not fact:
        raise IntegrityError(message)


def nodes_of(cache: RadixCache) -> Iterator[Node]:
    """All nodes but the root, parents first; walks the whole tree."""
    stack = list(cache.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def node_fault(cache: RadixCache, node: Node) -> str:
    """What is wrong with a node, its parent, its children or its locks; empty if nothing."""
    parent, size = node.parent, len(node.slots)
    page = cache.page_size * TOKEN_BYTES
    if parent is None or parent.children.get(node.tokens[:page]) is not node:
        return "its parent does not know it"
    if size == 0 or len(node.tokens) != size * TOKEN_BYTES:
        return "tokens and slots differ in number"
    pages = node.slots[:: cache.page_size] // cache.page_size
    if not np.array_equal(node.slots, slots_of_pages(pages, cache.page_size)):
        return "slots are not whole pages"
    if node.ref_count < sum(child.ref_count for child in node.children.values()):
        return "fewer locks than below it"
    if (node in cache.lru) != (node.ref_count == 0):
        return "locks and order of use disagree"
    return ""


def check_tree(cache: RadixCache, locked: Sequence[CacheHandle] | None = None) -> None:
    """Recount a tree; given all locked handles, every lock too. Raises IntegrityError."""
    nodes = list(nodes_of(cache))
    for node in nodes:
        fault = node_fault(cache, node)
        require(not fault, f"node of {node.num_tokens} tokens: {fault}")
    total = sum(node.num_tokens for node in nodes)
    free = sum(node.num_tokens for node in nodes if node.ref_count == 0)
    sizes, counted = (cache.evictable_tokens, cache.protected_tokens), (free, total - free)
    require(sizes == counted, f"evictable and protected tokens: {sizes}, counted {counted}")
    require(cache.lru.keys() <= set(nodes), "the order of use names a node outside the tree")
    turn: dict[Node | None, int] = {node: i for i, node in enumerate(cache.lru)}
    late = all(turn.get(n.parent, len(turn)) > turn.get(n, -1) for n in nodes)
    require(late, "order of use: a parent goes before its child")  # a locked one never goes
    if locked is not None:
        held = Counter(node for handle in locked for node in path_of(handle))
        for n in nodes:
            require(n.ref_count == held[n], f"{n.ref_count} locks, but {held[n]} handles")


def cached_pages(manager: CacheManager, locked: Sequence[CacheHandle]) -> IntArray:
    """Every page that the prefix cache holds, after a check of the cache itself."""
    cache = manager.prefix_cache
    if not isinstance(cache, RadixCache):
        return NO_SLOTS
    check_tree(cache, locked)
    slots = np.concatenate([NO_SLOTS, *(node.slots for node in nodes_of(cache))])
    return slots[:: cache.page_size] // cache.page_size


def own_pages(manager: CacheManager, req: Req) -> IntArray:
    """The pages of one request alone, after a check of its row."""
    size, kept = manager.page_size, req.cache_handle.cached_len
    end = manager.allocated_len.get(req, kept)
    if req.table_idx < 0:  # matched and locked, but not yet admitted
        require(end == kept, f"req {req.uid}: has pages but no row")
        return NO_SLOTS
    row = manager.tables.page_table[req.table_idx]
    ours = np.array_equal(row[:kept], req.cache_handle.slots())
    require(ours, f"req {req.uid}: its row differs from the slots of its cached prefix")
    pages = row[kept:end:size] // size
    whole = np.array_equal(row[kept:end], slots_of_pages(pages, size))
    require(whole, f"req {req.uid}: its row does not name whole pages")
    return pages


def check_owners(num_pages: int, claims: Sequence[tuple[str, IntArray]]) -> None:
    """Each page is claimed exactly once: (owner, pages) [k]."""
    for name, pages in claims:
        bad = pages[(pages < 0) | (pages >= num_pages)]
        require(not len(bad), f"{name}: names pages {bad.tolist()}, which do not exist")
    claimed = np.concatenate([pages for _, pages in claims])
    for page in np.flatnonzero(np.bincount(claimed, minlength=num_pages) != 1):
        owners = [name for name, pages in claims for _ in range(np.count_nonzero(pages == page))]
        require(bool(owners), f"page {page}: lost, neither free nor cached nor any request's")
        require(False, f"page {page}: owned by {' and by '.join(owners)}")


def check_integrity(manager: CacheManager, live: Sequence[Req] = ()) -> None:
    """Recount pages, rows and locks, given all requests that hold any; raises IntegrityError."""
    holders = [req for req in live if req.cache_handle is not None]
    rows = [req.table_idx for req in holders if req.table_idx >= 0]
    require(len(set(rows)) == len(rows), f"rows {rows}: two requests share one")
    for req in manager.allocated_len:
        require(req in holders, f"req {req.uid}: has pages but is not live")
    locked = [req.cache_handle for req in holders]
    claims = [
        ("the free list", manager.allocator.free_set()),
        ("the prefix cache", cached_pages(manager, locked)),
        *((f"req {req.uid}", own_pages(manager, req)) for req in holders),
    ]
    check_owners(manager.num_pages, claims)
