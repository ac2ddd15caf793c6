"""The wiring of a server: each defence that other tests try by itself is built in."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from minisgl.config.engine import ServerConfig
from minisgl.recording import Observed
from minisgl.runtime.heartbeat import Watchdog
from minisgl.scheduler.side import SideTokenizer
from minisgl.server import cli
from minisgl.server.fair import FairFrontend
from minisgl.server.http.limits import LOADING
from minisgl.server.http.settings import ApiSettings
from minisgl.server.options import Operations
from minisgl.server.workers import text_process
from minisgl.server.workers.prompt_threads import PromptThreads


@dataclass
class Parts:
    """The parts that `serve` builds; nothing runs."""

    server: Any = None
    group: Any = None
    frontend: Any = None
    limiter: Any = None
    drain: float = 0.0
    address: str = ""
    settings: ApiSettings | None = None


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def parts_of(
    config: ServerConfig, operations: Operations, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Parts:
    """Build the parts of a server without its workers."""
    parts = Parts()

    class Group(SimpleNamespace):
        def __init__(self, config: object, watchdog: Watchdog, observed: Observed) -> None:
            super().__init__(folder=folder, tokenizers=["text"], watchdog=watchdog, seen=observed)

        def __enter__(self) -> Group:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was started."""

    class Lifecycle:
        def __init__(self, *found: Any, drain_timeout: float, on_ready: object) -> None:
            parts.server, parts.group, parts.frontend, parts.limiter = found
            parts.drain = drain_timeout

        async def run(self, sock: socket.socket) -> int:
            parts.address = sock.getsockname()[0]
            return 0

    create = cli.create_app

    def noted(frontend: Any, settings: ApiSettings, *more: Any) -> Any:
        parts.settings = settings
        return create(frontend, settings, *more)

    for name, new in (("WorkerGroup", Group), ("Lifecycle", Lifecycle), ("create_app", noted)):
        monkeypatch.setattr(cli, name, new)
    assert cli.run(config, operations, shell=False) == 0
    return parts


def test_a_server_has_every_limit_that_its_flags_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = Operations(
        max_queue=5, stall_timeout=7, drain_timeout=3, worker_timeout=11, step_timeout=12,
        request_timeout=9, isolate_prefixes=True, trusted_proxies="10.0.0.9", log_prompts=True,
        record=str(folder / "events"), log_format="none",
    )  # fmt: skip
    config = ServerConfig(port=0, max_running_req=20)
    parts = parts_of(config, operations, folder, monkeypatch)
    assert type(parts.frontend) is FairFrontend
    assert (parts.limiter.limit, parts.limiter.reason, parts.drain) == (25, LOADING, 3)
    assert parts.address == "127.0.0.1"
    http = parts.server.config
    assert http.http.stall == 7 and http.http.places.limit < 2**20 and http.backlog <= 2048
    assert (http.proxy_headers, http.forwarded_allow_ips, http.ws) == (True, "10.0.0.9", "none")
    assert parts.group.watchdog._limits == (11, 12)
    assert parts.group.seen == Observed(False, operations.record, True)
    assert parts.settings is not None
    assert parts.settings.isolate_prefixes and parts.settings.request_timeout == 9
    few = Operations(log_format="none")
    assert not parts_of(config, few, folder, monkeypatch).server.config.proxy_headers


def test_every_route_of_a_server_is_behind_its_defences(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "keys").write_text("alice sk-1\n")
    operations = Operations(
        max_body_size=1000, key_for_all=True, api_key_file=str(folder / "keys"),
        viewer=str(folder / "events"), allow_origin="https://mine.example",
    )  # fmt: skip
    parts = parts_of(ServerConfig(port=0, api_key="sk-2"), operations, folder, monkeypatch)
    app = parts.server.config.app
    transport = httpx.ASGITransport(app)

    async def ask(method: str, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    def status(method: str, path: str, headers: dict[str, str], content: bytes = b"") -> int:
        return asyncio.run(ask(method, path, headers=headers, content=content)).status_code

    keys: list[dict[str, str]] = [{"authorization": f"Bearer sk-{n}"} for n in (1, 2)]
    shown = [(path, method) for path, ways in app.openapi()["paths"].items() for method in ways]
    assert {"/viewer", "/metrics", "/generate"} < {path for path, _ in shown}
    hidden = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/v1/models/")
    for path, method in [*shown, *((path, "get") for path in hidden)]:
        assert status(method, path, {"host": "evil.example"}) == 403, path
        assert status(method, path, {}) == (503 if path == "/health" else 401), path
    for key in keys:
        assert status("GET", "/v1/models", key) == status("GET", "/metrics", key) == 200
        assert status("POST", "/v1/completions", key, b"x" * 1001) == 413
        assert status("POST", "/v1/completions", {**key, "content-encoding": "gzip"}) == 415
        assert status("POST", "/v1/completions", key, b'{"prompt": "x"}') == 400  # no JSON by name
        typed = {**key, "content-type": "application/json"}
        assert status("POST", "/v1/completions", typed, b'{"prompt": "x"}') == 503
        assert status("POST", "/v1/completions/", typed, b'{"prompt": "x"}') == 404
    assert "x-request-id" in asyncio.run(ask("GET", "/health")).headers


def test_a_text_process_has_its_side_process_and_its_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("minisgl.tokenizer.SLICE", 4096)
    monkeypatch.setattr(text_process, "run_text_worker", lambda *parts: found.extend(parts))
    monkeypatch.setattr(text_process, "return_free_memory", lambda: found.append("returned"))
    context: Any = SimpleNamespace(ready=lambda: None, beat=lambda: None)
    text_process.text_process(ServerConfig(), folder, "text", context)
    returned, worker, _, beat, prompts = found
    assert returned == "returned"
    assert type(worker._tokenizer) is SideTokenizer and worker._window == 4096
    assert worker._logprobs is not None and beat is context.beat
    assert type(prompts.aside) is PromptThreads
    assert worker._tokenizer.side.limit == prompts.aside.limit
    assert prompts.quick == 4096
