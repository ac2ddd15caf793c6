"""The bytes that one token stands for, whatever its vocabulary calls it.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import re

from minisgl.tokenizer import Tokenizer


def byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary; printable ones are themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """Looks up the bytes of a token. Ids that the tokenizer does not know stand for none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._alphabet = byte_alphabet() if "ByteLevel" in repr(self._backend.decoder) else None
        added = self._backend.get_added_tokens_decoder()
        self._added = {token: str(entry.content).encode() for token, entry in added.items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token) or ""
        if self._alphabet is not None:
            return bytes(self._alphabet.get(char, 63) for char in piece)  # 63 is "?"
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()  # SentencePiece writes a space so
