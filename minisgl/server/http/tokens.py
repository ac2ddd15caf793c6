"""Routes for text as tokens, tokens as text, and a description of the server.

Generated from notebooks/12db_messages.ipynb: edit there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from minisgl import __version__
from minisgl.server.frontend import RequestFailed
from minisgl.server.http.access import client_of
from minisgl.server.http.api import Service, as_prompt, cancel_on_disconnect, check_model
from minisgl.server.http.bodies import build, renamed_errors, validator_of
from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.errors import ApiError, api_error
from minisgl.server.http.formats import Json
from minisgl.server.http.schemas import (
    MAX_ANSWERS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenId,
)
from minisgl.server.http.tools import Text
from minisgl.server.workers.messages import Converted


class TokenizeRequest(BaseModel, extra="allow", strict=True):
    """Body of `POST /tokenize`: a prompt or a conversation."""

    prompt: Text | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def asked(self, can: ChatAbilities) -> tuple[GenerationRequest, dict[str, Any]]:
        """Return the request that this body would begin, and its prompt for `Frontend.convert`."""
        if (self.prompt is None) == (self.messages is None):
            why = "prompt: must be given, or messages, and not both"
            raise ApiError(400, why, code="invalid_value", param="prompt")
        given: dict[str, Any] = {"prompt": self.prompt}
        if self.prompt is None:  # the template writes the special tokens
            given = {"messages": self.messages, "add_special_tokens": self.add_special_tokens}
        kind = ChatRequest if self.prompt is None else CompletionRequest
        with renamed_errors({}):
            given |= self.model_extra or {}
            body: GenerationRequest = validator_of(kind).validate_python(given)
            body.prepare(can)
        if isinstance(body, ChatRequest):
            return body, body.prompt()
        special = self.add_special_tokens is not False
        return body, {"text": self.prompt, "add_special_tokens": special}


class DetokenizeRequest(BaseModel, strict=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


async def converted(service: Service, request: Request, **prompt: Any) -> Converted:
    """Convert in the text worker, within the limits of the server and of the client."""
    client = client_of(request)
    try:
        with service.limiter.acquire(1, client):
            work = service.frontend.convert(client, **prompt)
            reply = await cancel_on_disconnect(request, work)
    except RequestFailed as failure:
        raise api_error(failure) from failure
    if reply is None:
        raise ApiError(499, "request: the client left", code="client_left")
    return reply


def add_token_routes(keyed: APIRouter, service: Service) -> None:
    """Add the routes that convert text to tokens and back, and one about the server."""
    settings = service.settings

    @keyed.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        asked, prompt = await build(request, partial(body.asked, settings.can))
        check_model(asked.model, settings)
        pieces = body.return_token_strs is True
        reply = await converted(service, request, pieces=pieces, **prompt)
        counts = {"count": len(reply.token_ids), "max_model_len": settings.max_model_len}
        names = reply.pieces if pieces else None
        content = {**counts, "tokens": reply.token_ids, "token_strs": names}
        return await build(request, partial(Json, content))

    @keyed.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        check_model(body.model, settings)
        with renamed_errors({"prompt": "tokens"}):
            reply = await converted(service, request, **as_prompt(body.tokens))
        return await build(request, partial(Json, {"prompt": reply.text}))

    @keyed.get("/server_info")
    async def server_info() -> dict[str, Any]:
        about = {"version": __version__, "model": settings.model_name, **settings.info}
        about |= {"max_model_len": settings.max_model_len, "answers_of_a_request": MAX_ANSWERS}
        about |= {"request_timeout": settings.request_timeout}
        return {**about, "answers_in_flight": service.limiter.limit}
