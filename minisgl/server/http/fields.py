"""One table of the fields that clients send, their meaning here, and the rejected ones.

Generated from notebooks/12bb_fields.ipynb: edit there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.msgpack import encode
from pydantic import ValidationError

from minisgl.server.http.bodies import brief
from minisgl.server.http.errors import ApiError
from minisgl.server.http.tools import ResponseFormat, sendable

REFUSED = """
access_programs audio background_options begin_suppress_tokens chat_template constraints container
context context_management conversation custom_logit_processor custom_params custom_token_bans
diversity_penalty documents dola_layers dry_multiplier dynatemp_range early_stopping
ec_transfer_params enable_response_messages encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
exponential_decay_length_penalty extra_body fallbacks force_words_ids functions generation_config
grammar_lazy grammar_triggers guided_decoding guided_whitespace_pattern image image_data images
include_stop_str_in_output input_extra input_ids input_prefix input_suffix kv_transfer_params
logprob_token_ids lora lora_path mcp_servers mirostat mirostat_mode moderation multimodal_data
n_indent n_probs negative_prompt no_repeat_ngram_size no_stop_trim penalty_alpha post_sampling_probs
preserved_tokens previous_input_messages prompt_embeds raw renormalize_logits repetition_detection
response_fields return_cached_tokens_details return_flat_raw_output_top_logprobs
return_hidden_states return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext
return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask
return_spec_tokens_details return_token_ids return_tokens return_tokens_as_token_ids sampler_order
sampler_priority sampler_seq samplers sampling_logprobs_mode sampling_params sequence_bias
session_params smoothing_factor stop_regex suffix system task template thinking_forced_open
token_healing top_a use_beam_search vllm_xargs watermark watermarking watermarking_config
web_search_options xtc_probability
"""

PASSED = """
bootstrap_host bootstrap_port bootstrap_room bos_token_id cache_implementation cache_prompt
chat_format custom_labels data_parallel_rank disagg_prefill_dp_rank dry_allowed_length dry_base
dry_penalty_last_n dry_sequence_breakers dynatemp_exponent extra_headers extra_query
guided_decoding_backend id_slot images_config keep_alive low_memory low_vram main_gpu
max_dynamic_patch media_io_kwargs metadata min_dynamic_patch mirostat_eta mirostat_tau
mm_processor_kwargs n_cache_reuse n_ctx n_discard n_keep ngram_corpus_id num_batch num_ctx num_gpu
num_keep num_thread numa pad_token_id prediction priority prompt_cache_key prompt_cache_options
prompt_cache_retention prompt_lookup_num_tokens provider remove_invalid_values request_id
return_flat_raw_top_logprobs_b64 return_mm_kwargs return_progress return_token_offsets rid
routed_dp_rank routed_experts_prompt_start routed_experts_start_len safety_identifier service_tier
session_id slot_id spaces_between_special_tokens store stream_interval stream_reasoning
timings_per_token transforms truncation_side use_audio_in_video use_cache use_mlock use_mmap
video_config xtc_threshold
"""

ALWAYS_REFUSED = """
forced_bos_token_id forced_eos_token_id max_length prompt_logprobs thinking_token_budget
truncate_prompt_tokens
"""
HARMLESS: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(REFUSED.split(), (False, 0, "", [], {})),  # each asks for nothing
    **dict.fromkeys(PASSED.split()),
    **dict.fromkeys(ALWAYS_REFUSED.split(), ()),
    **dict.fromkeys(("cfg_scale", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("length_penalty", "num_beam_groups", "num_beams", "tfs_z"), (1,)),
    **dict.fromkeys(("add_bos_token", "parse_tool_calls", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("typical", "typical_p"), (1, 0)),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "min_keep": (0, 1),
    "min_length": (0,),
    "modalities": (["text"],),
    "t_max_predict_ms": (0, -1),
    "top_n_sigma": (-1, 0),
    "verbosity": ("medium",),
}

WIDTHS = ("repeat_last_n", "repetition_context_size", "repetition_penalty_range")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def penalises(body: Mapping[str, Any]) -> bool:
    """Return True if any penalty of a translated body is on."""
    return any(body.get(name) not in (None, 0, 1) for name in PENALTIES)


def refuse(name: str, value: object, why: str = "not supported, leave it out") -> ApiError:
    """Make the error for a field that is not supported."""
    return ApiError(400, f"{name}: {why}; got {brief(value)}", code="unsupported", param=name)


Change = Callable[[Any], Mapping[str, Any]]  # raises ValueError: "must be …"
NAMES = """
max_tokens=max_completion_tokens max_tokens=max_new_tokens max_tokens=max_output_tokens
max_tokens=max_tokens_to_sample max_tokens=n_predict max_tokens=num_predict
repetition_penalty=repeat_penalty stop=stop_sequences stop=stop_strings min_tokens=min_new_tokens
n=num_return_sequences timeout=max_time bad_words=bad_words_ids ignore_eos=ban_eos_token
regex=guided_regex choice=guided_choice grammar=guided_grammar grammar=ebnf
json_schema=guided_json
"""
MANY = 2**31 - 1  # tokens: all that fit


def limit(value: Any) -> Any:
    """Return a token limit; -1 and -2, which other servers use for none, become a large number."""
    return MANY if value in (-1, -2) else value


def biases(value: Any) -> Mapping[str, Any]:
    """Read OpenAI's object, or the pairs of llama.cpp, in which false bans a token."""
    if not isinstance(value, list):
        return {"logit_bias": value}
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("must be an object, or pairs of token id and bias")
    if not all(isinstance(pair[0], int) for pair in value):
        raise ValueError("must have token ids; text is not supported")
    return {"logit_bias": {str(token): -100 if bias is False else bias for token, bias in value}}


def banned(value: Any) -> Mapping[str, Any]:
    """Convert tokens that must not be sampled."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    return {"bad_words": [[token] for token in value]}


def sampled(value: Any) -> Mapping[str, Any]:
    """Convert transformers' switch: greedy, or not."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return {} if value else {"temperature": 0.0}


def effort(value: Any) -> Mapping[str, Any]:
    """Convert OpenAI's effort, of which "none" means no thoughts."""
    return {"reasoning_effort": value} | ({"enable_thinking": False} if value == "none" else {})


def think(value: Any) -> Mapping[str, Any]:
    """Convert Ollama's boolean or effort."""
    return {"enable_thinking": value} if isinstance(value, bool) else effort(value)


def thinking(value: Any) -> Mapping[str, Any]:
    """Convert the switch of Anthropic, DeepSeek and GLM."""
    kinds = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError('must be {"type": "enabled"} or {"type": "disabled"}')
    if value.get("budget_tokens"):
        raise ValueError("must have no budget_tokens, which are not supported")
    return {"enable_thinking": kinds[kind]}


def reasoning(value: Any) -> Mapping[str, Any]:
    """Convert OpenRouter's object."""
    if not isinstance(value, dict) or value.keys() - {"effort", "enabled", "exclude"}:
        raise ValueError("must be an object of effort, enabled and exclude")
    shown = {"include_reasoning": False} if value.get("exclude") else {}
    switch = {"enable_thinking": value["enabled"]} if "enabled" in value else {}
    return {**shown, **switch, **(effort(value["effort"]) if value.get("effort") else {})}


def one_of(choices: Mapping[Any, Mapping[str, Any]]) -> Change:
    """Make a change of a field with a few values, each of which sets some fields of ours."""

    def change(value: Any) -> Mapping[str, Any]:
        if isinstance(value, str | int) and value in choices:
            return choices[value]
        raise ValueError(f"must be one of {', '.join(map(repr, choices))}")

    return change


def response_format(value: Any) -> Mapping[str, Any]:
    """Convert OpenAI's `response_format`."""
    try:
        asked = ResponseFormat.model_validate(value).asked()
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if None in asked.values():
        raise ValueError("must hold a schema")
    return asked


def ollama_format(value: Any) -> Mapping[str, Any]:
    """Convert Ollama's word "json" or schema."""
    if value == "json":
        return {"json_object": True}
    if isinstance(value, dict):
        return {"json_schema": value}
    raise ValueError('must be "json" or a JSON schema')


FORMS = {"json": "json_schema", "json_object": "json_object", "structural_tag": "structural_tag"}
FORMS |= {name: name for name in ("regex", "choice", "grammar")}


def structured_outputs(value: Any) -> Mapping[str, Any]:
    """Convert vLLM's object: one form under its name."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    given = {name: one for name, one in value.items() if one}
    if unknown := given.keys() - FORMS.keys():
        raise ValueError(f"{brief(min(unknown))} is not supported")
    return {FORMS[name]: one for name, one in given.items()}


def same(name: str) -> Change:
    """Make a change that renames a field to one of ours."""
    return lambda value: {name: limit(value) if name == "max_tokens" else value}


CHANGES: dict[str, Change] = {
    **{alias: same(ours) for ours, alias in (pair.split("=") for pair in NAMES.split())},
    "max_tokens": same("max_tokens"),
    "top_k": lambda value: {"top_k": -1 if value == 0 else value},
    "seed": lambda value: {"seed": None if value == -1 else value},
    "logit_bias": biases,
    "suppress_tokens": banned,
    "eos_token_id": lambda v: {"stop_token_ids": v if isinstance(v, list) else [v]},
    "do_sample": sampled,
    "reasoning_effort": effort,
    "think": think,
    "thinking": thinking,
    "reasoning": reasoning,
    "reasoning_budget": one_of({-1: {}, 0: {"enable_thinking": False}}),
    "reasoning_format": one_of({"auto": {}, "deepseek": {}, "none": {"separate_reasoning": False}}),
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "format": ollama_format,
}
OFF: tuple[Any, ...] = ("", [], {})  # of a form, an alias or a list: not set


def translate(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Translate a body to our names; also return the client's name of each translated field.

    Raise `ApiError` for an unsupported value, and for two that contradict each other.
    """
    options = given.get("options") or {}
    if not isinstance(options, dict):
        raise refuse("options", options, "must be an object")
    flat = {**options, **{name: value for name, value in given.items() if name != "options"}}
    body = {name: value for name, value in flat.items() if name not in CHANGES}
    names: dict[str, str] = {}
    for name, value in flat.items():
        if name not in CHANGES or value is None or value in OFF:
            continue
        try:
            changed = CHANGES[name](value)
        except ValueError as error:
            why = f"{name}: {error}, got {brief(value)}"
            raise ApiError(400, why, code="invalid_value", param=name) from None
        for ours, new in changed.items():
            if (other := names.get(ours, ours)) != name and body.get(ours) not in (None, new):
                if {name, other} != {"max_tokens", "max_completion_tokens"}:  # one is deprecated
                    raise refuse(name, value, f"contradicts {other}")
                new = limit(flat["max_completion_tokens"])
            body[ours], names[ours] = new, name
    for name in WIDTHS:
        if body.pop(name, None) not in (None, -1) and penalises(body):
            raise refuse(name, flat[name], "penalties count the whole text here")
    return body, names


MAX_UNKNOWN = 8  # unknown names compared with known ones, which takes time


def meant(name: str, known: set[str]) -> str | None:
    """Return the known field that an unknown name resembles."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    if plain in known:
        return plain
    similar = [n for n in known if n[:3] == plain[:3] or n[-3:] == plain[-3:]]  # the rest costs ms
    return next(iter(difflib.get_close_matches(plain, similar, 1, 0.9)), None)


def refuse_foreign(extra: Mapping[str, Any], here: Mapping[str, str]) -> None:
    """Reject another route's name of a field; `here` maps it to this route's name."""
    for name, value in extra.items():
        if name in here and value not in (None, False, [], {}):
            raise refuse(name, value, f"belongs to another route, use {here[name]}")


def check_fields(extra: Mapping[str, Any], honoured: set[str], n: int | None) -> None:
    """Reject fields that would change the answer; `extra` holds those outside the schema."""
    if not extra:
        return
    for name, value in extra.items():
        if (fine := HARMLESS.get(name)) is None or (name, value) == ("best_of", n):
            continue
        if value not in (None, *fine):
            raise refuse(name, value)
    known = honoured | HARMLESS.keys() | CHANGES.keys()
    unknown = [n for n in extra if n not in known and len(n) <= 64 and extra[n] is not None]
    for name in unknown[:MAX_UNKNOWN]:
        if (near := meant(name, known)) is not None:
            raise refuse(name, extra[name], f"not a field, did you mean {near}")


RESERVED = """
chat_template continue_final_message conversation conversations documents max_length messages
padding return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize
tokenizer_kwargs tools truncation
"""  # arguments of `apply_chat_template` in transformers


def template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Check a template's variables: any name except the renderer's own arguments."""
    if reserved := given.keys() & set(RESERVED.split()):
        raise ValueError(f"{brief(min(reserved))} is not a variable of a chat template")
    if (size := len(encode(sendable(given)))) > 4096:
        raise ValueError(f"must be at most 4096 bytes, got {size}")
    return given
