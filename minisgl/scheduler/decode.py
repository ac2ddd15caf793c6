"""The requests that produce one token per step, in the order in which they got there.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.core import Batch, Phase, Req


def pages_to_come(req: Req, page_size: int, reserve: int | None = None) -> int:
    """Pages that an admitted request may still take; its last token needs no K and V.

    With `reserve`, no more than the rest of its prompt and so many tokens of its answer take.
    """
    end = req.max_device_len - 1
    if reserve is not None:
        end = min(end, max(req.cached_len, req.prefill_len) + reserve)
    return -(-end // page_size) - -(-req.cached_len // page_size)


class DecodeManager:
    """Requests with a complete prompt and room for more tokens, first come first."""

    def __init__(self, reserve: int | None = None) -> None:
        self.reserve = reserve  # tokens of each answer that are promised ahead; None: all
        self.running: dict[int, Req] = {}  # by uid; the order is the same on every rank

    def remove(self, req: Req) -> None:
        self.running.pop(req.uid, None)

    def pages_to_come(self, page_size: int) -> int:
        """Pages that must stay available for the running requests."""
        return sum(pages_to_come(req, page_size, self.reserve) for req in self.running.values())

    def pages_now(self, page_size: int) -> int:
        """Pages that the next token of everybody takes."""
        return sum(req.cached_len % page_size == 0 for req in self.running.values())

    @property
    def youngest(self) -> Req:
        """The one that joined last."""
        return next(reversed(self.running.values()))

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
