"""`/v1/responses`: one more formatter over the tasks and replies of chapter 12c.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from minisgl.core import MAX_CONTAINERS
from minisgl.server.http.access import client_of
from minisgl.server.http.api import STREAMED, RequestHandler, Service, respond
from minisgl.server.http.bodies import HOLD, build
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import refuse_foreign
from minisgl.server.http.formats import Completion, Json, sse
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
from minisgl.server.responses.store import MOST_READ, ResponseStore, Turn, decode


@contextmanager
def looking_up(param: str) -> Iterator[None]:
    """Raise a 404 if the path names an item that is not stored, a 400 if a field does."""
    try:
        yield
    except KeyError as error:
        why = f"{param}: {error.args[0]!r:.80} is not stored here, or not any more"
        status = 404 if param == "response_id" else 400
        code = f"{param.removesuffix('_id')}_not_found"
        raise ApiError(status, why, code=code, param=param) from error
    except OverflowError as error:
        why = f"{param}: {error} bytes of stored turns are more than the {MOST_READ} of one request"
        raise ApiError(400, why, code="conversation_too_large", param=param) from error


class References:
    """Stored items by their ids, for one request; it may read `MOST_READ` bytes of them.

    `hold` counts these bytes in its client's share.
    """

    def __init__(self, store: ResponseStore, client: str, hold: Callable[[int], object]) -> None:
        self._store, self._client, self._hold, self._size = store, client, hold, 0
        self._turns: dict[str, dict[str, dict[str, Any]]] = {}

    def _count(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size > MOST_READ:
            raise OverflowError(self._size)
        self._hold(len(data))
        return data

    def find(self, wanted: str) -> Item:
        """Return the item of this id, which names its response, too."""
        response_id = "resp_" + wanted.partition("_")[2].partition("_")[0]
        if response_id not in self._turns:
            with suppress(KeyError):  # of the response, which the caller did not name
                turn = decode(self._count(self._store.read(self._client, response_id)))
                self._turns[response_id] = {item["id"]: item for item in turn.all_items}
        if (item := self._turns.get(response_id, {}).get(wanted)) is None:
            raise KeyError(wanted)
        self._count(msgspec.json.encode(item))  # a second reference costs as much as the first
        return read_items([item])[0]


def conversation(
    store: ResponseStore, client: str, body: ResponsesRequest,
    hold: Callable[[int], object] = lambda size: None,
) -> tuple[list[Item], list[Item]]:  # fmt: skip
    """Return the items before this request, and its own; `hold` counts the bytes it reads."""
    with looking_up("previous_response_id"):
        turns = store.conversation(client, body.previous_response_id, hold)
        stored = [item for turn in turns for item in turn.all_items]
    if len(stored) > MAX_CONTAINERS:  # many small ones take long to read
        what = f"{len(stored)} stored items are more than the {MAX_CONTAINERS} of one request"
        why, param = f"previous_response_id: {what}", "previous_response_id"
        raise ApiError(400, why, code="conversation_too_large", param=param)
    before = read_items(stored)
    references = References(store, client, hold)
    if isinstance(body.input, str):
        return before, [Message(role="user", content=body.input)]
    with looking_up("input"):
        return before, [
            references.find(item.id) if isinstance(item, ItemReference) else item
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


SAMPLING = "temperature top_p presence_penalty frequency_penalty"  # shown with the used values


def empty_response(body: ResponsesRequest, handler: RequestHandler) -> dict[str, Any]:
    """Make a response without output, which echoes the request's settings."""
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
        hold = request.scope.get(HOLD, lambda size: None)
        before, own = conversation(store, client_of(request), body, hold)
        super().__init__(service, request, lambda: body.as_chat(before + own))
        response = empty_response(body, self)
        self._store = store
        self._items = [as_stored(item, response["id"], n) for n, item in enumerate(own)]
        self.builder = ResponseBuilder(response, first=len(own))

    def finish(self, answer: Completion) -> Sequence[Event]:
        """Complete the response and keep it, if it is to be kept."""
        events = list(self.builder.finish(answer, int(time.time())))
        if self.builder.response["store"]:
            self._store.put(self.client, Turn(self._items, self.builder.response))
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


def input_page(read: Callable[[], list[Turn]], limit: int, order: str, after: str | None) -> Json:
    """Return a page of the items that the model saw."""
    with looking_up("response_id"):
        *before, last = read()
    items = [item for turn in before for item in turn.all_items] + last.items
    with looking_up("after"):
        return Json(page(items if order == "asc" else items[::-1], limit, after))


def add_responses_routes(
    keyed: APIRouter, service: Service, store: ResponseStore | None = None
) -> None:
    """Add the routes that create, read and delete responses, and list their inputs."""
    kept = ResponseStore() if store is None else store

    @keyed.post("/v1/responses", responses=STREAMED)
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        work = partial(ResponsesHandler, service, request, body, kept)
        handler = await build(request, work, large=body.reads_stored_turns)
        return await respond(request, handler.chat, handler)

    @keyed.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise ApiError(400, "stream: only when it is made", code="unsupported", param="stream")
        read = partial(kept.get, client_of(request), response_id)
        with looking_up("response_id"):
            return await build(request, lambda: Json(read().response), large=True)

    @keyed.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        with looking_up("response_id"):
            kept.delete(client_of(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @keyed.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request, response_id: str, limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc", after: str | None = None,
    ) -> Response:  # fmt: skip
        read = partial(kept.conversation, client_of(request), response_id)
        return await build(request, lambda: input_page(read, limit, order, after), large=True)
