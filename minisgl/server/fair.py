"""Replies that their readers have not taken: clients share the memory for them.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from minisgl.scheduler.messages import AbortMsg, ErrorReply
from minisgl.scheduler.queue import Shares
from minisgl.server.frontend import Frontend, RequestFailed, Stream
from minisgl.server.workers.messages import StatsEvent, TokenizeMsg, UserReply

PART = 16  # replies
MAX_UNREAD = 2**19  # log probabilities of all streams, alternatives included: about 130 MB


class FairStream(Stream):
    """A stream whose replies count in its client's share until they are sent."""

    def __init__(self, client: str, shares: Shares, cut: Callable[[ErrorReply], None]) -> None:
        super().__init__(client)
        self._shares, self._cut = shares, cut
        self._counts, self._leaving = deque[int](), 0  # not taken yet; taken, perhaps not sent

    def put(self, reply: UserReply | ErrorReply) -> None:
        if isinstance(reply, UserReply) and self.error is None:
            count = 2 + sum(1 + len(entry.top) for entry in reply.logprobs)
            if not self._shares.take(self.client, count):
                why = "stream: too many replies wait for readers that take none, some of them yours"
                self._cut(ErrorReply(uid=reply.uid, message=why, code="slow_reader"))
                return
            self._counts.append(count)
        super().put(reply)

    async def get(self) -> UserReply | ErrorReply:
        if len(self.waiting) > PART:  # each part is formatted in a turn of its own
            await asyncio.sleep(0)
        self.waiting, later = self.waiting[:PART], self.waiting[PART:]
        reply = await super().get()
        self.waiting += later
        self._shares.give_back(self.client, self._leaving)
        taken = range(len(self._counts) - len(self.waiting))
        self._leaving = sum(self._counts.popleft() for _ in taken)
        return reply

    def close(self) -> None:
        """Return what still counts to the share."""
        self._shares.give_back(self.client, sum(self._counts) + self._leaving)
        self._counts, self._leaving = deque(), 0


class FairFrontend(Frontend):
    """A frontend whose clients share the memory for replies that are not read.

    They also share `places` for requests. An aborted one keeps its place until the scheduler has
    read the abort: until then, the request may still wait for the scheduler.
    """

    def __init__(
        self, *args: Any, most: int = MAX_UNREAD, places: int = 2**31, **fields: Any
    ) -> None:
        super().__init__(*args, **fields)
        self.unread, self.places = Shares(most), Shares(places)
        self.new_stream = lambda client: FairStream(client, self.unread, self._cut)
        self._placed: dict[int, str] = {}  # the client of each request that has a place, by uid
        self._aborted = set[int]()  # those whose abort was not read yet

    def _open(self, uid: int, seconds: float | None, client: str) -> Stream:
        if not self.places.take(client, 1):
            why = "the queue is full: requests that were given up are still being removed"
            raise RequestFailed(why, code="queue_full")
        self._placed[uid] = client
        try:
            return super()._open(uid, seconds, client)
        except RequestFailed:
            self._leave(uid)
            raise

    def _send(self, uid: int, msg: TokenizeMsg | AbortMsg) -> None:
        if isinstance(msg, AbortMsg):
            self._aborted.add(uid)
        super()._send(uid, msg)

    def _leave(self, uid: int) -> None:
        """Return a request's place, if it still has one."""
        self._aborted.discard(uid)
        if (client := self._placed.pop(uid, None)) is not None:
            self.places.give_back(client, 1)

    def _dispatch(self, replies: list[UserReply | ErrorReply | StatsEvent]) -> None:
        for reply in replies:
            if isinstance(reply, ErrorReply) and reply.code == "aborted":
                self._leave(reply.uid)
        Frontend._dispatch(self, replies)

    def _forget(self, uid: int, outcome: str) -> None:
        stream = self._streams[uid]
        Frontend._forget(self, uid, outcome)
        if isinstance(stream, FairStream):
            stream.close()
        if uid not in self._aborted:
            self._leave(uid)
