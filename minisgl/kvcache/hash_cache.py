"""The other design: one entry per full block, found by a hash of everything before it.

Generated from notebooks/03_radix_cache.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    page_bytes,
    require,
    slots_of_pages,
)


class Block(Link):
    """One full page of tokens, and the block before it."""

    __slots__ = ("hash", "page", "parent", "ref_count", "tokens")

    def __init__(self, page: int, tokens: bytes, parent: Block | None, digest: int) -> None:
        self.older = self.newer = self
        self.page = page  # -1 once it is evicted
        self.tokens = tokens  # [page_size] token ids as raw bytes
        self.parent = parent
        self.hash = digest  # of this page and all before it
        self.ref_count = 0


def chain_hash(parent: int, tokens: bytes) -> int:
    """Hash of a page, given the hash of all before it."""
    return hash((parent, tokens))


class HashHandle(NamedTuple):
    """A cached prefix: a chain of blocks from the first page on."""

    blocks: Sequence[Block]
    page_size: int

    @property
    def cached_len(self) -> int:
        """Tokens in the chain."""
        return len(self.blocks) * self.page_size

    def slots(self) -> IntArray:
        """Slots of the prefix, int32 [cached_len]; RuntimeError if it was evicted meanwhile."""
        pages = np.array([block.page for block in self.blocks], np.int32)
        if len(pages) and pages.min() < 0:
            raise RuntimeError("handle: its prefix was evicted; lock it before anything may evict")
        return slots_of_pages(pages, self.page_size)


class HashCache:
    """Cached prefixes as chained blocks in a hash table."""

    def __init__(self, page_size: int, hash_fn: Callable[[int, bytes], int] = chain_hash) -> None:
        self.page_size = integer(1)("page_size", page_size)
        self.hash_fn = hash_fn
        self.page_bytes = page_size * TOKEN_BYTES
        self.clear()

    def clear(self) -> None:
        """Start with an empty table."""
        self.table: dict[int, list[Block]] = {}  # blocks that share a hash stand side by side
        self.order = UseOrder()  # every unlocked block, each parent newer than its children
        self.evictable_tokens = 0
        self.protected_tokens = 0

    def find(self, digest: int, parent: Block | None, tokens: bytes) -> Block | None:
        """The block with these tokens after this parent: the hash proposes, the tokens decide."""
        for block in self.table.get(digest, ()):
            if block.parent is parent and block.tokens == tokens:
                return block
        return None

    def walk(self, tokens: bytes) -> list[Block]:
        """The longest chain of blocks that `tokens` begins with."""
        chain: list[Block] = []
        parent: Block | None = None
        digest = 0
        for start in range(0, len(tokens), self.page_bytes):
            page = tokens[start : start + self.page_bytes]
            digest = self.hash_fn(digest, page)
            parent = self.find(digest, parent, page)
            if parent is None:
                break
            chain.append(parent)
        return chain

    def touch(self, chain: Sequence[Block]) -> None:
        """Mark a chain as just used, each block behind the ones that follow it."""
        for block in reversed(chain):
            if block.ref_count == 0:
                self.order.push(block)

    def match_prefix(self, ids: IntArray) -> CacheHandle:
        """Longest cached prefix of `ids` [n]."""
        chain = self.walk(page_bytes(ids, self.page_size))
        self.touch(chain)
        return HashHandle(chain, self.page_size)

    def insert_prefix(self, ids: IntArray, slots: IntArray) -> InsertResult:
        """Cache the whole pages of `ids` [n] at `slots` [n]; pages cached before stay."""
        tokens = page_bytes(ids, self.page_size)
        if len(slots) * TOKEN_BYTES < len(tokens):
            raise ValueError(f"slots: {len(slots)} slots for {len(tokens) // TOKEN_BYTES} tokens")
        chain = self.walk(tokens)
        already = len(chain) * self.page_size
        for start in range(len(chain) * self.page_bytes, len(tokens), self.page_bytes):
            page = int(slots[start // TOKEN_BYTES]) // self.page_size
            parent = chain[-1] if chain else None
            chain.append(self.add_block(page, tokens[start : start + self.page_bytes], parent))
        self.touch(chain)
        return InsertResult(HashHandle(chain, self.page_size), already)

    def add_block(self, page: int, tokens: bytes, parent: Block | None) -> Block:
        """Enter a new block after its parent into the table."""
        digest = self.hash_fn(parent.hash if parent else 0, tokens)
        block = Block(page, tokens, parent, digest)
        self.table.setdefault(digest, []).append(block)
        self.evictable_tokens += self.page_size
        return block

    def own(self, handle: CacheHandle) -> Sequence[Block]:
        """The blocks of a handle, if the table still holds them; the last one would go first."""
        if not isinstance(handle, HashHandle):
            raise TypeError(f"handle: not from a hash cache: {handle!r}")
        if handle.blocks and handle.blocks[-1].page < 0:
            raise RuntimeError("handle: its prefix was evicted before it was locked")
        return handle.blocks

    def lock(self, handle: CacheHandle) -> None:
        """Protect every block of a prefix."""
        for block in self.own(handle):
            if block.ref_count == 0:
                self.order.drop(block)
                self.evictable_tokens -= self.page_size
                self.protected_tokens += self.page_size
            block.ref_count += 1

    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock back and mark the chain as just used."""
        chain = self.own(handle)
        if chain and chain[-1].ref_count == 0:
            raise RuntimeError(
                f"handle: unlocked more often than locked ({handle.cached_len} tokens)"
            )
        for block in chain:
            block.ref_count -= 1
            if block.ref_count == 0:
                self.evictable_tokens += self.page_size
                self.protected_tokens -= self.page_size
        self.touch(chain)

    def evict(self, num_tokens: int) -> IntArray:
        """Forget `num_tokens` unlocked tokens or more, oldest first; returns their slots, int32."""
        check_evictable(self, num_tokens)
        pages: list[int] = []
        while len(pages) * self.page_size < num_tokens:
            block = self.order.pop()
            assert isinstance(block, Block)
            self.forget(block)
            pages.append(block.page)
            block.page, block.parent = -1, None
        self.evictable_tokens -= len(pages) * self.page_size
        return slots_of_pages(np.array(pages, np.int32), self.page_size)

    def forget(self, block: Block) -> None:
        """Take a block out of the table: a hash left behind would lead to a page of others."""
        same_hash = self.table[block.hash]
        same_hash.remove(block)
        if not same_hash:
            del self.table[block.hash]

    def reset(self) -> None:
        """Forget everything; RuntimeError while a lock is held."""
        if self.protected_tokens:
            raise RuntimeError(f"reset: {self.protected_tokens} tokens are still locked")
        self.clear()

    def blocks(self) -> list[Block]:
        """All blocks; walks the whole table."""
        return [block for same_hash in self.table.values() for block in same_hash]

    def cached_slots(self) -> IntArray:
        """Every slot in the table, int32."""
        pages = np.array([block.page for block in self.blocks()], np.int32)
        return slots_of_pages(pages, self.page_size)

    def check_integrity(self, locked: Sequence[CacheHandle] | None = None) -> None:
        """Recount the table; given all locked handles, every lock too. Raises IntegrityError."""
        blocks = self.blocks()
        for block in blocks:
            if fault := self.block_fault(block):
                raise IntegrityError(f"block of page {block.page}: {fault}")
        require(len({block.page for block in blocks}) == len(blocks), "a page is cached twice")
        require(
            len({(b.parent, b.tokens) for b in blocks}) == len(blocks), "a block is cached twice"
        )
        free = sum(block.ref_count == 0 for block in blocks) * self.page_size
        sizes = (self.evictable_tokens, self.protected_tokens)
        counted = (free, len(blocks) * self.page_size - free)
        require(sizes == counted, f"evictable and protected tokens: {sizes}, counted {counted}")
        place: dict[Link | None, int] = {link: i for i, link in enumerate(self.order)}
        require(
            place.keys() <= set(blocks), "the order of use names a block that is not in the table"
        )
        late = all(place.get(b.parent, len(place)) > place.get(b, -1) for b in blocks)
        require(late, "order of use: a parent goes before its child")
        held = Counter(block for handle in locked or () for block in self.own(handle))
        wrong = [b for b in blocks if b.ref_count != held[b]] if locked is not None else []
        for block in wrong[:1]:
            raise IntegrityError(f"ref_count: {block.ref_count} locks, but {held[block]} handles")

    def block_fault(self, block: Block) -> str:
        """What is wrong with a block, its hash, its parent or its locks; empty if nothing."""
        parent = block.parent
        if parent is not None and parent.page < 0:
            return "its parent was evicted"
        if parent is not None and parent.ref_count < block.ref_count:
            return "its parent is less locked"
        if block.hash != self.hash_fn(parent.hash if parent else 0, block.tokens):
            return "stale hash"
        if (block.newer is block) == (block.ref_count == 0):
            return "locks and order of use disagree"
        return ""
