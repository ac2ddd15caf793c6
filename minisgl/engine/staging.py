"""Many small host arrays to the device in one copy, from buffers that no copy still reads.

Generated from notebooks/06_sampler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """Something that happens on the device later; `synchronize` waits for it."""

    def synchronize(self) -> None: ...


def start_copy(target: Tensor, source: Tensor) -> Event | None:
    """Copy on the current stream; returns the event of its end, or None if it is done already."""
    target.copy_(source, non_blocking=True)
    if target.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Staging:
    """Packs host arrays into one of `depth` pinned buffers, in turn, and copies it in one piece."""

    def __init__(
        self,
        device: torch.device | str,
        depth: int = 2,
        copy: Callable[[Tensor, Tensor], Event | None] = start_copy,
    ) -> None:
        self.device = torch.device(device)
        self.copy = copy
        self.buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(depth)]
        self.events: list[Event | None] = [None] * depth
        self.turn = 0

    def next_buffer(self, nbytes: int) -> Tensor:
        """The next buffer of the ring, uint8 [nbytes], once the copy that read it has ended."""
        self.turn = (self.turn + 1) % len(self.buffers)
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        if self.buffers[self.turn].numel() < nbytes:
            pin = self.device.type == "cuda"
            self.buffers[self.turn] = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=pin)
        return self.buffers[self.turn][:nbytes]

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Host arrays to device tensors of the same shapes and dtypes, in one copy."""
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

    def send(self, array: NDArray[Any], target: Tensor) -> None:
        """One contiguous host array into `target` on the device, which has as many bytes."""
        source = self.next_buffer(array.nbytes)
        source.numpy()[:] = array.reshape(-1).view(np.uint8)
        self.events[self.turn] = self.copy(target.view(torch.uint8), source)
