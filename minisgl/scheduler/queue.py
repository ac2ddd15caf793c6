"""The order in which requests are admitted: by arrival, or fair between clients.

Generated from notebooks/08b_queue.ipynb: edit there.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from minisgl.core import Batch, Req


class WaitingQueue(Protocol):
    """Requests that wait for admission, in an order that depends on messages and costs alone."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Req]: ...
    def add(self, req: Req) -> None: ...  # a new request
    def resume(self, req: Req) -> None: ...  # after a retraction: comes before the client's others
    def first(self) -> Req | None: ...  # the next to admit
    def remove(self, req: Req) -> None: ...  # waits no longer: admitted or aborted
    def chunk_comes_first(self, chunked_req: Req) -> bool: ...  # before the first waiting one
    def retraction_order(self, reqs: Sequence[Req]) -> list[Req]: ...  # of those with a row
    def displaceable(self, reqs: Sequence[Req]) -> list[Req]: ...  # those that may yield to first()
    def charge(self, batch: Batch) -> None: ...  # a step is about to be computed
    def release(self, req: Req) -> None: ...  # a request ended, in any state
    def reset(self) -> None: ...  # forget all requests


class ArrivalOrder(deque[Req]):
    """First come, first served; a chunked prompt always continues first."""

    add = deque.append
    resume = deque.appendleft
    reset = deque.clear

    def first(self) -> Req | None:
        """Return the next request, or None."""
        return self[0] if self else None

    def chunk_comes_first(self, chunked_req: Req) -> bool:
        """Return True: the chunked request came first."""
        return True

    def retraction_order(self, reqs: Sequence[Req]) -> list[Req]:
        """Return the requests that joined last first."""
        return list(reversed(reqs))

    def displaceable(self, reqs: Sequence[Req]) -> list[Req]:
        """Return none: a newcomer waits until a running request ends."""
        return []

    def charge(self, batch: Batch) -> None:
        """Do nothing: costs do not matter in arrival order."""

    def release(self, req: Req) -> None:
        """Do nothing: there is nothing to settle."""


ANSWER_WEIGHT = 2
TURN = 128  # answer tokens
MOST_GONE = 1024  # clients

# Tag, number of the event, tokens served to all before it or, if retracted, its own so far.
Tag = tuple[float, int, int]


@dataclass
class Share:
    """Service that one client has received, and its waiting requests."""

    served: int = 0  # tokens; those of answers count twice
    clock: float = 0.0  # prompt tokens per request, if computed side by side
    live: int = 0  # requests, waiting or not
    waiting: int = 0
    since: int = 0  # number of the event that last served it; at first, of its arrival
    yielded: int = -1  # `since`, if that event was the end of its turn
    start: float = 0.0  # prompt tokens computed, at least the clock when it began to wait
    heap: list[tuple[float, int, int, Req]] = field(default_factory=list)  # tag, request

    @property
    def rows(self) -> int:
        """The number of requests that are admitted and not done."""
        return self.live - self.waiting

    def place(self, line: float) -> tuple[int, int]:
        """Rank by rows, in powers of two; then those last served before `line`, at, after."""
        return self.rows.bit_length(), (self.since >= line) + (self.since > line)


class FairQueue:
    """Fair in tokens between clients; within a client, in the order of fair queueing.

    `step_tokens` is the budget of a prefill step: clients closer than that count as equal. `turn`
    is the number of answer tokens that a request has ahead before it yields to other clients.
    Sources: Demers, Keshav, Shenker 1989 (tags); Sheng et al. 2024, arXiv:2401.00588 (counters).
    """

    def __init__(self, step_tokens: int, turn: int = TURN) -> None:
        self._step_tokens, self._turn = step_tokens, turn
        self.reset()

    def reset(self) -> None:
        """Forget all requests and their clients' counts."""
        self._shares: dict[str, Share] = {}  # of clients with an unfinished request
        self._gone: dict[str, int] = {}  # served tokens of the last clients without one
        self._tags: dict[Req, Tag] = {}  # of every unfinished request
        self._waiting: dict[Req, None] = {}  # in no particular order
        self._numbers, self._total = count(), 0  # of events; of tokens served to all
        self._clock = 0.0  # prompt tokens per client, if computed side by side
        self._first: Req | None = None  # as found since the last change
        self._changed = True

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._waiting)

    def add(self, req: Req) -> None:
        """Queue a request; its tag is its client's clock plus the length of its prompt."""
        served, number = self._gone.pop(req.client, 0), next(self._numbers)
        share = self._shares.setdefault(req.client, Share(served))
        if not share.waiting:
            share.served = max(share.served, int(self._clock), self.least(share))
        if not share.live:
            share.since = number
        share.live += 1
        self.push(req, (share.clock + req.prompt_len, number, self._total))

    def least(self, share: Share) -> int:
        """Return the service of the least served other client, one that waits if any does."""
        others = [other for other in self._shares.values() if other is not share]
        waiting = [other.served for other in others if other.waiting]
        return min(waiting or [other.served for other in others], default=0)

    def turn_is_over(self, req: Req) -> bool:
        """Return True if a request had its turn since it was admitted; a longer prompt has more."""
        return req.device_len - req.prefill_len >= self._turn + req.prefill_len // 32

    def resume(self, req: Req) -> None:
        """Queue a retracted request before all others of its client."""
        share, number = self._shares[req.client], next(self._numbers)
        over = self.turn_is_over(req)
        if over:
            share.served = max(share.served, self.least(share))
        self.push(req, (-math.inf, -number, req.cached_len))
        if over and not share.rows:
            share.since = share.yielded = number

    def push(self, req: Req, tag: Tag) -> None:
        """Add a request to those that wait, with this tag."""
        share = self._shares[req.client]
        heapq.heappush(share.heap, (*tag, req))
        if not share.waiting:
            share.start = max(share.start, self._clock)
        share.waiting += 1
        self._tags[req] = tag
        self._waiting[req] = None
        self._changed = True

    def remove(self, req: Req) -> None:
        del self._waiting[req]
        share = self._shares[req.client]
        share.waiting -= 1
        self._changed = True
        if len(share.heap) > 2 * share.waiting:  # most have left: keep the tags of the others
            share.heap = [(*self._tags[req], req) for *_, req in share.heap if req in self._waiting]
            heapq.heapify(share.heap)

    def head(self, share: Share) -> Req:
        """Return the waiting request of a client that would be done first."""
        while share.heap[0][-1] not in self._waiting:
            heapq.heappop(share.heap)
        return share.heap[0][-1]

    def rank(self, req: Req) -> tuple[bool, float, int, Req]:
        """Rank a request among those of clients that count as equal; the lowest is first."""
        tag, number, _ = self._tags[req]
        start, rest = self._shares[req.client].start, req.prefill_len - req.cached_len
        return tag > -math.inf, start + rest, number, req

    def due(self, share: Share) -> int:
        """Return a client's service; a long new prompt adds its length, less what all had since."""
        tag, _, total = self._tags[req := self.head(share)]
        rest = req.prefill_len - self._step_tokens - (self._total - total)
        return share.served + (max(0, rest) if tag > -math.inf else 0)

    def first(self) -> Req | None:
        if self._changed:
            shares = [share for share in self._shares.values() if share.waiting]
            least = min(map(self.due, shares), default=0)
            equal = [share for share in shares if self.due(share) < least + self._step_tokens]
            yielded = (share.since for share in equal if share.since == share.yielded)
            line = min(yielded, default=math.inf)
            places = ((*share.place(line), *self.rank(self.head(share))) for share in equal)
            self._first = min(places)[-1] if shares else None
            self._changed = False
        return self._first

    def chunk_comes_first(self, chunked_req: Req) -> bool:
        if (first := self.first()) is None:
            return True
        if first.client == chunked_req.client:
            return self._tags[chunked_req] <= self._tags[first]
        ahead = self._shares[chunked_req.client].served - self._shares[first.client].served
        if abs(ahead) >= self._step_tokens:
            return ahead < 0
        return self.rank(chunked_req)[:3] <= self.rank(first)[:3]

    def charge(self, batch: Batch) -> None:
        """Count a step's tokens to their clients; prompt tokens also move the clocks."""
        prompts, number, self._changed = [], next(self._numbers), True
        for req in batch.reqs:
            share = self._shares[req.client]
            share.since = number
            if req.cached_len < req.prefill_len:
                prompts.append(req)
            else:
                share.served += ANSWER_WEIGHT
                self._total += ANSWER_WEIGHT
        if not prompts:
            return
        total = sum(req.extend_len for req in prompts)
        least = max(total, self._step_tokens // 32)
        computed = Counter(req.client for req in prompts)
        for req in prompts:
            share, cost = self._shares[req.client], req.extend_len * least // total
            share.served, share.start = share.served + cost, share.start + cost
            share.clock += req.extend_len / (share.waiting + computed[req.client])
        present = sum(name in computed or share.waiting > 0 for name, share in self._shares.items())
        self._clock += least / present
        self._total += least

    def release(self, req: Req) -> None:
        share = self._shares[req.client]
        share.live -= 1
        self._changed = True
        del self._tags[req]
        if not share.live:
            del self._shares[req.client]
            self._gone[req.client] = share.served
            if not self._shares:
                self._gone.clear()
            elif len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]  # the one that left first

    def retraction_order(self, reqs: Sequence[Req]) -> list[Req]:
        """Return the last request of the client with most of them; the next of those left."""
        return [req for *_, req in numbered(reqs)]

    def chunk_yields(self, req: Req, first: Req) -> bool:
        """Return True if a half-done prompt is a step ahead and has enough new tokens to yield."""
        tag, _, reached = self._tags[req]
        matched = 0 if req.cache_handle is None else req.cache_handle.cached_len
        begin = max(matched, reached) if tag == -math.inf else matched
        enough = max(begin - matched, 2 * first.prefill_len)
        ahead = self._shares[req.client].served - self.due(self._shares[first.client])
        is_ahead = ahead >= self._step_tokens
        return is_ahead and begin + enough <= req.cached_len < req.prefill_len

    def displaceable(self, reqs: Sequence[Req]) -> list[Req]:
        """Return the requests that may yield to the first one, whose client has fewer rows."""
        first = self.first()
        rows = 0 if first is None else self._shares[first.client].rows
        if first is None or (
            rows and len(reqs) <= 2 * rows + 1
        ):  # nobody has more than twice as many
            return []
        due = self.due(share := self._shares[first.client])
        ahead = {req for req in reqs if self._shares[req.client].served > due - self._step_tokens}
        numbers = numbered(reqs)

        def over(req: Req) -> bool:
            return self.turn_is_over(req) or self.chunk_yields(req, first)

        further = [req for number, _, req in numbers if number > 2 * rows + 1
                   and (over(req) or (req in ahead and not req.retracted))]  # fmt: skip
        only = [req for number, _, req in reversed(numbers) if number == 1 and not rows
                and over(req) and (req in ahead or due == share.served)]  # fmt: skip
        return further + only


def numbered(reqs: Sequence[Req]) -> list[tuple[int, int, Req]]:
    """Return (number within its client, index, request) of each request, the highest first."""
    counts, found = Counter[str](), []
    for index, req in enumerate(reqs):
        counts[req.client] += 1
        found.append((counts[req.client], index, req))
    return sorted(found, reverse=True)


def mixed_prefill_threshold(step_tokens: int) -> int:
    """Return the most tokens with which a longer prompt joins a prefill step."""
    return step_tokens // 32


class Shares:
    """Places shared by clients: one may hold at most `factor` times the free places.

    A tenth of the places is kept for clients that hold at most a tenth of the free places. Fewer
    than 4 * `factor` places are not shared: first come, first served.
    """

    def __init__(self, limit: int, factor: float = 8) -> None:
        self.limit, self.factor = limit, factor
        self.taken, self.held = 0, Counter[str]()

    @property
    def most(self) -> int:
        """The largest number of places for a client that is alone."""
        if self.limit < 4 * self.factor:
            return self.limit
        return int((self.limit - self.limit // 10) * self.factor // (self.factor + 1))

    def take(self, client: str, count: int) -> bool:
        """Take places for a client, unless that is more than its share."""
        free, held = self.limit - self.taken - count, self.held[client] + count
        small = self.limit < 4 * self.factor or held <= max(1, free // 10)
        if free < 0 or not (small or held <= self.factor * (free - self.limit // 10)):
            return False
        self.taken += count
        self.held[client] = held
        return True

    def give_back(self, client: str, count: int) -> None:
        self.taken -= count
        self.held[client] -= count
        if not self.held[client]:
            del self.held[client]
