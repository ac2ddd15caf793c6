"""`/v1/responses`: one more formatter over the tasks and replies of chapter 12c.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from minisgl.server.http.api import STREAMED, RequestHandler, Service, respond
from minisgl.server.http.bodies import build
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import refuse_foreign
from minisgl.server.http.formats import Completion, sse
from minisgl.server.http.translated import Event, TranslatedHandler
from minisgl.server.responses.events import ResponseBuilder, item_id
from minisgl.server.responses.schemas import (
    RENAMED,
    Item,
    ItemReference,
    Message,
    ResponsesRequest,
    read_items,
)
from minisgl.server.responses.store import ResponseStore, Turn


@contextmanager
def looking_up(param: str) -> Iterator[None]:
    """404 where the path names what is not stored, 400 where a field does."""
    try:
        yield
    except KeyError as error:
        why = f"{param}: {error.args[0]!r:.80} is not stored here, or not any more"
        status = 404 if param == "response_id" else 400
        code = f"{param.removesuffix('_id')}_not_found"
        raise ApiError(status, why, code=code, param=param) from error


def find_item(store: ResponseStore, wanted: str) -> Item:
    """Find the stored item of this id, which also names its response."""
    response_id = "resp_" + wanted.partition("_")[2].partition("_")[0]
    with suppress(KeyError):  # of the response, which the caller did not name
        for item in store.get(response_id).all_items:
            if item["id"] == wanted:
                return read_items([item])[0]
    raise KeyError(wanted)


def conversation(store: ResponseStore, body: ResponsesRequest) -> tuple[list[Item], list[Item]]:
    """Return the items before this request, and its own."""
    with looking_up("previous_response_id"):
        turns = store.conversation(body.previous_response_id)
    before = read_items([item for turn in turns for item in turn.all_items])
    if isinstance(body.input, str):
        return before, [Message(role="user", content=body.input)]
    with looking_up("input"):
        return before, [
            find_item(store, item.id) if isinstance(item, ItemReference) else item
            for item in body.input
        ]


def as_stored(item: Item, response_id: str, number: int) -> dict[str, Any]:
    """Format an item of the input as the API shows it."""
    shown = item.model_dump(exclude_none=True)
    if isinstance(item, Message):
        kind = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            shown["content"] = [{"type": kind, "text": item.content}]
        if item.role == "assistant":
            shown["content"] = [{**part, "annotations": []} for part in shown["content"]]
    return {**shown, "id": item_id(item.type, response_id, number), "status": "completed"}


SAMPLING = "temperature top_p presence_penalty frequency_penalty"  # shown as it was used


def empty_response(body: ResponsesRequest, handler: RequestHandler) -> dict[str, Any]:
    """Make a response without output, which echoes the request as it was understood."""
    params, form = handler.tasks[0].params, body.text.format
    echoed = ResponsesRequest.model_fields.keys() - {"input", "include", "stream", "stream_options"}
    return {
        **body.model_dump(include=set(echoed)),
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": handler.head["created"],
        "status": "in_progress",
        "model": handler.head["model"],
        "output": [],
        **{name: getattr(params, name) for name in SAMPLING.split()},
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": form.model_dump(exclude_none=form.type != "json_schema")},
        "service_tier": "default",
    }


class ResponsesHandler(TranslatedHandler):
    """Runs a response, and keeps it when it is complete."""

    builder: ResponseBuilder
    names, ending = RENAMED, sse("[DONE]")

    def __init__(
        self, service: Service, request: Request, body: ResponsesRequest, store: ResponseStore
    ) -> None:
        refuse_foreign(body.model_extra or {}, RENAMED)
        before, own = conversation(store, body)
        super().__init__(service, request, lambda: body.as_chat(before + own))
        response = empty_response(body, self)
        self._store = store
        self._items = [as_stored(item, response["id"], n) for n, item in enumerate(own)]
        self.builder = ResponseBuilder(response, first=len(own))

    def finish(self, answer: Completion) -> Sequence[Event]:
        """Complete the response and keep it, if it is to be kept."""
        events = list(self.builder.finish(answer, int(time.time())))
        if self.builder.response["store"]:
            self._store.put(Turn(self._items, self.builder.response))
        return events

    async def whole(self) -> dict[str, Any]:
        """Return the response in one piece."""
        await self.collected()
        return self.builder.response


def page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return at most `limit` items after the item `after`, as OpenAI pages lists."""
    places = {item["id"]: place for place, item in enumerate(items)}
    start = 0 if after is None else places[after] + 1
    data = items[start : start + limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, **ends, "has_more": start + limit < len(items)}


def add_responses_routes(
    keyed: APIRouter, service: Service, store: ResponseStore | None = None
) -> None:
    """Make a response, look at it and at what went in, forget it."""
    kept = ResponseStore() if store is None else store

    @keyed.post("/v1/responses", responses=STREAMED)
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        handler = await build(request, partial(ResponsesHandler, service, request, body, kept))
        return await respond(request, handler.chat, handler)

    @keyed.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "stream: only when it is made", code="unsupported", param="stream")
        with looking_up("response_id"):
            return kept.get(response_id).response

    @keyed.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        with looking_up("response_id"):
            kept.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @keyed.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str, limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc", after: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        with looking_up("response_id"):
            *before, last = kept.conversation(response_id)
        items = [item for turn in before for item in turn.all_items] + last.items
        with looking_up("after"):
            return page(items if order == "asc" else items[::-1], limit, after)
