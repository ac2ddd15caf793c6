"""One step on the host: which token goes where, as integers; and its result.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.core import Batch, IntArray, Req
from minisgl.engine.sampler import SampleOutput, Sampler, SamplingArgs
from minisgl.engine.staging import Event
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
    meta: AttentionMetadata
    sampling: SamplingArgs | None
    use_graph: bool


def lengths(reqs: list[Req]) -> tuple[IntArray, IntArray, IntArray]:
    """Row, cached_len and device_len of each request, int32 [len(reqs)]."""
    count = len(reqs)
    rows = np.fromiter((req.table_idx for req in reqs), np.int32, count)
    cached = np.fromiter((req.cached_len for req in reqs), np.int32, count)
    device = np.fromiter((req.device_len for req in reqs), np.int32, count)
    return rows, cached, device


def new_positions(cached: IntArray, device: IntArray) -> IntArray:
    """Positions cached_len .. device_len - 1 of every request, end to end, int32 [tokens]."""
    extend = device - cached
    ends = np.cumsum(extend, dtype=np.int32)
    return np.arange(extend.sum(), dtype=np.int32) - np.repeat(ends - device, extend)


def build_forward_input(
    batch: Batch,
    tables: TableManager,
    page_size: int,
    sampler: Sampler | None = None,
    use_graph: bool = False,
) -> ForwardInput:
    """Turn "who runs" into "what goes where"; arithmetic on the host only, padding included."""
    rows, cached, device = lengths(batch.padded_reqs)
    extend = device - cached
    token_rows = np.repeat(rows, extend)
    positions = new_positions(cached, device)
    chosen = [i for i, req in enumerate(batch.reqs) if not req.is_chunked]
    sampled = tuple(batch.reqs[i] for i in chosen)
    last_idx = np.cumsum(extend, dtype=np.int32) - 1
    return ForwardInput(
        batch=batch,
        sampled=sampled,
        token_rows=token_rows,
        positions=positions,
        out_loc=tables.page_table[token_rows, positions],
        last_idx=last_idx[chosen] if chosen else last_idx[-1:],
        write_rows=rows[chosen],
        write_positions=device[chosen],
        meta=build_metadata(batch.phase, rows, extend, device, tables.page_table, page_size),
        sampling=sampler.prepare(sampled) if sampler is not None and sampled else None,
        use_graph=use_graph,
    )


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
        return part
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)


class ForwardOutput:
    """A step that was started: its tokens on the device now, on the host once `wait` returns."""

    def __init__(self, out: SampleOutput) -> None:
        self.next_ids = out.next_ids
        parts = (out.next_ids, out.logprobs, out.top_ids, out.top_logprobs)
        self._host = [None if part is None else to_host(part) for part in parts]
        self._event: Event | None = None
        if out.next_ids.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> SampledTokens:
        """Block until the tokens are on the host."""
        if self._event is not None:
            self._event.synchronize()
        ids, *rest = [None if part is None else part.tolist() for part in self._host]
        return SampledTokens(ids or [], *rest)
