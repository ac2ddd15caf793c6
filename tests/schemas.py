"""Random JSON schemas of every kind that the public test suite has, and what a model makes of them.

`python -m tests.schemas 500` runs 500; `--suite FOLDER` adds those of a checkout of
https://github.com/json-schema-org/JSON-Schema-Test-Suite. A schema is refused, its answer is cut by
`max_tokens`, or its answer is valid: `jsonschema` is the oracle.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from minisgl import LLM, SamplingParams

NAMES = ("a", "name", "size", "b c", "ok", "é", "x-1")
VALUES: tuple[Any, ...] = (
    "red",
    "",
    'say "hi"\n',
    "🙂",
    7,
    -1.5,
    0,
    True,
    False,
    None,
    [],
    {},
    [1],
)
PATTERNS = ("^[ab]{2}$", "^x[0-9]$", "^(on|off)$", "a+b?", "^$", r"^\d{2}:\d{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri", "duration")


def some(rng: random.Random, **fields: Any) -> dict[str, Any]:
    """Some of these fields."""
    return {name: value for name, value in fields.items() if rng.random() < 0.6}


def text(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(4)
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "maxLength": low + rng.randrange(6), **some(rng, minLength=low)}


def number(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    least = rng.choice(["minimum", "exclusiveMinimum"])
    most = rng.choice(["maximum", "exclusiveMaximum"])
    bounds = {least: low, most: low + 2 + rng.randrange(90)}
    kind = rng.choice(["integer", "integer", "number"])
    step = rng.choice([2, 5, 10]) if kind == "integer" else rng.choice([0.5, 0.01])
    return {"type": kind, **bounds, **({"multipleOf": step} if rng.random() < 0.3 else {})}


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    few = {"maxItems": low + rng.randrange(3), **some(rng, minItems=low)}
    first = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    odd = some(rng, uniqueItems=True) if rng.random() < 0.1 else {}
    if rng.random() < 0.3:
        rest = rng.choice([False, random_schema(rng, depth - 1)])
        return {"type": "array", "prefixItems": first, "items": rest, **few, **odd}
    return {"type": "array", "items": random_schema(rng, depth - 1), **few, **odd}


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    kind = rng.random()
    if kind < 0.7:
        schema["additionalProperties"] = False
    elif kind < 0.8:
        schema["additionalProperties"] = random_schema(rng, 0)
    elif kind < 0.9:
        schema["patternProperties"] = {"^p[0-9]$": random_schema(rng, 0)}
        schema["additionalProperties"] = False
    if rng.random() < 0.1:
        schema |= some(rng, minProperties=1, maxProperties=2, dependentRequired={names[0]: []})
    return schema


def combined(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [random_schema(rng, depth - 1) for _ in range(2)]
    kind = rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "type"])
    if kind == "not":
        return {"not": parts[0]}
    if kind == "if":
        return {"if": parts[0], "then": parts[1]}
    if kind == "$ref":
        return {"$defs": {"part": parts[0]}, "$ref": "#/$defs/part"}
    if kind == "type":
        return {"type": rng.sample(["boolean", "null", "integer"], 2), "minimum": 0, "maximum": 9}
    if kind == "allOf":
        low = {"type": "integer", "minimum": 1, "maximum": 50}
        return {"allOf": [low, {"maximum": 30}]}
    return {kind: parts}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose instances are short, most of the time."""
    kinds = ["text", "number", "enum", "const", "plain"]
    kind = rng.choice(kinds if depth <= 0 else [*kinds, "record", "record", "array", "combined"])
    match kind:
        case "text":
            return text(rng)
        case "number":
            return number(rng)
        case "enum":
            return {"enum": rng.sample(VALUES, rng.randrange(1, 4))}
        case "const":
            return {"const": rng.choice(VALUES)}
        case "plain":
            return {"type": rng.choice(["boolean", "null"])}
        case "record":
            return record(rng, depth)
        case "array":
            return array(rng, depth)
        case _:
            return combined(rng, depth)


def suite(folder: Path) -> list[Any]:
    """The schemas of the public test suite, draft 2020-12."""
    found = []
    for file in sorted(folder.glob("tests/draft2020-12/*.json")):
        found += [group["schema"] for group in json.loads(file.read_text())]
    return [schema for schema in found if isinstance(schema, dict)]


def check(llm: LLM, schemas: Sequence[Any], seed: int = 0, max_tokens: int = 120) -> Counter[str]:
    """Count the refused, cut and valid answers; raise AssertionError for one that is not valid."""
    found, asked, talk = Counter[str](), [], [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = llm.tokenizer.apply_chat(talk).tolist()  # type: ignore[union-attr]
    for index, schema in enumerate(schemas):
        heat = {"temperature": 1.5, "seed": seed + index} if index % 2 else {}
        params = SamplingParams(json_schema=schema, max_tokens=max_tokens, **heat)  # type: ignore[arg-type]
        try:
            llm.encode(0, prompt, params)
        except ValueError as error:
            assert "json_schema" in str(error), error
            found["refused"] += 1
        else:
            asked.append((schema, params))
    outs = llm.generate([prompt] * len(asked), [params for _, params in asked])
    for (schema, _), out in zip(asked, outs):
        if out["finish_reason"] != "stop":
            found[{"length": "cut"}.get(out["finish_reason"], out.get("notice", "?"))] += 1
            continue
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(out["text"]))
        except Exception as error:
            raise AssertionError(f"{json.dumps(schema)} got {out['text']}: {error}") from error
        found["valid"] += 1
    return found


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", type=Path)
    args = parser.parse_args(None if argv is None else list(argv))
    rng = random.Random(args.seed)
    with LLM(device="cpu", num_pages=4000, page_size=16) as llm:
        print("random:", dict(check(llm, [random_schema(rng) for _ in range(args.count)])))
        if args.suite is not None:
            print("suite: ", dict(check(llm, suite(args.suite))))


if __name__ == "__main__":
    main()
