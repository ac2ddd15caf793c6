"""The command line: start all parts, then serve over HTTP or chat in the terminal.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware import Middleware

from minisgl.config.engine import ServerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.guarded import guarded
from minisgl.recording import Observed
from minisgl.runtime.heartbeat import Watchdog
from minisgl.runtime.supervisor import OF_THE_GROUP, WorkerFailed, one_line
from minisgl.server.fair import FairFrontend
from minisgl.server.frontend import Frontend, Observer
from minisgl.server.http.access import Access, secured, warn_if_open
from minisgl.server.http.api import create_app
from minisgl.server.http.limits import LOADING, BodyLimit, ConcurrencyLimiter, http_config
from minisgl.server.http.settings import ApiSettings, settings_for
from minisgl.server.http.tokens import add_token_routes
from minisgl.server.messages.routes import add_messages_routes
from minisgl.server.observe.lifecycle import Lifecycle, Server
from minisgl.server.observe.logs import LineWriter, LogRequests, RequestLog, as_json, as_text
from minisgl.server.observe.metrics import Metrics, add_metrics_route
from minisgl.server.observe.stderr import relayed
from minisgl.server.observe.trace import TraceFile
from minisgl.server.observe.viewer import add_viewer_route
from minisgl.server.options import (
    Operations,
    build_parser,
    config_from,
    in_flags,
    key_from,
    operations_from,
)
from minisgl.server.responses.routes import add_responses_routes
from minisgl.server.workers.channels import ZmqInbox, ZmqOutbox
from minisgl.server.workers.processes import WorkerGroup, address
from minisgl.tokenizer import has_tokenizer


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; raise `ValueError` that names the port if it is taken."""
    ipv6 = ":" in host
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=ipv6)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:  # below 0: no such name
            raise ValueError(f"host: {host} is no address of this machine ({why})") from error
        raise ValueError(f"port: cannot listen on {host}:{port} ({why}); try --port 0") from error


def shown_url(sock: socket.socket) -> str:
    """Return the URL for clients."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class ServerObservers:
    """The observers of a server: metrics, and a log and a trace if configured."""

    def __init__(self, operations: Operations) -> None:
        spell = as_json if operations.log_format == "json" else as_text
        self.lines = LineWriter(2) if operations.log_format != "none" else None
        self.metrics = Metrics()
        self.log = RequestLog(self.lines, spell, operations.log_prompts) if self.lines else None
        self.trace = TraceFile(Path(operations.trace)) if operations.trace else None

    def all(self) -> list[Observer]:
        return [w for w in (self.metrics, self.log, self.trace) if w is not None]

    def close(self) -> None:
        if self.trace is not None:
            guarded(self.trace.close)()
        if self.lines is not None:
            self.lines.close()


def build_app(
    frontend: Frontend, settings: ApiSettings, limiter: ConcurrencyLimiter,
    observers: ServerObservers, operations: Operations,
) -> FastAPI:  # fmt: skip
    """Build the application with its limits, log and metrics."""
    limit = Middleware(BodyLimit, max_bytes=operations.max_body_size)
    middleware = [Middleware(LogRequests, notify=frontend.notify), limit]
    more = [add_responses_routes, add_messages_routes, add_token_routes]
    app = create_app(frontend, settings, limiter, middleware, more)
    add_metrics_route(app, observers.metrics)
    told = ("/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
    for route in app.routes:
        if operations.key_for_all and getattr(route, "path", "") in told:
            Access(settings.keys).lock(route)
    if operations.viewer:
        add_viewer_route(app, Path(operations.viewer), Access(settings.keys))
    return app


async def serve(
    group: WorkerGroup, frontend: Frontend, observers: ServerObservers, sock: socket.socket,
    config: ServerConfig, operations: Operations, settings: ApiSettings,
) -> int:  # fmt: skip
    """Serve over HTTP until the server stops; return the exit status."""
    limiter = ConcurrencyLimiter(config.max_running_req + operations.max_queue, reason=LOADING)
    app = build_app(frontend, settings, limiter, observers, operations)
    app.openapi()  # slow and cached: the error of the first 404, which lists the routes, needs it
    server = Server(http_config(app, operations.stall_timeout, operations.trusted_proxies))

    def say_ready() -> None:
        with closing(LineWriter(1)) as out:  # a closed or full pipe: no reader is left
            out(f"minisgl serves {settings.model_name} on {shown_url(sock)}")

    lifecycle = Lifecycle(
        server, group, frontend, limiter,
        drain_timeout=operations.drain_timeout, on_ready=say_ready,
    )  # fmt: skip
    return await lifecycle.run(sock)


def settings_of(config: ServerConfig, operations: Operations) -> ApiSettings:
    """Make the routes' settings; raise `ValueError` for a model that cannot be served."""
    path = resolve_model_path(config.model_path)
    if not has_tokenizer(path):
        raise ValueError(f"model_path: {path} holds no tokenizer, and a server answers with text")
    settings = settings_for(config, path, operations.request_timeout)
    settings = secured(settings, config.host, operations.api_key_file, operations.allow_origin)
    return replace(settings, isolate_prefixes=operations.isolate_prefixes)


@contextmanager
def started(
    config: ServerConfig, operations: Operations
) -> Iterator[tuple[WorkerGroup, Frontend, ServerObservers]]:
    """Start the worker processes, which may still load, their frontend and its observers."""
    with ExitStack() as stack:
        observers = stack.enter_context(closing(ServerObservers(operations)))
        stack.enter_context(relayed())  # after the log, before the workers
        watchdog = Watchdog(operations.worker_timeout, operations.step_timeout)
        record = operations.record or operations.viewer
        observed = Observed(bool(operations.trace), record, operations.log_prompts)
        group = stack.enter_context(WorkerGroup(config, watchdog, observed))
        inbox = stack.enter_context(closing(ZmqInbox(address(group.folder, "frontend"))))
        parts = (address(group.folder, part) for part in group.tokenizers)
        outboxes = [stack.enter_context(closing(ZmqOutbox(part))) for part in parts]
        places = config.max_running_req + operations.max_queue
        frontend = FairFrontend(outboxes, inbox, observers.all(), places=places)
        stack.callback(frontend.close)
        yield group, frontend, observers


def run(config: ServerConfig, operations: Operations, shell: bool) -> int:
    """Start all parts, serve or chat, and clean up; return the exit status."""
    settings = settings_of(config, operations)
    if sys.stderr.isatty():
        print(f"loading {settings.model_name} …", file=sys.stderr)
    with ExitStack() as stack:
        sock = None
        if not shell:
            sock = stack.enter_context(listen(config.host, config.port))
            warn_if_open(config.host, settings.keys, config.schedule_policy)
        group, frontend, observers = stack.enter_context(started(config, operations))
        if sock is None:
            from minisgl.server.chat.start import chat  # a server needs no terminal

            return asyncio.run(chat(group, frontend, settings))
        return asyncio.run(serve(group, frontend, observers, sock, config, operations, settings))


def leave(sig: int, _: object) -> None:
    """Leave every `with` block on a signal before serving; status 128 + n, or 0 for Ctrl-C."""
    raise KeyboardInterrupt if sig == signal.SIGINT else SystemExit(128 + sig)


def open_streams() -> None:
    """Open /dev/null in place of standard streams that the parent closed, for workers too."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m minisgl` and return the exit status."""
    open_streams()
    args = build_parser().parse_args(argv)
    for sig in OF_THE_GROUP:  # asyncio would cancel its tasks with tracebacks
        signal.signal(sig, leave)
    try:
        if args.connect is not None:
            from minisgl.server.chat.start import chat_with  # nor the library of a client

            return asyncio.run(chat_with(args.connect, key_from(args)))
        return run(config_from(args), operations_from(args), args.shell)
    except (ValueError, OSError, WorkerFailed) as error:
        text = str(error) if isinstance(error, WorkerFailed) else one_line(error)
        notes = getattr(error, "__notes__", []) if args.debug else []  # the worker's traceback
        print(f"minisgl: {in_flags(text)}", *notes, sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
