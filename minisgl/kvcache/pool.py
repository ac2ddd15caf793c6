"""The pool that holds K and V of every token, and the arithmetic of its size.

Generated from notebooks/02_kv_cache.ipynb: edit there.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from minisgl.config.model import ModelConfig
from minisgl.config.rules import check_positive


def kv_bytes_per_token(model: ModelConfig, itemsize: int, tp_size: int = 1) -> int:
    """Return the bytes of K and V of one token on one rank, in all layers; `itemsize` in bytes.

    Raise ValueError unless `tp_size` divides the KV heads or is a multiple of them.
    """
    check_positive(itemsize=itemsize)
    kv = model.num_kv_heads
    if isinstance(tp_size, bool) or tp_size < 1 or (kv % tp_size and tp_size % kv):
        raise ValueError(f"tp_size: must be a divisor or a multiple of {kv}, got {tp_size!r}")
    heads = model.kv_heads_per_rank(tp_size)
    return 2 * model.num_layers * heads * model.head_dim * itemsize


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return zeros of any dtype that take memory only where they are written, and their mapping.

    The mapping is anonymous and private: `madvise` can give its memory back.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fresh = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, private)
    return torch.frombuffer(fresh, dtype=torch.uint8).view(dtype).view(shape), fresh


class KVPool:
    """K and V of one rank: `buffer`, [2, layers, pages + 1, page_size, kv_heads, head_dim].

    The extra page, `dummy_page`, has no owner: padding writes there and masked reads find it. Its
    first slot is `dummy_slot`. The sizes are attributes, too; `num_slots` leaves that page out.
    """

    quantized = False  # see chapter 05g

    def __init__(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int,
        head_dim: int, dtype: torch.dtype, device: torch.device | str,
    ) -> None:  # fmt: skip
        """Allocate zeros on `device`; `num_kv_heads` is the number on this rank."""
        check_positive(
            num_layers=num_layers, num_pages=num_pages, page_size=page_size,
            num_kv_heads=num_kv_heads, head_dim=head_dim,
        )  # fmt: skip
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dummy_page, self.num_slots = num_pages, num_pages * page_size
        self.dummy_slot = self.num_slots
        shape = (2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self._mapping: mmap.mmap | None = None
        if torch.device(device).type == "cpu":
            self.buffer, self._mapping = mapped_zeros(shape, dtype)
        else:
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._pages = self.buffer.unbind(1)
        self._slots = [layer.unbind() for layer in self.buffer.flatten(2, 3).unbind(1)]
        self._copies = [self.buffer.new_empty(0)] * 2  # of K and V: see `load_kv`

    def k_cache(self, layer_id: int) -> Tensor:
        """Return a layer's keys by page: a view [num_pages + 1, page_size, kv_heads, head_dim]."""
        return self._pages[layer_id][0]

    def v_cache(self, layer_id: int) -> Tensor:
        """Return a layer's values by page: a view [num_pages + 1, page_size, kv_heads, dim]."""
        return self._pages[layer_id][1]

    def free(self) -> None:
        """Free the memory now, even if views of it are left. Touch no slot after it."""
        self._copies.clear()
        if self._mapping is None:
            self.buffer.untyped_storage().resize_(0)
        else:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def store_kv(self, k: Tensor, v: Tensor, out_loc: Tensor, layer_id: int) -> None:
        """Write k, v [n, kv_heads, head_dim] of one layer into the slots `out_loc` [n], int64.

        Both have the pool's dtype.
        """
        keys, values = self._slots[layer_id]
        keys.index_copy_(0, out_loc, k)
        values.index_copy_(0, out_loc, v)

    def load_kv(self, slots: Tensor, layer_id: int, dtype: torch.dtype) -> list[Tensor]:
        """Copy K and V at slots of any shape: [*slots.shape, kv_heads, head_dim] each.

        The next call overwrites them.
        """
        index, shape = slots.flatten(), (*slots.shape, self.num_kv_heads, self.head_dim)
        parts, size = self._slots[layer_id], len(index)
        if len(self._copies[0]) < size:
            with torch.inference_mode(False):  # also for calls outside of that mode
                self._copies = [part.new_empty(size + size // 8, *part.shape[1:]) for part in parts]
        copies = [copy[:size] for copy in self._copies]
        for part, copy in zip(parts, copies, strict=True):
            torch.index_select(part, 0, index, out=copy)
        return [copy.view(shape).to(dtype) for copy in copies]

    def scales(self, layer_id: int) -> Tensor | None:
        """Return the factors of a layer's stored keys and values; None if they have none."""
        return None
