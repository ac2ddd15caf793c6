"""Faults: clients that leave or stall, half-open sockets, hostile bodies, workers that stop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl import LLM
from minisgl.core import SamplingParams
from minisgl.runtime.heartbeat import Heartbeat, Watchdog
from minisgl.runtime.supervisor import LEAVE, Supervisor, Worker
from minisgl.scheduler.messages import AbortMsg
from minisgl.server.frontend import Frontend, RequestFailed
from minisgl.server.http.errors import ApiError
from minisgl.server.http.limits import BodyLimit
from minisgl.server.options import Operations
from minisgl.server.workers.channels import LocalQueue
from minisgl.server.workers.messages import UserReply
from tests.serving import Live, Served, last_event, metric, stream, wait_for

pytest_plugins = ["tests.random_server"]


def raw_request(live: Live, body: dict[str, Any] | bytes, buffer: int = 0) -> socket.socket:
    """A socket that has sent one POST and read nothing."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", live.port))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Everything up to what must come."""
    data = b""
    while end not in data:
        more = connection.recv(2**16)
        assert more, data[-300:]
        data += more
    return data


def reset(connection: socket.socket) -> None:
    """Vanish with a reset instead of a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# Leaving, in every state


class Steps:
    """The scheduler's step when the abort of a request reached its inbox, and at its release."""

    def __init__(self, live: Live) -> None:
        self.arrived: dict[int, int] = {}
        self.released: dict[int, int] = {}
        scheduler, box = live.server.scheduler, live.server.to_scheduler
        put, release = box.put, scheduler.release

        def noted_put(*messages: Any) -> None:
            for msg in messages:
                if isinstance(msg, AbortMsg):
                    self.arrived[msg.uid] = scheduler.step_count
            put(*messages)

        def noted_release(req: Any) -> None:
            self.released[req.uid] = scheduler.step_count
            release(req)

        box.put, scheduler.release = noted_put, noted_release  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["queued", "mid-prefill", "decoding", "many choices"])
def test_leaving_frees_all_within_a_step(checkpoint: Path, state: str, stream: bool) -> None:
    fields: dict[str, Any] = {"max_running_req": 8}
    if state == "queued":
        fields["max_running_req"] = 1
    if state == "mid-prefill":
        fields["max_extend_tokens"] = 4
    with Live(checkpoint, **fields) as live:
        scheduler, steps = live.server.scheduler, Steps(live)
        body = {"prompt": [5] * 120, "ignore_eos": True, "stream": stream, "max_tokens": 130}
        others = []
        if state == "queued":
            others = [raw_request(live, {**body, "prompt": [6] * 100})]
            wait_for(lambda: len(scheduler.decode.running) == 1, "the row to be taken")
        if state == "many choices":
            body["n"] = 6
        connection = raw_request(live, body)
        reached = {
            "queued": lambda: len(scheduler.prefill.waiting) == 1,
            "mid-prefill": lambda: scheduler.prefill.chunked_req is not None,
            "decoding": lambda: len(scheduler.decode.running) == 1,
            "many choices": lambda: len(scheduler.decode.running) == 6,
        }
        wait_for(reached[state], state, 10)
        uids = [uid for uid, req in scheduler.reqs.items() if req.prompt_len == 120]
        reset(connection)
        assert len(uids) == body.get("n", 1)
        wait_for(lambda: all(uid in steps.released for uid in uids), "the abort")
        # One step may be under way when the message comes; the next turn reads it.
        assert all(steps.released[uid] - steps.arrived[uid] <= 1 for uid in uids), vars(steps)
        for other in others:
            reset(other)
        live.assert_pages_home()


def test_a_response_that_is_never_sent_aborts_its_request(live: Live) -> None:
    """The client vanishes between the first event and the sending of it."""
    rng = random.Random(0)
    for _ in range(20):
        connection = raw_request(
            live, {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 9999}
        )
        time.sleep(rng.random() * 0.02)
        reset(connection)
    live.assert_pages_home()


# Slow readers, slow senders


def test_slow_reader_is_cut(checkpoint: Path) -> None:
    """A socket that takes nothing for the stall time is a client that left."""
    with Live(checkpoint, stall=0.5, send_buffer=4096) as live:
        body = {
            "prompt": "hi",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 9999,
            "n": 32,
            "logprobs": 20,
        }
        started = time.monotonic()
        with raw_request(live, body, buffer=1024):  # closed before the server waits for it
            wait_for(lambda: live.limiter.taken == 32, "the stream to begin")
            wait_for(lambda: live.limiter.taken == 0, "the reader to be cut", 20)
            assert time.monotonic() - started > 0.5
            live.assert_pages_home()
            wait_for(lambda: not live.http.server_state.connections, "the connection to be gone")


@pytest.mark.clock
def test_slow_reader_that_takes_a_little_is_not_cut(checkpoint: Path) -> None:
    """Backpressure joins what waits; the answer arrives whole."""
    with Live(checkpoint, stall=0.5, send_buffer=4096) as live:
        body = {
            "prompt": "hi",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 9999,
            "n": 8,
            "logprobs": 5,
        }
        connection = raw_request(live, {**body, "max_tokens": 120}, buffer=2048)
        data, started = b"", time.monotonic()
        while not data.endswith(b"0\r\n\r\n"):
            more = connection.recv(2048)
            assert more, "it was cut"
            data += more
            time.sleep(0.02)
        assert time.monotonic() - started > 0.8
        assert data.count(b'"finish_reason":"length"') == 8 and b"[DONE]" in data
        connection.close()
        live.assert_pages_home()


def test_stream_that_nobody_reads_has_a_limit() -> None:
    """Beyond the limit the request is aborted; the reader finds its text, then the reason."""

    async def run() -> tuple[list[str], list[Any]]:
        outbox = LocalQueue()
        frontend = Frontend([outbox], LocalQueue(), max_waiting=10)
        stream = frontend.generate(SamplingParams(), text="x")
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reply = UserReply(uid=0, text="a", token_ids=[1])
        for _ in range(40):
            frontend._dispatch([reply])
        got = [(await waiting).text]
        with pytest.raises(RequestFailed, match="replies wait") as caught:
            async for more in stream:
                got.append(more.text)
        assert caught.value.code == "slow_reader"
        return got, outbox.get_all(0.0)

    got, sent = asyncio.run(run())
    assert "".join(got) == "a" * 11
    assert [type(message).__name__ for message in sent] == ["TokenizeMsg", "AbortMsg"]


def test_memory_of_a_stalled_stream_is_bounded(checkpoint: Path) -> None:
    """While the socket takes nothing, what waits is counted in tokens and cut at the limit."""
    with Live(checkpoint, stall=20, max_waiting=20, send_buffer=4096) as live:
        body = {
            "prompt": "hi",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 9999,
            "n": 16,
            "logprobs": 20,
        }
        connection = raw_request(live, body, buffer=1024)
        scheduler = live.server.scheduler
        wait_for(lambda: scheduler.step_count > 5 and not scheduler.has_work, "the aborts", 15)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        connection.settimeout(10)
        data = read_until(connection, b"\r\n0\r\n\r\n")
        assert b"slow_reader" in data and b"[DONE]" not in data
        connection.close()
        live.assert_pages_home()


@pytest.mark.clock
def test_half_a_request_is_cut(checkpoint: Path) -> None:
    with Live(checkpoint, head=0.4) as live:
        halves = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"]
        for half in halves:
            with socket.create_connection(("127.0.0.1", live.port), timeout=50) as connection:
                connection.sendall(half)
                assert connection.recv(100) == b""
        with socket.create_connection(("127.0.0.1", live.port), timeout=50) as connection:
            for _ in range(2):  # a whole request, then half a one on the same connection
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                read_until(connection, b'{"status":"ok"}')
            connection.sendall(b"GET /hea")
            assert connection.recv(100) == b""
        assert httpx.get(f"{live.url}/health").status_code == 200
        wait_for(lambda: len(live.http.server_state.connections) == 0, "connections to be gone")


def test_body_that_never_ends_is_cut(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyLimit.__init__, "__defaults__", (0.3,))
    with (
        Live(checkpoint) as live,
        socket.create_connection(("127.0.0.1", live.port), timeout=50) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        connection.sendall(head + b'{"pro')
        assert b"408" in connection.recv(4096)
        live.assert_pages_home()


@pytest.mark.parametrize(("claim", "pieces"), [(None, 11), (b"5", 11), (b"5000", 0)])
def test_body_is_read_up_to_its_limit(claim: bytes | None, pieces: int) -> None:
    """Whatever the header claims, one piece beyond the limit is the last that is asked for."""
    read = [0]

    async def receive() -> Any:
        read[0] += 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: Any) -> None:
        raise AssertionError("the application answers, and not the limit")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    headers = [] if claim is None else [(b"content-length", claim)]
    scope = {"type": "http", "method": "POST", "headers": headers}
    with pytest.raises(ApiError) as caught:
        asyncio.run(BodyLimit(app, 1000)(scope, receive, send))
    assert read[0] == pieces and caught.value.status_code == 413
    assert caught.value.headers == {"connection": "close"}


def test_a_refused_body_ends_its_connection(checkpoint: Path) -> None:
    """The rest of a body that is too long is not read; what leaves is the error body of the API."""
    operations = Operations(log_format="none", max_body_size=1000)
    with (
        Live(checkpoint, operations=operations) as live,
        socket.create_connection(("127.0.0.1", live.port), timeout=50) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
        connection.sendall(head + b"x" * 10)
        answer = b""
        while data := connection.recv(4096):  # up to the end of the connection
            answer += data
    assert b"413" in answer and b'"body_too_large"' in answer and b"connection: close" in answer


# Deadlines


def test_deadline_of_a_request(live: Live) -> None:
    body = {"prompt": "hi", "ignore_eos": True, "max_tokens": 9999, "n": 16, "timeout": 0.05}
    response = httpx.post(f"{live.url}/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 408 and error["code"] == "deadline_exceeded"
    assert error["param"] == "timeout" and "0.05" in error["message"]
    live.assert_pages_home()
    quick = {"prompt": "hi", "max_tokens": 1, "timeout": 20}
    assert httpx.post(f"{live.url}/v1/completions", json=quick).status_code == 200


def test_missed_deadline_is_an_abort() -> None:
    async def run() -> list[Any]:
        outbox = LocalQueue()
        frontend = Frontend([outbox], LocalQueue())
        with pytest.raises(RequestFailed, match="within 0"):
            await anext(frontend.generate(SamplingParams(), text="x", timeout=0.01))
        assert not frontend._streams
        return outbox.get_all(0.0)

    assert [type(m).__name__ for m in asyncio.run(run())] == ["TokenizeMsg", "AbortMsg"]


def test_missed_deadline_does_not_wait_for_its_reader() -> None:
    """A reader that takes nothing, because its socket is full, does not delay the abort."""

    async def run() -> list[str]:
        outbox = LocalQueue()
        frontend = Frontend([outbox], LocalQueue())
        replies = frontend.generate(SamplingParams(), text="x", timeout=0.05)
        first = asyncio.ensure_future(anext(replies))
        await asyncio.sleep(0)
        (uid,) = frontend._streams
        frontend._dispatch([UserReply(uid=uid, text="a", token_ids=[1])])
        assert (await first).text == "a"
        await asyncio.sleep(0.1)  # busy elsewhere: the stream is not asked again
        sent = [type(message).__name__ for message in outbox.get_all(0.0)]
        frontend._dispatch([UserReply(uid=uid, text="b", token_ids=[2])])  # too late
        with pytest.raises(RequestFailed, match=r"within 0\.05"):
            await anext(replies)
        assert not frontend._streams and outbox.get_all(0.0) == []
        return sent

    assert asyncio.run(run()) == ["TokenizeMsg", "AbortMsg"]


@pytest.mark.clock
def test_deadline_of_the_server_ends_a_stream(checkpoint: Path) -> None:
    operations = Operations(log_format="none", request_timeout=0.2)
    with Live(checkpoint, operations=operations) as live:
        body = {
            "prompt": "hi",
            "ignore_eos": True,
            "max_tokens": 9999,
            "n": 24,
            "stream": True,
            "timeout": 100,
        }
        response = httpx.post(f"{live.url}/v1/completions", json=body)
        last = [line for line in response.text.splitlines() if line][-1]
        assert response.status_code == 200 and "deadline_exceeded" in last
        live.assert_pages_home()


# A full queue


def test_full_queue_is_a_429_at_once(checkpoint: Path) -> None:
    with Live(checkpoint, limit=4) as live:
        long = {"prompt": "hi", "ignore_eos": True, "max_tokens": 9999, "stream": True}
        connections = [raw_request(live, {**long, "n": 3}), raw_request(live, long)]
        wait_for(lambda: live.limiter.taken == 4, "the places to be taken")
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"})
        error = refused.json()["error"]
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
        too_many = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x", "n": 5})
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
        assert httpx.get(f"{live.url}/health").status_code == 200
        for connection in connections:
            reset(connection)
        live.assert_pages_home()
        short = {"prompt": "x", "max_tokens": 2, "n": 4}
        assert httpx.post(f"{live.url}/v1/completions", json=short).status_code == 200
        live.assert_pages_home()


# Hostile bodies


SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "stop": ["x"], "logprobs": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "n": 2, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    ("/generate", {"prompt": "hello", "max_tokens": 2, "temperature": 0.5, "seed": 1}),
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, 0.5, -0.0, "", "x",
    "\ud800", "\x00", "🙂" * 50, "x" * 5000, [], [[]], [None], {}, {"a": 1}, ["x", 5], [[5], "x"],
    [-1], [2**40], {"type": "json_object"}, [{"role": "user"}], [{"type": "text"}], "NaN",
]  # fmt: skip


def mutate(rng: random.Random, value: Any) -> Any:
    """The same value with something wrong somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        out = {**value, name: mutate(rng, value[name])}
        if rng.random() < 0.15:
            out[rng.choice(["temperature", "top_p", "top_k", "n", "tools", "extra"])] = rng.choice(
                ODD
            )
        if rng.random() < 0.1:
            del out[name]
        return out
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(rng, value[at]), *value[at:]]
    return rng.choice(ODD)


def hostile_body(rng: random.Random) -> tuple[str, bytes]:
    path, seed = rng.choice(SEEDS)
    body: Any = seed
    for _ in range(rng.choice([0, 1, 1, 2])):
        body = mutate(rng, body)
    content = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.1:  # cut, doubled, or with a byte that does not belong
        content = content[: rng.randrange(len(content) + 1)]
    elif kind < 0.2:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + bytes([rng.randrange(256)]) + content[at:]
    elif kind < 0.25:
        content = b"[" * rng.randrange(1, 50_000)
    elif kind < 0.3:
        content = content.replace(b"2", rng.choice([b"NaN", b"Infinity", b"1e999", b"9" * 5000]))
    return path, content


def test_mutated_bodies_are_answered(
    live: Live, capfd: pytest.CaptureFixture[str], rounds: int = 150
) -> None:
    rng = random.Random(12)
    headers = {"content-type": "application/json"}
    found: dict[int, int] = {}
    with httpx.Client(base_url=live.url, timeout=300) as client:
        for _ in range(rounds):
            path, content = hostile_body(rng)
            response = client.post(path, content=content, headers=headers)
            found[response.status_code] = found.get(response.status_code, 0) + 1
            assert response.status_code < 500, (path, content[:300], response.text)
            if response.status_code >= 400:
                assert response.json()["error"]["message"], content[:300]
            else:
                assert '"internal_error"' not in response.text, (content[:300], response.text)
        assert client.get("/health").status_code == 200
    assert set(found) <= {200, 400, 404, 408, 413} and found[200] > 5 and found[400] > 50, found
    live.assert_pages_home()
    assert "Traceback" not in capfd.readouterr().err


def test_own_schema_is_kept(live: Live) -> None:
    """schemathesis asks what the server's OpenAPI schema allows, and what it does not."""
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")

    for result in schema.get_all_operations():
        run_case(result.ok())
    live.assert_pages_home()


def run_case(operation: Any) -> None:
    """Run generated cases of one operation, as schemathesis' pytest plugin would."""
    strategy = operation.as_strategy()

    @given(case=strategy)
    @settings(
        max_examples=6, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 2
        response = case.call(timeout=600)
        assert response.status_code < 500, (case.body, response.text)

    run()


# Many streams


def test_many_streams_are_not_mixed_up(checkpoint: Path, tmp_path: Path, count: int = 60) -> None:
    """Each answer is the one that the offline engine gives to its prompt, piece by piece."""
    prompts = [f"request number {index} " * (index % 3 + 1) for index in range(count)]
    with LLM(checkpoint, num_pages=512) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        expected = [out["text"] for out in llm.generate(prompts, params)]
    flags = ["--model", str(checkpoint), "--num-pages", "128", "--log-format", "none"]
    served = Served(tmp_path, *flags)
    url = served.ready()

    async def one(client: httpx.AsyncClient, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        events: list[str] = []
        async with client.stream("POST", "/completions", json={**body, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                events += [line[6:]] if line else []
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert len({chunk["id"] for chunk in chunks}) == 1
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == expected
    root = url.removesuffix("/v1")
    wait_for(lambda: metric(root, "used_pages") == 0, "all pages to be home")
    served.process.terminate()
    assert served.process.wait(timeout=200) == 0


WORDS = ("fox", "hen", "old", "man", "who", "had", "lost", "his", "way", "in", "the", "wood")


async def first_token(client: httpx.AsyncClient, prompt: str, tokens: int = 4) -> float:
    """Seconds to the first token of a stream that is read to its end."""
    start, found = time.perf_counter(), 0.0
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line and not found:
                found = time.perf_counter() - start
    return found


@pytest.mark.drill
@pytest.mark.clock
def test_short_request_does_not_wait_for_long_ones(tmp_path: Path) -> None:
    """Behind 50 long prompts: mostly within three times its time alone, and a step under way."""
    rng, trace = random.Random(0), tmp_path / "trace.json"

    def prompt(words: int) -> str:  # no two share their beginning
        return f"{rng.random()} " + " ".join(rng.choices(WORDS, k=words))

    flags = ["--max-prefill-length", "256", "--log-format", "none", "--trace", str(trace)]
    served = Served(tmp_path, *flags)
    url = served.ready()

    async def run() -> tuple[list[float], list[float]]:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            await first_token(client, prompt(5))
            alone = [await first_token(client, prompt(5)) for _ in range(5)]
            long = [asyncio.ensure_future(first_token(client, prompt(900))) for _ in range(50)]
            await asyncio.sleep(0.2)
            crowded = [await first_token(client, prompt(5)) for _ in range(5)]
            assert sum(task.done() for task in long) < 25
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            return alone, crowded

    alone, crowded = asyncio.run(run())
    root = url.removesuffix("/v1")
    wait_for(lambda: metric(root, "used_pages") == 0, "all pages to be home")
    served.process.terminate()
    assert served.process.wait(timeout=200) == 0
    spans = [event for event in json.loads(trace.read_text()) if event["ph"] == "X"]
    step = max(e["dur"] for e in spans if e["args"].get("phase") == "prefill") / 1e6
    # The median: one hiccup of a busy machine is not a queue, which would hold back all five.
    assert median(crowded) <= 3 * max(alone) + step, (alone, crowded, step)


def test_dead_scheduler_thread_ends_its_streams(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process too: a failing scheduler ends every stream with an error."""

    def broken() -> None:
        raise RuntimeError("out of ideas")

    with Live(checkpoint) as live:
        body = {"prompt": "hi", "ignore_eos": True, "max_tokens": 9999, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=100) as reply:
            lines = reply.iter_lines()
            next(lines)
            monkeypatch.setattr(live.server.scheduler, "next_step", broken)
            assert "out of ideas" in last_event(lines)
        assert httpx.get(f"{live.url}/health").status_code == 503


# Stopped workers


def greedy_texts(url: str, on_line: Callable[[int], None]) -> list[str]:
    """Stream four answers to one prompt; `on_line` gets the number of each line."""
    body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    texts = [""] * 4
    streamed = {**body, "stream": True, "n": 4}
    with httpx.stream("POST", f"{url}/completions", json=streamed, timeout=600) as response:
        for number, line in enumerate(response.iter_lines()):
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                texts[choice["index"]] += choice["text"]
            on_line(number)
    return texts


@pytest.mark.drill
@pytest.mark.clock
def test_stopped_workers_go_on_where_they_were(checkpoint: Path, tmp_path: Path) -> None:
    """SIGSTOP for a while: deadlines are kept meanwhile, and afterwards nothing is lost.

    Each worker within the limit; all together (Ctrl-Z, a closed laptop) for longer than that.
    """
    flags = ["--worker-timeout", "2", "--step-timeout", "2.5", "--log-format", "none"]
    served = Served(tmp_path, "--model", str(checkpoint), *flags)
    url = served.ready()
    root, children = url.removesuffix("/v1"), served.children()
    alone = greedy_texts(url, lambda number: None)
    assert alone == alone[:1] * 4

    def stop_one(number: int) -> None:
        if number not in (20, 120):
            return
        victim = served.workers()[number // 120]
        victim.suspend()
        late = httpx.post(f"{url}/completions", json={"prompt": "hi", "timeout": 0.3}, timeout=10)
        assert late.status_code == 408
        assert httpx.get(f"{root}/health").status_code == 200
        time.sleep(0.5)
        victim.resume()

    def stop_all(number: int) -> None:
        if number == 20:
            os.killpg(served.process.pid, signal.SIGSTOP)
            time.sleep(3.0)
            os.killpg(served.process.pid, signal.SIGCONT)

    assert greedy_texts(url, stop_one) == alone
    assert greedy_texts(url, stop_all) == alone
    time.sleep(2.5)  # idle for longer than the limit is no silence
    assert httpx.get(f"{root}/health").status_code == 200
    wait_for(lambda: metric(root, "running") == 0, "no request to be left")
    served.process.send_signal(signal.SIGTERM)
    served.ended(children)


# Workers that live and do not work


def hand_watch(worker: float, step: float) -> tuple[Watchdog, list[float]]:
    """A watch whose clock is moved by hand."""
    clock = [0.0]
    return Watchdog(worker, step, clock=lambda: clock[0]), clock


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from([0.1, 0.3, 7200.0]),  # seconds that pass
            st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=2),
        ),
        max_size=120,
    ),
    limits=st.tuples(st.sampled_from([0.0, 2.0, 3.0]), st.sampled_from([0.0, 2.5, 6.0])),
)
@settings(deadline=None)
def test_watch_agrees_with_a_diary(
    turns: list[tuple[float, list[tuple[bool, bool]]]], limits: tuple[float, float]
) -> None:
    """The first error comes when a count has been silent for its limit of waking time."""
    watch, clock = hand_watch(*limits)
    pulses = {"scheduler": [0, 0], "text worker": [0, 0]}
    assert watch.check(pulses) is None
    diary: list[tuple[float, list[tuple[bool, bool]]]] = []  # waking seconds, and who counted
    for seconds, counted in turns:
        clock[0] += seconds
        for counts, which in zip(pulses.values(), counted, strict=True):
            for kind in range(2):
                counts[kind] += which[kind]
        diary.append((min(seconds, 0.5), counted))
        expected = set()
        for kind, limit in enumerate(limits):
            for index, name in enumerate(pulses):
                silent = 0.0
                for awake, entry in reversed(diary):
                    if entry[index][kind]:
                        break
                    silent += awake
                if limit and silent > limit + 1e-9:
                    expected.add((name, kind))
        said = watch.check(pulses)
        assert (said is not None) == bool(expected), (said, expected)
        if said is not None:
            kind = int("one step" in said)
            assert any(name in said and k == kind for name, k in expected)
            return


def test_silence_is_named_and_forgotten() -> None:
    """By kind and by worker, after its limit and not before; one count begins anew."""
    for kind, words in enumerate(("no sign of life for 2 s", "in one step for 2 s")):
        watch, clock = hand_watch(2, 2)
        pulses = {"text worker": [0, 0], "scheduler": [0, 0]}
        said: list[str | None] = []
        for turn in range(50):
            clock[0] += 0.1
            pulses["text worker"] = [turn, turn]
            pulses["scheduler"][1 - kind] = turn
            pulses["scheduler"][kind] = turn // 15  # silent for 1.5 s at a time
            if turn > 25:
                pulses["scheduler"][kind] = 1
            said.append(watch.check(pulses))
        first = next(turn for turn, why in enumerate(said) if why)
        assert first in (35, 36), said  # 2 s after turn 15
        assert "the scheduler" in str(said[first]) and words in str(said[first])


def test_hours_of_sleep_are_nobodys_fault() -> None:
    watch, clock = hand_watch(2, 2)
    for _ in range(3):
        assert watch.check({"scheduler": [1, 1]}) is None
        clock[0] += 3600


def test_supervisor_asks_its_watch() -> None:
    """A worker that neither ended nor counts has failed, by the name of the worker."""
    watch, clock = hand_watch(2, 0)
    group = Supervisor([Worker("scheduler", "a:b"), Worker("text worker", "a:b")], watchdog=watch)
    for turn in range(5):
        group._heartbeats["scheduler"][0] = turn
        assert group.broken() is None
        clock[0] += 0.5
    for _ in range(2):
        group._heartbeats["scheduler"][0] += 1
        failed = group.broken()
        clock[0] += 0.5
    assert str(failed) == "the text worker gives no sign of life for 2 s"


@pytest.mark.clock
def test_a_thread_counts_for_the_process_and_the_loop_for_itself() -> None:
    counts = [0, 0]
    heartbeat = Heartbeat(counts)
    heartbeat.start()
    wait_for(lambda: counts[0] >= 2, "two beats of the thread")
    assert counts[1] == 0
    heartbeat.beat()
    assert counts[1] == 1


@pytest.mark.drill
@pytest.mark.clock
def test_stopped_worker_is_found(checkpoint: Path, tmp_path: Path) -> None:
    """SIGSTOP for good: error events, 503, one line, status 1, nothing left."""
    flags = ["--model", str(checkpoint), "--worker-timeout", "2", "--log-format", "none"]
    served = Served(tmp_path, *flags)
    url = served.ready()
    children = served.children()
    victim = served.workers()[1]
    with stream(url, n=16) as response:
        lines = response.iter_lines()
        next(lines)
        victim.suspend()
        stopped = time.monotonic()
        assert "no sign of life" in last_event(lines)
    health = httpx.get(f"{url.removesuffix('/v1')}/health")
    assert health.status_code == 503 and "text worker" in health.json()["error"]["message"]
    assert time.monotonic() - stopped > 1.5
    expected = "minisgl: the text worker gives no sign of life for 2 s\n"
    assert served.ended(children, status=1) == expected
    assert time.monotonic() - stopped < 150


@pytest.mark.drill
def test_what_a_stopped_worker_started_leaves_with_it(tmp_path: Path) -> None:
    """It cannot end its own processes any more, so the supervisor does."""
    told = tmp_path / "pid"
    with Supervisor([Worker("parent", "tests.parent:parent", (str(told),))]) as group:
        wait_for(lambda: not group.starting(), "the worker to be ready")
        child = psutil.Process(int(told.read_text()))
        assert child.is_running()
        psutil.Process(group.processes["parent"].pid).suspend()
        group.grace = 0.0
    wait_for(lambda: not child.is_running() or child.status() == "zombie", "its child to end", 5)


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_start_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """No second process can be started, or a signal comes first: the first one has to go."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    workers = [Worker(name, "time:sleep", (60,)) for name in ("first", "second", "third")]
    group = Supervisor(workers, folder=folder)
    beside = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    def fail() -> None:
        raise error

    monkeypatch.setattr(group.processes["second"], "start", fail)
    with pytest.raises(error), group:
        pass
    assert group.processes["first"].exitcode is not None and not folder.exists()
    assert beside.poll() is None, "it was not ours to end"
    beside.kill()
    beside.wait()


def test_a_signal_while_workers_start_is_heard_when_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not lost, and not in the middle: a process half started could not be ended."""
    told = tmp_path / "mask"
    group = Supervisor([Worker("masked", "tests.parent:masked", (str(told),))])
    process = group.processes["masked"]
    start = type(process).start

    def interrupted(self: BaseProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(self)

    monkeypatch.setattr(type(process), "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), group:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.pid is not None and process.exitcode is not None
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_is_exiting_is_not_interrupted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python would print an exception of the signal's handler as one of an atexit callback."""
    worker = Worker("slow", "tests.parent:slow_to_exit", (str(tmp_path),))
    with Supervisor([worker]) as group:
        wait_for((tmp_path / "exiting").exists, "the worker to exit")
        process = group.processes["slow"]
        assert process.pid is not None
        os.kill(process.pid, LEAVE)
        (tmp_path / "go").touch()
        process.join(200)
    assert process.exitcode == 0 and capfd.readouterr().err == ""


def test_a_worker_blocks_no_signals(tmp_path: Path) -> None:
    """Those that its parent holds back while it starts would stay blocked in what it starts."""
    told = tmp_path / "mask"
    with Supervisor([Worker("masked", "tests.parent:masked", (str(told),))]) as group:
        wait_for(lambda: not group.starting(), "the worker to be ready")
    assert told.read_text() == "[]"


@pytest.mark.drill
def test_stopped_rank_is_not_left_behind(checkpoint: Path, tmp_path: Path) -> None:
    """A rank is a child of the scheduler and cannot leave with it while it is stopped."""
    flags = ["--tp", "2", "--device", "cpu", "--step-timeout", "2", "--log-format", "none"]
    served = Served(tmp_path, "--model", str(checkpoint), *flags)
    url = served.ready()
    children = served.children()
    rank = served.workers()[0].children()[-1]
    with stream(url) as response:
        lines = response.iter_lines()
        next(lines)
        rank.suspend()
        assert "one step" in last_event(lines)
    try:
        served.ended(children, status=1)
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def rank_of(served: Served) -> psutil.Process | None:
    """Rank 1, the one worker that another worker has started; None as long as there is none."""
    workers = served.workers()
    pids = {worker.pid for worker in workers}
    with suppress(psutil.NoSuchProcess):
        return next((worker for worker in workers if worker.ppid() in pids), None)
    return None


@pytest.mark.drill
@pytest.mark.clock
@pytest.mark.parametrize("after", [0.0, 0.1, None])
def test_rank_killed_while_nobody_asks_ends_the_server(
    checkpoint: Path, tmp_path: Path, after: float | None
) -> None:
    """A server that looks well and fails at the next request is worse than none.

    The rank is killed some seconds after its start, or when the server is ready. The error names
    it. A kill in the middle of a step is tested without a server, in test_tensor_parallel.py.
    """
    flags = ["--tp", "2", "--device", "cpu", "--log-format", "none"]
    served = Served(tmp_path, "--model", str(checkpoint), *flags)
    if after is None:
        served.ready()
    wait_for(lambda: rank_of(served) is not None, "rank 1 to start")
    time.sleep(after or 0.0)
    children, rank = served.children(), rank_of(served)
    assert rank is not None
    rank.kill()
    killed = time.monotonic()
    served.process.wait(timeout=200)
    took = time.monotonic() - killed
    assert "rank 1 was killed by signal 9" in served.ended(children, status=1)
    assert took < 50


@pytest.mark.drill
def test_shell_ends_with_its_engine(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--shell", "--worker-timeout", "1"]
    served = Served(tmp_path, "--model", str(checkpoint), *flags, stdin=subprocess.PIPE)
    assert served.process.stdout is not None and "/help" in served.process.stdout.readline()
    children = served.children()
    served.workers()[1].suspend()
    served.process.wait(timeout=200)  # with its stdin open: no exit was requested
    expected = "minisgl: the text worker gives no sign of life for 1 s\n"
    assert served.ended(children, status=1) == expected


@pytest.mark.clock
def test_small_answers_do_not_wait_for_the_peer(checkpoint: Path) -> None:
    """Head and body are two writes; the second must not wait 40 ms for the first's receipt."""
    with Live(checkpoint) as live, httpx.Client(base_url=live.url, timeout=300) as client:
        taken = []
        for _ in range(40):  # at first a peer confirms at once
            start = time.monotonic()
            assert client.get("/v1/models").status_code == 200
            taken.append(time.monotonic() - start)
    assert min(taken[25:]) < 0.03, taken
