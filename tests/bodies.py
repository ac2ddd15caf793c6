"""Mutated requests with tools and schemas, sent to the application in this process.

`python -m tests.bodies 10000` sends 10,000: none may be answered with a 5xx, and none may hang.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from minisgl.config.engine import ServerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.server.cli import ServerObservers, build_app
from minisgl.server.http.limits import ConcurrencyLimiter
from minisgl.server.http.settings import settings_for
from minisgl.server.in_process import InProcessServer
from minisgl.server.options import Operations

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "any": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/deep"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"deep": {"type": "object", "properties": {"x": {"const": 1}}}},
}
TOOL = {"name": "weather", "description": "of a city", "strict": True, "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER], "max_tokens": 2, "temperature": 0}
NAMED = {"name": "answer", "strict": True, "schema": SCHEMA}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {
        **CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto",
        "parallel_tool_calls": False, "stream": True,
    }),
    ("chat/completions", {
        **CHAT, "tools": [{"type": "function", "function": TOOL}] * 2,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }),
    ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": TOOL}],
                          "tool_choice": "required"}),
    ("chat/completions", {**CHAT, "messages": [
        USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]}),
    ("chat/completions", {
        **CHAT, "response_format": {"type": "json_schema", "json_schema": NAMED},
    }),
    ("chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}, "stream": True}),
    ("completions", {"prompt": "Hi", "max_tokens": 2, "guided_json": SCHEMA}),
    ("completions", {"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": "Hi", "max_tokens": 2, "regex": "[ab]{2}", "ebnf": None}),
    ("responses", {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [{"type": "function", **TOOL}], "tool_choice": "auto", "max_output_tokens": 16,
        "store": False,
    }),
    ("responses", {
        "input": "Hi", "max_output_tokens": 16, "store": False, "stream": True,
        "text": {"format": {"type": "json_schema", **NAMED}},
    }),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, 2**64, 1e308, 0.5, "", "x", "\ud800", "\x00", "🙂" * 50,
    "x" * 5000, [], [[]], [None], {}, {"a": 1}, [{}], {"type": "function"}, {"type": "foo"}, "auto",
    "required", {"$ref": "#"}, {"$ref": "#/$defs/no"}, {"not": {}}, {"type": ["x"]}, "{", "[1,",
    {"enum": []}, {"pattern": "(("}, {"multipleOf": 0}, {"multipleOf": 9999}, {"maxLength": -1},
    {"minimum": 5, "maximum": 1}, {"required": "x"}, {"items": 5}, {"properties": []},
    {"type": "string", "pattern": "(a|a)*b{1000}"}, {"allOf": [{"type": "null"}, {"const": 1}]},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with every key in it."""
    found: list[tuple[Any, Any]] = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A body with one to three things wrong, deep inside or at the top."""
    path, seed = rng.choice(SEEDS)
    body = copy.deepcopy(seed)
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = rng.choice(places(body) or [(body, "x")])
        match rng.randrange(5):
            case 0:
                holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)
            case 1 if isinstance(holder, dict):
                value = holder.pop(key, None)
                holder[rng.choice(["$ref", "type", "x" * 200, "", "enum", "name"])] = value
            case 2 if isinstance(holder, dict):
                holder[rng.choice(["$ref", "oneOf", "not", "if", "anyOf", "id"])] = copy.deepcopy(
                    rng.choice(ODD)
                )
            case 3:
                _, other = rng.choice(SEEDS)
                holder[key] = copy.deepcopy(rng.choice(places(other))[0])
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
    content = json.dumps(body).encode()
    if rng.random() < 0.03:
        content = content[: rng.randrange(len(content) + 1)]
    return path, content


async def send_all(count: int, seed: int, path: Path) -> Counter[int]:
    """Return the number of answers by status; raise AssertionError for a 5xx or an error event."""
    rng, found = random.Random(seed), Counter[int]()
    config = ServerConfig(model_path=str(path), num_pages=2048, page_size=4, device="cpu")
    operations = Operations(log_format="none", request_timeout=60)
    with InProcessServer(config) as server:
        observers, settings = ServerObservers(operations), settings_for(config, path, 60)
        app = build_app(server.frontend, settings, ConcurrencyLimiter(), observers, operations)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60) as client,
        ):

            async def one(path: str, content: bytes) -> None:
                headers = {"content-type": "application/json"}
                response = await client.post(f"/v1/{path}", content=content, headers=headers)
                found[response.status_code] += 1
                told = (path, content[:2000], response.text[:500])
                assert response.status_code < 500, told
                assert "internal_error" not in response.text, told
                if response.status_code >= 400:
                    assert response.json()["error"]["message"], told

            for start in range(0, count, 8):
                some = [mutated(rng) for _ in range(min(8, count - start))]
                await asyncio.gather(*(one(*body) for body in some))
            assert (await client.get("/health")).status_code == 200
    return found


def check(count: int, seed: int = 0, path: Path | None = None) -> Counter[int]:
    """Send `count` mutated bodies to a server of the model in `path`."""
    return asyncio.run(send_all(count, seed, path or resolve_model_path(None)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(dict(check(args.count, args.seed)))
