"""Heartbeats of workers: counters that the workers increment and the parent watches.

Generated from notebooks/10b_ranks.ipynb: edit there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableSequence

INTERVAL = 0.2  # seconds between two counts of the thread


class Heartbeat:
    """A worker's side: `counts` is shared memory for two integers, `[thread, loop]`."""

    def __init__(self, counts: MutableSequence[int]) -> None:
        self._counts = counts

    def start(self) -> None:
        """Count as long as the process runs, even if its loop stops."""

        def count() -> None:
            while True:
                self._counts[0] += 1
                time.sleep(INTERVAL)

        threading.Thread(target=count, daemon=True, name="heartbeat").start()

    def beat(self) -> None:
        """Count one round of the loop, in well below a microsecond."""
        self._counts[1] += 1


class Watchdog:
    """The parent's side: for each count, the seconds without a change while the parent was awake.

    The limits are in seconds, for a worker's thread and one iteration of its loop; 0 is no limit.
    """

    def __init__(
        self,
        worker_timeout: float,
        step_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._clock = (worker_timeout, step_timeout), clock
        self._checked: float | None = None
        self._seen: dict[tuple[str, int], int] = {}
        self._silent: dict[tuple[str, int], float] = {}

    def check(self, heartbeats: Mapping[str, MutableSequence[int]]) -> str | None:
        """Describe a worker's failure, or return None; call it several times a second."""
        now = self._clock()
        # More than half a second means that this process slept, and perhaps the others too.
        awake = 0.0 if self._checked is None else min(now - self._checked, 0.5)
        self._checked = now
        for kind, limit in enumerate(self._limits):
            for name, counts in heartbeats.items():
                silent = self._silence(name, kind, counts[kind], awake)
                if limit and silent > limit:
                    what = ("gives no sign of life for", "has been in one step for")[kind]
                    return f"the {name} {what} {limit:g} s"
        return None

    def _silence(self, name: str, kind: int, count: int, awake: float) -> float:
        """Return the seconds for which a count has not changed."""
        key = name, kind
        changed = self._seen.get(key) != count
        self._seen[key] = count
        self._silent[key] = 0.0 if changed else self._silent.get(key, 0.0) + awake
        return self._silent[key]
