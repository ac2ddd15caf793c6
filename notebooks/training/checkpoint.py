"""The architecture of the embedded model, and its files.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from training.tokenizer import END_ID, PAD_ID, VOCAB_SIZE, save_tokenizer, train_tokenizer

WINDOW = 4096  # tokens
ROPE_BASE = 100_000.0


def model_config(hidden: int = 256, layers: int = 6, intermediate: int = 640) -> Qwen3Config:
    """Make a Qwen3 config small enough to ship: 8 query heads, 4 KV heads of 64, tied embedding."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Store the SHA-256 of every file of the folder, and the facts about the training."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "MANIFEST.json"]
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    text = json.dumps({"sha256": hashes, **facts}, indent=2)
    (folder / "MANIFEST.json").write_text(text + "\n")


def save_model(model: Qwen3ForCausalLM, folder: Path, facts: dict[str, Any]) -> None:
    """Write config, bfloat16 weights, tokenizer and manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = Qwen3ForCausalLM(model.config).bfloat16()
    stored.load_state_dict(model.state_dict())  # rounds every weight
    stored.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = ROPE_BASE  # for older readers, besides rope_parameters
    generation = {"do_sample": False, "eos_token_id": [END_ID], "pad_token_id": PAD_ID}
    for name, content in {"config.json": config, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    save_tokenizer(train_tokenizer(), folder, WINDOW)
    for path in folder.iterdir():
        path.chmod(0o644)
    write_manifest(folder, facts)


def load_model(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Load model and tokenizer with transformers; the weights are widened to float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)
