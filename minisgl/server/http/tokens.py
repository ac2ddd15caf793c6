"""`/tokenize` and `/detokenize`: a prompt as tokens, and tokens as text.

Generated from notebooks/12db_messages.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from minisgl.server.frontend import RequestFailed
from minisgl.server.http.api import Service, as_prompt, check_model
from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.errors import ApiError, api_error
from minisgl.server.http.schemas import ChatRequest, CompletionRequest, GenerationRequest, TokenId
from minisgl.server.http.tools import Text
from minisgl.server.http.translated import renamed_errors
from minisgl.server.workers.messages import Converted


class TokenizeRequest(BaseModel, extra="allow", strict=True):
    """Body of `POST /tokenize`: a prompt or a conversation."""

    prompt: Text | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def asked(self, can: ChatAbilities) -> tuple[GenerationRequest, dict[str, Any]]:
        """Return the request that this would begin, and its prompt for `Frontend.convert`."""
        if (self.prompt is None) == (self.messages is None):
            why = "prompt: must be given, or messages, and not both"
            raise ApiError(400, why, code="invalid_value", param="prompt")
        given, body = self.model_extra or {}, GenerationRequest()
        with renamed_errors({}):
            if self.prompt is None:
                written = {"add_special_tokens": self.add_special_tokens}  # by the template
                body = ChatRequest.model_validate({"messages": self.messages, **written, **given})
            else:
                body = CompletionRequest.model_validate({"prompt": self.prompt, **given})
            body.prepare(can)
        if isinstance(body, ChatRequest):
            return body, body.prompt()
        special = self.add_special_tokens is not False
        return body, {"text": self.prompt, "add_special_tokens": special}


class DetokenizeRequest(BaseModel, strict=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


async def converted(service: Service, **prompt: Any) -> Converted:
    """Convert in the text worker, within the limits of the server."""
    try:
        with service.limiter.acquire(1):
            return await service.frontend.convert(**prompt)
    except RequestFailed as failure:
        raise api_error(failure) from failure


def add_token_routes(keyed: APIRouter, service: Service) -> None:
    """Add the routes that convert a prompt to tokens, and tokens to text."""
    settings = service.settings

    @keyed.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        asked, prompt = body.asked(settings.can)
        check_model(asked.model, settings)
        reply = await converted(service, **prompt)
        pieces = reply.pieces if body.return_token_strs else None
        counts = {"count": len(reply.token_ids), "max_model_len": settings.max_model_len}
        return {**counts, "tokens": reply.token_ids, "token_strs": pieces}

    @keyed.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model, settings)
        with renamed_errors({"prompt": "tokens"}):
            return {"prompt": (await converted(service, **as_prompt(body.tokens))).text}
