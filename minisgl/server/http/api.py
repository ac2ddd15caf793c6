"""The HTTP layer: routes, server-sent events and error bodies over a `Frontend`.

Generated from notebooks/12c_http.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from minisgl.core import SamplingParams
from minisgl.scheduler.frames import with_seed
from minisgl.scheduler.queue import Shares
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.http.access import BEARER, Access, client_of, cors_middleware, keyed_route
from minisgl.server.http.bodies import SideThread, brief, build, invalid
from minisgl.server.http.errors import FAILED, ApiError, api_error, forget_frames
from minisgl.server.http.formats import (
    ChatFormatter,
    Completion,
    CompletionFormatter,
    Json,
    sse,
    usage,
)
from minisgl.server.http.limits import DRAINING, LOADING, ConcurrencyLimiter
from minisgl.server.http.schemas import (
    MAX_ANSWERS,
    MAX_HELD,
    SLICE,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
    Held,
    fair_client,
    hold_large,
)
from minisgl.server.http.settings import ApiSettings
from minisgl.server.workers.messages import UserReply

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One answer to produce: a prompt in one of three forms, with its params."""

    index: int
    params: SamplingParams
    prompt: Mapping[str, Any]  # text=…, input_ids=… or messages=…


class RequestHandler:
    """Runs the tasks of one HTTP request and formats their replies for the route.

    Raises `ApiError` if the request cannot be served.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Mapping[str, Any]],
        formatter: CompletionFormatter,
    ) -> None:
        settings = service.settings
        check_model(body.model, settings)
        self.service, self.formatter, self.body = service, formatter, body
        self.request, self.client, self.prompts = request, client_of(request), len(prompts)
        namespace = client_of(request, 64) if settings.isolate_prefixes else None
        self.tasks = tasks_for(body, prompts, settings.sampling_defaults, namespace)
        name = request.scope.get("request_id") or uuid.uuid4().hex
        about = {"created": int(time.time()), "model": settings.model_name}
        self.head = {"id": formatter.prefix + name, **about}
        limits = [s for s in (body.timeout, settings.request_timeout) if s is not None]
        terms = {"request_id": name, "client": fair_client(self.client, body, bool(settings.keys))}
        self.terms: dict[str, Any] = {**terms, "timeout": min(limits, default=None)}
        self.held = Held(service.held, self.client)

    def _generate(self, task: Task) -> AsyncGenerator[UserReply, None]:
        return self.service.frontend.generate(task.params, **task.prompt, **self.terms)

    async def answers(self) -> list[Completion]:
        """Collect all answers; if one task fails or the client leaves, all are aborted."""
        answers = [self.formatter.answer() for _ in self.tasks]
        async with aclosing(self._replies()) as replies:
            async for task, reply in replies:
                answer = answers[task.index]
                answer.add(reply)
                if reply.logprobs:
                    self.held.add(reply.logprobs)
                    pack = partial(answer.pack, self.formatter.logprobs)
                    await build(self.request, pack, large=len(reply.logprobs) > 64)
        return answers

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        answers = await self.answers()

        def formatted() -> list[dict[str, Any]]:
            return [self.formatter.choice(n, answer) for n, answer in enumerate(answers)]

        choices = await build(self.request, formatted, self.is_large)
        head = {**self.head, "object": self.formatter.whole}
        return {**head, "choices": choices, "usage": usage(answers, self.prompts)}

    @property
    def is_large(self) -> bool:
        """True for an answer that takes the event loop too long to format."""
        return len(self.tasks) > 64 or self.held.count > 2**12

    async def _replies(self) -> AsyncGenerator[tuple[Task, UserReply], None]:
        """Yield replies of all tasks as they come; closing this generator cancels every task."""
        with (
            self.service.limiter.acquire(len(self.tasks), self.client),
            renamed_failures(self.body),
        ):
            if len(self.tasks) == 1:
                async with aclosing(self._generate(self.tasks[0])) as replies:
                    async for reply in replies:
                        yield self.tasks[0], reply
                return
            async with aclosing(self._merged()) as pairs:
                async for pair in pairs:
                    yield pair

    async def _merged(self) -> AsyncGenerator[tuple[Task, UserReply], None]:
        """Merge the tasks' replies: one asyncio task for each feeds a queue."""
        merged: asyncio.Queue[tuple[Task, UserReply | Exception]] = asyncio.Queue(len(self.tasks))

        async def pump(task: Task) -> None:
            try:
                async with aclosing(self._generate(task)) as replies:
                    async for reply in replies:
                        await merged.put((task, reply))
                        await merged.join()  # until it is sent, it counts as unread
            except Exception as failure:  # an internal error must end the stream, too
                await merged.put((task, failure))

        running, left = [asyncio.ensure_future(pump(t)) for t in self.tasks], len(self.tasks)
        try:
            while left:
                task, reply = await merged.get()
                if isinstance(reply, Exception):
                    raise reply
                left -= reply.finished
                yield task, reply
                merged.task_done()
        finally:
            await cancel(running)

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        head = {**self.head, "object": self.formatter.chunk}
        head |= {"usage": None} if include_usage else {}
        answers, counted = [self.formatter.answer() for _ in self.tasks], self.body.usage_in_chunks
        async with aclosing(self._replies()) as replies:
            async for task, reply in replies:
                answer = answers[task.index]
                first = answer.completion_tokens == 0
                answer.add(reply)
                if counted:
                    head["usage"] = usage(answers, self.prompts)
                for choice in self.formatter.deltas(task.index, answer, first):
                    yield sse({**head, "choices": [choice]})
                answer.forget()
        if include_usage:
            yield sse({**head, "choices": [], "usage": usage(answers, self.prompts)})
        yield sse("[DONE]")

    async def texts(self) -> AsyncGenerator[bytes, None]:
        """Yield the text alone as server-sent events."""
        async with aclosing(self._replies()) as replies:
            async for _, reply in replies:
                if reply.text:
                    yield sse(reply.text)
        yield sse("[DONE]")


async def cancel(running: Sequence[asyncio.Future[Any]]) -> None:
    """End asyncio tasks and wait until each has cleaned up."""
    for future in running:
        future.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@contextmanager
def renamed_failures(body: GenerationRequest) -> Iterator[None]:
    """Convert failures in the block to `ApiError`, with the client's name of the field."""
    try:
        yield
    except RequestFailed as failure:
        error, name = api_error(failure), body.client_name(failure.param)
        error.detail = error.detail.replace(f"{error.param}:", f"{name}:", 1)
        error.param = name
        raise error from failure


class EventStream(StreamingResponse):
    """An event stream in slices, whose generator is closed with the response, sent or not.

    The first event may repeat the request: its size counts in the client's share until the end.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self._size, self._events, self._slices = len(first), events, self._guarded(first)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._slices, media_type="text/event-stream", headers=headers)

    async def _guarded(self, event: bytes | None) -> AsyncGenerator[bytes, None]:
        """Pass events on; a failure becomes an error event, because the status is already sent."""
        try:
            while event is not None:
                for at in range(0, len(event), SLICE):
                    yield event[at : at + SLICE]
                event = None  # the next one is made without it
                event = await anext(self._events, None)
        except Exception as failure:
            if not isinstance(failure, ApiError):
                traceback.print_exc()
            yield sse(api_error(failure).body())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            hold_large(scope, self._size)
            await cancel_on_disconnect(Request(scope, receive), self.stream_response(send))
        finally:
            await self._slices.aclose()  # it holds an event
            await self._events.aclose()


async def stream_response(events: AsyncGenerator[bytes, None]) -> EventStream:
    """Start a stream when its first event is there, so that a rejected request gets a 400."""
    return EventStream(await anext(events), events)


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T | None:
    """Run `work`, or cancel it when the client disconnects and return None."""
    here: Any = asyncio.current_task()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        here.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not watcher.done() or here.uncancel():  # the server cancels us, too
            raise
        return None
    finally:
        watcher.cancel()


async def respond(request: Request, body: GenerationRequest, handler: RequestHandler) -> Response:
    """Respond with a stream or the whole answer, as requested; 499 if the client has left."""
    gone = Response(status_code=499)
    if body.stream:
        events = handler.events(body.include_usage)
        return await cancel_on_disconnect(request, stream_response(events)) or gone
    response: Json | None = None
    try:
        whole = await cancel_on_disconnect(request, handler.whole())
        if whole is not None:
            response = await build(request, partial(Json, whole), handler.is_large)
            response.sent = handler.held.release
    finally:
        if response is None:
            handler.held.release()
    return response or gone


def add_error_handlers(app: FastAPI, frontend: Frontend) -> None:
    """Add handlers that give failures of all layers the same body."""

    async def handle(request: Request, failure: Exception) -> Json:
        if isinstance(failure, RequestValidationError):
            error = invalid(failure.errors())
        elif isinstance(failure, HTTPException) and not isinstance(failure, ApiError):
            status, why = failure.status_code, str(failure.detail)
            code = "invalid_json" if status == 400 else f"http_{status}"  # FastAPI's own 400
            if status == 404:
                why = f"{request.url.path:.200}: not here, but {', '.join(app.openapi()['paths'])}"
            error = ApiError(status, why, code=code, headers=failure.headers)
        else:
            error = api_error(failure)
        forget_frames(failure, error)
        request.scope["refused"] = error  # for the log
        frontend.notify("refused", error.status_code)
        shape = getattr(request.scope.get("route"), "error_body", ApiError.body)  # chapter 12db
        return Json(shape(error), error.status_code, error.headers)

    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def check_model(asked: str | None, settings: ApiSettings) -> None:
    """Raise a 404 for another model's name; no name means the served model."""
    if asked not in (None, "", "default", settings.model_name):
        served = f"{brief(asked)} is not served here; this server has {settings.model_name!r}"
        raise ApiError(404, f"model: {served}", code="model_not_found", param="model")


def tasks_for(
    body: GenerationRequest, prompts: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any], namespace: str | None = None,
) -> list[Task]:  # fmt: skip
    """Make `n` tasks per prompt, numbered as OpenAI numbers the choices: prompt by prompt."""
    n = body.n or 1
    if n * len(prompts) > MAX_ANSWERS:
        what = f"prompt: {len(prompts)} prompts times {n} answers are more than {MAX_ANSWERS}"
        raise ApiError(400, what, code="invalid_value", param="prompt")
    first = body.sampling_params(defaults, namespace)
    seeds = [None if first.seed is None else (first.seed + k) % 2**63 for k in range(n)]
    params = [first if seed is None else with_seed(first, seed) for seed in seeds]
    return [
        Task(i * n + k, params[k], prompt) for i, prompt in enumerate(prompts) for k in range(n)
    ]


@dataclass(frozen=True)
class Service:
    """Objects that the routes share."""

    frontend: Frontend
    settings: ApiSettings
    limiter: ConcurrencyLimiter
    held: Shares = field(default_factory=partial(Shares, MAX_HELD))


STREAMED: dict[int | str, dict[str, Any]] = {  # for /openapi.json
    200: {"description": "JSON, or events if streamed", "content": {"text/event-stream": {}}}
}


def as_prompt(prompt: str | list[int]) -> dict[str, Any]:
    """Return a prompt as the arguments of `Frontend.generate`."""
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def add_generation_routes(keyed: APIRouter, service: Service) -> None:
    """Add OpenAI's two generation routes, and the smallest one: text in, text out."""

    @keyed.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        def handler() -> RequestHandler:
            body.prepare(service.settings.can)
            formatter = ChatFormatter(body.wanted_logprobs() is not None, body.parser)
            return RequestHandler(service, request, body, [body.prompt()], formatter)

        return await respond(request, body, await build(request, handler))

    @keyed.post("/v1/completions", responses=STREAMED)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        def handler() -> RequestHandler:
            body.prepare(service.settings.can)
            prompts = [as_prompt(prompt) for prompt in body.prompts()]
            formatter = CompletionFormatter(logprobs=body.wanted_logprobs() is not None)
            return RequestHandler(service, request, body, prompts, formatter)

        return await respond(request, body, await build(request, handler))

    @keyed.post("/generate", responses=STREAMED)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        def made() -> RequestHandler:
            body.prepare(service.settings.can)
            formatter = CompletionFormatter()
            return RequestHandler(service, request, body, [as_prompt(body.prompt)], formatter)

        handler, gone = await build(request, made), Response(status_code=499)
        if body.stream is not False:
            return await cancel_on_disconnect(request, stream_response(handler.texts())) or gone
        answers = await cancel_on_disconnect(request, handler.answers())
        return Json({"text": answers[0].text}) if answers else gone


def add_info_routes(app: FastAPI, keyed: APIRouter, service: Service) -> None:
    """Add the routes that clients query before they send work."""
    settings = service.settings
    card = {"id": settings.model_name, "max_model_len": settings.max_model_len}
    card |= {"object": "model", "created": int(time.time()), "owned_by": "minisgl"}

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        reason = service.frontend.failure or service.limiter.reason
        if reason is None:
            return Json({"status": "ok"})
        state = {LOADING: "loading", DRAINING: "draining"}.get(reason, "failed")
        error = ApiError(503, reason, code="service_unavailable")
        return Json({"status": state, **error.body()}, 503, error.headers)

    @keyed.get("/v1/models")
    @keyed.get("/v1/models/", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @keyed.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, settings)
        return card


def create_app(
    frontend: Frontend,
    settings: ApiSettings,
    limiter: ConcurrencyLimiter | None = None,
    middleware: Sequence[Middleware] = (),
    more_routes: Sequence[Callable[[APIRouter, Service], None]] = (),
) -> FastAPI:
    """Create the HTTP application over one frontend; `middleware` wraps all of its routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await frontend.start()
        yield
        await frontend.stop()

    headers, checks = cors_middleware(settings.origins)
    around = [headers, *middleware, *checks]
    app = FastAPI(title="minisgl", lifespan=lifespan, middleware=around, redirect_slashes=False)
    service = Service(frontend, settings, limiter or ConcurrencyLimiter())
    add_error_handlers(app, frontend)
    bearer, route = [Security(BEARER)], keyed_route(Access(settings.keys), SideThread())
    keyed = APIRouter(route_class=route, dependencies=bearer, responses=FAILED)
    add_info_routes(app, keyed, service)
    for add_routes in (add_generation_routes, *more_routes):
        add_routes(keyed, service)
    app.include_router(keyed)
    return app
