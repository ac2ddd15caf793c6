"""Replies that their readers have not taken: clients share the memory for them.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minisgl.scheduler.messages import ErrorReply
from minisgl.server.frontend import Frontend, Stream
from minisgl.server.http.limits import Shares
from minisgl.server.workers.messages import UserReply

MAX_UNREAD = 2**19  # log probabilities of all streams, alternatives included: about 130 MB


class FairStream(Stream):
    """A stream whose replies count in its client's share until they are sent."""

    def __init__(self, client: str, shares: Shares, cut: Callable[[ErrorReply], None]) -> None:
        super().__init__(client)
        self._shares, self._cut = shares, cut
        self._waiting = self._leaving = 0  # counted: not taken yet, taken but perhaps not sent

    def put(self, reply: UserReply | ErrorReply) -> None:
        if isinstance(reply, UserReply) and self.error is None:
            count = 2 + sum(1 + len(entry.top) for entry in reply.logprobs)
            if not self._shares.take(self.client, count):
                why = "stream: too many replies wait for readers that take none, some of them yours"
                self._cut(ErrorReply(uid=reply.uid, message=why, code="slow_reader"))
                return
            self._waiting += count
        super().put(reply)

    async def get(self) -> UserReply | ErrorReply:
        reply = await super().get()
        self._shares.give_back(self.client, self._leaving)
        self._leaving, self._waiting = self._waiting, 0
        return reply

    def close(self) -> None:
        """Return what still counts to the share."""
        self._shares.give_back(self.client, self._waiting + self._leaving)
        self._waiting = self._leaving = 0


class FairFrontend(Frontend):
    """A frontend whose clients share the memory for replies that are not read."""

    def __init__(self, *args: Any, most: int = MAX_UNREAD, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.unread = Shares(most)
        self.new_stream = lambda client: FairStream(client, self.unread, self._cut)

    def _forget(self, uid: int, outcome: str) -> None:
        stream = self._streams[uid]
        super()._forget(uid, outcome)
        if isinstance(stream, FairStream):
            stream.close()
