"""Log probabilities of one answer: the bytes of its tokens, held until their text goes out.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from minisgl.scheduler.messages import TokenReply
from minisgl.server.workers.messages import TokenLogprob
from minisgl.tokenizer import DecodeStatus, Tokenizer


class TokenBytes:
    """Looks up the bytes of a token. Ids that the tokenizer does not know stand for none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # as late as a tokenizer

        self._backend = tokenizer.backend
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        added = self._backend.get_added_tokens_decoder()
        self._added = {token: str(entry.content).encode() for token, entry in added.items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token) or ""
        if self._byte_level:
            return bytes(self._byte_of.get(char, 63) for char in piece)  # 63 is "?"
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()  # SentencePiece writes a space so


class HeldLogprobs:
    """The log probabilities of one request whose text has not gone out yet."""

    def __init__(self, status: DecodeStatus, spell: Callable[[int], bytes]) -> None:
        self._status, self._spell = status, spell
        self._sent = 0  # characters that have gone out
        self._entries: list[TokenLogprob] = []
        self._ends: list[int] = []  # where their text ends, as far as it is known

    def _offset(self) -> int:
        """Characters of the answer so far, those that are held back included."""
        return self._sent + len(self._status.filter.held)

    def _named(self, token: int) -> tuple[str, bytes]:
        data = self._spell(token)
        return data.decode(errors="replace"), data

    def add(self, reply: TokenReply) -> None:
        """A token that is about to be detokenized; end tokens have no entry."""
        token, value = reply.token, reply.logprob
        if value is None or token is None or token in self._status.skipped:
            return
        top = [(*self._named(other), logprob) for other, logprob in reply.top_logprobs or []]
        entry = TokenLogprob(*self._named(token), logprob=value, offset=self._offset(), top=top)
        self._entries.append(entry)

    def take(self, text: str, finished: bool) -> list[TokenLogprob]:
        """The entries whose text has gone out with `text`, the next piece of the answer."""
        self._sent += len(text)
        if self._status.stopped:
            finished = False
        elif not self._status.stream.pending:  # no half character: all texts end somewhere
            end = self._offset()
            if len(self._entries) > len(self._ends) and "\ufffd" not in self._entries[-1].text:
                # Bytes before it may have become U+FFFD by now: count from the end.
                self._entries[-1].offset = end - len(self._entries[-1].text)
            self._ends += [end] * (len(self._entries) - len(self._ends))
        ready = sum(end <= self._sent for end in self._ends)
        ready = len(self._entries) if finished else ready
        taken, self._entries = self._entries[:ready], self._entries[ready:]
        self._ends = self._ends[ready:]
        return taken
