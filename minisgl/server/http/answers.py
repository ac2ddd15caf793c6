"""Bounds on the memory of answers that wait for their end, or for a slow reader.

Generated from notebooks/12bb_fields.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.server.http.bodies import HOLD
from minisgl.server.http.errors import ApiError
from minisgl.server.http.limits import FREE
from minisgl.server.workers.messages import TokenLogprob
from minisgl.shares import Shares

MAX_HELD = 2**19  # log probabilities of all whole answers in progress


class Held:
    """Log probabilities, alternatives included, that wait for the rest of one answer."""

    def __init__(self, shares: Shares, client: str) -> None:
        self._shares, self._client, self.count = shares, client, 0

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Count more of them; an `ApiError` above the client's share."""
        count = sum(1 + len(entry.top) for entry in entries)
        if not self._shares.take(self._client, count):
            fits = self.count + count <= self._shares.most
            why = f"logprobs: more than {self.count} in one answer are too many to hold; stream it"
            why += ", or ask for fewer" + ", or try again later" * fits
            raise ApiError(429 if fits else 400, why, code="logprobs_full", param="logprobs")
        self.count += count

    def release(self) -> None:
        """Return them to the share, once the answer is sent or given up."""
        self._shares.give_back(self._client, self.count)
        self.count = 0


SLICE = 2**16  # bytes


class SlicedResponse(Response):
    """A response that keeps one slice in the send buffer; `sent` is called at its end.

    Its bytes count in its client's share, unless they are `common` to many responses.
    """

    sent: Callable[[], object] | None = None
    common = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            if len(self.body) > FREE and HOLD in scope and not self.common:
                scope[HOLD](len(self.body))
            await send({"type": "http.response.start", **head})
            for at in range(0, len(self.body), SLICE):
                piece, more = self.body[at : at + SLICE], at + SLICE < len(self.body)
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            if self.sent is not None:
                self.sent()
