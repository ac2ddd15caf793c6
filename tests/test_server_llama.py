"""The requests of llama.cpp's server tests to OpenAI's routes, in our words.

From `test_chat_completion.py`, `test_completion.py` and `test_security.py` in its
tools/server/tests/unit (github.com/ggml-org/llama.cpp, November 2026). Not asked here:

- `system_fingerprint`, the words of an answer, lengths of prompts: those of its build and model
- `__verbose`, `timings_per_token`, `n_probs`, `response_fields`: its own fields
- /completion, /tokenize, /apply-template, /slots, /props, /infill: its own routes
- /models without /v1: the 404 names /v1/models
- two answers of the assistant in a row are no error here: the chat template takes them
- a first delta without text: ours has role and text, which clients accept
- `type` "authentication_error" of a wrong key: OpenAI says invalid_request_error
- images: our models read text
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.config.paths import resolve_model_path
from tests.serving import Live

BOOK = [
    {"role": "system", "content": "Book"},
    {"role": "user", "content": "What is the best book"},
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        Live(resolve_model_path(None), num_pages=256, api_key="secret") as live,
        httpx.Client(base_url=f"{live.url}/v1", timeout=600) as client,
    ):
        client.headers["Authorization"] = "Bearer secret"
        yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/chat/completions", json={"messages": BOOK, "max_tokens": 8} | fields)


def test_a_chat(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": part} for part in ("What is", " the best book")]
    for asked in (BOOK, [BOOK[0], {"role": "user", "content": parts}]):
        body = chat(http, messages=asked, ignore_eos=True).json()
        assert body["id"].startswith("chatcmpl-") and body["usage"]["completion_tokens"] == 8
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"]["role"] == "assistant"


def test_a_stream(http: httpx.Client) -> None:
    said = chat(http, stream=True, stream_options={"include_usage": True}, logprobs=True)
    lines = [line.removeprefix("data: ") for line in said.text.split("\n\n")]
    *events, last = [json.loads(line) for line in lines if line.startswith("{")]
    assert len({event["id"] for event in events}) == 1
    assert [("role" in event["choices"][0]["delta"]) for event in events[1:]].count(True) == 0
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    choices = [event["choices"][0] for event in events]
    told = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert "".join(one["token"] for one in told) == text


CONST, ROOT = {"const": "42"}, 'root ::= "a"{5,5}'
FORMS: list[tuple[dict[str, Any], str]] = [  # fields, and the answer or the field at fault
    ({"response_format": {"type": "json_object", "schema": CONST}}, '"42"'),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": CONST}}}, '"42"'),
    ({"response_format": {"type": "json_schema", "schema": CONST}}, '"42"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": CONST}}}, '"42"'),
    ({"json_schema": CONST}, '"42"'),
    ({"grammar": ROOT}, "aaaaa"),
    ({"response_format": {"type": "sound"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"type": 123}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "scheme": CONST}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "want"), FORMS)
def test_forms_of_answers(http: httpx.Client, fields: dict[str, Any], want: str) -> None:
    said = chat(http, **fields)
    if want == "response_format":
        assert said.status_code == 400 and said.json()["error"]["param"] == want
        assert want in said.json()["error"]["message"]
    else:
        assert said.json()["choices"][0]["message"]["content"] == want


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
     [{"role": "system", "content": "test"}, {}]],
)  # fmt: skip
def test_messages_that_are_none(http: httpx.Client, messages: Any) -> None:
    said = chat(http, messages=messages)
    assert said.status_code == 400 and "messages" in said.json()["error"]["message"]


def test_prompts_as_tokens(http: httpx.Client) -> None:
    fields = {"prompt": [[5, 6, 7], [5, 6, 7]], "max_tokens": 4, "temperature": 0}
    one, other = http.post("/completions", json=fields).json()["choices"]
    assert one["text"] == other["text"] and (one["index"], other["index"]) == (0, 1)


def test_keys(http: httpx.Client) -> None:
    health = httpx.get(str(http.base_url).replace("/v1/", "/health"))
    assert health.status_code == 200  # without a key
    for key in (None, "Bearer invalid-key"):
        with httpx.Client(base_url=http.base_url) as stranger:
            headers = {"Authorization": key} if key else {}
            said = stranger.post("/completions", json={"prompt": "x"}, headers=headers)
        assert said.status_code == 401 and said.json()["error"]["message"]


def test_other_origins_are_asked_first(http: httpx.Client) -> None:
    asked = {"Origin": "web.mydomain.fr", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "Authorization"}  # fmt: skip
    headers = http.options("/completions", headers=asked).headers
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "Authorization"
