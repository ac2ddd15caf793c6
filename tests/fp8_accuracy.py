"""The cost of FP8 in answers: tasks of the embedded model, and the distance of logits.

python -m tests.fp8_accuracy [--out FILE] [--device cuda] [--per-task 50]: prints, and writes FILE.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention.metadata import ForwardBatch, build_metadata
from minisgl.benchmark.report import circumstances
from minisgl.config.engine import EngineConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Phase
from minisgl.engine.engine import Engine, build_engine
from tests.checkpoints import make_checkpoint
from training.checkpoint import load_model
from training.evaluate import MAX_NEW_TOKENS, Generate, all_cases, evaluate, token_counter

KINDS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
FAMILIES = ("qwen3", "llama", "qwen3_moe")  # of models with random weights
RANDOM = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}


def engine_generate(device: str, **how: Any) -> Generate:
    """Greedy answers of an engine."""
    llm = LLM(device=device, **how)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    return lambda prompts: [out["token_ids"] for out in llm.generate(prompts, greedy)]


def log_probabilities(engine: Engine, ids: Sequence[int], step: int | None = None) -> torch.Tensor:
    """Of every next token of a text, float32 [len(ids), vocab], in prefills of `step` tokens."""
    n, tables = len(ids), engine.tables
    row, found = tables.allocate(), []
    tables.write(row, 0, np.arange(n, dtype=np.int32))
    tables.flush()
    for start in range(0, n, step or n):
        end = min(start + (step or n), n)
        sizes = (np.array([size], np.int32) for size in (row, end - start, end))
        meta = build_metadata(Phase.PREFILL, *sizes, tables.page_table, engine.page_size)
        where = torch.arange(start, end, device=engine.device)
        with torch.inference_mode():
            plan = engine.backend.plan(meta, where)
            tokens = torch.tensor(ids[start:end], device=engine.device)
            fb = ForwardBatch(Phase.PREFILL, tokens, where, where, None, plan)
            found.append(engine.forward_pass(fb).float().log_softmax(-1).cpu())
    tables.free(row)
    return torch.cat(found)


def distance(real: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """KL divergence of log probabilities [n, vocab], in nats a token, and share of equal tops."""
    each = (real.exp() * (real - other)).sum(-1)
    same = (real.argmax(-1) == other.argmax(-1)).float().mean()
    return {"mean": float(each.mean()), "worst": float(each.max()), "same": float(same)}


def divergence(folder: Path, texts: Sequence[Sequence[int]], device: str) -> dict[str, Any]:
    """KL divergence of each kind from the model as it is, in nats a token, and equal top tokens."""
    logs = {}
    for kind, how in KINDS.items():
        config = EngineConfig(
            model_path=str(folder), device=device, num_pages=64, max_running_req=1, **how
        )
        engine = build_engine(config, progress=False)
        logs[kind] = torch.cat([log_probabilities(engine, ids) for ids in texts])
        engine.shutdown()
    found, real = {}, logs["as trained"]
    for kind in list(KINDS)[1:]:
        found[kind] = distance(real, logs[kind])
    return {"tokens": len(real), "entropy": float(-(real.exp() * real).sum(-1).mean()), **found}


def main() -> None:
    """All kinds in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-task", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _, tokenizer = load_model(resolve_model_path(None), "cpu")
    cases = all_cases(0, args.per_task, token_counter(tokenizer))
    encode = tokenizer.apply_chat_template
    chats = [list(encode(one.messages, return_dict=False))[:512] for one in cases[::10]][:40]
    result: dict[str, Any] = {
        "command": f"python -m tests.fp8_accuracy --per-task {args.per_task}",
        **circumstances(),
        "day": date.today().isoformat(),
        "device": args.device,
        "cases": len(cases),
        "embedded": divergence(resolve_model_path(None), chats, args.device),
    }
    print(result["embedded"])
    result["random"] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, family, num_hidden_layers=8, **RANDOM)
            rng = np.random.default_rng(0)
            texts = [rng.integers(0, 300, 200).tolist() for _ in range(8)]
            result["random"][family] = divergence(Path(folder), texts, args.device)
        print(family, result["random"][family])
    result["scores"], result["wrong"] = {}, {}
    for kind, how in KINDS.items():
        scores, wrong = evaluate(engine_generate(args.device, **how), tokenizer, cases)
        right = 1 - len(wrong) / len(cases)
        result["scores"][kind] = {"all": right, **scores}
        result["wrong"][kind] = wrong
        print(f"{kind:14} {right:7.2%} of {len(cases)} cases right", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
