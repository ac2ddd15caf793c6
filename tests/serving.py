"""Servers for tests: in threads with a real socket, and as `python -m minisgl`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import uvicorn

from minisgl.config.engine import ServerConfig
from minisgl.kvcache.audit import check_integrity
from minisgl.server.cli import ServerObservers, build_app
from minisgl.server.frontend import Observer
from minisgl.server.http.limits import (
    BodyLimit,
    ConcurrencyLimiter,
    Shares,
    timeout_http_protocol,
)
from minisgl.server.http.settings import settings_for
from minisgl.server.in_process import InProcessServer
from minisgl.server.options import Operations
from tests.checkpoints import make_checkpoint
from tests.forks import Popen

PAGES, WINDOW = 64, 256


PATIENCE = 10  # times what an idle machine takes: a limit ends a hang, and decides nothing else


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until the condition holds; a failure after `PATIENCE * seconds` names what was due."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE * seconds} s for {what}"
        time.sleep(0.005)


def random_model(factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model with random weights, a tokenizer and a window of `WINDOW`."""
    return make_checkpoint(factory.mktemp("model"), tokenizer=True, max_position_embeddings=WINDOW)


def stream(
    url: str, client: httpx.Client | None = None, **fields: Any
) -> AbstractContextManager[httpx.Response]:
    """An endless stream from the URL of an API, unless the fields say else."""
    body = {
        "prompt": "hi",
        "ignore_eos": True,
        "max_tokens": 9999,
        "stream": True,
        "temperature": 1,
        **fields,
    }
    ask = httpx.stream if client is None else client.stream
    return ask("POST", f"{url}/completions", json=body, timeout=200)


def last_event(lines: Iterable[str]) -> str:
    """Return the last line with text."""
    return [line for line in lines if line][-1]


class Live:
    """A real uvicorn on a real socket, over the scheduler of a random model, in threads."""

    def __init__(
        self, checkpoint: Path, *, observers: tuple[Observer, ...] = (), limit: int = 1000,
        stall: float = 30.0, head: float = 30.0, max_waiting: int | None = None,
        send_buffer: int | None = None, connections: int = 2**31,
        operations: Operations | None = None, api: Mapping[str, Any] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        self.pages = fields.pop("num_pages", PAGES)
        config = ServerConfig(model_path=str(checkpoint), num_pages=self.pages, **fields)
        self.operations = operations or Operations(log_format="none")
        self.observers = ServerObservers(self.operations)
        self.server = InProcessServer(config, [*self.observers.all(), *observers])
        if max_waiting is not None:
            self.server.frontend._max_waiting = max_waiting
        self.limiter = ConcurrencyLimiter(limit)
        settings = settings_for(config, checkpoint, self.operations.request_timeout)
        settings = replace(settings, **(api or {}))
        app = build_app(
            self.server.frontend,
            settings,
            self.limiter,
            self.observers,
            self.operations,
        )
        self.app = app
        protocol = timeout_http_protocol(stall, head, connections)
        options = uvicorn.Config(app, log_level="warning", http=protocol, ws="none")
        self.http = uvicorn.Server(options)
        self.sock = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:  # sockets that are accepted inherit it
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.run, args=([self.sock],), daemon=True)

    def __enter__(self) -> Live:
        self.server.__enter__()
        self.thread.start()
        wait_for(lambda: self.http.started, "uvicorn to start")
        return self

    def __exit__(self, *_: object) -> None:
        self.http.should_exit = True
        self.thread.join(timeout=100)
        self.server.__exit__()

    @property
    def bodies(self) -> Shares:
        """Bytes of requests and answers in memory."""
        layer: Any = self.app.middleware_stack
        while not isinstance(layer, BodyLimit):
            layer = getattr(layer, "app", None) or layer._app
        return layer.shares

    def assert_pages_home(self) -> None:
        """No request left, and every page free or in the tree."""
        scheduler = self.server.scheduler

        def settled() -> bool:
            """Its thread may still be putting the last pages back: look again."""
            with suppress(RuntimeError):
                check_integrity(scheduler.cache)
                return scheduler.engine.tables.free_rows == scheduler.engine.config.max_running_req
            return False

        wait_for(lambda: not scheduler.has_work, "the scheduler to be idle")
        with suppress(AssertionError):  # the lines below it name the missing part
            wait_for(settled, "pages and rows to be home", 2.0)
        check_integrity(scheduler.cache)
        assert scheduler.cache.available_tokens == self.pages * scheduler.engine.page_size
        assert scheduler.engine.tables.free_rows == scheduler.engine.config.max_running_req
        wait_for(lambda: self.limiter.taken == 0, "all places to be free")
        wait_for(lambda: self.bodies.taken == 0, "all bodies to be gone")
        assert not self.server.frontend._streams


def client_at(live: Live, address: str) -> httpx.Client:
    """Return a client of the API that sends from an address of this machine."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=f"{live.url}/v1", transport=transport, timeout=300)


@contextmanager
def slow_reader(live: Live, method: str, path: str, body: Any = None) -> Iterator[None]:
    """Ask for a large answer, and read nothing of it for the block."""
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n"
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", live.port))
        peer.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + sent)
        yield


class Served:
    """`python -m minisgl` as a user starts it. A test that fails leaves it running, for a while."""

    def __init__(
        self, folder: Path, *flags: str, script: Path | None = None, **options: Any
    ) -> None:
        """`script` stands in for the package; more `options` are those of `tests.forks.Popen`."""
        self.folder = folder
        self.started = time.monotonic()
        port = [] if "--port" in flags else ["--port", "0"]
        # Spares a fork of a process that has no GPU to ask for one.
        device = [] if torch.cuda.is_available() else ["--device", "cpu"]
        start = ["-m", "minisgl"] if script is None else [str(script)]
        self.process = Popen(
            [sys.executable, *start, *port, *device, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
            **options,
        )

    def ready(self) -> str:
        """Wait for the one line with the URL; return the URL."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.seconds = time.monotonic() - self.started
        assert "http://" in line, line + (self.process.communicate()[1] if not line else "")
        return line.split()[-1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        """The worker processes in the order of their start: scheduler, text worker, tokenizers."""
        return [c for c in self.children() if "spawn_main" in " ".join([c.name(), *c.cmdline()])]

    def ended(self, children: list[psutil.Process], status: int = 0) -> str:
        """Wait for the exit, check its status and that nothing is left, and return stderr."""
        _, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == status and "Traceback" not in errors, errors
        self.assert_gone(children)
        return errors

    def assert_gone(self, children: list[psutil.Process], seconds: float = 20.0) -> None:
        """No process and no file is left."""
        wait_for(lambda: not any(c.is_running() for c in children), "workers to leave", seconds)
        assert not list(self.folder.glob("minisgl-*"))


def metric(url: str, name: str) -> float:
    """One number of `/metrics`; `name` may carry labels."""
    for line in httpx.get(f"{url}/metrics", timeout=100).text.splitlines():
        if line.startswith(f"minisgl_{name} "):
            return float(line.split()[-1])
    return 0.0
