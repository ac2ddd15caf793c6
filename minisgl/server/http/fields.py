"""What becomes of the fields that other servers know and this one does not honour.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.msgpack import encode

from minisgl.server.http.tools import sendable

REFUSED = """
audio chat_template custom_logit_processor custom_params documents ec_transfer_params
functions guided_decoding guided_whitespace_pattern include_stop_str_in_output input_ids
kv_transfer_params logprob_token_ids lora_path moderation no_stop_trim prompt_embeds
repetition_detection return_cached_tokens_details return_flat_raw_output_top_logprobs
return_hidden_states return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext
return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask
return_spec_tokens_details return_token_ids return_tokens_as_token_ids sampling_logprobs_mode
sampling_params session_params stop_regex suffix task thinking use_beam_search vllm_xargs watermark
watermarking web_search_options
"""
PASSED = """
bootstrap_host bootstrap_port bootstrap_room custom_labels data_parallel_rank disagg_prefill_dp_rank
extra_key guided_decoding_backend images_config max_dynamic_patch media_io_kwargs metadata
min_dynamic_patch mm_processor_kwargs ngram_corpus_id prediction priority prompt_cache_key
prompt_cache_options prompt_cache_retention request_id return_flat_raw_top_logprobs_b64
return_mm_kwargs return_token_offsets rid routed_dp_rank routed_experts_prompt_start
routed_experts_start_len safety_identifier service_tier session_id spaces_between_special_tokens
store stream_interval stream_reasoning truncation_side use_audio_in_video video_config
"""
ALWAYS_REFUSED = "max_new_tokens prompt_logprobs thinking_token_budget truncate_prompt_tokens"
HARMLESS: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(REFUSED.split(), (False, 0, "", [], {})),  # each asks for nothing
    **dict.fromkeys(PASSED.split()),
    **dict.fromkeys(ALWAYS_REFUSED.split(), ()),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "min_new_tokens": (0,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "verbosity": ("medium",),
}

RESERVED = """
chat_template continue_final_message conversation conversations documents max_length messages
padding return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize
tokenizer_kwargs tools truncation
"""  # arguments of `apply_chat_template` in transformers


def template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """A template may read what it likes; what renders it has arguments of its own."""
    if reserved := given.keys() & set(RESERVED.split()):
        raise ValueError(f"{min(reserved)!r:.80} is no variable of a chat template")
    if (size := len(encode(sendable(given)))) > 4096:
        raise ValueError(f"at most 4096 bytes, got {size}")
    return given
