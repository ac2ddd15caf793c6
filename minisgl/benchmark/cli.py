"""`python -m minisgl.benchmark`: offline, latency and kernels from the command line.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.benchmark import kernels, latency, offline, options
from minisgl.benchmark.report import save
from minisgl.benchmark.roofline import Roofline
from minisgl.benchmark.workload import random_workload
from minisgl.config.engine import SchedulerConfig, choose_device, choose_dtype
from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.engine.heap import frozen_heap
from minisgl.engine.memory import NotEnoughMemory
from minisgl.llm import LLM

SIZES: dict[str, tuple[Any, Any]] = {  # what a flag means if it is not given: on a GPU, on a CPU
    "requests": (256, 16), "input_len": ([100, 1024], [20, 100]), "streams": (256, 64),
    "output_len": ([100, 1024], [20, 100]), "batch_sizes": ([1, 8, 64], [1, 4]),
    "prompt_len": (512, 64), "tokens": (256, 32), "repeats": (3, 3), "batch": (256, 8),
    "lengths": ([100, 1600], [20, 100]), "page_sizes": ([1, 16, 64], [1, 16]),
    "backends": (["triton", "fused"], ["torch"]),
}  # fmt: skip
Result = tuple[dict[str, Any], int]  # what is stored, and the exit status


class Command(NamedTuple):
    """A command: its help, its flags (all but those of a run), and what it does."""

    what: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]


def add_size(group: options.Group, flag: str, what: str, **more: Any) -> None:
    """An integer flag whose default depends on the device."""
    gpu, cpu = SIZES[more.get("dest", flag.removeprefix("--").replace("-", "_"))]
    metavar = ("LOW", "HIGH") if more.get("nargs") == 2 else "N"
    what += f" (default {gpu}; on a CPU {cpu})"
    options.add_integer(group, flag, what, **{"metavar": metavar, **more})


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Flags of the offline run."""
    group = parser.add_argument_group("workload")
    add_size(group, "--requests", "all at once")
    add_size(group, "--input-len", "prompt tokens, drawn uniformly", nargs=2)
    add_size(group, "--output-len", "new tokens, drawn uniformly", nargs=2)
    greedy = "0 is greedy (default 0.6)"
    group.add_argument("--temperature", type=float, default=0.6, help=greedy)
    add_size(group, "--repeats", "timed runs, of which the median counts")


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Flags of the latency run."""
    group = parser.add_argument_group("workload")
    add_size(group, "--batch-sizes", "requests that start together", nargs="+")
    add_size(group, "--prompt-len", "tokens of each prompt")
    add_size(group, "--output-len", "new tokens of each request", dest="tokens")
    names = list(latency.SAMPLING)
    how = f"greedy, or temperature {latency.SAMPLING['sampled']} (default both)"
    group.add_argument("--sampling", nargs="+", choices=names, default=names, help=how)
    add_size(group, "--repeats", "timed runs, of which the median counts")
    trace = "Chrome trace of steady steps; a file for each batch and sampling"
    group.add_argument("--profile", metavar="FILE", type=Path, default=None, help=trace)
    options.add_integer(group, "--profile-steps", "steps in it (default 20)", default=20)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Flags of the kernel timings."""
    group = parser.add_argument_group("workload")
    add_size(group, "--batch", "requests in decode attention")
    add_size(group, "--lengths", "tokens of each, drawn uniformly", nargs=2)
    which: dict[str, Any] = {"type": str, "metavar": "NAME"}
    add_size(group, "--backends", "attention backends", nargs="+", **which)
    add_size(group, "--page-sizes", "tokens per KV page", nargs="+")
    rows = "rows of the GEMMs (default 1 8 64 256)"
    options.add_integer(group, "--rows", rows, nargs="+", default=[1, 8, 64, 256])


def fill_sizes(args: argparse.Namespace) -> None:
    """Give every size that was not named the value that suits the device."""
    device = choose_device(args.device, 0)
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device: must be auto, cpu, cuda or cuda:N, got {args.device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: torch finds no GPU here, got {args.device!r}")
    if kind == "cuda":
        torch.cuda.set_device(device)
    args.device = device
    for name, sizes in SIZES.items():
        if getattr(args, name, 0) is None:
            setattr(args, name, sizes[kind == "cpu"])
    if args.command == "kernels" and args.model is None and kind == "cuda":
        args.model = "Qwen/Qwen3-0.6B"  # shapes that are worth a GPU
    for name in ("input_len", "output_len", "lengths"):
        low, high = getattr(args, name, (1, 1))
        if low > high:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: LOW must not exceed HIGH, got {low} {high}")


@contextmanager
def started(folder: Path, args: argparse.Namespace) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine as the flags want it, and what it turned out to be."""
    start = time.perf_counter()
    with LLM(folder, progress=sys.stderr.isatty(), **options.engine_fields(args)) as llm:
        llm.generate([0], SamplingParams(max_tokens=1))
        first_token = time.perf_counter() - start
        engine = llm.scheduler.engine
        about = {name: getattr(engine.config, name) for name in options.ENGINE_FIELDS}
        about |= {"num_pages": engine.num_pages, "makes_text": llm.tokenizer is not None}
        about["seconds_to_first_token"] = round(first_token, 2)
        about["graph_sizes"] = list(engine.graph.sizes) if engine.graph is not None else []
        with frozen_heap():
            yield llm, about


def roofline_of(folder: Path, args: argparse.Namespace) -> Roofline:
    """The model on this device, whose ceilings are measured in a second or two."""
    device, model = torch.device(args.device), ModelConfig.from_path(folder)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, model))
    rows = kernels.measure_rows(kernels.ceiling_rows(dtype, device), device)
    return Roofline(model, kernels.ceilings_of(rows), dtype.itemsize)


def run_offline(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All requests at once."""
    roof = roofline_of(folder, args)
    requests = random_workload(
        roof.model.vocab_size, args.requests, tuple(args.input_len), tuple(args.output_len),
        args.seed,
    )  # fmt: skip
    sizes = [len(r.input_ids) for r in requests], [r.output_len for r in requests]
    with started(folder, args) as (llm, about):
        found = offline.measure_offline(
            llm, requests, temperature=args.temperature, repeats=args.repeats, seed=args.seed
        )
    floors = roof.workload(*sizes, about["max_running_req"])._asdict()
    print(
        f"{found['tokens_per_s']:,.0f} tokens/s: {found['output_tokens']} output tokens in "
        f"{found['median_seconds']} s, runs {found['seconds']}\nsteps: {found['steps']}"
    )
    for name, seconds in floors.items():
        print(f"{name} floor {seconds:.3f} s = {found['output_tokens'] / seconds:,.0f} tokens/s; "
              f"the engine reaches {seconds / found['median_seconds']:.0%} of it")  # fmt: skip
    workload = {name: getattr(args, name) for name in (
        "requests", "input_len", "output_len", "temperature", "seed")}  # fmt: skip
    return {"engine": about, "workload": workload, **found,
            "ceilings": vars(roof.ceilings), "floors": floors}  # fmt: skip


def run_latency(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fixed batches, and a trace if it is asked for."""
    roof = roofline_of(folder, args)
    with started(folder, args) as (llm, about):
        rows = latency.measure_latency(
            llm, args.batch_sizes, prompt_len=args.prompt_len, output_len=args.tokens,
            sampling=args.sampling, repeats=args.repeats, seed=args.seed, roof=roof,
        )  # fmt: skip
        traces = profiles(llm, args) if args.profile is not None else []
    for row in rows:
        print(
            f"batch {row['batch']:4} {row['sampling']:8} TPOT {row['tpot_ms']:8.3f} ms, "
            f"p99 {row['gap_ms']['p99']:.3f}, TTFT p50 {row['ttft_ms']['p50']:.1f} ms, step floor "
            f"{row['floor_ms']:.3f} ms; {row['tb_per_s'] * 1e3:.1f} GB/s, "
            f"{row['tb_per_s'] * 1e12 / roof.ceilings.bytes_per_s:.0%} of the device's"
        )
    for row in traces:
        print("profile " + ", ".join(f"{name} {value}" for name, value in row.items()))
    workload = {"prompt_len": args.prompt_len, "output_len": args.tokens, "seed": args.seed}
    return {"engine": about, "workload": workload, "rows": rows, "profile": traces,
            "ceilings": vars(roof.ceilings)}  # fmt: skip


def profiles(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A trace for every batch size and way of sampling."""
    path: Path = args.profile
    return [
        latency.profile_decode(
            llm, batch, path.with_name(f"{path.stem}-bs{batch}-{name}{path.suffix}"),
            prompt_len=args.prompt_len, steps=args.profile_steps, sampling=name,
        )
        for batch in args.batch_sizes for name in args.sampling
    ]  # fmt: skip


def run_kernels(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Ceilings, GEMMs and decode attention in the model's shapes."""
    model, device = ModelConfig.from_path(folder), torch.device(args.device)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, model))
    draw, (low, high) = random.Random(args.seed), args.lengths
    lengths = np.array([draw.randint(low, high) for _ in range(args.batch)], dtype=np.int32)
    ceilings = kernels.measure_rows(kernels.ceiling_rows(dtype, device), device)
    rows = kernels.decode_rows(model, args.backends, args.page_sizes, lengths, dtype, device)
    for batch in (n for n in (1, 8, 64) if n < args.batch):
        few = (args.backends, args.page_sizes[-1:], lengths[:batch])
        rows += kernels.decode_rows(model, *few, dtype, device)
    rows += kernels.linear_rows(model, args.rows, dtype, device)
    if device.type == "cuda":  # kernels of our own have no other home
        rows += kernels.linear_rows(model, args.rows, dtype, device, fused=True)
    found = ceilings + kernels.measure_rows(rows, device)
    for row in found:
        print(f"{row['name']:34}", row.get("skipped") or (
            f"{row['us']:10.1f} µs {row['tb_per_s'] * 1e3:9.2f} GB/s "
            f"{row['tflop_per_s']:9.4f} TFLOP/s"))  # fmt: skip
    workload = {"batch": args.batch, "lengths": args.lengths, "rows": args.rows,
                "kv_tokens": int(lengths.sum()), "seed": args.seed}  # fmt: skip
    return {"dtype": str(dtype), "workload": workload, "rows": found,
            "ceilings": vars(kernels.ceilings_of(ceilings))}  # fmt: skip


RUNS = {"offline": run_offline, "latency": run_latency, "kernels": run_kernels}


def measure(args: argparse.Namespace) -> Result:
    """Run one of the three commands."""
    fill_sizes(args)
    if args.command != "kernels":
        SchedulerConfig(**options.engine_fields(args))  # refuse before anything is measured
    shapes_only = args.dummy_weight or args.command == "kernels"
    with options.model_folder(args.model, shapes_only) as folder:
        about = {
            "benchmark": args.command,
            "model": options.known_name(args.model) or args.model or "the embedded model",
            "dummy_weight": args.dummy_weight,
        }
        return about | RUNS[args.command](folder, args), 0


COMMANDS = {
    "offline": Command("tokens per second with all requests at once", add_offline, measure),
    "latency": Command("time per token and to the first token", add_latency, measure),
    "kernels": Command("bandwidth of decode attention, GEMMs, copies", add_kernels, measure),
}
More = Mapping[str, Command]
NO_MORE: More = MappingProxyType({})


def build_parser(more: More = NO_MORE) -> argparse.ArgumentParser:
    """Three commands, and `more`; every flag with its default in the help."""
    what = "Measure the engine, beside the least time that the device allows."
    parser = options.Parser(prog="python -m minisgl.benchmark", description=what)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, added in {**COMMANDS, **more}.items():
        command = commands.add_parser(name, help=added.what, description=f"Measure {added.what}.")
        added.add(command)
        if name in COMMANDS:
            options.add_model_flags(command)
        if name in ("offline", "latency"):
            options.add_engine_flags(command)
        group = command.add_argument_group("run")
        seed = "of prompts and lengths (default 0)"
        options.add_integer(group, "--seed", seed, low=0, default=0)
        where = "also write results, hardware, versions and command here"
        group.add_argument("--json", metavar="OUT", type=Path, default=None, help=where)
    return parser


def shown(given: Sequence[str]) -> str:
    """The command line as it is stored: without a key, and of files elsewhere the name alone."""
    given = [Path(word).name if Path(word).is_absolute() else word for word in given]
    words = [("--api-key=…" if word.startswith("--api-key=") else word) for word in given]
    words = ["…" if before == "--api-key" else word for before, word in zip(["", *words], words)]
    return shlex.join(["python", "-m", "minisgl.benchmark", *words])


def require_writable(path: Path) -> None:
    """Raise `OSError` now, and not after the run, if results could not be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a"):
        pass
    if new:
        path.unlink()


def main(argv: Sequence[str] | None = None, more: More = NO_MORE) -> int:
    """The commands here and `more`; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(more).parse_args(given)
    try:
        if args.json is not None:
            require_writable(args.json)
        results, status = {**COMMANDS, **more}[args.command].run(args)
        if args.json is not None:
            save(args.json, results, shown(given))
    except (ValueError, OSError, ImportError, NotEnoughMemory) as error:
        print(f"python -m minisgl.benchmark: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    raise SystemExit(main())
