"""One stream of replies per request, in the asyncio process: `uid` to stream, and nothing else.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import AbortMsg, ErrorReply
from minisgl.server.channels import Inbox, Outbox
from minisgl.server.messages import TokenizeMsg, UserReply, Watched


def join(replies: Sequence[UserReply]) -> UserReply:
    """Replies of one request that came one after another, as one: texts add up, counts are last."""
    if len(replies) == 1:
        return replies[0]
    return msgspec.structs.replace(
        replies[-1],
        text="".join(reply.text for reply in replies),
        token_ids=[token for reply in replies for token in reply.token_ids],
        logprobs=[entry for reply in replies for entry in reply.logprobs],
    )


class Stream:
    """What one request was answered and its reader has not taken yet."""

    def __init__(self) -> None:
        self._replies: list[UserReply] = []
        self._error: ErrorReply | None = None
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Replies that wait."""
        return len(self._replies)

    @property
    def failed(self) -> bool:
        """Whether it ends with an error."""
        return self._error is not None

    def put(self, reply: UserReply | ErrorReply) -> None:
        """Add a reply; after an error nothing more is taken in."""
        if self._error is None and isinstance(reply, ErrorReply):
            self._error = reply
        elif self._error is None and isinstance(reply, UserReply):
            self._replies.append(reply)
        self._news.set()

    async def get(self) -> UserReply | ErrorReply:
        """All that waits, joined, or the error that ended the stream."""
        await self._news.wait()
        replies, self._replies = self._replies, []
        if self._error is None:
            self._news.clear()
        elif not replies:
            return self._error
        return join(replies)


class RequestFailed(Exception):
    """A request that ended with an error reply. `code` and `param` are what the API reports."""

    def __init__(
        self, message: str, code: str = "internal_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


Prompt = Mapping[str, Any]  # text=…, input_ids=… or messages=…, the others None


class Observer:
    """Told, on the event loop, what happens to requests. Chapter 12b fills the methods in."""

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        """A request sets out; `request_id` is the caller's name for it."""

    def replied(self, uid: int, reply: UserReply) -> None:
        """The engine said something."""

    def closed(self, uid: int, outcome: str) -> None:
        """It is over: "stop", "length", "left" (by its client) or the code of an error."""

    def told(self, msg: Watched) -> None:
        """The scheduler's process reports."""


class Frontend:
    """Sends requests to the text workers and hands each reply to the stream that waits for it.

    All methods run on the event loop; one thread listens to `inbox` and passes replies over. A
    stream that holds more than `max_waiting` replies, because nobody reads it, is cut.
    """

    def __init__(
        self, text_workers: Sequence[Outbox], inbox: Inbox, observers: Sequence[Observer] = (),
        max_waiting: int = 8192,
    ) -> None:  # fmt: skip
        self._text_workers, self._inbox = list(text_workers), inbox
        self._observers, self._max_waiting = list(observers), max_waiting
        self._streams: dict[int, Stream] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._uids = itertools.count()
        self._stopping = threading.Event()
        self._listener: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: str | None = None

    def _outbox(self, uid: int) -> Outbox:
        """One worker for all messages of a request: an abort must not overtake its prompt."""
        return self._text_workers[uid % len(self._text_workers)]

    async def start(self) -> None:
        """Begin to listen. Call once, on the event loop that will serve."""
        self._loop = loop = asyncio.get_running_loop()
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

    def _dispatch(self, replies: list[UserReply | ErrorReply | Watched]) -> None:
        for reply in replies:
            if not isinstance(reply, UserReply | ErrorReply):
                for observer in self._observers:
                    observer.told(reply)
                continue
            stream = self._streams.get(reply.uid)
            if stream is None:  # its client left, and the abort is on its way
                continue
            if isinstance(reply, UserReply):
                for observer in self._observers:
                    observer.replied(reply.uid, reply)
            stream.put(reply)
            if len(stream) > self._max_waiting and not stream.failed:
                why = f"stream: {len(stream)} tokens wait for a reader that does not take them"
                stream.put(ErrorReply(uid=reply.uid, message=why, code="slow_reader"))
                self._outbox(reply.uid).put(AbortMsg(uid=reply.uid))

    def fail_all(self, why: str) -> None:
        """End every stream with an error and refuse new ones."""
        self.failure = self.failure or why
        for uid, stream in self._streams.items():
            stream.put(ErrorReply(uid=uid, message=why, code="service_unavailable", param=None))

    def fail_soon(self, why: str) -> None:
        """`fail_all`, said from another thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.fail_all, why)

    async def stop(self) -> None:
        """Stop listening; streams that still wait end with an error."""
        self.fail_all("the server is shutting down")
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Wait until nobody listens any more: only then may the inbox be closed."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.join()

    async def generate(
        self, sampling_params: SamplingParams, *, text: str | None = None,
        messages: list[dict[str, Any]] | None = None, input_ids: list[int] | None = None,
        request_id: str = "", timeout: float | None = None, client: str = "",
    ) -> AsyncGenerator[UserReply, None]:  # fmt: skip
        """Replies of one new request, until it is finished; `timeout` is in seconds, for all of it.

        The scheduler shares its time fairly between clients; "" is one client, too. Leaving early
        (break, cancellation, a client that disconnects) aborts the request, so its pages are free
        within a step. Raises `RequestFailed` if refused, late, or a worker died.
        """
        if self.failure is not None:
            raise RequestFailed(self.failure, code="service_unavailable")
        uid = next(self._uids)
        prompt: dict[str, Any] = {"text": text, "messages": messages, "input_ids": input_ids}
        for observer in self._observers:
            observer.opened(uid, request_id, prompt)
        stream = self._open(uid, timeout)
        outcome, finished = "left", False
        try:
            self._outbox(uid).put(
                TokenizeMsg(uid=uid, sampling_params=sampling_params, client=client, **prompt)
            )
            while not finished:
                reply = await stream.get()
                if isinstance(reply, ErrorReply):
                    outcome = reply.code
                    raise RequestFailed(reply.message, reply.code, reply.param)
                finished = reply.finished
                outcome = reply.finish_reason or "stop" if finished else outcome
                yield reply
        finally:
            self._forget(uid, outcome)

    def _open(self, uid: int, seconds: float | None) -> Stream:
        """Register a stream; when its time is over, if that is limited, it ends with an error."""
        stream = self._streams[uid] = Stream()
        if seconds is not None:
            why = f"timeout: the answer was not complete within {seconds:g} seconds"
            late = ErrorReply(uid=uid, message=why, code="deadline_exceeded", param="timeout")
            loop = asyncio.get_running_loop()
            self._deadlines[uid] = loop.call_later(seconds, stream.put, late)
        return stream

    def _forget(self, uid: int, outcome: str) -> None:
        """Close a stream; tell the engine unless it knows that the request is over."""
        del self._streams[uid]
        deadline = self._deadlines.pop(uid, None)
        if deadline is not None:
            deadline.cancel()
        for observer in self._observers:
            observer.closed(uid, outcome)
        if outcome in ("left", "deadline_exceeded"):
            self._outbox(uid).put(AbortMsg(uid=uid))
