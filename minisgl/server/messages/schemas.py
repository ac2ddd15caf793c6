"""Request bodies of `/v1/messages`, and their translation to a chat.

Generated from notebooks/12db_messages.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from minisgl.server.http.bodies import validator_of
from minisgl.server.http.errors import ApiError
from minisgl.server.http.schemas import ChatRequest, Limit, joined_text
from minisgl.server.http.tools import FunctionSpec, Object, Text


class TextBlock(BaseModel):
    """A message of the conversation."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(BaseModel):
    """The thoughts of a model; signatures of other servers are not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Object


class ToolResultBlock(BaseModel):
    """The result of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(BaseModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


def assistant_message(blocks: list[Any]) -> dict[str, Any]:
    """Return a turn of the assistant as one message: its thoughts, text and calls."""
    thoughts = "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock))
    calls = [
        {"id": b.id, "function": {"name": b.name, "arguments": json.dumps(b.input)}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    extra = {"reasoning_content": thoughts, "tool_calls": calls}
    said = joined_text([block for block in blocks if isinstance(block, TextBlock)])
    return {"role": "assistant", "content": said, **{k: v for k, v in extra.items() if v}}


def messages_of(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield a turn as messages of a chat. Raises `ApiError` for a block in the wrong turn."""
    blocks: list[Any] = turn.content if isinstance(turn.content, list) else []
    allowed = {"user": (TextBlock, ToolResultBlock), "system": (TextBlock,)}
    for block in blocks:
        if turn.role in allowed and not isinstance(block, allowed[turn.role]):
            raise wrong(f"messages: role {turn.role} has no block of type {block.type}", "messages")
        if turn.role == "assistant" and isinstance(block, ToolResultBlock):
            raise wrong("messages: role assistant has no block of type tool_result", "messages")
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield assistant_message(blocks)
    else:
        text: list[TextBlock] = []
        for block in [*blocks, None]:
            if isinstance(block, TextBlock):
                text.append(block)
                continue
            if text:
                yield {"role": turn.role, "content": joined_text(text)}
                text = []
            if isinstance(block, ToolResultBlock):
                content = "Error: " * bool(block.is_error) + joined_text(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def wrong(why: str, param: str, code: str = "invalid_value") -> ApiError:
    """Return the refusal of a field."""
    return ApiError(400, why, code=code, param=param)


class MessageTool(FunctionSpec):
    """A client's tool. Anthropic's own tools have other types, which are rejected."""

    type: Literal["custom"] | None = None
    input_schema: Object

    def as_chat(self) -> dict[str, Any]:
        about = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**about, "parameters": self.input_schema}}


class ToolChoice(BaseModel, extra="forbid"):
    """The choice of a tool: none, any, or one by name."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(BaseModel, extra="forbid"):
    """The switch for thinking, and for showing the thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel, extra="forbid"):
    """The form of the answer."""

    type: Literal["json_schema"]
    content: Object = Field(alias="schema")


class OutputConfig(BaseModel, extra="forbid"):
    """The effort of an answer, and its form."""

    effort: Annotated[Text, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class Metadata(BaseModel):
    """The caller's own name for the user."""

    user_id: Annotated[Text, Field(max_length=1024)] | None = None


SAME = "model temperature top_p top_k max_tokens stream"  # as in a chat
CHAT_NAMES = """
stop_sequences=stop output_config=response_format output_config=json_schema
output_config=reasoning_effort tool_choice=parallel_tool_calls metadata=user messages=prompt
max_tokens=max_completion_tokens thinking=enable_thinking thinking=include_reasoning
"""
RENAMED = {there: here for here, there in (pair.split("=") for pair in CHAT_NAMES.split())}


class MessagesRequest(BaseModel, extra="allow", strict=True):
    """Body of `POST /v1/messages`; a field that is not listed means what it means in a chat."""

    messages: list[Turn] = Field(min_length=1, max_length=16384)
    max_tokens: Limit | None = None
    model: str | None = None
    system: Text | list[TextBlock] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def as_chat(self) -> ChatRequest:
        """Return the chat that asks for the same."""
        system = [{"role": "system", "content": joined_text(self.system)}] if self.system else []
        said = [message for turn in self.messages for message in messages_of(turn)]
        choice, thinking = self.tool_choice, self.thinking
        options, form = self.output_config or OutputConfig(), None
        if options.format:
            form = {"type": "json_schema", "json_schema": {"schema": options.format.content}}
        chat = {
            **(self.model_extra or {}),
            **self.model_dump(include=set(SAME.split())),
            "messages": system + said,
            "stop": self.stop_sequences,
            "tools": [tool.as_chat() for tool in self.tools or ()] or None,
            "tool_choice": choice and choice.as_chat(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "thinking": thinking and thinking.model_dump(include={"type"}),
            "include_reasoning": not (thinking and thinking.display == "omitted"),
            "reasoning_effort": options.effort,
            "response_format": form,
            "user": self.metadata and self.metadata.user_id,
        }
        if said and said[-1]["role"] == "assistant":
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        given = {name: value for name, value in chat.items() if value is not None}
        return validator_of(ChatRequest).validate_python(given)
