"""Host integers on their way to the device, without overwriting what is still being read.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.core import IntArray


class Event(Protocol):
    """Something that will have happened when `synchronize` returns."""

    def synchronize(self) -> None: ...


def mark(device: torch.device) -> Event | None:
    """An event behind all work queued on the current stream; None on a CPU, which never queues."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def start_copy(target: Tensor, source: Tensor) -> Event | None:
    """Copy on the current stream; the event of its end, or None if it has ended already."""
    target.copy_(source, non_blocking=True)
    return mark(target.device)


class StagingRing:
    """Two pinned int32 buffers in turn: one is filled while the other is still being copied."""

    def __init__(
        self,
        device: torch.device,
        depth: int = 2,
        copy: Callable[[Tensor, Tensor], Event | None] = start_copy,
    ) -> None:
        self.pinned = device.type == "cuda"
        self.copy = copy
        self.buffers = [torch.empty(0, dtype=torch.int32) for _ in range(depth)]
        self.events: list[Event | None] = [None] * depth
        self.turn = 0

    def send(self, arrays: Sequence[IntArray], target: Tensor) -> None:
        """Copy the arrays, end to end, to the start of `target`, an int32 tensor on the device."""
        total = sum(len(array) for array in arrays)
        source = self.next_buffer(total)
        np.concatenate(arrays, out=source.numpy())
        self.events[self.turn] = self.copy(target[:total], source)

    def next_buffer(self, size: int) -> Tensor:
        """The buffer whose turn it is, once the copy that last read from it has ended."""
        self.turn = (self.turn + 1) % len(self.buffers)
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        if len(self.buffers[self.turn]) < size:
            self.buffers[self.turn] = torch.empty(
                2 * size, dtype=torch.int32, pin_memory=self.pinned
            )
        return self.buffers[self.turn][:size]
