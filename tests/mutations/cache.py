"""Bugs of prefix caches and of the cache manager."""

from __future__ import annotations

from tests.mutations import Mutation

RADIX = "minisgl.kvcache.radix_cache"
HASH = "minisgl.kvcache.hash_cache"
COMMON = "minisgl.kvcache.prefix_cache"
MANAGER = "minisgl.kvcache.cache_manager"
CACHE_TESTS = "tests/test_prefix_cache.py::"
MANAGER_TESTS = "tests/test_cache_manager.py::"
WALK = CACHE_TESTS + "test_a_long_random_walk_agrees_with_a_dict_of_prefixes"
LIVES = MANAGER_TESTS + "test_a_long_random_run_in_a_tight_pool"

MUTATIONS = [
    # ---- the tree
    Mutation(
        "radix: a split forgets the locks",
        RADIX,
        "upper.ref_count = node.ref_count  # who holds the lower half holds the upper one",
        "upper.ref_count = 0",
        CACHE_TESTS + "test_pitfall_06_a_split_keeps_the_locks_of_both_halves",
    ),
    Mutation(
        "radix: no split, the whole node counts as matched",
        RADIX,
        "return self.split(child, same), start // TOKEN_BYTES + same",
        "return child, start // TOKEN_BYTES + same",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: a split inside a page",
        RADIX,
        "return same // page_size * page_size",
        "return same",
        CACHE_TESTS + "test_common_prefix_is_whole_pages",
    ),
    Mutation(
        "radix: the upper half goes before its child",
        RADIX,
        "self.order.put_behind(upper, node)",
        "self.order.put_behind(upper, self.order.ends)",
        CACHE_TESTS + "test_a_split_alone_keeps_the_order_of_use",
    ),
    Mutation(
        "radix: unlock leaves the upper nodes locked",
        RADIX,
        "        node.ref_count -= 1\n",
        "        node.ref_count -= node is bottom\n",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: a locked leaf stays a victim",
        RADIX,
        "                self.order.drop(node)\n",
        "",
        CACHE_TESTS + "test_pitfall_06_eviction_takes_whole_pages_and_no_locked_one",
    ),
    Mutation(
        "radix: an unlocked node does not become a victim again",
        RADIX,
        "    self.touch(bottom)\n".replace("    ", "        ", 1),
        "",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: evicts the newest",
        COMMON,
        "oldest = self.ends.newer",
        "oldest = self.ends.older",
        CACHE_TESTS + "test_a_match_counts_as_a_use",
    ),
    Mutation(
        "radix: a match is no use",
        RADIX,
        "        self.touch(node)\n        return RadixHandle(node, length)\n",
        "        return RadixHandle(node, length)\n",
        CACHE_TESTS + "test_a_match_counts_as_a_use",
    ),
    Mutation(
        "radix: an evicted leaf stays below its parent",
        RADIX,
        "            del leaf.parent.children[leaf.tokens[: self.page_bytes]]\n",
        "",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: evicts less than asked",
        RADIX,
        "while count < num_tokens:",
        "while count + self.page_size < num_tokens:",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: sizes not counted down by an eviction",
        RADIX,
        "        self.evictable_tokens -= count\n",
        "",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: an eviction walks the tree",
        RADIX,
        "            leaf = self.order.pop()\n",
        "            _ = list(self.nodes())\n            leaf = self.order.pop()\n",
        CACHE_TESTS
        + "test_pitfall_17_an_eviction_takes_as_many_steps_in_a_small_tree_as_in_a_large_one",
    ),
    # ---- the table of hashes
    Mutation(
        "hash: tokens are not compared",
        HASH,
        "if block.parent is parent and block.tokens == tokens:",
        "if block.parent is parent:",
        CACHE_TESTS + "test_pitfall_08_a_hash_is_not_an_identity",
    ),
    Mutation(
        "hash: parents are not compared",
        HASH,
        "if block.parent is parent and block.tokens == tokens:",
        "if block.tokens == tokens:",
        CACHE_TESTS + "test_pitfall_08_a_hash_is_not_an_identity",
    ),
    Mutation(
        "hash: a stale hash stays in the table",
        HASH,
        "            self.forget(block)\n",
        "",
        CACHE_TESTS + "test_pitfall_08_an_evicted_hash_is_forgotten",
    ),
    Mutation(
        "hash: known blocks are entered again",
        HASH,
        "range(len(chain) * self.page_bytes, len(tokens), self.page_bytes)",
        "range(0, len(tokens), self.page_bytes)",
        CACHE_TESTS + "test_pitfall_08_no_block_twice",
    ),
    Mutation(
        "hash: parents are evicted before their children",
        HASH,
        "for block in reversed(chain):",
        "for block in chain:",
        CACHE_TESTS + "test_pitfall_08_an_evicted_hash_is_forgotten",
    ),
    # ---- the manager
    Mutation(
        "manager: the row is not rewritten",
        MANAGER,
        "            if len(duplicates):  # the row must not name what is freed below\n",
        "            if False:\n",
        MANAGER_TESTS + "test_pitfall_01_the_row_follows_when_its_duplicates_are_freed",
    ),
    Mutation(
        "manager: duplicates are never freed",
        MANAGER,
        "        self.free_slots(duplicates)\n",
        "",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: duplicates are freed from the rewritten row",
        MANAGER,
        "duplicates = row[old.cached_len : already].copy()",
        "duplicates = row[old.cached_len : already]",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: frees twice",
        MANAGER,
        "handle, req.cache_handle = req.cache_handle, None",
        "handle = req.cache_handle",
        MANAGER_TESTS + "test_a_request_is_released_once",
    ),
    Mutation(
        "manager: frees what the cache kept",
        MANAGER,
        "self.release(req, max(old.cached_len, new.cached_len))",
        "self.release(req, old.cached_len)",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the tail of a finished request is lost",
        MANAGER,
        "        self.free_slots(self.tables.page_table[req.table_idx, kept_len:end])\n",
        "",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: an unlock is dropped at the end",
        MANAGER,
        "        self.prefix_cache.unlock(handle)\n\n    def check_integrity",
        "\n    def check_integrity",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the old lock is not given back",
        MANAGER,
        "            self.prefix_cache.unlock(old)\n",
        "",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the new prefix is not locked",
        MANAGER,
        "            self.prefix_cache.lock(new)\n            self.prefix_cache.unlock(old)\n",
        "",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the whole prompt is matched",
        MANAGER,
        "match_prefix(input_ids[:-1])",
        "match_prefix(input_ids)",
        MANAGER_TESTS + "test_a_full_hit_leaves_one_token",
    ),
    Mutation(
        "manager: tokens without K/V are cached",
        MANAGER,
        "known = min(req.cached_len, len(req.input_ids))",
        "known = len(req.input_ids)",
        MANAGER_TESTS + "test_only_computed_tokens_are_cached",
    ),
    Mutation(
        "manager: a second allocation takes pages again",
        MANAGER,
        "start = self.allocated_len.get(req, req.cache_handle.cached_len)",
        "start = req.cache_handle.cached_len",
        MANAGER_TESTS + "test_allocation_gives_all_or_nothing",
    ),
    Mutation(
        "manager: check_integrity finds no page lost",
        MANAGER,
        "lost = np.flatnonzero(owners.owner < 0).tolist()",
        "lost: list[int] = []",
        MANAGER_TESTS + "test_pitfall_02_check_integrity_checks",
    ),
    Mutation(
        "manager: check_integrity does not look at rows",
        MANAGER,
        "            self.check_row(req, owners)\n",
        "            pass\n",
        MANAGER_TESTS + "test_pitfall_02_check_integrity_checks",
    ),
]
