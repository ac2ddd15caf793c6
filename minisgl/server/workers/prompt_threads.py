"""Threads that encode prompts whose cost nobody knows.

Generated from notebooks/12ab_prompt_threads.ipynb: edit there.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from msgspec.structs import replace

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import ErrorReply, UserMsg
from minisgl.scheduler.side import SLOTS, Side
from minisgl.server.workers.messages import Message, TokenizeMsg
from minisgl.server.workers.text_worker import Encode, PromptQueue

CHARACTERS, LONG = 2**20, 2**17  # of one second of a thread; of a long prompt
TRY, SLOW = 0.5, 2.0  # seconds: of a job in the last thread; of a slow job
LARGE = 2**23  # bytes assumed for a grammar that could not be measured
CLIENTS, FORGET = 2**10, 60.0  # with a slow job in so many seconds

Encoded = list[tuple[int, Message]]  # by uid


def encode_all(encode: Encode, same: list[TokenizeMsg]) -> Encoded:
    """Encode the answers to one request; an error of the first is the error of all."""
    first, *rest = same
    made = encode(first)
    if isinstance(made, ErrorReply):
        return [(msg.uid, replace(made, uid=msg.uid)) for msg in same]
    return [(first.uid, made), *((msg.uid, encode(msg)) for msg in rest)]


class ThreadState(threading.local):
    """This thread's job: in the last thread or not, and when its slow work began."""

    hurried = False
    begun = math.inf  # seconds of `time.monotonic`


@dataclass(frozen=True)
class Job:
    """The answers to one request, being encoded by a thread."""

    same: list[TokenizeMsg]
    start: float
    hurried: bool  # in the last thread
    result: Future[tuple[Encoded, float]]  # and the seconds of slow work


class PromptThreads(PromptQueue):
    """Threads that encode prompts beside the text worker's loop; `side` does the slow work.

    A client may have fewer of them than are free, and pays for the time that it had one. The last
    thread is for short jobs: one that takes longer than `TRY` waits for another thread.
    """

    def __init__(self, count: int = SLOTS, side: Side | None = None) -> None:
        super().__init__()
        self._pool, self._count = ThreadPoolExecutor(count, "prompts"), count
        self._jobs, self._slow = dict[int, Job](), dict[str, float]()  # by uid; clients, when
        self._state, self._side = ThreadState(), side
        if side is not None:
            side.limit = self.limit

    def limit(self, seconds: float) -> float:
        """Return how many of these seconds this thread waits for its side process."""
        self._state.begun = min(self._state.begun, time.monotonic())
        return min(seconds, TRY) if self._state.hurried else seconds

    def _run(self, encode: Encode, same: list[TokenizeMsg], hurried: bool) -> tuple[Encoded, float]:
        self._state.hurried, self._state.begun = hurried, math.inf
        made = encode_all(encode, same)
        if isinstance(made[0][1], UserMsg):
            cost, memory = self.cost_of(same[0].sampling_params)
            made = [(uid, replace(message, cost=cost, memory=memory)) for uid, message in made]
        return made, time.monotonic() - self._state.begun

    def cost_of(self, params: SamplingParams) -> tuple[float, int]:
        """Return the seconds and bytes that a request's grammar took to compile; 0 without one."""
        try:
            return self._side.measure_grammar(params)[1:] if self._side else (0.0, 0)
        except (ValueError, RuntimeError):  # forgotten since, and now it takes too long
            return SLOW, LARGE

    def take(self, encode: Encode) -> list[Message]:
        now = time.monotonic()
        ended = [uid for uid, job in self._jobs.items() if job.result.done()]
        done = [made for uid in ended for made in self._settle(self._jobs.pop(uid), now)]
        while free := self._count - len(self._jobs):
            patient = sum(not job.hurried for job in self._jobs.values())
            last = patient == self._count - 1 > 0
            same = self.pop(busy={*self._barred(free, last, now)})
            if not same:
                break
            self.waiting |= {msg.uid: msg for msg in same}  # until they are encoded
            result = self._pool.submit(self._run, encode, same, last)
            self._jobs[same[0].uid] = Job(same, now, last, result)
        return done

    def _settle(self, job: Job, now: float) -> Iterator[Message]:
        """Yield what a job made, charge its client; one that was stopped waits again."""
        client, (made, worked) = job.same[0].client, job.result.result()
        stopped = job.hurried and worked >= TRY and isinstance(made[0][1], ErrorReply)
        if stopped or worked > SLOW:
            self._slow.pop(client, None)  # so that the latest are the last
            self._slow[client] = now
            if len(self._slow) > CLIENTS:
                del self._slow[next(iter(self._slow))]
        if stopped:
            for msg in job.same:
                if msg.uid in self.waiting:
                    self.add(msg)
        else:
            yield from (message for uid, message in made if self.drop(uid))  # not of one that left
        if client in self._clocks:
            self._clocks[client] += int((now - job.start) * CHARACTERS)

    def _barred(self, free: int, last: bool, now: float) -> Iterator[str]:
        """Yield the clients whose prompts may not have the next of the free threads."""
        held = Counter(job.same[0].client for job in self._jobs.values())
        yield from (client for client in held if held[client] >= free)
        if last:
            yield from (client for client, when in self._slow.items() if now - when < FORGET)
            sizes = {client: max(size for *_, size in heap) for client, heap in self._heaps.items()}
            yield from (client for client in sizes if sizes[client] > LONG)
