"""Who may come in: a bound on answers under way, and one switch for "not now".

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.server.api import Admission
from minisgl.server.schemas import ApiError


class Gate(Admission):
    """Lets in as many answers at once as `limit` says, and nobody while it is closed."""

    def __init__(self, limit: int, reason: str | None = None) -> None:
        self.limit, self.reason = limit, reason
        self.taken = 0  # answers under way, running or waiting
        self.refused = 0  # HTTP requests, since the start

    def closed(self) -> str | None:
        return self.reason

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold places; a 503 while closed, a 429 when full, a 400 if it can never fit."""
        if self.reason is not None:
            raise ApiError(503, self.reason, code="service_unavailable", retry_after=5)
        if count > self.limit:
            why = f"n: {count} answers at once are more than the {self.limit} of this server"
            raise ApiError(400, why, code="invalid_value", param="n")
        if self.taken + count > self.limit:
            self.refused += 1
            why = f"the queue is full: {self.taken} of {self.limit} answers are under way"
            raise ApiError(429, why, code="queue_full", retry_after=1)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
