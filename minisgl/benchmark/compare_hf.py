"""Our engine against `transformers.generate` with padding: same requests, same answers.

Generated from notebooks/13_benchmark.ipynb: edit there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from minisgl.benchmark.workload import Chat
from minisgl.core import IntArray, SamplingParams
from minisgl.kvcache.audit import check_integrity
from minisgl.llm import LLM
from minisgl.tokenizer import Tokenizer


class TimedRun(NamedTuple):
    """One timed run: wall seconds, and the new token ids of every request, end token included."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def cut(ids: Sequence[int], eos: Sequence[int], limit: int) -> list[int]:
    """Cut a row after its first end token, and after `limit` tokens at most."""
    ends = [i + 1 for i, token in enumerate(ids) if token in eos]
    return list(ids[: min([limit, *ends])])


def pad_left(prompts: Sequence[IntArray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, int64 [count, longest]; prompts end together, with padding in front."""
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

    def run(self, prompts: Sequence[IntArray], limits: Sequence[int]) -> TimedRun:
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
        return TimedRun(seconds, [cut(row, self.eos, limit) for row, limit in pairs])


class Engine:
    """Ours, with a cold prefix cache for every run, so that no run helps the next."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.llm = LLM(path, device="cpu", dtype="float32", **fields)

    def run(self, prompts: Sequence[IntArray], limits: Sequence[int]) -> TimedRun:
        self.forget()
        start = time.perf_counter()
        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in limits]
        outs = self.llm.generate(list(prompts), params)
        return TimedRun(time.perf_counter() - start, [out["token_ids"] for out in outs])

    def forget(self) -> None:
        """Empty the prefix cache."""
        cache = self.llm.scheduler.cache
        cache.free_slots(cache.prefix_cache.evict(cache.prefix_cache.evictable_tokens))
        check_integrity(cache)


def compare(chats: Sequence[Chat], path: Path, repeats: int = 3) -> dict[str, Any]:
    """Time both sides alternately on the same prompts; medians of output tokens per second."""
    tokenizer = Tokenizer(path)
    prompts = [tokenizer.apply_chat(chat.messages) for chat in chats]
    limits = [chat.max_tokens for chat in chats]
    sides: dict[str, Padded | Engine] = {"transformers": Padded(path), "minisgl": Engine(path)}
    for side in sides.values():  # every code path once, off the clock
        side.run(prompts[:2], [4, 4])
    runs: dict[str, list[TimedRun]] = {name: [] for name in sides}
    order = [name for _ in range(repeats) for name in sides]
    for name in tqdm(order, desc="timed runs", disable=None, leave=False):
        runs[name].append(sides[name].run(prompts, limits))
    return summary(prompts, runs)


def summary(prompts: Sequence[IntArray], runs: dict[str, list[TimedRun]]) -> dict[str, Any]:
    """Summarize a comparison, ready for JSON."""
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


def comparison_text(results: dict[str, Any]) -> str:
    """Format a comparison for the terminal, the ratio last."""
    lines = [
        f"{name:14} {speed:10.1f} output tokens/s   runs {results['seconds'][name]} s"
        for name, speed in results["tokens_per_second"].items()
    ]
    lines.append(f"equal answers {results['equal_answers']} of {results['requests']}")
    return "\n".join([*lines, f"ratio {results['ratio']:.2f}"])
