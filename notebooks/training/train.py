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
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from training.batches import CURRICULUM, SHORT_CURRICULUM, Batch, Batches, Stage
from training.checkpoint import load_model, model_config, save_model
from training.evaluate import (
    evaluate,
    lookup_cases,
    phrasing_cases,
    report,
    short_lookup_cases,
    task_cases,
    token_counter,
    tool_cases,
    transformers_generate,
)


def answer_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Sum the cross-entropy of the assistant's tokens, a scalar; see `Batches`."""
    ids, at, wanted = batch
    unmasked: Any = {"full_attention": None}  # plain causal attention
    hidden = model.model(ids, attention_mask=unmasked, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1).index_select(0, at))
    return cross_entropy(logits.float(), wanted, reduction="sum")


def orthogonalized(updates: torch.Tensor) -> torch.Tensor:
    """Approximate the closest orthogonal matrices, [n, rows, columns], by Newton-Schulz."""
    tall = updates.shape[1] > updates.shape[2]
    x = updates if updates.device.type == "cpu" else updates.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon`, for all matrices of one shape at once."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        shapes = {matrix.shape for matrix in matrices}
        groups = [{"params": [m for m in matrices if m.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update with Nesterov momentum and decoupled weight decay."""
        for group in self.param_groups:
            matrices, keep = group["params"], group["momentum"]
            grads = torch.stack([matrix.grad for matrix in matrices])
            speed = self.state[matrices[0]].setdefault("speed", torch.zeros_like(grads))
            speed.lerp_(grads, 1 - keep)
            update = orthogonalized(grads.lerp(speed, keep))
            rate = group["lr"] * max(1, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(update.to(grads.dtype).unbind()), alpha=-rate)


def make_optimizers(
    model: Qwen3ForCausalLM, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and ".layers." in name
        (matrices if inside else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, muon_lr), adam]


def learning_rate(step: int, progress: float, warm_up: int = 100) -> float:
    """Return the factor of the peak rate: up in `warm_up` steps, then half a cosine to zero."""
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def measure(folder: Path, device: str, per_task: int) -> tuple[dict[str, float], list[str]]:
    """Measure the held-out accuracy of a stored model, with transformers in float32."""
    model, tokenizer = load_model(folder, device)
    cases = [
        *(one for one in task_cases(1, per_task) if one.name != "story"),  # too long to wait for
        *tool_cases(1, per_task),
        *short_lookup_cases(1, per_task),
        *lookup_cases(1, max(1, per_task // 4), token_counter(tokenizer)),
        *phrasing_cases(1, max(1, per_task // 4)),
    ]
    generate = transformers_generate(model, tokenizer, batch_size=512, max_new_tokens=400)
    return evaluate(generate, tokenizer, cases)


@dataclass
class Log:
    """The log file of a run."""

    facts: dict[str, Any]
    loss: list[tuple[int, int, float]]  # step, tokens so far, mean loss since the last entry
    accuracy: list[dict[str, Any]]  # step, seconds, scores

    def write(self, path: Path) -> None:
        """Store the log as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def run_facts(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Return command, seed, hardware, versions and date."""
    on_gpu = args.device.startswith("cuda")
    chip = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "command": " ".join(["python -m training.train", *argv]),
        "seed": args.seed,
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else chip,
        "torch": torch.__version__,
    }


class Trainer:
    """One run: the model, its optimizers, the clock, and the log."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str] = ()) -> None:
        torch.manual_seed(args.seed)
        self.start = time.perf_counter()
        self.args = args
        self.device = torch.device(args.device)
        config = model_config() if args.size == "full" else model_config(64, 1, 128)
        model: Any = Qwen3ForCausalLM(config)
        self.model: Qwen3ForCausalLM = model.to(self.device)
        self.optimizers = make_optimizers(self.model, args.muon_lr, args.adam_lr)
        if self.device.type == "cuda":
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        self.log = Log(run_facts(args, argv), [], [])
        self.log.facts["parameters"] = sum(p.numel() for p in self.model.parameters())
        self.step = self.tokens = 0

    def progress(self) -> float:
        """Return the finished share of the run's steps or seconds."""
        if self.args.steps:
            return float(self.step / self.args.steps)
        return float((time.perf_counter() - self.start) / self.args.seconds)

    def train_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Apply one update from some batches; return the mean loss, without synchronizing."""
        factor = learning_rate(self.step, self.progress(), self.args.warm_up)
        for optimizer, peak in zip(self.optimizers, (self.args.muon_lr, self.args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        count = sum(len(wanted) for *_, wanted in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            ids, at, wanted = (part.to(self.device, non_blocking=True) for part in batch)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                loss = answer_loss(self.model, (ids, at, wanted)) / count
            loss.backward()
            total += loss.detach()
            self.tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return total

    def batches(self, stage: Stage, number: int) -> Iterator[Batch]:
        """Make the batches of one stage, in worker processes if there are any."""
        tokens = self.args.batch_tokens // self.args.accumulate
        data = Batches(stage, tokens, self.args.seed * 10 + number)
        workers = self.args.workers
        ahead = 4 if workers else None
        pin = self.device.type == "cuda"
        loader = DataLoader(
            data, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=ahead
        )
        return iter(loader)

    def run(self) -> Log:
        """Go through the curriculum; log the loss, store and measure the model on the way."""
        every = 1 / self.args.checkpoints
        due, losses = every, list[torch.Tensor]()
        bar = tqdm(
            total=self.args.steps or None, unit="step", disable=self.args.quiet, mininterval=5
        )
        for index, stage in enumerate(
            SHORT_CURRICULUM if self.args.size == "small" else CURRICULUM
        ):
            batches = self.batches(stage, index)
            while self.progress() < stage.until:
                losses.append(self.train_step(list(islice(batches, self.args.accumulate))))
                bar.update()
                if len(losses) == self.args.log_every:
                    mean = torch.stack(losses).mean().item()
                    losses.clear()
                    self.log.loss.append((self.step, self.tokens, round(mean, 5)))
                    bar.set_postfix(loss=f"{mean:.4f}", stage=index)
                if due <= self.progress() < 1:
                    self.checkpoint(measured=round(due / every) % 3 == 0)
                    due += every
        bar.close()
        self.checkpoint(measured=True)
        return self.log

    def checkpoint(self, measured: bool) -> None:
        """Store the model and the log; measure held-out accuracy if `measured`."""
        seconds = round(time.perf_counter() - self.start, 1)
        self.log.facts |= {"steps": self.step, "tokens": self.tokens, "seconds": seconds}
        folder = self.args.out / "model"
        save_model(self.model, folder, self.log.facts)
        tqdm.write(f"step {self.step}, {seconds} s, {self.tokens / seconds:,.0f} tokens/s, stored")
        self.log.write(self.args.out / "tiny_training.json")
        if measured and self.args.per_task:
            scores, wrong = measure(folder, self.args.device, self.args.per_task)
            self.log.accuracy.append({"step": self.step, "seconds": seconds, "scores": scores})
            tqdm.write("\n".join([report(scores), *wrong[:20]]))
            self.log.write(self.args.out / "tiny_training.json")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train", description="Train the embedded model from scratch."
    )
    on_gpu = torch.cuda.is_available()
    processes = min(14, max(0, (os.cpu_count() or 2) - 2))
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for model/ and tiny_training.json")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--seconds", type=float, default=450, help="length of the run unless --steps is given")
    add("--steps", type=int, default=0, help="length of the run in updates")
    add("--seed", type=int, default=0)
    add("--size", choices=("full", "small"), default="full", help="small: a try on a CPU")
    add("--batch-tokens", type=int, default=131_072, help="tokens per update")
    add("--accumulate", type=int, default=2, help="parts of a batch, one after the other")
    add("--workers", type=int, default=processes, help="processes that make data")
    add("--warm-up", type=int, default=100, help="updates until the full learning rate")
    add("--muon-lr", type=float, default=0.02)
    add("--adam-lr", type=float, default=0.003)
    add("--log-every", type=int, default=50, help="updates per entry of the loss curve")
    add("--checkpoints", type=int, default=9, help="how often to store; every third is measured")
    add("--per-task", type=int, default=12, help="held-out cases per task when measured, or 0")
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
