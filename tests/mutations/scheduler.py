"""Bugs on purpose in the scheduler and in the offline interface."""

from __future__ import annotations

from tests.mutations import Mutation

PREFILL, DECODE = "minisgl.scheduler.prefill", "minisgl.scheduler.decode"
SCHEDULER, LLM = "minisgl.scheduler.scheduler", "minisgl.llm"
TESTS, LLM_TESTS = "tests/test_scheduler.py::", "tests/test_llm.py::"
PAGED = "tests/test_paged_equals_dense.py::test_a_crowd_with_one_prefix"

MUTATIONS = [
    Mutation(
        "decode_order_is_not_that_of_arrival",
        DECODE,
        "reqs = list(self.running.values())",
        "reqs = sorted(self.running.values(), key=lambda req: req.uid)",
        TESTS + "test_decode_batches_keep_the_order_of_arrival",
    ),
    Mutation(
        "decode_promise_rounds_down",
        DECODE,
        "last = -(-(req.max_device_len - 1) // page_size)",
        "last = (req.max_device_len - 1) // page_size",
        TESTS + "test_promised_pages_are_exactly_what_a_life_takes",
    ),
    Mutation(
        "decode_promise_counts_the_last_token",
        DECODE,
        "last = -(-(req.max_device_len - 1) // page_size)",
        "last = -(-req.max_device_len // page_size)",
        TESTS + "test_promised_pages_are_exactly_what_a_life_takes",
    ),
    Mutation(
        "decode_keeps_a_request_that_had_its_last_step",
        DECODE,
        "if req.can_decode:",
        "if True:",
        TESTS + "test_one_token_answers",
    ),
    Mutation(
        "prefill_counts_before_it_locks",
        PREFILL,
        "self.cache.lock(handle)\n        needed = pages_to_come(req, self.page_size)\n"
        "        if needed > self.pages_left():\n            self.cache.unlock(handle)\n",
        "needed, left = pages_to_come(req, self.page_size), self.pages_left()\n"
        "        self.cache.lock(handle)\n        if needed > left:\n"
        "            self.cache.unlock(handle)\n",
        TESTS + "test_a_matched_prefix_is_locked_before_pages_are_counted",
    ),
    Mutation(
        "prefill_leaves_a_lock_behind",
        PREFILL,
        "            self.cache.unlock(handle)\n",
        "",
        TESTS + "test_a_matched_prefix_is_locked_before_pages_are_counted",
    ),
    Mutation(
        "prefill_forgets_what_running_requests_need",
        PREFILL,
        "reserved = self.decode.pages_to_come(self.page_size)",
        "reserved = 0",
        TESTS + "test_running_requests_keep_what_they_may_still_need",
    ),
    Mutation(
        "prefill_forgets_what_the_half_done_prompt_needs",
        PREFILL,
        "reserved += pages_to_come(self.chunked, self.page_size)",
        "reserved += 0",
        TESTS + "test_a_half_done_prompt_keeps_its_pages",
    ),
    Mutation(
        "prefill_promises_the_same_pages_twice",
        PREFILL,
        "self.reserved += needed",
        "self.reserved += 0",
        TESTS + "test_pages_are_rounded_right",
    ),
    Mutation(
        "prefill_budget_is_for_each_request",
        PREFILL,
        "self.budget -= length",
        "self.budget -= 0",
        TESTS + "test_budget_is_shared_and_the_chunk_goes_first",
    ),
    Mutation(
        "prefill_newcomers_before_the_chunk",
        PREFILL,
        "    if self.chunked is not None:\n            adder.add_chunk(self.chunked)\n"
        "        while self.waiting and adder.try_admit(self.waiting[0]):\n"
        "            self.waiting.popleft()\n",
        "    while self.waiting and adder.try_admit(self.waiting[0]):\n"
        "            self.waiting.popleft()\n"
        "        if self.chunked is not None and adder.budget:\n"
        "            adder.add_chunk(self.chunked)\n",
        TESTS + "test_budget_is_shared_and_the_chunk_goes_first",
    ),
    Mutation(
        "prefill_small_ones_overtake",
        PREFILL,
        "while self.waiting and adder.try_admit(self.waiting[0]):\n"
        "            self.waiting.popleft()\n",
        "for req in list(self.waiting):\n"
        "            if adder.try_admit(req):\n"
        "                self.waiting.remove(req)\n",
        TESTS + "test_a_large_request_is_not_overtaken_for_ever",
    ),
    Mutation(
        "prefill_forgets_who_is_half_done",
        PREFILL,
        "self.chunked = last if last.is_chunked else None",
        "self.chunked = None",
        TESTS + "test_pitfall_07_chunks_of_1200_at_256",
    ),
    Mutation(
        "prefill_goes_on_with_an_aborted_prompt",
        PREFILL,
        "        if req is self.chunked:\n            self.chunked = None\n        elif",
        "        if",
        TESTS + "test_abort_in_mid_prefill_keeps_the_prefix",
    ),
    Mutation(
        "prefill_computes_a_common_beginning_many_times",
        PREFILL,
        "return long_enough and",
        "return False and",
        TESTS + "test_a_beginning_that_is_being_computed_is_waited_for",
    ),
    Mutation(
        "prefill_matched_slots_are_not_in_the_row",
        PREFILL,
        "self.tables.write(req.table_idx, 0, handle.slots())",
        "handle.slots()",
        TESTS + "test_a_second_request_finds_the_prefix",
    ),
    Mutation(
        "finish_gives_a_token_to_whoever_has_the_uid",
        SCHEDULER,
        "if self.reqs.get(req.uid) is not req:",
        "if req.uid not in self.reqs:",
        TESTS + "test_pitfall_03_a_new_request_with_an_old_uid_is_another_request",
    ),
    Mutation(
        "finish_gives_a_token_to_an_aborted_request",
        SCHEDULER,
        "if self.reqs.get(req.uid) is not req:",
        "if False:",
        TESTS + "test_pitfall_03_aborted_in_flight_is_released_once",
    ),
    Mutation(
        "finish_never_releases",
        SCHEDULER,
        "                if reason is not None:\n                    self.release(req)\n",
        "",
        TESTS + "test_one_request",
    ),
    Mutation(
        "release_keeps_the_pages",
        SCHEDULER,
        "self.cache.cache_req(req, finished=True)",
        "pass",
        TESTS + "test_one_request",
    ),
    Mutation(
        "release_keeps_the_row",
        SCHEDULER,
        "self.tables.free(req.table_idx)",
        "pass",
        TESTS + "test_more_requests_than_rows",
    ),
    Mutation(
        "release_leaves_it_in_the_decode_batch",
        SCHEDULER,
        "self.decode.remove(req)",
        "pass",
        TESTS + "test_end_token_stops_and_the_extra_token_is_dropped",
    ),
    Mutation(
        "abort_forgets_the_queue",
        SCHEDULER,
        "        self.prefill.remove(req)\n",
        "",
        TESTS + "test_abort_at_every_moment",
    ),
    Mutation(
        "abort_says_nothing",
        SCHEDULER,
        "    self.release(req)\n        reply = TokenReply(",
        "    self.release(req)\n        return\n        reply = TokenReply(",
        TESTS + "test_run_until_told_to_exit",
    ),
    Mutation(
        "launch_does_not_share_the_prefix",
        SCHEDULER,
        "self.cache.cache_req(req, finished=False)",
        "pass",
        TESTS + "test_a_beginning_that_is_being_computed_is_waited_for",
    ),
    Mutation(
        "overlap_waits_before_it_launches",
        SCHEDULER,
        "        launched = self.launch(batch) if batch is not None else None\n"
        "        before, self.in_flight = self.in_flight, launched\n"
        "        if before is not None:\n            self.finish(before)\n",
        "        if self.in_flight is not None:\n            self.finish(self.in_flight)\n"
        "        self.in_flight = self.launch(batch) if batch is not None else None\n",
        TESTS + "test_overlap_launches_before_it_waits",
    ),
    Mutation(
        "overlap_forgets_the_step_on_its_way",
        SCHEDULER,
        "return bool(self.reqs) or self.in_flight is not None",
        "return bool(self.reqs)",
        TESTS + "test_overlap_is_idle_only_when_nothing_flies",
    ),
    Mutation(
        "idle_checks_nothing",
        SCHEDULER,
        "        if idle:\n            self.check_integrity()\n",
        "",
        TESTS + "test_idle_checks_that_no_page_is_lost",
    ),
    Mutation(
        "busy_loop_waits_for_input",
        SCHEDULER,
        "idle = block and not self.has_work",
        "idle = block",
        TESTS + "test_idle_blocks_and_work_does_not",
    ),
    Mutation(
        "refused_in_silence",
        SCHEDULER,
        "            self.channel.send([error])\n",
        "",
        TESTS + "test_pitfall_11_longer_than_the_window",
    ),
    Mutation(
        "too_long_for_the_pool_waits_for_ever",
        SCHEDULER,
        "return min(self.max_seq_len, self.pool_tokens)",
        "return self.max_seq_len",
        TESTS + "test_pitfall_10_larger_than_the_pool",
    ),
    Mutation(
        "parameters_are_trusted",
        SCHEDULER,
        "return replace(params)",
        "return params",
        TESTS + "test_pitfall_12_bad_requests_harm_nobody",
    ),
    Mutation(
        "vocabulary_is_off_by_one",
        SCHEDULER,
        "if low < 0 or high >= limits.vocab_size:",
        "if low < 0 or high > limits.vocab_size:",
        TESTS + "test_prompts_are_refused_with_reasons",
    ),
    Mutation(
        "clamped_in_silence",
        SCHEDULER,
        "reply.notice = self.notices.pop(req.uid, None)",
        "self.notices.pop(req.uid, None)",
        TESTS + "test_pitfall_10_larger_than_the_pool",
    ),
    Mutation(
        "answers_are_one_token_too_long",
        SCHEDULER,
        'return "length" if len(req.input_ids) >= req.max_device_len else None',
        'return "length" if len(req.input_ids) > req.max_device_len else None',
        TESTS + "test_finish_reasons",
    ),
    Mutation(
        "llm_does_not_abort_at_a_stop_string",
        LLM,
        "self.channel.put(AbortMsg(reply.uid))",
        "pass",
        LLM_TESTS + "test_stop_strings_end_the_text_before_them",
    ),
    Mutation(
        "llm_leaves_requests_behind",
        LLM,
        "self.scheduler.abort(uid)",
        "pass",
        LLM_TESTS + "test_a_failure_leaves_nothing_behind",
    ),
    Mutation(
        "llm_stop_token_is_text",
        LLM,
        'ended = reply.finish_reason == "stop"',
        "ended = False",
        LLM_TESTS + "test_stop_tokens_end_the_answer_and_are_not_text",
    ),
    Mutation(
        "llm_checks_while_it_runs",
        LLM,
        "check_prompt(ids, self.scheduler.limits)",
        "pass",
        LLM_TESTS + "test_invalid_prompts_are_refused_before_anything_runs",
    ),
]
