"""The text worker (tokenize and detokenize) and the loops that the server's processes run.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.config import ModelConfig, ServerConfig, max_seq_len, resolve_model_path
from minisgl.scheduler.messages import AbortMsg, ErrorReply, ExitMsg, TokenReply, UserMsg
from minisgl.server.channels import Inbox, Outbox, ZmqInbox, ZmqOutbox
from minisgl.server.messages import Message, TokenizeMsg, UserReply
from minisgl.server.parts import Addresses, parent_alive
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
            case ErrorReply():
                self._open.pop(msg.uid, None)
                self._to_frontend.put(msg)
            case _:
                raise TypeError(f"message: a text worker does not take {type(msg).__name__}")

    def _too_long(self, msg: TokenizeMsg) -> ErrorReply | None:
        """The refusal of a text that cannot fit the window, found without encoding it."""
        texts = [msg.text] if msg.messages is None else [m.get("content") for m in msg.messages]
        size = sum(len(text) for text in texts if isinstance(text, str))
        if size <= self._max_chars:
            return None
        why = f"prompt: {size} characters are too many for a window of {self._window} tokens"
        return ErrorReply(uid=msg.uid, message=why, code="context_length_exceeded", param="prompt")

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
            UserMsg(uid=msg.uid, input_ids=ids, sampling_params=msg.sampling_params)
        )

    def _detokenize(self, msg: TokenReply) -> None:
        """One token to the text that it completes; a stop string ends the request from here."""
        entry = self._open.get(msg.uid)
        if entry is None:
            entry = self._open[msg.uid] = OpenText(DecodeStatus(self._tokenizer, stop=msg.stop))
        text = ""
        ids: list[int] = []
        if not entry.stopped and msg.token is not None:
            entry.completion_tokens += 1
            ids = [msg.token]
            text = entry.status.push(msg.token)
            if entry.status.stopped and not msg.finished:
                self._to_scheduler.put(AbortMsg(uid=msg.uid))
        already_closed, entry.stopped = entry.stopped, entry.status.stopped
        if msg.finished:
            del self._open[msg.uid]
            text += "" if entry.stopped else entry.status.finish()
        if not already_closed:
            self._to_frontend.put(self._reply(msg, entry, text, ids))

    def _reply(self, msg: TokenReply, entry: OpenText, text: str, ids: list[int]) -> UserReply:
        return UserReply(
            uid=msg.uid,
            text=text,
            token_ids=ids,
            finished=msg.finished or entry.stopped,
            finish_reason="stop" if entry.stopped else msg.finish_reason,
            prompt_tokens=msg.prompt_tokens,
            cached_tokens=msg.cached_tokens,
            completion_tokens=entry.completion_tokens,
        )


@dataclass
class OpenText:
    """What the detokenizer keeps for one request."""

    status: DecodeStatus
    completion_tokens: int = 0
    stopped: bool = False


def run_text_worker(worker: TextWorker, inbox: Inbox, alive: Callable[[], bool]) -> None:
    """Handle messages until an `ExitMsg` comes or the parent is gone."""
    while alive():
        for msg in inbox.get_all(timeout=0.5):
            if isinstance(msg, ExitMsg):
                return
            worker.handle(msg)


def text_part(
    config: ServerConfig, addresses: Addresses, index: int, ready: Callable[[], None]
) -> None:
    """Text worker: index -1 is the one that detokenizes, 0… are extra tokenizers."""
    inbox = ZmqInbox(addresses.detokenizer if index < 0 else addresses.tokenizers[index])
    to_scheduler, to_frontend = ZmqOutbox(addresses.scheduler), ZmqOutbox(addresses.frontend)
    path = resolve_model_path(config.model_path)
    window = max_seq_len(config, ModelConfig.from_path(path))
    worker = TextWorker(Tokenizer(path), to_scheduler, to_frontend, window)
    ready()
    run_text_worker(worker, inbox, parent_alive)
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
