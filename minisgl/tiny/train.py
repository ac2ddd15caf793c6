"""Train the embedded model from scratch with one command.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from minisgl.tiny.batches import CURRICULUM, SHORT_CURRICULUM, Batches, Stage
from minisgl.tiny.checkpoint import load_model, model_config, save_model
from minisgl.tiny.evaluate import (
    evaluate,
    lookup_cases,
    report,
    short_lookup_cases,
    task_cases,
    token_counter,
    transformers_generate,
)


def answer_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, over the tokens that the assistant says.

    ids [rows, n + 1] int64, learnt [rows, n + 1] bool; the result is a scalar.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = learnt[:, 1:]
    return cross_entropy(model.lm_head(hidden[wanted]).float(), ids[:, 1:][wanted])


def make_optimizers(
    model: Qwen3ForCausalLM, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and ".layers." in name
        (matrices if inside else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(progress: float) -> float:
    """Factor on the peak rate: a short warm-up, then half a cosine down to zero."""
    return min(1.0, progress / 0.02) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def measure(folder: Path, device: str, per_task: int) -> tuple[dict[str, float], list[str]]:
    """Held-out accuracy of a stored model, through transformers in float32."""
    model, tokenizer = load_model(folder, device)
    cases = [
        *task_cases(1, per_task),
        *short_lookup_cases(1, per_task),
        *lookup_cases(1, max(1, per_task // 4), token_counter(tokenizer)),
    ]
    generate = transformers_generate(model, tokenizer, batch_size=512, max_new_tokens=400)
    return evaluate(generate, tokenizer, cases)


@dataclass
class Log:
    """What a run leaves behind."""

    facts: dict[str, Any]
    loss: list[tuple[int, int, float]]  # step, tokens so far, mean loss since the entry before
    accuracy: list[dict[str, Any]]  # step, seconds, scores

    def write(self, path: Path) -> None:
        """Store the log as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def run_facts(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Command, seed, hardware, versions and date."""
    on_gpu = args.device.startswith("cuda")
    chip = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "command": " ".join(["python -m minisgl.tiny.train", *argv]),
        "seed": args.seed,
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else chip,
        "torch": torch.__version__,
    }


class Trainer:
    """One run: the model, its optimizers, the clock, and the log."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str] = ()) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.device = torch.device(args.device)
        config = model_config() if args.size == "full" else model_config(64, 1, 128)
        model: Any = Qwen3ForCausalLM(config)
        self.model: Qwen3ForCausalLM = model.to(self.device)
        self.optimizers = make_optimizers(self.model, args.muon_lr, args.adam_lr)
        if self.device.type == "cuda":
            self.model.model.compile(dynamic=False)
        self.log = Log(run_facts(args, argv), [], [])
        self.log.facts["parameters"] = sum(p.numel() for p in self.model.parameters())
        self.step = self.tokens = 0
        self.start = time.perf_counter()

    def progress(self) -> float:
        """The share of the run that is done: of its steps, or of its minutes."""
        if self.args.steps:
            return float(self.step / self.args.steps)
        return float((time.perf_counter() - self.start) / (60 * self.args.minutes))

    def train_step(self, ids: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        """One update of all weights; returns the loss without waiting for the device."""
        ids = ids.to(self.device, torch.int64, non_blocking=True)
        learnt = learnt.to(self.device, non_blocking=True)
        factor = learning_rate(self.progress())
        for optimizer, peak in zip(self.optimizers, (self.args.muon_lr, self.args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            loss = answer_loss(self.model, ids, learnt)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += ids.numel()
        return loss.detach()

    def batches(self, stage: Stage, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of one stage, made by worker processes where there are any."""
        data = Batches(stage, self.args.batch_tokens, self.args.seed * 10 + number)
        workers = self.args.workers
        ahead = 4 if workers else None
        pin = self.device.type == "cuda"
        loader = DataLoader(
            data, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=ahead
        )
        return iter(loader)

    def run(self) -> Log:
        """Go through the curriculum; log the loss, store and measure the model on the way."""
        marks = [k / self.args.evaluations for k in range(1, self.args.evaluations)]
        bar = tqdm(total=self.args.steps or None, unit="step", disable=self.args.quiet)
        losses: list[torch.Tensor] = []
        for index, stage in enumerate(
            SHORT_CURRICULUM if self.args.size == "small" else CURRICULUM
        ):
            for ids, learnt in self.batches(stage, index):
                losses.append(self.train_step(ids, learnt))
                bar.update()
                if len(losses) == self.args.log_every:
                    mean = torch.stack(losses).mean().item()
                    losses.clear()
                    self.log.loss.append((self.step, self.tokens, round(mean, 5)))
                    bar.set_postfix(loss=f"{mean:.4f}", stage=index)
                if marks and self.progress() >= marks[0]:
                    marks.pop(0)
                    self.checkpoint()
                if self.progress() >= stage.until:
                    break
        bar.close()
        self.checkpoint()
        return self.log

    def checkpoint(self) -> None:
        """Store the model and the log; measure held-out accuracy if asked to."""
        seconds = round(time.perf_counter() - self.start, 1)
        self.log.facts |= {"steps": self.step, "tokens": self.tokens, "seconds": seconds}
        save_model(self.model, self.args.out / "model", self.log.facts)
        if self.args.per_task:
            folder, device = self.args.out / "model", self.args.device
            scores, wrong = measure(folder, device, self.args.per_task)
            self.log.accuracy.append({"step": self.step, "seconds": seconds, "scores": scores})
            rate = self.tokens / seconds
            tqdm.write(f"step {self.step}, {seconds} s, {rate:,.0f} tokens/s\n{report(scores)}")
            (self.args.out / "wrong.txt").write_text("\n".join(wrong) + "\n")
        self.log.write(self.args.out / "training.json")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.tiny.train", description="Train the embedded model from scratch."
    )
    on_gpu = torch.cuda.is_available()
    processes = min(14, max(0, (os.cpu_count() or 2) - 2))
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for model/, training.json and wrong.txt")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--minutes", type=float, default=14.5, help="length of the run unless --steps is given")
    add("--steps", type=int, default=0, help="length of the run in updates")
    add("--seed", type=int, default=0)
    add("--size", choices=("full", "small"), default="full", help="small: a try on a CPU")
    add("--batch-tokens", type=int, default=131_072, help="tokens per update")
    add("--workers", type=int, default=processes, help="processes that make data")
    add("--muon-lr", type=float, default=0.02)
    add("--adam-lr", type=float, default=0.003)
    add("--log-every", type=int, default=50, help="updates per entry of the loss curve")
    add("--evaluations", type=int, default=5, help="checkpoints, the last one included")
    add("--per-task", type=int, default=30, help="held-out cases per task at a checkpoint, or 0")
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train, store, report."""
    words = list(sys.argv[1:] if argv is None else argv)
    log = Trainer(parse_args(words), words).run()
    last = log.loss[-1][2] if log.loss else float("nan")
    print(f"loss {last}", *(f"{name}: {fact}" for name, fact in log.facts.items()), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
