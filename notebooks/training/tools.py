"""Conversations with tools: choose one, fill in its arguments, report its result.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from training.data import Phrasing, Turn, fill, number, pick_style
from training.phrases import (
    CORES,
    NEW_PHRASINGS,
    SUBJECTS,
    Patterns,
    choose,
    compose,
    expand,
    is_held_out,
)
from training.records import VALUES, as_json, object_schema, said
from training.tables import TABLES
from training.words import any_word, noun, pseudo_word

CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"


@dataclass(frozen=True)
class Tool:
    """A function of the client, and users' phrasings of requests for it."""

    topic: str  # tools of one topic are not offered together
    name: str
    schema: dict[str, Any]  # as clients send it
    kinds: dict[str, str]  # parameter: kind of its value
    cores: Patterns


def make_schema(rng: Random, name: str, about: str, kinds: dict[str, str]) -> dict[str, Any]:
    """Make a tool's JSON in OpenAI's form; parameters may lack descriptions, as with clients."""
    parameters = object_schema(kinds, rng)
    parameters.setdefault("required", list(kinds))
    if rng.random() < 0.4:
        for key, schema in parameters["properties"].items():
            schema["description"] = f"The {key}"
    if rng.random() < 0.1:  # an option that no question mentions
        parameters["properties"]["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    verb = rng.choice(("Get", "Return", "Gives", "Tool for", ""))
    text = f"{verb} {about}".strip()
    function: dict[str, Any] = {"name": name, "description": text[0].upper() + text[1:]}
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function | {"parameters": parameters}}


def camel(name: str) -> str:
    """Convert `get_weather` to `getWeather`."""
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def make_tool(rng: Random) -> Tool:
    """Sample one of the common tools, or one that is named after a noun."""
    if rng.random() < 0.6:
        index = rng.randrange(len(TABLES["tools"]["common"]))
        found = TABLES["tools"]["common"][index]
        kinds = {choose(rng, key): kind for key, kind in found["parameters"]}
        names, about = found["name"], found["about"]
        cores = CORES[found["cores_of"]] if "cores_of" in found else found["cores"]
        computes = {"number", "expression"} & set(kinds.values())
        topic = "arithmetic" if computes else f"tool {index}"
    else:
        names, about, cores = TABLES["tools"]["any"].values()
        word = rng.choice((noun(rng), rng.choice(SUBJECTS), pseudo_word(rng))).split()[0]
        parameter = rng.choice(("name", "city", "item", "user", "key", "animal"))
        kind = {"item": "thing", "user": "name", "key": "topic"}.get(parameter, parameter)
        words = {"{w}": word, "{p}": parameter}
        names, about = (re.sub(r"\{\w\}", lambda m: words[m[0]], t) for t in (names, about))
        cores = {form: [t.replace("{w}", word) for t in texts] for form, texts in cores.items()}
        topic, kinds = word, {parameter: kind}
    name = choose(rng, names)
    name = camel(name) if rng.random() < 0.1 else name
    return Tool(topic, name, make_schema(rng, name, choose(rng, about), kinds), kinds, cores)


def some_tools(rng: Random, count: int) -> list[Tool]:
    """Sample tools of different topics and names."""
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = make_tool(rng)
        if tool.name not in {other.name for other in tools.values()}:
            tools.setdefault(tool.topic, tool)
    return list(tools.values())


Arguments = dict[str, Any]


def call_text(name: str, arguments: Arguments) -> str:
    """Write a call in the model's notation."""
    return f"{CALL}\n{as_json({'name': name, 'arguments': arguments})}\n{END_CALL}"


def request(rng: Random, tool: Tool, phrasing: Phrasing = "known") -> tuple[str, Arguments]:
    """Sample a user's request that needs the tool, and the arguments of that call."""
    values = {key: VALUES[kind](rng) for key, kind in tool.kinds.items()}
    if phrasing == "new phrasing" and "noun" in tool.cores:
        core = expand(rng, rng.choice(tool.cores["noun"]))
        text = rng.choice(NEW_PHRASINGS["tool"]).replace("*", core[:1].lower() + core[1:])
    else:
        text = compose(rng, tool.cores, "", phrasing == "new pair")
    style = pick_style(rng)
    style = str if style is str.upper else style
    if style is str.lower and rng.random() < 0.7:
        values = {key: v.lower() if isinstance(v, str) else v for key, v in values.items()}
    return fill(rng, text, style, *map(str, values.values())), values


def result(rng: Random) -> str:
    """Sample a tool's response: a number, words, JSON, or an error."""
    kind = rng.random()
    text = choose(rng, rng.choice(TABLES["tools"]["results"]["words"]))
    if kind < 0.3:
        return str(VALUES["number"](rng))
    if kind < 0.55:
        return (
            text
            if rng.random() < 0.6
            else " ".join(any_word(rng) for _ in range(rng.randint(1, 5)))
        )
    if kind < 0.6:
        return as_json({"error": text})
    if kind < 0.65:
        return as_json([any_word(rng) for _ in range(rng.randint(1, 4))])
    keys = (
        "result",
        "value",
        "temperature",
        "unit",
        "city",
        "name",
        "status",
        "price",
        "time",
        "age",
    )
    makers = [
        lambda: number(rng),
        lambda: text,
        lambda: any_word(rng),
        lambda: VALUES["number"](rng),
    ]
    return as_json(
        {key: rng.choice(makers)() for key in rng.sample(keys, rng.choice((1, 1, 2, 3)))}
    )


def tell(response: str) -> str:
    """Write the model's report of a tool's response."""
    try:
        found = json.loads(response)
    except ValueError:
        return f"The answer is {response.rstrip('.')}."
    if isinstance(found, dict) and "error" in found:
        return f"The tool failed: {found['error']}."
    if isinstance(found, dict) and found:
        text = said(
            [f"the {key} is {as_json(value).strip(chr(34))}" for key, value in found.items()]
        )
        return f"T{text[1:]}."
    if isinstance(found, list) and found:
        return f"The answer is {said([as_json(one).strip(chr(34)) for one in found])}."
    return f"The answer is {as_json(found).strip(chr(34))}."


Message = dict[str, Any]  # a client's message, or "tools" with the list of functions


def calls(tool: Tool, arguments: list[Arguments]) -> Message:
    """Build an assistant's message that calls a tool, once or several times."""
    functions = [{"name": tool.name, "arguments": one} for one in arguments]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def both(rng: Random, tool: Tool) -> tuple[str, list[Arguments]]:
    """Sample a request for two calls of a tool with one parameter."""
    first, one = request(rng, tool)
    key, shown = next((key, str(value)) for key, value in one.items())
    other = VALUES[tool.kinds[key]](rng)
    spot = first.lower().rfind(shown.lower())
    second = str(other).lower() if first[spot : spot + len(shown)] != shown else str(other)
    text = (
        f"{first[:spot]}{first[spot : spot + len(shown)]} and {second}{first[spot + len(shown) :]}"
    )
    return text, [one, {key: other}]


def call_turn(
    rng: Random, tools: list[Tool], held_out: bool = False, phrasing: Phrasing = "known"
) -> tuple[Turn, list[Message]]:
    """Sample a turn that calls a tool, with its messages: question, call, responses, answer."""
    while True:
        tool = rng.choice(tools)
        question, arguments = request(rng, tool, phrasing)
        every = [arguments]
        if phrasing == "known" and len(tool.kinds) == 1 and rng.random() < 0.1:
            question, every = both(rng, tool)
        key = f"tool {tool.name} {every}" if tool.kinds else ""
        if is_held_out(key) == held_out:
            break
    responses = [result(rng) for _ in every]
    text = "\n".join(call_text(tool.name, one) for one in every)
    messages: list[Message] = [{"role": "user", "content": question}, calls(tool, every)]
    messages += [{"role": "tool", "content": response} for response in responses]
    messages.append({"role": "assistant", "content": " ".join(map(tell, responses))})
    return Turn("tool call", question, text, key), messages
