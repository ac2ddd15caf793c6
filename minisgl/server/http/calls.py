"""Notations of tool calls by model family, and the grammars that enforce them.

Generated from notebooks/12a_tools.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.template_files import chat_templates
from minisgl.tokenizer import THINK


@dataclass(frozen=True)
class CallFormat:
    """Notation of calls: `opening`, calls with a `separator` between them, `closing`."""

    name: str
    markers: tuple[str, ...]  # a call may follow one; grammars use the first
    begin: str  # start of a call, up to its arguments; NAME stands for the function's name
    end: str
    separator: str
    opening: str = ""
    closing: str = ""

    @property
    def after(self) -> list[str]:
        """The texts after a call that are not content: a separator, an end marker."""
        closing = self.end.removeprefix("}") + self.closing
        return [text for text in (self.separator.strip(), closing.strip()) if text]

    def tag(self, name: str, schema: Mapping[str, Any]) -> Node:
        """Make the structural tag of one call of a function."""
        begin = self.begin.replace("NAME", name)
        return {"type": "tag", "begin": begin, "content": json_node(schema), "end": self.end}


def as_object(arguments: str) -> str:
    """Return the beginning of a call that is one JSON object."""
    return f'{{"name": "NAME", "{arguments}": '


MARK, TOOL_CALLS = "<tool_call>", "[TOOL_CALLS]"
HERMES = CallFormat("hermes", (MARK,), f"{MARK}\n{as_object('arguments')}", "}\n</tool_call>", "\n")
LLAMA = CallFormat(
    "llama", ('{"name"', '{"type"', "<|python_tag|>"), as_object("parameters"), "}", "; "
)
MISTRAL = CallFormat(
    "mistral", (TOOL_CALLS,), as_object("arguments"), "}", ", ", f"{TOOL_CALLS}[", "]"
)
MISTRAL_NAMED = CallFormat("mistral", (TOOL_CALLS,), f"{TOOL_CALLS}NAME[ARGS]", "", "")

NO_TOOLS = ("this model's chat template does not show them to it; put a chat_template.jinja that "
            "does into the model's folder, or ask for JSON by response_format")  # fmt: skip


@dataclass(frozen=True)
class ChatAbilities:
    """A model's abilities according to its chat template: thoughts, and the notation of calls."""

    reasoning: bool = False
    calls: CallFormat | None = None
    refusal: str = NO_TOOLS  # the reason for no calls


def call_format(template: str) -> CallFormat | None:
    """Return the notation whose markers are in the template; None if it is not supported."""
    plain = template.replace('\\"', '"')
    if TOOL_CALLS in plain:
        return MISTRAL_NAMED if "[ARGS]" in plain else MISTRAL
    if MARK in plain and not re.search("<function=|<arg_key>", plain):
        return HERMES
    return LLAMA if '"name":' in plain and '"parameters":' in plain else None


def chat_abilities(template: str) -> ChatAbilities:
    """Detect a model's abilities from the text of its chat template."""
    reasoning = THINK in template or "</think>" in template
    if not re.search(r"\btools\b", template):
        return ChatAbilities(reasoning)
    calls = call_format(template)
    return ChatAbilities(reasoning, calls, "the form of this model's calls is not supported")


def read_template(folder: Path) -> str:
    """Read the text of all chat templates of a model; empty if it has none."""
    return "\n".join(chat_templates(folder).values())


Node = dict[str, Any]  # of a structural tag


def json_node(schema: Mapping[str, Any]) -> Node:
    return {"type": "json_schema", "json_schema": schema}


def fixed(text: str) -> Node:
    return {"type": "const_string", "value": text}


def sequence(*nodes: Node) -> Node:
    return {"type": "sequence", "elements": list(nodes)}


def either(*nodes: Node) -> Node:
    return {"type": "or", "elements": list(nodes)}


def after_thoughts(node: Node, gap: str) -> Node:
    """Return the node after a thought, or without one."""
    thought = {"type": "tag", "begin": THINK, "content": {"type": "any_text"}, "end": "</think>"}
    return sequence(either(sequence(thought, fixed(gap)), fixed("")), node)


def only_calls(form: CallFormat, tags: list[Node], single: bool) -> Node:
    """Make a node of one or more calls and nothing else; `single`: exactly one."""
    options = {"separator": form.separator, "at_least_one": True, "stop_after_first": single}
    calls = {"type": "tags_with_separator", "tags": tags, **options}
    return sequence(fixed(form.opening), calls, fixed(form.closing))


def calls_in_text(form: CallFormat, tags: list[Node], single: bool) -> Node:
    """Make a node of free text and calls; `single`: at most one, which ends the answer."""
    begin, end = form.opening, form.closing
    tags = [{**tag, "begin": begin + tag["begin"], "end": tag["end"] + end} for tag in tags]
    options = {"triggers": [form.markers[0]], "stop_after_first": single}
    return {"type": "triggered_tags", "tags": tags, **options}


def constraint(
    form: CallFormat, schemas: Mapping[str, Mapping[str, Any]], required: bool, single: bool,
    reasoning: bool = False, answer: Mapping[str, Any] | None = None,
) -> Node:  # fmt: skip
    """Make a structural tag for an answer that may call these functions.

    required: calls and nothing else; single: at most one. reasoning: a thought may come first.
    answer: the schema of an answer without calls.
    """
    tags = [form.tag(name, schema) for name, schema in schemas.items()]
    node, gap = only_calls(form, tags, single), "\n\n"
    if not required and answer is not None:
        node = either(node, json_node(answer))
    elif not required:
        node, gap = calls_in_text(form, tags, single), ""
    return after_thoughts(node, gap) if reasoning else node
