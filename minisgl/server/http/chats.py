"""The parts of a chat's answer, thoughts, content and calls, and their form in OpenAI's API.

Generated from notebooks/12a_tools.ipynb: edit there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.tool_parser import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    ToolParser,
)
from minisgl.server.http.tools import Object, Text, Tool, ToolChoice, ToolRules, tool_rules
from minisgl.tokenizer import THINK, THOUGHT, drop_blank, overlap, skip_blank


class AnswerParser:
    """Splits an answer into thoughts, if the model has any, then content and calls.

    If `show_thoughts` is false, thoughts are left out.
    """

    def __init__(
        self, reasoning: bool = False, tools: ToolParser | None = None, show_thoughts: bool = True
    ) -> None:
        self.tools, self.show_thoughts, self.pieces = tools, show_thoughts, list[Piece]()
        self.buffer, self.opened = "", False
        self.total = self.rest = 0  # characters of the answer, and those after the thought
        self.state = self._start if reasoning else self._rest

    def push(self, text: str, last: bool = False, thinking: bool = False) -> list[Piece]:
        """Parse more of the answer. `thinking`: the prompt ended inside a thought."""
        self.buffer, self.total = self.buffer + text, self.total + len(text)
        if self.state == self._start:
            self.opened = self.opened or thinking
        while self.state(last):
            pass
        pieces, self.pieces = self.pieces, []
        return pieces

    def reason(self, finish_reason: str | None) -> str | None:
        """Return OpenAI's name of the reason for the answer's end."""
        called = self.tools is not None and self.tools.calls > 0
        return "tool_calls" if called and finish_reason == "stop" else finish_reason

    def _start(self, last: bool) -> bool:
        """Skip white space and the marker that opens a thought, if they are there."""
        body = skip_blank(self.buffer)
        if body.startswith(THINK):
            self.buffer, self.opened = body[len(THINK) :], True
        elif THINK.startswith(body) and not last:
            return False
        elif self.opened:
            self.buffer, self.state = body, self._thought
        else:
            self.state = self._rest
        return True

    def _thought(self, last: bool) -> bool:
        """Parse a thought up to its end marker, without trailing white space."""
        text, end = self.buffer, self.buffer.find(THOUGHT)
        certain = (
            text[:end] if end >= 0 else text[: len(text) - (not last) * overlap(text, THOUGHT)]
        )
        if (certain := drop_blank(certain)) and self.show_thoughts:
            self.pieces.append(Reasoning(certain))
        self.buffer = text[end + len(THOUGHT) :] if end >= 0 else text[len(certain) :]
        self.state = self._gap if end >= 0 else self._thought
        return end >= 0

    def _gap(self, last: bool) -> bool:
        """Skip white space between thought and answer."""
        self.buffer = self.buffer.lstrip()
        self.state = self._rest if self.buffer or last else self._gap
        return self.state == self._rest

    def _rest(self, last: bool) -> bool:
        text, self.buffer = self.buffer, ""
        self.rest += len(text)
        if self.tools is not None:
            self.pieces += self.tools.push(text, last)
        elif text:
            self.pieces.append(Content(text))
        return False


def as_delta(piece: Piece) -> dict[str, Any]:
    """Format one piece as the delta of a chunk."""
    match piece:
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}


def as_message(pieces: list[Piece]) -> dict[str, Any]:
    """Format all pieces of an answer as a message."""
    texts: dict[Any, list[str]] = {Content: [], Reasoning: []}  # by type, or by call
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            texts.setdefault(getattr(piece, "call", type(piece)), []).append(piece.text)
    for index, call in enumerate(calls):
        call["function"]["arguments"] = "".join(texts.get(index, ()))
    content = "".join(texts[Content]) or (None if calls else "")
    extra = {"reasoning_content": "".join(texts[Reasoning]), "tool_calls": calls}
    said = {name: value for name, value in extra.items() if value}
    return {"role": "assistant", "content": content, "refusal": None, **said}


class TextPart(BaseModel):
    """One text part of a message; images and sound are refused by their type."""

    type: Literal["text"]
    text: Text


class RefusalPart(BaseModel):
    """An assistant's refusal as a text part."""

    type: Literal["refusal"]
    refusal: Text


class CalledFunction(BaseModel):
    """A call by the model, with its arguments as text or as an object."""

    name: Text
    arguments: Text | Object | None = None


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart | RefusalPart] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name for the same
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None
    function_call: None = None

    @model_validator(mode="after")
    def check_role(self) -> Self:
        """Check that only an assistant has calls, and that a result names its call."""
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant has some, not role {self.role!r}")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id: a tool's message must name the call that it answers")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """Return the message in the form for `check_messages` of chapter 06b."""
        hidden = {"function_call"} | (set() if self.role == "tool" else {"name"})
        found = self.model_dump(exclude=hidden, exclude_none=True)
        return {"content": None, **{name: value for name, value in found.items() if value}}


class ToolFields(BaseModel):
    """Fields of a chat for the calls and the thoughts in its answer."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the content
    include_reasoning: bool | None = None  # vLLM's: false drops them
    _rules: ToolRules = PrivateAttr(ToolRules())
    _form: dict[str, Any] = PrivateAttr({})
    _thinks: bool = PrivateAttr(False)

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Prompt of the model."""
        return self._rules.tools

    @property
    def thoughts_apart(self) -> bool:
        return self._thinks and self.separate_reasoning is not False

    def decide(self, can: ChatAbilities, form: dict[str, Any]) -> None:
        """Set the rules for calls, and the answer's required form: `_form`. Call it first.

        `form` has the other constraints on the answer, as fields of `SamplingParams`. Raises a
        `ValueError` that begins with the invalid field.
        """
        if self.tools or self.tool_choice:
            self._rules = tool_rules(self.tools, self.tool_choice, self.parallel_tool_calls, can)
        schema = {"type": "object"} if form.get("json_object") else form.get("json_schema")
        schema = schema if isinstance(schema, dict) else None
        tag = None
        if self._rules.form is not None or (can.reasoning and schema):
            tag = self._rules.structural_tag(can.reasoning, schema)
        if tag and form and schema is None:
            raise ValueError(f"{min(form)}: not together with what is asked of the tools")
        self._form = form if tag is None else {"structural_tag": tag}
        self._thinks = can.reasoning and not self._form.keys() - {"structural_tag"}

    def parser(self) -> AnswerParser:
        """Make the parser of one answer."""
        rules = self._rules
        tools = None if rules.form is None else ToolParser(rules.form, rules.names)
        return AnswerParser(self.thoughts_apart, tools, self.include_reasoning is not False)
