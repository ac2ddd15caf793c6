"""A whole decode step as one graph: gather, forward, draw and scatter.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.base import DecodeBuffers, ForwardBatch
from minisgl.attention.metadata import AttentionMetadata
from minisgl.attention.staging import StagingRing
from minisgl.core import Phase
from minisgl.engine.graph import CapturedStep, GraphRunner, capturing, dummy_metadata, new_graph
from minisgl.engine.step import PACKED, Delivery, pack

if TYPE_CHECKING:
    from minisgl.engine.mailbox import Mailbox


Draw = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, keys, temperature to ids


@dataclass(frozen=True)
class StepBuffers:
    """The static tensors of one recorded size, views of one memory, which is filled in one go."""

    memory: Tensor  # int64 [7, size]
    gather: Tensor  # int64 [size], as the next four
    scatter: Tensor
    rows: Tensor
    positions: Tensor
    out_loc: Tensor
    keys: Tensor  # int32 [2, size]
    temperature: Tensor  # float32 [size]


def view_buffers(memory: Tensor, size: int) -> StepBuffers:
    """The buffers of a step of `size` requests at the start of a flat memory, int64."""
    whole = memory[: len(PACKED) * size].view(len(PACKED), size)
    gather, scatter, rows, positions, out_loc = whole[:5]
    keys = whole[5].view(torch.int32).view(2, size)
    temperature = whole[6].view(torch.float32)[:size]
    return StepBuffers(whole, gather, scatter, rows, positions, out_loc, keys, temperature)


def load_mailbox(most: int, device: torch.device) -> Mailbox | None:
    """A mailbox for steps of up to `most` requests; None without a GPU or without Triton."""
    if device.type != "cuda":
        return None
    try:
        from minisgl.engine.mailbox import Mailbox
    except ImportError:
        return None
    return Mailbox(len(PACKED), most, device)


class StepGraphs(GraphRunner):
    """Records whole decode steps, and replays the one that fits."""

    def __init__(self, *, draw: Draw, **fields: Any) -> None:
        """`draw` turns logits, keys and temperatures into ids; the rest is a `GraphRunner`'s."""
        super().__init__(**fields)
        self.draw, self.replays = draw, 0  # replays: how often, for whoever watches
        most = self.sizes[-1]
        self.memory = torch.zeros(len(PACKED) * most, dtype=torch.int64, device=self.device)
        self.next_ids = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.staging = StagingRing(self.device)
        plan_free = getattr(self.backend, "plan_free", False)  # others read rows before the graph
        self.mailbox = load_mailbox(most, self.device) if plan_free else None
        self.delivery: Delivery | None = None  # of the last step, if there is a mailbox

    def run_step(self, fb: ForwardBatch, static: StepBuffers) -> None:
        """What a graph holds: from the token pool to the token pool."""
        tokens, size, box = self.tables.token_pool.view(-1), len(static.rows), self.mailbox
        if box is None:
            fb.input_ids = tokens.index_select(0, static.gather)
        else:
            fb.input_ids = box.open(static.memory, tokens)
        fb.logits = None if self.logits is None else self.logits[:size]
        self.keep_logits(self.forward(fb))
        assert self.logits is not None
        drawn = self.draw(self.logits[:size], static.keys, static.temperature)
        if box is None:
            self.next_ids[:size].copy_(drawn)
            tokens.index_copy_(0, static.scatter, drawn)
        else:
            box.close(drawn, static.scatter, tokens, self.next_ids[:size])

    def send(self, packed: NDArray[np.int64]) -> None:
        """Put a step's integers where the step will read them."""
        if self.mailbox is None:
            self.staging.send([packed], self.memory)
        else:
            self.mailbox.post(packed)

    def launched(self, size: int) -> None:
        """Note that a step of this size was started."""
        if self.mailbox is not None:
            self.delivery = self.mailbox.launched(size)

    def dummy_step(self, size: int) -> NDArray[np.int64]:
        """A step of `size` dummy requests, packed."""
        row = np.full(size, self.tables.dummy_row, np.int32)
        start = np.zeros_like(row)
        return pack(row, start, self.tables.page_table[row, start], self.tables.width, 0, None)

    def capture_one(self, size: int) -> CapturedStep:
        """A dry run, in which libraries choose their algorithms, then the capture."""
        static = view_buffers(self.memory, size)
        self.send(self.dummy_step(size))
        buffers = DecodeBuffers(static.rows, static.positions, static.out_loc)
        plan = self.backend.graph_plan(size, buffers)
        plan.update(dummy_metadata(size, self.tables))
        fb = ForwardBatch(Phase.DECODE, static.rows, static.positions, static.out_loc, None, plan)
        self.run_step(fb, static)
        self.launched(size)
        graph = new_graph(self.device)
        with capturing(graph, self.pool, self.stream):
            self.run_step(fb, static)
        return CapturedStep(graph, plan)

    @torch.inference_mode()
    def step(self, packed: NDArray[np.int64], meta: AttentionMetadata | None) -> Tensor:
        """Start a recorded step: ids int64 [size], valid until the next one.

        packed [7, size]: see `pack`; meta None for a backend that needs no plan.
        """
        size = packed.shape[1]
        captured = self.steps.get(size)
        if captured is None:
            raise ValueError(f"batch_size: {size} was not captured, only {list(self.steps)}")
        self.send(packed)
        if meta is not None:
            captured.plan.update(meta)
        captured.graph.replay()
        self.launched(size)
        self.replays += 1
        return self.next_ids[:size]

    def scatter_places(self, size: int, count: int) -> Tensor:
        """Where the first `count` results of a step of `size` went, int64 [count]."""
        return view_buffers(self.memory, size).scatter[:count]
