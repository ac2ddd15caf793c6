"""Our engine against `transformers.generate` with padding: same requests, same answers.

Generated from notebooks/13_benchmark.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from minisgl.benchmark.report import circumstances, save
from minisgl.benchmark.workload import Chat, chat_workload
from minisgl.config.paths import resolve_model_path
from minisgl.core import IntArray, SamplingParams
from minisgl.kvcache.audit import check_integrity
from minisgl.llm import LLM
from minisgl.tokenizer import Tokenizer


class Outcome(NamedTuple):
    """One timed run: wall seconds, and the new token ids of every request, end token included."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def cut(ids: Sequence[int], eos: Sequence[int], limit: int) -> list[int]:
    """The part of a row that belongs to its answer: up to its first end token, at most `limit`."""
    ends = [i + 1 for i, token in enumerate(ids) if token in eos]
    return list(ids[: min([limit, *ends])])


def pad_left(prompts: Sequence[IntArray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 [count, longest]: prompts end together, padding stands before them."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype("int64"))
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


class Padded:
    """The baseline: `transformers` with one padded batch, greedy, KV cache on."""

    def __init__(self, path: Path) -> None:
        disable_progress_bar()  # of loading weights; the runs have their own
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.eos = Tokenizer(path).eos_token_ids

    def run(self, prompts: Sequence[IntArray], limits: Sequence[int]) -> Outcome:
        start = time.perf_counter()
        ids, mask = pad_left(prompts, pad=self.eos[0])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max(limits), do_sample=False,
                pad_token_id=self.eos[0], eos_token_id=list(self.eos),
            )  # fmt: skip
        rows = out[:, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        pairs = zip(rows, limits, strict=True)
        return Outcome(seconds, [cut(row, self.eos, limit) for row, limit in pairs])


class Engine:
    """Ours, with a cold prefix cache for every run, so that no run helps the next."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.llm = LLM(path, device="cpu", dtype="float32", **fields)

    def run(self, prompts: Sequence[IntArray], limits: Sequence[int]) -> Outcome:
        self.forget()
        start = time.perf_counter()
        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in limits]
        outs = self.llm.generate(list(prompts), params)
        return Outcome(time.perf_counter() - start, [out["token_ids"] for out in outs])

    def forget(self) -> None:
        """Empty the prefix cache."""
        cache = self.llm.scheduler.cache
        pages = cache.prefix_cache.evict(cache.prefix_cache.evictable_tokens)
        cache.allocator.free(pages[:: cache.page_size] // cache.page_size)
        check_integrity(cache)


def compare(chats: Sequence[Chat], path: Path, repeats: int = 3) -> dict[str, Any]:
    """Time both sides alternately on the same prompts; medians of output tokens per second."""
    tokenizer = Tokenizer(path)
    prompts = [tokenizer.apply_chat(chat.messages) for chat in chats]
    limits = [chat.max_tokens for chat in chats]
    sides: dict[str, Padded | Engine] = {"transformers": Padded(path), "minisgl": Engine(path)}
    for side in sides.values():  # every code path once, off the clock
        side.run(prompts[:2], [4, 4])
    runs: dict[str, list[Outcome]] = {name: [] for name in sides}
    order = [name for _ in range(repeats) for name in sides]
    for name in tqdm(order, desc="timed runs", disable=None, leave=False):
        runs[name].append(sides[name].run(prompts, limits))
    return summary(prompts, runs)


def summary(prompts: Sequence[IntArray], runs: dict[str, list[Outcome]]) -> dict[str, Any]:
    """The numbers of a comparison, ready for JSON."""
    theirs, ours = runs["transformers"], runs["minisgl"]
    same = sum(a == b for a, b in zip(theirs[0].token_ids, ours[0].token_ids, strict=True))
    speeds = {name: statistics.median(r.tokens_per_second for r in rs) for name, rs in runs.items()}
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(map(len, ours[0].token_ids)),
        "output_lengths": [len(ids) for ids in ours[0].token_ids],
        "equal_answers": same,
        "seconds": {name: [round(r.seconds, 3) for r in rs] for name, rs in runs.items()},
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio": round(speeds["minisgl"] / speeds["transformers"], 2),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.benchmark.compare_hf",
        description="Chat requests on a CPU: minisgl against transformers.generate with padding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=None, help="model folder; none: the embedded model")
    parser.add_argument("--requests", type=int, default=64, help="chats, and the padded batch size")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each side")
    parser.add_argument(
        "--threads", type=int, default=None, help="torch threads; none: torch's own"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="also write the results here as JSON"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and print it, the ratio last."""
    args = build_parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    path = resolve_model_path(args.model)
    results = compare(chat_workload(args.requests, args.seed), path, args.repeats)
    about = circumstances()
    versions, hardware = about["versions"], about["hardware"]
    print(f"{hardware['cpu']}, {about['threads']} threads, torch {versions['torch']}")
    for name, speed in results["tokens_per_second"].items():
        print(f"{name:14} {speed:10.1f} output tokens/s   runs {results['seconds'][name]} s")
    print(f"equal answers {results['equal_answers']} of {results['requests']}")
    print(f"ratio {results['ratio']:.2f}")
    if args.out is not None:
        command = "python -m minisgl.benchmark.compare_hf " + " ".join(argv or sys.argv[1:])
        save(args.out, results, command.strip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
