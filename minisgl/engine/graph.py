"""Decode steps recorded once and replayed: batch-size buckets, static buffers, capture, replay.

Generated from notebooks/07_cuda_graphs.ipynb: edit there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from minisgl.attention.base import AttentionBackend, DecodeBuffers, ForwardBatch, GraphPlan
from minisgl.attention.metadata import AttentionMetadata, build_metadata
from minisgl.core import Phase
from minisgl.kvcache.page_table import TableManager

SMALL = {
    "minisgl": ((1, 2, 4), 8),
    "sglang": ((1, 2, 4), 8),
    "minivllm": ((1, 2, 4, 8), 16),
    "tokn": ((1, 2, 3, 4), 0),
}


def bucket_sizes(
    max_bs: int, system: str = "minisgl", max_running: int | None = None
) -> tuple[int, ...]:
    """Batch sizes to capture, ascending, none above `max_bs`; () if max_bs is below 1.

    `system` names whose rule: minisgl, sglang, minivllm or tokn. `max_running` is the most requests
    that can run; only sglang's rule asks: on a small pool it adds the pool's size and one less.
    """
    if system not in SMALL:
        raise ValueError(f"system: must be one of {', '.join(SMALL)}, got {system!r}")
    first, step = SMALL[system]
    sizes = set(first)
    if step:
        sizes.update(range(step, max_bs + 1, step))
    else:
        sizes.add(max_bs)
    limit = max_bs
    if system == "sglang" and max_running is not None and max_running < max_bs:
        limit = max_running
        sizes.update((max_running - 1, max_running))
    return tuple(sorted(size for size in sizes if 1 <= size <= limit))


GIB = 1 << 30


def choose_sizes(
    cuda_graph_bs: Sequence[int] | None,
    cuda_graph_max_bs: int | None,
    max_running: int,
    free_bytes: int,
) -> tuple[int, ...]:
    """Sizes that an engine captures: the given ones, or SGLang's rule up to the given maximum.

    Without a maximum it is 256 with more than 80 GiB free, else 160. None exceeds `max_running`.
    """
    if cuda_graph_bs is not None:
        return tuple(sorted({size for size in cuda_graph_bs if 1 <= size <= max_running}))
    if cuda_graph_max_bs is None:
        cuda_graph_max_bs = 256 if free_bytes > 80 * GIB else 160
    return bucket_sizes(cuda_graph_max_bs, "sglang", max_running)


def storage_ids(values: Any) -> set[int]:
    """Identities of the memory behind all tensors in nested arguments."""
    leaves = tree_leaves(values)
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class RecordedCall:
    """One operation: the tensors it read and wrote, by reference."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]  # those that own new memory; in-place results and views do not

    def run(self) -> None:
        """Compute again, from what the inputs hold now into the memory of the outputs."""
        result = tree_leaves(self.function(*self.args, **self.kwargs))
        fresh = [leaf for leaf in result if isinstance(leaf, Tensor)]
        for old, new in zip(self.outputs, fresh):
            old.copy_(new)


def reads_on_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the host would have to wait for a value: `.item()`, `nonzero`, a boolean index."""
    if torch.Tag.data_dependent_output in function.tags:
        return True
    if torch.Tag.dynamic_output_shape not in function.tags or "output_size" in kwargs:
        return False
    leaves = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]
    is_index = function.overloadpacket is torch.ops.aten.index
    return not is_index or any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves)


def record(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> RecordedCall | None:
    """The call to repeat at replay, or None for a view or for uninitialised memory."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if function._schema.is_mutable:
        return RecordedCall(function, args, kwargs, ())
    inputs = storage_ids((args, kwargs))
    if all(leaf.untyped_storage()._cdata in inputs for leaf in leaves):
        return None
    if "empty" in function.overloadpacket.__name__:
        return None
    return RecordedCall(function, args, kwargs, tuple(leaves))


class Recorder(TorchDispatchMode):
    """Runs every operation of a region and appends it to `calls`."""

    def __init__(self, calls: list[RecordedCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by PyTorch for each operation, below autograd."""
        kwargs = kwargs or {}
        if reads_on_host(func, args, kwargs):
            raise RuntimeError(
                f"capture: {func} needs a value on the host; a graph knows addresses, not values"
            )
        result = func(*args, **kwargs)
        call = record(func, args, kwargs, result)
        if call is not None:
            self.calls.append(call)
        return result


class RecordingGraph:
    """A stand-in for `torch.cuda.CUDAGraph` on any device: records operations, repeats them.

    Like the original it keeps tensors by reference: a replay reads what is at their addresses
    then, and writes where the capture wrote. Unlike it, the capture also computes.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.recorder: Recorder | None = None
        self.captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Start to record; both arguments are there for the interface's sake."""
        if self.captured or self.recorder is not None:
            raise RuntimeError("capture: this graph is captured already; reset() it first")
        self.recorder = Recorder(self.calls)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        """Stop to record."""
        if self.recorder is None:
            raise RuntimeError("capture: capture_end() without capture_begin()")
        self.recorder.__exit__(None, None, None)
        self.recorder, self.captured = None, True

    def replay(self) -> None:
        """Repeat what was recorded, in order; Python between the operations does not run again."""
        if not self.captured:
            raise RuntimeError("replay: nothing was captured")
        with torch.inference_mode():
            for call in self.calls:
                call.run()

    def reset(self) -> None:
        """Forget the recording and let go of its tensors."""
        self.calls.clear()
        self.captured = False

    def pool(self) -> None:
        """The memory pool to share with other graphs: there is none."""


AnyGraph = RecordingGraph | torch.cuda.CUDAGraph


def new_graph(device: torch.device) -> AnyGraph:
    """An empty graph: the real one on a GPU, the recording one elsewhere."""
    return torch.cuda.CUDAGraph() if device.type == "cuda" else RecordingGraph()


@contextmanager
def recording(graph: RecordingGraph) -> Iterator[None]:
    """Record the region; a region that fails leaves the graph empty."""
    graph.capture_begin()
    try:
        yield
    except BaseException:
        graph.capture_end()
        graph.reset()
        raise
    graph.capture_end()


def capturing(
    graph: AnyGraph, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> AbstractContextManager[None]:
    """`with capturing(graph):` as `torch.cuda.graph`, for both kinds of graph."""
    if isinstance(graph, RecordingGraph):
        return recording(graph)
    region: AbstractContextManager[None] = torch.cuda.graph(graph, pool=pool, stream=stream)
    return region


@dataclass(frozen=True)
class GraphBuffers:
    """What a captured forward pass reads: int64 [max_bs], the same memory for every bucket."""

    input_ids: Tensor
    rows: Tensor
    positions: Tensor
    out_loc: Tensor

    @classmethod
    def allocate(cls, max_bs: int, dummy_row: int, dummy_slot: int, device: torch.device) -> Self:
        """Buffers that hold dummy requests: token 0 at position 0, written to the dummy slot."""
        values = (0, dummy_row, 0, dummy_slot)
        return cls(*torch.tensor(values, device=device)[:, None].repeat(1, max_bs))

    def first(self, size: int) -> Self:
        """Views of the first `size` entries: same memory, so same addresses."""
        kept = self.input_ids, self.rows, self.positions, self.out_loc
        return type(self)(*(buffer[:size] for buffer in kept))

    def for_attention(self) -> DecodeBuffers:
        """The part that an attention plan reads."""
        return DecodeBuffers(self.rows, self.positions, self.out_loc)


def dummy_metadata(size: int, tables: TableManager) -> AttentionMetadata:
    """Metadata of `size` dummy requests: one token each, in the dummy row."""
    rows = np.full(size, tables.dummy_row, np.int32)
    ones = np.ones(size, np.int32)
    return build_metadata(Phase.DECODE, rows, ones, ones, tables.page_table, tables.page_size)


@dataclass(frozen=True)
class CapturedStep:
    """One bucket: its graph, and the plan whose buffers the graph reads."""

    graph: AnyGraph
    plan: GraphPlan


class GraphRunner:
    """Captures `forward` for decode batches of fixed sizes and replays it for any that fits."""

    def __init__(
        self,
        *,
        forward: Callable[[ForwardBatch], Tensor],
        backend: AttentionBackend,
        tables: TableManager,
        sizes: Sequence[int],
        device: torch.device | str,
        vocab_size: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Nothing is captured yet; `stream` is where the engine runs, None for a side stream."""
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: must be positive batch sizes, got {list(sizes)}")
        self.forward, self.backend, self.tables = forward, backend, tables
        self.sizes = tuple(sorted(set(sizes)))
        self.device, self.vocab_size, self.stream = torch.device(device), vocab_size, stream
        dummy_slot = int(tables.page_table[tables.dummy_row, 0])
        self.buffers = GraphBuffers.allocate(
            self.sizes[-1], tables.dummy_row, dummy_slot, self.device
        )
        self.logits: Tensor | None = None  # [max size, vocab_size], once a forward gave its dtype
        self.pool: Any = None  # memory that the graphs share
        self.steps: dict[int, CapturedStep] = {}

    def run_into_logits(self, fb: ForwardBatch) -> None:
        """What a graph holds: the forward pass, then its logits into their static place."""
        self.keep_logits(self.forward(fb))

    def keep_logits(self, out: Tensor) -> None:
        """Copy logits into their static place, unless the model has put them there itself."""
        if self.logits is None:
            shape = (self.sizes[-1], self.vocab_size)
            self.logits = torch.empty(shape, dtype=out.dtype, device=out.device)
        if out.data_ptr() != self.logits.data_ptr():
            self.logits[: len(out)].copy_(out)

    def capture_one(self, size: int) -> CapturedStep:
        """A dry run, in which libraries choose their algorithms, then the capture."""
        static = self.buffers.first(size)
        plan = self.backend.graph_plan(size, static.for_attention())
        plan.update(dummy_metadata(size, self.tables))
        fb = ForwardBatch(
            phase=Phase.DECODE, input_ids=static.input_ids, positions=static.positions,
            out_loc=static.out_loc, last_idx=None, attn=plan,
        )  # fmt: skip
        self.run_into_logits(fb)
        graph = new_graph(self.device)
        with capturing(graph, self.pool, self.stream):
            self.run_into_logits(fb)
        return CapturedStep(graph, plan)

    def capture_shown(self, bar: Any, size: int) -> CapturedStep:
        """Capture one size; on a GPU the progress bar then says how much memory is free."""
        step = self.capture_one(size)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            bar.set_postfix_str(f"batch {size}, {free / 2**30:.1f} GiB free", refresh=False)
        return step

    @torch.inference_mode()
    def capture(self, progress: bool = True) -> None:
        """Capture all sizes, the largest first: the smaller ones then reuse its memory.

        The first capture is thrown away: it pays for what libraries set up on first use.
        """
        on_gpu = self.device.type == "cuda"
        self.tables.flush()
        if on_gpu:
            torch.cuda.synchronize(self.device)  # weights and tables are there, whoever wrote them
            self.stream = self.stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            self.capture_one(self.sizes[-1])
            self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
            bar = tqdm(self.sizes[::-1], desc="capture", unit="graph", disable=not progress)
            self.steps = {size: self.capture_shown(bar, size) for size in bar}
        if on_gpu:
            torch.cuda.synchronize(self.device)

    def bucket(self, batch_size: int) -> int:
        """The smallest captured size that holds the batch; ValueError if none does."""
        index = bisect_left(self.sizes, batch_size)
        if batch_size < 1 or index == len(self.sizes):
            raise ValueError(f"batch_size: must be in 1 .. {self.sizes[-1]}, got {batch_size}")
        return self.sizes[index]

    def can_replay(self, phase: Phase, batch_size: int) -> bool:
        """True for a decode batch that fits a captured size; everything else runs eagerly."""
        return phase is Phase.DECODE and bool(self.steps) and 1 <= batch_size <= self.sizes[-1]

    @torch.inference_mode()
    def replay(
        self, input_ids: Tensor, positions: Tensor, out_loc: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        """Logits [size, vocab_size] of a padded decode batch; valid until the next replay.

        The tensors are int64 [size] on the device and `meta` describes the same `size` requests,
        with `size` one of `sizes`. Nothing waits: all goes to the current stream, in order.
        """
        size = len(input_ids)
        step = self.steps.get(size)
        if step is None or self.logits is None:
            raise ValueError(f"batch_size: {size} was not captured, only {list(self.steps)}")
        static = self.buffers.first(size)
        static.input_ids.copy_(input_ids)
        static.rows.copy_(torch.from_numpy(meta.table_idx))
        static.positions.copy_(positions)
        static.out_loc.copy_(out_loc)
        step.plan.update(meta)
        step.graph.replay()
        return self.logits[:size]
