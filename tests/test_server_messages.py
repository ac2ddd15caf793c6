"""`/v1/messages` with Anthropic's client, and the routes that convert text and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl import __version__
from minisgl.config.paths import resolve_model_path
from minisgl.server.http.errors import ApiError
from minisgl.server.http.formats import Completion
from minisgl.server.http.tool_parser import CallArguments, CallStart, Content, Piece, Reasoning
from minisgl.server.messages.events import MessageBuilder, as_input
from minisgl.server.messages.schemas import RENAMED, MessagesRequest
from minisgl.server.observe.metrics import Metrics
from minisgl.server.options import Operations
from minisgl.server.workers.messages import StatsMsg
from minisgl.tokenizer import Tokenizer
from tests.serving import Live
from tests.test_tools import THINKS_TEMPLATE, save_model, say

ASK: Any = [{"role": "user", "content": "What is 12 + 30?"}]
ANSWER = "12 + 30 = 42"
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    fields: dict[str, Any] = {"num_pages": 1024, "served_model_name": "tiny"}
    with Live(resolve_model_path(None), operations=Operations(log_format="none"), **fields) as live:
        yield live
        live.assert_pages_home()


@pytest.fixture(scope="module")
def client(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0)


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": ASK, **fields}
    return client.messages.create(extra_body={"temperature": 0}, **body)


def test_a_message_and_its_count(client: anthropic.Anthropic) -> None:
    answer = ask(client, system=[{"type": "text", "text": "Be brief."}])
    (block,) = answer.content
    assert block.type == "text" and answer.stop_reason == "end_turn" and answer._request_id
    count = client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.")
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
    assert ask(client).content[0].text == ANSWER  # type: ignore[union-attr]
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"


def test_a_stream_is_the_message(client: anthropic.Anthropic) -> None:
    whole = ask(client, stop_sequences=["+ 3", " ="])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "+ 3")
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": ASK}
    body |= {"stop_sequences": ["+ 3", " ="], "extra_body": {"temperature": 0}}
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.to_dict() for block in streamed.content] == [b.to_dict() for b in whole.content]
    assert streamed.stop_sequence == whole.stop_sequence
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_last_turn_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*ASK, {"role": "assistant", "content": "12 + 30"}]
    assert ask(client, messages=begun).content[0].text == " = 42"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "why"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: must be given"),
        ({"model": "claude"}, 404, "not_found_error", "model: 'claude' is not served"),
        ({"stop": "x"}, 400, "invalid_request_error", "stop: belongs to another route"),
        ({"container": "x"}, 400, "invalid_request_error", "container: not supported"),
        ({"top_k": "5"}, 400, "invalid_request_error", "top_k: "),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, 400,
         "invalid_request_error", "tool_choice: 'x' is none of the tools"),
        ({"messages": [{"role": "user", "content": []}]}, 400,
         "invalid_request_error", "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, 400,
         "invalid_request_error", "messages: role user has no block of type tool_use"),
        ({"messages": [{"role": "user", "content": "and " * 20000}]}, 400,
         "invalid_request_error", "messages: "),
    ],
)  # fmt: skip
def test_refusals_have_a_shape_and_a_name(
    live: Live, fields: dict[str, Any], status: int, kind: str, why: str
) -> None:
    body = {"messages": ASK, "max_tokens": 5, **fields}
    response = httpx.post(f"{live.url}/v1/messages", json=body, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, kind), error
    assert response.json()["type"] == "error" and error["message"].startswith(why), error


def test_a_count_is_refused_alike(live: Live) -> None:
    for name in ("stop", "container"):
        body = {"messages": ASK, name: "x"}
        response = httpx.post(f"{live.url}/v1/messages/count_tokens", json=body, timeout=30)
        error = response.json()["error"]
        assert response.status_code == 400 and error["message"].startswith(f"{name}: "), error


def test_the_key_may_come_in_two_headers() -> None:
    with Live(resolve_model_path(None), num_pages=1024, api_key="k") as live:
        url = f"{live.url}/v1/messages/count_tokens"
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            assert httpx.post(url, json={"messages": ASK}, headers=headers).status_code == 200
        for headers in ({"x-api-key": "other"}, {}):
            response = httpx.post(url, json={"messages": ASK}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        chat = httpx.post(f"{live.url}/tokenize", json={"prompt": "x"}, headers={"x-api-key": "k"})
        assert chat.status_code == 401  # the header is of this API alone


def test_tools_and_thoughts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that thinks and calls, with its answers played."""
    folder = save_model(tmp_path_factory.mktemp("thinks"), THINKS_TEMPLATE)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
    with Live(folder, num_pages=1024, served_model_name="tiny") as live:
        client = anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0)
        say(live, monkeypatch, f"<think>hm</think>Let me add.{call}")
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 100,
            "messages": ASK,
            "tools": [TOOL],
        }
        answer = client.messages.create(**body)
        thought, text, use = answer.content
        assert thought.type == "thinking" and thought.thinking == "hm"
        assert text.type == "text" and text.text == "Let me add."
        assert use.type == "tool_use" and use.input == {"a": 12} and use.name == "add"
        assert answer.stop_reason in ("tool_use", "max_tokens")  # as the random model has it
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        hidden = client.messages.create(
            **body, extra_body={"thinking": {"type": "enabled", "display": "omitted"}}
        )
        assert [block.type for block in hidden.content] == ["text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "42", "is_error": True}
        back = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
        turns = [*ASK, {"role": "assistant", "content": answer.content}, back]
        say(live, monkeypatch, "42")
        (block, *_) = client.messages.create(**{**body, "messages": turns}).content
        assert block.type == "text" and block.text.startswith("42")


# ------------------------------------------------------------------ schemas


def test_a_request_as_a_chat() -> None:
    body = MessagesRequest.model_validate(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "add", "input": {"x": "é"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "2"},
                    {"type": "text", "text": "c"}, {"type": "text", "text": "d"},
                    {"type": "tool_result", "tool_use_id": "2", "is_error": True}]},
            ],
            "system": "s", "max_tokens": 5, "stop_sequences": ["x"], "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "min_p": 0.5,
            "output_config": {"effort": "low"},
        }
    )  # fmt: skip
    chat = body.as_chat()
    shown = [message.as_template_input() for message in chat.messages]
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "tool", "user", "tool"]
    assert shown[2]["reasoning_content"] == "t" and shown[2]["content"] == "b"
    assert json.loads(shown[2]["tool_calls"][0]["function"]["arguments"]) == {"x": "é"}
    assert [m["content"] for m in shown[3:]] == ["2", "cd", "Error: "]
    assert chat.stop == ["x"] and chat.max_tokens == 5 and chat.user == "u" and chat.min_p == 0.5
    assert chat.enable_thinking is False and chat.reasoning_effort == "low"
    assert chat.parallel_tool_calls is False


def test_the_tables_name_fields_of_both_sides() -> None:
    fields = MessagesRequest.model_fields.keys()
    assert set(RENAMED.values()) <= fields and not RENAMED.keys() & fields


# ------------------------------------------------------------------ events

TEXTS = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3)
SAID = st.lists(st.tuples(st.sampled_from(["text", "thinking", "call"]), TEXTS), max_size=5)


@given(SAID, st.sampled_from(["stop", "length"]))
def test_pieces_add_up(said: list[tuple[str, list[str]]], reason: str) -> None:
    pieces: list[Piece] = []
    for number, (kind, texts) in enumerate(said):
        if kind == "call":
            pieces.append(CallStart(number, f"id{number}", "f"))
            pieces += [CallArguments(number, part) for part in ('{"a"', ": 1", "}")]
        else:
            pieces += [(Content if kind == "text" else Reasoning)(text) for text in texts]
    builder = MessageBuilder("msg_1", "m")
    parts = [Completion(pieces=[piece], prompt_tokens=3) for piece in pieces] or [Completion()]
    events = [event for part in parts for event in builder.add(part)]
    events += builder.finish(Completion(finish_reason=reason, prompt_tokens=3))
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "heard": ""})
            case "content_block_delta":
                kind, *rest = event["delta"].values()
                assert event["index"] == len(blocks) - 1 and kind.endswith("_delta")
                blocks[-1]["heard"] += rest[0]
            case "content_block_stop":
                block, heard = blocks[-1], blocks[-1].pop("heard")
                kind = block["type"]
                block |= {"input": json.loads(heard)} if kind == "tool_use" else {kind: heard}
    assert events[0]["message"]["content"] == [] and blocks == builder.message["content"]
    assert builder.message["stop_reason"] == (
        "max_tokens" if reason == "length" else "tool_use" if any(k == "call" for k, _ in said)
        else "end_turn"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), ('{"a": [1, "b', {"a": [1, "b"]}), ("[1]", {"arguments": "[1]"}),
     ("no JSON", {"arguments": "no JSON"})],
)  # fmt: skip
def test_arguments_are_an_object(text: str, found: dict[str, Any]) -> None:
    assert as_input(text) == found


def test_a_failure_in_the_middle_is_an_event() -> None:
    error = ApiError(503, "gone", code="service_unavailable")
    expected = {"type": "overloaded_error", "message": "gone"}
    assert MessageBuilder("m", "m").fail(error) == {"type": "error", "error": expected}


# ------------------------------------------------------------------ tokens


def test_text_to_tokens_and_back(live: Live) -> None:
    def post(route: str, **body: Any) -> Any:
        return httpx.post(f"{live.url}/{route}", json=body, timeout=30)

    tokenizer = Tokenizer(resolve_model_path(None))
    text = "12 + 30 é 😀"
    for special in (True, False):
        found = post("tokenize", prompt=text, add_special_tokens=special, return_token_strs=True)
        reply = found.json()
        assert reply["tokens"] == tokenizer.encode(text, special).tolist()
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert reply["max_model_len"] == 4096
    assert post("detokenize", tokens=reply["tokens"]).json() == {"prompt": text}
    reply = post("tokenize", messages=ASK, model="tiny").json()
    assert reply["tokens"] == tokenizer.apply_chat(ASK).tolist() and reply["token_strs"] is None
    shorter = post("tokenize", messages=ASK, add_generation_prompt=False).json()
    assert shorter["tokens"] == reply["tokens"][:-1]
    assert post("detokenize", tokens=reply["tokens"]).json()["prompt"].endswith("<|assistant|>")
    for route, body, param in (
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("tokenize", {"messages": ASK, "chat_template": "x"}, "chat_template"),
        ("tokenize", {"messages": ASK, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("detokenize", {"tokens": [0, 2_000_000]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ):
        error = post(route, **body).json()["error"]
        assert error["param"] == param and error["message"].startswith(param), error


def test_what_a_server_tells_of_itself(live: Live) -> None:
    info = httpx.get(f"{live.url}/server_info").json()
    assert (info["version"], info["model"], info["max_model_len"]) == (__version__, "tiny", 4096)
    assert info["page_size"] == 16 and info["max_running_req"] == 256


def test_the_share_of_the_pool_that_is_held() -> None:
    metrics = Metrics()
    metrics.reported(StatsMsg(used_pages=3, cached_pages=1, free_pages=4))
    assert metrics.registry.get_sample_value("minisgl_kv_cache_usage") == 0.375
