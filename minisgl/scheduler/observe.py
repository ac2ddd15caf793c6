"""Observers of a scheduler: an audit of its pages, the times of its stages.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from minisgl.events import Emit, Event, StageEnded, StageTimed, StepFinished, StepLaunched
from minisgl.guarded import guarded
from minisgl.kvcache.audit import check_integrity
from minisgl.scheduler.scheduler import Scheduler


class IdleAudit:
    """An audit that recounts all pages of an idle scheduler; IntegrityError if one is lost."""

    def __init__(self, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self.clock, self.next_time = every, clock, 0.0  # seconds

    def __call__(self, scheduler: Scheduler) -> None:
        """Check the cache at most once in `every` seconds, less often if a check takes long."""
        start = self.clock()
        if start < self.next_time:
            return
        live = [req for req in scheduler.reqs.values() if req.table_idx >= 0]
        check_integrity(scheduler.cache, live)
        end = self.clock()
        self.next_time = end + self.every * max(1.0, 100 * (end - start))


class StageClock:
    """Turns events into timed stages of the host's loop, and passes each to `observe`."""

    def __init__(
        self, observe: Callable[[StageTimed], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.observe, self.clock, self.last = observe, clock, clock()
        self.steps: dict[int, tuple[int, str]] = {}  # size and phase of the steps in flight

    def __call__(self, event: Event) -> None:
        """Close a stage if this event ends one."""
        match event:
            case StageEnded(stage=stage, step=step):
                pass
            case StepLaunched(step=step, phase=phase, uids=uids):
                stage, self.steps[step] = "launch", (len(uids), phase)
            case StepFinished(step=step):
                stage = "process"
            case _:
                return
        about = self.steps.get(step, (0, ""))
        if stage == "process":
            self.steps.pop(step, None)
        start, self.last = self.last, self.clock()
        self.observe(StageTimed(stage, start, self.last, step, *about))


def emitter(*observers: Emit | None) -> Emit | None:
    """Join observers into one `emit` that logs their first failures; None without observers."""
    live = [guarded(observe) for observe in observers if observe is not None]
    if len(live) < 2:
        return live[0] if live else None

    def emit(event: Event) -> None:
        for observe in live:
            observe(event)

    return emit
