"""Host arrays on their way to the device, without overwriting what is still being read.

Generated from notebooks/04_attention.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """Something that will have happened when `synchronize` returns."""

    def synchronize(self) -> None: ...


def mark(device: torch.device) -> Event | None:
    """Record an event behind the current stream's queued work; return None on a CPU."""
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
    """Pinned host buffers in turn: one is filled while the others are still being copied."""

    def __init__(
        self,
        device: torch.device | str,
        depth: int = 2,
        copy: Callable[[Tensor, Tensor], Event | None] = start_copy,
    ) -> None:
        self.device, self.copy = torch.device(device), copy
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(depth)]
        self.events: list[Event | None] = [None] * depth
        self.turn = 0

    def next_buffer(self, nbytes: int) -> Tensor:
        """Return the next buffer, uint8 [nbytes], after the copy that last read it has ended."""
        self.turn = (self.turn + 1) % len(self.buffers)
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        if len(self.buffers[self.turn]) < nbytes:
            pin = self.device.type == "cuda"
            self.buffers[self.turn] = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=pin)
        return self.buffers[self.turn][:nbytes]

    def send(self, arrays: Sequence[NDArray[Any]], target: Tensor) -> None:
        """Copy arrays, end to end, to the start of `target` [n] on the device; TypeError unless all
        have its dtype."""
        total = sum(array.size for array in arrays)
        source = self.next_buffer(total * target.itemsize).view(target.dtype)
        np.concatenate(arrays, axis=None, out=source.numpy(), casting="no")
        self.events[self.turn] = self.copy(target[:total], source)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Copy host arrays to new device tensors of the same shapes and dtypes, in one copy.

        Each starts at a multiple of 8 bytes, where a view of any dtype may begin.
        """
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + -(-array.nbytes // 8) * 8)
        source = self.next_buffer(starts[-1])
        host = source.numpy()
        for start, array in zip(starts, arrays):
            host[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        target = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        self.events[self.turn] = self.copy(target, source)
        parts = []
        for start, array in zip(starts, arrays):
            dtype = torch.from_numpy(array[:0]).dtype
            parts.append(target[start : start + array.nbytes].view(dtype).view(array.shape))
        return parts
