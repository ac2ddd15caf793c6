"""One streamed request: what it does not use is not on its way."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import minisgl
from minisgl.config.engine import ServerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.server.http.api import create_app
from minisgl.server.http.limits import ConcurrencyLimiter
from minisgl.server.http.settings import settings_for
from minisgl.server.in_process import InProcessServer

ROOT = Path(minisgl.__file__).parent
IDLE = {"guarded", "kvcache/audit", "scheduler/observe"}  # of the loop that waits afterwards
UNUSED = """
engine/logits_processors engine/prompt_logprobs engine/runners parallel/comm scheduler/frames
scheduler/grammar scheduler/retraction scheduler/speculative server/http/calls
server/http/settings server/http/tool_parser server/http/tools server/workers/logprobs
"""
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "What is 1 + 2?"}]},
    "completions": {"prompt": "What is 1 + 2?"},
}
# Of chats alone: a template can loop without end over the messages of a stranger, so that it is
# rendered in a side process, and a thread of the text worker waits for it.
OF_CHATS = {"server/http/chats", "server/workers/prompt_threads"}


@contextmanager
def watched(on: threading.Event) -> Iterator[set[str]]:
    """The modules of the package that run a function while `on` is set, in any new thread."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and on.is_set():
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def answer(
    server: InProcessServer, config: ServerConfig, path: str, on: threading.Event
) -> str:
    await server.frontend.start()
    settings = settings_for(config, resolve_model_path(None), None)
    limiter = ConcurrencyLimiter(10)
    app = create_app(server.frontend, settings, limiter, [], [])
    body = {**BODIES[path], "max_tokens": 3, "stream": True}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        on.set()
        response = await http.post(f"/v1/{path}", json=body)
        on.clear()
    await server.frontend.stop()
    return response.text


@pytest.mark.parametrize("path", BODIES)
def test_a_plain_request_meets_no_feature_that_it_does_not_use(path: str) -> None:
    config, on = ServerConfig(device="cpu", num_pages=256), threading.Event()
    with watched(on) as seen, InProcessServer(config) as server:
        text = asyncio.run(answer(server, config, path, on))
    assert text.rstrip().endswith("data: [DONE]")
    inside = [Path(name) for name in seen if Path(name).is_relative_to(ROOT)]
    modules = {file.relative_to(ROOT).with_suffix("").as_posix() for file in inside}
    assert "scheduler/scheduler" in modules and not modules & set(UNUSED.split())
    assert modules & OF_CHATS == (OF_CHATS if path.startswith("chat/") else set())
    assert len(modules - IDLE) <= 36, sorted(modules - IDLE)
