"""Shortage of memory: retract running requests, and admit new ones in groups.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.core import Batch, Req
from minisgl.events import RequestRetracted
from minisgl.scheduler.mixed import MixedPrefill
from minisgl.scheduler.phases import future_pages
from minisgl.scheduler.scheduler import Scheduler


def make_room(scheduler: Scheduler) -> None:
    """Retract requests until the next token of all others has its page, then `displace` some."""
    cache, running = scheduler.cache, scheduler.decode.running
    size = cache.page_size
    while running:
        available = cache.available_tokens // size
        chunked = scheduler.prefill.chunked_req
        if chunked is not None:  # the rest of a half-done prompt, without its answer
            available -= future_pages(chunked, size, 0)
        short = (cache.allocated_len[req] < req.device_len for req in running.values())
        if len(running) <= available or sum(short) <= available:  # one page each at the most
            break
        if scheduler.in_flight is not None:  # a request may have ended in it
            scheduler.finish_in_flight()
        else:
            order = scheduler.prefill.waiting.retraction_order(scheduler.prefill.admitted())
            retract(scheduler, order[0])
    if scheduler.prefill.waiting:
        displace(scheduler)


def retract(scheduler: Scheduler, req: Req) -> None:
    """Take row and pages from a request; it continues later, before its client's new ones."""
    scheduler.prefill.remove(req)
    scheduler.decode.remove(req)
    scheduler.free_request(req)
    scheduler.prefill.waiting.resume(req)
    scheduler.retractions += 1
    if scheduler.emit is not None:
        scheduler.emit(RequestRetracted(req.uid))
    req.retracted = True
    req.restart()  # last: queue and observers still find its lengths


def displace(scheduler: Scheduler) -> None:
    """Retract requests for the first waiting one until it fits; none if it still would not."""
    cache, prefill, size = scheduler.cache, scheduler.prefill, scheduler.cache.page_size
    while reqs := prefill.waiting.displaceable(rows := prefill.admitted()):
        first = prefill.waiting.first()
        if first is None or prefill.adder().check(first) is not None:
            return
        kept = [req for req in rows if req not in reqs]
        table, ends = cache.tables.page_table, cache.allocated_len
        held = {slot for req in kept for slot in table[req.table_idx, : ends[req] : size].tolist()}
        cached = set(cache.match_req(first).slots()[::size].tolist())  # part of what is promised
        promised = sum(future_pages(req, size, scheduler.decode.reserve) for req in [*kept, first])
        if len(held - cached) + promised > cache.num_pages:
            return
        if scheduler.in_flight is not None:
            scheduler.finish_in_flight()
        else:
            retract(scheduler, reqs[0])


class DelayedPrefill(MixedPrefill):
    """Admits requests in groups while the rows are taken and many wait."""

    share, most = 32, 16  # one row in `share` has to be free; the largest number of steps to wait
    delay = 0  # steps left to wait

    def schedule(self) -> Batch | None:
        """Return the next prefill step; None while more requests could share it soon."""
        tables = self.cache.tables
        self.delay -= 1
        group = min(len(self.waiting), tables.num_rows // self.share)
        if self.delay > 0 and self.chunked_req is None and tables.free_rows < group:
            return None
        batch = super().schedule()
        if batch is not None:
            self.delay = 0 if tables.free_rows else self.most
        return batch
