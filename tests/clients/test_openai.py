"""The openai package: versions 1, 2 and 3 take these calls alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.conftest import ANSWER, ASK, PERSON

openai = pytest.importorskip("openai")
MESSAGES: Any = [{"role": "user", "content": ASK}]


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0)


def test_chat(client: Any) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == ANSWER and whole.usage.total_tokens > 16
    chunks = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    choices, usage = [], None
    for chunk in chunks:
        choices, usage = choices + chunk.choices, chunk.usage
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_async_chat(url: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, temperature=0, max_tokens=16
            )
            return str(answer.choices[0].message.content)

    assert asyncio.run(ask()) == ANSWER


def test_structured_output(client: Any) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=99)

    parse = getattr(client.chat.completions, "parse", None)
    parse = parse or client.beta.chat.completions.parse  # before 1.92
    answer = parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=60, temperature=0
    )
    assert 0 <= answer.choices[0].message.parsed.age <= 99
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    streamed = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=form,
        max_tokens=60,
        stream=True,
        temperature=0,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert set(json.loads(text)) == {"name", "age"}


def test_responses(client: Any) -> None:
    if not hasattr(client, "responses"):
        pytest.skip("this version knows no Responses API")
    answer = client.responses.create(model="tiny", input=ASK, temperature=0, max_output_tokens=16)
    assert answer.output_text == ANSWER and answer.status == "completed"
    with client.responses.stream(
        model="tiny", input=ASK, temperature=0, max_output_tokens=16
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == ANSWER == stream.get_final_response().output_text


def test_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)


def test_echo(client: Any) -> None:
    scored = client.completions.create(
        model="tiny", prompt=ASK, echo=True, logprobs=1, max_tokens=0
    ).choices[0]
    assert scored.text == ASK and scored.logprobs.token_logprobs[0] is None


FUNCTION: Any = {"name": "person", "description": "tells of a person", "parameters": PERSON}
CALL: Any = {
    "model": "tiny",
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "person"}},
}


def test_tools(tools_url: str) -> None:
    client = openai.OpenAI(base_url=tools_url, api_key="x", max_retries=0)
    choice = client.chat.completions.create(**CALL).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "person"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    text = ""
    for chunk in client.chat.completions.create(**CALL, stream=True):
        for choice in chunk.choices:
            text += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or [])
    assert set(json.loads(text)) == {"name", "age"}


def test_tools_of_responses(tools_url: str) -> None:
    client = openai.OpenAI(base_url=tools_url, api_key="x", max_retries=0)
    if not hasattr(client, "responses"):
        pytest.skip("this version knows no Responses API")
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    answer = client.responses.create(
        model="tiny", input=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "person" and set(json.loads(call.arguments)) == {"name", "age"}
