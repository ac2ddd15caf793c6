"""Bugs on purpose in the sampler and the tokenizer."""

from __future__ import annotations

from tests.mutations import Mutation

SAMPLER, STAGING, TOKENIZER = (
    "minisgl.engine.sampler",
    "minisgl.engine.staging",
    "minisgl.tokenizer",
)
TESTS, TEXT = "tests/test_sampler.py::", "tests/test_tokenizer.py::"

MUTATIONS = [
    Mutation(
        "sampler_key_depends_on_the_row",
        SAMPLER,
        "positions = np.array([req.device_len for req in chosen], np.int64)",
        "positions = np.array(rows, np.int64)",
        TESTS + "test_pitfall_15_a_draw_depends_on_its_request_alone",
    ),
    Mutation(
        "sampler_counts_what_the_host_knows",
        SAMPLER,
        "positions = np.array([req.device_len for req in chosen], np.int64)",
        "positions = np.array([req.host_len for req in chosen], np.int64)",
        TESTS + "test_the_position_counts_not_what_the_host_knows",
    ),
    Mutation(
        "sampler_unseeded_requests_share_a_seed",
        SAMPLER,
        "mix64(engine + uids)",
        "mix64(engine + 0 * uids)",
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
        "staging_does_not_wait",
        STAGING,
        "event.synchronize()",
        "pass",
        TESTS + "test_pitfall_04_staging_waits_for_the_copy_that_reads_it",
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
