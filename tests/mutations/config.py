"""Bugs in configurations and in the life of a request."""

from __future__ import annotations

from tests.mutations import Mutation

CORE = "minisgl.core"

MUTATIONS = [
    Mutation(
        "config: a bool passes for an integer",
        "minisgl.config.rules",
        "    if isinstance(value, bool):\n        return value\n",
        "",
        "tests/test_config.py::test_integer_fields",
    ),
    Mutation(
        "config: a bool passes for a size",
        "minisgl.config.rules",
        "if isinstance(size, bool) or not",
        "if not",
        "tests/test_config.py::test_check_positive",
    ),
    Mutation(
        "config: nan passes for a number",
        "minisgl.config.rules",
        ", Field(allow_inf_nan=False)",
        "",
        "tests/test_config.py::test_number_fields",
    ),
    Mutation(
        "config: text passes for a number",
        "minisgl.config.rules",
        "strict=True",
        "strict=False",
        "tests/test_config.py::test_integer_fields",
    ),
    Mutation(
        "config: what was checked keeps its first form",
        "minisgl.config.rules",
        "vars(self).update(vars(checked))",
        "vars(checked)",
        "tests/test_config.py::test_good_values_take_their_final_form",
    ),
    Mutation(
        "config: the new spelling of the rotary settings is ignored",
        "minisgl.config.model",
        "{**old, **new}.items()",
        "old.items()",
        "tests/test_config.py::test_both_spellings_are_one_model",
    ),
    Mutation(
        "config: YaRN does not lengthen the window",
        "minisgl.config.model",
        "window = max(window, round(",
        "window = min(window, round(",
        "tests/test_config.py::test_yarn_lengthens_the_window",
    ),
    Mutation(
        "config: a window counts although its flag is false",
        "minisgl.config.model",
        "family.sliding_window if flag is None else flag",
        "True",
        "tests/test_config.py::test_which_windows_count",
    ),
    Mutation(
        "config: an unknown architecture is read as a Llama",
        "minisgl.config.model",
        "if config.get(field) in ([family.architecture], family.model_type):",
        "if True:",
        "tests/test_config.py::test_families",
    ),
    Mutation(
        "config: texts longer than a sliding window are accepted",
        "minisgl.config.engine",
        "length > model.sliding_window",
        "length > window",
        "tests/test_config.py::test_a_window_is_full_attention_only_up_to_its_length",
    ),
    Mutation(
        "config: the stop tokens of generation_config.json are ignored",
        "minisgl.config.model",
        'config.get("eos_token_id") if eos is None else eos',
        'config.get("eos_token_id")',
        "tests/test_config.py::test_generation_config_wins",
    ),
    Mutation(
        "config: heads that cannot be grouped are accepted",
        "minisgl.config.model",
        "if self.num_qo_heads % self.num_kv_heads:",
        "if False:",
        "tests/test_config.py::test_wrong_files_are_refused_by_name",
    ),
    Mutation(
        "config: a window beyond the model's is accepted",
        "minisgl.config.engine",
        "if override is not None and override > window:",
        "if False:",
        "tests/test_config.py::test_resolve_refuses_what_does_not_fit",
    ),
    Mutation(
        "config: KV heads are not copied when there are fewer than ranks",
        "minisgl.config.model",
        "return max(1, self.num_kv_heads // tp_size)",
        "return self.num_kv_heads // tp_size",
        "tests/test_config.py::test_pitfall_09_kv_heads_fewer_than_ranks",
    ),
    Mutation(
        "config: a tied head is counted twice",
        "minisgl.config.model",
        "(1 if self.tie_word_embeddings else 2)",
        "2",
        "tests/test_config.py::test_known_models_have_their_published_size",
    ),
    Mutation(
        "core: a chunk inside the prompt yields a token",
        CORE,
        "if self.device_len >= self.prefill_len:",
        "if self.can_decode:",
        "tests/test_core.py::test_a_chunk_is_not_sampled",
    ),
    Mutation(
        "core: a pass too many is not noticed",
        CORE,
        "assert self.can_decode, lengths",
        "pass",
        "tests/test_core.py::test_no_pass_beyond_the_end",
    ),
    Mutation(
        "core: one token too many is decoded",
        CORE,
        "return self.device_len < self.max_device_len",
        "return self.device_len <= self.max_device_len",
        "tests/test_core.py::test_random_lives_against_lists",
    ),
    Mutation(
        "core: a pass that computes nothing can be scheduled",
        CORE,
        "self.cached_len < device_len <= self.max_device_len",
        "self.cached_len <= device_len <= self.max_device_len",
        "tests/test_core.py::test_schedule_asserts_the_invariant",
    ),
    Mutation(
        "core: a request that was not scheduled can advance",
        CORE,
        "self.cached_len < self.device_len <= self.max_device_len",
        "self.cached_len <= self.device_len <= self.max_device_len",
        "tests/test_core.py::test_advance_asserts_the_invariant",
    ),
    Mutation(
        "core: one stop string becomes a list of letters",
        CORE,
        "given = (value,) if isinstance(value, str) else as_tuple(value)",
        "given = tuple(value) if isinstance(value, str) else as_tuple(value)",
        "tests/test_core.py::test_stop_lists_take_one_form",
    ),
]
