"""One line per HTTP request: an id, counts and times; text only if asked for.

Generated from notebooks/12d_operations.ipynb: edit there.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.frontend import Observer, Prompt
from minisgl.server.http.errors import ApiError
from minisgl.server.workers.messages import UserReply

Record = dict[str, Any]
PROBES = ("/health", "/metrics")  # programs ask every few seconds: such lines would hide the others


def as_text(record: Mapping[str, Any]) -> str:
    """A record for people: `name=value` in order; strings with spaces are quoted."""

    def show(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        plain = text.isprintable() and " " not in text and '"' not in text
        return text if plain else json.dumps(text)

    return " ".join(f"{name}={show(value)}" for name, value in record.items())


def as_json(record: Mapping[str, Any]) -> str:
    """A record for programs: one JSON object."""
    return json.dumps(record, ensure_ascii=False)


@dataclass
class RequestStats:
    """One answer: of which prompt, and what came so far."""

    prompt: Any
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    text: str = ""


class RequestLog(Observer):
    """Collects what is known about each HTTP request and writes it as one line at its end."""

    def __init__(
        self,
        write: Callable[[str], Any],
        spell: Callable[[Record], str] = as_text,
        prompts: bool = False,
    ) -> None:
        self._write, self._spell, self._prompts = write, spell, prompts
        self._records: dict[str, Record] = {}  # by request id
        self._answers: dict[str, list[RequestStats]] = {}  # likewise
        self._live: dict[int, tuple[str, RequestStats]] = {}  # by uid

    def begin(self, scope: Scope) -> str:
        """Name a request of the HTTP side."""
        request_id = uuid.uuid4().hex
        self._records[request_id] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": request_id,
            "method": scope["method"],
            "path": scope["path"],
        }
        return request_id

    def end(
        self, request_id: str, status: int | None, seconds: float, refused: ApiError | None = None
    ) -> None:
        """Write its line; a status of None means that the client left before it got one."""
        record = self._records.pop(request_id)
        record.update(self.sum_up(self._answers.pop(request_id, [])))
        if record["path"] in PROBES:
            return
        if refused is not None:  # why, but not what was sent
            record.update(code=refused.code, param=refused.param)
        started = record.pop("started", None)
        if "first" in record:
            record["ttft_ms"] = round(1000 * (record.pop("first") - started), 1)
        self._write(
            self._spell({**record, "status": status or 499, "ms": round(1000 * seconds, 1)})
        )

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        record = self._records.get(request_id)
        if record is None:  # not over HTTP
            return
        stats = RequestStats(next((value for value in prompt.values() if value is not None), None))
        self._live[uid] = request_id, stats
        self._answers.setdefault(request_id, []).append(stats)
        record.setdefault("started", time.perf_counter())

    def replied(self, uid: int, reply: UserReply) -> None:
        if uid not in self._live:
            return
        request_id, stats = self._live[uid]
        if request_id in self._records:
            self._records[request_id].setdefault("first", time.perf_counter())
        stats.prompt_tokens, stats.cached_tokens = reply.prompt_tokens, reply.cached_tokens
        stats.tokens += len(reply.token_ids)
        if self._prompts:
            stats.text += reply.text

    def closed(self, uid: int, outcome: str) -> None:
        request_id, _ = self._live.pop(uid, ("", None))
        if request_id in self._records:
            self._records[request_id]["outcome"] = outcome

    def sum_up(self, answers: list[RequestStats]) -> Record:
        """What the answers of one HTTP request come to; a prompt counts once, as in `usage`."""
        if not answers:
            return {}
        asked: dict[int, RequestStats] = {}  # one answer of each prompt
        for stats in answers:
            asked.setdefault(id(stats.prompt), stats)
        sums: Record = {"answers": len(answers)}
        if any(stats.prompt_tokens for stats in answers):
            sums["prompt_tokens"] = sum(stats.prompt_tokens for stats in asked.values())
            sums["cached_tokens"] = sum(stats.cached_tokens for stats in asked.values())
            sums["tokens"] = sum(stats.tokens for stats in answers)
        if self._prompts:
            prompts, texts = (
                [stats.prompt for stats in asked.values()],
                [stats.text for stats in answers],
            )
            sums["prompt"] = prompts[0] if len(prompts) == 1 else prompts
            sums["answer"] = texts[0] if len(texts) == 1 else texts
        return sums


class LogRequests:
    """ASGI middleware: an id for each HTTP request, in its headers and in its line of the log."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = self._log.begin(scope)
        start, status = time.perf_counter(), list[int]()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            seconds = time.perf_counter() - start
            refused = scope.get("refused")
            self._log.end(request_id, status[0] if status else None, seconds, refused)
