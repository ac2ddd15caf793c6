"""The HTTP face: routes, server-sent events and error bodies over a `Frontend`.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from minisgl.core import SamplingParams
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.messages import UserReply
from minisgl.server.schemas import (
    MAX_ANSWERS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)
from minisgl.server.settings import ApiSettings
from minisgl.server.shapes import Answer, ChatShape, CompletionShape, sse, usage

T = TypeVar("T")

STATUS_OF_CODE = {"service_unavailable": 503, "internal_error": 500, "deadline_exceeded": 408}


def api_error(failure: Exception) -> ApiError:
    """The HTTP form of a failure: the caller's fault unless its code says else."""
    if isinstance(failure, ApiError):
        return failure
    if not isinstance(failure, RequestFailed):
        failure = RequestFailed(f"internal error: {type(failure).__name__}: {failure}")
    status, text = STATUS_OF_CODE.get(failure.code, 400), str(failure)
    if failure.code == "context_length_exceeded":  # some clients know it by these words alone
        text += "; it is longer than the model's context length on this server"
    return ApiError(
        status, text, code=failure.code, param=failure.param,
        retry_after=5 if status == 503 else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One answer to produce: a prompt in one of three forms, with its params."""

    index: int
    params: SamplingParams
    prompt: Mapping[str, Any]  # text=…, input_ids=… or messages=…


class Admission:
    """Who may come in: everybody, always."""

    def closed(self) -> str | None:
        """Why nobody may come in now, or None."""
        return None

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places for the answers of one HTTP request; `ApiError` if there are none."""
        yield


class Completer:
    """Runs the jobs of one HTTP request and shapes what comes back."""

    def __init__(
        self, frontend: Frontend, admission: Admission, shape: ChatShape | CompletionShape,
        jobs: list[Job], *, model_name: str, prompts: int, request_id: str, timeout: float | None,
        client: str,
    ) -> None:  # fmt: skip
        self._frontend, self._admission, self._shape = frontend, admission, shape
        self._jobs, self._prompts = jobs, prompts
        self._terms: dict[str, Any] = {
            "request_id": request_id,
            "timeout": timeout,
            "client": client,
        }
        self._head = {
            "id": shape.prefix + request_id,
            "created": int(time.time()),
            "model": model_name,
        }

    def _generate(self, job: Job) -> AsyncGenerator[UserReply, None]:
        """The replies of one job."""
        return self._frontend.generate(job.params, **job.prompt, **self._terms)

    async def _collect(self, job: Job) -> Answer:
        answer = Answer()
        async with aclosing(self._generate(job)) as replies:
            async for reply in replies:
                answer.add(reply)
        return answer

    async def answers(self) -> list[Answer]:
        """All answers, whole. If one job fails or the client leaves, all are aborted."""
        with self._admission.places(len(self._jobs)):
            tasks = [asyncio.ensure_future(self._collect(job)) for job in self._jobs]
            try:
                return await asyncio.gather(*tasks)
            except RequestFailed as failure:
                raise api_error(failure) from failure
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        answers = await self.answers()
        choices = [
            self._shape.choice(job.index, answer)
            for job, answer in zip(self._jobs, answers, strict=True)
        ]
        head = {**self._head, "object": self._shape.whole}
        return {**head, "choices": choices, "usage": usage(answers, self._prompts)}

    async def _replies(self) -> AsyncGenerator[tuple[Job, UserReply], None]:
        """Replies of all jobs as they come. Closing this generator cancels every job."""
        with self._admission.places(len(self._jobs)):
            if len(self._jobs) == 1:
                async with aclosing(self._generate(self._jobs[0])) as replies:
                    async for reply in replies:
                        yield self._jobs[0], reply
                return
            async with aclosing(self._merged()) as pairs:
                async for pair in pairs:
                    yield pair

    async def _merged(self) -> AsyncGenerator[tuple[Job, UserReply], None]:
        """One task for each job feeds a queue."""
        merged: asyncio.Queue[tuple[Job, UserReply | Exception]] = asyncio.Queue(len(self._jobs))

        async def pump(job: Job) -> None:
            try:
                async with aclosing(self._generate(job)) as replies:
                    async for reply in replies:
                        await merged.put((job, reply))
            except Exception as failure:  # a fault of ours must end the stream, too
                await merged.put((job, failure))

        tasks = [asyncio.ensure_future(pump(job)) for job in self._jobs]
        running = len(tasks)
        try:
            while running:
                job, reply = await merged.get()
                if isinstance(reply, Exception):
                    raise reply
                running -= reply.finished
                yield job, reply
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def events(self, include_usage: bool) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        head = {**self._head, "object": self._shape.chunk}
        no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        answers = {job.index: Answer() for job in self._jobs}
        async with aclosing(self._replies()) as replies:
            async for job, reply in replies:
                answer = answers[job.index]
                first = answer.completion_tokens == 0
                answer.add(reply)
                answer.text, answer.logprobs = "", []  # only counts are wanted here
                if not (reply.text or reply.finished or reply.logprobs or first):
                    continue  # half a character: nothing to show yet
                delta = self._shape.delta(job.index, reply, first)
                yield sse({**head, "choices": [delta], **no_usage})
        if include_usage:
            total = usage(list(answers.values()), self._prompts)
            yield sse({**head, "choices": [], "usage": total})
        yield sse("[DONE]")

    async def texts(self) -> AsyncGenerator[str, None]:
        """The text alone as server-sent events."""
        async with aclosing(self._replies()) as replies:
            async for _, reply in replies:
                if reply.text:
                    yield sse(reply.text)
        yield sse("[DONE]")


async def guarded(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Pass events on; a failure becomes an error event, for the status line has gone out."""
    try:
        async for event in events:
            yield event
    except Exception as failure:
        if not isinstance(failure, RequestFailed | ApiError):
            traceback.print_exc()
        yield sse(api_error(failure).body())


class EventStream(StreamingResponse):
    """Events whose generator is closed with the response, sent or not."""

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        self._events = events

        async def all_events() -> AsyncGenerator[str, None]:
            yield first
            async with aclosing(guarded(events)) as rest:
                async for event in rest:
                    yield event

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(all_events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def stream_response(events: AsyncGenerator[str, None]) -> EventStream:
    """Start a stream once its first event is there, so that a refused request is a 400."""
    try:
        return EventStream(await anext(events), events)
    except RequestFailed as failure:
        raise api_error(failure) from failure


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Run `work`, or cancel it when the client disconnects and return None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def answer(request: Request, body: GenerationRequest, completer: Completer) -> Response:
    """Streamed or whole, as the client asked."""
    if body.stream:
        started = await unless_gone(request, stream_response(completer.events(body.include_usage)))
        return started or Response(status_code=499)
    whole = await unless_gone(request, completer.whole())
    return Response(status_code=499) if whole is None else JSONResponse(whole)


def jobs_for(
    body: GenerationRequest, prompts: list[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[Job]:
    """`n` jobs per prompt, numbered as the choices are."""
    n = body.n or 1
    if n * len(prompts) > MAX_ANSWERS:
        what = f"prompt: {len(prompts)} prompts times {n} answers are more than {MAX_ANSWERS}"
        raise ApiError(400, what, code="invalid_value", param="prompt")
    params = [body.sampling_params(defaults, index=k) for k in range(n)]
    return [
        Job(index=i * n + k, params=params[k], prompt=prompt)
        for i, prompt in enumerate(prompts)
        for k in range(n)
    ]


def invalid(error: RequestValidationError) -> ApiError:
    """What pydantic found wrong, as one sentence that begins with the field."""
    # A field of several types has one error for each: the deepest went furthest.
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    place = [str(part) for part in first["loc"] if part not in ("body", "str")]
    place = [part for part in place if "[" not in part]  # the name of a type that was tried
    if first["type"] == "json_invalid":
        reason = f"body: invalid JSON ({first.get('ctx', {}).get('error', 'cannot be parsed')})"
        return ApiError(400, reason, code="invalid_json")
    where = ".".join(place) or "body (JSON with Content-Type: application/json)"
    reason = f"{where}: {first['msg']}, got {first.get('input')!r:.80}"
    return ApiError(400, reason, code="invalid_value", param=place[0] if place else None)


def add_error_handlers(app: FastAPI) -> None:
    """Every failure has one body, FastAPI's own included."""

    def respond(
        request: Request, error: ApiError, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        request.scope["refused"] = error  # for whoever writes a log
        return JSONResponse(
            error.body(), status_code=error.status, headers={**error.headers, **(headers or {})}
        )

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return respond(request, error)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(request, invalid(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        code, detail = f"http_{error.status_code}", str(error.detail)
        return respond(request, ApiError(error.status_code, detail, code=code), error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return respond(request, api_error(error))


def create_app(
    frontend: Frontend, settings: ApiSettings, admission: Admission | None = None,
    middleware: Sequence[Middleware] = (),
) -> FastAPI:  # fmt: skip
    """The HTTP application over one frontend; `middleware` lies around all of its routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await frontend.start()
        yield
        await frontend.stop()

    browsers = Middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip
    app = FastAPI(title="minisgl", lifespan=lifespan, middleware=[browsers, *middleware])
    add_error_handlers(app)
    service = Service(frontend, settings, admission or Admission())
    add_info_routes(app, service)
    add_completion_routes(app, service)
    add_generate_route(app, service)
    return app


def check_access(request: Request, settings: ApiSettings) -> None:
    """401 unless the key fits; without a configured key, any is welcome."""
    given = request.headers.get("authorization", "").encode()
    # Compared in constant time: how long a refusal takes must not tell how much was right.
    fits = settings.api_key is None or hmac.compare_digest(
        given, f"Bearer {settings.api_key}".encode()
    )
    if not fits:
        raise ApiError(401, "authorization: missing or wrong API key", code="invalid_api_key")


def check_model(asked: str | None, settings: ApiSettings) -> None:
    """404 for a model that we do not serve; an absent name means the one that we do."""
    if asked not in (None, "", "default", settings.model_name):
        raise ApiError(
            404,
            f"model: {asked!r:.80} is not served here; this server has {settings.model_name!r}",
            code="model_not_found",
            param="model",
        )


def client_of(request: Request, body: GenerationRequest) -> str:
    """To whom a request counts: the `user` that it names, or else the address of its peer."""
    if body.user:
        return f"user {body.user}"
    return "" if request.client is None else f"address {request.client.host}"


@dataclass(frozen=True)
class Service:
    """What the routes share."""

    frontend: Frontend
    settings: ApiSettings
    admission: Admission

    def completer(
        self, request: Request, body: GenerationRequest, prompts: list[Mapping[str, Any]],
        shape: ChatShape | CompletionShape,
    ) -> Completer:  # fmt: skip
        """The jobs of one HTTP request; `ApiError` if it may not or cannot be served."""
        check_access(request, self.settings)
        check_model(body.model, self.settings)
        body.refuse_unsupported()
        limits = [s for s in (body.timeout, self.settings.request_timeout) if s is not None]
        return Completer(
            self.frontend, self.admission, shape,
            jobs_for(body, prompts, self.settings.sampling_defaults),
            model_name=self.settings.model_name, prompts=len(prompts),
            request_id=request.scope.get("request_id") or uuid.uuid4().hex,
            timeout=min(limits, default=None), client=client_of(request, body),
        )  # fmt: skip


def add_info_routes(app: FastAPI, service: Service) -> None:
    """What tools ask before they trust a server."""
    settings, started = service.settings, int(time.time())
    card = {
        "id": settings.model_name,
        "object": "model",
        "created": started,
        "owned_by": "minisgl",
        "max_model_len": settings.max_model_len,
    }

    @app.get("/health")
    async def health() -> Response:
        reason = service.frontend.failure or service.admission.closed()
        if reason is not None:
            raise ApiError(503, reason, code="service_unavailable", retry_after=5)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check_access(request, settings)
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        check_access(request, settings)
        check_model(name, settings)
        return card


def add_completion_routes(app: FastAPI, service: Service) -> None:
    """OpenAI's two routes that generate."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        prompt = {"messages": [message.as_template_input() for message in body.messages]}
        shape = ChatShape(logprobs=body.wanted_logprobs() is not None)
        return await answer(request, body, service.completer(request, body, [prompt], shape))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        prompts: list[Mapping[str, Any]] = [
            {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
            for prompt in body.prompts()
        ]
        shape = CompletionShape(logprobs=body.wanted_logprobs() is not None)
        return await answer(request, body, service.completer(request, body, prompts, shape))


def add_generate_route(app: FastAPI, service: Service) -> None:
    """The smallest route: text in, text out."""

    @app.post("/generate")
    async def generate(request: Request, body: GenerateRequest) -> Response:
        name = "text" if isinstance(body.prompt, str) else "input_ids"
        completer = service.completer(request, body, [{name: body.prompt}], CompletionShape())
        if body.stream is not False:
            stream = await unless_gone(request, stream_response(completer.texts()))
            return stream or Response(status_code=499)
        answers = await unless_gone(request, completer.answers())
        gone = Response(status_code=499)
        return JSONResponse({"text": answers[0].text}) if answers else gone
