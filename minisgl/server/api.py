"""The HTTP face: routes, server-sent events and error bodies over a `Frontend`.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from minisgl.core import SamplingParams
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.messages import UserReply
from minisgl.server.schemas import ApiError, ChatRequest, CompletionRequest, GenerationRequest

T = TypeVar("T")

STATUS_OF_CODE = {"service_unavailable": 503, "internal_error": 500}


def api_error(failure: RequestFailed) -> ApiError:
    """The HTTP form of a refused request: the caller's fault unless its code says else."""
    return ApiError(
        STATUS_OF_CODE.get(failure.code, 400), str(failure), code=failure.code, param=failure.param
    )


@dataclass(frozen=True)
class ApiSettings:
    """What the routes must know beside the frontend."""

    model_name: str
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None


@dataclass(frozen=True)
class Job:
    """One answer to produce: a prompt in one of three forms, with its params."""

    index: int
    params: SamplingParams
    prompt: Mapping[str, Any]  # text=…, input_ids=… or messages=…


@dataclass
class Answer:
    """A whole answer, collected."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: UserReply) -> None:
        self.text += reply.text
        self.finish_reason = reply.finish_reason
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        self.completion_tokens = reply.completion_tokens


def usage(answers: list[Answer], prompts: int = 1) -> dict[str, Any]:
    """Token counts of one HTTP request. With `n` answers to one prompt, the prompt counts once."""
    per_prompt = max(1, len(answers) // max(1, prompts))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::per_prompt])
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[::per_prompt])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatShape:
    """How a chat answer and its chunks look."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def delta(
        self, index: int, text: str, finish_reason: str | None, first: bool
    ) -> dict[str, Any]:
        delta: dict[str, Any] = (
            {"role": "assistant", "content": text} if first else {"content": text}
        )
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    """How a plain completion and its chunks look: both are `text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }

    def delta(
        self, index: int, text: str, finish_reason: str | None, first: bool
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class Completer:
    """Runs the jobs of one HTTP request and shapes what comes back."""

    def __init__(
        self,
        frontend: Frontend,
        shape: ChatShape | CompletionShape,
        jobs: list[Job],
        model_name: str,
        prompts: int,
    ) -> None:
        self._frontend, self._shape, self._jobs, self._prompts = frontend, shape, jobs, prompts
        self._head = {
            "id": shape.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model_name,
        }

    async def _collect(self, job: Job) -> Answer:
        answer = Answer()
        async with aclosing(self._frontend.generate(job.params, **job.prompt)) as replies:
            async for reply in replies:
                answer.add(reply)
        return answer

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece. If one job fails or the client leaves, all are aborted."""
        tasks = [asyncio.ensure_future(self._collect(job)) for job in self._jobs]
        try:
            answers = await asyncio.gather(*tasks)
        except RequestFailed as failure:
            raise api_error(failure) from failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        choices = [
            self._shape.choice(job.index, answer)
            for job, answer in zip(self._jobs, answers, strict=True)
        ]
        head = {**self._head, "object": self._shape.whole}
        return {**head, "choices": choices, "usage": usage(answers, self._prompts)}

    async def _replies(self) -> AsyncGenerator[tuple[Job, UserReply], None]:
        """Replies of all jobs as they come. Closing this generator cancels every job."""
        merged: asyncio.Queue[tuple[Job, UserReply | Exception]] = asyncio.Queue()

        async def pump(job: Job) -> None:
            try:
                async with aclosing(self._frontend.generate(job.params, **job.prompt)) as replies:
                    async for reply in replies:
                        merged.put_nowait((job, reply))
            except Exception as failure:  # a fault of ours must end the stream, too
                merged.put_nowait((job, failure))

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
                first = answers[job.index].completion_tokens == 0
                answers[job.index].add(reply)
                if not (reply.text or reply.finished or first):
                    continue  # half a character: nothing to show yet
                delta = self._shape.delta(job.index, reply.text, reply.finish_reason, first)
                yield sse({**head, "choices": [delta], **no_usage})
        if include_usage:
            total = usage(list(answers.values()), self._prompts)
            yield sse({**head, "choices": [], "usage": total})
        yield sse("[DONE]")


def sse(payload: Mapping[str, Any] | str) -> str:
    """One server-sent event: a `data:` line and a blank line."""
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return f"data: {text}\n\n"


async def guarded(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Pass events on; a failure becomes an error event, for the status line has gone out."""
    try:
        async for event in events:
            yield event
    except RequestFailed as failure:
        yield sse(api_error(failure).body())
    except Exception as error:
        traceback.print_exc()
        fault = RequestFailed(f"internal error: {type(error).__name__}: {error}")
        yield sse(api_error(fault).body())


async def stream_response(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """Start a stream once its first event is there, so that a refused request is a 400."""
    try:
        first = await anext(events)
    except RequestFailed as failure:
        raise api_error(failure) from failure

    async def all_events() -> AsyncGenerator[str, None]:
        yield first
        async with aclosing(guarded(events)) as rest:
            async for event in rest:
                yield event

    return StreamingResponse(all_events(), media_type="text/event-stream")


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


def jobs_for(
    body: GenerationRequest, prompts: list[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[Job]:
    """`n` jobs per prompt, numbered as the choices are."""
    n = body.n or 1
    return [
        Job(index=i * n + k, params=body.sampling_params(defaults, index=k), prompt=prompt)
        for i, prompt in enumerate(prompts)
        for k in range(n)
    ]


async def answer(request: Request, body: GenerationRequest, completer: Completer) -> Response:
    """Streamed or whole, as the client asked."""
    if body.stream:
        started = await unless_gone(request, stream_response(completer.events(body.include_usage)))
        return started or Response(status_code=499)
    whole = await unless_gone(request, completer.whole())
    return Response(status_code=499) if whole is None else JSONResponse(whole)


def add_error_handlers(app: FastAPI) -> None:
    """Every failure has one body, FastAPI's own included."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # A field of several types has one error for each: the deepest went furthest.
        first = max(error.errors(), key=lambda found: len(found["loc"]))
        place = [str(part) for part in first["loc"] if part not in ("body", "str")]
        place = [part for part in place if "[" not in part]  # the name of a type that was tried
        if first["type"] == "json_invalid":
            reason = f"body: invalid JSON ({first.get('ctx', {}).get('error', 'cannot be parsed')})"
            problem = ApiError(400, reason, code="invalid_json")
        else:
            where = ".".join(place) or "body (JSON with Content-Type: application/json)"
            reason = f"{where}: {first['msg']}, got {first.get('input')!r:.80}"
            param = place[0] if place else None
            problem = ApiError(400, reason, code="invalid_value", param=param)
        return JSONResponse(problem.body(), status_code=400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        problem = ApiError(error.status_code, str(error.detail), code=f"http_{error.status_code}")
        return JSONResponse(problem.body(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        problem = ApiError(
            500, f"internal error: {type(error).__name__}: {error}", code="internal_error"
        )
        return JSONResponse(problem.body(), status_code=500)


def create_app(frontend: Frontend, settings: ApiSettings) -> FastAPI:
    """The HTTP application over one frontend; its state lives in this closure."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await frontend.start()
        yield
        await frontend.stop()

    app = FastAPI(title="minisgl", lifespan=lifespan)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    add_error_handlers(app)
    add_info_routes(app, frontend, settings)
    add_completion_routes(app, frontend, settings)
    return app


def check_access(request: Request, settings: ApiSettings) -> None:
    """401 unless the key fits; without a configured key, any is welcome."""
    given = request.headers.get("authorization")
    if settings.api_key is not None and given != f"Bearer {settings.api_key}":
        raise ApiError(401, "authorization: missing or wrong API key", code="invalid_api_key")


def check_model(asked: str | None, settings: ApiSettings) -> None:
    """404 for a model that we do not serve; an absent name means the one that we do."""
    if asked not in (None, "", "default", settings.model_name):
        raise ApiError(
            404,
            f"model: {asked!r} is not served here; this server has {settings.model_name!r}",
            code="model_not_found",
            param="model",
        )


def add_info_routes(app: FastAPI, frontend: Frontend, settings: ApiSettings) -> None:
    """What tools ask before they trust a server."""
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if frontend.failure is not None:
            raise ApiError(503, frontend.failure, code="service_unavailable")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check_access(request, settings)
        card = {
            "id": settings.model_name,
            "object": "model",
            "created": started,
            "owned_by": "minisgl",
            "max_model_len": settings.max_model_len,
        }
        return {"object": "list", "data": [card]}


def add_completion_routes(app: FastAPI, frontend: Frontend, settings: ApiSettings) -> None:
    """The two routes that generate."""
    defaults, name = settings.sampling_defaults, settings.model_name

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        check_access(request, settings)
        check_model(body.model, settings)
        body.refuse_unsupported()
        prompt = {"messages": [message.as_template_input() for message in body.messages]}
        jobs = jobs_for(body, [prompt], defaults)
        return await answer(request, body, Completer(frontend, ChatShape(), jobs, name, prompts=1))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        check_access(request, settings)
        check_model(body.model, settings)
        body.refuse_unsupported()
        prompts: list[Mapping[str, Any]] = [
            {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
            for prompt in body.prompts()
        ]
        jobs = jobs_for(body, prompts, defaults)
        completer = Completer(frontend, CompletionShape(), jobs, name, prompts=len(prompts))
        return await answer(request, body, completer)
