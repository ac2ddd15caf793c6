"""Bugs on purpose in the sampler and the tokenizer."""

from __future__ import annotations

from tests.mutations import Mutation

SAMPLER, TOKENIZER = "minisgl.engine.sampler", "minisgl.tokenizer"
KERNEL = "minisgl.kernels.sample"
TESTS, TEXT = "tests/test_sampler.py::", "tests/test_tokenizer.py::"

MUTATIONS = [
    Mutation(
        "sampler_key_depends_on_the_row",
        SAMPLER,
        "positions = np.array([req.device_len for req in reqs], np.int64)",
        "positions = np.arange(len(reqs))",
        TESTS + "test_pitfall_15_a_draw_depends_on_its_request_alone",
    ),
    Mutation(
        "sampler_takes_a_batch_of_the_same_size_for_the_same",
        SAMPLER,
        "if self.cached.reqs != same:",
        "if len(self.cached.reqs) != len(same):",
        TESTS + "test_what_is_known_of_a_batch_is_used_for_that_batch_alone",
    ),
    Mutation(
        "sampler_counts_what_the_host_knows",
        SAMPLER,
        "positions = np.array([req.device_len for req in reqs], np.int64)",
        "positions = np.array([req.host_len for req in reqs], np.int64)",
        TESTS + "test_the_position_counts_not_what_the_host_knows",
    ),
    Mutation(
        "sampler_unseeded_requests_share_a_seed",
        SAMPLER,
        "mix64(engine + uids.astype(np.uint64))",
        "mix64(engine + np.zeros(len(uids), np.uint64))",
        TESTS + "test_unseeded_requests_get_seeds_of_their_own",
    ),
    Mutation(
        "sampler_top_p_drops_the_token_that_reaches_it",
        SAMPLER,
        "(up_to - weights).double() < limit",
        "up_to.double() < limit",
        TESTS + "test_kept_is_the_definition",
    ),
    Mutation(
        "sampler_top_k_keeps_one_more",
        SAMPLER,
        "first_k = rank < top_k[:, None]",
        "first_k = rank <= top_k[:, None]",
        TESTS + "test_kept_is_the_definition",
    ),
    Mutation(
        "sampler_minus_zero_is_less_than_zero",
        SAMPLER,
        "neginf=-torch.inf) + 0.0",
        "neginf=-torch.inf)",
        TESTS + "test_top_candidates_order_ties_and_special_values",
    ),
    Mutation(
        "sampler_noise_may_be_infinite",
        SAMPLER,
        ".clamp_(max=1 - 2.0**-24)",
        "",
        TESTS + "test_noise_extremes_are_finite",
    ),
    Mutation(
        "sampler_shift_copies_the_sign",
        SAMPLER,
        "x ^= (x >> 15) & 0x1FFFF",
        "x ^= x >> 15",
        TESTS + "test_bits_are_those_of_the_definition",
    ),
    Mutation(
        "sampler_logprobs_of_other_rows",
        SAMPLER,
        "chosen = raw.gather(-1, next_ids.index_select(0, rows)[:, None]).squeeze(-1)",
        "chosen = raw.gather(-1, next_ids[: len(rows), None]).squeeze(-1)",
        TESTS + "test_logprobs_are_of_the_raw_distribution",
    ),
    Mutation(
        "sampler_greedy_rows_get_noise",
        SAMPLER,
        "        return 0.0\n",
        "        return 1.0\n",
        TESTS + "test_greedy_prepares_nothing_and_breaks_ties_by_id",
    ),
    Mutation(
        "sampler_rows_take_the_widest_top_k",
        SAMPLER,
        "arrays += [args.width[rows], args.top_p[rows]]",
        "arrays += [np.full(len(rows), width), args.top_p[rows]]",
        TESTS + "test_pitfall_15_a_draw_depends_on_its_request_alone",
    ),
    Mutation(
        "kernel_shift_copies_the_sign",
        KERNEL,
        "x = (x ^ (x >> 15)) * 0x846CA68B",
        "x = (x ^ (x.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)) * 0x846CA68B",
        TESTS + "test_the_kernels_bits_are_those_of_the_definition",
    ),
    Mutation(
        "kernel_takes_the_key_of_another_row",
        KERNEL,
        "tl.load(keys_ptr + row), tl.load(keys_ptr + key_stride + row)",
        "tl.load(keys_ptr + row), tl.load(keys_ptr + key_stride)",
        TESTS + "test_a_seed_reproduces_in_any_batch_and_at_any_row",
    ),
    Mutation(
        "kernel_ties_go_to_the_larger_id_of_a_slice",
        KERNEL,
        "better = key > best",
        "better = key >= best",
        TESTS + "test_ties_go_to_the_smaller_id_in_a_slice_and_across_slices",
    ),
    Mutation(
        "kernel_ties_go_to_the_larger_slice",
        KERNEL,
        "tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0).to(tl.int64)",
        "tl.max(tl.where(best == top, ids, 0), 0).to(tl.int64)",
        TESTS + "test_ties_go_to_the_smaller_id_in_a_slice_and_across_slices",
    ),
    Mutation(
        "kernel_gives_up_tokens_that_could_win",
        KERNEL,
        "return u <= tl.exp2(short * (1.4426950408889634 / temperature)) * 1.001",
        "return u <= tl.exp2(short * (1.4426950408889634 / temperature)) * 0.5",
        TESTS + "test_sample_logits_is_draw",
    ),
    Mutation(
        "kernel_forgets_nan",
        KERNEL,
        "return tl.where(x != x, 0x7FFFFFFF, key)",
        "return key",
        TESTS + "test_kernels_take_nan_for_the_largest_and_harm_nobody",
    ),
    Mutation(
        "filter_threshold_is_one_key_too_high",
        KERNEL,
        "return float_key(shifted_float(floor, SHIFT)), last_id",
        "return float_key(shifted_float(floor + 1, SHIFT)), last_id",
        TESTS + "test_the_filter_keeps_what_kept_keeps",
    ),
    Mutation(
        "filter_admits_one_tie_too_many",
        KERNEL,
        "return tl.maximum(low, 1)",
        "return tl.maximum(low + 1, 1)",
        TESTS + "test_the_filter_keeps_what_kept_keeps",
    ),
    Mutation(
        "filter_forgets_the_weight_of_ties",
        KERNEL,
        "limit = (above + room.to(tl.int64) * each).to(tl.float64) * top_p",
        "limit = above.to(tl.float64) * top_p",
        TESTS + "test_the_filter_keeps_what_kept_keeps",
    ),
    Mutation(
        "filter_trusts_groups_too_far",
        KERNEL,
        "high = bound_of_groups(maxima, mass, limit, low, tl.max(maxima, 0))",
        "high = low",
        TESTS + "test_groups_whose_weight_is_not_in_their_largest_token",
    ),
    Mutation(
        "chat_gets_a_second_bos",
        TOKENIZER,
        "self.render_chat(messages), add_special_tokens=False",
        "self.render_chat(messages), add_special_tokens=True",
        TEXT + "test_pitfall_13_a_chat_gets_one_bos",
    ),
    Mutation(
        "stop_string_is_not_held_back",
        TOKENIZER,
        "keep = max((overlap(text, s) for s in self.stop), default=0)",
        "keep = 0",
        TEXT + "test_stop_strings_cut_where_they_begin",
    ),
    Mutation(
        "half_a_character_is_sent",
        TOKENIZER,
        "held = 0 if len(self.pending) > MAX_PENDING else min(open_bytes, 3)",
        "held = 0",
        TEXT + "test_characters_come_whole",
    ),
]
