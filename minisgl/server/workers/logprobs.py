"""Log probabilities of one answer, held until the text of their tokens is sent.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from minisgl.scheduler.messages import TokenReply
from minisgl.server.workers.messages import TokenLogprob, UserReply
from minisgl.server.workers.text_worker import TextWorker
from minisgl.tokenizer import DecodeStatus, Tokenizer


class HeldLogprobs:
    """The log probabilities of one request whose text has not been sent."""

    def __init__(
        self, worker: TextWorker, status: DecodeStatus, tokenizer: Tokenizer,
        spell: Callable[[int], bytes],
    ) -> None:  # fmt: skip
        self._worker = worker
        self._behind: list[TokenReply] | None = None  # tokens that wait until the prompt is sent
        self._status, self._tokenizer, self._spell = status, tokenizer, spell
        self._sent = 0  # characters sent
        self.echoes = False  # the text begins with the prompt, and each token has its entry
        self._entries: list[TokenLogprob] = []
        self._ends: list[int] = []  # where their text ends, as far as decoded
        self._silent = False  # the last one is a special token, which has no text

    def _offset(self) -> int:
        """Count the answer's characters so far, those that are held back included."""
        return self._sent + len(self._status.filter.held)

    def _named(self, token: int) -> tuple[str, bytes]:
        data = self._spell(token)
        return data.decode(errors="replace"), data

    def add(self, reply: TokenReply) -> bool:
        """Add a token's entry before it is detokenized; end tokens have one only in an echo.

        Return False for a token that waits until its prompt is sent; it is detokenized then.
        """
        if reply.prompt_logprobs is not None and not self.echoes:
            self._worker.later[reply.uid], self._behind = self._send(reply), []
        if self._behind is not None:
            self._behind.append(reply)
            return False
        token, value = reply.token, reply.logprob
        ends = token in self._status.skipped or reply.finish_reason == "stop"
        if value is None or token is None or (ends and not self.echoes):
            return True
        top = [(*self._named(other), logprob) for other, logprob in reply.top_logprobs or []]
        entry = TokenLogprob(*self._named(token), logprob=value, offset=self._offset(), top=top)
        self._silent = not self._status.stream.decode([token])
        self._entries.append(entry)
        return True

    def take(self, text: str, finished: bool) -> list[TokenLogprob]:
        """Return the entries whose text has gone out with `text`, the answer's next piece."""
        self._sent += len(text)
        if self._status.stopped:
            finished = False
        elif not self._status.stream.pending:  # no half character is held: all ends are decided
            end = self._offset()
            if len(self._entries) > len(self._ends) and "\ufffd" not in self._entries[-1].text:
                # Bytes before it may have become U+FFFD by now: count from the end.
                self._entries[-1].offset = end - len(self._entries[-1].text) * (not self._silent)
            self._ends += [end] * (len(self._entries) - len(self._ends))
        ready = len(self._entries) if finished else bisect_right(self._ends, self._sent)
        taken, self._entries = self._entries[:ready], self._entries[ready:]
        self._ends = self._ends[ready:]
        return taken

    def echo(self, reply: TokenReply) -> Pieces:
        """Yield the prompt's text and its tokens' entries, in pieces; the answer follows them."""
        assert reply.prompt_logprobs is not None
        status = DecodeStatus(self._tokenizer)
        held = HeldLogprobs(self._worker, status, self._tokenizer, self._spell)
        held.echoes = self.echoes = True
        for first in range(0, reply.prompt_tokens, PIECE):
            text, entries = "", list[TokenLogprob]()
            for token, logprob, top in reply.prompt_logprobs.part(first, first + PIECE):
                held.add(TokenReply(uid=0, token=token, logprob=logprob or 0.0, top_logprobs=top))
                held._entries[-1].logprob = logprob
                text += (new := status.push(token))
                entries += held.take(new, False)
            if first + PIECE >= reply.prompt_tokens:
                text += (rest := status.finish())
                entries += held.take(rest, True)
            self._sent += len(text)
            yield text, entries

    def _send(self, first: TokenReply) -> Iterator[bool]:
        """Send a prompt in pieces, then the tokens behind it; yield True after each piece."""
        for text, entries in self.echo(first):
            reply = UserReply(uid=first.uid, text=text, token_ids=[], logprobs=entries)
            reply.prompt_tokens, reply.cached_tokens = first.prompt_tokens, first.cached_tokens
            self._worker._frontend.append(reply)
            yield True
        while behind := self._behind:
            self._behind = None
            for token in behind[:PIECE]:
                self._worker._detokenize(token)
            self._behind = behind[PIECE:] or None
            yield True


PIECE = 256  # tokens: with twenty alternatives each, about 15 ms
Pieces = Iterator[tuple[str, list[TokenLogprob]]]
