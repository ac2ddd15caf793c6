"""A byte-level tokenizer that knows whole words or single bytes, and its chat template.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from minisgl.tiny.chats import Message
from minisgl.tiny.vocabulary import KNOWN_WORDS

END, SYSTEM, USER, ASSISTANT, PAD = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL = [END, SYSTEM, USER, ASSISTANT, PAD]  # ids 0 to 4
END_ID, PAD_ID = SPECIAL.index(END), SPECIAL.index(PAD)
VOCAB_SIZE = 1792  # 5 special tokens, 256 bytes, nearly 1,500 words; the rest stays unused
# A run of letters, one digit, one space, or one sign: always the same pieces for the same word.
PIECE = r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"


def splitter() -> pre_tokenizers.PreTokenizer:
    """Cut a text into pieces, then write each piece in the 256 printable stand-ins for bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer() -> Tokenizer:
    """A BPE whose merges are all or nothing: a known word is one token, any other its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = SPECIAL + alphabet + KNOWN_WORDS
    vocab = {piece: index for index, piece in enumerate(pieces[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}<|assistant|>
{%- elif message['role'] in ['system', 'developer'] -%}<|system|>
{%- else -%}<|user|>
{%- endif -%}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- elif message['content'] -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def save_tokenizer(tokenizer: Tokenizer, folder: Path, window: int) -> None:
    """Write the two files from which `transformers.AutoTokenizer` loads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": window,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": {f"{role.strip('<|>')}_token": role for role in SPECIAL[1:4]},
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids of a conversation, and which of them the assistant has to say (both [n])."""
    roles = {role.strip("<|>"): SPECIAL.index(role) for role in (SYSTEM, USER, ASSISTANT)}
    plain = messages[0]["role"] == "plain"  # a bare text without any role
    ids: list[int] = []
    learnt: list[bool] = []
    for index, message in enumerate(messages):
        piece = tokenizer.encode(message["content"], add_special_tokens=False).ids
        head = [] if plain else [roles[message["role"]]]
        tail = [] if plain and index == 0 else [END_ID]
        ids += head + piece + tail
        says = message["role"] == "assistant"
        learnt += [False] * len(head) + [says] * (len(piece) + len(tail))
    return np.array(ids, np.int32), np.array(learnt, np.bool_)
