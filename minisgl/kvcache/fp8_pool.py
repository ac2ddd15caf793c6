"""A KV pool of eight-bit floats.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.fp8 import FP8, LARGEST
from minisgl.kvcache.pool import KVPool


class Fp8KVPool(KVPool):
    """K and V in float8_e4m3fn. Each head stores them divided by its two scales, 1.0 at first."""

    quantized = True

    def __init__(self, *, num_layers: int, **sizes: Any) -> None:
        """Allocate a `KVPool` of FP8 numbers, with scales of 1."""
        super().__init__(num_layers=num_layers, dtype=FP8, **sizes)
        numbers = self.buffer.view(torch.uint8).flatten(2, 3)  # torch can index this dtype
        self._slots = [layer.unbind() for layer in numbers.unbind(1)]
        shape = num_layers, 4, self.num_kv_heads, 1  # 4: layers begin at multiples of 16 bytes
        self.layer_scales = torch.ones(shape, device=self.buffer.device)[:, :2].unbind()

    def scales(self, layer_id: int) -> Tensor:
        """Return the factors of each head's stored keys and values, [2, heads, 1]."""
        return self.layer_scales[layer_id]

    def store_kv(self, k: Tensor, v: Tensor, out_loc: Tensor, layer_id: int) -> None:
        """Store as a `KVPool` does; saturate values too large for FP8 at 448."""
        k, v = (
            (part.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
            for part, scale in zip((k, v), self.scales(layer_id), strict=True)
        )
        super().store_kv(k, v, out_loc, layer_id)

    def load_kv(self, slots: Tensor, layer_id: int, dtype: torch.dtype) -> list[Tensor]:
        """Return K and V at these slots, dequantized to `dtype`."""
        found = super().load_kv(slots, layer_id, torch.uint8)
        return [
            (part.view(FP8).float() * scale).to(dtype)
            for part, scale in zip(found, self.scales(layer_id), strict=True)
        ]
