"""Requests of a server that wait for their grammars.

Generated from notebooks/09ab_grammar_queue.ipynb: edit there.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Timer
from typing import Any

from llguidance import LLMatcher

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import AbortMsg, UserMsg
from minisgl.scheduler.queue import Shares
from minisgl.trim import give_heap_back

MOST_JOBS = 4  # compilations at once
QUICK, LEAST = 0.05, 0.001  # seconds of one that may have the last place; of any
TRIM = 1.0  # seconds from the end of a grammar to the trim of the heap
SMALL = 2**20  # bytes counted for every grammar, because a matcher grows with its answer


class GrammarQueue:
    """Requests that wait for their grammars.

    Clients share the threads by time, and `limit` bytes of compiled grammars.
    """

    def __init__(self, limit: int = 2**30) -> None:
        self.shares = Shares(limit, factor=0.25)
        self.start: Callable[[int, SamplingParams], Future[LLMatcher] | None] = lambda *_: None
        self.waiting: dict[str, dict[int, UserMsg]] = {}  # by client and uid: not yet started
        self.clocks: dict[str, float] = {}  # seconds of each client's jobs
        self.held: dict[int, tuple[UserMsg, Future[LLMatcher]]] = {}  # by uid: being compiled
        self.busy: dict[Future[LLMatcher], tuple[str, float, float]] = {}  # client, begin, cost
        self.ready: list[Future[LLMatcher]] = []  # of the messages just returned; else forgotten
        self.freed = deque[tuple[str, int]]()  # clients and bytes of grammars that are gone
        self.trimmer = Timer(TRIM, give_heap_back)

    def pass_on(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages that may proceed, in order, and those whose wait is over."""
        self.charge()
        passed = list[Any]()
        for msg in messages:
            if isinstance(msg, UserMsg) and msg.sampling_params.is_constrained:
                if msg.client not in self.clocks:  # no credit for idle time
                    self.clocks[msg.client] = min(self.clocks.values(), default=0.0)
                self.waiting.setdefault(msg.client, {})[msg.uid] = msg
                continue
            if isinstance(msg, AbortMsg):
                if left := self.held.pop(msg.uid, None):
                    left[1].cancel()  # unless it runs
                for line in self.waiting.values():
                    line.pop(msg.uid, None)
            passed.append(msg)
        self.settle()
        self.begin()
        done = [self.held.pop(uid) for uid in [*self.held] if self.held[uid][1].done()]
        self.ready = [job for _, job in done]
        return passed + [msg for msg, _ in done]

    def charge(self) -> None:
        """Add the time of jobs that have ended; forget clients that owe the others nothing."""
        for job in [job for job in self.busy if job.done()]:
            client, start, cost = self.busy.pop(job)
            self.clocks[client] += time.monotonic() - start - cost
        active = {*self.waiting, *(client for client, *_ in self.busy.values())}
        least = min((self.clocks[client] for client in active), default=float("inf"))
        clocks = self.clocks.items()
        self.clocks = {name: clock for name, clock in clocks if name in active or clock > least}

    def settle(self) -> None:
        """Return the shares of freed grammars, and start the timer that trims the heap."""
        if self.freed and not self.trimmer.is_alive():
            self.trimmer = Timer(TRIM, give_heap_back)
            self.trimmer.daemon = True
            self.trimmer.start()
        while self.freed:
            self.shares.give_back(*self.freed.popleft())

    def begin(self) -> None:
        """Start the grammars that fit."""
        short, held = False, self.shares.held
        self.waiting = {client: line for client, line in self.waiting.items() if line}
        heap = [(self.end(client), place, client) for place, client in enumerate(self.waiting)]
        heapq.heapify(heap)
        slow = sum(cost > QUICK for _, _, cost in self.busy.values())
        while heap and len(self.busy) < MOST_JOBS:
            _, place, client = heapq.heappop(heap)
            uid, msg = next(iter(self.waiting[client].items()))
            much, cost = short and held[client] > self.shares.limit // 8, cost_of(msg)
            if much or (cost > QUICK and slow == MOST_JOBS - 1):
                continue
            size = max(SMALL, msg.memory)
            if not self.shares.take(client, size):
                short = True  # clients that hold much take no more before this one
                continue
            job = self.start(uid, msg.sampling_params)
            assert job is not None
            weakref.finalize(job, self.freed.append, (client, size))
            self.held[uid], self.busy[job] = (msg, job), (client, time.monotonic(), cost)
            self.clocks[client] += cost  # in advance
            slow += cost > QUICK
            del self.waiting[client][uid]
            if self.waiting[client]:
                heapq.heappush(heap, (self.end(client), place, client))
            else:
                del self.waiting[client]

    def end(self, client: str) -> float:
        """Return what the clock of a waiting client will be after its next job."""
        return self.clocks[client] + cost_of(next(iter(self.waiting[client].values())))


def cost_of(msg: UserMsg) -> float:
    """Return the seconds that a grammar is expected to take."""
    return max(msg.cost, LEAST)
