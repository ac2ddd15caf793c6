"""Slots of host memory that recorded steps read and write by themselves.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.staging import Event, mark
from minisgl.engine.step import Delivery
from minisgl.kernels.mailbox import close_step, open_step

DEPTH = 2  # a step that runs, and one that waits behind it


class Mailbox:
    """Letters to recorded steps, and their deliveries; one of each for every slot."""

    def __init__(
        self, fields: int, most: int, device: torch.device,
        mark: Callable[[torch.device], Event | None] = mark,
    ) -> None:  # fmt: skip
        """Letters of up to `fields * most` integers, deliveries of up to `most`."""
        self.device, self.mark = device, mark
        pin = device.type == "cuda"
        self.inbox = torch.zeros(DEPTH, fields * most, dtype=torch.int64, pin_memory=pin)
        self.outbox = torch.zeros(DEPTH, most, dtype=torch.int64, pin_memory=pin)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.letters, self.places = self.inbox.numpy(), self.outbox.numpy()
        self.deliveries: list[Delivery | None] = [None] * DEPTH
        self.steps = 0  # launched so far: what `turn` will be once they have ended
        self.unsure = False  # between a letter and the word that its step was launched

    def post(self, packed: NDArray[np.int64]) -> None:
        """Write the letter of the next step, once its slot is free."""
        if self.unsure:
            self.ask()
        slot = self.steps % DEPTH
        before = self.deliveries[slot]
        if before is not None:
            before.take()
        self.letters[slot, : packed.size] = packed.reshape(-1)
        self.unsure = True

    def launched(self, size: int) -> Delivery:
        """Say that the step was launched; where its `size` ids will be."""
        slot = self.steps % DEPTH
        delivery = Delivery(self.places[slot, :size], self.mark(self.device))
        self.deliveries[slot] = delivery
        self.steps += 1
        self.unsure = False
        return delivery

    def ask(self) -> None:
        """Wait for the device, take all deliveries, and take over its count of steps.

        For after an interruption: nobody knows whether the step of the last letter was launched.
        """
        for delivery in self.deliveries:
            if delivery is not None:
                delivery.take()
        self.steps = int(self.turn)  # waits for the current stream

    def open(self, memory: Tensor, tokens: Tensor) -> Tensor:
        """Inside a step: fill memory [fields, size] from the letter; its input tokens, [size]."""
        ids = torch.empty(memory.shape[1], dtype=torch.int64, device=self.device)
        open_step(self.inbox, self.turn, tokens, memory, ids)
        return ids

    def close(self, drawn: Tensor, scatter: Tensor, tokens: Tensor, ids: Tensor) -> None:
        """Inside a step: drawn [size] to the token pool, to `ids`, and to the host."""
        close_step(drawn, scatter, tokens, ids, self.outbox, self.turn)
