"""A trace of requests, steps and streams in the format of Chrome and Perfetto.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from minisgl.config.rules import file_of
from minisgl.events import StageTimed
from minisgl.server.frontend import Observer, Prompt
from minisgl.server.workers.messages import StatsEvent, UserReply

SCHEDULER_ROWS, REQUEST_ROWS = 1, 2  # process ids in the trace


class TraceFile(Observer):
    """Writes events to a file as they come; times are microseconds of the monotonic clock."""

    def __init__(self, path: Path) -> None:
        with file_of("trace", path):
            self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._opened: dict[int, float] = {}
        self._first: dict[int, tuple[float, UserReply]] = {}
        for pid, name in ((SCHEDULER_ROWS, "scheduler"), (REQUEST_ROWS, "requests")):
            self._event("process_name", "M", pid, 0, args={"name": name})

    def _event(self, name: str, kind: str, pid: int, tid: int, **more: Any) -> None:
        event = {"name": name, "ph": kind, "pid": pid, "tid": tid, "ts": 0, **more}
        self._file.write(json.dumps(event) + ",\n")

    def _span(self, name: str, pid: int, tid: int, start: float, end: float, **args: Any) -> None:
        times = {"ts": round(1e6 * start, 1), "dur": round(1e6 * (end - start), 1)}
        self._event(name, "X", pid, tid, **times, args=args)

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        self._opened[uid] = time.perf_counter()

    def replied(self, uid: int, reply: UserReply) -> None:
        now = time.perf_counter()
        if uid not in self._first:
            self._first[uid] = now, reply
            args = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
            self._span("wait", REQUEST_ROWS, uid, self._opened[uid], now, **args)
        self._event("text", "i", REQUEST_ROWS, uid, ts=round(1e6 * now, 1), s="t")

    def closed(self, uid: int, outcome: str) -> None:
        opened, now = self._opened.pop(uid), time.perf_counter()
        first = self._first.pop(uid, None)
        name, start = ("wait", opened) if first is None else ("stream", first[0])
        self._span(name, REQUEST_ROWS, uid, start, now, outcome=outcome)
        self._file.flush()

    def reported(self, msg: StatsEvent) -> None:
        if isinstance(msg, StageTimed):
            about = {"size": msg.size, "phase": msg.phase} if msg.phase else {}
            self._span(msg.name, SCHEDULER_ROWS, 0, msg.start, msg.end, step=msg.step, **about)
        else:  # the last message of a report
            self._file.flush()

    def close(self) -> None:
        """Write the end of the list."""
        self._event("end", "i", SCHEDULER_ROWS, 0, ts=round(1e6 * time.perf_counter(), 1), s="g")
        self._file.seek(self._file.tell() - 2)
        self._file.write("\n]\n")
        self._file.close()
