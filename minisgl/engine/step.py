"""One step on the host: the layout of its tokens as integers, and its result.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.attention.staging import mark
from minisgl.core import Batch, IntArray, Phase, Req
from minisgl.engine.graph import GraphRunner
from minisgl.engine.sampler import SampleOutput, Sampler, SamplingArgs
from minisgl.kvcache.page_table import TableManager

LENGTHS = attrgetter("table_idx"), attrgetter("cached_len"), attrgetter("device_len")


def lengths(reqs: list[Req]) -> tuple[IntArray, IntArray, IntArray]:
    """Return row, cached_len and device_len of each request, int32 [len(reqs)]."""
    count = len(reqs)
    row, cached, device = (np.fromiter(map(get, reqs), np.int32, count) for get in LENGTHS)
    return row, cached, device


def new_positions(cached: IntArray, device: IntArray) -> IntArray:
    """Concatenate positions cached_len .. device_len - 1 of every request, int32 [tokens]."""
    extend = device - cached
    ends = np.cumsum(extend, dtype=np.int32)
    return np.arange(extend.sum(), dtype=np.int32) - np.repeat(ends - device, extend)


@dataclass(eq=False)
class ForwardInput:
    """Input of one step, fixed once it is prepared; integers are int32.

    If `sampled` is empty, `last_idx` still names one token: a model returns at least one row.
    """

    batch: Batch
    sampled: tuple[Req, ...]  # the requests that get a token: all but those in mid-prompt
    token_rows: IntArray  # [tokens], padding included
    positions: IntArray  # [tokens]
    out_loc: IntArray  # [tokens] slots
    last_idx: IntArray  # [sampled] tokens that need logits
    write_rows: IntArray  # [sampled] where the new tokens go in the token pool
    write_positions: IntArray  # [sampled]
    meta: AttentionMetadata | None  # None for a captured decode step, whose plan is captured, too
    sampling: SamplingArgs | None  # None: all greedy
    runner: GraphRunner | None = None  # replays the step; None: it runs eagerly
    packed: NDArray[np.int64] | None = None  # for the runner: all of it, as one array


def build_forward_input(
    batch: Batch, tables: TableManager, page_size: int, sampler: Sampler | None = None,
    padded: list[Req] | None = None,
) -> ForwardInput:  # fmt: skip
    """Compute rows, positions and slots of a batch's tokens; arithmetic on the host only.

    `padded` is for a captured decode step: the batch's requests in any order, then dummies.
    """
    reqs = batch.reqs if padded is None else padded
    rows, cached, device = lengths(reqs)
    extend = device - cached
    chosen: slice | NDArray[np.intp] = slice(batch.size)
    if batch.phase is Phase.DECODE:  # one token for each request, and each is sampled
        token_rows, positions, sampled = rows, cached, tuple(reqs[: batch.size])
        last_idx = np.arange(len(rows), dtype=np.int32)
    else:
        sampled = tuple(req for req in batch.reqs if not req.is_chunked)
        chosen = np.flatnonzero([not req.is_chunked for req in batch.reqs])
        token_rows, positions = np.repeat(rows, extend), new_positions(cached, device)
        last_idx = np.cumsum(extend, dtype=np.int32) - 1
    table = tables.page_table
    out_loc = table[token_rows, positions]
    sampling = sampler.prepare(sampled) if sampler is not None and sampled else None
    meta = None
    if padded is None:
        meta = build_metadata(batch.phase, rows, extend, device, table, page_size)
    last_idx = last_idx[chosen] if sampled else last_idx[-1:]
    return ForwardInput(
        batch, sampled, token_rows, positions, out_loc, last_idx, rows[chosen], device[chosen],
        meta, sampling,
    )  # fmt: skip


@dataclass(frozen=True)
class SampledTokens:
    """A step's result on the host, in the order of `ForwardInput.sampled`."""

    ids: list[int]
    logprobs: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None


def to_host(part: Tensor) -> Tensor:
    """Start a copy into fresh pinned memory; torch does not reuse it before the copy ends."""
    if part.device.type != "cuda":
        return part.clone()  # the next replay overwrites this result
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


class ForwardOutput:
    """A started step: its tokens are on the device, and on the host once `wait` returns."""

    def __init__(self, out: SampleOutput) -> None:
        self.next_ids = out.next_ids
        parts = (out.next_ids, out.logprobs, out.top_ids, out.top_logprobs)
        self._host = [None if part is None else to_host(part) for part in parts]
        self._event = mark(out.next_ids.device)

    def wait(self) -> SampledTokens:
        """Wait until the tokens are on the host, and return them."""
        if self._event is not None:
            self._event.synchronize()
        ids, *rest = [None if part is None else part.tolist() for part in self._host]
        return SampledTokens(ids or [], *rest)
