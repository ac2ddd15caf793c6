"""An answer taken apart as it comes: thoughts, content and calls, and their shapes in JSON.

Generated from notebooks/12a_tools.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

from minisgl.server.http.tool_parser import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    ToolParser,
)
from minisgl.tokenizer import THINK, THOUGHT, overlap


class AnswerParser:
    """Takes an answer apart: thoughts, if the model has any, then content and calls.

    If `show_thoughts` is false, thoughts are left out.
    """

    def __init__(
        self, reasoning: bool = False, tools: ToolParser | None = None, show_thoughts: bool = True
    ) -> None:
        self.tools, self.show_thoughts, self.pieces = tools, show_thoughts, list[Piece]()
        self.buffer, self.opened = "", False
        self.total = self.rest = 0  # characters that came, and those behind the thought
        self.state = self._start if reasoning else self._rest

    def push(self, text: str, last: bool = False, thinking: bool = False) -> list[Piece]:
        """Take more of the answer. `thinking`: the prompt ended inside of a thought."""
        self.buffer, self.total = self.buffer + text, self.total + len(text)
        if self.state == self._start:
            self.opened = self.opened or thinking
        while self.state(last):
            pass
        pieces, self.pieces = self.pieces, []
        return pieces

    def reason(self, finish_reason: str | None) -> str | None:
        """Return why the answer ended, in OpenAI's words."""
        called = self.tools is not None and self.tools.calls > 0
        return "tool_calls" if called and finish_reason == "stop" else finish_reason

    def _start(self, last: bool) -> bool:
        """Skip white space and the marker that opens a thought, if they are there."""
        body = self.buffer.lstrip()
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
        if (certain := certain.rstrip()) and self.show_thoughts:
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
    texts: dict[type, str] = {Content: "", Reasoning: ""}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        elif isinstance(piece, CallArguments):
            calls[piece.call]["function"]["arguments"] += piece.text
        else:
            texts[type(piece)] += piece.text
    content = texts[Content] if texts[Content] or not calls else None
    extra = {"reasoning_content": texts[Reasoning], "tool_calls": calls}
    said = {name: value for name, value in extra.items() if value}
    return {"role": "assistant", "content": content, "refusal": None, **said}
