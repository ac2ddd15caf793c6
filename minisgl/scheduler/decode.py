"""The requests that produce one token per step, in the order in which they got there.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.core import Batch, Phase, Req


def pages_to_come(req: Req, page_size: int) -> int:
    """Pages that an admitted request may still take; its last token needs no K and V."""
    last = -(-(req.max_device_len - 1) // page_size)
    return last - -(-req.cached_len // page_size)


class DecodeManager:
    """Requests with a complete prompt and room for more tokens, first come first."""

    def __init__(self) -> None:
        self.running: dict[int, Req] = {}  # by uid; the order is the same on every rank

    def remove(self, req: Req) -> None:
        self.running.pop(req.uid, None)

    def pages_to_come(self, page_size: int) -> int:
        """Pages that must stay available for the running requests."""
        return sum(pages_to_come(req, page_size) for req in self.running.values())

    def update(self, reqs: Iterable[Req]) -> None:
        """After a launch: keep those that need another step, drop those that had their last one."""
        for req in reqs:
            if req.is_chunked:
                continue
            if req.can_decode:
                self.running[req.uid] = req
            else:
                self.running.pop(req.uid, None)

    def schedule(self) -> Batch | None:
        """Everybody, one token each."""
        reqs = list(self.running.values())
        return Batch(reqs=reqs, phase=Phase.DECODE) if reqs else None
