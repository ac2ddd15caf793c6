"""Our own client; those of others are in tests/clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from minisgl.server.chat.client import ApiClient, ServerError, base_url
from minisgl.server.chat.shell import Shell

# Our own client


def chunk(text: str, reason: str | None = None) -> str:
    choice = {"delta": {"content": text}, "finish_reason": reason}
    return json.dumps({"choices": [choice]}, ensure_ascii=False)


def read(data: str, status: int = 200, kind: str = "text/event-stream") -> list[str]:
    """The texts that a client makes of an answer that is played to it in pieces of 7 bytes."""
    raw = data.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 7):
            yield raw[start : start + 7]

    def played(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": kind}, content=pieces())

    async def run() -> list[str]:
        found = []
        async with ApiClient("host:1", transport=httpx.MockTransport(played)) as client:
            async for event in client.stream("chat/completions", {}):
                found += [choice["delta"]["content"] for choice in event["choices"]]
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("text", ["plain", "a\u2028b\u0085c", "🙂"])
def test_client_follows_the_specification(end: str, text: str) -> None:
    lines = [": hello", "", "event: delta", f"data:{chunk(text)}", "", "id: 7", ""]
    lines += [f"data: {chunk('end', 'stop')}", "", "data: [DONE]", "", "data: not JSON", ""]
    assert read(end.join(lines) + end) == [text, "end"]
    unsaid = [f"data: {chunk(text, 'stop')}", "", ""]  # no [DONE], but a reason
    assert read(end.join(unsaid)) == [text]


@pytest.mark.parametrize(
    ("data", "status", "kind"),
    [
        (f"data: {chunk('half')}\n\n", 200, "cut off"),
        ("", 200, "cut off"),
        ('data: {"error": {"message": "no"}}\n\n', 200, "error event"),
        ('{"error": {"message": "no"}}', 429, "http 429"),
        ("data: {half\n\n", 200, "bad answer"),
        ("data: [1]\n\n", 200, "bad answer"),
    ],
)
def test_a_stream_that_goes_wrong_says_how(data: str, status: int, kind: str) -> None:
    with pytest.raises(ServerError) as caught:
        read(data, status)
    assert caught.value.kind == kind


# The shell, connected to a server elsewhere


def connected(data: str) -> tuple[Shell, str, list[dict[str, Any]]]:
    """A shell after one turn with a server that plays `data`; what it wrote, what it sent."""
    sent, said = [], list[str]()

    def played(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, content=data.encode()
        )

    async def run() -> Shell:
        async with ApiClient("host:1", transport=httpx.MockTransport(played)) as client:
            shell = Shell(lambda messages: client.chat("their-model", messages), said.append)
            await shell.turn("hello")
            return shell

    return asyncio.run(run()), "".join(said), sent


def test_shell_follows_any_server() -> None:
    """It names the model, and reads over comments, named events and chunks without a choice."""
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    role = json.dumps({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
    lines = [": OPENROUTER PROCESSING", "", "event: message", f"data: {role}", ""]
    lines += [f"data: {chunk('two ')}", "", ": ping", "", "event: message", "id: 1"]
    lines += [f"data: {chunk('words', 'stop')}", "", f"data: {usage}", "", "data: [DONE]", "", ""]
    shell, said, (sent,) = connected("\n".join(lines))
    assert said == "two words\n" and shell.history[-1]["content"] == "two words"
    assert sent["model"] == "their-model" and "7 tokens" in shell.stats


@pytest.mark.parametrize("end", ["", 'data: {"error": {"message": "the engine died"}}\n\n'])
def test_a_cut_answer_is_shown_as_cut_and_forgotten(end: str) -> None:
    shell, said, _ = connected(f"data: {chunk('half an ans')}\n\n{end}")
    assert said.startswith("half an ans[") and shell.history == []
    assert ("the engine died" if end else "cut off") in said


def test_urls_with_and_without_v1() -> None:
    assert base_url("host:1/v1") == base_url("http://host:1/") == "http://host:1/v1/"
    for wrong in ("ftp://host", "http://", "h:99999", "h:abc", "http://[::1"):
        with pytest.raises(ValueError, match="url: must be like"):
            base_url(wrong)
