"""The anthropic package: a message, a stream and a count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import ANSWER, ASK

anthropic = pytest.importorskip("anthropic")


def test_messages(url: str) -> None:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}]}
    options: Any = {"max_tokens": 16, "extra_body": {"temperature": 0}}
    assert client.messages.create(**asked, **options).content[0].text == ANSWER
    with client.messages.stream(**asked, **options) as stream:
        assert "".join(stream.text_stream) == ANSWER
    assert client.messages.count_tokens(**asked).input_tokens > 5
