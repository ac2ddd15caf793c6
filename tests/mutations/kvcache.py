"""Bugs in the pool, in the allocator of pages and in the tables."""

from __future__ import annotations

from tests.mutations import Mutation

POOL, TABLE = "minisgl.kvcache.pool", "minisgl.kvcache.page_table"
TESTS = "tests/test_kvcache.py::"

MUTATIONS = [
    Mutation(
        "kvcache: V is forgotten in the bytes of a token",
        POOL,
        "return 2 * model.num_layers",
        "return model.num_layers",
        TESTS + "test_bytes_per_token_by_hand",
    ),
    Mutation(
        "kvcache: each load takes new memory",
        POOL,
        "if len(self._copies[0]) < size:",
        "if True:",
        TESTS + "test_loads_copy_what_they_are_asked_for_and_take_new_memory_for_more_alone",
    ),
    Mutation(
        "kvcache: the memory of a freed pool stays",
        POOL,
        "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS",
        "mmap.MAP_SHARED | mmap.MAP_ANONYMOUS",
        TESTS + "test_a_freed_pool_gives_its_memory_back",
    ),
    Mutation(
        "kvcache: ranks share heads unevenly",
        POOL,
        " or (kv % tp_size and tp_size % kv)",
        "",
        TESTS + "test_ranks_that_cannot_share_the_heads",
    ),
    Mutation(
        "kvcache: no dummy page",
        POOL,
        "shape = (2, num_layers, num_pages + 1,",
        "shape = (2, num_layers, num_pages,",
        TESTS + "test_padding_may_write_the_dummy_slot_many_times",
    ),
    Mutation(
        "kvcache: K is stored as V",
        POOL,
        "values.index_copy_(0, out_loc, v)",
        "values.index_copy_(0, out_loc, k)",
        TESTS + "test_store_kv_writes_what_and_where_it_is_told",
    ),
    Mutation(
        "kvcache: K and V go to the first layer",
        POOL,
        "keys, values = self._slots[layer_id]",
        "keys, values = self._slots[0]",
        TESTS + "test_store_kv_writes_what_and_where_it_is_told",
    ),
    Mutation(
        "kvcache: a page is freed twice",
        TABLE,
        "if again.size:",
        "if False:",
        TESTS + "test_pitfall_03_double_free",
    ),
    Mutation(
        "kvcache: a page comes back twice in one call",
        TABLE,
        "if len(np.unique(returned)) < len(returned):",
        "if False:",
        TESTS + "test_a_refused_free_changes_nothing",
    ),
    Mutation(
        "kvcache: a page that never existed comes back",
        TABLE,
        "unknown = returned[(returned < 0) | (returned >= self.num_pages)]",
        "unknown = returned[returned >= self.num_pages]",
        TESTS + "test_a_refused_free_changes_nothing",
    ),
    Mutation(
        "kvcache: the dummy page is handed out",
        TABLE,
        "np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)",
        "np.arange(self.num_pages, 0, -1, dtype=np.int32)",
        TESTS + "TestRequests::runTest",
    ),
    Mutation(
        "kvcache: handed out pages change under their owner",
        TABLE,
        "[::-1].copy()",
        "[::-1]",
        TESTS + "test_what_was_handed_out_stays_as_it_is",
    ),
    Mutation(
        "kvcache: pages are taken although too few are free",
        TABLE,
        "if n > self.free_pages:",
        "if n > self.num_pages:",
        TESTS + "test_out_of_pages_names_both_numbers_and_takes_none",
    ),
    Mutation(
        "kvcache: the dummy row names slots behind the dummy page",
        TABLE,
        "np.arange(self.width, dtype=np.int32) % page_size",
        "np.arange(self.width, dtype=np.int32)",
        TESTS + "test_a_new_table_names_only_the_dummy_page",
    ),
    Mutation(
        "kvcache: a row is freed twice",
        TABLE,
        "if not 0 <= row < self.num_rows or row in self._free_rows:",
        "if not 0 <= row < self.num_rows:",
        TESTS + "test_rows",
    ),
    Mutation(
        "kvcache: places stay pending after a flush",
        TABLE,
        "self._pending.clear()",
        "pass",
        TESTS + "test_pending_places",
    ),
    Mutation(
        "kvcache: places of a second write are shifted",
        TABLE,
        "np.repeat(starts - before, lengths)",
        "np.repeat(starts, lengths)",
        TESTS + "test_pending_places",
    ),
    Mutation(
        "kvcache: a flush writes token ids into the page table",
        TABLE,
        "split[i + 2].to(flat.dtype)",
        "split[3 - i].to(flat.dtype)",
        TESTS + "test_of_two_writes_to_one_place_the_last_one_counts",
    ),
    Mutation(
        "kvcache: a write runs over the end of its row",
        TABLE,
        "if not (0 <= row < rows and 0 <= start <= stop <= width):",
        "if not 0 <= row < rows:",
        TESTS + "test_writes_outside_are_refused",
    ),
]
