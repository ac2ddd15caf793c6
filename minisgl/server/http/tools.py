"""Tools in a client's request, and the rules for an answer's calls.

Generated from notebooks/12a_tools.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from msgspec.msgpack import encode
from pydantic import AfterValidator, BaseModel, Field

from minisgl.core import MAX_GRAMMAR, json_text
from minisgl.server.http.calls import (
    CallFormat,
    ChatAbilities,
    after_thoughts,
    constraint,
    json_node,
)
from minisgl.tokenizer import check_unicode

# JSON can hold an unpaired surrogate; our messages cannot.
Text = Annotated[str, AfterValidator(partial(check_unicode, "text"))]


def sendable(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given`, or raise ValueError if our messages cannot encode it."""
    try:
        encode(given)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no message can hold it ({error})") from None
    return given


Object = Annotated[dict[str, Any], AfterValidator(sendable)]

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,64}$")]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Complete a schema of arguments, which are always an object."""
    if schema.get("type", "object") != "object":
        raise ValueError(f"must describe an object, got type {schema['type']!r:.80}")
    return {**schema, **ANY_OBJECT}


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: Annotated[Object, AfterValidator(object_schema)] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; functions are the only supported kind."""

    type: Literal["function"]
    function: FunctionSpec

    def as_template_input(self) -> dict[str, Any]:
        """Return the tool in the form of training data: name, description, parameters."""
        about = self.function.model_dump(exclude_none=True, exclude={"strict"})
        about.setdefault("parameters", {**ANY_OBJECT, "properties": {}})
        return {"type": "function", "function": about}


class FunctionName(BaseModel):
    name: Text


class FunctionChoice(BaseModel):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=128)]


class AllowedChoice(BaseModel):
    """The choice of some functions; the prompt still has all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


@dataclass(frozen=True)
class ToolRules:
    """Rules for calls. `tools` are in the prompt, `callable` may be called."""

    form: CallFormat | None = None
    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    single: bool = False

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.callable]

    def structural_tag(self, reasoning: bool, answer: dict[str, Any] | None = None) -> str | None:
        """Return a grammar that guarantees the rules; None if there is nothing to guarantee.

        `answer` is the schema of an answer without calls, if there is one.
        """
        if self.form is None:
            if not (reasoning and answer):
                return None
            return as_tag(after_thoughts(json_node(answer), "\n\n"), "response_format")
        fewer = len(self.callable) < len(self.tools)
        strict = any(tool.function.strict for tool in self.callable)
        if not (self.required or self.single or fewer or strict or answer):
            return None
        schemas = {
            tool.function.name: tool.function.parameters or ANY_OBJECT
            if self.required or tool.function.strict
            else ANY_OBJECT
            for tool in self.callable
        }
        node = constraint(self.form, schemas, self.required, self.single, reasoning, answer)
        return as_tag(node, "tools")


def as_tag(node: dict[str, Any], field: str) -> str:
    """Make a structural tag whose errors name the field from which it was made."""
    text = json_text({"type": "structural_tag", "name": field, "format": node})
    if len(text) > 4 * MAX_GRAMMAR:
        raise ValueError(f"{field}: at most {4 * MAX_GRAMMAR} characters of schemas can be kept to")
    return text


def choose(choice: ToolChoice | None, tools: list[Tool]) -> tuple[list[Tool], bool, bool]:
    """Return the callable tools, whether a call is required, and whether at most one may be."""
    if isinstance(choice, str | None):
        return tools, choice == "required", False
    named = isinstance(choice, FunctionChoice)
    wanted = [choice] if isinstance(choice, FunctionChoice) else choice.allowed_tools.tools
    names = {one.function.name for one in wanted}
    if unknown := names - {tool.function.name for tool in tools}:
        raise ValueError(f"tool_choice: {min(unknown)!r:.80} is none of the tools")
    required = isinstance(choice, FunctionChoice) or choice.allowed_tools.mode == "required"
    return [tool for tool in tools if tool.function.name in names], required, named


MAX_TOOL_BYTES = 256 * 1024  # for all tools of a request together


def tool_rules(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, can: ChatAbilities
) -> ToolRules:
    """Make the rules of one request; raise a `ValueError` that begins with the invalid field."""
    if not tools and choice not in (None, "none", "auto"):
        raise ValueError("tool_choice: needs tools, and none are given")
    if not tools:
        return ToolRules()
    if (size := len(encode([tool.model_dump() for tool in tools]))) > MAX_TOOL_BYTES:
        raise ValueError(f"tools: at most {MAX_TOOL_BYTES} bytes in all, got {size}")
    if choice == "none":
        return ToolRules()
    if can.calls is None:
        raise ValueError(f"tools: {can.refusal}")
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tools: more than one function is called {min(twice)!r:.80}")
    callable_, required, named = choose(choice, tools)
    single = named or parallel is False
    return ToolRules(can.calls, tuple(tools), tuple(callable_), required, single)


class NamedSchema(BaseModel):
    """A schema with OpenAI's name for it, which has no effect."""

    content: Object = Field(alias="schema")


class ResponseFormat(BaseModel, extra="forbid"):
    """OpenAI's field for structured output."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    content: Object | None = Field(default=None, alias="schema")  # llama.cpp puts it here

    def asked(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams`; a schema counts with any type."""
        schema = self.content if self.json_schema is None else self.json_schema.content
        if schema is not None or self.type == "json_schema":
            return {"json_schema": schema}
        return {"json_object": True} if self.type == "json_object" else {}
