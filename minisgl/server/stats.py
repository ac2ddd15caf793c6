"""What a scheduler reports to those who watch it: a snapshot, and what it did since the last.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.scheduler.observe import TraceEvent
from minisgl.scheduler.scheduler import Scheduler
from minisgl.server.messages import Span, StatsMsg, TraceMsg, Watched


def stats_of(scheduler: Scheduler) -> StatsMsg:
    """Requests and pages of a scheduler, between two of its turns."""
    cache, engine = scheduler.cache, scheduler.engine
    running = sum(req.table_idx >= 0 for req in scheduler.reqs.values())
    free = cache.allocator.free_pages
    cached = cache.prefix_cache.evictable_tokens // engine.page_size
    return StatsMsg(
        running=running,
        waiting=len(scheduler.reqs) - running,
        free_pages=free,
        cached_pages=cached,
        used_pages=engine.num_pages - free - cached,
        steps=scheduler.step_count,
        graph_replays=getattr(engine.graph, "replays", 0),
        retractions=scheduler.retractions,
    )


class Reporter:
    """Collects a scheduler's trace, if asked to, and makes its reports."""

    def __init__(self, traced: bool) -> None:
        self.scheduler: Scheduler | None = None  # known once it is built
        self._events: list[TraceEvent] = []
        self.trace = self._events.append if traced else None  # for `build_scheduler`

    def __call__(self) -> Sequence[Watched]:
        if self.scheduler is None:
            return []
        events: list[Span] = [*self._events]
        self._events.clear()
        return [stats_of(self.scheduler), *([TraceMsg(events)] if events else [])]
