"""The two phases: prefill, which admits prompts in chunks, and decode, one token per step.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.core import Batch, CacheHandle, Phase, Req
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.scheduler.queue import WaitingQueue


def future_pages(req: Req, page_size: int, reserve: int | None = None) -> int:
    """Return the pages that an admitted request may still need; its last token needs no K and V."""
    end = req.max_device_len - 1
    if reserve is not None:  # at most the rest of its prompt and the next `reserve` tokens
        end = min(end, max(req.cached_len, req.prefill_len) + reserve)
    return -(-end // page_size) - -(-req.cached_len // page_size)


class DecodeManager:
    """Requests with a complete prompt and room for more tokens, in the order of joining."""

    def __init__(self, reserve: int | None = None) -> None:
        self.reserve = reserve  # tokens of each answer that are promised ahead; None: all
        self.running: dict[int, Req] = {}  # by uid

    def remove(self, req: Req) -> None:
        self.running.pop(req.uid, None)

    def update(self, reqs: Iterable[Req]) -> None:
        """Keep requests that need another step after a launch; drop the others."""
        for req in reqs:
            if req.can_decode and not req.is_chunked:
                self.running[req.uid] = req
            else:
                self.remove(req)

    def schedule(self) -> Batch | None:
        """Return a batch of one token for each running request."""
        reqs = list(self.running.values())
        return Batch(reqs=reqs, phase=Phase.DECODE) if reqs else None


@dataclass(frozen=True)
class PrefillLimits:
    """Limits of one prefill step, in tokens."""

    max_extend_tokens: int  # computed in one step
    min_shared: int = 32  # shortest common prefix worth a step of waiting; 0: none
    mixed_prefill_threshold: int | None = None  # see `room`; None: the budget alone counts


class PrefillAdder:
    """Fills one prefill step: counts down tokens of the step and pages of the pool."""

    def __init__(
        self, cache: CacheManager, limits: PrefillLimits, reserved: int,
        reserve: int | None = None, yielding: int = 0,
    ) -> None:  # fmt: skip
        self.cache, self.limits, self.reqs = cache, limits, list[Req]()
        self.budget = limits.max_extend_tokens  # tokens that this step may still compute
        self.reserved, self.reserve, self.yielding = reserved, reserve, yielding  # see `adder`
        self.min_shared = -(-limits.min_shared // cache.page_size) * cache.page_size
        self.shortest = math.inf  # tokens of the step's shortest prompt, earlier chunks included
        self.prefixes = set[tuple[str | None, bytes]]()  # keys of prefixes computed in this step

    def room(self, tokens: int) -> int:
        """Return the tokens this step has left for a prompt with `tokens` left to compute."""
        threshold = self.limits.mixed_prefill_threshold
        if threshold is None or tokens <= 2 * self.shortest:
            return self.budget
        taken = self.limits.max_extend_tokens - self.budget
        return max(0, min(self.budget, threshold - taken))

    def add_chunk(self, req: Req) -> bool:
        """Compute as much of an admitted prompt as there is room for; False if there is none."""
        rest = req.prefill_len - req.cached_len
        length = min(self.room(rest), rest)
        if length == 0:
            return False
        size = rest if req.retracted else req.prefill_len - req.matched_len  # now it may match more
        self.shortest = min(self.shortest, size)
        req.schedule(req.cached_len + length)
        self.budget = self.budget - length if length == rest else 0
        self.reqs.append(req)
        if self.min_shared:
            self.prefixes.add(self.prefix_key(req, req.matched_len))
        return True

    def check(self, req: Req, whole: bool = False) -> CacheHandle | None:
        """Return the prefix to start a request from (`whole`: to its end), or None: it waits."""
        if self.budget <= 0 or self.cache.tables.free_rows == 0:
            return None
        handle = self.cache.match_req(req)
        tokens = req.prefill_len - handle.cached_len
        room = self.room(tokens)
        if (
            room <= 0
            or (whole and tokens > room)
            or self.is_in_batch_prefix(req, handle.cached_len)
        ):
            return None
        lockable = self.cache.prefix_cache.unlocked_tokens(handle)
        usable = self.cache.available_tokens - lockable + handle.cached_len
        pages = (
            self.reserved - self.yielding + future_pages(req, self.cache.page_size, self.reserve)
        )
        return handle if pages * self.cache.page_size <= usable else None

    def admit(self, req: Req, handle: CacheHandle) -> None:
        """Start a request from the prefix that `check` returned, and promise it its pages."""
        req.cached_len = handle.cached_len
        self.cache.lock(handle)
        self.cache.admit(req, handle)
        self.reserved += future_pages(req, self.cache.page_size, self.reserve)
        self.yielding = 0
        self.add_chunk(req)

    def prefix_key(self, req: Req, matched_len: int) -> tuple[str | None, bytes]:
        """Return the salt and the prompt up to `min_shared` tokens past the match, as a key."""
        end = min(matched_len + self.min_shared, req.prompt_len - 1)
        return req.sampling_params.cache_salt, req.prompt_ids[:end].tobytes()

    def is_in_batch_prefix(self, req: Req, matched_len: int) -> bool:
        """Return True if a request of this step computes a prefix that `req` could soon match."""
        rest = 0 if req.scores_prompt else req.prompt_len - 1 - matched_len
        return rest >= self.min_shared > 0 and self.prefix_key(req, matched_len) in self.prefixes


class PrefillManager:
    """Waiting requests, and the one whose prompt is half computed."""

    def __init__(
        self, cache: CacheManager, decode: DecodeManager, limits: PrefillLimits, queue: WaitingQueue
    ) -> None:
        self.cache, self.decode, self.limits = cache, decode, limits
        self.waiting = queue
        self.chunked_req: Req | None = None

    def remove(self, req: Req) -> None:
        """Forget a request if it is queued or half computed; its row and pages stay."""
        if req is self.chunked_req:
            self.chunked_req = None
        elif req.table_idx < 0:  # not admitted yet
            self.waiting.remove(req)

    def admitted(self) -> list[Req]:
        """Return the running requests in the order of joining, then the half-done prompt."""
        return [*self.decode.running.values(), *filter(None, [self.chunked_req])]

    def adder(self) -> PrefillAdder:
        """Start a step with a full token budget, and reserve the pages of admitted requests."""
        size, reserve, reqs = self.cache.page_size, self.decode.reserve, self.admitted()
        promised = {req: future_pages(req, size, reserve) for req in reqs}
        yielding = sum(promised[r] for r in {*self.waiting.displaceable(reqs)} - {self.chunked_req})
        return PrefillAdder(self.cache, self.limits, sum(promised.values()), reserve, yielding)

    def schedule(self) -> Batch | None:
        """Return the next prefill step: the chunked prompt and waiting ones, in queue order."""
        if self.chunked_req is None and not self.waiting:  # most steps: count no promised pages
            return None
        adder, chunked = self.adder(), self.chunked_req
        while adder.budget > 0:
            first = self.waiting.first()
            if chunked is not None and (first is None or self.waiting.chunk_comes_first(chunked)):
                if not adder.add_chunk(chunked):
                    break
                chunked = None
            elif first is None or (handle := adder.check(first, whole=chunked is not None)) is None:
                break
            else:
                adder.admit(first, handle)
                self.waiting.remove(first)
        if chunked is not None and adder.add_chunk(chunked):
            chunked = None
        if not adder.reqs:
            return None
        self.chunked_req = next((req for req in adder.reqs if req.is_chunked), chunked)
        return Batch(reqs=adder.reqs, phase=Phase.PREFILL)
