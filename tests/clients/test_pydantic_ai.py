"""pydantic-ai: an agent with text, with a typed answer, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import ANSWER, ASK

pydantic_ai = pytest.importorskip("pydantic_ai")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


def agent(url: str, kind: str = "OpenAIChatModel", **fields: Any) -> Any:
    provider = providers.OpenAIProvider(base_url=url, api_key="x")
    model = getattr(openai_models, kind)("tiny", provider=provider)
    settings = {"temperature": 0.0, "max_tokens": 60}
    return pydantic_ai.Agent(model, model_settings=settings, **fields)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_text(url: str, kind: str) -> None:
    asked = agent(url, kind)

    async def run() -> list[str]:
        whole = (await asked.run(ASK)).output
        async with asked.run_stream(ASK) as result:
            return [whole, await result.get_output()]

    assert asyncio.run(run()) == [ANSWER, ANSWER]


def test_structured_output(url: str) -> None:
    asked = agent(url, output_type=pydantic_ai.NativeOutput(Person))
    assert 0 <= asyncio.run(asked.run(ASK)).output.age <= 99


def test_structured_output_by_a_tool(tools_url: str) -> None:
    asked = agent(tools_url, output_type=pydantic_ai.ToolOutput(Person))
    asked.model_settings["max_tokens"] = 400
    assert 0 <= asyncio.run(asked.run(ASK)).output.age <= 99
