"""One streamed request to an OpenAI-compatible server, and when each part of its answer came.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx


@dataclass
class Record:
    """One request: when it was due and sent, when its text came, and how it ended.

    Times are seconds since the start of the run. `error` is the kind of a failure, or None.
    """

    due: float = 0.0
    sent: float | None = None
    arrivals: list[float] = field(default_factory=list)  # of chunks with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    counted: bool = False  # tokens are the server's count; else they are chunks
    finish_reason: str | None = None
    error: str | None = "not sent"
    detail: str = ""

    def fail(self, kind: str, detail: object) -> None:
        """End with an error of this kind."""
        self.error, self.detail = kind, str(detail)[:500]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text; only for an answer that came."""
        return self.arrivals[0] - (self.sent or 0.0)

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last text."""
        return self.arrivals[-1] - (self.sent or 0.0)

    @property
    def streaming(self) -> float:
        """Seconds from the first text to the last."""
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is no second."""
        return self.streaming / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Refused(Exception):
    """The server said no, before or in the middle of an answer; `kind` is how we count it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def text_of(choice: dict[str, Any]) -> str:
    """The text in one choice of a chunk, whichever of the usual fields it is in."""
    delta = choice.get("delta") or {}
    fields = (choice.get("text"), *(delta.get(name) for name in TEXT_FIELDS))
    return "".join(text for text in fields if text)


TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


def take(record: Record, event: dict[str, Any], now: float) -> None:
    """Note one event of a stream. Raises `Refused` for an error event."""
    if event.get("error"):
        error = event["error"]
        raise Refused("error event", str(error.get("message") if type(error) is dict else error))
    for choice in event.get("choices") or ():
        if text_of(choice):
            record.arrivals.append(now)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if usage := event.get("usage"):
        record.counted = True
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.output_tokens = usage.get("completion_tokens") or 0
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def base_url(url: str) -> str:
    """The address that ends in `/v1/`, of a server given with or without it."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: must be like http://host:1919, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}/v1/"


class Api:
    """An OpenAI-compatible server. `timeout` is in seconds, for one whole answer."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url, self.timeout = base_url(url), timeout
        headers = {"accept-encoding": "identity"}  # a compressor would hold chunks back
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def _stream(
        self, path: str, body: dict[str, Any], record: Record, clock: Callable[[], float]
    ) -> None:
        """Post and read all events. Raises whatever goes wrong."""
        ended = False
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise Refused(f"http {response.status_code}", message_of(text))
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    now, data = clock(), line[5:].strip()
                    ended = ended or data == "[DONE]"
                    if not ended:
                        take(record, json.loads(data), now)
        if not (ended or record.finish_reason):
            raise Refused("cut off", "the stream ended without a finish reason and without [DONE]")
        if not record.arrivals:
            raise Refused("empty", "the answer has no text")
        if not record.counted:
            record.output_tokens = len(record.arrivals)

    async def send(
        self, path: str, body: dict[str, Any], record: Record, clock: Callable[[], float]
    ) -> None:
        """One streamed request; fills `record` and raises nothing but `CancelledError`."""
        record.sent = clock()
        record.fail("interrupted", "the run was stopped")
        try:
            async with asyncio.timeout(self.timeout):
                await self._stream(path, body, record, clock)
            record.error, record.detail = None, ""
        except Refused as refused:
            record.fail(refused.kind, refused)
        except (TimeoutError, httpx.TimeoutException):
            record.fail("timeout", f"no end within {self.timeout:g} s")
        except httpx.ConnectError as error:
            record.fail("connect", error)
        except httpx.HTTPError as error:
            record.fail("connection", f"{type(error).__name__}: {error}")
        except Exception as error:  # a server that we do not know can answer anything
            record.fail("bad answer", f"{type(error).__name__}: {error}")

    async def models(self) -> list[dict[str, Any]]:
        """The cards in `/v1/models`. Raises `ConnectionError` that says what came instead."""
        try:
            response = await self.http.get("models")
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ConnectionError(f"url: {self.url} does not answer ({why})") from error
        if response.status_code != 200:
            said = f"{response.status_code}: {message_of(response.text)[:300]}"
            raise ConnectionError(f"url: {self.url}models answers {said}")
        try:
            cards = response.json()["data"]
            return [dict(card) for card in cards]
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"url: {self.url}models answers no list of models") from error


def message_of(body: str) -> str:
    """What an error body says, in the shape of the API or as it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body
