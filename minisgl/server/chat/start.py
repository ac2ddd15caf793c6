"""The two chats that the command line starts: with an engine of its own, and with a server.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from minisgl.core import SamplingParams
from minisgl.server.chat.client import ApiClient, ServerError
from minisgl.server.chat.shell import Conversation, run_shell
from minisgl.server.frontend import Frontend
from minisgl.server.http.settings import ApiSettings
from minisgl.server.workers.messages import UserReply
from minisgl.server.workers.processes import WorkerGroup


async def chat(group: WorkerGroup, frontend: Frontend, settings: ApiSettings) -> int:
    """Chat in this terminal, with the engine in the worker processes; return the status."""
    params = SamplingParams(**settings.sampling_defaults)

    def talk(messages: Conversation) -> AsyncGenerator[UserReply, None]:
        return frontend.generate(params, messages=list[dict[str, Any]](messages))

    while group.starting():
        await asyncio.sleep(0.02)
    await frontend.start()
    shell = asyncio.ensure_future(run_shell(talk))
    try:
        while not shell.done():
            if (broken := group.broken()) is not None:
                raise broken
            await asyncio.wait({shell}, timeout=0.1)
        shell.result()
    finally:
        shell.cancel()
        await asyncio.gather(shell, return_exceptions=True)
        await frontend.stop()
    return 0


async def chat_with(url: str, api_key: str | None) -> int:
    """Chat with a server elsewhere; raise `ValueError` if it is unreachable or rejects the key."""
    try:
        client = ApiClient(url, api_key)
    except ValueError as error:
        raise ValueError(str(error).replace("url", "--connect", 1)) from None
    async with client:
        try:
            cards = await client.models()
        except ServerError as error:
            if error.kind in ("http 401", "http 403"):
                why = f"--api-key: the server at {url} does not take it ({error})"
                raise ValueError(why) from None
            raise ValueError(f"--connect: no server at {url} ({error})") from None
        model = str(cards[0]["id"]) if cards else ""
        await run_shell(lambda messages: client.chat(model, messages))
    return 0
