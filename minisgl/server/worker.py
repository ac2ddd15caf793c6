"""The text worker: text to token ids on the way in, token ids to text on the way out.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from minisgl.scheduler.messages import AbortMsg, ErrorReply, ExitMsg, TokenReply, UserMsg
from minisgl.server.channels import Inbox, Outbox
from minisgl.server.messages import (
    Message,
    StatsMsg,
    TokenizeMsg,
    TokenLogprob,
    TraceMsg,
    UserReply,
)
from minisgl.server.token_bytes import TokenBytes
from minisgl.tokenizer import DecodeStatus, Tokenizer


class TextWorker:
    """Text to token ids on the way in, token ids to text on the way out.

    State is one `DecodeStatus` per request that is under way. A request whose stop string was
    found is closed for the frontend at once, and remembered until the scheduler confirms its end.
    """

    def __init__(
        self, tokenizer: Tokenizer, to_scheduler: Outbox, to_frontend: Outbox, window: int
    ) -> None:
        self._tokenizer = tokenizer
        self._to_scheduler, self._to_frontend = to_scheduler, to_frontend
        self._open: dict[int, OpenText] = {}
        self._bytes = TokenBytes(tokenizer)
        self._window = window  # tokens
        longest = max(map(len, tokenizer.backend.get_vocab()), default=1)
        self._max_chars = 4 * window * longest  # of a prompt; surely too long beyond

    def handle(self, msg: Message) -> None:
        """React to one message; a bad one is answered to its own caller and hurts nobody else."""
        match msg:
            case TokenizeMsg():
                self._tokenize(msg)
            case TokenReply():
                self._detokenize(msg)
            case AbortMsg():
                self._to_scheduler.put(msg)
            case StatsMsg() | TraceMsg():
                self._to_frontend.put(msg)
            case ErrorReply():
                self._open.pop(msg.uid, None)
                self._to_frontend.put(msg)
            case _:
                raise TypeError(f"message: a text worker does not take {type(msg).__name__}")

    def _too_long(self, msg: TokenizeMsg) -> ErrorReply | None:
        """The refusal of a text that cannot fit the window, found without encoding it."""
        size, what, count = characters(msg), "characters", len(msg.messages or [])
        if size <= self._max_chars and count <= self._window:
            return None
        if count > self._window:  # each message takes a token or more
            size, what = count, "messages"
        param = "prompt" if msg.messages is None else "messages"
        why = f"{param}: {size} {what} are too many for a window of {self._window} tokens"
        return ErrorReply(uid=msg.uid, message=why, code="context_length_exceeded", param=param)

    def _tokenize(self, msg: TokenizeMsg) -> None:
        """One request to token ids, or an error to its caller."""
        refusal = self._too_long(msg)
        if refusal is not None:
            self._to_frontend.put(refusal)
            return
        try:
            if msg.messages is not None:
                ids = self._tokenizer.apply_chat(msg.messages).tolist()
            elif msg.text is not None:
                ids = self._tokenizer.encode(msg.text).tolist()
            else:
                ids = list(msg.input_ids or [])
        except (
            Exception
        ) as error:  # a chat template is code that the model's author wrote: anything can come out
            param = "messages" if msg.messages is not None else "prompt"
            self._to_frontend.put(
                ErrorReply(
                    uid=msg.uid, message=f"{param}: {error}", code="invalid_request", param=param
                )
            )
            return
        self._to_scheduler.put(
            UserMsg(
                uid=msg.uid, input_ids=ids, sampling_params=msg.sampling_params, client=msg.client
            )
        )

    def _detokenize(self, msg: TokenReply) -> None:
        """One token to the text that it completes; a stop string ends the request from here."""
        entry = self._open.get(msg.uid)
        if entry is None:
            entry = self._open[msg.uid] = OpenText(DecodeStatus(self._tokenizer, stop=msg.stop))
        already_closed, text, ids = entry.stopped, "", list[int]()
        if not already_closed and msg.token is not None:
            entry.completion_tokens += 1
            ids = [msg.token]
            if msg.logprob is not None and msg.token not in entry.status.skipped:
                entry.logprobs.append(self._logprob(msg, msg.token, entry.offset()))
            text = entry.status.push(msg.token)
            if entry.status.stopped and not msg.finished:
                self._to_scheduler.put(AbortMsg(uid=msg.uid))
        entry.stopped = entry.status.stopped
        if msg.finished:
            del self._open[msg.uid]
            text += "" if entry.stopped else entry.status.finish()
        entry.sent += len(text)
        if not already_closed:
            self._to_frontend.put(self._reply(msg, entry, text, ids))

    def _logprob(self, msg: TokenReply, token: int, offset: int) -> TokenLogprob:
        def spell(token: int) -> tuple[str, bytes]:
            data = self._bytes(token)
            return data.decode(errors="replace"), data

        top = [(*spell(other), value) for other, value in msg.top_logprobs or []]
        return TokenLogprob(*spell(token), logprob=msg.logprob or 0.0, offset=offset, top=top)

    def _reply(self, msg: TokenReply, entry: OpenText, text: str, ids: list[int]) -> UserReply:
        finished = msg.finished or entry.stopped
        return UserReply(
            uid=msg.uid,
            text=text,
            token_ids=ids,
            finished=finished,
            finish_reason="stop" if entry.stopped else msg.finish_reason,
            prompt_tokens=msg.prompt_tokens,
            cached_tokens=msg.cached_tokens,
            completion_tokens=entry.completion_tokens,
            logprobs=entry.take_logprobs(finished),
        )


def characters(msg: TokenizeMsg) -> int:
    """How much text there is to encode."""
    texts = [msg.text] if msg.messages is None else [m.get("content") for m in msg.messages]
    return sum(len(text) for text in texts if isinstance(text, str))


@dataclass
class OpenText:
    """What the detokenizer keeps for one request."""

    status: DecodeStatus
    completion_tokens: int = 0
    stopped: bool = False
    sent: int = 0  # characters that have gone out
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of text that has not
    ends: list[int] = field(default_factory=list)  # where their text ends, as far as it is known

    def offset(self) -> int:
        """Characters of the answer so far, those that are held back included."""
        return self.sent + len(self.status.filter.held)

    def take_logprobs(self, finished: bool) -> list[TokenLogprob]:
        """The entries whose text is out, after a token was pushed and its text counted."""
        if self.stopped:
            finished = False
        elif not self.status.stream.pending:  # no half character: all texts end somewhere
            end = self.offset()
            if len(self.logprobs) > len(self.ends) and "\ufffd" not in self.logprobs[-1].text:
                # Bytes before it may have become U+FFFD by now: count from the end.
                self.logprobs[-1].offset = end - len(self.logprobs[-1].text)
            self.ends += [end] * (len(self.logprobs) - len(self.ends))
        ready = sum(end <= self.sent for end in self.ends)
        ready = len(self.logprobs) if finished else ready
        taken, self.logprobs = self.logprobs[:ready], self.logprobs[ready:]
        self.ends = self.ends[ready:]
        return taken


class PromptQueue:
    """Prompts that wait to be encoded, short before long, each overtaken by its own size at most.

    The order is that of `characters encoded before it came + its own characters`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []  # tag, number of arrival, uid
        self._waiting: dict[int, TokenizeMsg] = {}
        self._clock, self._arrivals = 0, itertools.count()  # characters; prompts

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, msg: TokenizeMsg) -> None:
        self._waiting[msg.uid] = msg
        tag = self._clock + characters(msg)
        heapq.heappush(self._heap, (tag, next(self._arrivals), msg.uid))

    def drop(self, uid: int) -> bool:
        """Forget a prompt whose client left; False if it does not wait here."""
        return self._waiting.pop(uid, None) is not None

    def pop(self) -> TokenizeMsg | None:
        """The next prompt, if any is left."""
        while self._heap:
            msg = self._waiting.pop(heapq.heappop(self._heap)[2], None)
            if msg is not None:
                self._clock += characters(msg)
                return msg
        return None


def run_text_worker(
    worker: TextWorker, inbox: Inbox, alive: Callable[[], bool],
    beat: Callable[[], None] = lambda: None, flush: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Handle messages until an `ExitMsg` comes or the parent is gone; `beat` after each.

    Answers come before prompts: they are quick, and readers wait for them. `flush` is called when
    all that came together is done.
    """
    prompts, leave = PromptQueue(), False
    while alive() and not leave:
        beat()
        for msg in inbox.get_all(timeout=0.0 if prompts else 0.5):
            if isinstance(msg, ExitMsg):
                leave = True
                break
            if isinstance(msg, TokenizeMsg):
                prompts.add(msg)
            elif not (isinstance(msg, AbortMsg) and prompts.drop(msg.uid)):
                worker.handle(msg)
            beat()
        flush()
        if not leave and (prompt := prompts.pop()) is not None:
            worker.handle(prompt)
            flush()
