"""The bytes that a token of a vocabulary stands for.

Generated from notebooks/08a_prompt_logprobs.ipynb: edit there.
"""

from __future__ import annotations

import re

from minisgl.tokenizer import Tokenizer


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
