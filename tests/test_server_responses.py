"""`/v1/responses`: OpenAI's client, the rules of Open Responses, random ways to be wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, Field, TypeAdapter

from minisgl.config.paths import resolve_model_path
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.http.api import RequestHandler, create_app
from minisgl.server.http.chats import AnswerParser
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import CHANGES, HARMLESS
from minisgl.server.http.formats import Completion, encoded
from minisgl.server.http.schemas import ChatRequest
from minisgl.server.http.settings import ApiSettings
from minisgl.server.http.tool_parser import CallArguments, CallStart, Content, Piece, Reasoning
from minisgl.server.options import Operations
from minisgl.server.responses.events import ResponseBuilder
from minisgl.server.responses.routes import add_responses_routes, conversation
from minisgl.server.responses.schemas import RENAMED, ResponsesRequest, as_messages, read_items
from minisgl.server.responses.store import ResponseStore, Turn, decode
from minisgl.server.workers.channels import LocalQueue
from minisgl.server.workers.messages import TokenLogprob, UserReply
from tests.serving import Live, client_at, slow_reader, wait_for
from tests.test_tools import THINKS_TEMPLATE, save_model, say

ASK, ANSWER = "What is 12 + 30?", "12 + 30 = 42"
read_event = TypeAdapter(ResponseStreamEvent).validate_python


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    operations = Operations(log_format="none", max_body_size=200_000)
    with Live(
        resolve_model_path(None),
        num_pages=1024,
        served_model_name="tiny",
        operations=operations,
    ) as live:
        yield live
        live.assert_pages_home()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{live.url}/v1", timeout=300) as http:
        yield http


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"input": ASK, "temperature": 0, "max_output_tokens": 20, **fields}
    return http.post("/responses", json={k: v for k, v in body.items() if v is not ...})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should, each with its type on both lines."""
    *blocks, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# The client of OpenAI


def test_create_and_continue_with_the_sdk(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input=ASK, temperature=0, metadata={"a": "b"})
    assert (first.output_text, first.status, first.metadata) == (ANSWER, "completed", {"a": "b"})
    assert first.usage is not None and first.usage.output_tokens > 5
    follow = {"model": "tiny", "input": "And 1 + 1?", "temperature": 0.0}
    second = client.responses.create(**follow, previous_response_id=first.id)
    whole = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And 1 + 1?"},
    ]
    by_hand = client.responses.create(model="tiny", input=whole, temperature=0)
    assert second.output_text == by_hand.output_text and second.usage is not None
    assert by_hand.usage is not None and by_hand.usage.input_tokens == second.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id) == second
    # A client that gives its last answer back by reference
    referring = [whole[0], {"type": "item_reference", "id": first.output[0].id}, whole[2]]
    third = client.responses.create(model="tiny", input=referring, temperature=0, store=False)
    assert third.output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_stream_with_the_sdk(client: openai.OpenAI) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with client.responses.stream(model="tiny", input=ASK, temperature=0, **logprobs) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == final.output_text == ANSWER and final.usage is not None
    (message,) = final.output
    assert message.type == "message" and message.content[0].type == "output_text"
    entries = message.content[0].logprobs or []
    assert "".join(entry.token for entry in entries) == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert client.responses.retrieve(final.id).output_text == ANSWER  # kept before its end


def test_parse_with_the_sdk(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: Annotated[str, Field(max_length=8)]
        likes: Literal["tea", "milk"]

    ask = {"model": "tiny", "input": "Tom, in JSON", "max_output_tokens": 200, "temperature": 0}
    parsed = client.responses.parse(**ask, text_format=Person).output_parsed
    assert isinstance(parsed, Person)
    free = client.responses.create(**ask, text={"format": {"type": "json_object"}})
    if free.status == "completed":
        json.loads(free.output_text)


def test_async_stream_with_the_sdk(live: Live) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
            stream = await client.responses.create(
                model="tiny", input=ASK, stream=True, max_output_tokens=3, temperature=0
            )
            return [event.type async for event in stream]

    types = asyncio.run(run())
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.incomplete" and "response.output_text.delta" in types


def test_what_was_said_can_be_listed_and_forgotten(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "max_output_tokens": 2}
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "One"}]
    first = client.responses.create(**ask, input=said)
    second = client.responses.create(**ask, input="Two", previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, limit=2))  # two pages
    assert [getattr(item, "role", None) for item in items] == [
        "user", "assistant", "user", "developer",
    ]  # fmt: skip
    up = list(client.responses.input_items.list(second.id, order="asc"))
    assert up == items[::-1] and len({item.id for item in items}) == 4
    assert items[1].id == first.output[0].id
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=first.id):
            gone(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ask, input="Three", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


def test_ids_cannot_be_guessed(client: openai.OpenAI) -> None:
    made = [client.responses.create(model="tiny", input="x", max_output_tokens=1) for _ in range(3)]
    names = {response.id.removeprefix("resp_") for response in made}
    assert len(names) == 3 and all(len(bytes.fromhex(name)) == 16 for name in names)


# What Open Responses checks (github.com/openresponses/openresponses, 15 July 2026), in our words

REQUIRED = """
id object created_at completed_at status incomplete_details model previous_response_id instructions
output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty
frequency_penalty top_logprobs temperature reasoning usage max_output_tokens max_tool_calls store
background service_tier metadata safety_identifier prompt_cache_key
"""
PHASES = [
    {"type": "message", "role": "assistant", "phase": "commentary", "content": "I look it up."},
    {"type": "message", "role": "assistant", "phase": "final_answer", "content": "It is four."},
]
PICTURE = [{"type": "input_image", "image_url": "data:image/png;base64,"}]
HELLO, ASKED = {"role": "user", "content": "Hello."}, {"role": "user", "content": ASK}
SUITE: dict[str, tuple[dict[str, Any], str]] = {  # by the suite's name: what is asked, who refuses
    "basic-response": ({"input": [{"type": "message", **ASKED}]}, ""),
    "assistant-phase": ({"input": [*PHASES, ASKED]}, ""),
    "streaming-response": ({"input": ASK, "stream": True}, ""),
    "system-prompt": ({"input": [{"role": "system", "content": "Be kind."}, ASKED]}, ""),
    "multi-turn": ({"input": [HELLO, {"role": "assistant", "content": "Hi!"}, ASKED]}, ""),
    "image-input": ({"input": [{"role": "user", "content": PICTURE}]}, "input"),  # text models
}
NOT_THERE = {  # another route, another transport
    "compact-response": ("POST", "/responses/compact"),
    "compact-missing-model": ("POST", "/responses/compact"),
    **dict.fromkeys(
        [
            "websocket-response",
            "websocket-sequential-responses",
            "websocket-continuation",
            "websocket-reconnect-store-false-recovery",
            "websocket-previous-response-not-found",
            "websocket-failed-continuation-evicts-cache",
            "websocket-compact-new-chain",
        ],
        ("GET", "/responses"),
    ),
}
# "tool-calling" is below, with a model that calls; "response-output-phase-schema" asks no server.


def test_what_is_not_there_says_so(http: httpx.Client) -> None:
    for method, path in set(NOT_THERE.values()):
        answer = http.request(method, path)
        assert answer.status_code == 405 and answer.json()["error"]["message"]


@pytest.mark.parametrize("name", SUITE)
def test_open_responses(http: httpx.Client, name: str) -> None:
    fields, param = SUITE[name]
    answer = post(http, max_output_tokens=..., **fields)
    if param:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        return
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        events = events_of(answer)
        for event in events:
            read_event(event)
        response = events[-1]["response"]
    else:
        response = answer.json()
    Response.model_validate(response)
    assert response.keys() >= set(REQUIRED.split())
    assert response["status"] == "completed" and response["output"]
    assert response["output"][0]["status"] == "completed"
    listed = http.get(f"/responses/{response['id']}/input_items").json()
    ResponseItemList.model_validate(listed)


# Thoughts and calls

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}},
}
CALLS = """<think>
hm, Oslo
</think>

So:
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>"""


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a random model whose template has thoughts and tools."""
    folder = save_model(tmp_path_factory.mktemp("calls"), THINKS_TEMPLATE)
    with Live(folder, num_pages=1024, served_model_name="calls") as live:
        yield live
        live.assert_pages_home()


def test_thoughts_and_calls_are_items(calling: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="any", max_retries=0)
    ask: Any = {"model": "calls", "input": "Is it warm?", "tools": [WEATHER]}
    ask |= {"extra_body": {"ignore_eos": True}, "max_output_tokens": len(CALLS) // 7 + 1}
    with monkeypatch.context() as patch:
        say(calling, patch, CALLS)
        whole = client.responses.create(**ask)
        with client.responses.stream(**ask) as stream:
            heard = [event.type for event in stream]
    thought, _, *calls = whole.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "hm, Oslo" and whole.output_text == "So:"
    assert [call.arguments for call in calls if call.type == "function_call"] == [
        '{"city": "Oslo"}', "{}",
    ]  # fmt: skip
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"response.{kind}.delta" in heard and f"response.{kind}.done" in heard
    # The client answers the calls: both turns are one conversation for the template.
    outputs: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "31"}
        for call in calls
        if call.type == "function_call"
    ]
    short: Any = {"model": "calls", "tools": [WEATHER], "max_output_tokens": 2}
    after = client.responses.create(**short, input=outputs, previous_response_id=whole.id)
    given: Any = [{"role": "user", "content": "Is it warm?"}, *whole.output, *outputs]
    by_hand = client.responses.create(**short, input=given)
    assert after.usage is not None and by_hand.usage is not None
    assert after.usage.input_tokens == by_hand.usage.input_tokens
    listed = list(client.responses.input_items.list(after.id, order="asc"))
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call",
        "function_call_output", "function_call_output",
    ]  # fmt: skip


def test_streamed_calls_add_up(calling: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    say(calling, monkeypatch, CALLS)
    body = {"input": "x", "tools": [WEATHER], "ignore_eos": True, "stream": True}
    body |= {"max_output_tokens": len(CALLS) // 7 + 1}
    answer = httpx.post(f"{calling.url}/v1/responses", json=body, timeout=300)
    assert assemble(events_of(answer)) == [
        ("reasoning", "hm, Oslo"), ("message", "So:"),
        ("function_call", '{"city": "Oslo"}'), ("function_call", "{}"),
    ]  # fmt: skip


def test_a_call_can_be_demanded(calling: Live) -> None:
    """Open Responses' "tool-calling", of a model that would not call by itself."""
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        strict = {**WEATHER, "strict": True}
        strict["parameters"] = {
            **WEATHER["parameters"], "required": ["city"], "additionalProperties": False,
        }  # fmt: skip
        body = {"input": "x", "tools": [strict], "tool_choice": choice, "max_output_tokens": 250,
                "parallel_tool_calls": False, "seed": 1}  # fmt: skip
        answer = httpx.post(f"{calling.url}/v1/responses", json=body, timeout=600).json()
        Response.model_validate(answer)
        assert answer["tool_choice"] == choice and answer["parallel_tool_calls"] is False
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if answer["status"] == "completed":
            assert len(json.loads(calls[0]["arguments"])["city"]) <= 4 and len(calls) == 1


# Fields: each is honoured, refused by name, or cannot change the answer

VLLM = """
background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop
ignore_eos vllm_xargs kv_transfer_params presence_penalty frequency_penalty min_p extra_key
"""


def test_every_known_field_is_in_a_table() -> None:
    known = set(VLLM.split()) | set(response_create_params.ResponseCreateParamsBase.__annotations__)
    known |= {"stream"}
    tables: list[Any] = [ResponsesRequest.model_fields, ChatRequest.model_fields]
    tables += [RENAMED, HARMLESS, CHANGES]
    assert known - {name for table in tables for name in table} == set()
    assert not set(RENAMED) & set(ResponsesRequest.model_fields)


def test_fields_are_treated_as_the_tables_say(http: httpx.Client) -> None:
    odd = [{"something": "odd"}]
    passing = {name: odd for name, values in HARMLESS.items() if values is None}
    passing = {name: odd for name in passing if name not in ResponsesRequest.model_fields}
    fine = post(http, **passing, a_field_of_next_year=odd, max_output_tokens=1)
    assert fine.status_code == 200, fine.text
    nulls = dict.fromkeys(ResponsesRequest.model_fields.keys() - {"input"})
    nulls |= {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None}}
    assert post(http, **nulls | {"max_output_tokens": 1}).status_code == 200
    own = set(ResponsesRequest.model_fields) | set(RENAMED)
    chats = set(ChatRequest.model_fields) - own - {"renamed"}
    chats |= {name for name, values in HARMLESS.items() if values is not None} - own
    for name in sorted(own | chats):
        answer = post(http, **{name: odd})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert error["param"] == name and error["message"].startswith(name), error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ...}, "input"),
        ({"input": []}, "input"),
        ({"input": "and " * 5000}, "input"),
        ({"input": "half \ud800"}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1_1"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"model": "gpt-9"}, "model"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "text"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"const": "\ud800"}}}}, "text"),
        ({"text": {"format": {"type": "text", "schema": {"maximum": 2**64}}}}, "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "never", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "hosted"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{**WEATHER, "parameters": {"const": "\ud800"}}]}, "tools"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"top_p": 7}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"input": ASK, "stream": stream, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    answer = http.post("/responses", content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert error["param"] == param and error["message"].startswith(param), error
    assert "msg_1_1" not in str(fields) or "'msg_1_1'" in error["message"]  # not its response


JSON = {"content-type": "application/json"}


def test_reasoning_effort_reaches_the_template(http: httpx.Client) -> None:
    body = ResponsesRequest(input="x", reasoning={"effort": "none"}, instructions="Be brief.")
    chat = body.as_chat(read_items([{"role": "user", "content": "x"}]))
    assert chat.prompt() == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        "template_kwargs": {
            "reasoning_effort": "none",
            "enable_thinking": False,
            "thinking": False,
        },
    }
    assert post(http, reasoning={"effort": "high"}).json()["reasoning"]["effort"] == "high"


def test_instructions_are_not_carried_over(http: httpx.Client) -> None:
    plain = post(http).json()["usage"]["input_tokens"]
    told = post(http, instructions="Answer in one word.").json()
    assert told["instructions"] == "Answer in one word." and told["usage"]["input_tokens"] > plain
    after = post(http, input="Why?", previous_response_id=told["id"]).json()
    (answer,) = told["output"]
    said = [{"role": "user", "content": ASK}, answer, {"role": "user", "content": "Why?"}]
    by_hand = post(http, input=said).json()
    assert after["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    assert after["instructions"] is None


def test_pages_of_items(http: httpx.Client) -> None:
    items = [{"role": "user", "content": f"{i}"} for i in range(5)]
    name = post(http, input=items, max_output_tokens=1).json()["id"]
    path = f"/responses/{name}/input_items"
    ids = [item["id"] for item in http.get(path, params={"order": "asc"}).json()["data"]]
    for limit in range(1, 7):
        found, after, more = [], {}, True
        while more:
            page = http.get(path, params={"order": "asc", "limit": limit, **after}).json()
            found += [item["id"] for item in page["data"]]
            after, more = {"after": page["last_id"]}, page["has_more"]
        assert found == ids and len(ids) == 5
    for query, param in [("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")]:
        answer = http.get(f"{path}?{query}")
        assert answer.status_code == 400, answer.text
        assert param in answer.json()["error"]["message"]
    assert http.get(f"/responses/{name}?stream=true").status_code == 400


# What is kept


def turn(name: str, previous: str | None, text: str = "") -> Turn:
    response = {"id": name, "previous_response_id": previous, "output": [{"text": text}]}
    return Turn([{"id": f"{name}_0"}], response)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_kept_can_be_continued(data: st.DataObject) -> None:
    """Within its bounds; after random uses, every response that is left has all before it."""
    now, made, deleted = 0.0, dict[str, str | None](), set[str]()
    store = ResponseStore(max_bytes=1500, seconds=10, clock=lambda: now)
    for step in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["put", "put", "put", "get", "wait", "delete"]))
        if what == "put":
            name, previous = f"resp_{step}", data.draw(st.sampled_from([None, *made]))
            try:
                store.conversation("a", previous)  # as a request does that continues it
            except KeyError:
                continue
            made[name] = previous
            store.put("a", turn(name, previous, "x" * data.draw(st.integers(0, 200))))
        elif what == "wait":
            now += data.draw(st.floats(0, 6))
        elif made:
            name = data.draw(st.sampled_from(list(made)))
            try:
                store.get("a", name)
                if what == "delete":
                    store.delete("a", name)
                    deleted.add(name)
            except KeyError:
                assert name not in store._entries
        assert store.size == sum(len(entry.data) for entry in store._entries.values()) <= 1500
        for name in list(store._entries):
            line = [name]
            while (before := made[line[-1]]) is not None:
                line.append(before)
            if not deleted & set(line) and store._entries[name].expires > now:
                assert all(other in store._entries for other in line), (name, line)
    assert not deleted & set(store._entries)


def test_a_conversation_comes_in_order_or_not_at_all() -> None:
    store = ResponseStore()
    for name, previous in [("resp_1", None), ("resp_2", "resp_1"), ("resp_3", "resp_2")]:
        store.put("a", turn(name, previous))
    names = [t.response["id"] for t in store.conversation("a", "resp_3")]
    assert names == ["resp_1", "resp_2", "resp_3"] and store.conversation("a", None) == []
    store.delete("a", "resp_2")
    with pytest.raises(KeyError, match="resp_2"):
        store.conversation("a", "resp_3")
    assert store.get("a", "resp_3").response["id"] == "resp_3"


def test_time_runs_from_the_last_use() -> None:
    now = 0.0
    store = ResponseStore(seconds=10, clock=lambda: now)
    store.put("a", turn("resp_1", None))
    store.put("a", turn("resp_2", "resp_1"))
    store.put("a", turn("resp_other", None))
    now = 9.0
    store.get("a", "resp_2")  # and with it what it continues
    now = 18.0
    assert len(store.conversation("a", "resp_2")) == 2
    with pytest.raises(KeyError):
        store.get("a", "resp_other")
    now = 28.0
    with pytest.raises(KeyError):
        store.get("a", "resp_2")
    assert store.size == 0


def test_clients_have_stores_of_their_own() -> None:
    """A client evicts its own turns only while it holds the most; no other client finds them."""
    store = ResponseStore(max_bytes=10_000)
    store.put("victim", turn("resp_v", None, "x" * 500))
    for number in range(100):
        store.put("greedy", turn(f"resp_{number}", None, "x" * 900))
    assert store.get("victim", "resp_v").response["id"] == "resp_v"
    assert store.get("greedy", "resp_99") and store.size <= 10_000
    store.put("third", turn("resp_t", None, "x" * 3000))  # still holds less
    assert store.get("third", "resp_t") and store.get("victim", "resp_v")
    for other in ("greedy", ""):
        for attempt in (store.get, store.conversation, store.delete):
            with pytest.raises(KeyError, match="resp_v"):
                attempt(other, "resp_v")
    store.put("greedy", turn("resp_stolen", "resp_v"))
    with pytest.raises(KeyError, match="resp_v"):
        store.conversation("greedy", "resp_stolen")
    assert store.get("victim", "resp_v")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_who_holds_no_more_than_an_equal_share_loses_nothing_to_others(data: st.DataObject) -> None:
    """Whatever the others store; and the new turn is there, unless its client holds the most."""
    store, kept = ResponseStore(max_bytes=20_000), dict[str, list[str]]()
    for number in range(data.draw(st.integers(10, 60))):
        client = data.draw(st.sampled_from("abcdef"))
        before = dict(store._held)
        name = f"resp_{number}"
        made = turn(name, None, "x" * data.draw(st.integers(0, 4000)))
        store.put(client, made)
        assert store.size == sum(len(entry.data) for entry in store._entries.values()) <= 20_000
        assert store._held.keys() == store._own.keys()
        kept.setdefault(client, []).append(name)
        for other, names in kept.items():
            if other != client and before.get(other, 0) <= 20_000 // 6:
                assert all(each in store._entries for each in names), (other, before)
            kept[other] = [each for each in names if each in store._entries]
        mine = before.get(client, 0) + len(msgspec.json.encode(made))
        assert name in store._entries or mine >= max(store._held.values())


def test_of_equal_clients_none_makes_room_for_another() -> None:
    store = ResponseStore(max_bytes=128_000)
    for number in range(200):
        store.put(f"client {number}", turn(f"resp_{number}", None, "x" * 850))
    before = [*store._entries]
    store.put("one more", turn("resp_999", None, "x" * 850))
    assert [*store._entries] == before


def test_one_request_reads_a_bounded_part_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation, many turns, and one item many times."""
    store, most = ResponseStore(), 5000
    monkeypatch.setattr("minisgl.server.responses.store.MOST_READ", most)
    monkeypatch.setattr("minisgl.server.responses.routes.MOST_READ", most)
    for number in range(8):
        text = [{"type": "input_text", "text": "x" * 1000}]
        item = {"type": "message", "role": "user", "content": text, "id": f"msg_{number}_0"}
        previous = f"resp_{number - 1}" if number else None
        head = {"id": f"resp_{number}", "previous_response_id": previous, "output": []}
        store.put("a", Turn([item], head))
    assert len(store.conversation("a", "resp_2")) == 3
    for body in (
        {"previous_response_id": "resp_7", "input": "x"},
        {"input": [{"type": "item_reference", "id": f"msg_{n}_0"} for n in range(8)]},
        {"input": [{"type": "item_reference", "id": "msg_0_0"}] * 8},
    ):
        with pytest.raises(ApiError, match=r"(input|previous_response_id): \d+ bytes") as caught:
            conversation(store, "a", ResponsesRequest.model_validate(body))
        assert caught.value.status_code == 400


def test_a_conversation_has_a_bounded_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small ones take as long to read as a few large ones, and each turn may be small."""
    store = ResponseStore()
    monkeypatch.setattr("minisgl.server.responses.routes.MAX_CONTAINERS", 10)
    for number in range(4):
        items = [{"type": "reasoning", "id": f"rs_{number}_{n}"} for n in range(3)]
        previous = f"resp_{number - 1}" if number else None
        store.put(
            "a",
            Turn(items, {"id": f"resp_{number}", "previous_response_id": previous, "output": []}),
        )
    asked = [{"previous_response_id": f"resp_{n}", "input": "x"} for n in (2, 3)]
    assert len(conversation(store, "a", ResponsesRequest.model_validate(asked[0]))[0]) == 9
    with pytest.raises(ApiError, match="previous_response_id: 12 stored items") as caught:
        conversation(store, "a", ResponsesRequest.model_validate(asked[1]))
    assert caught.value.status_code == 400


def test_stored_turns_are_read_beside_the_event_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(data: bytes) -> Turn:
        threads.append(threading.current_thread().name)
        return decode(data)

    for module in ("store", "routes"):
        monkeypatch.setattr(f"minisgl.server.responses.{module}.decode", noted)
    with httpx.Client(base_url=f"{live.url}/v1", timeout=100) as http:
        first = http.post("/responses", json={"input": "x", "max_output_tokens": 1}).json()["id"]
        reference = [{"type": "item_reference", "id": first.replace("resp", "msg") + "_0"}]
        for more in ({"input": "y", "previous_response_id": first}, {"input": reference}):
            answer = http.post("/responses", json={"max_output_tokens": 1, **more})
            assert answer.status_code == 200, answer.text
        for path in ("", "/input_items"):
            assert http.get(f"/responses/{first}{path}").status_code == 200
    assert len(threads) == 4 and all(name.startswith("bodies") for name in threads), threads


def test_turns_count_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read counts, a second one of the same turn included; one that is refused reads none."""
    store, counts, read = ResponseStore(), list[int](), list[int]()
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    for number in (1, 2):
        head = {"id": f"resp_{number}", "previous_response_id": None, "output": []}
        store.put("a", Turn([item | {"id": f"msg_{number}_0"}], head))
    store._entries["resp_2"].previous = "resp_1"
    sizes = [len(store.read("a", f"resp_{n}")) for n in (1, 2)]
    again = len(msgspec.json.encode(item | {"id": "msg_1_0"}))
    references = [{"type": "item_reference", "id": "msg_1_0"}] * 2

    def noted(data: bytes) -> Turn:
        read.append(len(data))
        return decode(data)

    def refuse(size: int) -> None:
        raise ApiError(429, "full", code="bodies_full")

    for module in ("store", "routes"):
        monkeypatch.setattr(f"minisgl.server.responses.{module}.decode", noted)
    for fields, expected in (
        ({"input": "x", "previous_response_id": "resp_2"}, [sum(sizes)]),
        ({"input": references}, [sizes[0], again, again]),
    ):
        body = ResponsesRequest.model_validate(fields)
        with pytest.raises(ApiError, match="full"):
            conversation(store, "a", body, refuse)
        assert not read
        conversation(store, "a", body, counts.append)
        assert [count for count in counts if count] == expected
        counts.clear()
        read.clear()


@pytest.fixture(scope="module")
def tight() -> Iterator[tuple[Live, list[httpx.Client], list[list[str]]]]:
    """A server with little memory, two clients, and two stored responses of each.

    The first response of each is large: of the first client's, a share fits only one.
    """
    operations = Operations(log_format="none", max_body_size=20_000)
    model, names = resolve_model_path(None), list[list[str]]()
    with (
        Live(model, num_pages=1024, operations=operations, send_buffer=4096) as live,
        client_at(live, "127.0.0.1") as http,
        client_at(live, "127.0.0.2") as other,
    ):
        for each, tokens in ((http, 60), (other, 20)):
            large = post(each, include=["message.output_text.logprobs"], top_logprobs=20,
                         ignore_eos=True, max_output_tokens=tokens)  # fmt: skip
            assert (0.55 if each is http else 0.15) < len(large.content) / live.bodies.most < 0.8
            first = large.json()["id"]
            second = post(each, input="y", max_output_tokens=1, previous_response_id=first)
            names.append([first, second.json()["id"]])
        yield live, [http, other], names
        live.assert_pages_home()


@pytest.mark.parametrize("way", ["previous_response_id", "item_reference"])
def test_stored_turns_count_while_a_request_that_reads_them_runs(
    tight: tuple[Live, list[httpx.Client], list[list[str]]], way: str
) -> None:
    live, clients, names = tight
    gate, inside, replies = threading.Event(), threading.Event(), RequestHandler._replies

    async def gated(self: RequestHandler) -> AsyncGenerator[Any, None]:
        inside.set()
        while not gate.is_set():
            await asyncio.sleep(0.01)
        async for pair in replies(self):
            yield pair

    def ask(which: int) -> httpx.Response:
        name, fields = names[which][0], {"max_output_tokens": 1, "store": False}
        reference = [{"type": "item_reference", "id": name.replace("resp", "msg") + "_0"}]
        fields |= {way: name} if way == "previous_response_id" else {"input": reference}
        return post(clients[which], **fields)

    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RequestHandler, "_replies", gated)
                first = pool.submit(ask, 0)
                wait_for(lambda: inside.is_set() or first.done(), "it to begin")
            assert live.bodies.taken > live.bodies.most / 2
            refused = ask(0)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
            assert ask(1).status_code == 200
            assert post(clients[0], max_output_tokens=1).status_code == 200  # reads no turn
        finally:
            gate.set()
        assert first.result().status_code == 200
    wait_for(lambda: live.bodies.taken == 0, "all to be given back", 2)


@pytest.mark.parametrize(("which", "path"), [(0, ""), (1, "/input_items")])
def test_stored_turns_count_while_they_are_sent(
    tight: tuple[Live, list[httpx.Client], list[list[str]]], which: int, path: str
) -> None:
    live, clients, names = tight
    paths = [f"/responses/{of_one[which]}{path}" for of_one in names]
    with slow_reader(live, "GET", f"/v1{paths[0]}"):
        wait_for(lambda: live.bodies.taken > live.bodies.most / 2, "the answer to wait", 2)
        refused = clients[0].get(paths[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
        assert clients[1].get(paths[1]).status_code == 200
        assert post(clients[0], max_output_tokens=1).status_code == 200
    wait_for(lambda: live.bodies.taken == 0, "the reader to leave", 2)
    assert clients[0].get(paths[0]).status_code == 200


def test_what_does_not_fit_drives_nothing_before_it_out() -> None:
    store = ResponseStore(max_bytes=500)
    store.put("a", turn("resp_1", None, "x" * 100))
    store.put("a", turn("resp_2", "resp_1", "x" * 1000))
    assert len(store.conversation("a", "resp_1")) == 1
    with pytest.raises(KeyError):
        store.get("a", "resp_2")


# The tree that grows


STREAMS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}


def said_in(item: dict[str, Any]) -> str:
    """The text of a message or a thought, the arguments of a call."""
    return item["arguments"] if "arguments" in item else item["content"][0]["text"]


def assemble(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Assemble a client's view; every opened part must be closed with its final value."""
    heard: list[tuple[str, str]] = []
    begun = ["response.created", "response.in_progress"]
    assert [event["type"] for event in events[:2]] == begun
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item: dict[str, Any] = {}
    for event in events:
        read_event(event)
        what = event["type"].removeprefix("response.")
        assert event.get("output_index", len(heard)) == len(heard)
        assert event.get("item_id", item.get("id")) == item.get("id")
        if what == "output_item.added":
            assert not item and event["item"]["status"] == "in_progress"
            item, text = event["item"], ""
        elif what.endswith(".delta"):
            assert what == f"{STREAMS[item['type']]}.delta"
            text += event["delta"]
        elif what == f"{STREAMS.get(item.get('type', ''))}.done":
            assert event["arguments" if "arguments" in event else "text"] == text
        elif what == "output_item.done":
            assert event["item"]["id"] == item["id"] and said_in(event["item"]) == text
            heard.append((item["type"], text))
            item = {}
    output = events[-1]["response"]["output"]
    assert not item and [(i["type"], said_in(i)) for i in output] == heard
    return heard


def answer_of(pieces: list[Piece], count: int = 0, **fields: Any) -> Completion:
    entries = [TokenLogprob("a", b"a", -0.5, 0)] * count
    return Completion(pieces=pieces, logprobs=entries, **fields)


segments = st.tuples(st.sampled_from(list(STREAMS)), st.lists(st.text(min_size=1, max_size=5)))


@settings(max_examples=30, deadline=None)
@given(st.lists(segments, max_size=6), st.sampled_from(["stop", "length"]), st.integers(1, 4))
def test_pieces_add_up(said: list[tuple[str, list[str]]], reason: str, size: int) -> None:
    """For any text, in any pieces, the events add up to it, and to the response."""
    pieces: list[Piece] = []
    expected: list[tuple[str, str]] = []
    for call, (kind, texts) in enumerate(said):
        if kind == "function_call":
            pieces.append(CallStart(call, f"call_{call}", "f"))
            pieces += [CallArguments(call, text) for text in texts]
        else:
            pieces += [(Content if kind == "message" else Reasoning)(text) for text in texts]
        if not texts and kind != "function_call":
            continue
        if expected and expected[-1][0] == kind != "function_call":
            kind, text = expected.pop()
            texts = [text, *texts]
        expected.append((kind, "".join(texts)))
    base = {
        "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "tools": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "status": "in_progress",
    }  # fmt: skip
    ends = []
    for step in (size, len(pieces) + 1):  # in several replies, and in one
        builder, events = ResponseBuilder({**base, "output": []}, 1), list[dict[str, Any]]()
        for start in range(0, max(1, len(pieces)), step):
            events += builder.add(answer_of(pieces[start : start + step], 1))
        events += builder.finish(Completion(finish_reason=reason, prompt_tokens=5), now=7)
        assert events[0]["response"]["output"] == []  # a sent event stays unchanged
        assert assemble(json.loads(encoded(events))) == (expected or [("message", "")])
        output = builder.response["output"]
        assert [item["id"].rpartition("_")[2] for item in output] == [
            str(number) for number in range(1, 1 + len(output))
        ]
        assert {item["status"] for item in output[:-1]} <= {"completed"}
        assert output[-1]["status"] == builder.response["status"]
        for part in [part for item in output for part in item.get("content", [])]:
            part.pop("logprobs", None)  # by reply
        del builder.response["usage"]
        ends.append(builder.response)
    assert ends[0] == ends[1]
    assert ends[0]["status"] == {"stop": "completed", "length": "incomplete"}[reason]


def test_tokens_of_a_thought_are_counted_in_a_reply_that_holds_it_whole() -> None:
    """Replies that waited for their reader arrive as one."""
    answer = Completion(AnswerParser(True))
    answer.add(
        UserReply(
            uid=0,
            text="hm.</think>So!",
            token_ids=[1] * 14,
            completion_tokens=20,
            thought_tokens=17,
            thinking=True,
        )
    )
    assert answer.pieces == [Reasoning("hm."), Content("So!")] and answer.reasoning_tokens == 17
    builder = ResponseBuilder({"id": "resp_1", "output": []}, first=0)
    list(builder.add(answer))
    list(builder.finish(answer, now=7))
    assert builder.response["usage"]["output_tokens_details"]["reasoning_tokens"] == 17


def test_log_probabilities_and_counts_of_a_thoughtful_answer() -> None:
    builder = ResponseBuilder({"id": "resp_1", "output": []}, first=0)
    told = [("<think>", 1), ("hm", 3), ("</think>", 4), ("\n\nSo", 6), ("!", 7)]
    answer, offset = Completion(AnswerParser(True)), 0
    for text, tokens in told:
        entries = [TokenLogprob(text, text.encode(), -0.5, offset)]
        counts = {"completion_tokens": tokens, "prompt_tokens": 5, "cached_tokens": 2}
        counts["thought_tokens"] = 0 if tokens < 4 else 4
        reply = UserReply(uid=0, text=text, token_ids=[1], logprobs=entries, **counts)
        answer.add(msgspec.structs.replace(reply, finished=text == "!"))
        list(builder.add(answer))
        assert text != "hm" or answer.reasoning_tokens == 3  # if it were cut here
        answer.forget()
        offset += len(text)
    list(builder.finish(answer, now=7))
    usage = builder.response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 4 and usage["total_tokens"] == 12
    assert usage["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 3}
    thought, message = builder.response["output"]
    assert "logprobs" not in thought["content"][0] and len(message["content"][0]["logprobs"]) == 2


@pytest.mark.parametrize("limit", [1, 4, 20])
def test_streamed_and_whole_are_the_same(http: httpx.Client, limit: int) -> None:
    fields = {
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": limit,
        "store": False,
    }
    whole = post(http, **fields).json()
    events = events_of(post(http, **fields, stream=True))
    streamed = events[-1]["response"]
    assert assemble(events) == [("message", said_in(whole["output"][0]))]
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del response[name]
        del response["output"][0]["id"], response["usage"]["input_tokens_details"]
        for part in response["output"][0]["content"]:
            part["logprobs"] = [entry["token"] for entry in part["logprobs"]]
    assert streamed == whole
    if limit < 5:
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


def test_items_become_messages() -> None:
    said = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be "}] * 2},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"type": "message", "role": "assistant", "content": "One"},
        {"type": "message", "role": "assistant", "content": "and two"},
    ]
    messages = as_messages(read_items(said))
    assert [message["role"] for message in messages] == [
        "developer", "user", "assistant", "tool", "tool", "assistant", "assistant",
    ]  # fmt: skip
    assert messages[0]["content"] == "Be Be "
    assert (messages[2]["reasoning_content"], messages[2]["content"]) == ("Hm", "I ask.")
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert messages[4] == {"role": "tool", "tool_call_id": "b", "content": "2"}


# When things go wrong


def test_a_client_that_leaves_frees_its_pages(live: Live) -> None:
    body = {"input": "x", "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/responses", json=body, timeout=200) as answer:
        next(answer.iter_lines())
    live.assert_pages_home()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/responses", json={**body, "stream": False}, timeout=0.1)
    live.assert_pages_home()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RequestFailed("timeout: too late", "deadline_exceeded", "timeout"), "deadline_exceeded"),
        (RequestFailed("the scheduler died", "service_unavailable"), "server_error"),
        (OverflowError("a number too large"), "server_error"),
    ],
)
def test_a_failure_in_the_middle_is_told(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str
) -> None:
    replies = RequestHandler._replies

    async def broken(self: RequestHandler) -> AsyncGenerator[Any, None]:
        async for pair in replies(self):
            yield pair
            raise failure

    monkeypatch.setattr(RequestHandler, "_replies", broken)
    last = events_of(post(http, stream=True))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    assert str(failure) in last["response"]["error"]["message"]
    assert http.get(f"/responses/{last['response']['id']}").status_code == 404


def test_every_route_wants_the_key() -> None:
    app = create_app(
        Frontend([LocalQueue()], LocalQueue()),
        ApiSettings("m", 9, api_key="secret"),
        more_routes=[add_responses_routes],
    )

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            one = "/v1/responses/resp_1"
            for method, path in [("POST", "/v1/responses"), ("GET", one), ("DELETE", one),
                                 ("GET", f"{one}/input_items")]:  # fmt: skip
                assert (await client.request(method, path)).status_code == 401
                good = {"authorization": "Bearer secret"}
                known = await client.request(method, path, headers=good)
                assert known.status_code == (400 if method == "POST" else 404)
                assert path.replace("resp_1", "{response_id}") in app.openapi()["paths"]
            lost = (await client.get("/v1/nowhere")).json()["error"]["message"]
            assert "/v1/responses/{response_id}/input_items" in lost

    asyncio.run(run())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
GOOD: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
    ],
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "top_logprobs": 1,
}


def mutated(data: st.DataObject, value: Any) -> Any:
    """A copy in which one place, at any depth, is something else."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        copy: Any = value.copy()
        copy[key] = mutated(data, value[key])
        return copy
    return data.draw(values)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_mutated_body_is_never_our_fault(http: httpx.Client, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True))
    body = mutated(data, {"input": "x", **{name: GOOD[name] for name in names}})
    if isinstance(body, dict):
        body["max_output_tokens"] = 1
    content = json.dumps(body).encode()
    answer = http.post("/responses", content=content, headers=JSON)
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
