"""One stream of replies per request, in the asyncio process: `uid` to queue, and nothing else.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import AbortMsg, ErrorReply
from minisgl.server.channels import Inbox, Outbox
from minisgl.server.messages import TokenizeMsg, UserReply


class RequestFailed(Exception):
    """A request that ended with an error reply. `code` and `param` are what the API reports."""

    def __init__(
        self, message: str, code: str = "internal_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class Frontend:
    """Sends requests to the text workers and hands each reply to the stream that waits for it.

    All methods run on the event loop; one thread listens to `inbox` and passes replies over.
    """

    def __init__(self, text_workers: Sequence[Outbox], inbox: Inbox) -> None:
        self._text_workers, self._inbox = list(text_workers), inbox
        self._streams: dict[int, asyncio.Queue[UserReply | ErrorReply]] = {}
        self._uids = itertools.count()
        self._stopping = threading.Event()
        self._listener: threading.Thread | None = None
        self.failure: str | None = None

    async def start(self) -> None:
        """Begin to listen. Call once, on the event loop that will serve."""
        loop = asyncio.get_running_loop()
        self._listener = threading.Thread(
            target=self._listen, args=(loop,), name="frontend", daemon=True
        )
        self._listener.start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """The listening thread: one hand-over to the loop for all replies that came together."""
        while not self._stopping.is_set():
            replies = self._inbox.get_all(timeout=0.2)
            if replies:
                try:
                    loop.call_soon_threadsafe(self._dispatch, replies)
                except (
                    RuntimeError
                ):  # the loop has been closed while we waited: nobody is left to read
                    return

    def _dispatch(self, replies: list[UserReply | ErrorReply]) -> None:
        for reply in replies:
            stream = self._streams.get(reply.uid)
            if stream is not None:  # else its client left, and the abort is on its way
                stream.put_nowait(reply)

    async def stop(self) -> None:
        """Stop listening; streams that still wait end with an error."""
        self.fail_all("the server is shutting down")
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Wait until nobody listens any more: only then may the inbox be closed."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.join()

    def fail_all(self, why: str) -> None:
        """End every stream with an error and refuse new ones."""
        self.failure = self.failure or why
        for uid, stream in self._streams.items():
            stream.put_nowait(
                ErrorReply(uid=uid, message=why, code="service_unavailable", param=None)
            )

    async def generate(
        self,
        sampling_params: SamplingParams,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        input_ids: list[int] | None = None,
    ) -> AsyncGenerator[UserReply, None]:
        """Replies of one new request, until it is finished.

        Leaving early (break, cancellation, a client that disconnects) aborts the request, so its
        pages are free within a step. Raises `RequestFailed` when it is refused or a worker died.
        """
        if self.failure is not None:
            raise RequestFailed(self.failure, code="service_unavailable")
        uid = next(self._uids)
        # One worker for all messages of a request: an abort must not overtake the prompt it aborts.
        outbox = self._text_workers[uid % len(self._text_workers)]
        stream: asyncio.Queue[UserReply | ErrorReply] = asyncio.Queue()
        self._streams[uid] = stream
        ended = False
        try:
            prompt: dict[str, Any] = {"text": text, "messages": messages, "input_ids": input_ids}
            outbox.put(TokenizeMsg(uid=uid, sampling_params=sampling_params, **prompt))
            while not ended:
                reply = await stream.get()
                ended = isinstance(reply, ErrorReply) or reply.finished
                if isinstance(reply, ErrorReply):
                    raise RequestFailed(reply.message, reply.code, reply.param)
                yield reply
        finally:
            del self._streams[uid]
            if not ended:
                outbox.put(AbortMsg(uid=uid))
