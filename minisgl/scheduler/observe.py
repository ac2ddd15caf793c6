"""What watches a scheduler from outside: an audit of its pages, a trace of its time.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minisgl.kvcache.audit import check_integrity
from minisgl.runtime.guarded import guarded
from minisgl.scheduler.scheduler import Launched, Scheduler


class IdleAudit:
    """Recount all pages of a scheduler that has nothing to do; IntegrityError if one is lost."""

    def __init__(self, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self.clock, self.next_time = every, clock, 0.0  # seconds

    def __call__(self, scheduler: Scheduler) -> None:
        """At most once in `every` seconds, and more rarely where it takes long."""
        start = self.clock()
        if start < self.next_time:
            return
        live = [req for req in scheduler.reqs.values() if req.table_idx >= 0]
        check_integrity(scheduler.cache, live)
        end = self.clock()
        self.next_time = end + self.every * max(1.0, 100 * (end - start))


class TraceEvent(NamedTuple):
    """Something the scheduler did: from when to when, in seconds of its clock."""

    name: str  # receive, schedule, launch, wait, process
    start: float
    end: float
    step: int  # of the step that it was done for
    size: int = 0  # requests in that step, where it is known
    phase: str = ""  # prefill or decode, likewise


STAGES = ("receive", "next_step", "launch", "wait", "process")


def attach_trace(scheduler: Scheduler, observe: Callable[[TraceEvent], None]) -> None:
    """Call `observe` after each stage of each step from now on, as long as it does not fail."""
    observe = guarded(observe)

    def timed(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            step, start, batch = scheduler.step_count, time.perf_counter(), None
            result = stage(*args)
            if args and isinstance(args[0], Launched):
                step, batch = args[0].step, args[0].inputs.batch
            elif isinstance(result, Launched):
                batch = result.inputs.batch
            about = () if batch is None else (batch.size, batch.phase.value)
            observe(TraceEvent(name, start, time.perf_counter(), step, *about))
            return result

        return run

    for stage in STAGES:
        name = "schedule" if stage == "next_step" else stage
        setattr(scheduler, stage, timed(name, getattr(scheduler, stage)))
