"""Bugs of prefix caches and of the cache manager."""

from __future__ import annotations

from tests.mutations import Mutation

RADIX = "minisgl.kvcache.radix_cache"
MANAGER = "minisgl.kvcache.cache_manager"
AUDIT = "minisgl.kvcache.audit"
CACHE_TESTS = "tests/test_prefix_cache.py::"
MANAGER_TESTS = "tests/test_cache_manager.py::"
WALK = CACHE_TESTS + "test_a_long_random_walk_agrees_with_a_dict_of_prefixes"
LIVES = MANAGER_TESTS + "test_a_long_random_run_in_a_tight_pool"

MUTATIONS = [
    # ---- the tree
    Mutation(
        "radix: a salt that nobody reads",
        RADIX,
        'return page if start or not page or salt is None else b":" + salt.encode() + page',
        "return page",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: an empty salt is none",
        RADIX,
        'b":" + salt.encode()',
        "salt.encode()",
        CACHE_TESTS + "test_a_salt_is_no_page",
    ),
    Mutation(
        "radix: the root counts locks",
        RADIX,
        "    if sum(node.num_tokens for node in path)",
        "    path.append(node)\n    if sum(node.num_tokens for node in path)",
        CACHE_TESTS + "test_a_lock_of_nothing_has_no_effect",
    ),
    Mutation(
        "radix: a use of nothing is not reported",
        RADIX,
        "if self.emit is not None:\n            self.emit(events.NodeUsed",
        "if self.emit is not None and node.parent:\n            self.emit(events.NodeUsed",
        CACHE_TESTS + "test_a_tree_reports_its_changes_locks_and_uses",
    ),
    Mutation(
        "radix: a salt in the key of a prompt without a page",
        RADIX,
        "return page if start or not page or salt is None",
        "return page if start or salt is None",
        CACHE_TESTS + "test_a_salt_is_no_page",
    ),
    Mutation(
        "manager: an evicted handle takes a row",
        MANAGER,
        "slots, req.table_idx, req.cache_handle = handle.slots(), self.tables.allocate(), handle",
        "req.table_idx, slots, req.cache_handle = self.tables.allocate(), handle.slots(), handle",
        MANAGER_TESTS + "test_an_evicted_handle_takes_no_row",
    ),
    Mutation(
        "manager: what is computed is cached without its salt",
        MANAGER,
        "salt = req.sampling_params.cache_salt",
        "salt = None",
        "tests/test_scheduler.py::test_requests_share_prefixes_of_their_salt_alone",
    ),
    Mutation(
        "prefill: a prefix of another salt is waited for",
        "minisgl.scheduler.phases",
        "return req.sampling_params.cache_salt, req.prompt_ids[:end].tobytes()",
        "return None, req.prompt_ids[:end].tobytes()",
        "tests/test_scheduler.py::test_requests_share_prefixes_of_their_salt_alone",
    ),
    Mutation(
        "audit: a cache of another class is not recounted",
        AUDIT,
        "require(sum(sizes) == counted",
        "require(sum(sizes) >= 0",
        CACHE_TESTS + "test_pitfall_02_any_cache_is_recounted",
    ),
    Mutation(
        "radix: locked pages count as unlocked",
        RADIX,
        "path_of(handle) if node.ref_count == 0)",
        "path_of(handle))",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: a split forgets the locks",
        RADIX,
        "upper.ref_count = node.ref_count",
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
        "shorter) // page_size * page_size",
        "shorter)",
        CACHE_TESTS + "test_common_prefix_is_whole_pages",
    ),
    Mutation(
        "radix: a use moves parents before their children",
        RADIX,
        "self.lru.move_to_end(node)",
        "self.lru.move_to_end(node, last=False)",
        CACHE_TESTS + "test_a_split_keeps_the_order_of_use",
    ),
    Mutation(
        "radix: unlock leaves the upper nodes locked",
        RADIX,
        "            node.ref_count -= 1\n",
        "            node.ref_count -= node is path[0]\n",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: a locked leaf stays a victim",
        RADIX,
        "                del self.lru[node]\n",
        "",
        CACHE_TESTS + "test_pitfall_06_eviction_takes_whole_pages_and_no_locked_one",
    ),
    Mutation(
        "radix: an unlocked node does not become a victim again",
        RADIX,
        "            self.touch(path[0])\n",
        "            pass\n",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: evicts the newest",
        RADIX,
        "leaf = next(iter(self.lru))",
        "leaf = next(n for n in reversed(self.lru) if not n.children)",
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
        "del self.lru[leaf], leaf.parent.children[leaf.key]",
        "del self.lru[leaf]",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: evicts less than asked",
        RADIX,
        "missing = -(-num_tokens // self.page_size) * self.page_size",
        "missing = num_tokens // self.page_size * self.page_size",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: evicts whole nodes",
        RADIX,
        "kept = max(0, leaf.num_tokens - missing)",
        "kept = 0",
        CACHE_TESTS + "test_a_run_is_evicted_from_its_end_and_no_more_than_needed",
    ),
    Mutation(
        "radix: a handle of a trimmed prefix lives on",
        RADIX,
        "if sum(node.num_tokens for node in path) != handle.cached_len:",
        "if handle.cached_len and not path:",
        CACHE_TESTS + "test_a_handle_dies_with_any_page_of_its_prefix",
    ),
    Mutation(
        "radix: the slots of the caller are kept, not copied",
        RADIX,
        "fresh = np.array(slots[cached:length], np.int32)",
        "fresh = np.asarray(slots[cached:length], np.int32)",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: sizes not counted down by an eviction",
        RADIX,
        "        self.evictable_tokens -= missing\n",
        "",
        f"{WALK}[radix-4]",
    ),
    Mutation(
        "radix: an eviction walks the tree",
        RADIX,
        "            leaf = next(iter(self.lru))\n",
        "            leaf = list(self.lru)[0]\n            _ = [node for node in self.lru]\n",
        CACHE_TESTS
        + "test_pitfall_17_an_eviction_takes_as_many_steps_in_a_small_tree_as_in_a_large_one",
    ),
    # ---- the manager
    Mutation(
        "manager: the row is not rewritten",
        MANAGER,
        "if len(duplicates):",
        "if False:",
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
        "            req.cache_handle = None\n",
        "",
        MANAGER_TESTS + "test_a_request_is_released_once",
    ),
    Mutation(
        "manager: frees what the cache kept",
        MANAGER,
        "kept = max(old.cached_len, new.cached_len)",
        "kept = old.cached_len",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the tail of a finished request is lost",
        MANAGER,
        "self.free_slots(row[kept : self.allocated_len.pop(req, kept)])",
        "self.allocated_len.pop(req, kept)",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: an unlock is dropped at the end",
        MANAGER,
        "            self.prefix_cache.unlock(old)\n            req.cache_handle = None\n",
        "            req.cache_handle = None\n",
        f"{LIVES}[radix-4]",
    ),
    Mutation(
        "manager: the old lock is not given back",
        MANAGER,
        "            self.prefix_cache.unlock(old)\n            if len",
        "            if len",
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
        "0 if req.scores_prompt else -1",
        "0 if req.scores_prompt else None",
        MANAGER_TESTS + "test_a_full_hit_leaves_one_token",
    ),
    Mutation(
        "manager: tokens without K/V are cached",
        MANAGER,
        "known = min(req.cached_len, req.host_len)",
        "known = req.host_len",
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
        AUDIT,
        "!= 1):",
        "> 1):",
        MANAGER_TESTS + "test_pitfall_02_check_integrity_checks",
    ),
    Mutation(
        "manager: check_integrity does not look at rows",
        AUDIT,
        "    require(ours, ",
        "    require(True, ",
        MANAGER_TESTS + "test_pitfall_02_check_integrity_checks",
    ),
]
