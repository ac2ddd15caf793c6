"""Answers in JSON: facts from a text, lists, and other tasks' answers under a key.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from training.data import Phrasing, Turn, ask, draw, list_items, listed, number, pick_style
from training.phrases import choose, is_held_out
from training.tables import TABLES
from training.talk import subject
from training.words import (
    ANIMALS,
    CITIES,
    COLORS,
    CURRENCIES,
    EVENTS,
    FRUITS,
    LANGUAGES,
    NAMES,
    PEOPLE,
    ROOMS,
    THINGS,
    WEEKDAYS,
    any_word,
    pseudo_word,
)


def one_of(*pools: Sequence[str]) -> Callable[[Random], str]:
    """Make a function that samples words from these lists; one in seven is invented."""

    def make(rng: Random) -> str:
        word = rng.choice(rng.choice(pools))
        if rng.random() < 0.85:
            return word
        return pseudo_word(rng).title() if word[0].isupper() else pseudo_word(rng)

    return make


def decimal(rng: Random) -> float:
    """Sample a number with one or two digits after its point."""
    return number(rng, (1, 2, 3)) + rng.randint(1, 99) / 100


def iso_day(rng: Random) -> str:
    """Sample a date such as "2031-10-16"."""
    return f"20{number(rng, (2,))}-{rng.randint(10, 12)}-{rng.randint(10, 28)}"


VALUES: dict[str, Callable[[Random], Any]] = {
    "name": one_of(NAMES),
    "city": one_of(CITIES),
    "job": one_of(PEOPLE),
    "color": lambda rng: rng.choice(COLORS),
    "food": lambda rng: rng.choice(FRUITS),
    "animal": one_of(ANIMALS),
    "thing": one_of(THINGS, FRUITS, ANIMALS),
    "event": lambda rng: rng.choice(EVENTS),
    "room": lambda rng: rng.choice(ROOMS),
    "language": lambda rng: rng.choice(LANGUAGES),
    "currency": lambda rng: rng.choice(CURRENCIES),
    "day": lambda rng: rng.choice((rng.choice(WEEKDAYS), iso_day(rng))),
    "int": lambda rng: number(rng, (1, 2, 2, 3)),
    "number": lambda rng: number(rng, (1, 2, 2, 3)) if rng.random() < 0.9 else decimal(rng),
    "money": lambda rng: number(rng, (1, 2, 3)) if rng.random() < 0.7 else decimal(rng),
    "bool": lambda rng: rng.random() < 0.5,
    "names": lambda rng: rng.sample(NAMES, rng.choice((1, 2, 2, 3))),
    "topic": subject,
    "quoted": lambda rng: " ".join(any_word(rng) for _ in range(rng.randint(1, 5))),
    "file": lambda rng: f"{any_word(rng)}.{rng.choice(('txt', 'md', 'csv', 'json'))}",
    "expression": lambda rng: f"{number(rng)} {rng.choice('+-*/')} {number(rng)}",
}  # fmt: skip
JSON_TYPES = {"int": "integer", "number": "number", "money": "number", "bool": "boolean"}


def as_json(value: Any) -> str:
    """Encode JSON in the form of the server's grammar: one line, a space after comma and colon."""
    return json.dumps(value, ensure_ascii=False)


def said(value: Any) -> str:
    """Format a value for a sentence."""
    if isinstance(value, bool):
        return "" if value else "not "
    if isinstance(value, list):
        return " and ".join(filter(None, [", ".join(value[:-1]), value[-1]]))
    return str(value)


def type_of(kind: str) -> dict[str, Any]:
    """Return the JSON schema of a kind of value."""
    if kind == "names":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": JSON_TYPES.get(kind, "string")}


def object_schema(fields: dict[str, str], rng: Random) -> dict[str, Any]:
    """Make a JSON schema of an object with these fields and kinds, in clients' form."""
    titled = rng.random() < 0.3  # as pydantic does
    properties = {
        name: ({"title": name.title()} if titled else {}) | type_of(kind)
        for name, kind in fields.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(fields)
    return schema | ({"additionalProperties": False} if rng.random() < 0.2 else {})


Facts = dict[str, tuple[str, Any]]  # name of a field: the kind of its value, and the value


def first_choice(rng: Random, pattern: str) -> str:
    """Return the first alternative: a field's name if the request does not give one."""
    return pattern.strip("[]").split("|")[0]


def make_text(rng: Random, named: Callable[[Random, str], str] = choose) -> tuple[str, Facts]:
    """Write a text about a person, product or event; return its facts by field too."""
    name, kind, head, fields = rng.choice(TABLES["texts"]["subjects"]).values()
    value = VALUES[kind](rng)
    facts: Facts = {named(rng, name): (kind, value)}
    clauses = []
    for field in rng.sample(fields, rng.randint(1, min(4, len(fields)))):
        names, field_kind, ways = TABLES["texts"]["fields"][field].values()
        key, found = named(rng, names), VALUES[field_kind](rng)
        if key not in facts:
            facts[key] = (field_kind, found)
            clauses.append(rng.choice(ways).replace("{v}", said(found)))
    form, start = rng.random(), choose(rng, head).replace("{v}", value)
    if form < 0.15:
        lines = [f"{key}: {said(found) if found not in (True, False) else as_json(found)}"
                 for key, (_, found) in facts.items()]  # fmt: skip
        return "\n".join(lines), facts
    if form < 0.6 or len(clauses) == 1:
        return f"{start} {said(clauses)}.", facts
    pronoun = rng.choice(("He", "She")) if kind == "name" else "It"
    return " ".join(
        [f"{start} {clauses[0]}."] + [f"{pronoun} {one}." for one in clauses[1:]]
    ), facts


def keys_text(rng: Random, keys: Sequence[str]) -> str:
    """List the requested keys in a user's words."""
    quote = rng.choice(("{}", "{}", "{}", '"{}"', "`{}`"))
    shown = [quote.format(key) for key in keys]
    article = "the " if rng.random() < 0.2 else ""
    return article + (said(shown) if rng.random() < 0.7 else ", ".join(shown))


def read_text(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a text whose facts go into a JSON object with the requested keys."""
    form = rng.random() if phrasing == "known" else 0.3
    text, facts = make_text(rng, first_choice if 0.6 <= form < 0.75 else choose)
    keys = list(facts)
    if form < 0.6:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
        keys = keys if rng.random() < 0.3 else [key for key in facts if key in keys]
    found: dict[str, Any] = {key: facts[key][1] for key in keys}
    if form < 0.03:
        found[rng.choice(("phone", "email", "country", "year"))] = None
    schema = object_schema({key: facts[key][0] for key in keys}, rng)
    blank = {key: 0 if isinstance(value, int) else "" for key, value in found.items()}
    typed = {key: schema["properties"][key]["type"] for key in keys if key in facts}
    shape = as_json(rng.choice((schema, schema, blank, typed)))
    name = ("json" if form < 0.45 else "json schema" if form < 0.6 else
            "json all" if form < 0.75 else "json unasked")  # fmt: skip
    style = str.lower if rng.random() < 0.15 else str
    question = ask(rng, name, style, phrasing, text, keys_text(rng, list(found)), shape)
    given = '{"' if name == "json unasked" else ""
    return Turn("json", question, as_json(found), f"json {sorted(map(str, found.values()))}", given)


def number_or_text(text: str) -> Any:
    """Convert digits to an integer; return any other text as it is."""
    return int(text) if text.isdigit() and (text == "0" or text[0] != "0") else text


def json_list(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a list of items to write as a JSON array."""
    items = list_items(rng, rng.randint(1, 7))
    question = ask(rng, "json list", pick_style(rng), "known", listed(rng, items))
    return Turn(
        "json", question, as_json([number_or_text(item) for item in items]), f"json {items}"
    )


LIST_TASKS = ("sort", "sort down", "sort words", "reverse list")
KEYS = {
    "add": ("sum", "total", "number"),
    "copy": ("text", "copy"),
    "reverse word": ("word", "reversed"),
}


def wrapped(rng: Random, held_out: bool = False) -> Turn:
    """Wrap the answer of another task under one key of a JSON object."""
    task = rng.choice((*KEYS, *LIST_TASKS))
    turn = draw(rng, task, held_out)
    value: Any = number_or_text(turn.answer.split(" = ")[-1] if task == "add" else turn.answer)
    if task in LIST_TASKS:
        value = [number_or_text(item) for item in turn.answer.split(", ")]
    elif task != "add":
        value = turn.answer
    names = KEYS.get(task, ("items", "list", "numbers", "values"))
    key = rng.choice(names if rng.random() < 0.4 else ("answer", "result", "output", "value"))
    wish = choose(rng, "[Answer|Reply|Respond|Return the result] [in|as] JSON with [the key |key "
        "|the "
                  f"field |]{key}.")  # fmt: skip
    given = '{"' if task != "copy" and rng.random() < 0.3 else ""
    question = (
        turn.question
        if given
        else rng.choice((f"{turn.question}\n{wish}", f"{wish}\n{turn.question}"))
    )
    return replace(turn, task="json", question=question, answer=as_json({key: value}), given=given)


def draw_json(rng: Random, held_out: bool = False) -> Turn:
    """Sample a question whose answer is JSON, from the chosen split."""
    while True:
        kind = rng.random()
        turn = (
            read_text(rng)
            if kind < 0.6
            else json_list(rng)
            if kind < 0.7
            else wrapped(rng, held_out)
        )
        if is_held_out(turn.key) == held_out and len(turn.question) < 1500:
            return turn
