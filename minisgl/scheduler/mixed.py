"""Requests side by side: mixed steps, chunks of long prompts, turns of long contexts.

Generated from notebooks/09ba_mixed_steps.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from minisgl.core import Batch, CacheHandle, Phase, Req
from minisgl.scheduler.phases import DecodeManager, PrefillAdder, PrefillManager

MAX_CONTEXT = 32_768  # tokens of all requests in a mixed step: prefill kernels decode slowly
CPU_CHUNK, GPU_CHUNK = 256, 2048  # tokens of a long prompt in a step beside running requests


class MixedPrefill(PrefillManager):
    """Computes short prompts together with the next token of every running request."""

    max_tokens = max_requests = 0  # of a mixed step; 0: none is mixed
    long_chunk = GPU_CHUNK

    def schedule(self) -> Batch | None:
        """Return the next prefill step, with all running requests if they fit."""
        batch = super().schedule()
        running = list(self.decode.running.values())
        if batch is None or not running:
            return batch
        reqs = batch.reqs + running
        fits = (
            len(reqs) <= self.max_requests
            and sum(req.extend_len for req in reqs) <= self.max_tokens
            and sum(req.device_len for req in reqs) <= MAX_CONTEXT
            and not any(req.scores_prompt for req in reqs)
            and self.has_pages(reqs)
        )
        return Batch(reqs, Phase.PREFILL) if fits else batch

    def has_pages(self, reqs: list[Req]) -> bool:
        """Return True if these, and all of a half-done prompt, have pages without a retraction."""
        half_done, size = self.chunked_req, self.cache.page_size
        members = reqs if half_done is None or half_done in reqs else [*reqs, half_done]
        ends = (req.prefill_len if req is half_done else req.device_len for req in members)
        taken = (self.cache.allocated_len.get(req, req.cached_len) for req in members)
        short = (max(0, end - begin) for end, begin in zip(ends, taken))
        return sum(-(-tokens // size) for tokens in short) <= self.cache.available_tokens // size

    @property
    def chunk(self) -> int:
        """The tokens after which a step takes no more of a long prompt."""
        beside = self.decode.running and self.limits.mixed_prefill_threshold
        return self.long_chunk if beside else self.limits.max_extend_tokens

    def adder(self) -> PrefillAdder:
        """Start a step; beside running requests it begins with a small chunk of a long prompt."""
        adder, first = super().adder(), self.chunked_req or self.waiting.first()
        if first and first.prefill_len - first.cached_len > self.chunk < adder.budget:
            adder.limits = replace(adder.limits, max_extend_tokens=self.chunk)
            adder.budget = self.chunk
        return adder


CPU_CONTEXT, GPU_CONTEXT = 32_768, 1 << 22  # tokens of all requests of a step


class SharedDecode(DecodeManager):
    """Bounds the context of a decode step; clients share it, and each one's requests take turns.

    A step has at most `max_context` tokens and one further request.
    """

    def __init__(self, reserve: int | None = None, max_context: int = GPU_CONTEXT) -> None:
        super().__init__(reserve)
        self.max_context, self.last_step = max_context, 0

    def update(self, reqs: Iterable[Req]) -> None:
        """Note the step in its requests, and keep those that need another one."""
        self.last_step, reqs = self.last_step + 1, list(reqs)
        for req in reqs:
            req.last_step = self.last_step
        super().update(reqs)

    def schedule(self) -> Batch | None:
        """Return a batch of all running requests, or of those whose turn it is."""
        batch = super().schedule()
        if batch is None or sum(req.device_len for req in batch.reqs) <= self.max_context:
            return batch
        order = sorted((req.last_step, index) for index, req in enumerate(batch.reqs))
        ranks, sums = list[tuple[int, int, int]](), Counter[str]()
        for last_step, index in order:
            req = batch.reqs[index]
            before, sums[req.client] = sums[req.client], sums[req.client] + req.device_len
            ranks.append((sums[req.client] if before else 0, last_step, index))
        chosen, total = {order[0][-1]}, 0
        for *_, index in sorted(ranks[1:]):
            if total + batch.reqs[index].device_len <= self.max_context:
                chosen.add(index)
                total += batch.reqs[index].device_len
        return Batch([batch.reqs[index] for index in sorted(chosen)], batch.phase)


class SharedAdder(PrefillAdder):
    """Fills a prefill step up to `max_context` tokens of context, or with a single request.

    A prompt with more than `chunk` tokens left gets none of the step's tokens after the first
    `chunk`.
    """

    def __init__(self, adder: PrefillAdder, max_context: int, chunk: int) -> None:
        promises = adder.reserved, adder.reserve, adder.yielding
        super().__init__(adder.cache, adder.limits, *promises)
        self.max_context, self.chunk = max_context, chunk

    def room(self, tokens: int) -> int:
        """Return the tokens this step has left for a prompt, here also for a long one."""
        room, taken = super().room(tokens), self.limits.max_extend_tokens - self.budget
        return room if tokens <= self.chunk else max(0, min(room, self.chunk - taken))

    def check(self, req: Req, whole: bool = False) -> CacheHandle | None:
        """Return the prefix to start from, or None: the request waits, here also for context."""
        context = sum(other.device_len for other in self.reqs)
        if self.reqs and context + req.prefill_len > self.max_context:
            return None
        return super().check(req, whole)


class SharedPrefill(MixedPrefill):
    """Bounds the context of a prefill step; a decode step has the same bound."""

    def adder(self) -> PrefillAdder:
        """Start a step whose context has the bound of the decode manager, if that has one."""
        adder, decode = super().adder(), self.decode
        if isinstance(decode, SharedDecode):
            return SharedAdder(adder, decode.max_context, self.chunk)
        return adder
