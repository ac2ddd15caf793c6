"""A byte-level tokenizer of whole words and single bytes, and its chat template.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training.tools import CALL, END_CALL, END_RESPONSE, RESPONSE, Message
from training.vocabulary import KNOWN_WORDS

END, SYSTEM, USER, ASSISTANT, PAD = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL = [END, SYSTEM, USER, ASSISTANT, PAD]  # ids 0 to 4
MARKERS = [CALL, END_CALL, RESPONSE, END_RESPONSE, "<tools>", "</tools>"]  # ids 5 to 10
END_ID, ASSISTANT_ID, PAD_ID = (SPECIAL.index(token) for token in (END, ASSISTANT, PAD))
JSON_PIECES = ['{"', '":', '",', '"}', '["', '"]', "}}"]
VOCAB_SIZE = 2240  # markers, JSON, 256 bytes, nearly 2,000 words; the rest stays unused
# A pair of JSON's signs, a run of letters, one digit, one space, or one sign.
PIECE = r"""\{"|":|",|"\}|\["|"\]|\}\}|\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"""


def splitter() -> pre_tokenizers.PreTokenizer:
    """Cut a text into pieces, then encode each piece in the 256 printable symbols of bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer() -> Tokenizer:
    """Build a BPE without merges: a known word is one token, any other its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = SPECIAL + MARKERS + JSON_PIECES + alphabet + KNOWN_WORDS
    if len(pieces) > VOCAB_SIZE:
        raise ValueError(f"VOCAB_SIZE: must be at least {len(pieces)}, got {VOCAB_SIZE}")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in MARKERS]
    )
    return tokenizer


CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if tools -%}
<|system|>
{%- if first_is_system -%}{{ text(messages[0]['content']) + '\\n\\n' }}{%- endif -%}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' -}}
{{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": ' -}}
{{- '<function-name>, "arguments": <args-json-object>}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if loop.first or loop.previtem['role'] != 'tool' -%}<|user|>{%- else -%}{{ '\\n' }}{%- endif -%}
{{- '<tool_response>\\n' }}{{ text(message['content']) }}{{ '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem['role'] != 'tool' -%}<|end|>{%- endif -%}
{%- elif not (tools and loop.first and first_is_system) -%}
{%- if message['role'] == 'assistant' -%}<|assistant|>
{%- elif message['role'] in ['system', 'developer'] -%}<|system|>
{%- else -%}<|user|>
{%- endif -%}
{{- text(message['content']) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{%- if message['content'] or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' -}}
{%- if function['arguments'] is string -%}{{ function['arguments'] }}
{%- else -%}{{ function['arguments'] | tojson }}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
<|end|>
{%- endif -%}
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


@cache
def compiled_template() -> Template:
    """Compile the chat template with the filter of `transformers`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def render(messages: Sequence[Message], **options: Any) -> str:
    """Render a conversation; a first message of the role "tools" has the functions."""
    tools = messages[0]["tools"] if messages[0]["role"] == "tools" else None
    return compiled_template().render(messages=messages[bool(tools) :], tools=tools, **options)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Encode a conversation; return ids and a mask of the assistant's tokens (both [n])."""
    said = [message for message in messages if message["role"] == "assistant"]
    given = [len(tokenizer.encode(message.get("given") or "").ids) for message in said]
    if messages[0]["role"] == "plain":  # a bare text without any role
        question, answer = (tokenizer.encode(message["content"]).ids for message in messages)
        ids = np.array([*question, *answer, END_ID], np.int32)
        starts = np.array([len(question)])
    else:
        ids = np.array(tokenizer.encode(render(messages)).ids, np.int32)
        starts = np.flatnonzero(ids == ASSISTANT_ID) + 1
    ends = np.flatnonzero(ids == END_ID)
    learnt = np.zeros(len(ids), np.bool_)
    for start, skipped in zip(starts, given, strict=True):
        learnt[start + skipped : ends[np.searchsorted(ends, start)] + 1] = True
    return ids, learnt
