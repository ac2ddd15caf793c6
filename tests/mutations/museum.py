"""The museum's bugs, as far as no other file has them: chapters 14a to 14m plant the same."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "museum: a row names its freed duplicates",
        "minisgl.kvcache.cache_manager",
        "if len(duplicates):",
        "if False:",
        "tests/test_scheduler.py::test_pitfall_01_rows_follow_their_prefix",
    ),
    Mutation(
        "museum: a decode batch is in the order of a set",
        "minisgl.scheduler.phases",
        "list(self.running.values())",
        "list(set(self.running.values()))",
        "tests/test_tensor_parallel.py::test_pitfall_05_ranks_build_the_same_batches",
    ),
    Mutation(
        "museum: a staging buffer is written under its copy",
        "minisgl.attention.staging",
        "if event is not None:",
        "if False:",
        "tests/test_attention.py::test_pitfall_04_an_upload_waits_for_the_copy_that_reads_its_buffer",
    ),
    Mutation(
        "museum: a prompt is published before it is computed",
        "minisgl.kvcache.cache_manager",
        "        self.tables.write_tokens(req.table_idx, 0, req.input_ids)\n",
        "        self.tables.write_tokens(req.table_idx, 0, req.input_ids)\n"
        "        lengths = req.cached_len, req.device_len\n"
        "        req.cached_len = req.device_len = req.prompt_len\n"
        "        self.allocate_paged([req])\n"
        "        self.cache_req(req, finished=False)\n"
        "        req.cached_len, req.device_len = lengths\n",
        "tests/test_scheduler.py::test_abort_in_mid_prefill_keeps_the_prefix",
    ),
    Mutation(
        "museum: padding writes the last real page",
        "minisgl.engine.engine",
        "pool.dummy_page, torch",
        "pool.dummy_page - 1, torch",
        "tests/test_engine.py::test_only_real_rows_are_sampled",
    ),
    Mutation(
        "museum: a neighbour without a seed takes yours away",
        "minisgl.engine.sampler",
        "np.where(seeded, own, engine_seeds(self.seed, uids))",
        "own if seeded.all() else engine_seeds(self.seed, uids)",
        "tests/test_sampler.py::test_pitfall_15_a_draw_depends_on_its_request_alone",
    ),
    Mutation(
        "museum: a locked node stays in the order of eviction",
        "minisgl.kvcache.radix_cache",
        "del self.lru[node]\n",
        "pass\n",
        "tests/test_prefix_cache.py::test_pitfall_06_eviction_takes_whole_pages_and_no_locked_one",
    ),
    Mutation(
        "museum: a replay writes other memory than its graph reads",
        "minisgl.engine.graph",
        "        self.ring.send([packed], self.memory)\n",
        "        self.memory = self.memory.clone()\n"
        "        self.ring.send([packed], self.memory)\n",
        "tests/test_graph.py::test_replay_reads_new_values_and_keeps_its_address",
    ),
    Mutation(
        "museum: an error behind a reply wakes nobody",
        "minisgl.server.frontend",
        "if not self.waiting and self.error is None:",
        "if not self.waiting:",
        "tests/test_server.py::test_an_error_behind_a_reply_is_not_lost",
    ),
    Mutation(
        "museum: a deferred draw survives its request",
        "minisgl.engine.engine",
        "self.deferral.reset()",
        "pass",
        "tests/test_interrupts.py::test_a_deferred_draw_dies_with_its_requests",
    ),
]
