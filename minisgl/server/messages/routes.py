"""`/v1/messages` and its count of tokens, over the tasks and replies of chapter 12c.

Generated from notebooks/12db_messages.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from minisgl.server.http.api import STREAMED, Service, check_model, respond
from minisgl.server.http.bodies import build, renamed_errors
from minisgl.server.http.fields import refuse_foreign
from minisgl.server.http.formats import Completion
from minisgl.server.http.tokens import converted
from minisgl.server.http.translated import Event, TranslatedHandler
from minisgl.server.messages.events import MessageBuilder, error_body
from minisgl.server.messages.schemas import RENAMED, MessagesRequest, wrong


class MessagesHandler(TranslatedHandler):
    """Runs a message as the one task of a chat."""

    builder: MessageBuilder
    names = RENAMED

    def __init__(self, service: Service, request: Request, body: MessagesRequest) -> None:
        refuse_foreign(body.model_extra or {}, RENAMED)
        super().__init__(service, request, body.as_chat)
        name = "msg_" + str(self.head["id"]).rpartition("-")[2]
        self.builder = MessageBuilder(name, str(self.head["model"]))

    def finish(self, answer: Completion) -> Sequence[Event]:
        return list(self.builder.finish(answer))

    async def whole(self) -> dict[str, Any]:
        """Return the message in one piece."""
        await self.collected()
        return self.builder.message


def messages_route(keyed_route: type[APIRoute]) -> type[APIRoute]:
    """Return a class for routes that take `x-api-key`, and whose errors are Anthropic's."""

    class MessagesRoute(keyed_route):  # type: ignore[misc, valid-type]
        error_body = staticmethod(error_body)

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def translated(request: Request) -> Response:
                headers = request.scope["headers"]
                key = dict(headers).get(b"x-api-key")
                if key is not None and b"authorization" not in dict(headers):
                    bearer = (b"authorization", b"Bearer " + key)
                    request.scope["headers"] = [*headers, bearer]  # the log reads this scope
                    request = Request(request.scope, request.receive)
                response: Response = await handle(request)
                return response

            return translated

    return MessagesRoute


def add_messages_routes(keyed: APIRouter, service: Service) -> None:
    """Add the routes that answer with a message, and that count the tokens of a request."""
    routes = APIRouter(route_class=messages_route(keyed.route_class))

    @routes.post("/v1/messages", responses=STREAMED)
    async def create_message(request: Request, body: MessagesRequest) -> Response:
        if body.max_tokens is None:
            raise wrong("max_tokens: must be given on this route, got None", "max_tokens")
        handler = await build(request, partial(MessagesHandler, service, request, body))
        response = await respond(request, handler.chat, handler)
        response.headers["request-id"] = handler.builder.message["id"]
        return response

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: MessagesRequest) -> dict[str, int]:
        def prompt() -> dict[str, Any]:
            chat = body.as_chat()
            chat.prepare(service.settings.can)
            return chat.prompt()

        check_model(body.model, service.settings)
        refuse_foreign(body.model_extra or {}, RENAMED)
        with renamed_errors(RENAMED):
            reply = await converted(service, request, **await build(request, prompt))
        return {"input_tokens": len(reply.token_ids)}

    keyed.include_router(routes)
