"""Texts on which an ambiguous regular expression takes very long; a program that tries them."""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

PARSER: Any = importlib.import_module("re._parser")
SIZE = 20_000  # characters of a text
ENDS = ("", "!", "\0")  # what a pattern does not expect makes it go back and try other ways
LETTERS = {"WORD": "a", "DIGIT": "0", "SPACE": " "}  # of classes
MOST = 6  # letters that are combined
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def parts(node: Any) -> list[Any]:
    """Return the sequences inside of a node."""
    kind, value = str(node[0]), node[1]
    if kind == "BRANCH":
        return list(value[1])
    if kind in (*REPEATS, "SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return [value[-1]]
    return [value] if kind == "ATOMIC_GROUP" else []


def letters(node: Any) -> list[str]:
    """Return characters that a node without parts matches, one of each of its classes."""
    kind, value = str(node[0]), node[1]
    if kind == "LITERAL":
        return [chr(value)]
    if kind == "RANGE":
        return [chr(value[0])]
    if kind == "CATEGORY":
        return [LETTERS.get(str(value).removeprefix("CATEGORY_"), "~")]
    if kind == "IN" and str(value[0][0]) != "NEGATE":
        return [one for item in value for one in letters(item)]
    return ["a"] if kind in ("IN", "NOT_LITERAL", "ANY") else []


def words(nodes: Iterable[Any]) -> list[str]:
    """Return what texts for these nodes are made of; adjacent characters are one word."""
    found, run = list[str](), ""
    for node in nodes:
        if str(node[0]) == "LITERAL":
            run += chr(node[1])
            continue
        inside = [word for part in parts(node) for word in words(part)]
        found += [run, *letters(node), *inside]
        run = ""
    return list(dict.fromkeys(word for word in [*found, run] if word))


def shortest(nodes: Iterable[Any]) -> str:
    """Return a short text that these nodes match."""
    text = ""
    for node in nodes:
        kind = str(node[0])
        if kind.startswith("ASSERT"):
            continue
        inside = parts(node)
        one = shortest(inside[0]) if inside else "".join(letters(node)[:1])
        text += one * node[1][0] if kind in REPEATS else one
    return text


def places(nodes: Iterable[Any], before: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield for each repeat a text that leads to it, and the words of it and of what follows."""
    nodes = list(nodes)
    for at, node in enumerate(nodes):
        if str(node[0]) in REPEATS:
            yield before, words([node, *nodes[at + 1 :]])[:MOST]
        for part in parts(node):
            yield from places(part, before)
        before += shortest([node])


def pumped(pattern: str) -> Iterator[str]:
    """Yield texts made of each few words that a part of the pattern is made of, repeated."""
    tree = PARSER.parse(pattern)
    for before, some in dict.fromkeys((b, tuple(w)) for b, w in [*places(tree), ("", words(tree))]):
        for count in (1, 2, 3) if len(some) <= MOST else (1, 2):
            for unit in map("".join, product(some, repeat=count)):
                for end in ENDS:
                    yield before + unit * (SIZE // len(unit)) + end


def main() -> None:
    """Try [method, pattern]s; print each before, so that the last one is slow if time runs out."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # of CPU time, whatever the load
    for method, pattern in json.load(sys.stdin):
        print(json.dumps(pattern), flush=True)
        run = getattr(re.compile(pattern), "match" if method == "compile" else method)
        for text in pumped(pattern):
            if method in ("sub", "subn"):
                run("", text)
            elif method == "finditer":
                list(run(text))
            else:
                run(text)


if __name__ == "__main__":
    main()
