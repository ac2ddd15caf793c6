"""The stderr of all processes of a server: no write waits for its reader, no flood passes.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minisgl.server.observe.logs import LineWriter

SAME, MOST = 10, 2**17  # in a minute: lines with one text, characters of all lines
MAX_LINE = 2**12  # characters; a longer line is handled in parts


class LineLimit:
    """Passes lines on within the limits of each minute, and reports how many it dropped."""

    def __init__(
        self, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._passed = Counter[str]()
        self._size = self._dropped = 0
        self._ends = clock() + 60

    def __call__(self, line: str) -> None:
        if self._clock() >= self._ends:
            self.renew()
        if self._passed[line] < SAME and self._size + len(line) <= MOST:
            self._passed[line] += 1
            self._size += len(line)
            self._write(line)
        else:
            self._dropped += 1

    def renew(self) -> None:
        """Report the dropped lines, if any, and begin a minute."""
        if self._dropped:
            self._write(f"minisgl: stderr: {self._dropped} repeated or surplus lines dropped")
        self._passed.clear()
        self._size = self._dropped = 0
        self._ends = self._clock() + 60


@contextmanager
def relayed() -> Iterator[None]:
    """Limit the stderr of this process, and of those that it starts in the block."""
    out, end = LineWriter(2), f"{uuid.uuid4()}\n"
    limit, before = LineLimit(out), os.dup(2)
    reader, writer = os.pipe()

    def relay() -> None:
        with os.fdopen(reader, encoding="utf-8", errors="backslashreplace") as pipe:
            while not (line := pipe.readline(MAX_LINE)).endswith(end):
                limit(line.removesuffix("\n"))
        if line := line.removesuffix(end):
            limit(line)
        limit.renew()

    thread = threading.Thread(target=relay, daemon=True, name="stderr")
    thread.start()
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.write(2, end.encode())
        os.dup2(before, 2)
        os.close(before)
        thread.join(1.0)
        out.close()
