"""One stream of replies per request, in the asyncio process: `uid` to stream, and nothing else.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import AbortMsg, ErrorReply
from minisgl.server.workers.channels import Inbox, Outbox
from minisgl.server.workers.messages import (
    Converted,
    ConvertMsg,
    StatsEvent,
    TokenizeMsg,
    UserReply,
)


def join(replies: Sequence[UserReply]) -> UserReply:
    """Join successive replies of one request: texts are concatenated, counts are the last."""
    if len(replies) == 1:
        return replies[0]
    return msgspec.structs.replace(
        replies[-1],
        text="".join(reply.text for reply in replies),
        token_ids=[token for reply in replies for token in reply.token_ids],
        logprobs=[entry for reply in replies for entry in reply.logprobs],
    )


class Stream:
    """The replies to one request that its reader has not yet taken."""

    def __init__(self, client: str = "") -> None:
        self.client, self.waiting = client, list[UserReply]()
        self.error: ErrorReply | None = None  # how it ended, once `waiting` is taken
        self.timer: asyncio.TimerHandle | None = None  # its deadline
        self._reader: asyncio.Future[None] | None = None  # its turn, while it waits

    def put(self, reply: UserReply | ErrorReply) -> None:
        """Add a reply; after an error nothing more is taken in."""
        if self.error is None:
            if isinstance(reply, ErrorReply):
                self.error = reply
            else:
                self.waiting.append(reply)
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)

    async def get(self) -> UserReply | ErrorReply:
        """Return all waiting replies, joined, or the error that ended the stream."""
        if not self.waiting and self.error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        replies, self.waiting = self.waiting, []
        return join(replies) if replies or self.error is None else self.error


class RequestFailed(Exception):
    """A request that ended with an error reply. `code` and `param` are what the API reports."""

    def __init__(
        self, message: str, code: str = "internal_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param = code, param


Prompt = Mapping[str, Any]  # text=…, input_ids=… or messages=…; others missing or None


class Observer:
    """Observer callbacks, which run on the event loop."""

    def opened(self, uid: int, request_id: str, prompt: Prompt) -> None:
        """Record the start of a request; `request_id` is the caller's name for it."""

    def replied(self, uid: int, reply: UserReply) -> None:
        """Record a reply of the engine."""

    def closed(self, uid: int, outcome: str) -> None:
        """Record its end: "stop", "length", "left" (by its client) or the code of an error."""

    def reported(self, msg: StatsEvent) -> None:
        """Record a report of the scheduler's process."""

    def refused(self, status: int) -> None:
        """Record an HTTP request that got an error."""

    def ended(self, scope: Any, status: int, seconds: float) -> None:
        """Record the status and duration of an HTTP request; `scope` is ASGI's."""


class Frontend:
    """Sends requests to the text workers and hands each reply to the stream that waits for it.

    All methods run on the event loop; one thread listens to `inbox` and passes replies over. A
    stream that holds more than `max_waiting` replies, because it is not read, is cut.
    """

    loop: asyncio.AbstractEventLoop | None = None  # the one that serves, once started
    failure: str | None = None  # why new requests are rejected
    new_stream: Callable[[str], Stream] = Stream

    def __init__(
        self, text_workers: Sequence[Outbox], inbox: Inbox, observers: Sequence[Observer] = (),
        max_waiting: int = 8192, together: int = 16,
    ) -> None:  # fmt: skip
        self._text_workers, self._inbox = list(text_workers), inbox
        self._observers, self._max_waiting, self._most = list(observers), max_waiting, together
        self._failed: list[Observer] = []  # at least once
        self._streams: dict[int, Stream] = {}
        self._unsent: list[list[TokenizeMsg | AbortMsg]] = [[] for _ in self._text_workers]
        self._uids, self._stopping = itertools.count(), threading.Event()
        self._listener: threading.Thread | None = None

    def _send(self, uid: int, msg: TokenizeMsg | AbortMsg) -> None:
        """Send up to `together` prompts of one turn of the loop together, an abort at once."""
        place = uid % len(self._text_workers)  # the same worker: no abort overtakes its prompt
        self._unsent[place].append(msg)
        if isinstance(msg, AbortMsg) or len(self._unsent[place]) == self._most:
            self._flush(place)
        elif len(self._unsent[place]) == 1:
            asyncio.get_running_loop().call_soon(self._flush, place)

    def _flush(self, place: int) -> None:
        messages, self._unsent[place] = self._unsent[place], []
        try:
            if messages:
                self._text_workers[place].put(*messages)
        except Exception as error:  # it must not block the prompts of other requests
            for msg in messages if len(messages) > 1 else ():
                self._unsent[place] = [msg]
                self._flush(place)
            if len(messages) == 1 and (stream := self._streams.get(messages[0].uid)):
                why = f"internal error: {type(error).__name__}: {error}"
                stream.put(ErrorReply(uid=messages[0].uid, message=why, code="internal_error"))

    async def start(self) -> None:
        """Begin to listen. Call once, on the event loop that will serve."""
        self.loop = asyncio.get_running_loop()
        self._listener = threading.Thread(target=self._listen, args=(self.loop,), daemon=True)
        self._listener.start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive replies in a thread; one loop callback handles those that came together."""
        call = loop.call_soon_threadsafe
        with suppress(RuntimeError):  # the loop was closed during the wait: no reader is left
            try:
                while not self._stopping.is_set():
                    if replies := self._inbox.get_all(timeout=0.2):
                        call(self._dispatch, replies)
            except Exception as error:  # replies are lost, and their requests are unknown
                call(self.fail_all, f"the frontend cannot read its inbox: {error!r}")

    def _dispatch(self, replies: list[UserReply | ErrorReply | StatsEvent]) -> None:
        for reply in replies:
            if not isinstance(reply, UserReply | ErrorReply):
                self.notify("reported", reply)
            elif (stream := self._streams.get(reply.uid)) is not None:  # else its client left
                stream.put(reply)
                if len(stream.waiting) > self._max_waiting:
                    why = f"stream: {len(stream.waiting)} replies wait for a reader that takes none"
                    self._cut(ErrorReply(uid=reply.uid, message=why, code="slow_reader"))
                if type(reply) is UserReply:
                    self.notify("replied", reply.uid, reply)

    def notify(self, event: str, *args: Any) -> None:
        """Call one method of every observer; the log reports the first exception of each."""
        for observer in self._observers:
            try:
                getattr(observer, event)(*args)
            except Exception as error:
                if observer not in self._failed:
                    why = f"{type(observer).__name__} failed, reported once: {error!r}"
                    logging.getLogger(__name__).error(why)
                    self._failed.append(observer)

    def fail_all(self, why: str) -> None:
        """End every stream with an error and refuse new ones."""
        self.failure = self.failure or why
        for uid, stream in self._streams.items():
            stream.put(ErrorReply(uid=uid, message=why, code="service_unavailable", param=None))

    async def stop(self) -> None:
        """Stop listening; open streams end with an error."""
        self.fail_all("the server is shutting down")
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Wait for the listener to exit: only then may the inbox be closed."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.join()

    async def generate(
        self, sampling_params: SamplingParams, *, request_id: str = "",
        timeout: float | None = None, client: str = "", **prompt: Any,
    ) -> AsyncGenerator[UserReply, None]:  # fmt: skip
        """Yield replies to one prompt (`text=`, `messages=` or `input_ids=`) until it is finished.

        Leaving early aborts the request. Raise `RequestFailed` if it is rejected, takes more than
        `timeout` seconds, or a worker died.
        """
        uid, outcome = next(self._uids), "left"
        msg = TokenizeMsg(uid=uid, sampling_params=sampling_params, client=client, **prompt)
        stream = self._open(uid, timeout, client)
        self.notify("opened", uid, request_id, prompt)
        try:
            self._send(uid, msg)
            while outcome == "left":
                reply = await stream.get()
                if isinstance(reply, ErrorReply):
                    outcome = reply.code
                    raise RequestFailed(reply.message, reply.code, reply.param)
                outcome = (reply.finish_reason or "stop") if reply.finished else "left"
                yield reply
        finally:
            self._forget(uid, outcome)
            self.notify("closed", uid, outcome)

    async def convert(self, client: str = "", **prompt: Any) -> Converted:
        """Convert `text=` or `messages=` to tokens, or `input_ids=` to text, without observers."""
        uid, outcome = next(self._uids), "left"
        stream = self._open(uid, None, client)
        try:
            self._send(uid, ConvertMsg(uid=uid, client=client, **prompt))
            reply = await stream.get()
            outcome = "converted"
        finally:
            self._forget(uid, outcome)
        if isinstance(reply, ErrorReply):
            raise RequestFailed(reply.message, reply.code, reply.param)
        assert isinstance(reply, Converted)
        return reply

    def _open(self, uid: int, seconds: float | None, client: str) -> Stream:
        """Register a stream; it ends with an error after its deadline, if it has one."""
        if self.failure is not None:
            raise RequestFailed(self.failure, code="service_unavailable")
        stream = self._streams[uid] = self.new_stream(client)
        if seconds is not None:
            why = f"timeout: the answer was not complete within {seconds:g} seconds"
            late = ErrorReply(uid=uid, message=why, code="deadline_exceeded", param="timeout")
            stream.timer = asyncio.get_running_loop().call_later(seconds, self._cut, late)
        return stream

    def _cut(self, error: ErrorReply) -> None:
        """End a stream early: abort in the engine now; the next read raises the error."""
        stream = self._streams[error.uid]
        if stream.error is None:
            stream.put(error)
            self._send(error.uid, AbortMsg(uid=error.uid))

    def _forget(self, uid: int, outcome: str) -> None:
        """Close a stream; send an abort unless the request is over."""
        stream = self._streams.pop(uid)
        if stream.timer is not None:
            stream.timer.cancel()
        if outcome == "left" and stream.error is None:
            self._send(uid, AbortMsg(uid=uid))
