"""The requests that produce one token per step, and the pages that are promised to them.

Generated from notebooks/09_scheduler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.core import Batch, Phase, Req


def pages_to_come(req: Req, page_size: int, reserve: int | None = None) -> int:
    """Return the pages that an admitted request may still need; its last token needs no K and V.

    With `reserve`, at most what the rest of its prompt and the next `reserve` tokens take.
    """
    end = req.max_device_len - 1
    if reserve is not None:
        end = min(end, max(req.cached_len, req.prefill_len) + reserve)
    return -(-end // page_size) - -(-req.cached_len // page_size)


class DecodeManager:
    """Requests with a complete prompt and room for more tokens, in the order of joining."""

    def __init__(self, reserve: int | None = None) -> None:
        self.reserve = reserve  # tokens of each answer that are promised ahead; None: all
        self.running: dict[int, Req] = {}  # by uid

    def remove(self, req: Req) -> None:
        self.running.pop(req.uid, None)

    def pages_to_come(self, page_size: int) -> int:
        """Return the pages that must stay available for the running requests."""
        return sum(pages_to_come(req, page_size, self.reserve) for req in self.running.values())

    def update(self, reqs: Iterable[Req]) -> None:
        """Keep requests that need another step, after a launch; drop those that had their last."""
        for req in reqs:
            if req.can_decode and not req.is_chunked:
                self.running[req.uid] = req
            else:
                self.remove(req)

    def schedule(self) -> Batch | None:
        """Return a batch of one token for each running request."""
        reqs = list(self.running.values())
        return Batch(reqs=reqs, phase=Phase.DECODE) if reqs else None
