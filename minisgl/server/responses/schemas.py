"""Request bodies of `/v1/responses`, and their translation to a chat.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, model_validator

from minisgl.core import MAX_LOGPROBS
from minisgl.server.http.bodies import validator_of
from minisgl.server.http.chats import RefusalPart
from minisgl.server.http.schemas import ChatRequest, Limit, joined_text
from minisgl.server.http.tools import FunctionSpec, Object, Text


class Part(BaseModel):
    """A piece of text; pictures, files and sound are refused by their type."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: Text


class Message(BaseModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[Part | RefusalPart]


class ReasoningItem(BaseModel):
    """A model's thoughts before text or a call."""

    type: Literal["reasoning"]
    summary: list[Part] = []
    content: list[Part] | None = None
    encrypted_content: None = None


class FunctionCall(BaseModel):
    """A function call of the model; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutput(BaseModel):
    """Result of a called function."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[Part]


class ItemReference(BaseModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: Text


def with_type(item: Any) -> Any:
    """Add the type of an item that has none."""
    if not isinstance(item, Mapping) or item.get("type"):
        return item
    return {**item, "type": "message" if "role" in item else "item_reference"}


Item = Annotated[
    Message | ReasoningItem | FunctionCall | FunctionCallOutput | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(with_type),
]
read_items = TypeAdapter(list[Item]).validate_python


def as_chat_message(item: Item) -> dict[str, Any]:
    """Convert one item to a message of a chat."""
    match item:
        case Message():
            return {"role": item.role, "content": joined_text(item.content)}
        case ReasoningItem():
            thoughts = joined_text(item.content or item.summary)
            return {"role": "assistant", "reasoning_content": thoughts}
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case FunctionCallOutput():
            content = joined_text(item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    raise TypeError(f"item: a reference must be looked up before, got {item!r:.80}")


def as_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Join items to messages of a chat: an assistant's thoughts, text and calls are one message."""
    messages: list[dict[str, Any]] = []
    for message in map(as_chat_message, items):
        last = messages[-1] if messages else {}
        if not last.get("role") == message["role"] == "assistant":
            messages.append(message)
        elif "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif last.keys() == {"role", "reasoning_content"}:
            last.update(message)
        else:
            messages.append(message)
    return messages


Short = Annotated[Text, Field(max_length=64)]
Value = Annotated[Text, Field(max_length=512)]


class Fields(BaseModel, serialize_by_alias=True):
    """Fields of a request, for which a null means the default."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Strict(Fields, extra="forbid"):
    """Options in which an unknown name is an error."""


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    content: Object | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """Options of thinking; thoughts are never summarised."""

    effort: Short | None = None
    summary: Literal["auto"] | None = None


class NamedTool(Strict):
    """A function by its name."""

    type: Literal["function"]
    name: Text

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as a chat has it, one level deeper."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class AllowedTools(Strict):
    """The model sees all tools and may call some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]

    def as_chat(self) -> dict[str, Any]:
        tools = [tool.as_chat() for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}


class FunctionTool(NamedTool, FunctionSpec):
    """A client's function that the model may call."""


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Fields, extra="allow"):
    """Body of `POST /v1/responses`; a field that is not listed means what it means in a chat."""

    input: Text | list[Item]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    model: str | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: dict[Literal["include_obfuscation"], Literal[False] | None] = {}  # no padding
    store: bool = True
    user: Annotated[Text, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[Short, Value], Field(max_length=16)] = {}
    max_tool_calls: Limit | None = None  # of tools that run at the server: there are none
    safety_identifier: Value | None = None
    prompt_cache_key: Value | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False

    @property
    def reads_stored_turns(self) -> bool:
        """True for a request that continues a response, or refers to an item of one."""
        items = () if isinstance(self.input, str) else self.input
        named = any(isinstance(item, ItemReference) for item in items)
        return self.previous_response_id is not None or named

    def as_chat(self, items: Iterable[Item]) -> ChatRequest:
        """Make the equivalent chat, with these items as the conversation."""
        said = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        form, effort, choice = self.text.format, self.reasoning.effort, self.tool_choice
        schema = form.content and {"schema": form.content}
        chat = {
            **(self.model_extra or {}),
            "reasoning_effort": effort,
            **self.model_dump(include=set(SAME.split())),
            "messages": said + as_messages(items),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": bool(self.top_logprobs) or LOGPROBS in self.include,
            "response_format": {"type": form.type, "json_schema": schema},
            "tools": [tool.as_chat() for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else choice.as_chat(),
        }
        return validator_of(ChatRequest).validate_python(chat)


SAME = "model temperature top_p top_logprobs stream user parallel_tool_calls"  # as in a chat
CHAT_NAMES = """
include=logprobs input=messages input=prompt reasoning=reasoning_effort text=response_format
text=json_object text=json_schema max_output_tokens=max_tokens
max_output_tokens=max_completion_tokens
"""
RENAMED = {there: here for here, there in (pair.split("=") for pair in CHAT_NAMES.split())}
