"""Bugs on purpose in speculative decoding."""

from __future__ import annotations

from tests.mutations import Mutation

SPECULATIVE = "minisgl.scheduler.speculative"
TESTS = "tests/test_speculative.py::"
EVENTS = TESTS + "TestSpeculativeEvents"
SAME = TESTS + "test_the_same_answers_as_without"
SAVE = TESTS + "test_right_drafts_save_steps_and_wrong_ones_cost_none"

MUTATIONS = [
    Mutation(
        "speculative_keeps_wrong_drafts",
        SPECULATIVE,
        "            return count\n",
        "            pass\n",
        SAVE,
    ),
    Mutation(
        "speculative_takes_rows_as_they_come",
        SPECULATIVE,
        "np.argsort(fi.write_positions).tolist()",
        "range(len(fi.sampled))",
        SAVE,
    ),
    Mutation(
        "speculative_forgets_to_write_drafts",
        SPECULATIVE,
        "self.engine.tables.write_tokens(req.table_idx, req.device_len, tokens)",
        "pass",
        SAVE,
    ),
    Mutation(
        "speculative_attention_ends_at_the_first_draft",
        SPECULATIVE,
        "meta.seq_lens[last]",
        "meta.seq_lens[first]",
        TESTS + "test_rows_of_a_request_are_joined_to_a_piece_of_its_text",
    ),
    Mutation(
        "speculative_does_not_wait_for_a_step_with_drafts",
        SPECULATIVE,
        "        self.finish_in_flight()  # until then",
        "        pass  # until then",
        TESTS + "test_the_step_behind_one_with_drafts_knows_where_its_requests_stand",
    ),
    Mutation(
        "speculative_guesses_from_a_text_that_lacks_its_last_token",
        SPECULATIVE,
        "    if drafts and self.in_flight is not None:",
        "    if False:",
        TESTS + "test_a_guess_that_a_token_too_early_allowed_is_made_again",
    ),
    Mutation(
        "speculative_always_waits",
        SPECULATIVE,
        "    batch = Scheduler.decode_step(self)",
        "    self.finish_in_flight()\n        batch = Scheduler.decode_step(self)",
        TESTS + "test_the_overlapped_loop_waits_only_for_steps_with_drafts",
    ),
    Mutation(
        "speculative_guesses_behind_the_last_token",
        SPECULATIVE,
        "min(most, req.max_device_len - 1 - req.device_len)",
        "most",
        TESTS + "test_no_draft_lies_behind_the_last_token_that_is_wanted",
    ),
    Mutation(
        "speculative_guesses_for_constrained_requests",
        SPECULATIVE,
        " if req.matcher is None",
        "",
        SAME,
    ),
    Mutation(
        "speculative_takes_pages_that_are_not_there",
        SPECULATIVE,
        "any(map(len, found)) and self.fits(drafts)",
        "any(map(len, found))",
        TESTS + "test_where_pages_are_short_drafts_are_left_out_and_nobody_is_retracted",
    ),
    Mutation(
        "speculative_forgets_a_half_done_prompt",
        SPECULATIVE,
        "needed = 0 if chunked is None else future_pages(chunked, size, 0)",
        "needed = 0",
        TESTS + "test_the_rest_of_a_half_done_prompt_keeps_its_pages",
    ),
    Mutation(
        "speculative_rows_share_a_position",
        SPECULATIVE,
        "req.cached_len + ahead, req.device_len + ahead",
        "req.cached_len + ahead, req.device_len",
        TESTS + "test_rows_are_the_request_at_later_positions",
    ),
    Mutation(
        "speculative_leaves_accepted_tokens_behind",
        SPECULATIVE,
        "for _ in range(accepted):",
        "for _ in range(0):",
        SAVE,
    ),
    Mutation(
        "speculative_answers_the_aborted",
        SPECULATIVE,
        "if self.reqs.get(req.uid) is req:",
        "if True:",
        TESTS + "test_abort_at_every_moment",
    ),
    Mutation(
        "speculative_large_batches",
        SPECULATIVE,
        "min(self.num_speculative_tokens, self.max_rows // batch.size - 1)",
        "self.num_speculative_tokens",
        TESTS + "test_drafts_are_shared_by_a_batch_and_end_where_it_is_large",
    ),
    Mutation(
        "speculative_charges_no_accepted_token",
        SPECULATIVE,
        "Batch([req] * accepted, Phase.DECODE)",
        "Batch([], Phase.DECODE)",
        TESTS + "test_the_fair_queue_charges_tokens_and_not_guesses",
    ),
    Mutation(
        "speculative_remembers_for_ever",
        SPECULATIVE,
        "    self.proposer.release(req)",
        "    pass",
        TESTS + "test_abort_at_every_moment",
    ),
    Mutation(
        "speculative_never_loses_heart",
        SPECULATIVE,
        "0 if accepted else self.misses.get(req, 0) + 1",
        "0",
        TESTS + "test_each_miss_wants_a_longer_match_and_a_hit_starts_anew",
    ),
    Mutation(
        "speculative_takes_the_first_match",
        SPECULATIVE,
        "ids[ends[-1] + 1 :]",
        "ids[ends[0] + 1 :]",
        TESTS + "test_look_up",
    ),
    Mutation(
        "speculative_records_too_few_rows",
        "minisgl.engine.runners",
        "max(config.max_running_req, 1 + config.num_speculative_tokens)",
        "config.max_running_req",
        TESTS + "test_one_running_request_may_have_drafts",
    ),
    Mutation(
        "speculative_runs_eagerly_beyond_the_recorded_sizes",
        "minisgl.engine.runners",
        "min(MAX_DRAFT_ROWS, captured)",
        "MAX_DRAFT_ROWS",
        TESTS + "test_limits_of_drafts",
    ),
    Mutation(
        "retract_takes_pages_of_rejected_drafts_for_missing",
        "minisgl.scheduler.retraction",
        "cache.allocated_len[req] < req.device_len",
        "req.cached_len % size == 0",
        TESTS + "test_pages_of_rejected_drafts_are_used_by_the_next_tokens",
    ),
    Mutation(
        "speculative_lets_drafts_race",
        "minisgl.engine.runners",
        "backend_pair(config.attention_backend)[1] in FUSED",
        "backend_pair(config.attention_backend)[1] not in FUSED",
        TESTS + "test_steps_with_drafts_store_first",
    ),
    Mutation(
        "speculative_scratch_for_running_requests_only",
        "minisgl.attention.fused_backend",
        "max(tables.num_rows, 32) + 1",
        "tables.num_rows + 1",
        "tests/test_fused.py::test_scratch_suits_many_drafts_of_few_requests",
    ),
]
