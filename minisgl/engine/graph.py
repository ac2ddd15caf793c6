"""Whole decode steps as CUDA graphs: batch sizes, static buffers, capture and replay.

Generated from notebooks/07_cuda_graphs.ipynb: edit there.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from minisgl.attention.metadata import AttentionBackend, AttentionPlan, DecodeBuffers, ForwardBatch
from minisgl.attention.staging import StagingRing
from minisgl.core import Batch, IntArray, Phase
from minisgl.engine.sampler import SamplingArgs
from minisgl.kvcache.page_table import TableManager

if TYPE_CHECKING:
    from minisgl.engine.step import ForwardInput


class StepBuffers(NamedTuple):
    """Static inputs of a captured step of `size` requests: views of one memory."""

    gather: Tensor  # int64 [size]: where in the flat token pool each input token is
    scatter: Tensor  # int64 [size]: where each sampled token goes there
    rows: Tensor  # int64 [size]: rows of the page table
    positions: Tensor  # int64 [size]
    out_loc: Tensor  # int64 [size]: slots that the new keys and values go to
    keys: Tensor  # int32 [2, size]: of the sampler's noise
    temperature: Tensor  # float32 [size]: 0 is greedy
    last_idx: Tensor | None = None  # of prefill, in chapter 07d; None: a row is a request


NUM_FIELDS = 7


def view_buffers(memory: Any, size: int) -> StepBuffers:
    """View the start of a flat memory, int64, as the buffers of a step of `size` requests.

    They are tensors, or arrays if `memory` is one.
    """
    kinds: Any = torch if isinstance(memory, Tensor) else np
    fields = memory[: NUM_FIELDS * size].reshape(NUM_FIELDS, size)
    gather, scatter, rows, positions, out_loc, keys, temperature = fields
    keys, temperature = keys.view(kinds.int32).reshape(2, size), temperature.view(kinds.float32)
    return StepBuffers(gather, scatter, rows, positions, out_loc, keys, temperature[:size])


def pack(
    rows: IntArray,
    positions: IntArray,
    out_loc: IntArray,
    width: int,
    count: int,
    sampling: SamplingArgs | None,
) -> NDArray[np.int64]:
    """Pack a padded decode step into one array [7, size], which `view_buffers` splits on the GPU.

    The token pool is `width` wide. The first `count` requests are real; padding writes over its
    own input, greedily. `sampling` is of the real ones; None: all greedy.
    """
    packed = np.zeros((NUM_FIELDS, len(rows)), np.int64)
    to: Any = view_buffers(packed.reshape(-1), len(rows))
    to.gather[:] = to.scatter[:] = rows.astype(np.int64) * width + positions
    to.scatter[:count] += 1
    to.rows[:], to.positions[:], to.out_loc[:] = rows, positions, out_loc
    if sampling is not None:
        to.keys[:, :count], to.temperature[:count] = sampling.keys, sampling.temperature
    return packed


def bucket_sizes(max_bs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, multiples of 8, and `max_bs`; () for 0."""
    sizes = {1, 2, 4, max_bs, *range(8, max_bs, 8)}
    return tuple(sorted(size for size in sizes if 1 <= size <= max_bs))


def choose_sizes(
    cuda_graph_bs: Sequence[int] | None, cuda_graph_max_bs: int | None, max_running_req: int
) -> tuple[int, ...]:
    """Return the sizes that an engine captures, none above `max_running_req`.

    They are the given ones, or `bucket_sizes` up to the given maximum, which is 256 by default.
    """
    if cuda_graph_bs is not None:
        return tuple(sorted({size for size in cuda_graph_bs if size <= max_running_req}))
    most = 256 if cuda_graph_max_bs is None else cuda_graph_max_bs
    return bucket_sizes(min(most, max_running_req))


def dummy_step(size: int, tables: TableManager) -> NDArray[np.int64]:
    """Pack a step of `size` dummy requests: one token each, in the dummy row."""
    rows, zeros = np.full(size, tables.dummy_row, np.int32), np.zeros(size, np.int32)
    return pack(rows, zeros, tables.page_table[rows, zeros], tables.width, 0, None)


Forward = Callable[[ForwardBatch], Tensor]  # to logits [rows wanted, vocab_size]
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, keys, temperature to ids


class Graph(Protocol):
    """The methods of `torch.cuda.CUDAGraph` that we use."""

    def capture_begin(self, pool: Any = None) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


@dataclass(frozen=True)
class CapturedStep:
    """One size: its graph, and the plan and buffers whose addresses the graph holds."""

    graph: Graph
    plan: AttentionPlan
    static: StepBuffers


class GraphRunner:
    """Captures whole decode steps of fixed sizes, and replays the one that fits a batch."""

    phase = Phase.DECODE

    def __init__(
        self, *, forward: Forward, sample: Sample, backend: AttentionBackend,
        tables: TableManager, sizes: Sequence[int], vocab_size: int, dtype: torch.dtype,
        new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph, rows: int | None = None,
    ) -> None:  # fmt: skip
        """Allocate buffers and capture nothing. `dtype` is that of the logits, `rows` their number;
        None: as many as the largest size. Raise ValueError for sizes below 1."""
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: must be positive batch sizes, got {list(sizes)}")
        self.forward, self.sample, self.backend, self.tables = forward, sample, backend, tables
        self.sizes, self.new_graph = sorted(set(sizes)), new_graph
        self.device, most = tables.token_pool.device, self.sizes[-1]
        self.memory = torch.zeros(NUM_FIELDS * most, dtype=torch.int64, device=self.device)
        rows = most if rows is None else rows
        self.next_ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.logits = torch.zeros(rows, vocab_size, dtype=dtype, device=self.device)
        self.ring = StagingRing(self.device)
        self.pool: Any = None  # memory that all graphs share
        self.steps: dict[int, CapturedStep] = {}
        self.replays = 0

    def run_step(self, static: StepBuffers, plan: AttentionPlan) -> None:
        """Run what a graph holds: gather, forward, sample, scatter.

        Logits and ids end in memory of the runner, even if a model ignores `fb.logits`.
        """
        tokens, size = self.tables.token_pool.view(-1), len(static.scatter)
        logits = self.logits[:size]
        fb = ForwardBatch(
            phase=self.phase,
            input_ids=tokens.index_select(0, static.gather),
            positions=static.positions,
            out_loc=static.out_loc,
            last_idx=static.last_idx,
            attn=plan,
            logits=logits,
        )
        out = self.forward(fb)
        if out.data_ptr() != logits.data_ptr():  # most models write them there themselves
            logits.copy_(out)
        sampled = self.sample(logits, static.keys, static.temperature)
        self.next_ids[:size].copy_(sampled)
        tokens.index_copy_(0, static.scatter, sampled)

    def lay_out(self, size: int) -> tuple[StepBuffers, AttentionPlan]:
        """Fill the buffers with a step of dummy requests; return them and a plan over them."""
        static = view_buffers(self.memory, size)
        self.ring.send([dummy_step(size, self.tables)], self.memory)
        buffers = DecodeBuffers(static.rows, static.positions, static.out_loc)
        return static, self.backend.graph_plan(size, buffers)

    def capture_size(self, size: int) -> CapturedStep:
        """Run one step, in which libraries choose their algorithms, then capture it."""
        static, plan = self.lay_out(size)
        self.run_step(static, plan)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        graph = self.new_graph()
        graph.capture_begin(self.pool)
        try:
            self.run_step(static, plan)
        finally:
            graph.capture_end()
        return CapturedStep(graph, plan, static)

    @torch.inference_mode()
    def capture(self, progress: bool = True, pool: Any = None) -> None:
        """Capture all sizes, on the current stream, which must not be CUDA's default one.

        `pool` is the memory of other graphs, to be shared; None: a new one.
        """
        self.tables.flush()
        if self.device.type == "cuda":
            gc.collect()  # not in the midst of a capture
            torch.cuda.synchronize(self.device)
            self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        for size in tqdm(self.sizes[::-1], desc="capture", unit="graph", disable=not progress):
            self.steps[size] = self.capture_size(size)

    def bucket(self, batch_size: int) -> int | None:
        """Return the smallest captured size that holds a batch; None if there is none."""
        index = bisect_left(self.sizes, batch_size)
        return self.sizes[index] if self.steps and index < len(self.sizes) else None

    def size_for(self, batch: Batch) -> int | None:
        """Return the captured size that a batch is padded to; None if it has to run eagerly."""
        return self.bucket(batch.size)

    def pack(self, fi: ForwardInput, size: int) -> NDArray[np.int64]:
        """Pack the step for `replay`; `fi` (chapter 08) is padded to `size` requests."""
        tables, count = self.tables, len(fi.sampled)
        return pack(fi.token_rows, fi.positions, fi.out_loc, tables.width, count, fi.sampling)

    @torch.inference_mode()
    def replay(self, packed: NDArray[np.int64]) -> Tensor:
        """Start a captured step on the current stream: ids int64 [size], valid until the next one.

        packed [7, size] is from `pack`. ValueError for a size that was not captured.
        """
        size = packed.shape[1]
        step = self.steps.get(size)
        if step is None:
            raise ValueError(f"batch_size: {size} was not captured, only {self.sizes}")
        self.ring.send([packed], self.memory)
        step.graph.replay()
        self.replays += 1
        return self.next_ids[:size]
