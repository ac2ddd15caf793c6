"""Fields of other servers' clients, and texts of real models: nothing is silently wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.config import paths
from minisgl.server.http import formats
from minisgl.server.http.calls import HERMES, LLAMA, MISTRAL, CallFormat, ChatAbilities
from minisgl.server.http.chats import AnswerParser, as_message
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import CHANGES, HARMLESS, translate
from minisgl.server.http.formats import Completion, encoded, finite, is_content, sse
from minisgl.server.http.schemas import ChatRequest, CompletionRequest
from minisgl.server.http.settings import served_name
from minisgl.server.http.tool_parser import ToolParser
from minisgl.server.options import Operations
from minisgl.server.workers.messages import TokenLogprob, UserReply
from minisgl.tokenizer import DecodeStatus, StopFilter, Tokenizer, check_messages
from minisgl.tokenizer_files import plain_message
from tests.checkpoints import make_checkpoint
from tests.scripted import THINKING, edit_json, save_scripted
from tests.serving import Live

ASK = {"messages": [{"role": "user", "content": "?"}], "temperature": 0, "max_tokens": 30}


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(s[6:]) for s in response.text.splitlines() if s.startswith("data: {")]


# One table of aliases and refusals


def asked(**fields: Any) -> SamplingParams:
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    body.prepare(ChatAbilities())
    return body.sampling_params({})


ALIASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"options": {"num_predict": 7, "repeat_penalty": 1.5}},
     {"max_tokens": 7, "repetition_penalty": 1.5}),
    ({"max_new_tokens": 7, "do_sample": False}, {"max_tokens": 7, "temperature": 0.0}),
    ({"stop_strings": ["a"], "min_new_tokens": 2}, {"stop": ["a"], "min_tokens": 2}),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"eos_token_id": [5, 6]}, {"stop_token_ids": [5, 6]}),
    ({"eos_token_id": 5}, {"stop_token_ids": [5]}),
    ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {"5": 1.5, "6": -100}}),
    ({"bad_words_ids": [[1, 2]]}, {"bad_words": [[1, 2]]}),
    ({"suppress_tokens": [1, 2]}, {"bad_words": [[1], [2]]}),
    ({"seed": -1, "top_k": 0}, {}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
    ({"format": {"type": "object"}}, {"json_schema": {"type": "object"}}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), ALIASES)
def test_an_alias_means_the_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert asked(**theirs) == asked(**ours)
    assert asked(**dict.fromkeys(theirs)) == asked()  # null is the default
    assert asked(**{**theirs, **ours}) == asked(**ours)  # twice the same is fine


NEUTRAL = {
    "typical_p": 1, "mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0.0, "top_n_sigma": -1,
    "num_beams": 1, "no_repeat_ngram_size": 0, "length_penalty": 1.0, "repeat_last_n": 64,
    "mirostat_tau": 5.0, "dry_base": 1.75, "cache_prompt": True, "keep_alive": "5m", "lora": [],
    "samplers": [], "extra_body": {}, "a_field_of_next_year": 3,
}  # fmt: skip


def test_values_that_ask_for_nothing_pass() -> None:
    assert asked(**NEUTRAL) == asked()


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.1}, {"mirostat": 2}, {"dry_multiplier": 0.8}, {"no_repeat_ngram_size": 3},
        {"num_beams": 4}, {"guidance_scale": 1.5}, {"forced_eos_token_id": 0}, {"max_length": 9},
        {"samplers": ["top_k"]}, {"extra_body": {"top_k": 1}}, {"system": "Be brief."},
        {"raw": True}, {"penalty_alpha": 0.6}, {"smoothing_factor": 0.2}, {"top_a": 0.1},
        {"options": {"mirostat": 1}}, {"options": [1]}, {"think": ["x"]},
        {"thinking": {"type": "enabled", "budget_tokens": 99}}, {"reasoning": {"max_tokens": 9}},
        {"reasoning_budget": 99}, {"reasoning_format": "other"}, {"format": "yaml"},
        {"repeat_last_n": 64, "repeat_penalty": 1.1}, {"max_token": 5}, {"maxTokens": 5},
        {"top-p": 0.5}, {"temprature": 0.5}, {"repetition_penality": 1.5}, {"stop_sequence": ["a"]},
        {"response_format": {"type": "json_schema"}}, {"logit_bias": [["hello", 1]]},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any]) -> None:
    name = next(iter(fields.get("options") or fields)) if fields != {"options": [1]} else "options"
    name = str(next(iter(fields))) if isinstance(name, int) else str(name)
    body = {**ASK, **fields}
    with pytest.raises((ApiError, ValueError)) as caught:
        request = ChatRequest.model_validate(body)
        request.prepare(ChatAbilities())
        request.sampling_params({})
    if isinstance(caught.value, ApiError):
        assert caught.value.param == name and caught.value.detail.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "fields", [{"n_predict": 5, "num_predict": 6}, {"stop": ["a"], "stop_strings": ["b"]},
               {"think": True, "reasoning_effort": "none"}, {"format": "json", "json_object": False,
               "guided_regex": "a", "regex": "b"}],
)  # fmt: skip
def test_two_names_must_agree(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="contradicts") as caught:
        translate(fields)
    assert caught.value.param in fields


def test_no_field_is_in_two_tables() -> None:
    assert not CHANGES.keys() & HARMLESS.keys()


words = st.text(max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(sorted({*CHANGES, *HARMLESS, "options"})), json_values))
@settings(max_examples=200, deadline=None)
def test_any_value_is_translated_or_refused_by_name(body: dict[str, Any]) -> None:
    try:
        found, names = translate(body)
    except ApiError as error:
        assert error.status_code == 400 and error.param is not None
        assert error.detail.startswith(f"{error.param}: ")
        return
    assert translate(found)[0] == found  # what is translated stays
    assert names.keys() <= found.keys() and not found.keys() & (CHANGES.keys() - found.keys())


# What the template is shown


TEMPLATE = "{% for m in messages %}{% if m.role == 'system' %}S{% endif %}{% endfor %}"


@pytest.mark.parametrize("arguments", [None, "", " \n", "null", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    call = {"id": "x", "function": {"name": "now", "arguments": arguments}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    assert message["content"] == ""


def test_roles_and_thoughts_have_the_names_that_templates_read() -> None:
    talk = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": "8", "reasoning": "3 + 5"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    told, thought, refused = check_messages(talk)
    assert told["role"] == "system"
    assert plain_message(thought)["reasoning_content"] == "3 + 5"
    assert refused["content"] == "No."
    assert check_messages(talk, {})[0]["role"] == "developer"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_both_routes_show_the_same(chatty: Live, path: str, monkeypatch: Any) -> None:
    seen, render = list[str](), Tokenizer.render_chat

    def spy(self: Tokenizer, messages: Any, **variables: Any) -> str:
        seen.append(render(self, messages, **variables))
        return seen[-1]

    monkeypatch.setattr(Tokenizer, "render_chat", spy)
    field = "messages" if path.startswith("chat") else "input"
    for role in ("system", "developer"):
        talk = [{"role": role, "content": "French."}, {"role": "user", "content": "Hi"}]
        for extra in ({}, {"think": False}, {"thinking": {"type": "disabled"}}):
            assert post(chatty, path, **{field: talk}, **extra, temperature=0).status_code == 200
    effort = (
        {"reasoning_effort": "none"} if field == "messages" else {"reasoning": {"effort": "none"}}
    )
    assert post(chatty, path, **{field: talk}, **effort).status_code == 200
    assert len(set(seen[::3][:2])) == 1 and "system" in seen[0]
    quiet = [seen[i] for i in (1, 2, 4, 5, 6)]
    assert len(set(quiet)) == 1 and quiet[0] != seen[0]


# What a model writes


def parse(form: CallFormat, text: str, step: int) -> Any:
    parser = AnswerParser(False, ToolParser(form, {"now", "edit"}))
    pieces = [p for at in range(0, len(text), step) for p in parser.push(text[at : at + step])]
    message = as_message(pieces + parser.push("", True))
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"], [(call["name"], json.loads(call["arguments"])) for call in calls]


argument = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)


@given(argument, st.permutations(["name", "arguments", "id", "index"]), st.integers(1, 30),
       st.sampled_from([HERMES, MISTRAL]), st.sampled_from(["object", "text", "null"]),
       st.integers(1, 2))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_keys_of_a_call_have_any_order_and_type(
    given_: dict[str, Any], order: list[str], step: int, form: CallFormat, kind: str, count: int
) -> None:
    values = {"name": "edit", "arguments": given_, "id": "a{<", "index": 0}
    if kind == "null":
        values["arguments"] = None
    elif kind == "text":
        values["arguments"] = json.dumps(given_)
    call = json.dumps({name: values[name] for name in order})
    if form is HERMES:
        text = "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * count)
    else:
        text = f"[TOOL_CALLS] [{', '.join([call] * count)}]"
    expected = ("edit", {} if kind == "null" else given_)
    assert parse(form, text, step) == (None, [expected] * count)


def test_llama_calls_may_begin_with_a_type() -> None:
    text = '{"type": "function", "name": "now", "parameters": {}, "id": 3}'
    for step in (1, 4, 99):
        assert parse(LLAMA, text, step) == (None, [("now", {})])


# Stop strings, log probabilities and usage of thoughts


WORDS = ["<think>", "</think>", "a", "STOP", " ", "<", "</th"]


@given(st.lists(st.sampled_from(WORDS), max_size=9),
       st.booleans(), st.integers(1, 5))  # fmt: skip
def test_a_stop_string_ends_no_thought(words: list[str], thinking: bool, step: int) -> None:
    text = "".join(words)
    status = StopFilter(["STOP"], spare_thoughts=True, thinking=thinking)
    out = "".join(status.push(text[at : at + step]) for at in range(0, len(text), step))
    status.opening = False
    out += status.push("")
    out += status.held
    inside = thinking or text.lstrip().startswith("<think>")
    thought, end, rest = text.partition("</think>") if inside else ("", "", text)
    assert out == thought + end + (rest.partition("STOP")[0] if end or not inside else "")
    assert status.stopped == ("STOP" in rest and (bool(end) or not inside))


SAID = [
    "\nThey ask: ",
    "Question: ",
    "how many? ",
    "</think>",
    "\n\nIt ",
    "is 8.",
    " Question: ",
    "x",
]


@pytest.fixture(scope="module")
def thoughtful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("thoughtful")
    save_scripted(folder, SAID, start="<think>", template=THINKING)
    with Live(folder, device="cpu", num_pages=256) as live:
        yield live


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = (
        "{%- for m in messages -%}{%- if m.role in ['system', 'user'] -%}"
        "{{ m.role }}: {{ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if enable_thinking is defined and not enable_thinking -%}"
        "<think></think>{%- endif -%}"
    )  # fmt: skip
    folder = make_checkpoint(tmp_path_factory.mktemp("chatty"), tokenizer=True)
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    operations = Operations(log_format="text")
    with Live(folder, device="cpu", num_pages=256, operations=operations) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
def test_rules_of_the_content_do_not_touch_the_thought(thoughtful: Live, stream: bool) -> None:
    body = {**ASK, "stop": ["Question:"], "logprobs": True, "stream": stream}
    answer = post(thoughtful, "chat/completions", **body)
    content, thought, tokens = "", "", list[str]()
    if stream:
        choices = [event["choices"][0] for event in events(answer)]
        parts = [choice["delta"] for choice in choices]
    else:
        choices = answer.json()["choices"]
        parts = [choices[0]["message"]]
    for part in parts:
        content += part.get("content") or ""
        thought += part.get("reasoning_content") or ""
    for choice in choices:
        tokens += [entry["token"] for entry in (choice["logprobs"] or {}).get("content") or []]
    assert thought == "They ask: Question: how many?" and content == "It is 8. "
    assert tokens == ["\n\nIt ", "is 8."] and choices[-1]["finish_reason"] == "stop"


def test_a_completion_stops_wherever_the_text_says_so(thoughtful: Live) -> None:
    answer = post(thoughtful, "completions", prompt="<think>", stop=["Question:"], temperature=0)
    assert answer.json()["choices"][0]["text"] == "\nThey ask: "


def test_tokens_of_a_thought_are_counted_where_it_ends(tmp_path: Path) -> None:
    """Exactly, however the marker is cut, and whatever comes with its last token."""
    save_scripted(tmp_path, ["hm ", "</th", "ink>So", "!", "</think>"])
    tokenizer = Tokenizer(tmp_path)
    status = DecodeStatus(tokenizer)
    found = []
    for text in ("hm ", "</th", "ink>So", "!", "</think>"):
        status.take(int(tokenizer.backend.token_to_id(text)), None)
        found.append((status.num_tokens, status.thought_tokens))
    assert found == [(1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]


def test_thoughts_are_counted_on_every_route(thoughtful: Live) -> None:
    chat = post(thoughtful, "chat/completions", **ASK).json()["usage"]
    assert chat["completion_tokens_details"] == {"reasoning_tokens": 4}
    body = {"input": "?", "max_output_tokens": 30, "temperature": 0}
    response = post(thoughtful, "responses", **body).json()["usage"]
    assert response["output_tokens_details"] == {"reasoning_tokens": 4}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = post(thoughtful, "chat/completions", **ASK, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events(stream)]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == chat["completion_tokens"]
    wrong = post(thoughtful, "chat/completions", **ASK, stream_options={"include_usages": True})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "stream_options"


def test_undecided_log_probabilities_are_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()

    def counted(parser: AnswerParser, start: int, end: int) -> bool | None:
        asked.append(start)
        return is_content(parser, start, end)

    monkeypatch.setattr(formats, "is_content", counted)
    answer = Completion(AnswerParser(False, ToolParser(HERMES, {"now"})))
    for index, word in enumerate(words := ["<tool_call>", "{", *['"name": '] * 300]):
        entries = [TokenLogprob(word, word.encode(), -0.5, sum(map(len, words[:index])))]
        answer.add(UserReply(uid=0, text=word, token_ids=[1], logprobs=entries))
    assert len(answer.undecided) == len(words) and len(asked) <= 2 * len(words)
    answer.add(UserReply(uid=0, text="", token_ids=[], finished=True, finish_reason="stop"))
    assert [entry.text for entry in answer.logprobs] == words and not answer.undecided


@given(st.lists(st.sampled_from(["<think>", "</think>", "a ", "b", "\n\n", "<tool_call>",
                '{"name": "now", "arguments": {}}', "</tool_call>"]), min_size=1, max_size=9),
       st.booleans(), st.booleans())  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_log_probabilities_are_those_of_the_content(
    words: list[str], thinking: bool, reasoning: bool
) -> None:
    """However the answer is cut into tokens: their entries hold all of the content's letters."""
    answer = Completion(AnswerParser(reasoning, ToolParser(HERMES, {"now"})))
    offset = 0
    for index, word in enumerate(words):
        entries = [TokenLogprob(word, word.encode(), -0.5, offset)]
        last = index == len(words) - 1
        reply = UserReply(uid=0, text=word, token_ids=[1], logprobs=entries, finished=last,
                          thinking=thinking, finish_reason="stop" if last else None)  # fmt: skip
        answer.add(reply)
        offset += len(word)
    content = as_message(answer.pieces)["content"] or ""
    told = "".join(entry.text for entry in answer.logprobs)
    assert not answer.undecided
    assert "".join(told.split()) == "".join(content.split())


# Special tokens


def test_a_special_token_ends_an_answer(tmp_path: Path) -> None:
    pieces = ["It is ", "eight.", "<|im_end|>", "\n", "nine?"]
    save_scripted(tmp_path, pieces, start="<|pad|>", end="<|endoftext|>")
    with LLM(tmp_path, device="cpu", num_pages=64) as llm:
        (out,) = llm.generate("<|pad|>", SamplingParams(max_tokens=30, stop=["<|im_end|>"]))
        assert out["text"] == "It is eight." and out["finish_reason"] == "stop"
        with pytest.raises(ValueError, match="stop: must not hold a special token"):
            llm.generate("x", SamplingParams(stop=["<|im_end|>\n"]))
    with Live(tmp_path, device="cpu", num_pages=64) as live:
        body = {"prompt": "<|pad|>", "max_tokens": 30, "temperature": 0}
        answer = post(live, "completions", **body, stop=["nine", "<|im_end|>"])
        assert answer.json()["choices"][0]["text"] == "It is eight."
        refused = post(live, "completions", **body, stop=["<|im_end|>\n"])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop"
        found = post(live, "completions", **{**body, "max_tokens": 4}, logprobs=0).json()[
            "choices"
        ][0]
        offsets = found["logprobs"]["text_offset"]
        assert offsets == [0, 6, 12, 12] and found["text"] == "It is eight.\n"


# Checkpoints as people save them


def test_a_tokenizer_may_be_larger_than_the_vocabulary(tmp_path: Path) -> None:
    """And hold truncation and padding: grammars see neither."""
    folder = make_checkpoint(tmp_path, tokenizer=True)
    about = json.loads((folder / "tokenizer.json").read_text())
    for extra in range(40):
        entry = {**about["added_tokens"][-1], "id": 320 + extra, "content": f"[PAD{extra}]"}
        about["added_tokens"].append(entry)
    about["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(about))
    with LLM(folder, device="cpu", num_pages=64) as llm:
        for fields, texts in (
            ({"choice": ["yes", "no"]}, ("yes", "no")),
            ({"regex": "ab"}, ("ab",)),
        ):
            params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, **fields)
            (out,) = llm.generate("hello", params)
            assert out["text"] in texts, out


def test_logits_that_are_nan_are_null(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["model.embed_tokens.weight"], math.nan)
    save_file(weights, folder / "model.safetensors")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with (
        Live(folder, device="cpu", num_pages=64) as live,
        httpx.Client(base_url=live.url) as client,
    ):
        for path, body in (
            ("completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1}),
            ("completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "stream": True}),
            ("completions", {"prompt": "hi there", "max_tokens": 0, "echo": True, "logprobs": 1}),
            ("chat/completions", {**ASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}),
            ("responses", {"input": "hi", "max_output_tokens": 2, "top_logprobs": 1}),
        ):
            answer = client.post(f"/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 200 and "NaN" not in answer.text, answer.text
            assert "null" in answer.text


@given(st.none() | st.floats())
def test_every_number_is_one_of_json(value: float | None) -> None:
    found = json.loads(encoded({"x": finite(value)}))["x"]
    assert found is None or math.isfinite(found)


@given(st.text())
def test_an_event_is_one_line_for_every_client(text: str) -> None:
    event = sse({"text": text}).decode()
    assert len(event.splitlines()) == 2 and json.loads(event[6:])["text"] == text


def test_sizes_count_characters() -> None:
    names = [chr(0x4E00 + i) * 4 for i in range(700)]
    schema = {"enum": names, "note": "\ud83d"}
    params = SamplingParams(json_schema=schema)
    assert json.loads(str(params.json_schema)) == schema
    assert len(str(params.json_schema)) < 700 * 9


@pytest.mark.parametrize("links", [False, True])
def test_a_model_is_served_under_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_name(None) == "minisgl-tiny"
    assert served_name("acme/Tiny-1B") == "acme/Tiny-1B"
    assert served_name(f"{folder}/") == served_name(str(folder)) == "my-model"
    monkeypatch.chdir(folder)
    assert served_name(".") == "my-model"
    snapshot = tmp_path / "models--acme--Tiny-1B" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert served_name(str(snapshot)) == "acme/Tiny-1B"
    if links:
        (tmp_path / "link").symlink_to(folder)
        assert served_name(str(tmp_path / "link")) == "link"


@pytest.mark.parametrize("indexed", [False, True])
def test_only_weights_that_are_read_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    shards = [f"model-{i}-of-2.safetensors" for i in (1, 2)] if indexed else ["model.safetensors"]
    others = ["consolidated.safetensors", "original/consolidated.safetensors", "onnx/config.json",
              "adapter/adapter_model.safetensors", "pytorch_model.bin"]  # fmt: skip
    small = ["config.json", "tokenizer.json", "chat_template.jinja",
             "additional_chat_templates/tool_use.jinja"]  # fmt: skip
    if indexed:
        index = {"weight_map": {f"layer{i}": shard for i, shard in enumerate(shards)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        others += ["old/model-1-of-2.safetensors"]
    got = set[str]()

    def fake(name: str, **patterns: Any) -> str:
        got.update(filter_repo_objects([*small, *shards, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    paths.download("acme/Two-Layouts")
    assert got == {*small, *shards}


# The transport


def test_bodies_that_are_not_plain_utf8_are_named(chatty: Live) -> None:
    url, kind = f"{chatty.url}/v1/completions", {"content-type": "application/json"}
    for coding in ("gzip", "br", "deflate", "zstd"):
        headers = {**kind, "content-encoding": coding}
        answer = httpx.post(url, content=b'{"prompt": "x"}', headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == 415 and coding in error["message"]
        assert error["param"] == "content-encoding"
    answer = httpx.post(url, content='{"prompt": "caf\u00e9"}'.encode("latin-1"), headers=kind)
    assert answer.status_code == 400 and "not UTF-8" in answer.json()["error"]["message"]
    headers = {**kind, "content-encoding": "identity"}
    assert httpx.post(url, content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_a_page_on_the_web_may_ask_a_local_server(chatty: Live) -> None:
    ask = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Private-Network": "true"}  # fmt: skip
    answer = httpx.options(f"{chatty.url}/v1/chat/completions", headers=ask)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    ("given_", "kept"),
    [("trace-4711", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("", False)],
)
def test_a_request_id_is_kept_if_it_is_short_and_printable(
    chatty: Live, given_: str, kept: bool
) -> None:
    headers = {"x-request-id": given_}
    answer = httpx.post(f"{chatty.url}/v1/completions", json={"prompt": "x"}, headers=headers)
    found = answer.headers["x-request-id"]
    assert found and (found == given_) == kept and answer.json()["id"] == f"cmpl-{found}"


def test_the_smallest_nucleus_is_one_token(chatty: Live) -> None:
    body = {"prompt": "hello", "max_tokens": 8}
    greedy = post(chatty, "completions", **body, temperature=0).json()["choices"][0]["text"]
    found = post(chatty, "completions", **body, temperature=1.5, top_p=0)
    assert found.status_code == 200 and found.json()["choices"][0]["text"] == greedy


def test_status_finishes_what_may_have_begun_a_thought(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_checkpoint(tmp_path, tokenizer=True))
    status = DecodeStatus(tokenizer, (), ("x",), spare_thoughts=True)
    text = "".join(status.push(token) for token in tokenizer.encode("<thx").tolist())
    assert text + status.finish() == "<th" and status.stopped
