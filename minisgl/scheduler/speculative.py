"""Speculative decoding: guess tokens, check the guesses in one step, keep the right ones.

Generated from notebooks/09b_speculative.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.core import Batch, IntArray, Phase, Req
from minisgl.engine.runners import MAX_DRAFT_ROWS
from minisgl.engine.step import SampledTokens
from minisgl.scheduler.phases import future_pages
from minisgl.scheduler.scheduler import Launched, Scheduler

WINDOW = 8192  # tokens of a text that are searched
SHORTEST, LONGEST = 2, 8  # tokens that have to match


def prompt_lookup(ids: IntArray, at_least: int, most: int) -> IntArray:
    """Find an earlier copy of the end of ids [n]; return the next tokens: int32, `most` or none.

    `at_least` tokens have to match. The longest match up to `LONGEST` counts, of several the last.
    A match that overlaps the end is continued periodically.
    """
    ids = ids[-WINDOW:]
    ends, length = np.flatnonzero(ids[:-1] == ids[-1]), 1
    while length < LONGEST and len(ends):
        longer = ends[ends >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    if len(ends) == 0 or length < at_least:
        return ids[:0]
    return np.resize(ids[ends[-1] + 1 :], most)


class Proposer(Protocol):
    """A source of drafts, which is notified of the number of accepted ones."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
        """Propose up to `limit` tokens that may follow each request's `input_ids`."""
        ...

    def update(self, req: Req, drafted: int, accepted: int) -> None:
        """Record that `accepted` of its last `drafted` drafts were right."""
        ...

    def release(self, req: Req) -> None:
        """Forget a finished request, even if nothing was proposed for it."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


class NGramProposer:
    """Drafts from the text's own repetitions; each miss raises the required length of a match."""

    def __init__(self) -> None:
        self.misses: dict[Req, int] = {}  # consecutive steps without a right draft

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[IntArray]:
        """Propose by `prompt_lookup` in prompt and output."""
        return [prompt_lookup(req.input_ids, min(SHORTEST + self.misses.get(req, 0), LONGEST), most)
                for req, most in zip(reqs, limits)]  # fmt: skip

    def update(self, req: Req, drafted: int, accepted: int) -> None:
        """Count a miss, or set the misses to 0 after a hit."""
        self.misses[req] = 0 if accepted else self.misses.get(req, 0) + 1

    def release(self, req: Req) -> None:
        self.misses.pop(req, None)

    def reset(self) -> None:
        self.misses.clear()


@dataclass(eq=False)
class VerifyBatch(Batch):
    """A decode step in which a request has one more row for each of its drafts."""

    drafts: dict[Req, IntArray] = field(default_factory=dict)  # of all its requests; some are empty


def draft_row(req: Req, ahead: int) -> Req:
    """Copy the request as if its first `ahead` drafts were right."""
    row = copy(req)
    row.cached_len, row.device_len = req.cached_len + ahead, req.device_len + ahead
    return row


def verify_batch(drafts: dict[Req, IntArray]) -> VerifyBatch:
    """Make a batch of the requests themselves and a row for each of their drafts."""
    rows = [draft_row(req, ahead) if ahead else req
            for req, tokens in drafts.items() for ahead in range(1 + len(tokens))]  # fmt: skip
    return VerifyBatch(rows, Phase.DECODE, drafts=drafts)


def count_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Count the drafts before the first that differs from `drawn`, which is one token longer."""
    for count, (draft, token) in enumerate(zip(drafts, drawn)):
        if draft != token:
            return count
    return len(drafts)


@dataclass(eq=False)
class SpeculativeScheduler(Scheduler):
    """A scheduler that guesses tokens, and checks them in the step that samples the next one."""

    proposer: Proposer = field(default_factory=NGramProposer)
    num_speculative_tokens: int = 7  # drafts of one request, at most
    max_rows: int = MAX_DRAFT_ROWS
    drafted: int = 0  # tokens since the start
    accepted: int = 0  # of these

    @property
    def draft_counts(self) -> dict[str, int]:
        """The number of drafts and of right ones, by their names in `/metrics`."""
        counts = {"draft": self.drafted, "accepted": self.accepted}
        return {f"spec_decode_num_{name}_tokens": count for name, count in counts.items()}

    def draft(self, batch: Batch | None) -> dict[Req, IntArray]:
        """Propose drafts for each request of a decode step; return {} if there are none."""
        if batch is None:
            return {}
        most = min(self.num_speculative_tokens, self.max_rows // batch.size - 1)
        room = {req: min(most, req.max_device_len - 1 - req.device_len)
                for req in batch.reqs if req.matcher is None}  # fmt: skip
        reqs = [req for req, tokens in room.items() if tokens > 0]
        found = self.proposer.propose(reqs, [room[req] for req in reqs])
        drafts = dict.fromkeys(batch.reqs, NO_TOKENS) | dict(zip(reqs, found))
        return drafts if any(map(len, found)) and self.fits(drafts) else {}

    def fits(self, drafts: dict[Req, IntArray]) -> bool:
        """Return True if there are pages for all drafts without a retraction."""
        cache, size, chunked = self.cache, self.cache.page_size, self.prefill.chunked_req
        short = [req.device_len + len(tokens) - cache.allocated_len[req]
                 for req, tokens in drafts.items()]  # fmt: skip
        needed = 0 if chunked is None else future_pages(chunked, size, 0)
        needed += sum(-(-max(0, tokens) // size) for tokens in short)
        return needed <= cache.available_tokens // size

    def decode_step(self) -> Batch | None:
        """Return a batch of each running request's next token, with drafts if there are any."""
        if self.in_flight is not None and isinstance(self.in_flight.inputs.batch, VerifyBatch):
            self.finish_in_flight()  # until then its requests' lengths are open
        batch = Scheduler.decode_step(self)
        drafts = self.draft(batch)
        if drafts and self.in_flight is not None:  # looked ahead, without the last token
            self.finish_in_flight()
            batch = self.decode.schedule()
            drafts = self.draft(batch)
        return verify_batch(drafts) if drafts else batch

    def launch(self, batch: Batch) -> Launched:
        """Start a step; with drafts, requests advance by the token that each gets in any case."""
        if not isinstance(batch, VerifyBatch):
            return Scheduler.launch(self, batch)
        reqs = list(batch.drafts)
        for req, tokens in batch.drafts.items():
            self.engine.tables.write_tokens(req.table_idx, req.device_len, tokens)
            req.schedule(req.device_len + len(tokens))
        self.cache.allocate_paged(reqs)
        for req, tokens in batch.drafts.items():
            req.schedule(req.device_len - len(tokens))
        inputs = self.engine.prepare(batch)
        if inputs.meta is not None:  # not captured
            inputs = replace(inputs, meta=join_rows(inputs.meta))
        return self.start(Batch(reqs, Phase.DECODE), inputs)

    def process(self, launched: Launched, tokens: SampledTokens) -> None:
        """Send the drafts that equal their samples, and the sampled token after them."""
        if isinstance(launched.inputs.batch, VerifyBatch):
            launched, tokens = self.accept(launched, tokens)
        Scheduler.process(self, launched, tokens)

    def accept(self, launched: Launched, tokens: SampledTokens) -> tuple[Launched, SampledTokens]:
        """Return the step as if only its right rows had been computed; advance its requests."""
        fi, batch = launched.inputs, launched.inputs.batch
        assert isinstance(batch, VerifyBatch)
        rows: dict[int, list[int]] = {req.uid: [] for req in batch.drafts}
        for row in np.argsort(fi.write_positions).tolist():  # the engine may have sorted them
            rows[fi.sampled[row].uid].append(row)
        owners: list[Req] = []
        kept: list[int] = []
        for req, drafts in batch.drafts.items():
            if self.reqs.get(req.uid) is req:  # else aborted while the step was in flight
                drawn = [tokens.ids[row] for row in rows[req.uid]]
                count = count_accepted(drafts.tolist(), drawn)
                self.advance_accepted(req, len(drafts), count)
                owners += [req] * (count + 1)
                kept += rows[req.uid][: count + 1]
        parts: list[Any] = [tokens.ids, tokens.logprobs, tokens.top_ids, tokens.top_logprobs]
        picked: list[Any] = [
            None if part is None else [part[row] for row in kept] for part in parts
        ]
        inputs = replace(fi, sampled=tuple(owners))
        return launched._replace(inputs=inputs), SampledTokens(*picked)

    def advance_accepted(self, req: Req, drafted: int, accepted: int) -> None:
        """Advance past accepted drafts, whose keys and values are already in the cache."""
        for _ in range(accepted):
            req.advance()
        if drafted:
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
            self.prefill.waiting.charge(Batch([req] * accepted, Phase.DECODE))
            self.proposer.update(req, drafted, accepted)

    def release(self, req: Req) -> None:
        """Forget a request, also in the proposer."""
        Scheduler.release(self, req)
        self.proposer.release(req)

    def reset(self) -> None:
        """Forget all requests, also in the proposer."""
        Scheduler.reset(self)
        self.proposer.reset()


NO_TOKENS = np.empty(0, np.int32)


def join_rows(meta: AttentionMetadata) -> AttentionMetadata:
    """Join a decode step's drafts: attention sees several new tokens of each request.

    Rows of one request have to be adjacent and ordered by position.
    """
    first = np.flatnonzero(np.diff(meta.table_idx, prepend=-1))
    last = np.append(first[1:], meta.batch_size) - 1
    return build_metadata(
        Phase.PREFILL, meta.table_idx[first], (last - first + 1).astype(np.int32),
        meta.seq_lens[last], meta.page_table, meta.page_size,
    )  # fmt: skip
