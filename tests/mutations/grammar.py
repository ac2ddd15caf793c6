"""Bugs on purpose in structured output."""

from __future__ import annotations

from tests.mutations import Mutation

GRAMMAR, ENGINE = "minisgl.scheduler.grammar", "minisgl.engine.engine"
FORMS = "minisgl.scheduler.forms"
TESTS = "tests/test_structured_output.py::"
PATH = "tests/test_request_path.py"
DRAW = TESTS + "test_a_draw_waits_for_its_masks_and_the_next_step_waits_for_the_draw"

MUTATIONS = [
    Mutation(
        "grammar_masks_are_filled_at_the_launch",
        GRAMMAR,
        "    self.waiting = DeferredOutput(masked)\n",
        "    return masked()\n",
        DRAW,
    ),
    Mutation(
        "grammar_a_sampled_step_stays",
        GRAMMAR,
        "            self.waiting = None\n            self.fill_masks(fi)\n",
        "            self.fill_masks(fi)\n",
        DRAW,
    ),
    Mutation(
        "grammar_a_step_does_not_wait_for_the_draw_before",
        ENGINE,
        "if self.deferral is not None and self.deferral.waiting:",
        "if False:",
        DRAW,
    ),
    Mutation(
        "grammar_a_draw_waits_for_the_next_step",
        "minisgl.scheduler.scheduler",
        "self.engine.sample_deferred()  # of step",
        "pass  # of step",
        TESTS + "test_the_draw_of_an_aborted_request_is_no_part_of_the_next_prompt",
    ),
    Mutation(
        "grammar_matcher_reads_the_answer_again",
        GRAMMAR,
        "self.seen = len(output_ids)",
        "pass",
        TESTS + "test_a_matcher_is_a_function_of_the_answer",
    ),
    Mutation(
        "grammar_errors_are_not_looked_at",
        FORMS,
        "if matcher.is_error():",
        "if False:",
        TESTS + "test_what_cannot_be_compiled_is_refused_with_the_reason",
    ),
    Mutation(
        "grammar_that_no_text_matches_is_let_in",
        FORMS,
        "matcher.compute_bitmask()",
        "pass",
        TESTS + "test_what_cannot_be_compiled_is_refused_with_the_reason",
    ),
    Mutation(
        "grammar_knows_the_tokenizer_only",
        FORMS,
        "size = max(vocab_size, ",
        "size = max(",
        TESTS + "test_tokens_that_the_tokenizer_lacks_are_never_allowed",
    ),
    Mutation(
        "grammar_failures_end_as_if_all_were_well",
        "minisgl.scheduler.requests",
        "if req.matcher is not None and req.matcher.error:",
        "if False:",
        TESTS + "test_a_grammar_that_fails_on_the_way_ends_its_request_and_says_why",
    ),
    Mutation(
        "grammar_forgets_the_other_wishes_of_a_request",
        GRAMMAR,
        "if not isinstance(req.logits_params, LogitsParams):",
        "if True:",
        TESTS + "test_a_request_keeps_what_it_asked_of_its_logits",
    ),
    Mutation(
        "grammar_is_compiled_by_the_scheduler",
        GRAMMAR,
        "if self.held[uid][1].done()]",
        "]",
        TESTS + "test_a_slow_grammar_delays_its_own_request_alone",
    ),
    Mutation(
        "plain_requests_meet_the_logits_processors",
        "minisgl.engine.sampler",
        "and any(req.logits_params for req in reqs)",
        "",
        PATH,
    ),
    Mutation(
        "plain_requests_meet_retraction",
        "minisgl.scheduler.scheduler",
        " and (rows > pages or others)",
        "",
        PATH,
    ),
    Mutation(
        "grammar_queue_is_passed_by",
        "minisgl.server.workers.scheduler_process",
        "(waits or any(each.is_constrained for each in params))",
        "waits",
        TESTS + "test_requests_wait_in_their_queue_and_come_in_order",
    ),
    Mutation(
        "grammar_queue_is_asked_about_new_messages_alone",
        "minisgl.server.workers.scheduler_process",
        "(waits or any(each.is_constrained for each in params))",
        "any(each.is_constrained for each in params)",
        TESTS + "test_requests_wait_in_their_queue_and_come_in_order",
    ),
    Mutation(
        "grammar_of_one_who_left_is_asked_for_all_the_same",
        GRAMMAR,
        "self.held.pop(msg.uid, None)",
        "pass",
        TESTS + "test_requests_wait_in_their_queue_and_come_in_order",
    ),
    Mutation(
        "grammar_tokenizer_is_loaded_before_all_else",
        GRAMMAR,
        "self.tokenizer = self.pool.submit(load)\n",
        "self.tokenizer = self.pool.submit(load)\n        self.tokenizer.result()\n",
        TESTS + "test_free_answers_do_not_wait_for_the_tokenizer",
    ),
    Mutation(
        "grammar_rows_have_any_number_of_items",
        "minisgl.scheduler.forms",
        "max_items_in_row=400, ",
        "",
        "tests/test_structured_output.py::test_a_token_of_an_ambiguous_grammar_has_bounded_work",
    ),
    Mutation(
        "grammar_of_a_choice_has_an_item_for_each_text",
        "minisgl.scheduler.forms",
        '"start: ONE\\nONE" + grammar_from("choice", text).removeprefix("start")',
        'grammar_from("choice", text)',
        "tests/test_structured_output.py::test_a_choice_is_one_item",
    ),
    Mutation(
        "grammar_terminals_may_have_complements",
        "minisgl.scheduler.forms",
        'if "&" in text or "~" in text:',
        'if "&" in text and "~" in text:',
        TESTS + "test_terminals_without_complements_and_intersections",
    ),
    Mutation(
        "grammar_of_one_answer_is_that_of_another",
        GRAMMAR,
        "self.jobs.pop(req.uid, None) or self.compile(req.sampling_params)",
        "self.jobs.setdefault(0, self.compile(req.sampling_params))",
        TESTS + "test_an_answer_leaves_the_automaton_of_others_alone",
    ),
    Mutation(
        "grammar_is_compiled_twice_by_rank_0",
        GRAMMAR,
        "job = self.jobs.get(uid) or self.compile(params)",
        "job = self.compile(params)",
        TESTS + "test_a_rank_compiles_what_is_announced_once",
    ),
    Mutation(
        "grammars_have_no_shares",
        GRAMMAR,
        "if not self.shares.take(client, size):",
        "if not self.shares.take(client, 0):",
        TESTS + "test_clients_share_the_compiled_grammars",
    ),
    Mutation(
        "grammars_of_many_pass_those_of_few",
        GRAMMAR,
        "while line and not (short and held[client] > self.shares.limit // 8):",
        "while line:",
        TESTS + "test_clients_share_the_compiled_grammars",
    ),
    Mutation(
        "grammar_is_forgotten_before_it_is_gone",
        GRAMMAR,
        "self.ll, self.field, self.job = start, field, job",
        "self.ll, self.field, self.job = start, field, None",
        TESTS + "test_a_grammar_counts_until_it_is_gone",
    ),
    Mutation(
        "grammar_of_a_passed_request_is_dropped",
        GRAMMAR,
        "self.ready = [job for _, job in done]",
        "self.ready = []",
        TESTS + "test_a_grammar_counts_until_it_is_gone",
    ),
    Mutation(
        "grammar_multiples_may_have_any_common_multiple",
        FORMS,
        "if max(sum(numbers), math.lcm(*numbers)) > MAX_MULTIPLES:",
        "if sum(numbers) > MAX_MULTIPLES:",
        TESTS + "test_a_grammar_has_bounded_memory",
    ),
    Mutation(
        "grammar_takes_any_memory",
        "minisgl.scheduler.side_process",
        "if (taken := allocated() - before) > most:",
        "if (taken := 0) > most:",
        TESTS + "test_a_grammar_has_bounded_memory",
    ),
]
