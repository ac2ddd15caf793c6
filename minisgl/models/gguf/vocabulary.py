"""A tokenizer from the fields of a GGUF file.

Generated from notebooks/06e_gguf.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from minisgl.models.gguf.config import token_id
from minisgl.models.gguf.header import GgufError, Header
from minisgl.tokenizer_files import LLAMA3_WORDS, QWEN2_WORDS, TEKKEN_WORDS

WORDS = {"gpt-2": None, "smollm": None, "qwen2": QWEN2_WORDS, "deepseek-r1-qwen": QWEN2_WORDS,
         "llama-bpe": LLAMA3_WORDS, "tekken": TEKKEN_WORDS}  # fmt: skip
WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not merged; BOS comes first


def word_splitter(pre: str) -> Any:
    """Build the rule that splits a text into words of byte-level characters."""
    words = WORDS[pre]
    first: list[Any] = []
    if words is not None:
        first = [pre_tokenizers.Split(Regex(words), behavior="isolated")]
    elif pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    return pre_tokenizers.Sequence([*first, level])


LONGEST = 1024  # characters of a token; the ways to split it grow with them
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """List all ways to join two pieces into a third, in SentencePiece's order."""
    found = [
        (-scores[token], pieces[piece[:cut]], pieces[piece[cut:]], piece[:cut], piece[cut:])
        for piece, token in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def byte_level(pieces: dict[str, int], merges: Sequence[str], pre: str) -> Tokenizer:
    """Build byte-level BPE; `pre` names the rule that splits a text into words."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    made = Tokenizer(models.BPE(pieces, pairs, ignore_merges=pre in WHOLE_WORDS))
    made.pre_tokenizer, made.decoder = word_splitter(pre), decoders.ByteLevel()
    if WORDS[pre] == QWEN2_WORDS:
        made.normalizer = normalizers.NFC()
    return made


def sentence_piece(
    pieces: dict[str, int], scores: Sequence[float], unknown: str | None, prefix: bool
) -> Tokenizer:
    """Build SentencePiece BPE: `▁` for a space, and byte tokens for characters in no piece."""
    merges, space = merges_of(pieces, scores), "\u2581"
    how = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(pieces, merges, **how))
    spell: list[Any] = [normalizers.Replace(" ", space)]
    read: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:  # an extra space before a text, which decoding removes
        spell, read = [normalizers.Prepend(space), *spell], [*read, decoders.Strip(" ", 1, 0)]
    made.normalizer, made.decoder = normalizers.Sequence(spell), decoders.Sequence(read)
    return made


GGML = "tokenizer.ggml."


def column(header: Header, name: str, size: int, default: object) -> list[Any]:
    """Return an array of the file with one number for each token."""
    found = header.fields.get(GGML + name)
    if found is None:
        return [default] * size
    if not isinstance(found, np.ndarray) or len(found) != size:
        raise header.refuse(GGML + name, f"{size} numbers, one for each token", found)
    return list(found.tolist())


def texts(header: Header, name: str) -> list[str]:
    """Return a list of texts; raise GgufError if it is missing or a text is too long."""
    found = header.fields.get(GGML + name)
    if not isinstance(found, list) or not found:
        raise header.refuse(GGML + name, "a list of texts", found)
    if (longest := max(map(len, found))) > 2 * LONGEST:
        raise header.refuse(GGML + name, f"texts of at most {2 * LONGEST} characters", longest)
    return found


def add_ends(made: Tokenizer, header: Header, tokens: Sequence[str], bos: bool) -> None:
    """Put BOS before a prompt and EOS after it, if the file's fields require them."""
    first, last = token_id(header, "bos"), token_id(header, "eos")
    around: list[Any] = ["$A"]
    if first is not None and header.fields.get(f"{GGML}add_bos_token", bos):
        around.insert(0, tokens[first])
    if last is not None and header.fields.get(f"{GGML}add_eos_token", False):
        around.append(tokens[last])
    special = [(tokens[end], end) for end in {first, last} if end is not None]
    if len(around) > 1:
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)


def base_tokenizer(header: Header, tokens: list[str], pieces: dict[str, int]) -> Tokenizer:
    """Build the tokenizer without its special tokens."""
    model, pre = header.fields.get(f"{GGML}model"), header.fields.get(f"{GGML}pre", "gpt-2")
    if model == "gpt2":
        if pre not in WORDS:
            raise header.refuse(f"{GGML}pre", f"one of {', '.join(WORDS)}", pre)
        return byte_level(pieces, texts(header, "merges"), pre)
    if model != "llama":
        raise header.refuse(f"{GGML}model", "gpt2 or llama", model)
    unknown, scores = token_id(header, "unknown"), column(header, "scores", len(tokens), 0.0)
    prefix = bool(header.fields.get(f"{GGML}add_space_prefix", True))
    return sentence_piece(pieces, scores, None if unknown is None else tokens[unknown], prefix)


def tokenizer_of(header: Header) -> Tokenizer:
    """Build the tokenizer of a GGUF file; raise GgufError for an unsupported one."""
    tokens = texts(header, "tokens")
    kinds = column(header, "token_type", len(tokens), NORMAL)
    pieces = {text: i for i, text in enumerate(tokens) if kinds[i] != UNUSED}
    if len(pieces) + kinds.count(UNUSED) != len(tokens):
        raise header.refuse(f"{GGML}tokens", "different from each other", f"{len(tokens)} texts")
    try:
        made = base_tokenizer(header, tokens, pieces)
    except GgufError:
        raise
    except Exception as error:  # the library's own, for merges of unknown tokens
        must = "pairs of tokens that make a token"
        raise header.refuse(f"{GGML}merges", must, str(error)) from None
    for kind, add in ((CONTROL, made.add_special_tokens), (USER_DEFINED, made.add_tokens)):
        matched = [text for text, i in pieces.items() if kinds[i] == kind]
        add([AddedToken(text, special=kind == CONTROL, normalized=False) for text in matched])
    whole = header.fields.get(f"{GGML}pre") in WHOLE_WORDS
    add_ends(made, header, tokens, bos=whole or header.fields[f"{GGML}model"] == "llama")
    return made
