"""Tool calls in a growing text: pieces are returned as soon as they are certain.

Generated from notebooks/12a_tools.ipynb: edit there.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from typing import Any, NamedTuple

from minisgl.server.http.calls import CallFormat
from minisgl.tokenizer import drop_blank, overlap, parsed, skip_blank


class Reasoning(NamedTuple):
    """A piece of the model's thoughts before it answers."""

    text: str


class Content(NamedTuple):
    """A piece of the answer's text."""

    text: str


class CallStart(NamedTuple):
    """The start of a call of a function; `call` counts the calls of an answer."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of a call: JSON, as the model writes it."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


def new_call_id() -> str:
    """Return nine letters and digits: Mistral's templates reject any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped = 0, False, False

    def find(self, text: str) -> int:
        """Return the length of its part of the next piece; -1 if it continues after the piece."""
        for at, char in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = char == "\\", char != '"'
            elif char == '"':
                self.quoted = True
            elif char == "<":  # no JSON: a marker came too early
                return at
            else:
                self.depth += (char in "{[") - (char in "}]")
                if self.depth <= 0 and char in "}]":
                    return at + 1
        return -1


ARGUMENTS = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*' + ARGUMENTS)
NAMED = re.compile(r"(?P<name>[\w.:/-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
NO_OBJECT = re.compile(r'\{\s*[^\s"}]|(?!\{|[\w.:/-]{1,64}(?:\[\w*(?:\]\w*)?)*\s*$)')
OTHER_KEY = r'|\{\s*"(?:(?!(?:name|type|function|arguments|parameters|id)")[^"]*"|[^"]*"\s*[^\s:])'
NO_HEAD = re.compile(NO_OBJECT.pattern + OTHER_KEY)  # no call without a marker begins so
MAX_HEAD = 1024  # characters that the patterns search, at every token


class ToolParser:
    """Finds the calls in an answer that arrives in pieces; the rest is content.

    `names` are the functions that may be called.
    """

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self.form, self.names = form, frozenset(names)
        self.buffer, self.blank, self.marker = "", "", ""
        self.total, self.spans = 0, list[tuple[int, int]]()  # characters; ranges of content
        self.calls = 0
        self.pieces: list[Piece] = []
        self.state = self._content

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Take more of the answer; return certain pieces. `last`: nothing follows."""
        self.buffer, self.total = self.buffer + text, self.total + len(text)
        while self.state(last):
            pass
        if last and not self.calls and self.blank:
            self.spans.append((self.total - len(self.blank), self.total))
            self.pieces.append(Content(self.blank))
        pieces, self.pieces = self.pieces, []
        return pieces

    def _say(self, text: str, behind: int) -> None:
        """Append content without white space at its end; `behind` characters came after it."""
        certain = drop_blank(text := self.blank + text)
        self.blank = text[len(certain) :]
        if certain:
            end = self.total - behind - len(self.blank)
            start = end - len(certain)
            joins = bool(self.spans) and self.spans[-1][1] == start
            self.spans.append((self.spans.pop()[0] if joins else start, end))
            self.pieces.append(Content(certain))

    def _content(self, last: bool) -> bool:
        """Parse text up to a marker; hold back a possible beginning of one."""
        text = self.buffer
        found = [(at, mark) for mark in self.form.markers if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(text[:at], len(text) - at)
            self.marker = "" if mark.startswith("{") else mark  # a brace is a part of the call
            self.buffer = text[at + len(self.marker) :]
            return self._enter_head()
        held = 0 if last else max(overlap(text, mark) for mark in self.form.markers)
        self._say(text[: len(text) - held], held)
        self.buffer = text[len(text) - held :]
        return False

    def _enter_head(self) -> bool:
        self.object, self.seen, self.state = ObjectEnd(), 0, self._head
        return True

    def _head(self, last: bool) -> bool:
        """Parse the text after a marker: a call, none, or too little to decide."""
        body = self.buffer.lstrip(" \t\r\n[" if "]" in self.form.after else None)
        self.marker += self.buffer[: len(self.buffer) - len(body)]
        self.buffer = body
        head = body[:MAX_HEAD]
        if match := HEAD.match(head) or NAMED.match(head):
            if match["name"] not in self.names:
                return self._give_up()
            self._begin(match["name"], match.end())
            self.object, self.state = ObjectEnd(), self._arguments
            self.closing = self.form.after if match.re is HEAD else []
            self.open = match.re is HEAD  # the object that holds the arguments
            return True
        if head and (NO_OBJECT if self.marker else NO_HEAD).match(head):
            return self._give_up()
        if not body.startswith("{"):
            return self._give_up() if last or len(body) > MAX_HEAD else False
        end = self.object.find(body[self.seen :])
        size = len(body) if end < 0 else self.seen + end
        call = read_call(body[:size]) if end >= 0 else None
        if call is not None and call[0] in self.names:
            self._begin(call[0], size)
            self.pieces.append(CallArguments(self.calls - 1, call[1]))
            self.closing, self.state = self.form.after, self._tail
            return True
        self.seen = size
        return self._give_up(size) if last or end >= 0 else False

    def _give_up(self, size: int = 0) -> bool:
        """Append the marker and `size` characters as content, one at least; continue after it."""
        text = self.marker + self.buffer[: max(size, not self.marker)]
        self.buffer = self.buffer[len(text) - len(self.marker) :]
        self.state = self._content
        self._say(text, len(self.buffer))
        return True

    def _begin(self, name: str, size: int) -> None:
        """Begin a call of a function, and drop `size` characters of the buffer."""
        self.pieces.append(CallStart(self.calls, new_call_id(), name))
        self.calls, self.blank, self.buffer = self.calls + 1, "", self.buffer[size:]

    def _arguments(self, last: bool) -> bool:
        end = self.object.find(self.buffer)
        text = self.buffer if end < 0 else self.buffer[:end]
        if text:
            self.pieces.append(CallArguments(self.calls - 1, text))
        self.buffer = self.buffer[len(text) :]
        if end >= 0:
            self.object, self.state = ObjectEnd(), self._more_keys if self.open else self._tail
        return end >= 0

    def _more_keys(self, last: bool) -> bool:
        """Skip the other keys of a call's object, up to its closing brace."""
        rest = self.buffer = self.buffer.lstrip()
        if self.object.depth or rest[:1] in ("}", ","):
            self.object.depth = self.object.depth or 1
            end = self.object.find(rest)
            self.buffer = rest[end:] if end >= 0 else ""
            rest = rest if end >= 0 else ""
        self.state = self._tail if rest or last else self._more_keys
        return self.state == self._tail

    def _tail(self, last: bool) -> bool:
        """Skip the text that closes a call; after a separator the next call follows."""
        while self.closing:
            rest = skip_blank(self.buffer)
            if not last and self.closing[0].startswith(rest) and rest != self.closing[0]:
                return False  # it may still come
            expected, *self.closing = self.closing
            if rest.startswith(expected):
                self.buffer = rest[len(expected) :]
                if expected == self.form.separator.strip():
                    self.marker = expected
                    return self._enter_head()
        self.state = self._content
        return True


def read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is a complete JSON object; None for others."""
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    given = given["function"] if isinstance(given.get("function"), dict) else given
    name = given.get("name", given.get("function"))
    arguments = given.get("arguments", given.get("parameters"))
    arguments = parsed({"function": {"arguments": arguments}})["function"]["arguments"]
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return name, text.encode(errors="backslashreplace").decode()  # surrogates stay escaped
