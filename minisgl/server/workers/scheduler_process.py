"""The scheduler's process: its channel, its reports, its main function.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from minisgl.config.engine import ServerConfig
from minisgl.engine.heap import frozen_heap
from minisgl.events import StageTimed
from minisgl.guarded import guarded
from minisgl.parallel.comm import Comm
from minisgl.recording import Observed, Recorder
from minisgl.runtime.supervisor import WorkerContext, WorkerFailed
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.grammar_queue import GrammarQueue
from minisgl.scheduler.messages import AbortMsg, ExitMsg, Msg, Reply, UserMsg, aborted
from minisgl.scheduler.observe import StageClock
from minisgl.scheduler.scheduler import Scheduler
from minisgl.server.workers.channels import Inbox, Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.workers.messages import StatsEvent, StatsMsg
from minisgl.server.workers.processes import address


class SchedulerChannel:
    """The scheduler's channel over two boxes; `alive` returns False to end waiting.

    `beat` is called in each turn and while it waits, `report`, for observers, twice a second.
    Constrained requests wait in `hold`."""

    def __init__(
        self, inbox: Inbox, outbox: Outbox, alive: Callable[[], bool] = lambda: True,
        beat: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic,
        hold: GrammarQueue | None = None,
    ) -> None:  # fmt: skip
        self._inbox, self._outbox, self.alive, self._beat = inbox, outbox, alive, beat
        self._hold = hold
        self._clock = clock  # seconds
        self.report: Callable[[], Sequence[StatsEvent]] = list
        self._report_at = 0.0  # time of the next one

    def recv(self, block: bool) -> list[Msg]:
        """Return the waiting messages; with `block`, wait for one, or leave if `alive` is False."""
        self._beat()
        messages = self._take(timeout=0.0)
        if block and not messages:
            self._send_report()
        while block and not messages and self.alive():
            self._beat()
            messages = self._take(timeout=0.5)
        return [ExitMsg()] if block and not messages else messages

    def _take(self, timeout: float) -> list[Msg]:
        """Return messages that may go on; a constrained request waits for its grammar.

        Each abort gets a receipt at once: what was sent before it has been read.
        """
        hold = self._hold
        if hold is not None:
            hold.ready = []  # those of the last messages have become matchers
        waits = hold is not None and bool(hold.busy or hold.waiting or hold.freed)
        messages = self._inbox.get_all(min(timeout, 0.005) if waits else timeout)
        self.send([aborted(msg.uid) for msg in messages if isinstance(msg, AbortMsg)])
        params = (msg.sampling_params for msg in messages if isinstance(msg, UserMsg))
        if hold is not None and (waits or any(each.is_constrained for each in params)):
            return hold.pass_on(messages)
        return messages

    def send(self, replies: Sequence[Reply]) -> None:
        if replies:
            self._outbox.put(*replies)
        if self._clock() >= self._report_at:
            self._send_report()

    def _send_report(self) -> None:
        self._report_at = self._clock() + 0.5
        if report := self.report():
            self._outbox.put(*report)


def stats_of(scheduler: Scheduler) -> StatsMsg:
    """Count the requests and pages of a scheduler, between two of its turns."""
    cache, engine = scheduler.cache, scheduler.engine
    running = sum(req.table_idx >= 0 for req in scheduler.reqs.values())
    free, kept = cache.allocator.free_pages, cache.prefix_cache.evictable_tokens // cache.page_size
    counts = {"steps": scheduler.step_count, "retractions": scheduler.retractions}
    counts |= engine.counts()
    counts |= getattr(scheduler, "draft_counts", {})  # where it speculates
    return StatsMsg(
        running=running, waiting=len(scheduler.reqs) - running, free_pages=free,
        cached_pages=kept, used_pages=engine.num_pages - free - kept, counts=counts,
    )  # fmt: skip


class Reporter:
    """Collects the times of a scheduler's stages, if `traced`, and makes its reports."""

    def __init__(self, traced: bool, recorder: Recorder | None = None) -> None:
        self.scheduler: Scheduler | None = None  # set once it is built
        self._flush = guarded(recorder.flush if recorder is not None else lambda: None)
        self._stages: list[StageTimed] = []
        self.observe = StageClock(self._stages.append) if traced else None

    def __call__(self) -> Sequence[StatsEvent]:
        if self.scheduler is None:
            return []
        self._flush()
        stages, self._stages[:] = [*self._stages], []
        return [*stages, stats_of(self.scheduler)]


def scheduler_process(
    config: ServerConfig, folder: Path, observed: Observed, context: WorkerContext
) -> None:
    """Run the only rank, or rank 0, which starts the others, leads them, and alone reports."""
    inbox, outbox = ZmqInbox(address(folder, "scheduler")), ZmqOutbox(address(folder, "text"))
    hold = GrammarQueue()
    outer = SchedulerChannel(inbox, outbox, beat=context.beat, hold=hold)
    with ExitStack() as stack:
        recorder = stack.enter_context(observed.recorder())
        reporter = Reporter(observed.traced, recorder)
        outer.report = guarded(reporter)
        stack.callback(inbox.close)
        stack.callback(outbox.close)
        channel: Channel = outer
        comm: Comm | None = None
        if config.tp.size > 1:
            from minisgl.runtime.ranks import Ranks  # with it torch.distributed

            ranks = stack.enter_context(Ranks(config))
            channel, comm = ranks.channel(outer), ranks.comm
            outer.alive = ranks.alive
        scheduler = reporter.scheduler = build_scheduler(
            config, channel, comm, observe=reporter.observe, recorder=recorder, hold=hold
        )
        try:
            with frozen_heap():
                context.ready()
                scheduler.run()
        except WorkerFailed as error:  # of a rank: its traceback, not ours, shows it
            print(f"minisgl: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
            ranks.give_up(scheduler.engine.shutdown)
            raise SystemExit(1) from error
        scheduler.engine.shutdown()  # graphs that hold collectives must be freed before the group
