"""The gateway `smg` in front of our servers: routing by prefix, a drain, a replica that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from minisgl.server.http.limits import DRAINING
from tests.replicas import End, Watch, gateway, usable
from tests.serving import Live, random_model, wait_for
from tests.test_server_operations import free_port

pytest.importorskip("smg", reason="no gateway: pip install minisgl[replicas]")
PROBING = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1",
           "--health-success-threshold", "1")  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Live]]]:
    """The URL of a gateway, and the two servers behind it."""
    checkpoint = random_model(tmp_path_factory)
    with ExitStack() as stack:
        fields: Any = {"served_model_name": "minisgl-tiny", "num_pages": 400}
        servers = [stack.enter_context(Live(checkpoint, **fields)) for _ in range(2)]
        urls = [server.url for server in servers]
        ports = free_port(), free_port()
        url = stack.enter_context(gateway(urls, "cache_aware", *PROBING, ports=ports))
        yield url, servers


def ask(url: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "minisgl-tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def test_turns_of_a_conversation_find_their_cache(pair: tuple[str, list[Live]]) -> None:
    url, _ = pair
    for chat in range(4):
        text = f"{chat} {chr(97 + chat) * 60}"
        first = ask(url, text)
        second = ask(url, text + first.json()["choices"][0]["text"] + " and then")
        routed = [answer.headers["x-smg-routed-worker-id"] for answer in (first, second)]
        assert routed[0] == routed[1]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 30


def test_errors_pass_through(pair: tuple[str, list[Live]]) -> None:
    """A client's mistake is no reason to ask another replica."""
    answer = ask(pair[0], "x", top_p=7)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_p"


def test_a_drain_costs_no_client_anything(pair: tuple[str, list[Live]]) -> None:
    url, (first, second) = pair
    first.limiter.reason = DRAINING
    try:
        answers = [ask(url, f"request {i}") for i in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert {a.headers["x-smg-routed-worker-id"] for a in answers} == {second.url}
        wait_for(lambda: usable(url) == [second.url], "the gateway to see the drain")
    finally:
        first.limiter.reason = None
    wait_for(lambda: len(usable(url)) == 2, "the gateway to see that it is over")


def test_a_stream_cut_by_a_failure_has_one_end(pair: tuple[str, list[Live]]) -> None:
    """A worker that dies fails the streams of its replica; the others are completed."""
    url, servers = pair

    async def watch() -> list[End]:
        seen = Watch(url, 200)
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            streams = [asyncio.ensure_future(seen.stream(client, i)) for i in range(8)]
            while seen.started < 8 and not any(stream.done() for stream in streams):
                await asyncio.sleep(0.01)
            frontend = servers[0].server.frontend
            assert frontend.loop is not None
            frontend.loop.call_soon_threadsafe(frontend.fail_all, "the scheduler died")
            return await asyncio.gather(*streams)

    ends = asyncio.run(watch())
    port = str(servers[0].port)
    assert {end.replica for end in ends} == {str(server.port) for server in servers}
    for end in ends:
        failed = end.kind, end.message
        assert failed == (("error event", "the scheduler died") if end.replica == port
                          else ("complete", ""))  # fmt: skip
