"""SmolLM2 on one GPU: answers with FP8, answers in batches, and drafts by kind of text.

`python3 -m tests.gpu.real_model MODEL [PART …] --out FILE`: MODEL is a GGUF file, or `smollm2`
where its wheel is installed. Chapters 05f, 05g and 09b read the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import circumstances
from tests.fp8_accuracy import KINDS, distance, log_probabilities
from tests.real_model import DRAFTS, QUESTIONS, TEXTS

FEW = 16  # rows, up to which activations keep their bits
NEIGHBOURS = range(32)
ANSWER = 96  # tokens


def chat_ids(llm: LLM, question: str) -> list[int]:
    """Token ids of a question."""
    talk = [{"role": "user", "content": question}]
    ids: list[int] = llm.tokenizer.apply_chat(talk).tolist()
    return ids


def bits(answer: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Tokens and log probabilities of an answer."""
    return tuple((entry["token_id"], entry["logprob"]) for entry in answer["logprobs"])


def first_difference(answers: Sequence[Sequence[int]]) -> int | None:
    """Index of the first token that is not the same in all answers."""
    for index, tokens in enumerate(zip(*answers)):
        if len(set(tokens)) > 1:
            return index
    return None if len(set(map(len, answers))) == 1 else min(map(len, answers))


def ms_a_token(llm: LLM, prompts: list[list[int]], count: int, turns: int = 5) -> float:
    """Milliseconds of a step of these requests, the median of some turns; prompts are cached."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    took = []
    for _ in range(turns + 1):
        llm.generate(prompts, SamplingParams(max_tokens=1))
        start = time.perf_counter()
        llm.generate(prompts, params)
        took.append(1e3 * (time.perf_counter() - start) / count)
    return round(statistics.median(took[1:]), 4)


def measure_fp8(make: Any) -> dict[str, Any]:
    """Loss, divergence and greedy answers of each kind of FP8, against bfloat16."""
    kinds: dict[str, Any] = {}
    texts: list[list[int]] = []
    exact, told = torch.empty(0), []
    for kind, how in KINDS.items():
        with make(cuda_graph_bs=(1, 32), prefill_graph_max_tokens=0, **how) as llm:
            prompts = [chat_ids(llm, question) for question in QUESTIONS]
            engine, greedy = llm.scheduler.engine, SamplingParams(max_tokens=64)
            if not texts:
                told = [list(out["token_ids"]) for out in llm.generate(prompts, greedy)]
                llm.scheduler.reset()
                texts = [llm.tokenizer.encode(text).tolist() for text in TEXTS]
                texts += [ids + answer for ids, answer in zip(prompts, told)]
            scored = {
                step: torch.cat([log_probabilities(engine, ids, step)[:-1] for ids in texts])
                for step in (None, FEW)
            }
            target = torch.tensor([token for ids in texts for token in ids[1:]])
            exact = scored[None] if kind == "as trained" else exact
            row: dict[str, Any] = {}
            for step, found in scored.items():
                loss = -found.gather(1, target[:, None]).mean().item()
                name = "whole prompts" if step is None else f"{step} tokens a step"
                row[name] = {"nll": loss, **distance(exact, found)}
            answers = [list(out["token_ids"]) for out in llm.generate(prompts, greedy)]
            row["same_answers"] = sum(a == b for a, b in zip(answers, told))
            row["ms_a_token"] = ms_a_token(llm, prompts[:1], 64)
            kinds[kind] = row
            print(kind, row, flush=True)
    return {"texts": len(texts), "tokens": len(target), "answers": len(told), "kinds": kinds}


def measure_batches(make: Any) -> dict[str, Any]:
    """Different answers to one greedy request, beside 0 to 31 others, and the time of a step."""
    found: dict[str, Any] = {}
    for name, flag in (("plain", False), ("deterministic", True)):
        with make(cache_type="naive", deterministic=flag) as llm:
            prompts = [chat_ids(llm, question) for question in QUESTIONS]
            asked = SamplingParams(max_tokens=ANSWER, logprobs=0, ignore_eos=True)
            filler = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            each = []
            for index, prompt in enumerate(prompts[:6]):
                others = (prompts[:index] + prompts[index + 1 :]) * 2
                answers = [
                    llm.generate([prompt, *others[:count]], [asked] + [filler] * count)[0]
                    for count in NEIGHBOURS
                ]
                ids = [tuple(answer["token_ids"]) for answer in answers]
                each.append(
                    {
                        "question": QUESTIONS[index],
                        "bits": len(set(map(bits, answers))),
                        "texts": len(set(ids)),
                        "first_difference": first_difference(ids),
                    }
                )
                print(name, each[-1], flush=True)
            steps = {n: ms_a_token(llm, (prompts * 4)[:n], 32) for n in (1, 8, 64)}
            found[name] = {"questions": each, "ms_a_token": steps}
            print(name, steps, flush=True)
    return {"neighbours": len(NEIGHBOURS), "answer_tokens": ANSWER, **found}


def measure_drafts(make: Any) -> dict[str, Any]:
    """Milliseconds a token without and with drafts, and accepted drafts, by kind of text."""
    found: dict[str, Any] = {kind: {} for kind in DRAFTS}
    for drafts in (0, 7):
        with make(num_speculative_tokens=drafts) as llm:
            for kind, question in DRAFTS.items():
                ids, took, counts, out = [chat_ids(llm, question)], [], (0, 0), {}
                for _ in range(6):
                    llm.generate(ids, SamplingParams(max_tokens=1))
                    before = [getattr(llm.scheduler, part, 0) for part in ("drafted", "accepted")]
                    start = time.perf_counter()
                    out = llm.generate(ids, SamplingParams(max_tokens=128))[0]
                    took.append(1e3 * (time.perf_counter() - start) / len(out["token_ids"]))
                    after = [getattr(llm.scheduler, part, 0) for part in ("drafted", "accepted")]
                    counts = tuple(a - b for a, b in zip(after, before))
                row = {"tokens": len(out["token_ids"]), "text": out["text"],
                       "ms_a_token": round(statistics.median(took[1:]), 4)}  # fmt: skip
                if drafts:
                    row |= {"drafted": counts[0], "accepted": counts[1]}
                found[kind]["with_drafts" if drafts else "plain"] = row
                print(kind, drafts, row, flush=True)
    return found


PARTS = {"fp8": measure_fp8, "batches": measure_batches, "drafts": measure_drafts}


def main() -> None:
    """Run the parts that are asked for, and store each in the file beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    make = partial(LLM, args.model, device=args.device, num_pages=4096)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        start = time.perf_counter()
        found[part] = PARTS[part](make)
        found |= circumstances() | {"command": "python3 -m tests.gpu.real_model smollm2"}
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(part, "took", round(time.perf_counter() - start), "seconds", flush=True)


if __name__ == "__main__":
    main()
