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
from minisgl.benchmark.profile import middle_trace, profile_decode
from minisgl.benchmark.report import save
from minisgl.benchmark.roofline import Ceilings, Roofline
from minisgl.benchmark.workload import random_workload
from minisgl.config.engine import SchedulerConfig, choose_device, choose_dtype
from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.engine.heap import frozen_heap
from minisgl.engine.memory import NotEnoughMemory
from minisgl.llm import LLM

SIZES: dict[str, dict[str, Any]] = {  # what a flag means if it is not given
    "cuda": {
        "requests": 256, "input_len": [100, 1024], "output_len": [100, 1024],
        "batch_sizes": [1, 8, 64], "prompt_len": 512, "tokens": 256, "repeats": 3, "batch": 256,
        "lengths": [100, 1600], "backends": ["triton", "fused"], "page_sizes": [1, 16, 64],
        "streams": 256,
    },
    "cpu": {
        "requests": 16, "input_len": [20, 100], "output_len": [20, 100],
        "batch_sizes": [1, 4], "prompt_len": 64, "tokens": 32, "repeats": 3, "batch": 8,
        "lengths": [20, 100], "backends": ["torch"], "page_sizes": [1, 16], "streams": 64,
    },
}  # fmt: skip


def default_text(name: str) -> str:
    """The default of a size, for the help."""
    gpu, cpu = (
        " ".join(map(str, size)) if isinstance(size, list) else str(size)
        for size in (SIZES["cuda"][name], SIZES["cpu"][name])
    )
    return f" (default {gpu})" if gpu == cpu else f" (default {gpu}; on a CPU {cpu})"


def add_size(group: options.Group, flag: str, what: str, **more: Any) -> None:
    """An integer flag whose default depends on the device."""
    name = more.get("dest", flag.removeprefix("--").replace("-", "_"))
    metavar = ("LOW", "HIGH") if more.get("nargs") == 2 else "N"
    options.add_integer(group, flag, what + default_text(name), metavar=metavar, **more)


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
    trace = (
        "Chrome trace of steady steps, as often as --repeats; a file for each batch and sampling"
    )
    group.add_argument("--profile", metavar="FILE", type=Path, default=None, help=trace)
    options.add_integer(group, "--profile-steps", "steps in it (default 20)", default=20)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Flags of the kernel timings."""
    group = parser.add_argument_group("workload")
    add_size(group, "--batch", "requests in decode attention")
    add_size(group, "--lengths", "tokens of each, drawn uniformly", nargs=2)
    which = "attention backends" + default_text("backends")
    group.add_argument("--backends", metavar="NAME", nargs="+", default=None, help=which)
    add_size(group, "--page-sizes", "tokens per KV page", nargs="+")
    rows = "rows of the matrix products (default 1 8 64 128 256)"
    options.add_integer(group, "--rows", rows, nargs="+", default=[1, 8, 64, 128, 256])


COMMANDS = {
    "offline": ("tokens per second with all requests at once", add_offline),
    "latency": ("time per token and to the first token at fixed batch sizes", add_latency),
    "kernels": ("bandwidth of decode attention, matrix products, copies", add_kernels),
}
Result = tuple[dict[str, Any], int]  # what is stored, and the exit status


class Command(NamedTuple):
    """A command of a later chapter: its help, its flags (all but those of a run), what it does."""

    what: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]


More = Mapping[str, Command]
NO_MORE: More = MappingProxyType({})


def build_parser(more: More = NO_MORE) -> argparse.ArgumentParser:
    """Three commands, and `more`; every flag with its default in the help."""
    what = "Measure the engine, beside the least time that the device allows."
    parser = options.Parser(prog="python -m minisgl.benchmark", description=what)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (what, add) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"Measure {what}.")
        add(command)
        options.add_model_flags(command)
        if name != "kernels":
            options.add_engine_flags(command)
        options.add_run_flags(command)
    for name, added in more.items():
        command = commands.add_parser(name, help=added.what, description=f"Measure {added.what}.")
        added.add(command)
        options.add_run_flags(command)
    return parser


def fill_sizes(args: argparse.Namespace) -> None:
    """Give every size that was not named the value that suits the device."""
    device = choose_device(args.device, 0)
    kind = device.partition(":")[0]
    if kind not in SIZES:
        raise ValueError(f"device: must be auto, cpu, cuda or cuda:N, got {args.device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: torch finds no GPU here, got {args.device!r}")
    if kind == "cuda":
        torch.cuda.set_device(device)
    args.device = device
    for name, size in SIZES[kind].items():
        if getattr(args, name, 0) is None:
            setattr(args, name, size)
    if args.command == "kernels" and args.model is None and kind == "cuda":
        args.model = "Qwen/Qwen3-0.6B"  # shapes that are worth a GPU
    for name in ("input_len", "output_len", "lengths"):
        low, high = getattr(args, name, (1, 1))
        if low > high:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: LOW must not exceed HIGH, got {low} {high}")


def ceilings_here(config: ModelConfig, args: argparse.Namespace) -> Ceilings:
    """Bandwidth and arithmetic of the device, measured in a second or two."""
    device = torch.device(args.device)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, config))
    return kernels.ceilings_of(kernels.measure_rows(kernels.ceiling_rows(dtype, device), device))


@contextmanager
def started(folder: Path, args: argparse.Namespace) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine as the flags want it, and what it turned out to be."""
    start = time.perf_counter()
    with LLM(folder, progress=sys.stderr.isatty(), **options.engine_fields(args)) as llm:
        loaded = time.perf_counter() - start
        llm.generate([0], SamplingParams(max_tokens=1))
        first_token = time.perf_counter() - start
        engine = llm.scheduler.engine
        config = engine.config
        about = {name: getattr(config, name) for name in (*options.ENGINE_FIELDS, "overlap")}
        about |= {"num_pages": engine.num_pages, "start_seconds": round(loaded, 2)}
        about["seconds_to_first_token"] = round(first_token, 2)
        about["graph_sizes"] = list(engine.graph.sizes) if engine.graph is not None else []
        about["makes_text"] = llm.tokenizer is not None
        with frozen_heap():
            yield llm, about


def roofline_of(llm: LLM, ceilings: Ceilings) -> Roofline:
    """The bound of the engine's model at the size of its weights."""
    engine = llm.scheduler.engine
    return Roofline(engine.model_config, ceilings, getattr(torch, engine.config.dtype).itemsize)


def run_offline(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All requests at once."""
    model = ModelConfig.from_path(folder)
    ceilings = ceilings_here(model, args)
    requests = random_workload(
        model.vocab_size, args.requests, tuple(args.input_len), tuple(args.output_len), args.seed
    )
    with started(folder, args) as (llm, about):
        found = offline.measure_offline(
            llm, requests, temperature=args.temperature, repeats=args.repeats, seed=args.seed
        )
        floor = offline.offline_floor(
            roofline_of(llm, ceilings), requests, about["max_running_req"]
        )
    print(
        f"{found['tokens_per_s']:,.0f} tokens/s: {found['output_tokens']} output tokens in "
        f"{found['median_seconds']} s, runs {found['seconds']}"
    )
    print(f"steps: {found['steps']}")
    if (power := found["power"]) is not None:
        print(
            f"power: {power['watts']:.0f} of {power['limit_watts']:.0f} W, held back in "
            f"{power['capped']:.0%} of the time; clock {power['sm_mhz']:.0f} of "
            f"{power['max_sm_mhz']} MHz, at the least {power['least_sm_mhz']}"
        )
    print(
        f"floor {floor['seconds']:.3f} s = {floor['tokens_per_s']:,.0f} tokens/s; "
        f"the engine reaches {found['tokens_per_s'] / floor['tokens_per_s']:.0%} of it"
    )
    workload = {name: getattr(args, name) for name in (
        "requests", "input_len", "output_len", "temperature", "seed")}  # fmt: skip
    return {"engine": about, "workload": workload, **found,
            "ceilings": vars(ceilings), "floor": floor}  # fmt: skip


def run_latency(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fixed batches, and a trace if it is asked for."""
    ceilings = ceilings_here(ModelConfig.from_path(folder), args)
    with started(folder, args) as (llm, about):
        rows = latency.measure_latency(
            llm, args.batch_sizes, prompt_len=args.prompt_len, output_len=args.tokens,
            sampling=args.sampling, repeats=args.repeats, seed=args.seed,
            roof=roofline_of(llm, ceilings),
        )  # fmt: skip
        traces = profiles(llm, args) if args.profile is not None else []
    for row in rows:
        print(
            f"batch {row['batch']:4} {row['sampling']:8} TPOT {row['tpot_ms']:8.3f} ms, "
            f"gaps p50 {row['gap_ms']['p50']:.3f} p99 {row['gap_ms']['p99']:.3f}, "
            f"TTFT p50 {row['ttft_ms']['p50']:.1f} ms, floor {row['floor_ms']:.3f} ms"
        )
    for row in traces:
        print("profile " + ", ".join(f"{name} {value}" for name, value in row.items()))
    workload = {"prompt_len": args.prompt_len, "output_len": args.tokens, "seed": args.seed}
    return {"engine": about, "workload": workload, "rows": rows, "profile": traces,
            "ceilings": vars(ceilings)}  # fmt: skip


def profiles(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A trace for every batch size and way of sampling: the median of several, the last stays."""
    cases = [(batch, name) for batch in args.batch_sizes for name in args.sampling]
    found = []
    for batch, name in cases:
        path: Path = args.profile
        if len(cases) > 1:
            path = path.with_name(f"{path.stem}-bs{batch}-{name}{path.suffix}")
        rows = [
            profile_decode(llm, batch, path, prompt_len=args.prompt_len,
                           steps=args.profile_steps, sampling=name)
            for _ in range(args.repeats)
        ]  # fmt: skip
        found.append(middle_trace(rows))
    return found


def speed_text(row: dict[str, Any]) -> str:
    """A measured row in words."""
    speed = f"{row['tb_per_s'] * 1e3:9.2f} GB/s {row['tflop_per_s']:9.4f} TFLOP/s"
    return f"{row['us']:10.1f} µs {speed}"


def run_kernels(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Ceilings, matrix products and decode attention in the model's shapes."""
    model, device = ModelConfig.from_path(folder), torch.device(args.device)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, model))
    draw, (low, high) = random.Random(args.seed), args.lengths
    lengths = np.array([draw.randint(low, high) for _ in range(args.batch)], dtype=np.int32)
    ceilings = kernels.measure_rows(kernels.ceiling_rows(dtype, device), device)
    rows = kernels.decode_rows(model, args.backends, args.page_sizes, lengths, dtype, device)
    for batch in (1, 8, 64):
        if batch < args.batch:
            few = (args.backends, args.page_sizes[-1:], lengths[:batch])
            rows += kernels.decode_rows(model, *few, dtype, device)
    rows += kernels.linear_rows(model, args.rows, dtype, device)
    if device.type == "cuda":  # kernels of our own have no other home
        rows += kernels.linear_rows(model, args.rows, dtype, device, fused=True)
        rows += kernels.small_rows(model, args.rows, dtype, device)
    found = ceilings + kernels.measure_rows(rows, device)
    for row in found:
        print(f"{row['name']:34} {row.get('skipped') or speed_text(row)}")
    workload = {"batch": args.batch, "lengths": args.lengths, "rows": args.rows,
                "kv_tokens": int(lengths.sum()), "seed": args.seed}  # fmt: skip
    return {"dtype": str(dtype), "workload": workload, "rows": found,
            "ceilings": vars(kernels.ceilings_of(ceilings))}  # fmt: skip


RUNS = {"offline": run_offline, "latency": run_latency, "kernels": run_kernels}


def measure(args: argparse.Namespace) -> dict[str, Any]:
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
        return about | RUNS[args.command](folder, args)


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
        if args.command in more:
            results, status = more[args.command].run(args)
        else:
            results, status = measure(args), 0
        if args.json is not None:
            save(args.json, results, shown(given))
    except (ValueError, OSError, ImportError, NotEnoughMemory) as error:
        print(f"python -m minisgl.benchmark: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    raise SystemExit(main())
