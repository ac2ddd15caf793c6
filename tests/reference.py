"""Oracle for the scheduler's parts: dictionaries and sums, without heaps, trees or pages.

The adversary compares each decision with these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl import events
from minisgl.core import Batch, Phase, Req
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.recording import Replay
from minisgl.scheduler.phases import DecodeManager, PrefillLimits
from minisgl.scheduler.retraction import DelayedPrefill
from minisgl.scheduler.speculative import LONGEST, SHORTEST, WINDOW


@dataclass
class Fairness:
    """The order of the fair queue (chapter 08b): counters of clients, all requests in one list."""

    step_tokens: int
    turn: int = 128  # answer tokens of a turn, besides a 32nd of the prompt
    served: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)  # of each client's own requests
    live: Counter[str] = field(default_factory=Counter)
    waiting: dict[Req, tuple[float, int]] = field(default_factory=dict)  # tag, number of arrival
    tags: dict[Req, tuple[float, int]] = field(default_factory=dict)  # of all that are not over
    clock: float = 0.0
    count: int = 0
    total: int = 0  # tokens of all
    came: dict[Req, int] = field(default_factory=dict)  # `total` at the arrival of a new request
    reached: dict[Req, int] = field(default_factory=dict)  # tokens of a retracted request
    starts: dict[str, float] = field(default_factory=dict)  # prompt tokens computed, or the clock
    gone: list[tuple[str, int]] = field(default_factory=list)  # clients that left, what they had
    line: list[str] = field(default_factory=list)  # clients, the one last served at the end
    yielded: set[str] = field(default_factory=set)  # not served since the end of their turn

    def waits(self, client: str) -> int:
        return sum(req.client == client for req in self.waiting)

    def add(self, req: Req) -> None:
        """A new request; its client gets no credit for the time in which it wanted nothing."""
        name = req.client
        self.served.setdefault(name, dict(self.gone).get(name, 0))
        self.gone = [(client, served) for client, served in self.gone if client != name]
        if not self.waits(name):
            self.starts[name] = max(self.starts.get(name, 0.0), self.clock)
            self.served[name] = max(self.served[name], int(self.clock), self.least(name))
        if not self.live[name]:
            self.line.append(name)
        self.tags[req] = self.clocks.setdefault(name, 0.0) + req.prompt_len, self.count
        self.came[req] = self.total
        self.waiting[req] = self.tags[req]
        self.live[name] += 1
        self.count += 1

    def least(self, name: str) -> int:
        """Return what the least served other client has; of those that wait, if any do."""
        others = [client for client in self.served if client != name]
        waiting = [client for client in others if self.waits(client)]
        return min((self.served[client] for client in waiting or others), default=0)

    def serve(self, client: str) -> None:
        """Move a client to the end of the line."""
        self.line.remove(client)
        self.line.append(client)
        self.yielded.discard(client)

    def remove(self, req: Req) -> None:
        """A request waits no longer."""
        if req in self.waiting:
            del self.waiting[req]

    def release(self, req: Req) -> None:
        """A request is over; a client without any is forgotten."""
        self.remove(req)
        del self.tags[req]
        self.came.pop(req, None)
        self.reached.pop(req, None)
        self.live[req.client] -= 1
        if not self.live[req.client]:
            self.gone.append((req.client, self.served[req.client]))
            self.gone = self.gone[-1024:] if any(self.live.values()) else []
            del self.served[req.client], self.clocks[req.client], self.starts[req.client]
            self.line.remove(req.client)
            self.yielded.discard(req.client)

    def resume(self, req: Req) -> None:
        """A retracted request comes before all others of its client."""
        name, over = req.client, self.turn_is_over(req)
        if over:
            self.served[name] = max(self.served[name], self.least(name))
        if not self.waits(name):
            self.starts[name] = max(self.starts[name], self.clock)
        self.count += 1
        self.tags[req] = self.waiting[req] = -math.inf, -self.count
        self.came.pop(req, None)
        self.reached[req] = req.cached_len
        if over and not self.rows(name):
            self.serve(name)
            self.yielded.add(name)

    def turn_is_over(self, req: Req) -> bool:
        """Return True if a request was given enough since it was last admitted."""
        return req.device_len >= req.prefill_len + self.turn + req.prefill_len // 32

    def chunk_yields(self, req: Req, first: Req) -> bool:
        """Return True if a half-done prompt had more than others, and enough that is new."""
        if req.cached_len >= req.prefill_len:
            return False
        if self.served[req.client] < self.due(first) + self.step_tokens:
            return False
        found = req.cache_handle.cached_len if req.cache_handle is not None else 0
        again = max(self.reached.get(req, 0) - found, 0)
        new = req.cached_len - found - again
        return new >= again and new >= 2 * first.prefill_len

    def rows(self, client: str) -> int:
        """The number of a client's requests that neither wait nor are over."""
        return self.live[client] - self.waits(client)

    def rank(self, req: Req) -> tuple[bool, float, int]:
        end = self.starts[req.client] + (req.prefill_len - req.cached_len)
        return self.tags[req][0] > -math.inf, end, self.tags[req][1]

    def due(self, head: Req) -> int:
        """What its client will have had, less a step and less what all had since it came."""
        if head not in self.came:  # it was retracted
            return self.served[head.client]
        rest = head.prefill_len - (self.total - self.came[head]) - self.step_tokens
        return self.served[head.client] + max(rest, 0)

    def first(self) -> Req | None:
        """The next to be admitted: of the clients that count as equal, the first head."""
        if not self.waiting:
            return None
        heads: dict[str, Req] = {}
        for req in sorted(self.waiting, key=lambda req: self.tags[req]):
            heads.setdefault(req.client, req)
        least = min(self.due(req) for req in heads.values())
        heads = {
            name: req for name, req in heads.items() if self.due(req) - least < self.step_tokens
        }
        behind = [client for client in self.line if client in self.yielded and client in heads]
        before = self.line[: self.line.index(behind[0])] if behind else self.line

        def place(client: str) -> int:
            return 0 if client in before else 1 if client in behind[:1] else 2

        def key(req: Req) -> tuple[Any, ...]:
            power = math.ceil(math.log2(self.rows(req.client) + 1))
            return power, place(req.client), *self.rank(req)

        return min(heads.values(), key=key)

    def next_retracted(self, reqs: Sequence[Req]) -> Req:
        """Of the client that has most of these requests, the one that joined last."""
        counts = Counter(req.client for req in reqs)
        return next(req for req in reversed(reqs) if counts[req.client] == max(counts.values()))

    def displaced(self, first: Req | None, reqs: Sequence[Req]) -> list[Req]:
        """Return those of `reqs`, in the order of joining, that may yield to the first one."""
        if first is None:
            return []
        rows, found = self.rows(first.client), []

        def over(req: Req) -> bool:
            return self.turn_is_over(req) or self.chunk_yields(req, first)

        for index, req in enumerate(reqs):
            before = sum(other.client == req.client for other in reqs[:index])
            ahead = self.served[req.client] + self.step_tokens > self.due(first)
            is_long = self.due(first) > self.served[first.client]
            if before > 2 * rows and (over(req) or (ahead and not req.retracted)):
                found.append(req)
            if rows == before == 0 and over(req) and (ahead or not is_long):
                found.append(req)
        return found

    def next_displaced(self, first: Req | None, reqs: Sequence[Req]) -> Req | None:
        """Return the next to yield: as in a retraction, but of clients with one the first."""
        yields, left = self.displaced(first, reqs), list(reqs)
        for _ in reqs:
            left.remove(req := self.next_retracted(left))
            if req in yields and any(other.client == req.client for other in left):
                return req
        return yields[0] if yields else None

    def chunk_first(self, chunked: Req) -> bool:
        """Return True if a half-done prompt goes on before the first that waits."""
        first = self.first()
        if first is None:
            return True
        if first.client == chunked.client:
            return self.tags[chunked] <= self.tags[first]
        ahead = self.served[chunked.client] - self.served[first.client]
        if abs(ahead) < self.step_tokens:
            return self.rank(chunked) <= self.rank(first)
        return ahead < 0

    def charge(self, phase: Phase, reqs: Sequence[Req]) -> None:
        """Count a step's tokens to their clients."""
        for req in reqs:
            self.serve(req.client)
        if phase is Phase.DECODE:
            for req in reqs:
                self.served[req.client] += 2
            self.total += 2 * len(reqs)
            return
        here, tokens = Counter(req.client for req in reqs), sum(req.extend_len for req in reqs)
        whole = max(tokens, self.step_tokens // 32)  # no step is cheaper
        for req in reqs:
            name, cost = req.client, req.extend_len * whole // tokens
            self.served[name] += cost
            self.starts[name] += cost
            self.clocks[name] += req.extend_len / (self.waits(name) + here[name])
        present = here.keys() | {req.client for req in self.waiting}
        self.clock += whole / len(present)
        self.total += whole


@dataclass
class Prefixes:
    """Cached prefixes as a set; unknown once one was evicted, until all are forgotten."""

    page_size: int
    known: set[tuple[Any, bytes]] = field(default_factory=set)
    sure: bool = True

    def prefixes(self, req: Req, length: int) -> list[tuple[Any, bytes]]:
        """Whole pages of the beginning of a request, the shortest first."""
        ends = range(self.page_size, length + 1, self.page_size)
        salt, ids = req.sampling_params.cache_salt, req.input_ids
        return [(salt, ids[:end].tobytes()) for end in ends]

    def insert(self, req: Req, length: int) -> None:
        """Return the tokens that a request has computed."""
        self.known.update(self.prefixes(req, length))

    def match(self, req: Req) -> int:
        """Tokens that a waiting request finds; all but its last one, none if it is scored."""
        if req.scores_prompt:
            return 0
        found = 0
        for key in self.prefixes(req, req.host_len - 1):
            if key not in self.known:
                break
            found += self.page_size
        return found


def promised(req: Req, page_size: int, reserve: int | None, matched: int) -> int:
    """Pages that a request may still need beyond `matched` tokens: its last token needs none."""
    end = req.max_device_len - 1
    if reserve is not None:
        end = min(end, max(matched, req.prefill_len) + reserve)
    return math.ceil(end / page_size) - math.ceil(matched / page_size)


@dataclass
class Admission:
    """Rules of a prefill step: tokens, rows, pages, and prefixes that others compute."""

    cache: CacheManager
    decode: DecodeManager
    limits: PrefillLimits
    max_context: int  # tokens of all requests of the step
    chunk: int = 2**31  # tokens of the step after which it takes no more of a long prompt

    def lengths_fit(self, batch: Batch) -> bool:
        """Return True if each member computes as much as there is room for."""
        left, shortest = self.limits.max_extend_tokens, math.inf
        for req in batch.reqs:
            rest = req.prefill_len - req.cached_len
            length = min(rest, self.room(rest, left, shortest))
            if req.extend_len != length or left <= 0:
                return False
            own = rest if req.retracted else req.prefill_len - req.matched_len
            shortest, left = min(shortest, own), left - length if length == rest else 0
        return True

    def room(self, rest: int, left: int, shortest: float) -> int:
        """Tokens for a prompt with `rest` tokens to compute, behind others in the step."""
        threshold, taken = self.limits.mixed_prefill_threshold, self.limits.max_extend_tokens - left
        if rest > self.chunk:
            left = max(0, min(left, self.chunk - taken))
        if threshold is None or rest <= 2 * shortest:
            return left
        return max(0, min(left, threshold - taken))

    def beginning(self, req: Req, matched: int) -> tuple[Any, bytes] | None:
        """Return the tokens that `req` would compute first, if others may wait for them."""
        size = self.cache.page_size
        shared = math.ceil(self.limits.min_shared / size) * size
        if not shared:
            return None
        end = min(matched + shared, req.prompt_len - 1)
        return req.sampling_params.cache_salt, req.input_ids[:end].tobytes()

    def waits_for_another(self, req: Req, matched: int, reqs: Sequence[Req]) -> bool:
        """Return True if one of `reqs` computes a prefix that `req` could soon match."""
        size = self.cache.page_size
        own = self.beginning(req, matched)
        far = req.prompt_len - 1 - matched >= math.ceil(self.limits.min_shared / size) * size
        others = (self.beginning(other, other.matched_len) for other in reqs)
        return own is not None and not req.scores_prompt and far and own in others

    def shared(self, req: Req, other: Req, matched: int) -> int:
        """Return the tokens of a match that another request has locked."""
        salts = req.sampling_params.cache_salt, other.sampling_params.cache_salt
        if other.cache_handle is None or salts[0] != salts[1]:
            return 0
        most, size = min(matched, other.cache_handle.cached_len), self.cache.page_size
        differ = np.flatnonzero(req.input_ids[:most] != other.input_ids[:most])
        return (int(differ[0]) if len(differ) else most) // size * size

    def refused(
        self,
        req: Req,
        matched: int,
        batch: Batch | None,
        chunked: Req | None,
        yields: Sequence[Req] = (),
    ) -> str:
        """Return why the first that waits is not in the step; empty if it should be.

        What was promised to `yields` does not bind it.
        """
        reqs = [] if batch is None else batch.reqs
        if self.cache.tables.free_rows == 0:
            return "no row"
        if any(other.is_chunked for other in reqs) or chunked is not None:
            return "a prompt is half done"
        if reqs and sum(other.device_len for other in reqs) + req.prefill_len > self.max_context:
            return "too much context"
        left = self.limits.max_extend_tokens - sum(other.extend_len for other in reqs)
        own = (r.prefill_len - (r.cached_len if r.retracted else r.matched_len) for r in reqs)
        if left <= 0 or self.room(req.host_len - matched, left, min(own, default=math.inf)) <= 0:
            return "no tokens"
        if self.waits_for_another(req, matched, reqs):
            return "another one computes its beginning"
        size, reserve = self.cache.page_size, self.decode.reserve
        holders = [*self.decode.running.values(), *reqs]
        taken = sum(
            promised(other, size, reserve, other.cached_len)
            for other in holders
            if other not in yields
        )
        # Locked, the rest of its prefix is evictable no more.
        locked = max((self.shared(req, other, matched) for other in holders), default=0)
        taken += (matched - locked) // size
        req_end = req.max_device_len - 1
        if reserve is not None:
            req_end = min(req_end, max(matched, req.host_len) + reserve)
        needed = math.ceil(req_end / size) - matched // size
        return "no pages" if needed + taken > self.cache.available_tokens // size else ""


def drafts_of(ids: list[int], in_vain: int, most: int) -> list[int]:
    """Return the drafts of an n-gram proposer after `in_vain` steps without an accepted one."""
    ids = ids[-WINDOW:]
    for length in range(LONGEST, min(SHORTEST + in_vain, LONGEST) - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                return [ids[end + i % (len(ids) - end)] for i in range(most)]
    return []


class Rest:
    """Delay of new requests until a group has formed (chapter 09c)."""

    SHARE, MOST = 2, 4

    def __init__(self, manager: DelayedPrefill) -> None:
        self.manager, self.left = manager, 0
        # Ours are smaller, by as much as the engine's own are meant to be larger.
        manager.share, manager.most = DelayedPrefill.share // 16, DelayedPrefill.most // 4

    def rests(self) -> bool:
        """Return True if this turn has no prefill, so that a group can form."""
        tables, self.left = self.manager.cache.tables, self.left - 1
        group = min(len(self.manager.waiting), tables.num_rows // self.SHARE)
        return self.left > 0 and self.manager.chunked_req is None and tables.free_rows < group

    def launched(self) -> None:
        """A prefill step was chosen."""
        self.left = 0 if self.manager.cache.tables.free_rows else self.MOST


class Shadow(Replay):
    """The state according to the events (chapter 02c), compared with the real one."""

    def change_request(self, event: events.Event) -> None:
        """Apply an event; evictions take what was used longest ago."""
        if isinstance(event, events.NodeEvicted):
            oldest = next(iter(self.lru))
            assert event.node == oldest, f"evicts {event.node}, but {oldest} is older"
        super().change_request(event)

    def compare(self, cache: CacheManager, live: Sequence[Req]) -> None:
        """Check pages, rows, tree and order of use."""
        assert self.free == set(cache.allocator.free_set().tolist()), "events: free pages"
        size = cache.page_size
        for req in live:
            handle = req.cache_handle
            assert handle is not None, f"{req} has a row, but no prefix"
            end = cache.allocated_len.get(req, handle.cached_len)
            row = cache.tables.page_table[req.table_idx, :end:size] // size
            told = self.requests[req.uid]
            assert told.row == req.table_idx and told.pages == row.tolist(), f"events: row of {req}"
            assert told.shared == handle.cached_len // size, f"events: prefix of {req}"
        tree: Any = cache.prefix_cache
        if hasattr(tree, "lru"):
            order = [tree.first_page(node) for node in tree.lru]
            assert list(self.lru) == order, "events: order of use"
            locks = {tree.first_page(node): node.ref_count for node in tree.nodes()[1:]}
            assert {n: node.locks for n, node in self.nodes.items()} == locks, "events: locks"
