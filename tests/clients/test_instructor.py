"""instructor: typed answers by JSON schema, in one piece and streamed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.conftest import ASK

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")


class Person(BaseModel, extra="forbid"):
    """A bounded schema: instructor sends no bounds, and a small model needs them."""

    name: Literal["Tom", "Anna"]
    age: Literal[7, 42]


def test_structured_output(url: str) -> None:
    plain = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "max_tokens": 60}
    ask["temperature"] = 0
    person = client.chat.completions.create(response_model=Person, max_retries=0, **ask)
    assert person.age in (7, 42)
    *_, last = client.chat.completions.create_partial(response_model=Person, **ask)
    assert last.age in (7, 42)


def test_tools(tools_url: str) -> None:
    plain = openai.OpenAI(base_url=tools_url, api_key="x", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], "max_retries": 0}
    assert client.chat.completions.create(response_model=Person, **ask).age in (7, 42)
