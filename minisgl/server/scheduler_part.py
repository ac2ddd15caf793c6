"""The main function of the scheduler's process.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from minisgl.config.engine import ServerConfig
from minisgl.engine.heap import frozen_heap
from minisgl.parallel.comm import Comm
from minisgl.runtime.ranks import Ranks, run_loop
from minisgl.runtime.supervisor import WorkerContext, WorkerFailed
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import Channel
from minisgl.server.channels import SchedulerChannel, ZmqInbox, ZmqOutbox
from minisgl.server.launch import Addresses
from minisgl.server.stats import Reporter


def scheduler_part(
    config: ServerConfig, addresses: Addresses, index: int, context: WorkerContext
) -> None:
    """The only rank, or rank 0, which starts the others and leads them; index 1 asks for a trace.

    Rank 0 alone reports: the others do what it does.
    """
    inbox, outbox = ZmqInbox(addresses.scheduler), ZmqOutbox(addresses.detokenizer)
    outer = SchedulerChannel(inbox, outbox, beat=context.beat)
    outer.report = reporter = Reporter(traced=bool(index))
    with ExitStack() as stack:
        stack.callback(outer.close)
        channel: Channel = outer
        comm: Comm | None = None
        if config.tp.size > 1:
            ranks = stack.enter_context(Ranks(config))
            channel, comm = ranks.channel(outer), ranks.comm
            outer.alive = ranks.alive
        scheduler = reporter.scheduler = build_scheduler(
            config, channel, comm, trace=reporter.trace
        )
        try:
            with frozen_heap():
                context.ready()
                run_loop(scheduler, scheduler.overlap)
        except WorkerFailed as error:  # of a rank: it says what happened, our own place does not
            notes = getattr(error, "__notes__", [])
            print(f"minisgl: {error}", *notes, sep="\n", file=sys.stderr)
            raise SystemExit(1) from error
        scheduler.engine.shutdown()  # graphs that hold collectives must go before the group does
