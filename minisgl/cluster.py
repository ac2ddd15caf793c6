"""Replicas of the server under Ray Serve: `serve run minisgl.cluster:app`.

Generated from notebooks/13i_ray_serve.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Scope

from minisgl.server.cli import build_app, settings_of, started
from minisgl.server.http.errors import ApiError
from minisgl.server.http.formats import sse
from minisgl.server.http.limits import ConcurrencyLimiter
from minisgl.server.options import build_parser, config_from, operations_from
from minisgl.server.relay import asgi_messages, by_preference, conversation_of


class ConversationRouter(RequestRouter):
    """Sends the turns of a conversation, the first argument of a call, to one replica."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        conversation = pending_request.args[0] if pending_request is not None else ""
        if not conversation:  # Ray Serve takes the one with the fewest requests
            return [candidate_replicas]
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {n: self.replica_queue_len_cache.get(r.replica_id) or 0 for n, r in found.items()}
        return [[found[name]] for name in by_preference(conversation, loads)]


class Engine:
    """One replica: the processes of a server, and its ASGI application without a socket."""

    async def __init__(self, flags: str) -> None:  # type: ignore[misc] # Ray Serve awaits it
        args = build_parser().parse_args(shlex.split(flags))
        config, operations = config_from(args), operations_from(args)
        settings, self._end = settings_of(config, operations), AsyncExitStack()
        server = started(config, operations)
        self._group, self._frontend, observers = self._end.enter_context(server)
        limiter = ConcurrencyLimiter(config.max_running_req + operations.max_queue)
        self._app = build_app(self._frontend, settings, limiter, observers, operations)
        while self._group.starting():
            await asyncio.sleep(0.05)
        await self._end.enter_async_context(self._app.router.lifespan_context(self._app))
        self._end.callback(asyncio.ensure_future(self._fail_with_workers()).cancel)

    async def _fail_with_workers(self) -> None:
        while (broken := self._group.broken()) is None:
            await asyncio.sleep(0.1)
        self._frontend.fail_all(str(broken))
        await asyncio.sleep(1.0)  # time for error events
        os._exit(1)  # the router then drops this replica at once

    async def check_health(self) -> None:  # Ray Serve replaces a replica that raises
        if self._frontend.failure is not None:
            raise RuntimeError(self._frontend.failure)

    async def __del__(self) -> None:  # after the drain
        await self._end.aclose()

    async def answer(self, conversation: str, scope: Scope, body: bytes) -> AsyncIterator[Any]:
        async with aclosing(asgi_messages(self._app, scope, body)) as found:
            async for messages in found:
                yield messages


ANY = {"access-control-allow-origin": "*"}  # pages may read it
GONE = ApiError(503, "the replica of this request is gone", code="service_unavailable", headers=ANY)
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
         "root_path", "headers", "client", "server")  # fmt: skip


class Ingress:
    """The application's entry point: sends each request to a replica and streams its answer."""

    def __init__(self, engine: DeploymentHandle, max_body_size: int) -> None:
        self._engine, self._max = engine.options(stream=True), max_body_size

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max:  # the replica refuses it, as any server does
                break
        conversation = conversation_of(request.headers, body)
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        answer = self._engine.answer.remote(conversation, scope, bytes(body))
        try:
            start, *rest = await anext(answer)
        except RayError:
            return JSONResponse(GONE.body(), GONE.status_code, GONE.headers)
        response = StreamingResponse(self._bodies(rest, answer), start["status"])
        response.raw_headers = [h for h in start["headers"] if h[0] != b"x-request-id"]  # twice
        return response

    async def _bodies(self, first: list[Message], answer: Any) -> AsyncIterator[bytes]:
        try:
            yield b"".join(message.get("body", b"") for message in first)
            async for messages in answer:
                yield b"".join(message.get("body", b"") for message in messages)
        except RayError:
            yield sse(GONE.body())
        finally:
            answer.cancel()


class Cluster(BaseModel, extra="forbid"):
    """Arguments of `serve run minisgl.cluster:app`, each written as `name=value`."""

    flags: str = ""  # of `python -m minisgl`, for each replica
    replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)  # above `replicas`: the upper limit of autoscaling
    idle: float = Field(default=600.0, ge=0)  # seconds of less load, after which a replica leaves
    gpus: float | None = Field(default=None, ge=0)  # of a replica; none: its ranks, 0 on a CPU


def app(args: Cluster) -> serve.Application:
    """Build the application; a wrong flag is an error before any replica starts."""
    parsed = build_parser().parse_args(shlex.split(args.flags))
    config, operations = config_from(parsed), operations_from(parsed)
    gpus = config.tp.size * (config.device != "cpu") if args.gpus is None else args.gpus
    places = config.max_running_req + operations.max_queue
    scaling = {
        "min_replicas": args.replicas, "max_replicas": max(args.replicas, args.max_replicas),
        "downscale_delay_s": args.idle, "target_ongoing_requests": config.max_running_req,
    }  # fmt: skip
    router = RequestRouterConfig(request_router_class=ConversationRouter)
    engine = serve.deployment(
        Engine, ray_actor_options={"num_gpus": gpus}, max_ongoing_requests=places,
        autoscaling_config=scaling, request_router_config=router, health_check_period_s=1.0,
        graceful_shutdown_timeout_s=operations.drain_timeout, graceful_shutdown_wait_loop_s=0.5,
    )  # fmt: skip
    ingress = serve.deployment(Ingress, max_ongoing_requests=2**20)  # replicas have limits
    return ingress.bind(engine.bind(args.flags), operations.max_body_size)
