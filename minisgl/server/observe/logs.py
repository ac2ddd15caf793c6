"""One line per HTTP request: an id, counts and times; text only if asked for.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.frontend import Observer, Prompt
from minisgl.server.http.access import KEY_NAME
from minisgl.server.workers.messages import UserReply

Record = dict[str, Any]
PROBES = ("/health", "/metrics")  # polled every few seconds: their lines would hide the others


def as_text(record: Mapping[str, Any]) -> str:
    """Format a record for people: `name=value` in order; strings with spaces are quoted."""

    def show(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        plain = text.isprintable() and " " not in text and '"' not in text
        return text if plain else json.dumps(text)

    return " ".join(f"{name}={show(value)}" for name, value in record.items())


def as_json(record: Mapping[str, Any]) -> str:
    """Format a record for programs: one JSON object."""
    return json.dumps(record, ensure_ascii=False)


MAX_WAITING = 2**24  # characters of all lines that wait


class LineWriter:
    """Writes lines in a thread, so that a full pipe delays no request.

    descriptor: of the file. most: lines that may wait; more are dropped.
    """

    def __init__(self, descriptor: int, most: int = 10_000) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(most)
        self._given = self._written = 0  # characters; each is changed by one thread alone
        own = os.dup(descriptor)  # the file of now: `relayed` replaces stderr
        self._thread = threading.Thread(target=self._run, args=(own,), daemon=True, name="log")
        self._thread.start()

    def __call__(self, line: str | None) -> None:
        size = len(line or "")
        if size and self._given + size - self._written > MAX_WAITING:
            return
        with suppress(queue.Full):
            self._lines.put_nowait(line)
            self._given += size

    def _run(self, descriptor: int) -> None:
        for line in iter(self._lines.get, None):
            left = f"{line}\n".encode(errors="backslashreplace")
            with suppress(OSError):  # the reader is gone
                while left:
                    left = left[os.write(descriptor, left) :]
            self._written += len(line)
        os.close(descriptor)

    def close(self) -> None:
        """Write the waiting lines, for a second at most."""
        self(None)
        self._thread.join(1.0)


@dataclass
class Answer:
    """One answer: its prompt, its last reply, and its text if texts are logged."""

    prompt: Any
    reply: UserReply | None = None
    text: str = ""


@dataclass
class Entry:
    """One HTTP request: the record of its line, its answers, and two times in seconds."""

    record: Record = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    started: float | None = None
    first: float | None = None


class RequestLog(Observer):
    """Collects the facts of each HTTP request and writes them as one line at its end."""

    def __init__(
        self,
        write: Callable[[str], Any],
        spell: Callable[[Record], str] = as_text,
        prompts: bool = False,
    ) -> None:
        self._write, self._spell, self._prompts = write, spell, prompts
        self._entries: dict[str, Entry] = {}  # by request id
        self._live: dict[int, tuple[Entry, Answer]] = {}  # by uid

    def ended(self, scope: Scope, status: int, seconds: float) -> None:
        name, path = scope["request_id"], scope["path"]
        entry = self._entries.pop(name, None) or Entry()
        if path in PROBES:
            return
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))
        record = {"time": began, "id": name, "method": scope["method"], "path": f"{path:.200}"}
        record |= entry.record
        if key := scope.get(KEY_NAME):
            record["key"] = key  # its name
        record |= self.sum_up(entry.answers)
        if "refused" in scope:  # why, but not what was sent
            record |= {"code": scope["refused"].code, "param": scope["refused"].param}
        if entry.started is not None and entry.first is not None:
            record["ttft_ms"] = round(1000 * (entry.first - entry.started), 1)
        self._write(self._spell({**record, "status": status, "ms": round(1000 * seconds, 1)}))

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        if request_id:  # else it did not come over HTTP
            entry = self._entries.setdefault(request_id, Entry())
            answer = Answer(next((value for value in prompt.values() if value is not None), None))
            entry.answers.append(answer)
            entry.started = entry.started or time.perf_counter()
            self._live[uid] = entry, answer

    def replied(self, uid: int, reply: UserReply) -> None:
        if uid in self._live:
            entry, answer = self._live[uid]
            entry.first = entry.first or time.perf_counter()
            answer.reply = reply
            answer.text += reply.text if self._prompts else ""

    def closed(self, uid: int, outcome: str) -> None:
        if uid in self._live:
            entry, _ = self._live.pop(uid)
            entry.record["outcome"] = outcome

    def sum_up(self, answers: list[Answer]) -> Record:
        """Sum up the answers of one HTTP request; a prompt counts once, as in `usage`."""
        if not answers:
            return {}
        sums: Record = {"answers": len(answers)}
        last = [(id(answer.prompt), answer.reply) for answer in answers if answer.reply is not None]
        if last:
            asked = dict(last).values()  # one of each prompt
            sums["prompt_tokens"] = sum(reply.prompt_tokens for reply in asked)
            sums["cached_tokens"] = sum(reply.cached_tokens for reply in asked)
            sums["tokens"] = sum(reply.completion_tokens for _, reply in last)
        if self._prompts:
            prompts = list({id(answer.prompt): answer.prompt for answer in answers}.values())
            texts = [answer.text for answer in answers]
            sums["prompt"] = prompts[0] if len(prompts) == 1 else prompts
            sums["answer"] = texts[0] if len(texts) == 1 else texts
        return sums


class LogRequests:
    """ASGI middleware: an id for each HTTP request, in its headers and its log line.

    It is that of the client or its proxy, if one came.

    `notify` is that of the frontend, here called at the end of a request.
    """

    def __init__(self, app: ASGIApp, notify: Callable[..., None]) -> None:
        self._app, self._notify = app, notify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        start, status = time.perf_counter(), 499  # if the client leaves before it gets one

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            self._notify("ended", scope, status, time.perf_counter() - start)
