"""LiteLLM, as a client of OpenAI's and of vLLM's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import ANSWER, ASK, PERSON

MESSAGES = [{"role": "user", "content": ASK}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm")


@pytest.mark.parametrize("model", ["openai/tiny", "hosted_vllm/tiny"])
def test_chat(url: str, litellm: Any, model: str) -> None:
    where = {"model": model, "api_base": url, "api_key": "x"}
    ask: Any = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    assert litellm.completion(**where, **ask).choices[0].message.content == ANSWER
    chunks = litellm.completion(**where, **ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    ask = {"messages": MESSAGES, "max_tokens": 60, "response_format": form, "temperature": 0}
    answer = litellm.completion(**where, **ask)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}


def test_a_long_prompt_has_its_error(url: str, litellm: Any) -> None:
    long = [{"role": "user", "content": "and " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/tiny", api_base=url, api_key="x", messages=long)


def test_tools(tools_url: str, litellm: Any) -> None:
    function = {"name": "person", "description": "tells of a person", "parameters": PERSON}
    ask: Any = {
        "model": "openai/tiny", "api_base": tools_url, "api_key": "x", "messages": MESSAGES,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "person"}},
    }  # fmt: skip
    (call,) = litellm.completion(**ask).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    chunks = list(litellm.completion(**ask, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
