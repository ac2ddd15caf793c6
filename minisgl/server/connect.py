"""A conversation with a server elsewhere, over its OpenAI-compatible API.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from minisgl.server.frontend import RequestFailed
from minisgl.server.messages import UserReply


def as_reply(event: dict[str, Any]) -> UserReply:
    """One chunk of a stream, as the shell knows replies. Raises `RequestFailed` for an error."""
    if "error" in event:
        raise RequestFailed(event["error"]["message"], str(event["error"].get("code")))
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


class Remote:
    """A `Talk` with the server at `url`, with or without its `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"connect: must be a URL like http://host:1919, got {url!r}")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(parts.netloc)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._url = url

    def check(self) -> None:
        """Raise `ValueError` if nobody is there, or if somebody is who does not let us in."""
        connection = self._connect()
        connection.timeout = 10
        try:
            path = self._path.removesuffix("/chat/completions") + "/models"
            connection.request("GET", path, headers=self._headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"connect: no server at {self._url} ({error})") from None
        finally:
            connection.close()
        if status in (401, 403):
            raise ValueError(f"api-key: the server at {self._url} does not take it ({status})")

    def _events(
        self, connection: http.client.HTTPConnection, messages: list[dict[str, str]]
    ) -> Iterator[UserReply]:
        """Replies as they come over a connection; blocks, so it belongs into a thread."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"messages": messages, **options})
        connection.request("POST", self._path, body, self._headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise RequestFailed(f"{response.status}: {text[:500]}")
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield as_reply(json.loads(data))

    async def __call__(self, messages: list[dict[str, str]]) -> AsyncGenerator[UserReply, None]:
        """Replies to a conversation. Raises `RequestFailed` for whatever goes wrong on the way."""
        loop, connection = asyncio.get_running_loop(), self._connect()
        arrived: asyncio.Queue[UserReply | RequestFailed | None] = asyncio.Queue()
        sockets: list[socket.socket] = []

        def read() -> None:
            end: RequestFailed | None = None
            try:
                connection.connect()
                sockets.append(connection.sock)
                for reply in self._events(connection, messages):
                    loop.call_soon_threadsafe(arrived.put_nowait, reply)
            except RequestFailed as failure:
                end = failure
            except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
                end = RequestFailed(f"connection: {error}")
            finally:
                connection.close()
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(arrived.put_nowait, end)

        threading.Thread(target=read, daemon=True, name="connect").start()
        try:
            while (reply := await arrived.get()) is not None:
                if isinstance(reply, RequestFailed):
                    raise reply
                yield reply
        finally:
            for sock in sockets:
                with suppress(OSError):  # wakes the thread if it still reads
                    sock.shutdown(socket.SHUT_RDWR)
