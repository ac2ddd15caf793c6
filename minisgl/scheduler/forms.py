"""The grammars of requests and their compilation, without importing a tensor library.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from itertools import groupby
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from minisgl.config.model import MAX_SIZE
from minisgl.config.paths import read_json
from minisgl.config.rules import refuse
from minisgl.scheduler.messages import InvalidRequestError

MAX_MULTIPLES = 1000  # states for the `multipleOf`s of a schema
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=30_000, step_max_items=1_000,
    max_items_in_row=400, max_lexer_states=10_000, max_grammar_size=20_000, verbose_errors=False,
)  # fmt: skip
# Else a model may answer with spaces indefinitely.
ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
UNFORCED = '%llguidance {"no_forcing": true}'


def check_schema(schema: str) -> None:
    """Raise `ValueError` for options of the compiler, and for `multipleOf`s of many states."""
    if '"x-guidance":' in schema:
        raise ValueError("x-guidance is not supported")
    multiples = re.findall(r'"multipleOf": ([0-9.]+)', schema)
    numbers = [int(n) for each in multiples if (n := each.replace(".", "").strip("0"))]
    if sum(numbers) > MAX_MULTIPLES or math.lcm(*numbers) > 20 * MAX_MULTIPLES:
        why = f"the digits of all multipleOf must add up to {MAX_MULTIPLES} at most, and their"
        raise ValueError(f"{why} least common multiple must be {20 * MAX_MULTIPLES} at most")


def schema_grammar(schema: str) -> str:
    """Convert a JSON schema to llguidance's form."""
    check_schema(schema)
    made = json.loads(LLMatcher.grammar_from_json_schema(schema, defaults=ONE_LINE))
    made["grammars"].insert(0, {"lark_grammar": f"start: @json_schema\n{UNFORCED}"})
    return json.dumps(made)


def regex_grammar(regex: str) -> str:
    """Convert a regular expression to llguidance's form."""
    made = json.loads(LLMatcher.grammar_from_regex(regex))
    made["grammars"][0]["lark_grammar"] += f"\n{UNFORCED}"
    return json.dumps(made)


def choice_grammar(texts: str) -> str:
    """Convert a JSON list of texts to one terminal."""
    return f"start: ONE\nONE{grammar_from('choice', texts).removeprefix('start')}\n{UNFORCED}"


LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:)")


def as_lark(text: str) -> str:
    """Return a grammar in Lark's notation; convert one in llama.cpp's (GBNF)."""
    return text if LARK.search(text) else gbnf_to_lark(text)


def free_grammar(text: str) -> str:
    """Convert a grammar in Lark's or llama.cpp's notation; it embeds no schema."""
    lark = as_lark(text)
    if "%json" in lark:
        raise ValueError("a schema inside of a grammar is not supported, use json_schema")
    if "&" in text or "~" in text:  # three of them in 70 bytes can take 300 MB to compile
        raise ValueError(r"& and ~ are not supported; inside of a text, write \u0026 or \u007e")
    return f"{lark}\n{UNFORCED}"


FORMS: dict[str, Callable[[str], str]] = {
    "json_schema": schema_grammar,
    "json_object": schema_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": free_grammar,
}


def tag_of(text: str) -> dict[str, Any]:
    """Parse a structural tag: its `format` is the tree, its `name` identifies it in errors."""
    try:
        given = json.loads(text)
    except RecursionError:
        given = None
    return given if isinstance(given, dict) else {}


class TagCompiler:
    """A structural tag in Lark's notation for one tokenizer, whose special tokens are not text."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer, self.rules = tokenizer, [r"TEXT: /(.|\n)*/"]

    def lark(self, text: str) -> str:
        """Return the whole grammar; raise `ValueError` that names a node of no known form."""
        check_schema(text)
        start = f"start: {self.expression(tag_of(text).get('format'))}"
        return "\n".join([start, *self.rules, UNFORCED])

    def define(self, body: str, kind: str = "part_{}") -> str:
        """Define a rule, or a terminal, and return its name."""
        name = kind.format(len(self.rules))
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """Return a fixed text: special tokens by their numbers, the rest quoted."""
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        parts = [] if ids else ['""']
        for special, run in groupby(ids, self.tokenizer.is_special_token):
            if special:
                parts += [f"<[{token}]>" for token in run]
            else:
                parts.append(json.dumps(self.tokenizer.decode_str(list(run)), ensure_ascii=False))
        return " ".join(parts)

    def without(self, marker: str) -> str:
        """Define any text without the marker."""
        pattern = re.escape(marker).replace("/", r"\/").replace("\n", "n")
        return self.define(rf"TEXT & ~/(.|\n)*{pattern}(.|\n)*/", "TEXT_{}")

    def until(self, marker: str) -> str:
        """Define any text up to and including the first marker."""
        literal = self.literal(marker)
        if "<[" in literal:
            return f"{self.without(marker)} {literal}"
        return self.define(f"TEXT {literal}", "part_{}[lazy]")

    def expression(self, node: Any) -> str:
        """Return the expression of one node; raise `ValueError` if its form is unknown."""
        match node:
            case {"type": "const_string", "value": str(text)}:
                return self.literal(text)
            case {"type": "any_text"}:
                return "TEXT"
            case {"type": "json_schema", "json_schema": dict(schema)}:
                return self.define("%json " + json.dumps({**schema, "x-guidance": ONE_LINE}))
            case {"type": "sequence", "elements": [_, *_] as parts}:
                return " ".join(map(self.expression, parts))
            case {"type": "or", "elements": [_, *_] as parts}:
                return self.either(parts)
            case {
                "type": "tag",
                "begin": str(begin),
                "content": {"type": "any_text"},
                "end": str(end),
            }:
                return f"{self.literal(begin)} {self.until(end)}"
            case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
                return f"{self.literal(begin)} {self.expression(content)} {self.literal(end)}"
            case {
                "type": "tags_with_separator",
                "tags": [_, *_] as tags,
                "separator": str(between),
            }:
                return self.repeated(node, self.either(tags), f"{self.literal(between)} ", "")
            case {"type": "triggered_tags", "triggers": [str(text)], "tags": [_, *_] as tags} if (
                text
            ):
                return self.triggered(node, text, tags)
        raise ValueError(f"no node of a structural tag that is supported: {node!r:.80}")

    def either(self, nodes: list[Any]) -> str:
        """Define a choice between several nodes."""
        return self.define(" | ".join(map(self.expression, nodes)))

    def repeated(self, node: dict[str, Any], one: str, between: str, end: str) -> str:
        """Return a repetition: one or more, but the node may limit it to one or allow none."""
        many = one if node.get("stop_after_first") else f"{one} ({between}{one})* {end}"
        return many if node.get("at_least_one") else f"({many} | " + (end or '""') + ")"

    def triggered(self, node: dict[str, Any], trigger: str, tags: list[Any]) -> str:
        """Define text with a tag wherever the trigger occurs."""
        begins = [tag.get("begin") if isinstance(tag, dict) else None for tag in tags]
        if not all(isinstance(begin, str) and begin.startswith(trigger) for begin in begins):
            raise ValueError(
                f"each tag must begin with its trigger {trigger!r}, got {begins!r:.80}"
            )
        rest = [{**tag, "begin": tag["begin"][len(trigger) :]} for tag in tags]
        call = self.define(f"{self.until(trigger)} {self.either(rest)}")
        return self.repeated(node, call, "", self.without(trigger))


def compile_grammar(tokenizer: LLTokenizer | str, field: str, text: str) -> LLMatcher:
    """Compile a matcher; raise `InvalidRequestError` that names the field and the reason."""
    try:
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        tag = field == "structural_tag"
        source = TagCompiler(tokenizer).lark(text) if tag else FORMS[field](text)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # of the first token
        if matcher.is_error():  # it never raises
            why = matcher.get_error()
            raise ValueError("no text matches" if why.startswith("NoExtensionBias") else why)
    except Exception as error:  # a client's text must never end the scheduler's loop
        name = f"{tag_of(text).get('name', field)!s:.100}" if field == "structural_tag" else field
        raise InvalidRequestError(f"{name}: {error!s:.500}", param=name) from None
    return matcher


def load_tokens(folder: Path, vocab_size: int, ends: Collection[int]) -> LLTokenizer | str:
    """Load the tokenizer of a model folder for llguidance, or return why it cannot be used."""
    try:
        about = read_json(folder / "tokenizer.json")
        about |= {"truncation": None, "padding": None}  # of the training
        ids = [token["id"] for token in about.get("added_tokens", [])]
        known = about.get("model", {}).get("vocab", ())
        size = max(vocab_size, len(known), *(i + 1 for i in ids))
        if size > MAX_SIZE:
            raise refuse("id", f"below {MAX_SIZE}", size - 1)
        return LLTokenizer(json.dumps(about), n_vocab=size, eos_token=sorted(ends))
    except Exception as error:  # a broken file can raise any error
        return f"the model's tokenizer cannot be used: {error}"
