"""Replicas under Ray Serve: HTTP as on one server, conversations that stay, workers that die.

Ray is no part of `dev`: `pip install minisgl[ray]`. It listens on all interfaces and starts slowly,
so start it first where only this machine can reach it, and set RAY_ADDRESS; or let the test do so.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests import test_server_api as api
from tests.replicas import End, Watch
from tests.serving import random_model, wait_for
from tests.test_server_operations import free_port

ray = pytest.importorskip("ray", reason="no Ray: pip install minisgl[ray]")
from ray import serve  # noqa: E402

from minisgl.cluster import GONE, Cluster, app  # noqa: E402
from minisgl.server.relay import asgi_messages, by_preference, conversation_of  # noqa: E402
from tests.ray_replicas import engines  # noqa: E402

PROXY = {"test_body_that_is_too_large"}  # Ray's proxy reads a body to its end, whatever we answer
# Whatever needs no more of a server than its URL.
for name, test in vars(api).copy().items():
    if name.startswith("test_") and "live" in inspect.signature(test).parameters:
        source = inspect.getsource(test)
        outside = source.count("live.") == source.count("live.url") and "monkeypatch" not in source
        if outside and name not in PROXY:
            globals()[name] = test


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[SimpleNamespace]:
    """Two replicas behind one address."""
    given = os.environ.get("RAY_ADDRESS")
    fresh = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": 4}
    ray.init(**({"address": given} if given else fresh), log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    flags = f"--model {checkpoint} --served-model-name minisgl-tiny --device cpu --num-pages 400"
    try:
        flags += " --log-format none --max-body-size 200000 --allow-origin '*'"
        serve.run(app(Cluster(flags=flags, replicas=2)))
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def client(live: SimpleNamespace) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


def headers(session: str) -> dict[str, str]:
    return {"x-session-id": session}


def test_turns_of_a_conversation_find_their_cache(live: SimpleNamespace) -> None:
    for chat in range(4):
        messages = [{"role": "user", "content": f"{chat} {chr(97 + chat) * 50}"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "temperature": 0}
        for turn in range(2):
            answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=300).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 30) is (turn > 0)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]


def test_a_client_that_leaves_aborts_its_request(live: SimpleNamespace) -> None:
    sent = headers("one that leaves")

    def opened() -> float:
        text = httpx.get(f"{live.url}/metrics", headers=sent, timeout=100).text
        lines = [line for line in text.splitlines() if line.startswith("minisgl_open_requests ")]
        return float(lines[0].split()[-1])

    body = {"prompt": "hi", "ignore_eos": True, "max_tokens": 200, "stream": True}
    url = f"{live.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=sent, timeout=200) as response:
        next(response.iter_lines())
    wait_for(lambda: opened() == 0, "the abort")


@pytest.mark.parametrize("part", ["worker", "replica"])
def test_a_death_ends_the_streams_of_one_replica(live: SimpleNamespace, part: str) -> None:
    """Each with an error event; requests go on, and a new replica comes."""
    victim = engines()[0]
    children = victim.children(recursive=True)
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    async def watch() -> list[End]:
        seen = Watch(live.url, 200, answers=8)  # long enough to be there when it happens
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            streams = [asyncio.ensure_future(seen.stream(client, i)) for i in range(16)]
            while seen.started < 8 and not any(stream.done() for stream in streams):
                await asyncio.sleep(0.01)
            (workers[0] if part == "worker" else victim).kill()
            return await asyncio.gather(*streams)

    ends = [(end.kind, end.message) for end in asyncio.run(watch())]
    why = "the scheduler died (signal 9, Killed)" if part == "worker" else GONE.detail
    assert set(ends) <= {("complete", ""), ("error event", why), ("status 503", "")}
    assert ("error event", why) in ends
    wait_for(lambda: len(engines()) == 2 and victim not in engines(), "a new replica", 60)
    ask = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{live.url}/v1/completions", json=ask, timeout=300).status_code == 200


def chat_of(*texts: str, system: str | None = None) -> bytes:
    """The body of a chat whose user and assistant take turns."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = itertools.cycle(["user", "assistant"])
    messages += [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return json.dumps({"messages": messages, "n": len(texts)}).encode()


@pytest.mark.parametrize(
    ("sent", "body", "other"),
    [
        ({}, chat_of("a"), chat_of("a", "b", "c")),
        ({}, chat_of("a", system="s"), chat_of("a", "b", "c", system="s")),
        ({}, b'{"prompt": "%s"}' % (b"x" * 256), b'{"prompt": "%s more"}' % (b"x" * 256)),
        ({"x-session-id": "me"}, b"", b"[]"),
    ],
)  # fmt: skip
def test_turns_have_one_conversation(sent: Mapping[str, str], body: bytes, other: bytes) -> None:
    assert conversation_of(sent, body) == conversation_of(sent, other) != ""


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"3", b'{"messages": 3}', b'{"messages": []}',
                                  b'{"prompt": 3}', b'{"messages": [{"role": ["user"]}]}',
                                  b"[" * 100_000])  # fmt: skip
def test_a_body_without_a_conversation_has_none(body: bytes) -> None:
    """The replica will name the fault."""
    assert conversation_of({}, body) == ""


def test_an_overloaded_replica_comes_last() -> None:
    calm = dict.fromkeys("abcd", 3)
    first = by_preference("chat", calm)
    busy = calm | {first[0]: 30}
    assert by_preference("chat", busy) == [*first[1:], first[0]]
    without = {name: 3 for name in "abcd" if name != first[2]}
    assert by_preference("chat", without) == [name for name in first if name != first[2]]


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"flags": "--device cpu"}, 0),
        ({"flags": "--device cuda:0"}, 1),
        ({"flags": "--device cuda:0 --tp 2", "replicas": 3}, 2),
        ({"flags": "--device cuda:0", "gpus": 0.5}, 0.5),
    ],
)
def test_gpus_and_numbers_of_replicas(
    fields: dict[str, Any], gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica reserves a GPU for each of its ranks; Ray Serve keeps to the limits given."""
    made: dict[str, Any] = {}

    def deployment(kind: type, **options: Any) -> Any:
        made[kind.__name__] = options
        return SimpleNamespace(bind=lambda *args: None)

    monkeypatch.setattr(serve, "deployment", deployment)
    app(Cluster(max_replicas=2, idle=5, **fields))
    assert made["Engine"]["ray_actor_options"] == {"num_gpus": gpus}
    scaling = made["Engine"]["autoscaling_config"]
    least = fields.get("replicas", 1)
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (least, max(least, 2))
    assert scaling["downscale_delay_s"] == 5 and "autoscaling_config" not in made["Ingress"]


def test_a_client_that_leaves_cancels_the_application() -> None:
    """Closing the stream early is what a disconnect is for a replica."""

    async def check() -> bool:
        ended = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            try:
                while True:
                    await send({"type": "http.response.body", "body": b"x"})
                    await asyncio.sleep(0)
            finally:
                ended.set()

        found = asgi_messages(endless, {"type": "http"}, b"")
        await anext(found)
        await found.aclose()
        return ended.is_set()

    assert asyncio.run(check())
