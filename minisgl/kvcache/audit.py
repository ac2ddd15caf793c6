"""A recount of pages, rows, locks and sizes: every page has exactly one owner.

Generated from notebooks/03b_prefix_caches.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from minisgl.core import CacheHandle, IntArray, Req
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import slots_of_pages
from minisgl.kvcache.prefix_cache import NO_SLOTS, TOKEN_BYTES, PrefixCache
from minisgl.kvcache.radix_cache import Node, RadixCache, path_of


class IntegrityError(RuntimeError):
    """A recount of pages, locks or sizes found a contradiction; the message names it."""


def require(fact: bool, message: str) -> None:
    """Raise IntegrityError unless the fact holds; unlike `assert` it survives `python -O`."""
    if not fact:
        raise IntegrityError(message)


@singledispatch
def check_cache(cache: PrefixCache, locked: Sequence[CacheHandle] | None = None) -> None:
    """Recount a cache of any kind through its protocol; raise IntegrityError."""
    sizes, pages = (cache.evictable_tokens, cache.protected_tokens), cache.pages()
    counted = len(pages) * cache.page_size
    require(sum(sizes) == counted, f"evictable and protected tokens: {sizes}, counted {counted}")
    for handle in locked or ():
        gone = np.setdiff1d(handle.slots() // cache.page_size, pages)
        require(not len(gone), f"locked pages {gone.tolist()} are not in the cache")


def node_fault(cache: RadixCache, node: Node) -> str:
    """Describe the fault of a node, its parent, children or locks; return "" if there is none."""
    parent, size = node.parent, len(node.slots)
    page = node.tokens[: cache.page_size * TOKEN_BYTES]
    if parent is None or parent.children.get(node.key) is not node or not node.key.endswith(page):
        return "its parent does not list it"
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


@check_cache.register
def check_tree(cache: RadixCache, locked: Sequence[CacheHandle] | None = None) -> None:
    """Recount a tree and, given all locked handles, every lock; raise IntegrityError."""
    nodes = cache.nodes()[1:]
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


def own_pages(manager: CacheManager, req: Req) -> IntArray:
    """Return the pages of one request alone, after a check of its row."""
    assert req.cache_handle is not None
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


FREE, CACHED = -1, -2  # owners that are no request


def owner_name(owner: int) -> str:
    """Return the owner of a page in words."""
    return {FREE: "the free list", CACHED: "the prefix cache"}.get(owner, f"req {owner}")


def owners(manager: CacheManager, live: Sequence[Req] = ()) -> NDArray[np.int64]:
    """Return the owner of each page, [num_pages]: a uid of `live`, FREE or CACHED.

    IntegrityError unless each page has exactly one owner.
    """
    holders = [req for req in live if req.cache_handle is not None]
    claims = [(FREE, manager.allocator.free_set()), (CACHED, manager.prefix_cache.pages())]
    claims += [(req.uid, own_pages(manager, req)) for req in holders]
    found = np.full(manager.num_pages, FREE, np.int64)
    claimed = np.zeros(manager.num_pages, np.int64)
    for owner, pages in claims:
        bad = pages[(pages < 0) | (pages >= manager.num_pages)]
        require(
            not len(bad), f"{owner_name(owner)}: names pages {bad.tolist()}, which do not exist"
        )
        found[pages] = owner
        np.add.at(claimed, pages, 1)
    for page in np.flatnonzero(claimed != 1):
        names = [owner_name(o) for o, pages in claims for _ in range((pages == page).sum())]
        require(bool(names), f"page {page}: lost, neither free nor cached nor any request's")
        require(False, f"page {page}: owned by {' and by '.join(names)}")
    return found


def check_integrity(manager: CacheManager, live: Sequence[Req] = ()) -> None:
    """Recount pages, rows and locks, given all requests that hold any; raise IntegrityError."""
    holders = [req for req in live if req.cache_handle is not None]
    rows = [req.table_idx for req in holders if req.table_idx >= 0]
    require(len(set(rows)) == len(rows), f"rows {rows}: two requests share one")
    for req in manager.allocated_len:
        require(req in holders, f"req {req.uid}: has pages but is not live")
    handles = [req.cache_handle for req in holders if req.cache_handle is not None]
    check_cache(manager.prefix_cache, handles)
    owners(manager, live)
