"""The Triton backend with every choice fixed, independent of the batch.

Generated from notebooks/05f_batch_invariance.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.attention.triton_backend import TritonBackend

QUERY_ROWS = 64


class InvariantTritonBackend(TritonBackend):
    """Triton backend with one tile shape for prefill and decode, and keys in one part."""

    def query_rows(self, average_rows: int) -> int:
        """Return the rows of a query tile, the same for every batch."""
        return QUERY_ROWS

    def num_splits(self, places: int, max_len: int) -> int:
        """Return 1: splitting the keys would change the order of the sum."""
        return 1
