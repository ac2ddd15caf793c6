"""Who owns which page, and the tables that lead from a request's positions to slots and tokens.

Generated from notebooks/02_kv_cache.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.config.rules import check_positive, refuse
from minisgl.core import IntArray


class OutOfPages(RuntimeError):
    """More pages were wanted than are free; the message carries both numbers."""


class PageAllocator:
    """A stack of free pages; a page that was freed last is given out first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_positive(num_pages=num_pages, page_size=page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.reset()

    def reset(self) -> None:
        """Free all pages 0 ... num_pages - 1; page 0 comes first."""
        self._stack: IntArray = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(self.num_pages, dtype=bool)
        self.free_pages = self.num_pages

    def allocate(self, n: int) -> IntArray:
        """Take `n` >= 0 pages, [n] int32; raises OutOfPages and takes none when fewer are free."""
        if n < 0:
            raise refuse("allocate", "a non-negative number of pages", n)
        if n > self.free_pages:
            raise OutOfPages(f"pages: {n} wanted, {self.free_pages} free")
        rest = self.free_pages - n
        pages = self._stack[rest : self.free_pages][::-1].copy()
        self._is_free[pages] = False
        self.free_pages = rest
        return pages

    def free(self, pages: IntArray) -> None:
        """Free pages [n]; raise ValueError, and free none, if one is unknown or already free.

        The next `allocate(n)` returns them in the same order.
        """
        returned = np.asarray(pages, dtype=np.int64).reshape(-1)
        unknown = returned[(returned < 0) | (returned >= self.num_pages)]
        if unknown.size:
            raise refuse("free", f"pages of 0 ... {self.num_pages - 1}", unknown.tolist())
        again = returned[self._is_free[returned]]
        if again.size:
            raise refuse("free", "pages that are in use", again.tolist())
        if len(np.unique(returned)) < len(returned):
            raise refuse("free", "different pages", returned.tolist())
        end = self.free_pages + len(returned)
        self._stack[self.free_pages : end] = returned[::-1]
        self._is_free[returned] = True
        self.free_pages = end

    def free_set(self) -> IntArray:
        """Return the free pages in ascending order, for checks."""
        return np.flatnonzero(self._is_free).astype(np.int32)


def slots_of_pages(pages: IntArray, page_size: int) -> IntArray:
    """Return the slots of whole pages [k], int32 [k * page_size]."""
    inside = np.arange(page_size, dtype=np.int32)
    return (np.asarray(pages, np.int32)[:, None] * page_size + inside).ravel()


class MirroredTable:
    """A table [rows, width] on the host and its copy on the device, which follows at a flush.

    With `share_memory` both are one piece of memory and there is nothing to copy.
    """

    def __init__(self, host: NDArray[Any], device: torch.device, share_memory: bool) -> None:
        """Copy `host` to the device, or share its memory with the device table."""
        self.host = host
        self.shared = share_memory
        self.device = torch.from_numpy(host) if share_memory else torch.tensor(host, device=device)
        self._pending: list[tuple[int, int]] = []  # [start, stop) of the flattened table

    def write(self, row: int, start: int, values: NDArray[Any]) -> None:
        """Set [row, start : start + len(values)] on the host, and remember it for the device."""
        rows, width = self.host.shape
        stop = start + len(values)
        if not (0 <= row < rows and 0 <= start <= stop <= width):
            raise refuse("write", f"inside {rows} rows of {width}", (row, start, stop))
        self.host[row, start:stop] = values
        if not self.shared and stop > start:
            self._pending.append((row * width + start, row * width + stop))

    def take_pending(self) -> NDArray[np.int64]:
        """Return the places written since the last call, indices into the flat table, [n]."""
        if not self._pending:
            return np.empty(0, dtype=np.int64)
        starts, stops = np.array(self._pending, dtype=np.int64).T
        self._pending.clear()
        lengths = stops - starts
        before = np.cumsum(lengths) - lengths  # places ahead of each range
        # Ranges [1, 3) and [10, 11) become 1, 2, 10.
        return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


class OutOfRows(RuntimeError):
    """More requests than the table has rows."""


class TableManager:
    """One row for each running request: `[row, position]` to slot, and to token id.

    The last row, `dummy_row`, is for padding and names only slots of the dummy page. Slots are in
    `page_table` on the host and in `device_page_table`, token ids on the device in `token_pool`.
    A row has `width` positions: `max_len`, rounded up to whole pages.
    """

    def __init__(
        self, num_rows: int, max_len: int, page_size: int, dummy_page: int,
        device: torch.device | str, *, share_memory: bool | None = None,
    ) -> None:  # fmt: skip
        """Create the tables; with `share_memory` None they are shared with a CPU device."""
        check_positive(num_rows=num_rows, max_len=max_len, page_size=page_size)
        self.device = torch.device(device)
        shared = self.device.type == "cpu" if share_memory is None else share_memory
        self.num_rows, self.dummy_row, self.page_size = num_rows, num_rows, page_size
        self.width = -(-max_len // page_size) * page_size  # -(-a // b) is a / b, rounded up
        dummies = dummy_page * page_size + np.arange(self.width, dtype=np.int32) % page_size
        slots = np.tile(dummies.astype(np.int32), (num_rows + 1, 1))
        tokens = np.zeros((num_rows + 1, self.width), dtype=np.int64)
        self._slots = MirroredTable(slots, self.device, shared)
        self._tokens = MirroredTable(tokens, self.device, shared)
        self.page_table: IntArray = self._slots.host
        self.device_page_table, self.token_pool = self._slots.device, self._tokens.device
        self.reset()

    def reset(self) -> None:
        """Free all rows; row 0 comes first. Whoever takes a row writes it anew."""
        self._free_rows = list(range(self.num_rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        """Requests that could still get a row."""
        return len(self._free_rows)

    def allocate(self) -> int:
        """Take a row; raises OutOfRows when all are taken."""
        if not self._free_rows:
            raise OutOfRows(f"out of rows: all {self.num_rows} are taken")
        return self._free_rows.pop()

    def free(self, row: int) -> None:
        """Free a row; raise ValueError if it is unknown or already free."""
        if not 0 <= row < self.num_rows or row in self._free_rows:
            raise refuse("free", f"a row in use, of 0 ... {self.num_rows - 1}", row)
        self._free_rows.append(row)

    def write(self, row: int, start: int, slots: IntArray) -> None:
        """Set the slots of a row from position `start` on, [n]; the device follows at `flush`."""
        if row == self.dummy_row:
            raise refuse("write", "a row of a request, not the dummy row", row)
        self._slots.write(row, start, slots)

    def write_tokens(self, row: int, start: int, ids: IntArray) -> None:
        """Set the token ids of a row from position `start` on, [n]; on the device at `flush`."""
        if row == self.dummy_row:
            raise refuse("write_tokens", "a row of a request, not the dummy row", row)
        self._tokens.write(row, start, ids)

    def flush(self) -> None:
        """Bring all writes to the device, on the current stream: one copy, one scatter a table."""
        places = [table.take_pending() for table in (self._slots, self._tokens)]
        counts = [len(place) for place in places]
        if not any(counts):
            return
        values = [
            table.host.reshape(-1)[place]
            for table, place in zip((self._slots, self._tokens), places)
        ]
        packed = torch.from_numpy(np.concatenate([*places, *values], dtype=np.int64))
        if self.device.type == "cuda":  # fresh pinned memory: the last copy may still be in flight
            packed = packed.pin_memory()
        split = packed.to(self.device, non_blocking=True).split(counts + counts)
        for i, table in enumerate((self._slots, self._tokens)):
            if counts[i]:
                flat = table.device.view(-1)
                flat.index_copy_(0, split[i], split[i + 2].to(flat.dtype))
