"""Parts of a replica without Ray: conversations, and an application's messages as a stream.

Generated from notebooks/13i_ray_serve.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

from starlette.types import ASGIApp, Message, Scope


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def conversation_of(headers: Mapping[str, str], body: bytes | bytearray) -> str:
    """Return a key that all turns of a conversation share, or ""."""
    if session := headers.get("x-session-id"):
        return f"session {session}"
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        fields = json.loads(body)
        if "messages" not in fields:
            return digest(json.dumps(fields["prompt"][:256]))
        roles = [message["role"] for message in fields["messages"]]
        return digest(json.dumps(fields["messages"][: roles.index("user") + 1]))
    return ""


def by_preference(conversation: str, loads: Mapping[str, int]) -> list[str]:
    """Order replicas by rendezvous hashing, those above 1.25 times the mean load last."""
    most = max(4.0, 1.25 * sum(loads.values()) / max(1, len(loads)))
    ranked = [(loads[name] <= most, digest(f"{conversation} {name}"), name) for name in loads]
    return [name for *_, name in sorted(ranked, reverse=True)]


async def asgi_messages(
    app: ASGIApp, scope: Scope, body: bytes
) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of an application's response; those that wait come together."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    arriving: asyncio.Queue[Message] = asyncio.Queue()
    arriving.put_nowait({"type": "http.request", "body": body})
    task = asyncio.ensure_future(app(scope, arriving.get, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    messages: list[Message | None] = []
    try:
        while None not in messages:
            messages = [await sent.get()]
            while not sent.empty():
                messages.append(sent.get_nowait())
            yield [message for message in messages if message is not None]
    finally:  # the client left, or all is sent
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
