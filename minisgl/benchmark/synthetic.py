"""A byte-level BPE tokenizer of any size, for model shapes that come without one.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl.config.model import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
END, SPACE = "<|endoftext|>", "Ġ"  # byte-level BPE spells a space like this


def strings() -> Iterator[tuple[str, str]]:
    """Each new token as the pair of older ones that merge into it: ab, ac, … aaa, … without end."""
    level = [SPACE, *ascii_lowercase]
    while True:
        pairs = [(word, letter) for word in level for letter in ascii_lowercase]
        yield from pairs
        level = [word + letter for word, letter in pairs]


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly so many tokens; `ValueError` for less than 257."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size: must be at least 257 for 256 bytes, got {vocab_size}")
    merges = list(islice(strings(), vocab_size - 257))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


@contextmanager
def with_tokenizer(folder: Path, dummy_weight: bool) -> Iterator[tuple[Path, str]]:
    """A model folder that has a tokenizer, and whose it is: "the model's" or "synthetic".

    With `dummy_weight` a folder without one is copied, as far as its config goes, into a temporary
    one with a synthetic tokenizer. `ValueError` if weights are wanted and there is none.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield folder, "the model's"
        return
    if not dummy_weight:
        raise ValueError(f"model: {folder} has no tokenizer, and a server needs one")
    with TemporaryDirectory(prefix="minisgl-") as name:
        copy = Path(name)
        shutil.copy(folder / "config.json", copy)
        size = ModelConfig.from_path(folder).vocab_size
        synthetic_tokenizer(size).save(str(copy / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
        yield copy, "synthetic"
