"""One HTTP client of OpenAI-compatible servers, for the chat and for load generators.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from httpx_sse import EventSource, SSEError

from minisgl.config.rules import refuse
from minisgl.server.frontend import RequestFailed
from minisgl.server.http.hosts import is_loopback
from minisgl.server.workers.messages import UserReply


class ServerError(Exception):
    """A failed request to a server. `kind` labels it for counting: "connect", "http 429", …"""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def base_url(url: str) -> str:
    """Return a server's address, ending in `/v1/`; raise `ValueError` for an invalid URL."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        path = parts.path.rstrip("/").removesuffix("/v1")
        base = str(httpx.URL(f"{parts.scheme}://{parts.netloc}{path}/v1/"))
    except (ValueError, httpx.InvalidURL):  # an unclosed bracket, an invalid port
        good = False
    if not good:
        raise refuse("url", "like http://host:1919", url)
    return base


def message_of(body: str) -> str:
    """Return the message of an error body, or the body itself if it has another shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


class ApiClient:
    """An OpenAI-compatible server. `timeout` is in seconds, for each wait on the network."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = base_url(url)
        headers = {"accept-encoding": "identity"}  # compression would delay chunks
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # A proxy from the environment must not see the key, nor requests to this machine.
        here = is_loopback(urlsplit(self.url).hostname or "")
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits,
            transport=transport, trust_env=not here,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Return the cards in `/v1/models`; raise `ServerError`."""
        try:
            response = await self.http.get("models")
        except httpx.HTTPError as error:
            raise ServerError("connect", str(error) or type(error).__name__) from error
        if response.status_code != 200:
            raise ServerError(f"http {response.status_code}", message_of(response.text)[:300])
        try:
            return [dict(card) for card in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError("bad answer", "models: not a list of models") from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a streamed answer's events up to `[DONE]`; leaving early closes the connection.

        Raise `ServerError`, also for a stream that ends without `[DONE]` and a finish reason.
        """
        complete = False
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise ServerError(f"http {response.status_code}", message_of(text)[:500])
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    async for event in events:
                        if event.data == "[DONE]":
                            return
                        if not event.data:
                            continue
                        found = json.loads(event.data)
                        if found.get("error"):
                            raise ServerError("error event", message_of(event.data))
                        choices = found.get("choices") or ()
                        complete = complete or any(
                            choice.get("finish_reason") for choice in choices
                        )
                        yield found
        except httpx.ConnectError as error:
            raise ServerError("connect", str(error)) from error
        except httpx.TimeoutException as error:
            raise ServerError("timeout", type(error).__name__) from error
        except httpx.HTTPError as error:
            raise ServerError("connection", f"{type(error).__name__}: {error}") from error
        except (SSEError, ValueError, AttributeError) as error:
            raise ServerError("bad answer", f"{type(error).__name__}: {error}") from error
        if not complete:
            raise ServerError(
                "cut off", "the stream ended without a finish reason and without [DONE]"
            )

    async def chat(
        self, model: str, messages: list[dict[str, str]]
    ) -> AsyncGenerator[UserReply, None]:
        """Yield replies to a conversation; raise `RequestFailed` for any failure on the way."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": model, "messages": messages, **options}
        try:
            async with aclosing(self.stream("chat/completions", body)) as events:
                async for event in events:
                    yield as_reply(event)
        except ServerError as error:
            raise RequestFailed(f"{error.kind.removeprefix('http ')}: {error}") from error


def as_reply(event: dict[str, Any]) -> UserReply:
    """Convert a chunk of a stream to the reply that the shell prints."""
    choice = (event.get("choices") or [{}])[0]
    bill = event.get("usage") or {}
    return UserReply(
        uid=0,
        text=(choice.get("delta") or {}).get("content") or "",
        token_ids=[],
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=bill.get("prompt_tokens", 0),
        cached_tokens=(bill.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        completion_tokens=bill.get("completion_tokens", 0),
    )
