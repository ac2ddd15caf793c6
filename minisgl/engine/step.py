"""One step on the host: which token goes where, as integers; and its result.

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
from minisgl.attention.staging import Event, mark
from minisgl.core import Batch, IntArray, Phase, Req
from minisgl.engine.sampler import SampleOutput, Sampler, SamplingArgs
from minisgl.kvcache.page_table import TableManager


@dataclass(frozen=True)
class ForwardInput:
    """All that one step needs, fixed when it is built; integers are int32.

    If `sampled` is empty, `last_idx` names one token all the same: a model gives at least one row.
    """

    batch: Batch
    sampled: tuple[Req, ...]  # the requests that get a token: all but those in mid-prompt
    token_rows: IntArray  # [tokens], padding included
    positions: IntArray  # [tokens]
    out_loc: IntArray  # [tokens] slots
    last_idx: IntArray  # [sampled] tokens whose logits are wanted
    write_rows: IntArray  # [sampled] where the new tokens go in the token pool
    write_positions: IntArray  # [sampled]
    meta: AttentionMetadata | None  # None: the backend needs no plan
    sampling: SamplingArgs | None
    packed: NDArray[np.int64] | None = None  # for a recorded step: all of it, as one array

    @property
    def use_graph(self) -> bool:
        """True if a recorded step is replayed."""
        return self.packed is not None


LENGTHS = attrgetter("table_idx"), attrgetter("cached_len"), attrgetter("device_len")


def lengths(reqs: list[Req]) -> tuple[IntArray, IntArray, IntArray]:
    """Row, cached_len and device_len of each request, int32 [len(reqs)]."""
    count = len(reqs)
    row, cached, device = (np.fromiter(map(get, reqs), np.int32, count) for get in LENGTHS)
    return row, cached, device


def new_positions(cached: IntArray, device: IntArray) -> IntArray:
    """Positions cached_len .. device_len - 1 of every request, end to end, int32 [tokens]."""
    extend = device - cached
    ends = np.cumsum(extend, dtype=np.int32)
    return np.arange(extend.sum(), dtype=np.int32) - np.repeat(ends - device, extend)


PACKED = ("gather", "scatter", "rows", "positions", "out_loc", "keys", "temperature")


def pack(
    rows: IntArray, positions: IntArray, out_loc: IntArray, width: int, count: int,
    sampling: SamplingArgs | None,
) -> NDArray[np.int64]:  # fmt: skip
    """A padded decode step as one array [7, size]; the first `count` requests are real.

    gather, scatter: where in the flat token pool the input is and the result goes; padding writes
    over its own input. keys: two int32 for each request. temperature: float32, 0 for greedy.
    """
    size = len(rows)
    packed = np.zeros((len(PACKED), size), np.int64)
    packed[0] = rows.astype(np.int64) * width + positions
    packed[1] = packed[0]
    packed[1, :count] += 1
    packed[2], packed[3], packed[4] = rows, positions, out_loc
    if sampling is not None:
        packed[5].view(np.int32).reshape(2, size)[:, :count] = sampling.keys
        packed[6].view(np.float32)[:count] = sampling.temperature
    return packed


def build_forward_input(
    batch: Batch,
    tables: TableManager,
    page_size: int,
    sampler: Sampler | None = None,
    use_graph: bool = False,
    plan_free: bool = False,
) -> ForwardInput:
    """Turn "who runs" into "what goes where"; arithmetic on the host only, padding included.

    plan_free: a recorded step of this kind needs no metadata.
    """
    rows, cached, device = lengths(batch.padded_reqs)
    extend = device - cached
    decode = batch.phase is Phase.DECODE  # one token each, and everybody gets the next one
    chosen: slice | NDArray[np.intp]
    token_rows = rows if decode else np.repeat(rows, extend)
    positions = cached if decode else new_positions(cached, device)
    out_loc = tables.page_table[token_rows, positions]
    if decode:
        chosen, sampled = slice(batch.size), tuple(batch.reqs)
        last_idx = np.arange(len(rows), dtype=np.int32)
    else:
        chosen = np.flatnonzero([not req.is_chunked for req in batch.reqs])
        sampled = tuple(batch.reqs[i] for i in chosen)
        last_idx = np.cumsum(extend, dtype=np.int32) - 1
    sampling = sampler.prepare(sampled) if sampler is not None and sampled else None
    meta = packed = None
    if not (use_graph and plan_free):
        table = tables.page_table
        meta = build_metadata(batch.phase, rows, extend, device, table, page_size)
    if use_graph:
        packed = pack(rows, positions, out_loc, tables.width, batch.size, sampling)
    return ForwardInput(
        batch=batch, sampled=sampled, token_rows=token_rows, positions=positions, out_loc=out_loc,
        last_idx=last_idx[chosen] if sampled else last_idx[-1:], write_rows=rows[chosen],
        write_positions=device[chosen], meta=meta, sampling=sampling, packed=packed,
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
        return part.clone()  # a recorded step leaves its result where the next one writes
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


class Delivery:
    """Where the ids of a step will be on the host; `take` waits for them and keeps a copy."""

    def __init__(self, place: NDArray[np.int64], event: Event | None) -> None:
        self.place, self.event = place, event
        self.ids: list[int] | None = None

    def take(self) -> list[int]:
        """Wait for the step, and read its ids before another one writes there."""
        if self.ids is None:
            if self.event is not None:
                self.event.synchronize()
            self.ids = self.place.tolist()
        return self.ids


class ForwardOutput:
    """A step that was started: its tokens on the device now, on the host once `wait` returns."""

    def __init__(self, out: SampleOutput, delivery: Delivery | None = None) -> None:
        """`delivery`: where a recorded step leaves its ids, then those of padding."""
        self.next_ids, self.delivery = out.next_ids, delivery
        parts = (out.next_ids, out.logprobs, out.top_ids, out.top_logprobs)
        copied = () if delivery is not None else parts
        self._host = [None if part is None else to_host(part) for part in copied]
        self._event = mark(out.next_ids.device) if copied else None

    def wait(self) -> SampledTokens:
        """Block until the tokens are on the host."""
        if self.delivery is not None:
            return SampledTokens(self.delivery.take()[: len(self.next_ids)])
        if self._event is not None:
            self._event.synchronize()
        ids, *rest = [None if part is None else part.tolist() for part in self._host]
        return SampledTokens(ids or [], *rest)
