"""LangChain's chat model and completion model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import ANSWER, ASK, PERSON

langchain = pytest.importorskip("langchain_openai")


def chat(url: str, **fields: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 16, **fields}
    return langchain.ChatOpenAI(base_url=url, api_key="x", model="tiny", **given)


def test_chat(url: str) -> None:
    model = chat(url)
    whole = model.invoke(ASK)
    assert whole.content == ANSWER and whole.usage_metadata["total_tokens"] > 16
    assert "".join(chunk.content for chunk in model.stream(ASK)) == ANSWER
    assert [reply.content for reply in model.batch([ASK, ASK])] == [ANSWER, ANSWER]
    assert model.invoke(ASK, stop=["="]).content == ANSWER.split("=")[0]
    told = model.bind(logprobs=True, top_logprobs=2).invoke(ASK).response_metadata["logprobs"]
    assert "".join(entry["token"] for entry in told["content"]) == ANSWER


def test_completion(url: str) -> None:
    plain = langchain.OpenAI(base_url=url, api_key="x", model="tiny", temperature=0, max_tokens=5)
    assert plain.invoke("Once upon a time")


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(url: str, method: str) -> None:
    schema = {**PERSON, "title": "person", "description": "a person"}
    model = chat(url, max_tokens=60).with_structured_output(schema, method=method)
    if method == "json_mode":  # any object: a small model may not find its end
        model = chat(url, max_tokens=60).bind(response_format={"type": "json_object"})
        assert model.invoke(ASK).content.startswith("{")
        return
    assert set(model.invoke(ASK)) == {"name", "age"}
    *_, last = model.stream(ASK)
    assert set(last) == {"name", "age"}


def test_responses(url: str) -> None:
    model = chat(url, use_responses_api=True)
    assert model.invoke(ASK).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(ASK)) == ANSWER


def test_tools(tools_url: str) -> None:
    tool = {"name": "person", "description": "tells of a person", "parameters": PERSON}
    function = {"type": "function", "function": tool}
    model = chat(tools_url, max_tokens=None).bind_tools([function], tool_choice="person")
    (call,) = model.invoke(ASK).tool_calls
    assert call["name"] == "person" and set(call["args"]) == {"name", "age"}
    whole = None
    for chunk in model.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and set(whole.tool_calls[0]["args"]) == {"name", "age"}
    schema = {**PERSON, "title": "person", "description": "a person"}
    called = chat(tools_url, max_tokens=None)
    called = called.with_structured_output(schema, method="function_calling")
    assert set(called.invoke(ASK)) == {"name", "age"}
