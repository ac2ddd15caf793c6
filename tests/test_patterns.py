"""Regular expressions take linear time, whatever a client, a model or a file gives them to read."""

from __future__ import annotations

import ast
import importlib
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import minisgl
from minisgl.server.http.access import cors_middleware
from minisgl.server.http.calls import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, CallFormat
from minisgl.server.http.chats import AnswerParser, as_message
from minisgl.server.http.tool_parser import Piece, ToolParser

PACKAGE = Path(minisgl.__file__).parent
METHODS = {"compile", "match", "fullmatch", "search", "split", "sub", "subn", "findall", "finditer"}
GIVEN = {
    ("minisgl.config.rules", "pattern"),  # `spelled`, whose own callers are looked at
    ("minisgl.models.quantization", "name[3:]"),  # of a model's folder, for names of its modules
}


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def method_of(call: ast.Call) -> str | None:
    """Return how a call uses its first argument, if that is a regular expression."""
    match call.func:
        case ast.Attribute(ast.Name("re"), method) if method in METHODS:
            return method
        case ast.Name("spelled"):
            return "fullmatch"
    return None


def uses() -> Iterator[tuple[str, str, ast.expr]]:
    """Yield module, method and pattern of each use of a regular expression."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text("utf-8")
        assert not re.search(r"^\s*(from re import|import re(gex)? as|import regex)", text, re.M)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (method := method_of(node)):
                yield name_of(file), method, node.args[0]


def collected() -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """Return the patterns with their methods, and those that only a run of the program has."""
    known, given = list[tuple[str, str]](), set[tuple[str, str]]()
    for name, method, pattern in uses():
        text = ast.unparse(pattern)
        if (name, text) in GIVEN:
            given.add((name, text))
            continue
        names = [node for node in ast.walk(pattern) if isinstance(node, ast.Name)]
        found = eval(text, vars(importlib.import_module(name)) if names else {})
        known.append((method, found.decode() if isinstance(found, bytes) else found))
    return known, given


def slow_one(patterns: list[tuple[str, str]], seconds: int) -> str | None:
    """Return the pattern that takes all the CPU time there is; None if all are done."""
    program = [sys.executable, "-I", str(Path(__file__).with_name("pumped.py")), str(seconds)]
    done = subprocess.run(program, input=json.dumps(patterns), text=True, stdout=subprocess.PIPE)
    if done.returncode == 0:
        return None
    assert done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    return str(json.loads(done.stdout.splitlines()[-1]))


def test_patterns_take_linear_time() -> None:
    known, given = collected()
    assert given == GIVEN
    middleware, _ = cors_middleware(["http://localhost"])
    known.append(("fullmatch", str(middleware.kwargs["allow_origin_regex"])))
    assert len(known) >= 18
    assert slow_one(known, seconds=20) is None


@pytest.mark.parametrize(
    "pattern",
    [
        r'\{\s*[^\s"}]|(?!\{|[\w.:/-]{1,64}(?:\[\w*\]?\w*)*\s*$)',  # once in the tool parser
        r"(a+)+b",
        r"x(?:a|\w\w?)*-",
        r"<(?:[^>]|=\s)*\s*\s*\s*>",
    ],
)
def test_an_ambiguous_pattern_is_found(pattern: str) -> None:
    assert slow_one([("match", "fine"), ("match", pattern)], seconds=2) == pattern


# ------------------------------------------------------------------ the parsers

FORMS = (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED)
UNITS = ("[a", "[aaaaaa", "a]", "[a]", "[CALL_ID]a", "[ARGS]", "[CALL_ID]", "foo", " ", "\n", "{",
         "{ ", '"', '"\\', '\\"', "[", "{[", '{"a', '{"name"', '{"name" : "', '{"type": ', ',"',
         ": ", '{"name": "foo", ', '{"name": "x" , "arguments" : ', '{"\\"', "<", "<tool_call",
         "<think>", "</think", "[TOOL_CALLS", "; ", "é", "\ud83d")  # fmt: skip
HEADS = ("", "foo", "{", '{"name": "', '{"name": "foo", "arguments": {', '{"arguments": {"a": "')
SIZE = 1000  # characters


def parse_all(form: CallFormat) -> None:
    """Parse each head of a call, whole and by character; nothing is lost where no call is."""
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # CPU time: load changes nothing
    for marker in form.markers:
        for head in HEADS:
            for unit in (*UNITS, marker, marker + "{", marker + '{"\\"'):
                text = marker + head + unit * (SIZE // len(unit)) + "!"
                answers = []
                for size in (1, len(text)):
                    parser, pieces = AnswerParser(True, ToolParser(form, ["foo"])), list[Piece]()
                    for at in range(0, len(text), size):
                        pieces += parser.push(text[at : at + size])
                    message = as_message(pieces + parser.push("", last=True))
                    for call in message.get("tool_calls", ()):
                        del call["id"]
                    answers.append(message)
                assert answers[0] == answers[1], text[:99]
                assert "tool_calls" in answers[0] or answers[0]["content"] == text, text[:99]


@pytest.mark.parametrize("form", FORMS, ids=["hermes", "llama", "mistral", "mistral-named"])
def test_no_head_of_a_call_stops_the_parser(form: CallFormat) -> None:
    """The event loop parses answers: one that is never done ends all of them."""
    process: Any = get_context("fork").Process(target=parse_all, args=(form,))
    process.start()
    process.join()
    assert process.exitcode == 0
