"""The bytes of a vocabulary's tokens.

Generated from notebooks/08a_prompt_logprobs.ipynb: edit there.
"""

from __future__ import annotations

import re

from minisgl.tokenizer import Tokenizer


def byte_letters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    shown = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(b): b for b in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


class TokenBytes:
    """The bytes of each token; none for ids outside the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend, self._byte_of = tokenizer.backend, byte_letters()
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
        return piece.replace("\u2581", " ").encode()  # SentencePiece's space
