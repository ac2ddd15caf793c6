"""No client, and nothing else that can reach a socket, may harm the others."""

from __future__ import annotations

import asyncio
import difflib
import gc
import inspect
import json
import os
import random
import re
import shutil
import socket
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import starlette.requests
from fastapi import FastAPI, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.config.engine import ServerConfig
from minisgl.config.folder import check_folder
from minisgl.config.paths import resolve_model_path
from minisgl.core import SamplingParams, load_json
from minisgl.llm import LLM
from minisgl.models.weights import INDEX, checkpoint_files
from minisgl.parallel.sockets import socket_pairs
from minisgl.scheduler import requests
from minisgl.scheduler.forms import load_tokens
from minisgl.scheduler.frames import Codec, with_seed
from minisgl.scheduler.messages import (
    AbortMsg,
    ErrorReply,
    ExitMsg,
    Msg,
    TokenReply,
    UserMsg,
    aborted,
)
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.side import SideTokenizer
from minisgl.server.chat.client import ApiClient, ServerError
from minisgl.server.cli import main, settings_of
from minisgl.server.fair import PART, FairFrontend, FairStream
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.http import api, bodies, formats, limits
from minisgl.server.http import turns as turns_module
from minisgl.server.http.access import KEY_NAME, Access, TrustedHosts, network_of
from minisgl.server.http.bodies import BodyReader, SideThread, check_count, invalid, validator_of
from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import MAX_UNKNOWN
from minisgl.server.http.formats import ChatFormatter, Completion, CompletionFormatter
from minisgl.server.http.keys import check_key, read_keys
from minisgl.server.http.limits import (
    FREE,
    MAX_HEAD,
    Body,
    BodyLimit,
    ConcurrencyLimiter,
    Shares,
)
from minisgl.server.http.schemas import (
    SLICE,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
)
from minisgl.server.http.settings import ApiSettings
from minisgl.server.http.turns import Turns
from minisgl.server.observe.logs import MAX_WAITING, LineWriter, RequestLog
from minisgl.server.options import Operations
from minisgl.server.responses.schemas import ResponsesRequest
from minisgl.server.workers.channels import MOST_MESSAGES, LocalQueue
from minisgl.server.workers.conversion import convert
from minisgl.server.workers.messages import (
    Converted,
    ConvertMsg,
    TokenizeMsg,
    TokenLogprob,
    UserReply,
    decode,
    encode,
)
from minisgl.server.workers.prompt_threads import PromptThreads
from minisgl.server.workers.scheduler_process import SchedulerChannel
from minisgl.server.workers.text_worker import PromptQueue, TextWorker, run_text_worker
from minisgl.tokenizer import Tokenizer, check_messages, text_size
from tests import hostile
from tests.serving import Live, Served, client_at, slow_reader, wait_for

pytest_plugins = ["tests.random_server"]


# Listening


def listening(pid: int) -> list[str]:
    """Addresses on which a process accepts connections over TCP."""
    found = psutil.Process(pid).net_connections("inet")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]


def test_ranks_are_joined_by_sockets_without_an_address() -> None:
    """A port of this machine would be open to all its users, to join and to fill."""
    for links in socket_pairs(3):
        for link in links:
            assert link.family == socket.AF_UNIX
            assert (link.getsockname(), link.getpeername()) == ("", "")
            link.close()


def test_a_server_listens_on_loopback_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A server of two ranks: only HTTP."""
    served = Served(tmp_path, "--model", str(checkpoint), "--tp", "2", "--device", "cpu", real=True)
    served.ready()
    children = served.children()
    addresses = [a for p in (served.process.pid, *(c.pid for c in children)) for a in listening(p)]
    assert addresses == ["127.0.0.1"]
    served.process.terminate()
    served.ended(children)


# Bodies

MODELS: list[type[BaseModel]] = [ChatRequest, CompletionRequest, GenerateRequest, ResponsesRequest]
MANY = 5000
WRONG: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "items of no type": (CompletionRequest, {"prompt": [{}] * MANY}),
    "items of items": (CompletionRequest, {"prompt": [[{}] * MANY]}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    "messages": (ChatRequest, {"messages": [{}] * MANY}),
    "input": (ResponsesRequest, {"input": [{}] * MANY}),
    "half an input": (ResponsesRequest, {"input": [{"role": ""}] * MANY}),
    "negative ids": (CompletionRequest, {"prompt": "x", "allowed_token_ids": [-1] * MANY}),
    "fields": (CompletionRequest, {"prompt": "x"} | {f"k{i}": 1 for i in range(MANY)}),
    "strict fields": (ResponsesRequest, {"input": "", "text": {f"k{i}": 1 for i in range(MANY)}}),
    "biases": (CompletionRequest, {"prompt": "", "logit_bias": {f"a{i}": 1 for i in range(MANY)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_body_costs_little(name: str) -> None:
    """A bounded number of errors, whatever the number of bad items."""
    model, body = WRONG[name]
    with pytest.raises((ValidationError, ApiError)) as caught:
        validator_of(model).validate_python(body)
    failure = caught.value
    found = failure.__cause__ if isinstance(failure, ApiError) else failure
    assert isinstance(found, ValidationError) and len(found.errors()) < 20


@pytest.mark.parametrize("size", [10, 20_000])
def test_unknown_names_cost_little(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are compared with known ones, and no long one."""
    compared: list[str] = []
    monkeypatch.setattr("minisgl.server.http.fields.meant", lambda name, _: compared.append(name))
    body = {"prompt": "x"} | {f"{i:03}{'k' * size}": 1 for i in range(200)}
    CompletionRequest.model_validate(body).prepare(ChatAbilities())
    assert len(compared) == (MAX_UNKNOWN if size < 64 else 0)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "model": "\x7f" * 10**7},
        {"prompt": "x", "functions": "\x7f" * 10**7},
        {"prompt": "x", "logit_bias": {'"' * 10**7: 1}},
        {"prompt": "x", "best_of": ["\x7f" * 10**7] * 2},
        b"\xff" * 10**7,
    ],
    ids=["model", "unsupported", "key", "value", "bytes"],
)
def test_an_error_costs_little_however_long_the_value(body: Any) -> None:
    """Nothing but a part of it is formatted: all of it would take 80 ms."""
    start = time.process_time()
    for _ in range(10):
        with pytest.raises((ApiError, ValidationError)) as caught:
            made = CompletionRequest.model_validate(body)
            made.prepare(ChatAbilities())
            api.check_model(made.model, ApiSettings("m", 10))
        error = caught.value
        error = invalid(error.errors()) if isinstance(error, ValidationError) else error
        assert isinstance(error, ApiError) and len(error.detail) < 600
    assert time.process_time() - start < 0.4


def test_an_unknown_name_is_compared_with_few_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, find = list[int](), difflib.get_close_matches

    def noted(name: str, names: list[str], *args: Any) -> list[str]:
        compared.append(len(names))
        return find(name, names, *args)

    monkeypatch.setattr(difflib, "get_close_matches", noted)
    for name in (
        "temperatures",
        "xtemperature",
        "Temperature_",
        "repetition_penaltyx",
        "maxTokens",
    ):
        with pytest.raises(ApiError, match="did you mean"):
            body = CompletionRequest.model_validate({"prompt": "x", name: 1})
            body.prepare(ChatAbilities())
    body = CompletionRequest.model_validate({"prompt": "x", "tertkrduso___eion": 1})
    body.prepare(ChatAbilities())
    assert len(compared) >= 4 and max(compared) < 60


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Every list in a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in bodies.LISTS:
            yield schema
        schema = [value for name, value in schema.items() if name not in bodies.OPAQUE]
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_in(part)


def test_every_list_of_every_request_fails_fast() -> None:
    for model in MODELS:
        found = list(lists_in(bodies.fail_fast(model.__pydantic_core_schema__)))
        assert found and all(schema["fail_fast"] for schema in found)


def test_a_valid_body_means_what_pydantic_says() -> None:
    body = {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1}, "stop": ["a"], "unknown": {"a": [1]}}
    assert validator_of(CompletionRequest).validate_python(body) == CompletionRequest(**body)


def test_values_are_counted_before_they_are_parsed() -> None:
    fits = b'{"prompt": "' + b'[{,\\\\\\"' * 2**17 + b'"}'  # all in one text
    check_count(fits)
    assert len(json.loads(fits)) == 1
    for body in (
        b'{"prompt":[' + b"1," * 2**17 + b"1]}",
        b'{"prompt":[' + b"[]," * 2**14 + b"[]]}",
        b'{"prompt":[' + b'"",' * 2**17 + b'""]}',
    ):
        with pytest.raises(ApiError) as caught:
            check_count(body)
        assert caught.value.status_code == 413


LISTS = "[" + "[]," * 2**14 + "[]]"


@pytest.mark.parametrize("text", [LISTS, "[" + "1," * 2**17 + "1]", "[]" + LISTS, '{"a": "\ud800'])
def test_json_in_a_text_is_counted_before_it_is_parsed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is not valid, and the parts of many tool calls together."""
    parsed, loads = list[int](), json.loads
    monkeypatch.setattr(json, "loads", lambda text, **kw: parsed.append(len(text)) or loads(text))
    for field in ("json_schema", "structural_tag"):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: text})
    half = LISTS[: len(LISTS) // 6 * 3] + "[]]"
    for arguments in ([LISTS], ['"', half, half]):
        calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        with pytest.raises(ValueError, match=r"messages: arguments of tool .* are more than"):
            check_messages([message])
    assert max(parsed, default=0) < 100


def test_an_error_shows_little_of_what_was_sent() -> None:
    class Large(list[int]):
        read = 0

        def __getitem__(self, at: Any) -> Any:
            raise AssertionError("an error needs no item by its index")

        def __iter__(self) -> Iterator[int]:
            for item in range(10**6):
                type(self).read += 1
                yield item

        def __repr__(self) -> str:
            raise AssertionError("this would write a million items")

        def __len__(self) -> int:
            return 10**6

    class List(Large):
        pass

    List.__name__ = "list"  # as `reprlib` finds out what it has
    error = invalid([{"loc": ("prompt",), "type": "x", "msg": "bad", "input": List()}])
    assert error.detail.startswith("prompt: bad, got [0, 1") and List.read < 10


def request_of(body: bytes) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": [], bodies.HOLD: lambda size: None}, receive)


def test_large_bodies_are_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many bytes and those of many values, with the work on them."""
    threads: list[str] = []
    parse = bodies.parse
    monkeypatch.setattr(
        bodies, "parse",
        lambda *args: (threads.append(threading.current_thread().name), parse(*args))[1],
    )  # fmt: skip
    reader = BodyReader(CompletionRequest)

    async def built(body: dict[str, Any]) -> str:
        request = request_of(json.dumps(body).encode())
        request.scope[bodies.SIDE] = partial(SideThread().run, "")
        await reader.read(request)
        return await bodies.build(request, lambda: threading.current_thread().name)

    for body, aside in (
        ({"prompt": "x"}, False),
        ({"prompt": "x" * 70_000}, True),
        ({"prompt": [1] * 5000}, True),
    ):
        name = asyncio.run(built(body))
        assert (name.startswith("bodies"), threads.pop().startswith("bodies")) == (aside, aside)


@pytest.mark.parametrize(
    ("n", "first", "more"),
    [(1, "x", 0), (16, "é", 0), (17, "x", 1), (128, "x", 7), (1, "中", 1), (1, "😀", 3)],
)
@pytest.mark.parametrize("escaped", [False, True])
def test_copies_of_a_prompt_count_like_its_body(
    n: int, first: str, more: int, escaped: bool
) -> None:
    """Answers travel in several messages with a copy each; one emoji makes each character wide."""
    more = 3 if escaped and first != "x" else more  # an escape can be any character
    together = inspect.signature(Frontend).parameters["together"].default
    assert together == bodies.TOGETHER
    text = json.dumps({"prompt": first + "x" * 100_000, "n": n}, ensure_ascii=escaped)
    body, held = text.encode(), list[int]()

    async def aside(work: Any, *args: Any) -> Any:
        return work(*args)

    async def read() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        scope = {"type": "http", bodies.SIDE: aside, bodies.HOLD: held.append}
        await bodies.BodyReader(CompletionRequest).read(Request(scope, receive))

    asyncio.run(read())
    assert sum(held) == more * len(body) + bodies.VALUE * 3 + bodies.CONTAINER


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "MARK", "max_tokens": -1}',
        b'{"prompt": "MARK"',
        b'{"prompt": "MARK", "mirostat": 2}',
        b'{"prompt": "MARK", "unheard_of": 1, "max_token": 5}',
        b'{"prompt": 5, "user": "MARK"}',
        b"MARK",
    ],
)
def test_a_refused_body_is_freed_without_a_collection(live: Live, body: bytes) -> None:
    """Cycles of errors and frames would keep it until the collector comes, minutes later."""
    mark = f"{random.random()}" * 2000
    sent = body.replace(b"MARK", mark.encode())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            answer = httpx.post(f"{live.url}/v1/completions", content=sent, timeout=100,
                                headers={"content-type": "application/json"})  # fmt: skip
            assert answer.status_code == 400, answer.text
        wait_for(lambda: held_texts(mark) == 0, "the body to be freed")
    finally:
        gc.enable()


def held_texts(mark: str) -> int:
    """Count the requests in memory whose body has the mark: containers with it, or their text."""
    found = 0
    for thing in gc.get_objects():
        values: Any = ()
        if isinstance(thing, dict):
            values = list(thing.values())
        elif isinstance(thing, BaseException):
            values = [*thing.args, getattr(thing, "doc", "")]
        found += any(
            (isinstance(value, str) and len(value) > 20_000 and mark in value)
            or (isinstance(value, bytes) and len(value) > 20_000 and mark.encode() in value)
            for value in values
        )
    return found


def test_jobs_of_one_client_wait_for_each_other() -> None:
    async def run() -> list[str]:
        side, order = SideThread(), list[str]()
        gate = threading.Event()
        first = asyncio.ensure_future(side.run("a", gate.wait))
        await asyncio.sleep(0)
        more = [asyncio.ensure_future(side.run("a", order.append, "a")) for _ in range(5)]
        await asyncio.sleep(0)
        other = asyncio.ensure_future(side.run("b", order.append, "b"))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, other, *more)
        return order

    assert asyncio.run(run()) == ["b", *"aaaaa"]


@pytest.mark.parametrize("size", [1, 70_000])
def test_a_fault_of_ours_in_a_body_is_a_500(
    size: int, live: Live, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is logged, and the client is not blamed; what a client sends stays a 400."""

    def broken(*_: object) -> None:
        raise KeyError("planted")

    url, body = f"{live.url}/v1/completions", {"prompt": "x" * size}
    assert httpx.post(url, content=b'{"prompt":').status_code == 400
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setattr(bodies, "parse", broken)
    answer = httpx.post(url, json=body, timeout=100)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "KeyError: 'planted'" in capfd.readouterr().err


def test_a_fault_of_ours_with_a_long_text_is_a_500(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is small enough to need no share, which the request no longer has."""

    def broken(*_: object) -> None:
        raise KeyError("planted" * 10_000)

    monkeypatch.setattr(api, "respond", broken)
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "planted" in answer.text and len(answer.content) < FREE


def test_a_bomb_is_refused_by_a_server(live: Live) -> None:
    for path, body in (
        ("completions", {"prompt": [{}] * 100_000}),
        ("completions", {"prompt": [[]] * 30_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}] * 30_000}]}),
        ("responses", {"input": [{}] * 30_000}),
        ("responses", {"input": "x", "allowed_token_ids": [-1] * 30_000}),
        ("responses", {"input": "x", "logit_bias": {f"a{i}": "x" for i in range(30_000)}}),
    ):
        answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=30)
        assert answer.status_code in (400, 413), answer.text
        assert len(answer.text) < 500
    assert httpx.post(f"{live.url}/v1/completions", content=b"{" * 10**6).status_code in (400, 413)
    live.assert_pages_home()


# Places


def test_one_client_cannot_take_all_places() -> None:
    limiter = ConcurrencyLimiter(1280)
    held = [limiter.acquire(128, "greedy") for _ in range(8)]
    for place in held:
        place.__enter__()
    with pytest.raises(ApiError, match="of them yours"), limiter.acquire(128, "greedy"):
        pass
    with limiter.acquire(100, "other"), limiter.acquire(10, "third"):
        assert limiter.taken == 8 * 128 + 110
    for place in held:
        place.__exit__(None, None, None)
    assert limiter.taken == 0 and not limiter.held
    with pytest.raises(ApiError) as caught, limiter.acquire(limiter.most + 1):
        pass
    assert caught.value.status_code == 400  # it would never fit


def test_shares_leave_something_for_the_next() -> None:
    shares = Shares(1000)
    for client in "abcd":
        while shares.take(client, 1):
            pass
    assert all(shares.held[client] > 0 for client in "abcd") and shares.taken < 1000
    few = Shares(10)  # too few to be shared
    assert few.take("a", 10) and not few.take("b", 1) and few.most == 10


@given(st.integers(32, 5000), st.lists(st.integers(0, 7), min_size=1, max_size=300))
def test_greedy_clients_leave_places_for_those_who_hold_little(
    limit: int, order: list[int]
) -> None:
    """In any order, of up to seven; a client alone gets most of them."""
    shares = Shares(limit)
    for number in order:
        while shares.take(str(number % 7), 1 + number):
            pass
    for number in range(7):
        while shares.take(str(number), 1):
            pass
    free = limit - shares.taken
    assert free >= 0 and (limit < 70 or shares.take("new", max(1, free // 11)))
    alone = Shares(limit)
    assert alone.take("a", alone.most) and not alone.take("a", 1) and alone.most > limit * 0.75


@pytest.mark.parametrize(("limit", "need", "clients"), [(1280, 1, 40), (2**26, 2**16, 25)])
def test_it_takes_many_clients_to_fill_all_places(limit: int, need: int, clients: int) -> None:
    """Each takes the most that it can get; only then is a newcomer refused."""
    shares = Shares(limit)
    for client in map(str, range(clients)):
        for count in (2**k for k in range(26, -1, -1)):
            while shares.take(client, count):
                pass
        assert shares.take("new", need), f"refused after {client}"
        shares.give_back("new", need)


@pytest.mark.parametrize("size", [90_000, 60_000])
def test_one_client_cannot_fill_the_memory_with_bodies(size: int) -> None:
    app = FastAPI()

    @app.post("/")
    async def read(request: Request) -> int:
        return len(await request.body())

    limit = BodyLimit(app, max_bytes=100_000)

    async def statuses() -> list[int]:
        gate = asyncio.Event()

        async def slow() -> Any:
            yield b"x" * size
            await gate.wait()
            yield b"x"

        transport = httpx.ASGITransport(limit)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [asyncio.ensure_future(client.post("/", content=slow())) for _ in range(20)]
            for _ in range(200):
                await asyncio.sleep(0)
            small = await client.post("/", content=b"x" * 1000)
            gate.set()
            return [
                small.status_code,
                *(answer.status_code for answer in await asyncio.gather(*asked)),
            ]

    small, *large = asyncio.run(statuses())
    assert small == 200 and 7 <= large.count(200) < 20 and set(large) == {200, 429}
    assert limit.shares.taken == 0


def test_a_body_counts_until_its_answer_is_complete() -> None:
    """A stream holds its body: many of them with large bodies would fill the memory."""
    inside, gate = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        inside.set()
        await gate.wait()
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 50_000, "more_body": False}

    async def send(message: Any) -> None:
        pass

    async def held() -> int:
        scope = {"type": "http", "method": "POST", "headers": []}
        answer = asyncio.ensure_future(limit(scope, receive, send))
        await inside.wait()
        taken = limit.shares.taken
        gate.set()
        await answer
        return taken

    limit = BodyLimit(app, max_bytes=100_000)
    assert asyncio.run(held()) == 50_000 - FREE and limit.shares.taken == 0


def scope_of(key: str, host: str) -> dict[str, Any]:
    """Return the scope of a request whose key, if it has one, is checked."""
    return {"type": "http", "headers": [], "client": (host, 1)} | ({KEY_NAME: key} if key else {})


OWNERS = [("alice", "10.0.0.1"), ("bob", "10.0.0.1"), ("", "10.0.0.1"), ("", "10.0.0.2")] * 2
CLIENTS = ["key alice", "key bob", "address 10.0.0.1", "address 10.0.0.2"] * 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 30_000)), max_size=40))
def test_what_a_request_holds_counts_in_the_share_of_its_client(
    actions: list[tuple[int, int | None]],
) -> None:
    """Two requests of each client hold bytes, or end (None); a named key is a client."""

    async def run() -> None:
        limit, oracle = BodyLimit(FastAPI(), 10_000), Shares(80_000)
        scopes = [scope_of("", host) for _, host in OWNERS]
        requests = [Body(limit, scope, request_of(b"").receive) for scope in scopes]
        for scope, (key, host) in zip(scopes, OWNERS, strict=True):
            scope.update(scope_of(key, host))  # the key is checked after a request has begun
        sums, over = [0] * 8, set[int]()
        for which, count in [*actions, *((n, None) for n in range(8))]:
            held, client = max(0, sums[which] - FREE), CLIENTS[which]
            if count is None and which not in over:
                requests[which].give_back()
                oracle.give_back(client, held)
                over.add(which)
            elif count is not None:
                more = max(0, sums[which] + count - FREE) - held
                fits = which not in over and (not more or oracle.take(client, more))
                with suppress(ApiError) if fits else pytest.raises(ApiError) as caught:
                    requests[which].hold(count)
                sums[which] += count if fits else 0
                if caught is not None:
                    refused = (499, "client_left") if which in over else (429, "bodies_full")
                    assert (caught.value.status_code, caught.value.code) == refused
            assert +limit.shares.held == +oracle.held and limit.shares.taken == oracle.taken
        assert limit.shares.taken == 0

    asyncio.run(run())


def test_a_thread_that_is_late_takes_nothing() -> None:
    """Its request ends while it takes: that waits, and gives back what was taken."""
    ends = list[threading.Thread]()

    class Slow(Shares):
        def take(self, client: str, count: int) -> bool:
            ends.append(threading.Thread(target=request.give_back))
            ends[0].start()
            ends[0].join(0.2)  # it cannot end before this returns
            return super().take(client, count)

    async def body(limit: BodyLimit) -> Body:
        return Body(limit, scope_of("", "10.0.0.1"), request_of(b"").receive)

    limit = BodyLimit(FastAPI(), 10_000)
    limit.shares = Slow(80_000)
    request = asyncio.run(body(limit))
    request.hold(20_000)
    ends[0].join()
    assert limit.shares.taken == 0
    with pytest.raises(ApiError, match="the client left"):
        request.hold(20_000)
    assert limit.shares.taken == 0 and len(ends) == 1


# Model folders


DEEP = "[" * 10**5 + "]" * 10**5
BROKEN: dict[str, tuple[str, str, str]] = {  # a file, a field and its value in JSON
    "vocabulary": ("config.json", "vocab_size", "1000000000000"),
    "layers": ("config.json", "num_hidden_layers", "1000000000000"),
    "experts": ("config.json", "num_experts", "1000000000000"),
    "heads": ("config.json", "num_attention_heads", "1000000000000"),
    "deep config": ("config.json", "unused", DEEP),
    "deep advice": ("generation_config.json", "unused", DEEP),
    "deep tokenizer": ("tokenizer_config.json", "unused", DEEP),
    "template": ("tokenizer_config.json", "chat_template", "5"),
    "templates": ("tokenizer_config.json", "chat_template", '[{"name": "a"}]'),
}


def folder_with(folder: Path, file: str, field: str, value: str) -> Path:
    """The embedded model with one field of one file replaced."""
    for path in resolve_model_path(None).iterdir():
        (folder / path.name).symlink_to(path)
    fields = json.loads((folder / file).read_text()) | {field: "HERE"}
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(fields).replace('"HERE"', value))
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_folder_is_one_error_that_names_the_place(name: str, tmp_path: Path) -> None:
    """Before a process starts: none hangs in a loop over a size, and none shows a traceback."""
    file, field, _ = BROKEN[name]
    config = ServerConfig(model_path=str(folder_with(tmp_path, *BROKEN[name])))
    with pytest.raises(ValueError, match=f"^({field}|{file}): ") as caught:
        settings_of(config, Operations())
    assert len(str(caught.value)) < 500


def test_a_folder_of_an_unknown_user_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "~nobody-has-this-name/model"]) == 1
    assert capsys.readouterr().err.startswith("minisgl: --model: ")


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
FAR = json.dumps([{"id": 2**22, "content": "far", **FLAGS}])


@pytest.mark.parametrize("tokens", [DEEP, "5", FAR])
def test_a_broken_tokenizer_is_a_reason_and_no_exception(tokens: str, tmp_path: Path) -> None:
    """Grammars are then rejected with it; the scheduler that waits for them lives."""
    folder = folder_with(tmp_path, "tokenizer.json", "added_tokens", tokens)
    assert "tokenizer cannot be used" in str(load_tokens(folder, 10, [0]))


@pytest.mark.parametrize("index", [DEEP, "[]", '{"weight_map": 5}'])
def test_a_broken_index_of_weights_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=INDEX):
        checkpoint_files(tmp_path)


# Connections and heads


def answer_to(live: Live, *pieces: bytes) -> bytes:
    """Return the first line of the answer to these bytes; nothing if the connection is closed."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
        try:
            for piece in pieces:
                peer.sendall(piece)
            return peer.recv(4096).split(b"\r\n")[0]
        except ConnectionError:
            return b""


def test_heads_and_trailers_are_bounded(live: Live) -> None:
    get, host = b"GET /health HTTP/1.1\r\n", b"host: localhost\r\n"
    fits = get + host + b"a: " + b"x" * (MAX_HEAD // 2) + b"\r\n\r\n"
    assert answer_to(live, fits) == b"HTTP/1.1 200 OK"
    whole = get + host + b"a: " + b"x" * MAX_HEAD + b"\r\n\r\n"
    endless = get + host + b"a: " + b"x" * 10**6
    many = get + host + b"a: b\r\n" * 40_000
    short = get + host + b"a: b\r\n" * 300 + b"\r\n"  # few bytes and much work
    chunked = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n" + host + b"\r\n"
    trailers = chunked + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 40_000
    extension = chunked + b"2;" + b"x" * 10**6
    for bad in (whole, endless, many, short, trailers, extension):
        assert answer_to(live, bad) in (b"HTTP/1.1 431 Refused", b""), bad[:40]
    body = json.dumps({"prompt": "x" * 200_000, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + host
    sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
    assert answer_to(live, sent) == b"HTTP/1.1 400 Bad Request"  # too long, and no large head
    pieces = [
        b"%x\r\n%s\r\n" % (len(body[at : at + 999]), body[at : at + 999])
        for at in range(0, len(body), 999)
    ]
    told = head + b"transfer-encoding: chunked\r\n\r\n"
    assert answer_to(live, told, *pieces, b"0\r\n\r\n") == b"HTTP/1.1 400 Bad Request"


@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked", "chunked,chunked", "Chunked"]
)
def test_no_coding_but_chunked_is_read_as_chunked(live: Live, coding: str) -> None:
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    told = f"{head}transfer-encoding: {coding}\r\n\r\n".encode()
    got = answer_to(live, told + b'10\r\n{"prompt": "hi"}\r\n0\r\n\r\n')
    if coding == "Chunked":
        assert got == b"HTTP/1.1 200 OK"
    else:
        assert got.split()[1] in (b"400", b"501"), got


def test_reads_take_turns(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one byte cost much: those of many connections are not parsed in the same turn."""
    turn, parsed, on_body = [0], Counter[int](), HttpToolsProtocol.on_body
    body, peers = b'{"prompt": "x", "max_tokens": 1}', list[socket.socket]()
    waiting, caught = list[int](), list[Any]()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 8000 + body) + b"0\r\n\r\n"

    def counted(self: HttpToolsProtocol, data: bytes) -> None:
        parsed[turn[0]] += 1
        on_body(self, data)

    def count() -> None:
        turn[0] += 1
        steps = next(iter(turns._waiting.values()), {})  # all peers are one client
        waiting.append(max(map(len, steps.values()), default=0))
        for step in steps:
            if getattr(step, "client", ("", 0))[1] in left:
                step.transport.abort()  # as a deadline does
        if peers:
            asyncio.get_running_loop().call_soon(count)

    clock = SimpleNamespace(thread_time=lambda: parsed.total() * 1e-5)  # of chunks alone
    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    monkeypatch.setattr(turns_module, "time", clock)
    with Live(checkpoint) as live:
        turns = live.http.config.http_protocol_class.turns  # type: ignore[attr-defined]
        assert (loop := live.server.frontend.loop) is not None  # noqa: RUF018
        loop.set_exception_handler(lambda _, context: caught.append(context))
        peers += [socket.create_connection(("127.0.0.1", live.port), 20) for _ in range(40)]
        left = {peer.getsockname()[1] for peer in peers[30:]}
        loop.call_soon_threadsafe(count)
        loop.call_soon_threadsafe(time.sleep, 0.3)
        for peer in peers:
            with suppress(ConnectionError):
                peer.sendall(head + chunks)
        assert all(peer.recv(100).startswith(b"HTTP/1.1 200") for peer in peers[:30])
        while peers:
            peers.pop().close()
        live.assert_pages_home()
    assert parsed.total() >= 30 * 8032 and max(parsed.values()) <= 2 * limits.READ // 6
    assert max(waiting) == 1 and not caught


def test_cookies_count_and_are_dropped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would parse them for each route; one of many quotes would take it seconds."""
    parsed = list[str]()
    monkeypatch.setattr(starlette.requests, "cookie_parser", lambda text: parsed.append(text) or {})
    get = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    for name in (b"cookie", b"Cookie", b"COOKIE"):
        line = name + b': a="' + b'\\"' * 30_000 + b'"\r\n'
        assert answer_to(live, get + line + b"\r\n") == b"HTTP/1.1 200 OK"
        assert answer_to(live, get + line * 2 + b"\r\n") in (b"HTTP/1.1 431 Refused", b"")
    assert not parsed


def test_urls_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, in many, in any spelling; behind a request, the connection is cut."""
    end, most = b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", limits.MAX_URL
    received, sizes = limits.TimeoutHttpProtocol.data_received, [most // 3, 10**6]
    long = [b"/" + b"x" * most, b"/" + b"%78" * (most // 3 + 1), b"/health?" + b"a" * most]
    long.append(b"http://localhost/" + b"x" * most)

    def cut(self: limits.TimeoutHttpProtocol, data: bytes) -> None:
        for at in range(0, len(data), sizes[0]):
            received(self, data[at : at + sizes[0]])

    monkeypatch.setattr(limits.TimeoutHttpProtocol, "data_received", cut)
    body = json.dumps({"prompt": "x", "ignore_eos": True}).encode()
    busy = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    busy += b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    while sizes:
        assert answer_to(live, b"GET /" + b"x" * (most - 1) + end) == b"HTTP/1.1 404 Not Found"
        for url in long:
            with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
                peer.sendall(b"GET " + url + end)
                head, text = b"".join(iter(lambda: peer.recv(65536), b"")).split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 414 ") and b"connection: close" in head
            assert json.loads(text)["error"]["code"] == "url_too_long"
            assert answer_to(live, busy + b"GET " + url + end) == b""
        sizes.pop(0)
        live.assert_pages_home()


@pytest.mark.parametrize("size", [80, 1448, 4097, 4344, 65_536])
def test_a_large_body_may_come_in_reads_of_any_size(live: Live, size: int) -> None:
    """Also where the parts of a read are short, or each of a slow link's packets."""
    body = json.dumps({"prompt": "x" * 600_000, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", live.port)) as peer:
        peer.settimeout(100)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), size):
            peer.sendall(body[at : at + size])
        assert peer.recv(12) == b"HTTP/1.1 400"  # too long for the window


def test_requests_sent_ahead_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are answered in order; of thousands in one packet no objects are made."""
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as peer:
        peer.sendall(get + b"\r\n" + get + b"\r\n" + get + b"connection: close\r\n\r\n")
        assert b"".join(iter(lambda: peer.recv(65536), b"")).count(b"HTTP/1.1 200 OK") == 3
    made, create = list[int](), RequestResponseCycle.__init__

    def noted(self: RequestResponseCycle, *args: Any, **fields: Any) -> None:
        made.append(1)
        create(self, *args, **fields)

    monkeypatch.setattr(RequestResponseCycle, "__init__", noted)
    address = "127.0.0.1", live.port
    with suppress(ConnectionError), socket.create_connection(address, timeout=60) as peer:
        peer.sendall((get + b"\r\n") * 5000)
        while peer.recv(65536):
            pass
    assert len(made) <= 64
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_heads_share_a_bound(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In whatever form they wait: half a line, many lines, behind an answer."""
    monkeypatch.setattr(limits, "MAX_HEADS", 400_000)
    get, host = b"GET /health HTTP/1.1\r\n", b"host: localhost\r\n"
    body = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + host
    busy = post + b"content-length: %d\r\n\r\n" % len(body) + body
    line = b"a: " + b"x" * 50_000
    with Live(checkpoint) as live:
        heads = live.http.config.http_protocol_class.heads  # type: ignore[attr-defined]
        held, take = [0], heads.take  # peers that come at the same moment may all be refused

        def noted(*args: Any) -> bool:
            taken: bool = take(*args)
            held.append(heads.taken)
            return taken

        monkeypatch.setattr(heads, "take", noted)
        for waiting, count in (
            (get + host + line, 20),
            (get + host + b"".join(b"a%d: %s\r\n" % (i, b"x" * 450) for i in range(100)), 20),
            (busy + (get + host + line[:20_000] + b"\r\n\r\n") * 3, 5),  # all fit, and stay
        ):
            peers = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(count)]
            for peer in peers:
                with suppress(ConnectionError):
                    peer.sendall(waiting)
            most = (lambda: heads.taken) if count == 5 else lambda: max(held)
            wait_for(lambda: most() > 200_000, "some heads to be held", 2)  # noqa: B023
            assert httpx.get(f"{live.url}/health").status_code == 200  # a small head needs no share
            for peer in peers:
                peer.close()
            wait_for(lambda: heads.taken == 0, "all to be given back")
            assert max(held) <= 400_000 * 8 // 9
            held[:] = [0]
            assert "Traceback" not in capfd.readouterr().err
        with httpx.Client() as client:  # a connection holds the heads of its last request alone
            for _ in range(20):
                client.get(f"{live.url}/health", headers={"a": "x" * 60_000}).raise_for_status()
        live.assert_pages_home()


def test_a_client_begins_a_few_requests_in_a_turn_of_the_loop(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred heads, or bodies, that come at the same moment leave turns to other clients."""
    turn, begun, begin = [0], Counter[int](), HttpToolsProtocol._start_asgi_task
    ended, event = Counter[int](), RequestResponseCycle.__setattr__

    def counted(*args: Any) -> None:
        begun[turn[0]] += 1
        begin(*args)

    def watched(cycle: RequestResponseCycle, name: str, value: Any) -> None:
        ended[turn[0]] += name == "more_body" and not value
        event(cycle, name, value)

    def count() -> None:
        turn[0] += 1
        if peers:
            asyncio.get_running_loop().call_soon(count)

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", counted)
    monkeypatch.setattr(RequestResponseCycle, "__setattr__", watched)
    head, body = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n", b'{"prompt": ""}'
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    with Live(checkpoint) as live:
        turns = live.http.config.http_protocol_class.turns  # type: ignore[attr-defined]
        peers = [socket.create_connection(("127.0.0.1", live.port), 20) for _ in range(100)]
        assert (loop := live.server.frontend.loop) is not None  # noqa: RUF018
        loop.call_soon_threadsafe(count)
        for data, counts in ((head, begun), (body, ended)):
            loop.call_soon_threadsafe(time.sleep, 0.3)
            for peer in peers:
                peer.sendall(data)
            wait_for(lambda: counts.total() == 100, "all to begin")  # noqa: B023
        answers = [peer.recv(100) for peer in peers]
        while peers:
            peers.pop().close()
        wait_for(lambda: not turns._waiting, "the client to be forgotten")
    assert all(answer.startswith(b"HTTP/1.1 400") for answer in answers)
    assert max(begun.values()) <= 16 and max(ended.values()) <= 16


def test_steps_are_done_in_order_and_not_for_a_client_that_left() -> None:
    async def order() -> list[tuple[str, int]]:
        done, turns, half = list[tuple[str, int]](), Turns(), turns_module.SECONDS / 2
        for number in range(6):
            turns.take("a", number, partial(done.append, ("a", number)), half)
            assert len(done) == min(number + 1, 2)
        turns.take("a", 3, partial(done.append, ("a", 30)), half)  # with the one before
        turns.take("b", 0, partial(done.append, ("b", 0)), half)
        turns.drop("a", 4)
        while turns._waiting:
            await asyncio.sleep(0)
        return done

    expected = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 3), ("a", 30), ("a", 5)]
    assert asyncio.run(order()) == expected


def test_many_clients_share_a_turn() -> None:
    """A thousand of them take no longer in one turn than one of them."""

    async def most() -> tuple[int, int]:
        begun, turns, turn = Counter[int](), Turns(), 0
        for client in range(1000):
            turns.take(str(client), 0, lambda: begun.update([turn]))
        turns.drop("999", 0)
        while turns._waiting:
            turn += 1
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not turns._begun  # nothing runs while nothing waits
        return max(begun.values()), begun.total()

    assert asyncio.run(most()) == (16, 999)


def test_a_connection_that_was_reset_is_forgotten(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it may be kept open for the next request; no timer holds what it sent."""
    timers, connection_lost = list[Any](), limits.TimeoutHttpProtocol.connection_lost

    def noted(self: Any, fault: Any) -> None:
        timers.append(self.timeout_keep_alive_task)
        connection_lost(self, fault)
        assert isinstance(fault, ConnectionError)

    monkeypatch.setattr(limits.TimeoutHttpProtocol, "connection_lost", noted)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
            peer.sendall(
                b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 9000 + b"\r\n\r\n"
            )
            while not peer.recv(4096).endswith(b"}"):
                pass
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: len(timers) == 3, "all to be reset")
    assert all(timer.cancelled() for timer in timers)


@pytest.mark.parametrize("name", [b"host", b"origin"])
def test_a_request_has_few_hosts(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is parsed, on the event loop."""
    seen = list[str]()
    monkeypatch.setattr("minisgl.server.http.access.host_name", lambda h: seen.append(h) or "")
    lines = [(b"host", b"localhost"), *[(name, b"localhost")] * 200]
    error = TrustedHosts(FastAPI(), []).foreign(Headers(raw=lines))
    assert error is not None and error.status_code == 400 and not seen


@pytest.mark.parametrize("size", [10_000, 33_000, 100_000, 1_000_000])
def test_a_connection_goes_on_after_an_early_answer(live: Live, size: int) -> None:
    """Also where the answer came before the body, which is read and dropped."""
    get = b"GET /v1/responses/none HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
        peer.sendall(get + b"x" * size)
        while not peer.recv(4096).endswith(b"}"):
            pass
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert peer.recv(4096).startswith(b"HTTP/1.1 200")


HELLO = b'{"prompt": "hi"}'
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ALIVE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def answers_to(live: Live, pieces: Iterable[bytes], count: int) -> list[bytes]:
    """Return the status lines of the answers to what is sent in pieces on one connection."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = b""
        with suppress(ConnectionError):  # the server may close before it has read everything
            for piece in pieces:
                peer.sendall(piece)
                time.sleep(0.005)
        with suppress(ConnectionError):
            while found.count(b"HTTP/1.1 ") < count and (more := peer.recv(2**16)):
                found += more
    return re.findall(rb"HTTP/1\.1 (\d+)", found)


@pytest.mark.parametrize("pieces", ["whole", "head", "bytes"])
@pytest.mark.parametrize(
    "offer",
    [
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n",
        b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\n",
    ],
)
def test_an_offer_of_another_protocol_is_ignored(live: Live, offer: bytes, pieces: str) -> None:
    """The body belongs to its request, in every framing, and the connection goes on."""
    inside = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"  # of a body: not a request
    for head, body, status in (
        (b"content-length: %d\r\n\r\n" % len(HELLO), HELLO, b"200"),
        (b"transfer-encoding: chunked\r\n\r\n", b"10\r\n" + HELLO + b"\r\n0\r\n\r\n", b"200"),
        (b"content-length: %d\r\n\r\n" % len(inside), inside, b"400"),
        (b"content-length: %d\r\n\r\n" % 9000, HELLO + b" " * 8984, b"200"),
    ):
        whole = POST + offer + head + body
        cut = len(whole) - len(body)
        parts = [whole[:cut], whole[cut:]]
        if pieces == "bytes":
            parts = [whole[at : at + 1] for at in range(min(len(whole), 300))] + [whole[300:]]
        assert answers_to(live, [whole] if pieces == "whole" else parts, 1) == [status]
        both = [whole + ALIVE] if pieces == "whole" else [*parts, ALIVE]
        assert answers_to(live, both, 2) == [status, b"200"]
    closing = POST.replace(b"localhost", b"localhost\r\nconnection: close") + offer
    closing += b"content-length: 16\r\n\r\n" + HELLO
    assert answers_to(live, [closing, ALIVE], 2) == [b"200"]


def test_this_is_no_proxy(live: Live) -> None:
    assert answers_to(live, [b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", ALIVE], 2) == [b"400"]


def test_a_length_may_begin_with_many_zeros(live: Live) -> None:
    length = b"content-length: " + b"0" * 5000 + b"16\r\n\r\n"
    assert answers_to(live, [POST + length + HELLO, ALIVE], 2) == [b"200"] * 2


def test_every_pipelined_request_learns_of_the_end_and_is_freed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else only a full collection, which stops the event loop, would free those behind it."""
    cycles = list[httptools_impl.RequestResponseCycle]()

    class Noted(httptools_impl.RequestResponseCycle):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            cycles.append(self)

    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", Noted)
    body = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True}).encode()
    busy = POST.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n"
    with Live(checkpoint, send_buffer=4096) as live:
        gc.collect()
        gc.disable()
        try:
            with socket.socket() as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.connect(("127.0.0.1", live.port))
                peer.sendall(busy % len(body) + body + ALIVE * 9)  # it reads no answer: none ends
                wait_for(lambda: len(cycles) == 10, "ten requests")
            wait_for(lambda: all(cycle.disconnected for cycle in cycles), "all to learn it")
            made = [weakref.ref(cycle) for cycle in cycles]
            cycles.clear()
            wait_for(lambda: not any(each() for each in made), "all to be freed")
        finally:
            gc.enable()
        live.assert_pages_home()


def test_other_threads_may_run_between_two_numbers() -> None:
    """A float can take 5 µs: a body of them, parsed in C, would stop the event loop for 0.5 s."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        found = load_json('[1.5, 2e9, -3, {"a": [' + ", ".join(["0.25, 7"] * 100) + "]}]")
    finally:
        sys.setprofile(None)
    assert found == [1.5, 2e9, -3, {"a": [0.25, 7] * 100}] and calls["call"] >= 200
    assert list(map(type, found[:3])) == [float, float, int]


def test_a_late_reader_gets_its_replies_in_parts() -> None:
    """In order, with the turns of others between them; at the end, nothing counts."""
    shares, turns = Shares(10_000), list[int]()
    entry = TokenLogprob("a", b"a", -1.0, 0)
    replies = [
        UserReply(uid=1, text=f"{n},", token_ids=[n], finished=n == 99, logprobs=[entry] * (n % 3))
        for n in range(100)
    ]

    async def read(stream: FairStream) -> list[UserReply]:
        found = list[UserReply]()
        while not (found and found[-1].finished):
            reply = await stream.get()
            assert isinstance(reply, UserReply) and len(reply.token_ids) <= PART
            found.append(reply)
            turns.append(stream is late)
            if stream is late and len(found) == 3:
                late.put(replies[99])
        return found

    async def main() -> None:
        for stream in (late, other):
            for reply in replies[: 99 if stream is late else 100]:
                stream.put(reply)
        for parts in await asyncio.gather(read(late), read(other)):
            assert [token for part in parts for token in part.token_ids] == [*range(100)]
            assert "".join(part.text for part in parts) == "".join(r.text for r in replies)
            assert sum(len(part.logprobs) for part in parts) == sum(n % 3 for n in range(100))

    late, other = (FairStream(name, shares, pytest.fail) for name in "ab")
    asyncio.run(main())
    assert turns[:10] == [True, False] * 5
    assert shares.taken > 0
    late.close()
    other.close()
    assert not shares.taken and not any(shares.held.values())


def test_trailers_are_dropped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes, begin = list[Any](), HttpToolsProtocol._start_asgi_task

    def noted(self: Any, cycle: Any, app: Any) -> None:
        scopes.append(cycle.scope)
        begin(self, cycle, app)

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", noted)
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    head += b"content-type: application/json\r\n\r\n"
    chunked = head + b'10\r\n{"prompt": "hi"}\r\n0\r\na: b\r\nc: d\r\n\r\n'
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
        for _ in range(2):  # the next request has headers again
            peer.sendall(chunked)
            answer = b""
            while not answer.endswith(b"}"):
                answer += peer.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
    names = [[name for name, _ in scope["headers"]] for scope in scopes]
    assert names == [[b"host", b"transfer-encoding", b"content-type"]] * 2


def test_connections_are_places(checkpoint: Path) -> None:
    with Live(checkpoint, connections=36) as live:
        peers = [socket.create_connection(("127.0.0.1", live.port), timeout=20) for _ in range(33)]
        assert peers[32].recv(100).startswith(b"HTTP/1.1 503")
        peers[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert peers[0].recv(100).startswith(b"HTTP/1.1 200")
        for peer in peers:
            peer.close()
        assert httpx.get(f"{live.url}/health").status_code == 200


# Keys and pages


def test_keys_that_can_never_match_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no message shows one."""
    assert check_key("sk-clé", "x") == "sk-clé"
    monkeypatch.setenv("MINISGL_API_KEY", "from-there")
    assert check_key("voil\u00e9", "x") == "voil\u00e9"
    for key in ("", "sk-secret\n", "sk secret", "sk-secret\t", "sk-secretà", "Å-secret-Å"):
        assert main(["--api-key", key, "--port", "0"]) == 1
        said = capsys.readouterr().err
        assert "--api-key" in said and "secret" not in said and said.count("\n") == 1
    file = tmp_path / "keys"
    file.write_text("# ours\nalice  sk-1\n\nbob sk-2\n")
    assert read_keys(file) == {"alice": "sk-1", "bob": "sk-2"}
    for text in (
        "",
        "alice",
        "alice sk-1\nalice sk-2",
        "alice sk-1\nbob sk-1",
        "a/b sk-1",
        "a b c",
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match="api_key_file: ") as caught:
            read_keys(file)
        assert "sk-" not in str(caught.value)
    with pytest.raises(ValueError, match="api_key_file: cannot use"):
        read_keys(tmp_path / "none")


def test_every_key_opens_and_has_a_name() -> None:
    access = Access({"": "one", "alice": "two"})

    async def name(value: str) -> str:
        headers = [(b"authorization", value.encode("latin-1"))]
        request = Request({"type": "http", "headers": headers})
        await access.check(request)
        return str(request.scope["minisgl.key"])

    assert asyncio.run(name("Bearer one")) == "" and asyncio.run(name("Bearer two")) == "alice"
    for wrong in ("Bearer three", "two", "Bearer alice", "Bearer "):
        with pytest.raises(ApiError):
            asyncio.run(name(wrong))


def test_keys_have_prefixes_and_numbers_of_their_own(checkpoint: Path) -> None:
    """No prefix is shared between keys; logs and metrics show their names, never a key."""
    lines: list[str] = []
    keys = {"alice": "sk-one", "bob": "sk-two"}
    api = {"named_keys": keys, "isolate_prefixes": True}
    with Live(checkpoint, api=api, observers=(RequestLog(lines.append),)) as live:

        def cached(name: str, **fields: Any) -> int:
            body = {"prompt": "What is 12 + 3? " * 4, "max_tokens": 1, **fields}
            headers = {"authorization": f"Bearer {keys.get(name)}"}
            url = f"{live.url}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=100)
            usage = answer.json().get("usage", {"prompt_tokens_details": {"cached_tokens": 0}})
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        asked = [("alice", {}), ("bob", {}), ("alice", {}), ("bob", {"cache_salt": "key alice"})]
        assert [cached(name, **more) > 0 for name, more in asked] == [False, False, True, False]
        cached("nobody")
        metrics = httpx.get(f"{live.url}/metrics").text
    for name, count in (("alice", 2), ("bob", 2)):
        assert f'keyed_requests_total{{code="200",key="{name}"}} {count}.0' in metrics
        assert sum(f"key={name} " in line for line in lines) == count
    assert len(lines) == 5 and "key=" not in lines[4] and "sk-" not in metrics + "".join(lines)


def test_a_network_is_one_client() -> None:
    """One customer has 2**80 addresses of IPv6: they share a share."""
    for same in (("2001:db8::1", "2001:db8:0:ffff::1"), ("::ffff:10.0.0.1", "10.0.0.1")):
        assert len(set(map(network_of, same))) == 1
    other = ("2001:db8::1", "2001:db8:1::1", "10.0.0.1", "10.0.0.2", "testclient", "")
    assert len(set(map(network_of, other))) == len(other)


def test_hosts_of_one_network_share_places_and_no_prefixes() -> None:
    settings = ApiSettings("m", 10, isolate_prefixes=True)
    service = api.Service(Frontend([], LocalQueue()), settings, ConcurrencyLimiter())

    def handler(host: str) -> api.RequestHandler:
        request = Request({"type": "http", "headers": [], "client": (host, 1)})
        body = CompletionRequest(prompt="x")
        return api.RequestHandler(service, request, body, [{"text": "x"}], CompletionFormatter())

    one, same, other = map(handler, ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"))
    assert one.client == same.client == other.client == "address 2001:db8::/48"
    salts = [each.tasks[0].params.cache_salt for each in (one, same, other)]
    assert salts[0] == salts[1] != salts[2]


def test_trials_of_grammars_are_cached_by_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that is accepted at once would show that somebody else uses it."""
    asked = [SamplingParams(regex="a", cache_salt=salt) for salt in ("x", "x", "y", None)]
    tokenizer, jobs = SideTokenizer(resolve_model_path(None)), list[Any]()
    monkeypatch.setattr(tokenizer.side, "call", lambda *job: jobs.append(job) or ("", 0.0))
    for params in asked:
        tokenizer.encode_params(params)
    assert jobs == [("compile", "regex", "a")] * 3


def test_the_host_of_an_absolute_target_counts(checkpoint: Path) -> None:
    """It goes before the header: a proxy may have sent the request by it."""
    with Live(checkpoint, api={"origins": ["mine.example"]}) as live:
        for host, status in ((b"mine.example", b"200 OK"), (b"evil.example", b"403 Forbidden")):
            target = b"GET http://" + host + b"/health HTTP/1.1\r\nhost: localhost\r\n\r\n"
            assert answer_to(live, target) == b"HTTP/1.1 " + status


def test_pages_of_other_sites_are_refused() -> None:
    app = FastAPI()

    @app.get("/")
    async def read() -> int:
        return 1

    async def status(**headers: str) -> int:
        transport = httpx.ASGITransport(TrustedHosts(app, {"mine.example"}))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/", headers=headers)).status_code

    for headers, passes in (
        ({"host": "localhost:1919"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:1919"}, True),
        ({"host": "192.168.0.7:1919"}, True),  # no name, so no name server gave it
        ({"host": "mine.example:1919"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "["}, False),
        ({"host": "localhost", "origin": "http://localhost:3000"}, True),
        ({"host": "localhost", "origin": "https://mine.example"}, True),
        ({"host": "localhost", "origin": "https://evil.example"}, False),
        ({"host": "localhost", "origin": "http://192.168.0.9"}, False),
        ({"host": "localhost", "origin": "null"}, False),
    ):
        assert asyncio.run(status(**headers)) == (200 if passes else 403), headers


@pytest.mark.parametrize("name", [b"host", b"origin"])
def test_a_second_host_is_checked_as_well(name: bytes) -> None:
    """A proxy in front may have looked at the other one."""
    names, page = TrustedHosts(FastAPI(), {"mine.example"}), b"http://" * (name == b"origin")
    for hosts, passes in (
        ((b"localhost", b"mine.example"), True),
        ((b"localhost", b"evil.example"), False),
        ((b"evil.example", b"localhost"), False),
    ):
        refusal = names.foreign(Headers(raw=[(name, page + host) for host in hosts]))
        assert (refusal is None) == passes


def test_no_proxy_sees_what_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        for name in ("http_proxy", "all_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)

        async def ask(url: str) -> None:
            async with ApiClient(url, "sk-secret", timeout=5.0) as client:
                await client.models()

        for host in ("127.0.0.1", "localhost", "[::1]"):
            with pytest.raises(ServerError):
                asyncio.run(ask(f"http://{host}:9"))
        assert seen == []
        asyncio.run(ask("http://other.example"))
        assert len(seen) == 1
        proxy.shutdown()


def test_a_trailing_slash_leads_nowhere(live: Live) -> None:
    """It once was a redirect to the `Host` header, before the key was checked."""
    answer = httpx.get(f"{live.url}/v1/models/x/", headers={"host": "evil.example"})
    assert answer.status_code == 404 and "location" not in answer.headers
    answer = httpx.post(f"{live.url}/v1/completions/", json={})
    assert answer.status_code == 404


# What answers share


def test_what_answers_share_travels_once() -> None:
    """Prompt and parameters of 128 answers, also if only their seeds differ."""
    params = SamplingParams(seed=0, allowed_token_ids=list(range(5000)), bad_words=("a", (1, 2)))
    prompt, text = [5] * 5000, "x" * 5000
    many = [with_seed(params, seed) for seed in range(128)]
    users: list[Any] = [UserMsg(i, prompt, many[i]) for i in range(128)]
    texts = [TokenizeMsg(uid=i, text=text, sampling_params=many[i]) for i in range(128)]
    for sent in (users, texts):
        frame = encode(sent)
        assert len(frame) < 2 * len(encode(sent[:1]))
        found = decode(frame)
        assert found == sent and sent[3].sampling_params is many[3]
        first, last = found[0].sampling_params, found[-1].sampling_params
        assert last.allowed_token_ids is first.allowed_token_ids and type(first) is SamplingParams
    stop = tuple(f"{number}" + "x" * 1000 for number in range(64))
    replies: list[Any] = [TokenReply(uid=i, token=i, stop=stop) for i in range(128)]
    frame = encode([replies[0], AbortMsg(1), *replies[1:]])
    assert len(frame) < 2 * len(encode(replies[:1]))
    first, abort, *others = decode(frame)
    assert [first, *others] == replies and abort == AbortMsg(1) and others[7].stop is first.stop


def test_parameters_are_checked_where_they_come_in() -> None:
    """A frame is checked for its types alone; a wrong type is still an error."""
    codec = Codec(Msg)
    with pytest.MonkeyPatch.context() as patch:
        frame = codec.encode([UserMsg(1, [1], SamplingParams(top_p=0.5)), AbortMsg(1)])
        patch.setattr(SamplingParams, "__post_init__", lambda self: 1 / 0)
        assert [type(msg) for msg in codec.decode(frame)] == [UserMsg, AbortMsg]
    with pytest.raises(ValueError, match="Expected"):
        codec.decode(frame.replace(b"top_p", b"top_k"))


PARAMS = SamplingParams(seed=3, stop=("a",), bad_words=("b", (1, 2)))
FRAME = encode([
    UserMsg(1, [1, 2, 3], PARAMS), UserMsg(2, [1, 2], with_seed(PARAMS, 4), "b"), AbortMsg(1),
    TokenizeMsg(uid=3, text="ä", sampling_params=PARAMS, template_kwargs={"a": 1}),
    TokenReply(uid=4, token=5, stop=("a",), top_logprobs=[(1, -0.5)]),
])  # fmt: skip


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_corrupt_frame_is_one_kind_of_error(data: st.DataObject) -> None:
    frame = bytearray(FRAME)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        length = data.draw(st.integers(0, 2))
        frame[at : at + length] = data.draw(st.binary(max_size=2))
    with suppress(msgspec.DecodeError):
        decode(bytes(frame))


def test_a_frame_that_nests_too_deep_is_refused() -> None:
    tables, messages, *rest = msgspec.msgpack.decode(FRAME)
    nested = msgspec.msgpack.encode("NEST"), b"\x91" * 10**5 + b"\x90"
    frame = msgspec.msgpack.encode((tables | {"template_kwargs": [{"a": "NEST"}]}, messages, *rest))
    with pytest.raises(msgspec.DecodeError, match="frame: must be text and flat"):
        decode(frame.replace(*nested))


@pytest.mark.parametrize(
    "refs, params, error",
    [
        ([[0, "input_ids", 2]], [], "input_ids: must be below 2, got 2"),
        ([[0, "input_ids", -1]], [], "input_ids: must be below 2, got -1"),
        ([[9, "input_ids", 0]], [], "message: must be below 5, got 9"),
        ([[2, "input_ids", 0]], [], "name: must be a shared field, got 'input_ids'"),
        ([[0, "__class__", 0]], [], "name: must be a shared field, got '__class__'"),
        ([], [[0, 1, None]], "sampling_params: must be below 1, got 1"),
        ([], [[2, 0, None]], "message: must have parameters, got 2"),
    ],
)
def test_a_reference_to_nothing_is_refused(refs: Any, params: Any, error: str) -> None:
    tables, messages, *_ = msgspec.msgpack.decode(FRAME)
    frame = msgspec.msgpack.encode((tables, messages, refs, params))
    with pytest.raises(msgspec.ValidationError, match=error):
        decode(frame)


def test_what_requests_share_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, checked = Limits(100, 100, 50), list[str]()
    for name in ("check_prompt", "check_params"):
        real = getattr(requests, name)

        def count(*args: Any, real: Any = real, name: str = name) -> Any:
            checked.append(name)
            return real(*args)

        monkeypatch.setattr(requests, name, count)
    prompt, params = [1, 2, 3], SamplingParams(seed=1, allowed_token_ids=[1, 2])
    reqs = [make_req(UserMsg(i, prompt, with_seed(params, i)), limits) for i in range(10)]
    assert checked == ["check_prompt", "check_params"]
    assert [req.sampling_params.seed for req in reqs] == list(range(10))
    assert len({id(req.logits_params) for req in reqs}) == 10  # each may get a mask of its own
    other = make_req(UserMsg(11, [4], SamplingParams(allowed_token_ids=[3])), limits)
    assert other.input_ids.tolist() == [4] and len(checked) == 4
    assert (other.logits_params.mask != reqs[0].logits_params.mask).any()


def test_an_inbox_gives_a_bounded_number_at_once() -> None:
    inbox = LocalQueue()
    inbox.put(*(AbortMsg(uid) for uid in range(3 * MOST_MESSAGES)))
    got = [inbox.get_all(0.0) for _ in range(4)]
    assert [len(messages) for messages in got] == [MOST_MESSAGES] * 3 + [0]
    assert [msg.uid for messages in got for msg in messages] == list(range(3 * MOST_MESSAGES))


def test_repeated_ids_are_dropped() -> None:
    body = CompletionRequest(prompt="x", allowed_token_ids=[5, 3] * 1000)
    assert body.sampling_params({}).allowed_token_ids == (5, 3)


def test_clients_take_turns_at_the_text_worker() -> None:
    """Fifty prompts of one client do not come before the one of another."""
    queue, params = PromptQueue(), SamplingParams()
    for uid in range(50):
        queue.add(TokenizeMsg(uid=uid, text=f"{uid:100}", client="a", sampling_params=params))
    assert queue.pop()
    queue.add(TokenizeMsg(uid=99, text="x" * 1000, client="b", sampling_params=params))
    order = [msg.uid for _ in range(50) for msg in queue.pop()]
    assert order.index(99) <= 1 and len(order) == 50
    assert queue.pop() == []


# Answers


def test_large_answers_are_formatted_beside_the_event_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many choices, and those of many log probabilities."""
    threads: list[str] = []
    choice = CompletionFormatter.choice

    def noted(self: CompletionFormatter, index: int, answer: Completion) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return choice(self, index, answer)

    monkeypatch.setattr(CompletionFormatter, "choice", noted)
    for fields, aside in (
        ({"n": 2}, False),
        ({"n": 65}, True),
        ({"n": 30, "logprobs": 20, "max_tokens": 10}, True),
    ):
        body = {"prompt": "x", "max_tokens": 1, "ignore_eos": True, **fields}
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=300)
        assert len(answer.json()["choices"]) == fields["n"] == len(threads), answer.text[:500]
        assert all(name.startswith("bodies") == aside for name in threads)
        threads.clear()


def entries_of(rng: random.Random, count: int) -> list[TokenLogprob]:
    """Log probabilities of `count` tokens, with line ends and half characters among them."""
    words = [("a", b"a"), ("\u2028", "\u2028".encode()), ("\ufffd", b"\xf0"), ('"', b'"')]
    return [
        TokenLogprob(
            *rng.choice(words), rng.choice([-0.5, None, float("-inf")]), at,
            [(*rng.choice(words), -rng.random()) for _ in range(3)],
        )
        for at in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("formatter", [CompletionFormatter(True), ChatFormatter(True)])
def test_packed_log_probabilities_are_the_same(formatter: CompletionFormatter) -> None:
    """An answer that is packed piece by piece, and one that is formatted at its end."""
    rng = random.Random(5)
    for pieces in ([], [0], [1, 0, 7], [3, 2]):
        packed, plain = formatter.answer(), formatter.answer()
        for count in pieces:
            entries = entries_of(rng, count)
            packed.logprobs += entries
            plain.logprobs += entries
            packed.pack(formatter.logprobs)
            assert not packed.logprobs
        assert formats.encoded(formatter.choice(0, packed)) == formats.encoded(
            formatter.choice(0, plain)
        )


def test_whole_answers_share_the_log_probabilities_that_wait(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many are a 400; a stream holds none; all come back, however the answer ends."""
    held = Shares(500)
    monkeypatch.setattr(api, "Service", partial(api.Service, held=held))
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    with Live(checkpoint) as live:
        url = f"{live.url}/v1"
        for path, fields, status in (
            ("completions", {"n": 4, "logprobs": 20}, 200),
            ("completions", {"n": 9, "logprobs": 20}, 400),
            ("completions", {"n": 9, "logprobs": 20, "stream": True}, 200),
            ("chat/completions", {"n": 9, "logprobs": True, "top_logprobs": 20}, 400),
            ("responses", {"input": "x", "max_output_tokens": 40, "top_logprobs": 20}, 400),
        ):
            asked = {"messages": [{"role": "user", "content": "x"}], **body, **fields}
            for name in {"completions": ["messages"], "chat/completions": ["prompt"]}.get(
                path, ["messages", "prompt", "max_tokens"]
            ):
                del asked[name]
            answer = httpx.post(f"{url}/{path}", json=asked, timeout=300)
            assert answer.status_code == status, answer.text[:500]
            if status == 400:
                assert answer.json()["error"]["code"] == "logprobs_full"
            wait_for(lambda: held.taken == 0, "the log probabilities to be given back")
        with held_by(held, "address other", 400):
            answer = httpx.post(f"{url}/completions", json={**body, "logprobs": 20}, timeout=300)
            assert answer.status_code == 429, answer.text
        live.assert_pages_home()


@contextmanager
def held_by(shares: Shares, client: str, count: int) -> Iterator[None]:
    assert shares.take(client, count)
    yield
    shares.give_back(client, count)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["put", "read", "leave"])), max_size=90)
)
def test_unread_streams_share_a_bound(actions: list[tuple[int, str]]) -> None:
    """All hold at most the limit, the sent reply included, and a client that reads is not cut."""
    most, tokens = 600, [TokenLogprob("a", b"a", -1.0, 0, [("b", b"b", -2.0)] * 9)]

    async def run() -> None:
        outbox = LocalQueue()
        frontend = FairFrontend([outbox], LocalQueue(), most=most)
        owners = ["idle"] * 7 + ["reader"]
        streams = [frontend.generate(SamplingParams(), text="x", client=one) for one in owners]
        reads = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        left = set[int]()
        for uid, action in [*actions, *((n % 7, "put") for n in range(99)), (7, "put")]:
            if action == "put" and uid not in left:
                reply = UserReply(uid=uid, text="a", token_ids=[1], logprobs=tokens)
                frontend._dispatch([reply])
                await asyncio.sleep(0)
            elif action == "leave" and uid != 7 and reads[uid].done() and uid not in left:
                left.add(uid)
                await streams[uid].aclose()
            if reads[uid].done() and uid not in left and (action == "read" or uid == 7):
                with suppress(RequestFailed, StopAsyncIteration):
                    await reads[uid]
                reads[uid] = asyncio.ensure_future(anext(streams[uid]))
                await asyncio.sleep(0)
            waiting = sum(len(s.waiting) for s in frontend._streams.values())
            assert 12 * waiting <= frontend.unread.taken <= most
        assert frontend._streams[7].error is None  # it was read
        cut = {uid for uid, stream in frontend._streams.items() if stream.error is not None}
        aborted = {msg.uid for msg in outbox.get_all(0.0) if isinstance(msg, AbortMsg)}
        assert cut <= aborted and (cut or len(left) == 7)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        assert frontend.unread.taken == 0 and not frontend.unread.held

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [300]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_conversion_ends_when_its_client_leaves(
    path: str, body: dict[str, Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its body would stay in memory until the text worker has read all others."""
    begun, left = threading.Event(), threading.Event()

    async def wait(*_: Any, **prompt: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            left.set()

    monkeypatch.setattr(Frontend, "convert", wait)
    data = json.dumps({"model": "default", **body}).encode()
    with Live(checkpoint) as live:
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as peer:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            peer.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            assert begun.wait(60) and not left.is_set()
        assert left.wait(60)
        wait_for(lambda: not live.limiter.taken, "its place to be given back")


def test_names_of_tokens_travel_only_if_they_are_wanted() -> None:
    """They take more memory than the text; so does the text of ids without end."""
    tokenizer = Tokenizer(resolve_model_path(None))
    ids = tokenizer.encode("a b").tolist()
    few = convert(tokenizer, ConvertMsg(uid=1, text="a b"), 9)
    assert few == Converted(uid=1, text="", token_ids=ids)
    all_of_it = convert(tokenizer, ConvertMsg(uid=1, text="a b", pieces=True), 9)
    assert all_of_it.pieces == [tokenizer.backend.id_to_token(token) for token in ids]
    back = convert(tokenizer, ConvertMsg(uid=1, input_ids=ids * 3), 3 * len(ids))
    assert back == Converted(uid=1, text="a ba ba b", token_ids=[])
    with pytest.raises(ValueError, match=f"at most 5 valid ids, got 6 up to {max(ids)}"):
        convert(tokenizer, ConvertMsg(uid=1, input_ids=[max(ids)] * 6), 5)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_converted_texts_count_until_they_are_sent(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may be ten times as large as its request, and its client need not read it."""
    held, hold = list[int](), Body.hold

    def noted(self: Body, count: int) -> None:
        held.append(count)
        hold(self, count)

    monkeypatch.setattr(Body, "hold", noted)
    given = {"prompt": "a b " * 3000} if path == "/tokenize" else {"tokens": [300] * 8000}
    answer = httpx.post(live.url + path, json=given, timeout=60)
    assert answer.status_code == 200 and len(answer.content) in held


def test_the_size_of_a_chat_costs_little() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "ab"}] * 16_000}] * 2
    start = time.process_time()
    assert 600_000 < text_size(chat) < 10**6
    assert text_size("\ud800") == text_size({"a": 10**30}) > 10**9
    assert time.process_time() - start < 0.05  # a walk in Python takes 0.2 s


def test_a_reply_counts_until_it_is_sent() -> None:
    """A reply that its reader has taken waits in a buffer of the connection and takes memory."""

    async def run() -> list[int]:
        frontend = FairFrontend([LocalQueue()], LocalQueue())
        stream, counts = frontend.generate(SamplingParams(), text="x", client="a"), list[int]()
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for _ in range(2):
            frontend._dispatch([UserReply(uid=0, text="a", token_ids=[1])] * 5)
            await read
            counts.append(frontend.unread.taken)
            read = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        return [*counts, frontend.unread.taken]

    assert asyncio.run(run()) == [10, 10, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["open", "finish", "leave", "late", "read abort"]), max_size=40))
def test_who_opens_and_leaves_keeps_places_until_the_scheduler_has_read_that(
    actions: list[str],
) -> None:
    """Else prompts that nobody waits for any more would fill its inbox without a bound."""

    async def run() -> None:
        outbox = LocalQueue()
        frontend = FairFrontend([outbox], LocalQueue(), places=6)
        streams, unread, places, opened = list[Any](), list[int](), 0, 0
        for action in actions:
            if action == "open":
                opened += 1
                stream = frontend.generate(SamplingParams(), text="x", client="a")
                read = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                if places == 6:
                    with pytest.raises(RequestFailed, match="queue is full"):
                        await read
                else:
                    streams.append((opened - 1, stream, read))
                    places += 1
            elif action == "finish" and streams:
                uid, stream, read = streams.pop()
                frontend._dispatch([UserReply(uid=uid, text="x", token_ids=[1], finished=True)])
                assert (await read).finished
                with suppress(StopAsyncIteration):
                    await anext(stream)
                places -= 1
            elif action in ("leave", "late") and streams:
                uid, stream, read = streams.pop()
                if action == "late":  # its deadline; its reader takes the error afterwards
                    frontend._cut(ErrorReply(uid=uid, message="late", code="deadline_exceeded"))
                    with pytest.raises(RequestFailed, match="late"):
                        await read
                else:
                    read.cancel()
                    await asyncio.gather(read, return_exceptions=True)
                await stream.aclose()
                unread.append(uid)
            elif action == "read abort" and unread:
                frontend._dispatch([aborted(unread.pop(0))] * 2)
                places -= 1
            assert frontend.places.taken == places
        for _, stream, read in streams:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
            await stream.aclose()
        frontend._dispatch([aborted(uid) for uid in [*unread, *(uid for uid, *_ in streams)]])
        assert not (frontend.places.taken or frontend._placed or frontend._aborted)

    asyncio.run(run())


def test_a_failed_server_gives_places_back() -> None:
    async def run() -> None:
        frontend = FairFrontend([LocalQueue()], LocalQueue(), places=6)
        frontend.fail_all("over")
        with pytest.raises(RequestFailed, match="over"):
            await anext(frontend.generate(SamplingParams(), text="x"))
        assert frontend.places.taken == 0

    asyncio.run(run())


def test_an_abort_that_was_read_gets_a_receipt() -> None:
    """From the scheduler's end of the queue, or from the text worker that dropped the prompt."""
    outbox, inbox = LocalQueue(), LocalQueue()
    channel = SchedulerChannel(inbox, outbox)
    inbox.put(UserMsg(1, [1], SamplingParams()), AbortMsg(1), AbortMsg(9))
    assert [type(msg) for msg in channel.recv(False)] == [UserMsg, AbortMsg, AbortMsg]
    assert outbox.get_all(0.0) == [aborted(1), aborted(9)]
    to_scheduler, to_frontend, source = LocalQueue(), LocalQueue(), LocalQueue()
    worker = TextWorker(None, to_scheduler, to_frontend)  # type: ignore[arg-type]
    prompts = PromptQueue()
    prompts.add(TokenizeMsg(uid=1, sampling_params=SamplingParams(), text="x"))
    source.put(AbortMsg(1), AbortMsg(2), ExitMsg())
    run_text_worker(worker, source, prompts=prompts)
    assert to_frontend.get_all(0.0) == [aborted(1)] and to_scheduler.get_all(0.0) == [AbortMsg(2)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_whole_answer_is_sent_in_slices(leaves: bool) -> None:
    """So that a slow reader keeps one in a buffer; what the answer holds comes back at its end."""
    answer, sent, ended = formats.Json({"text": "x" * 300_000}), list[Any](), list[int]()
    answer.sent = lambda: ended.append(len(sent))

    async def send(message: Any) -> None:
        if leaves and sent:
            raise OSError
        sent.append(message)

    with suppress(OSError):
        asyncio.run(answer({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert ended == [len(sent)]
    if not leaves:
        pieces = [message["body"] for message in sent[1:]]
        assert max(map(len, pieces)) <= 2**16 and b"".join(pieces) == answer.body
        assert [message["more_body"] for message in sent[1:]] == [True] * (len(pieces) - 1) + [
            False
        ]


def test_a_refused_answer_sends_nothing_and_a_small_one_needs_no_share() -> None:
    sent, ended, large = list[Any](), list[int](), formats.Json({"text": "x" * FREE})
    large.sent = lambda: ended.append(len(sent))

    def refuse(count: int) -> None:
        raise ApiError(429, "full", code="bodies_full")

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", limits.HOLD: refuse}
    with pytest.raises(ApiError, match="full"):
        asyncio.run(large(scope, request_of(b"").receive, send))
    assert not sent and ended == [0]
    asyncio.run(formats.Json({"text": "x" * (FREE - 20)})(scope, request_of(b"").receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_large_answers_that_wait_for_their_reader_share_a_bound(checkpoint: Path) -> None:
    """Those of one client; the error that says so always fits."""
    operations = Operations(log_format="none", max_body_size=40_000)
    body = {"prompt": "x", "logprobs": 20, "max_tokens": 100, "n": 6, "ignore_eos": True, "seed": 1}
    with Live(checkpoint, operations=operations, send_buffer=4096) as live, ExitStack() as stack:
        http, other = (stack.enter_context(client_at(live, f"127.0.0.{n}")) for n in (1, 2))
        size = len(http.post("/completions", json=body).content)
        assert live.bodies.most / 2 < size < live.bodies.most
        wait_for(lambda: live.bodies.taken == 0, "that answer to be given back", 2)
        with slow_reader(live, "POST", "/v1/completions", body):
            wait_for(lambda: live.bodies.taken > size // 2, "the answer to wait", 2)
            refused = http.post("/completions", json=body)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "bodies_full"
            assert http.post("/completions", content=b"{").status_code == 400
            assert http.post("/completions", json={**body, "logprobs": 0}).status_code == 200
            assert http.get("/nowhere").status_code == 404
            assert len(other.post("/completions", json={**body, "max_tokens": 30}).content) > FREE
            wait_for(lambda: size // 2 < live.bodies.taken < size, "what the others took", 2)
        wait_for(lambda: live.bodies.taken == 0, "the reader to leave", 2)
        assert http.post("/completions", json=body).status_code == 200
        live.assert_pages_home()


async def run_stream(events: Any, scope: dict[str, Any], receive: Any, send: Any) -> None:
    await (await api.stream_response(events))({"type": "http", **scope}, receive, send)


def test_a_stream_writes_slices_and_keeps_no_event_that_is_sent() -> None:
    """Its first event counts, once; the next one is made when nothing holds the one before."""
    held, kept, sent = list[int](), list[int](), list[int]()
    sizes = [FREE + 1, 3 * SLICE + 1, 2 * SLICE, 1]

    async def events() -> Any:
        for size in sizes:
            event = bytes(size)
            before = sys.getrefcount(event)
            yield event
            if size > SLICE:  # a smaller one is the last slice itself
                kept.append(sys.getrefcount(event) - before)

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))

    scope = {limits.HOLD: held.append}
    asyncio.run(run_stream(events(), scope, asyncio.Event().wait, send))
    assert held == sizes[:1] and kept == [0, 0]
    assert max(sent) == SLICE and sum(sent) == sum(sizes)


@pytest.mark.parametrize("at", [1, 3])  # the first event and the second one
def test_a_stream_whose_client_leaves_frees_its_event_at_once(at: int) -> None:
    pairs = [bytes(2 * SLICE), bytes(2 * SLICE + 1)]
    before = [sys.getrefcount(pair) for pair in pairs]
    ended = list[str]()

    async def leave() -> None:
        bodies_sent, left = 0, asyncio.Event()

        async def events() -> Any:
            try:
                for place in range(2):
                    yield pairs[place]
            finally:
                ended.append("closed")

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal bodies_sent
            bodies_sent += "body" in message
            if bodies_sent == at:
                left.set()
                await asyncio.Event().wait()  # a client that reads nothing

        await run_stream(events(), {}, receive, send)
        assert [sys.getrefcount(pair) for pair in pairs] == before

    gc.disable()
    try:
        asyncio.run(leave())
    finally:
        gc.enable()
    assert ended == ["closed"]


def test_a_refused_stream_sends_nothing_and_ends_its_work() -> None:
    ended, sent = list[str](), list[Any]()

    async def events() -> Any:
        try:
            yield bytes(FREE + 1)
        finally:
            ended.append("closed")

    def refuse(count: int) -> None:
        raise ApiError(429, "full", code="bodies_full")

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ApiError, match="full"):
        asyncio.run(run_stream(events(), {limits.HOLD: refuse}, asyncio.Event().wait, send))
    assert ended == ["closed"] and not sent


def test_streams_that_repeat_their_requests_share_a_bound(checkpoint: Path) -> None:
    """A character of two bytes is six in an event; each of three events has the whole request."""
    text, kind = "\x85" * 10_000, {"content-type": "application/json"}
    forms = {"description": text}, {"name": text}, {"schema": {"title": text}}
    fields = {"input": "x", "max_output_tokens": 1, "stream": True}
    bodies = [
        json.dumps({**fields, "text": {"format": form}}, ensure_ascii=False).encode()
        for form in forms
    ]
    operations = Operations(log_format="none", max_body_size=40_000)
    with Live(checkpoint, operations=operations, send_buffer=4096) as live, ExitStack() as stack:
        http, other = (stack.enter_context(client_at(live, f"127.0.0.{n}")) for n in (1, 2))
        for body in bodies:
            once = http.post("/responses", content=body, headers=kind)
            assert once.status_code == 200 and once.text.count("\\u0085" * 10_000) >= 3
        wait_for(lambda: live.bodies.taken == 0, "those streams to be given back", 2)
        for least, body in zip((70_000, 140_000, 210_000), bodies):
            stack.enter_context(slow_reader(live, "POST", "/v1/responses", body))
            wait_for(lambda least=least: live.bodies.taken > least, "a stream to wait", 2)
        refused = http.post("/responses", content=bodies[0], headers=kind)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "bodies_full"
        assert other.post("/completions", json={"prompt": "x", "stream": True}).status_code == 200
        stack.close()
        wait_for(lambda: live.bodies.taken == 0, "the readers to leave", 2)
        live.assert_pages_home()


def test_an_echo_of_many_prompts_is_refused_before_any_work(live: Live) -> None:
    prompts = ["once upon a time " * 20] * 1024
    body = {"prompt": prompts, "logprobs": 20, "echo": True, "max_tokens": 1}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"
    for fine in ({"echo": False}, {"prompt": ["ab"] * 20}):
        small = {**body, "prompt": prompts[:2], "logprobs": 1, **fine}
        assert httpx.post(f"{live.url}/v1/completions", json=small).status_code != 500
        CompletionRequest(**small).prepare(ChatAbilities())
    with pytest.raises(ApiError, match="echo: "):  # each answer computes the scores anew
        CompletionRequest(prompt="x" * 20_000, echo=True, n=14).prepare(ChatAbilities())


def test_a_conversion_is_bounded_like_a_prompt(live: Live) -> None:
    """Tokens of a long text take a hundred times its memory, so no more of it is encoded."""
    text = "a b " * 10**6
    for path, body in (
        ("tokenize", {"prompt": text}),
        ("tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = httpx.post(f"{live.url}/{path}", json={"model": "default", **body}, timeout=300)
        assert answer.status_code == 400 and "too many" in answer.text, answer.text[:300]
    some = httpx.post(f"{live.url}/tokenize", json={"prompt": "a b " * 2000}, timeout=300).json()
    assert some["count"] > some["max_model_len"]  # a text for several prompts can be counted


# Logs


def test_a_log_that_nobody_reads_takes_little_memory(live: Live) -> None:
    """Lines that wait are bounded in characters, and a long path is cut; so is the answer."""
    reader, descriptor = os.pipe()
    write = LineWriter(descriptor)
    for _ in range(100):
        write("x" * 10**6)
    assert 10**7 < write._given <= MAX_WAITING
    os.close(reader)  # the thread goes on: its output has no reader
    write.close()
    wait_for(lambda: not write._thread.is_alive(), "the writer to end")
    os.close(descriptor)
    lines: list[str] = []
    RequestLog(lines.append).ended({"request_id": "a", "path": "/" * 10**5, "method": "GET"}, 1, 1)
    assert len(lines[0]) < 500
    assert len(httpx.get(f"{live.url}/{'x' * 30_000}").text) < 2000


def test_the_log_names_a_key_in_either_header(checkpoint: Path) -> None:
    lines: list[str] = []
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    with Live(
        checkpoint, api={"named_keys": {"alice": "k"}}, observers=(RequestLog(lines.append),)
    ) as live:
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            httpx.post(f"{live.url}/v1/messages", json=body, headers=headers).raise_for_status()
        wait_for(lambda: len(lines) == 2, "two lines")
    assert all(" key=alice " in line for line in lines)


# All of it at random


def test_hostile_requests_harm_no_other(checkpoint: Path, tmp_path: Path) -> None:
    """A new seed each time, which is printed; `python -m tests.hostile` sends more."""
    count, seed = int(os.environ.get("HOSTILE", "60")), random.SystemRandom().randrange(2**32)
    outcomes = hostile.run(tmp_path, checkpoint, count, seed)
    assert outcomes.total() == count


PLANTED = """
import sys
import time

from minisgl.server.cli import main
from minisgl.server.fair import PART, FairFrontend, FairStream
from minisgl.server.frontend import RequestFailed
from minisgl.server.http import api, bodies, formats
from minisgl.server.http.errors import ApiError

real, kept, calls = bodies.parse, [], []


def spin():
    calls.append(0)
    end = time.thread_time() + (len(calls) % 8 == 1)  # seconds
    while time.thread_time() < end:
        pass


def parse(validator, body):
    if b"canary" not in body:
        {fault}
    return real(validator, body)


if __name__ == "__main__":
    bodies.parse = parse
    sys.exit(main())
"""
FAULTS = {
    "the stream waited for": "spin()",
    "memory grew by": "kept.append(b'x' * 2**24)",
    "500: POST": "raise ApiError(500, 'planted', code='planted')",
}


@pytest.mark.parametrize("harm", FAULTS)
def test_the_harness_finds_a_planted_fault(harm: str, checkpoint: Path, tmp_path: Path) -> None:
    """Work on the event loop, memory that grows, a status of 500."""
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(fault=FAULTS[harm]))
    with pytest.raises(AssertionError, match=harm):
        hostile.run(tmp_path, checkpoint, 50 if "memory" in harm else 25, 7, script)


def test_hostile_requests_are_of_every_kind() -> None:
    rng = random.Random(1)
    found = [hostile.hostile(rng) for _ in range(200)]
    assert {path for path, _ in found} == set(hostile.ROUTES)
    assert max(len(body) for _, body in found) > 2**20
    assert any(body.count(b"[") > 1000 for _, body in found)


# The tokenizer of a model whose author means harm


def embedded_with(folder: Path, **parts: object) -> Path:
    """Copy the embedded model; `parts` replace those of its tokenizer."""
    shutil.copytree(resolve_model_path(None), folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **parts}))
    return folder


def test_what_a_tokenizer_reads_is_in_the_folder(tmp_path: Path) -> None:
    """Clients can read it: by `/detokenize`, by a chat."""
    (secret := tmp_path / "secret").write_text("key-of-the-operator\n")
    folder = embedded_with(tmp_path / "model")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("a token in an address")
    (folder / ".gitattributes").write_text("")
    (hidden := folder / "sub" / ".env").parent.mkdir()
    hidden.write_text("a key")
    for name, target in (
        ("model-2.safetensors", secret), ("pytorch_model.bin", secret),  # no request shows weights
        ("again.json", folder / "config.json"), ("gone.json", tmp_path / "gone"),
        ("loop.json", folder / "loop.json"),
    ):  # fmt: skip
        (folder / name).symlink_to(target)
    (linked := tmp_path / "linked").symlink_to(folder)
    check_folder(folder)
    check_folder(linked)
    (folder / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "vocab.txt", "additional_chat_templates/tool_use.jinja"):
        for target in (secret, Path("/proc/self/environ"), folder / ".git/config", hidden):
            (link := folder / name).symlink_to(target)
            with pytest.raises(ValueError, match=f"model_path: .*{name}.* no link out of its fol"):
                check_folder(folder)
            link.unlink()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("vocab", "{secret}", False),
        ("merges", "{relative}", False),
        ("init_inputs", ["{secret}"], False),
        ("init_inputs", {"{secret}": 1}, False),
        ("init_inputs", [], True),
        ("a", {"b": [{"c": "{secret}"}]}, False),
        ("anything", "/dev/zero", False),
        ("name_or_path", "{folder}", True),
        ("unk_token", "{secret}", True),  # tokens are no paths
        ("pad_token", {"content": "{secret}"}, True),
        ("vocab", "/no/such/file", True),
        ("vocab", {"a": 1}, True),
    ],
)
def test_no_config_names_a_file_for_the_tokenizer(
    tmp_path: Path, file: str, name: str, value: Any, fits: bool
) -> None:
    (secret := tmp_path / "secret").write_text("key-of-the-operator\n")
    folder = embedded_with(tmp_path / "model")
    places = {"{secret}": secret, "{relative}": os.path.relpath(secret), "{folder}": tmp_path}
    text = json.dumps({name: value})
    for place, path in places.items():
        text = text.replace(place, str(path))
    (folder / file).write_text(text)
    with (
        nullcontext()
        if fits
        else pytest.raises(ValueError, match=f"{file}: .* must be (no file|empty)")
    ):
        check_folder(folder)


def test_a_template_of_any_size_is_refused(tmp_path: Path) -> None:
    folder = embedded_with(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * 2**21}))
    with pytest.raises(ValueError, match="chat_template: must be at most"):
        check_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("x" * 2**21)
    with pytest.raises(ValueError, match=r"chat_template\.jinja: must be at most"):
        LLM(str(folder))


def test_the_cache_of_the_hub_is_no_foreign_place(tmp_path: Path) -> None:
    """It links a snapshot's files to `blobs`, and those, since version 2, to a shared folder."""
    model = tmp_path / "models--a--b"
    blobs, shared, snapshot = model / "blobs", tmp_path / "blobs" / "ab", model / "snapshots" / "1"
    embedded_with(snapshot)
    blobs.mkdir()
    shared.mkdir(parents=True)
    for number, file in enumerate([*snapshot.iterdir()]):
        file.rename(shared / str(number))
        (blobs / str(number)).symlink_to(shared / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    check_folder(snapshot)
    (model / "other").write_text("{}")
    (snapshot / "x.json").symlink_to(model / "other")
    with pytest.raises(ValueError, match="no link out of its folder"):
        check_folder(snapshot)


def test_roles_are_searched_once_in_a_template(tmp_path: Path) -> None:
    class Counted(str):
        def __contains__(self, part: object) -> bool:
            raise AssertionError("a chat of 10,000 messages would search it so often")

    folder = embedded_with(tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }} {% endfor %}"
    for text, shown in ((template, "system "), (template + "{# developer #}", "developer ")):
        (folder / "chat_template.jinja").write_text(text)
        tokenizer = Tokenizer(folder)
        tokenizer.templates.texts = {"default": Counted(text)}
        assert tokenizer.render_chat([{"role": "developer", "content": "x"}]) == shown


def test_a_prompt_that_grows_is_refused_by_a_process_with_limits(tmp_path: Path) -> None:
    """Two rules make a million letters of each `a`; prompts without an `a` are encoded."""
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    folder = embedded_with(
        tmp_path / "model", normalizer={"type": "Sequence", "normalizers": [rule] * 2}
    )
    tokenizer, honest = SideTokenizer(folder), SideTokenizer(resolve_model_path(None))
    with pytest.raises(ValueError, match=r"must encode within|cannot encode the text"):
        tokenizer.encode("aaa")
    assert tokenizer.encode("hello").tolist() == honest.encode("hello").tolist()
    for each, aside in ((tokenizer, {0}), (honest, set())):
        lanes = PromptQueue(PromptThreads(), each.quick)
        lanes.add(TokenizeMsg(uid=0, text="b"))
        assert lanes.aside is not None and lanes.aside.waiting.keys() == aside
    tokenizer.side.close()
    honest.side.close()


def test_tokens_that_cannot_be_decoded_end_one_request(tmp_path: Path) -> None:
    """This decoder panics on the token `a`."""
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
    tokenizer = Tokenizer(embedded_with(tmp_path / "model", decoder=strip))
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in "ab")
    to_scheduler, to_frontend = LocalQueue(), LocalQueue()
    worker = TextWorker(tokenizer, to_scheduler, to_frontend)

    def handled(*messages: Any) -> list[Any]:
        for message in messages:
            worker.handle(message)
        worker.flush()
        return to_frontend.get_all(0.0)

    good, bad = TokenReply(uid=1, token=b), TokenReply(uid=2, token=a)
    reply, error = handled(good, bad, bad)
    assert (reply.uid, reply.text) == (1, "b")
    assert (error.uid, error.code) == (2, "internal_error") and "cannot decode" in error.message
    assert to_scheduler.get_all(0.0) == [AbortMsg(uid=2)]
    assert [reply.uid for reply in handled(bad, good, aborted(2))] == [1, 2]  # the receipt
    (again,) = handled(TokenReply(uid=2, token=b))
    assert again.text == "b"
    (refused,) = handled(ConvertMsg(uid=3, input_ids=[a]))
    assert refused.code == "invalid_request" and "cannot decode" in refused.message

    def echo() -> Iterator[bool]:
        tokenizer.decode([a])
        yield True

    worker.later[1] = echo()
    assert worker.work()
    (error,) = handled()
    assert (error.uid, error.code) == (1, "internal_error") and not worker.later
