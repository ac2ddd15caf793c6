"""Layout of a ragged batch, the plan of attention over it, and the interface of a backend.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from minisgl.core import IntArray, Phase
from minisgl.kvcache.pool import KVPool


def indptr(lengths: IntArray) -> IntArray:
    """Return row pointers int32 [n + 1] of n ragged rows: row i is `[out[i], out[i + 1])`."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out


def ragged_arange(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate `arange(start, start + length)` of every row: int32 [sum of lengths]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    shift = np.repeat(starts - (ends - lengths), lengths)
    return (np.arange(total) + shift).astype(np.int32)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Layout of one forward pass for attention: host arrays, int32, one entry per request.

    `kv_indices` and `slots_of` read the page table when they are asked: plan before a row changes.
    """

    phase: Phase
    page_size: int
    table_idx: IntArray  # [bs] row of the page table
    extend_lens: IntArray  # [bs] tokens to compute now
    seq_lens: IntArray  # [bs] tokens to attend to: cached and new ones
    qo_indptr: IntArray  # [bs + 1] rows of q and of the output
    kv_indptr: IntArray  # [bs + 1] pages, end to end
    last_page_len: IntArray  # [bs] tokens in each last page, 1 .. page_size
    page_table: IntArray  # [rows, max_len] position to slot, the host's table

    @cached_property
    def kv_indices(self) -> IntArray:
        """Pages of all requests end to end, int32 [kv_indptr[-1]]."""
        num_pages = np.diff(self.kv_indptr)
        rows = np.repeat(self.table_idx, num_pages)
        positions = ragged_arange(np.zeros_like(num_pages), num_pages) * self.page_size
        return (self.page_table[rows, positions] // self.page_size).astype(np.int32)

    def slots_of(self, i: int) -> IntArray:
        """Return request i's slots by position, int32 [seq_lens[i]]: a view of the page table."""
        return self.page_table[self.table_idx[i], : self.seq_lens[i]]

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.table_idx)

    @property
    def num_tokens(self) -> int:
        """Rows of q: new tokens of all requests."""
        return int(self.qo_indptr[-1])


def check_lengths(
    phase: Phase, table_idx: IntArray, extend_lens: IntArray, seq_lens: IntArray
) -> None:
    """Raise ValueError unless `0 < extend_lens <= seq_lens`, and in decode all extend by one."""
    if not table_idx.shape == extend_lens.shape == seq_lens.shape:
        shapes = f"{table_idx.shape}, {extend_lens.shape}, {seq_lens.shape}"
        raise ValueError(f"table_idx, extend_lens, seq_lens: one entry per request, got {shapes}")
    if ((extend_lens < 1) | (extend_lens > seq_lens)).any():
        raise ValueError(f"extend_lens: must be in 1 .. seq_lens, got {extend_lens}, {seq_lens}")
    if phase is Phase.DECODE and (extend_lens != 1).any():
        raise ValueError(f"extend_lens: a decode step extends each request by 1, got {extend_lens}")


def build_metadata(
    phase: Phase,
    table_idx: IntArray,
    extend_lens: IntArray,
    seq_lens: IntArray,
    page_table: IntArray,
    page_size: int,
) -> AttentionMetadata:
    """Build the metadata of a batch on the host, in a handful of numpy calls for any size.

    Raise ValueError unless `0 < extend_lens <= seq_lens`, and in decode all extend by one.
    """
    table_idx, extend_lens, seq_lens = (
        np.asarray(a, dtype=np.int32) for a in (table_idx, extend_lens, seq_lens)
    )
    check_lengths(phase, table_idx, extend_lens, seq_lens)
    num_pages = (seq_lens + page_size - 1) // page_size
    return AttentionMetadata(
        phase=phase,
        page_size=page_size,
        table_idx=table_idx,
        extend_lens=extend_lens,
        seq_lens=seq_lens,
        qo_indptr=indptr(extend_lens),
        kv_indptr=indptr(num_pages),
        last_page_len=seq_lens - (num_pages - 1) * page_size,
        page_table=page_table,
    )


class AttentionPlan(Protocol):
    """One batch of n new tokens, planned: called once per layer.

    q is [n, qo_heads, head_dim]; k and v are [n, kv_heads, head_dim]; answers have q's shape.
    """

    pool: KVPool  # where keys and values lie
    out_loc: Tensor  # [n] int64, slots of the new tokens

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Store k and v at the batch's slots, then attend."""
        self.pool.store_kv(k, v, self.out_loc, layer_id)
        return self.attend(q, k, v, layer_id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        """Attend as `run` does, without the store: k and v are in the pool already."""
        ...


@dataclass(frozen=True)
class DecodeBuffers:
    """Inputs of a decode step, one per request: device tensors, int64 [bs]."""

    rows: Tensor  # row of the page table
    positions: Tensor  # of the token that is computed now: the request's length is one more
    out_loc: Tensor  # slot that its key and value go to

    @classmethod
    def of(cls, meta: AttentionMetadata, out_loc: Tensor) -> Self:
        """Copy an eager decode step to the device of `out_loc`."""
        parts = (part.astype(np.int64) for part in (meta.table_idx, meta.seq_lens - 1))
        rows, positions = (torch.from_numpy(part).to(out_loc.device) for part in parts)
        return cls(rows, positions, out_loc)


class AttentionBackend(Protocol):
    """Makes plans: `plan` for one eager batch, `graph_plan` for all decode batches of one size."""

    name: str

    def plan(self, meta: AttentionMetadata, out_loc: Tensor) -> AttentionPlan:
        """Prepare one batch; `out_loc` int64 [n] are the slots of its new tokens."""
        ...

    def graph_plan(self, batch_size: int, buffers: DecodeBuffers) -> AttentionPlan:
        """Prepare decode over buffers whose values change between runs, and addresses do not."""
        ...


@dataclass
class ForwardBatch:
    """The tensors that a model reads in one forward pass over n new tokens of bs requests."""

    phase: Phase
    input_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    out_loc: Tensor  # [n] int64, slots that the new keys and values go to
    last_idx: Tensor | None  # [bs] int64, rows whose logits are wanted; None: all rows
    attn: AttentionPlan
    logits: Tensor | None = None  # [rows wanted, vocab] to write to, if the model can
