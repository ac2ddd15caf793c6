"""Checkpoints whose greedy answer is a given list of pieces.

The network computes nothing but a successor: one layer adds zero, the embedding is the identity,
and the head has a one where the next token follows the last.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import SPECIALS, make_checkpoint

ROLES = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
THINKING = (
    f"{{%- for m in messages -%}}{ROLES}{{%- endfor -%}}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>{%- endif -%}"
)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_scripted(
    folder: Path, pieces: list[str], *, start: str = "<|im_start|>", end: str = "<|im_end|>",
    template: str | None = None,
) -> dict[str, int]:  # fmt: skip
    """Write a model that follows the token `start` with `pieces` and `end`; return the ids.

    Each piece is one token, and none may come twice, unless the same piece follows it each time.
    """
    new = [piece for piece in dict.fromkeys([start, *pieces]) if piece not in SPECIALS]
    size = 256 + 400 + len(SPECIALS) + len(new)
    make_checkpoint(
        folder, "llama", tokenizer=True, vocab_size=size, hidden_size=size, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=1024,
    )  # fmt: skip
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    words = about["model"]["vocab"]
    unused = sorted((i, word) for word, i in words.items() if word.startswith("[unused"))
    for (token, word), piece in zip(unused, new):
        words[piece] = words.pop(word)
        entry = {**about["added_tokens"][0], "id": token, "content": piece, "special": False}
        about["added_tokens"].append(entry)
    about["added_tokens"].sort(key=lambda entry: int(entry["id"]))
    file.write_text(json.dumps(about))
    ids = {entry["content"]: entry["id"] for entry in about["added_tokens"]}
    chain = [start, *pieces, end]
    head = torch.zeros(size, size)
    head[ids[end]] = 0.5  # whatever else comes ends the answer
    for before, after in itertools.pairwise(chain):
        head[ids[after], ids[before]] = 1.0
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(tensor)
    weights["model.embed_tokens.weight"] = torch.eye(size)
    weights["model.norm.weight"] = torch.ones(size)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=ids[end])
    edit_json(folder / "tokenizer_config.json", eos_token=end)
    if template is not None:
        edit_json(folder / "tokenizer_config.json", chat_template=template)
    return ids
