"""The text worker: text to token ids on the way in, token ids to text on the way out.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.core import SamplingParams
from minisgl.events import StageTimed
from minisgl.scheduler.frames import same_but_seed, with_seed
from minisgl.scheduler.messages import AbortMsg, ErrorReply, ExitMsg, TokenReply, UserMsg, aborted
from minisgl.server.workers.channels import Inbox, Outbox
from minisgl.server.workers.conversion import convert
from minisgl.server.workers.messages import (
    Converted,
    ConvertMsg,
    Message,
    StatsMsg,
    TokenizeMsg,
    TokenLogprob,
    UserReply,
)
from minisgl.tokenizer import SLICE, DecodeStatus, PromptTooLong, Tokenizer, text_size


class LogprobBuffer(Protocol):
    """Log probabilities: `add` returns False to keep a token, `take` those whose text went."""

    def add(self, reply: TokenReply) -> bool: ...

    def take(self, text: str, finished: bool) -> list[TokenLogprob]: ...


@dataclass
class OpenText:
    """State of the text worker for one request."""

    status: DecodeStatus
    logprobs: LogprobBuffer | None


Job = Iterator[bool]  # work for later: True after each part but the last


class LastPrompt(threading.local):
    """The last prompt of a thread as token ids: the next request may have the same prompt."""

    prompt: TokenizeMsg | None = None
    ids: list[int]
    given: SamplingParams | None = None
    params: SamplingParams

    def has_params_of(self, msg: TokenizeMsg) -> bool:
        return self.given is not None and same_but_seed(self.given, msg.sampling_params)


class TextWorker:
    """Turn prompts of at most `window` tokens into ids, and the ids of answers into text."""

    def __init__(
        self, tokenizer: Tokenizer, to_scheduler: Outbox, to_frontend: Outbox,
        window: int | None = None,
        logprobs: Callable[[TextWorker, DecodeStatus], LogprobBuffer] | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer, self._window, self._logprobs = tokenizer, window, logprobs
        self._outboxes, self._last = (to_scheduler, to_frontend), LastPrompt()
        self._scheduler, self._frontend = list[Message](), list[Message]()  # for the next flush
        self._open, self._left, self.later = dict[int, OpenText](), set[int](), dict[int, Job]()

    def flush(self) -> None:
        """Send the results since the last flush, one message in each direction."""
        for outbox, messages in zip(self._outboxes, (self._scheduler, self._frontend), strict=True):
            if messages:
                outbox.put(*messages)
                messages.clear()

    def work(self) -> bool:
        """Do a part of what was left for later (12b), in turn; return True if there was any."""
        uid = next(iter(self.later), -1)
        job = self.later.pop(uid, None)
        if job and uid in self._open and self._attempt(uid, next, job, False):
            self.later[uid] = job
        return job is not None

    def handle(self, msg: Message) -> None:
        """Handle one message; a bad one is an error for its own caller only."""
        match msg:
            case TokenizeMsg():
                self.handle(self.encode(msg))
            case TokenReply(finish_reason="abort", notice=str(why)):  # its grammar failed
                param = why.partition(":")[0]
                self.handle(
                    ErrorReply(uid=msg.uid, message=why, code="invalid_request", param=param)
                )
            case TokenReply():
                self._attempt(msg.uid, self._detokenize, msg)
            case UserMsg() | AbortMsg():
                self._left |= {msg.uid} if isinstance(msg, AbortMsg) else set()
                self._scheduler.append(msg)
            case StatsMsg() | StageTimed() | Converted():
                self._frontend.append(msg)
            case ErrorReply():  # nothing follows it, be it an error or the receipt of an abort
                self._open.pop(msg.uid, None)
                self._left.discard(msg.uid)
                self._frontend.append(msg)
            case _:
                raise TypeError(f"message: a text worker does not take {type(msg).__name__}")

    def encode(self, msg: TokenizeMsg) -> UserMsg | Converted | ErrorReply:
        """Return a request as token ids, or the error for its caller. Any thread may call this."""
        last, param = self._last, "stop"
        try:
            if not last.has_params_of(msg):
                last.given, last.params = None, self._tokenizer.encode_params(msg.sampling_params)
                last.given = msg.sampling_params
            param = "prompt" if msg.messages is None else "messages"
            if isinstance(msg, ConvertMsg):
                return convert(self._tokenizer, msg, max(self._window or 0, 2**16))
            if not msg.same_request(last.prompt):
                last.prompt, last.ids = None, self._encode(msg)
                last.prompt = msg
        except Exception as error:  # a chat template can raise anything
            param = (
                "bad_words" if str(error)[:10] == "bad_words:" else getattr(error, "param", param)
            )
            why = f"{param}: {str(error).removeprefix(f'{param}: ')}"
            code = error.code if isinstance(error, PromptTooLong) else "invalid_request"
            return ErrorReply(uid=msg.uid, message=why, code=code, param=param)
        params, seed = last.params, msg.sampling_params.seed
        params = params if params.seed == seed else with_seed(params, seed)
        return UserMsg(msg.uid, last.ids, params, msg.client)

    def _encode(self, msg: TokenizeMsg) -> list[int]:
        """Encode a prompt in any of its forms."""
        text, encode = msg.text, self._tokenizer.encode
        if msg.messages is not None:
            text = self._tokenizer.render_chat(msg.messages, **msg.template_kwargs)
            return encode(text, add_special_tokens=False, window=self._window).tolist()
        return (
            list(msg.input_ids or [])
            if text is None
            else encode(text, window=self._window).tolist()
        )

    def _attempt(self, uid: int, step: Callable[..., Any], *given: Any) -> Any:
        """Return step(*given), None if it was aborted; one that cannot be decoded ends alone."""
        try:
            return None if uid in self._left else step(*given)
        except ValueError as error:
            self._frontend.append(ErrorReply(uid=uid, message=str(error), code="internal_error"))
            return self.handle(AbortMsg(uid=uid))

    def _detokenize(self, msg: TokenReply) -> None:
        """Detokenize one token; a stop string ends the request."""
        if (entry := self._open.get(msg.uid)) is None:
            status = DecodeStatus(self._tokenizer, msg.prompt_tail, msg.stop, msg.spare_thoughts)
            asked = msg.logprob is not None or msg.prompt_logprobs is not None
            held = self._logprobs(self, status) if self._logprobs and asked else None
            entry = self._open[msg.uid] = OpenText(status, held)
        if entry.logprobs is not None and not entry.logprobs.add(msg):
            return
        if msg.finished:
            del self._open[msg.uid]
        if entry.status.stopped:  # the frontend has ended it
            return
        text = entry.status.take(msg.token, msg.finish_reason)
        if entry.status.stopped and not msg.finished:
            self._scheduler.append(AbortMsg(uid=msg.uid))
        self._frontend.append(self._reply(msg, entry, text))

    def _reply(self, msg: TokenReply, entry: OpenText, text: str) -> UserReply:
        status, finished = entry.status, msg.finished or entry.status.stopped
        return UserReply(
            uid=msg.uid, text=text, token_ids=[] if msg.token is None else [msg.token],
            finished=finished, finish_reason="stop" if status.stopped else msg.finish_reason,
            stop=status.filter.found, thinking=status.thinking,
            prompt_tokens=msg.prompt_tokens, cached_tokens=msg.cached_tokens,
            completion_tokens=status.num_tokens, thought_tokens=status.thought_tokens,
            logprobs=[] if entry.logprobs is None else entry.logprobs.take(text, finished),
        )  # fmt: skip


Encode = Callable[[TokenizeMsg], Message]


class PromptQueue:
    """A queue of prompts, fair between clients, short before long, without starvation.

    Slow ones (over `quick` characters, chats, with a grammar) go to `aside`, if given.
    """

    waiting: dict[int, TokenizeMsg]  # by uid

    def __init__(self, aside: PromptQueue | None = None, quick: int = SLICE) -> None:
        self.aside, self.quick, self.waiting = aside, quick, {}
        self._heaps: dict[str, list[tuple[int, int, int]]] = {}  # tag, uid, size
        self._clocks: dict[str, int] = {}  # characters encoded so far
        self._last: tuple[TokenizeMsg | None, int] = (None, 0)

    @property
    def patience(self) -> float:
        """The seconds that the loop may wait for messages."""
        aside = self.aside is not None and self.aside.waiting
        return 0.0 if self.waiting else 0.002 if aside else 0.5

    def add(self, msg: TokenizeMsg) -> None:
        before, size = self._last
        if not msg.same_request(before):
            size = len(msg.text or "") or text_size([getattr(msg, name) for name in msg.shared])
            size += sum(map(len, (*msg.sampling_params.stop, *msg.sampling_params.bad_words)))
        self._last = (msg, size)
        if self.aside and (size > self.quick or msg.messages or msg.sampling_params.is_constrained):
            self.aside.add(msg)
            return
        self.waiting[msg.uid] = msg
        if msg.client not in self._heaps:  # no credit for idle time
            self._heaps[msg.client] = []
            self._clocks[msg.client] = min(self._clocks.values(), default=0)
        heapq.heappush(self._heaps[msg.client], (self._clocks[msg.client] + size, msg.uid, size))

    def drop(self, uid: int) -> bool:
        """Remove the prompt of a client that left; False if it is not here."""
        here = self.waiting.pop(uid, None) is not None
        return here or (self.aside is not None and self.aside.drop(uid))

    def take(self, encode: Encode) -> list[Message]:
        """Encode the next prompt; return what has been encoded since the last call."""
        done = [encode(msg) for msg in self.pop()]
        return done + (self.aside.take(encode) if self.aside and self.aside.waiting else [])

    def pop(self, busy: Collection[str] = ()) -> list[TokenizeMsg]:
        """Return the answers that wait for the next prompt of a client that is not `busy`."""
        found = list[TokenizeMsg]()
        while not found and (clients := [client for client in self._clocks if client not in busy]):
            client = min(clients, key=self._clocks.__getitem__)
            heap = self._heaps[client]
            while heap and (not found or found[0].same_request(self.waiting.get(heap[0][1]))):
                _, uid, size = heapq.heappop(heap)
                found += [msg] if (msg := self.waiting.pop(uid, None)) else []
                self._clocks[client] += size if msg else 0
            if not heap:
                del self._heaps[client], self._clocks[client]
        return found


def run_text_worker(
    worker: TextWorker, inbox: Inbox, beat: Callable[[], object] = lambda: None,
    prompts: PromptQueue | None = None,
) -> None:  # fmt: skip
    """Handle answers, then one prompt, until `ExitMsg`; `beat` at each read, after each message."""
    prompts, leave = PromptQueue() if prompts is None else prompts, False
    while not leave:
        beat()
        for msg in inbox.get_all(0.0 if worker.work() else prompts.patience):
            if isinstance(msg, ExitMsg):
                leave = True
                break
            if isinstance(msg, TokenizeMsg):
                prompts.add(msg)
            else:
                dropped = isinstance(msg, AbortMsg) and prompts.drop(msg.uid)
                worker.handle(aborted(msg.uid) if dropped else msg)
            beat()
        worker.flush()
        for encoded in [] if leave else prompts.take(worker.encode):
            worker.handle(encoded)
        worker.flush()
