"""Flags of the benchmarks: their types, their defaults, and the parser of all commands.

Generated from notebooks/13e_commands.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minisgl.attention.factory import BACKENDS
from minisgl.benchmark.latency import SAMPLING
from minisgl.benchmark.simulate import ROUTERS
from minisgl.benchmark.step_cost import GPUS
from minisgl.benchmark.workload import check_room
from minisgl.config import flags
from minisgl.config.engine import SchedulerConfig, choose_device
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import file_of, shown
from minisgl.server.options import Parser


def at_least(low: int) -> Callable[[str], int]:
    """Make the type of a flag that takes an int32 of at least `low`, which must be 0 or more."""

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) < 20 else -1
        if not low <= number < 2**31:
            why = f"must be an integer of at least {low} and below 2**31, got {shown(text)}"
            raise argparse.ArgumentTypeError(why)
        return number

    return read


def positive(text: str) -> float:
    """Parse a flag that must be a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def arrival_rate(text: str) -> float:
    """Parse a rate: a number above 0, or inf for all at once."""
    return math.inf if text == "inf" else positive(text)


def add_integer(group: flags.Group, names: str, what: str, low: int = 1, **more: Any) -> None:
    """Add a flag with one or several names that takes an integer, or `nargs` integers."""
    fields: dict[str, Any] = {"metavar": "N", "type": at_least(low), "help": what, **more}
    group.add_argument(*names.split(), **fields)


def known_name(name: str | None) -> str | None:
    """Return a known model's hub id from the id, or from its part after the slash; else None."""
    if name is None or Path(name).is_dir():
        return None
    for known in KNOWN_CONFIGS:
        if name.lower() in (known.lower(), known.lower().split("/")[1]):
            return known
    return None


def named_model(name: str | None) -> str:
    """Name a model in a stored result: its hub id, or its folder without the path."""
    return known_name(name) or (Path(name).name if name else "the embedded model")


def stored_command(module: str, given: Sequence[str]) -> str:
    """Format a command line to store: without a key, and with the names of absolute paths."""
    words: list[str] = []
    for word in given:
        flag, mark, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if words[-1:] == ["--api-key"] or (flag == "--api-key" and mark):
            value = "…"
        elif Path(value).is_absolute():
            value = Path(value).name
        words.append(flag + mark + value)
    return shlex.join(["python", "-m", module, *words])


@contextmanager
def model_folder(name: str | None, shapes_only: bool) -> Iterator[Path]:
    """Yield a model's folder; if only shapes are needed, a known name gives one with a config."""
    known = known_name(name) if shapes_only else None
    if known is None:
        yield resolve_model_path(name)
        return
    with TemporaryDirectory(prefix="minisgl-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_CONFIGS[known]))
        yield Path(folder)


SIZES: dict[str, tuple[Any, Any]] = {  # default of a flag: on a GPU, on a CPU
    "requests": (256, 16), "input_len": ([100, 1024], [20, 100]), "streams": (256, 64),
    "output_len": ([100, 1024], [20, 100]), "batch_sizes": ([1, 8, 64], [1, 4]),
    "prompt_len": (512, 64), "tokens": (256, 32), "repeats": (3, 3), "batch": (256, 8),
    "lengths": ([100, 1600], [20, 100]), "page_sizes": ([1, 16, 64], [1, 16]),
    "backends": (["triton", "fused"], ["torch"]),
}  # fmt: skip


def add_size(group: flags.Group, flag: str, what: str, **more: Any) -> None:
    """Add an integer flag whose default depends on the device."""
    gpu, cpu = SIZES[more.get("dest", flag.removeprefix("--").replace("-", "_"))]
    metavar = ("LOW", "HIGH") if more.get("nargs") == 2 else "N"
    what += f" (default {gpu})" if gpu == cpu else f" (default {gpu}; on a CPU {cpu})"
    add_integer(group, flag, what, **{"metavar": metavar, **more})


def fill_sizes(args: argparse.Namespace) -> None:
    """Fill in each size that was not given with the device's default."""
    device = choose_device(args.device, 0)
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device: must be auto, cpu, cuda or cuda:N, got {args.device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: torch finds no GPU here, got {args.device!r}")
    if kind == "cuda":
        torch.cuda.set_device(device)
    several = getattr(args, "tp", 1) > 1 and args.device in ("auto", "cuda")
    args.device = kind if several else device  # ranks take the GPUs in order
    for name, sizes in SIZES.items():
        if getattr(args, name, 0) is None:
            setattr(args, name, sizes[kind == "cpu"])
    if args.command == "kernels" and args.model is None and kind == "cuda":
        args.model = "Qwen/Qwen3-0.6B"  # shapes that are worth a GPU


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the offline run."""
    group = parser.add_argument_group("workload")
    add_size(group, "--requests", "all at once")
    add_size(group, "--input-len", "prompt tokens, drawn uniformly", nargs=2)
    add_size(group, "--output-len", "new tokens, drawn uniformly", nargs=2)
    greedy = "0 is greedy (default 0.6)"
    group.add_argument("--temperature", type=float, default=0.6, help=greedy)
    add_size(group, "--repeats", "timed runs, of which the median counts")


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the latency run."""
    group = parser.add_argument_group("workload")
    add_size(group, "--batch-sizes", "requests that start together", nargs="+")
    add_size(group, "--prompt-len", "tokens of each prompt")
    add_size(group, "--output-len", "new tokens of each request", dest="tokens")
    names = list(SAMPLING)
    how = f"greedy, or temperature {SAMPLING['sampled']} (default both)"
    group.add_argument("--sampling", nargs="+", choices=names, default=names, help=how)
    add_size(group, "--repeats", "timed runs, of which the median counts")
    trace = "Chrome trace of 20 steady steps; a file for each batch and sampling, or their folder"
    group.add_argument("--profile", metavar="FILE", type=Path, default=None, help=trace)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the kernel timings."""
    group = parser.add_argument_group("workload")
    add_size(group, "--batch", "requests in decode attention")
    add_size(group, "--lengths", "tokens of each, drawn uniformly", nargs=2)
    which: dict[str, Any] = {"type": str, "metavar": "NAME", "choices": list(BACKENDS)}
    add_size(group, "--backends", "attention backends", nargs="+", **which)
    add_size(group, "--page-sizes", "tokens per KV page", nargs="+")
    rows = "rows of the GEMMs (default 1 8 64 256)"
    add_integer(group, "--rows", rows, nargs="+", default=[1, 8, 64, 256])


def add_overhead(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the comparison of engine and server."""
    group = parser.add_argument_group("workload")
    add_size(group, "--streams", "requests at once")
    add_size(group, "--input-len", "prompt tokens, drawn uniformly", nargs=2)
    add_size(group, "--output-len", "new tokens, drawn uniformly", nargs=2)
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    add_size(group, "--repeats", "runs of each side, of which the median counts")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a server and its protocol."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--url", required=True, help="like http://127.0.0.1:1919, with /v1 or not")
    add("--model", metavar="NAME", default=None, help="default: the first of /v1/models")
    flags.add_key_flag(group, "bearer token")
    add("--timeout", metavar="S", type=positive, default=600.0, help="for one answer (600)")
    add("--chat", action="store_true", help="chats of words; default: completions of token ids")
    add("--no-ignore-eos", action="store_true", help="for a server that rejects unknown fields")


def add_online(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load run."""
    add_server_flags(parser)
    group = parser.add_argument_group("load")
    one = group.add_mutually_exclusive_group()
    what = "requests a second, Poisson, or inf: all at once (default); several are run in turn"
    one.add_argument("--rate", metavar="R", type=arrival_rate, nargs="+", default=None, help=what)
    add_integer(one, "--concurrency", "clients that each wait for their answer")
    add_integer(group, "--requests", "of each run (default 64)", default=64)
    for name in ("input", "output"):
        ends: dict[str, Any] = {"nargs": 2, "default": [32, 128], "metavar": ("LOW", "HIGH")}
        add_integer(group, f"--{name}-len", "tokens, uniform (default 32 128)", **ends)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the replay."""
    add_server_flags(parser)
    group = parser.add_argument_group("trace")
    what = "JSON lines in the Qwen format; default: synthetic chats"
    group.add_argument("--trace", metavar="FILE", type=Path, default=None, help=what)
    what = "of the time between requests: below 1 is more load (default 1)"
    group.add_argument("--scale", metavar="S", type=positive, default=1.0, help=what)
    add_integer(group, "--requests", "only the first N; default: all")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the simulation."""
    group = parser.add_argument_group("load and engine")
    one = group.add_mutually_exclusive_group()
    what = "requests a second at all replicas, Poisson, or inf: all at once (default)"
    one.add_argument("--rate", metavar="R", type=arrival_rate, default=math.inf, help=what)
    add_integer(one, "--concurrency", "clients of each replica that wait for their answer")
    add_integer(group, "--requests", "at one replica (default 256)", default=256)
    for flag in ("--input-len", "--output-len"):
        add_integer(group, flag, "tokens, uniform (default 100 1024)", nargs=2, default=[100, 1024])
    add_integer(group, "--shared", "tokens that all prompts begin with (default 0)", 0, default=0)
    chats = group.add_mutually_exclusive_group()
    what = "recorded chats instead: JSON lines in the Qwen format"
    chats.add_argument("--trace", metavar="FILE", type=Path, help=what)
    add_integer(chats, "--sessions", "or as many synthetic chats of several turns, by --rate")
    known = ", ".join(name.split("/")[1] for name in KNOWN_CONFIGS)
    group.add_argument("--model", default="Qwen/Qwen3-8B", help=f"folder or one of {known}")
    group.add_argument("--gpu", choices=list(GPUS), default="h200", help="(default h200)")
    group.add_argument("--schedule-policy", choices=["fcfs", "fair"], default="fcfs")
    for flag, what, default in (
        ("--tp", "GPUs of one replica", 1), ("--max-running-req", "requests at once", 256),
        ("--max-prefill-length", "tokens of a step", 8192), ("--replicas", "of which one runs", 1),
    ):  # fmt: skip
        add_integer(group, flag, f"{what} (default {default})", default=default)
    group.add_argument("--router", choices=ROUTERS, default="random", help="(default random)")
    for name in ("ttft", "tpot"):
        what = "find the fewest replicas with which 99 of 100 requests stay below"
        group.add_argument(f"--{name}-ms", metavar="MS", type=positive, help=what)
    group.add_argument("--price", metavar="P", type=positive, help="of one GPU for an hour")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model, its weights and device."""
    known = ", ".join(name.split("/")[1] for name in KNOWN_CONFIGS)
    which = f"folder, hub id, or with --dummy-weight one of {known}; none: the embedded model"
    flags.add_model_flags(parser.add_argument_group("model"), which)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "offline": ("tokens per second with all requests at once", add_offline),
    "latency": ("time per token and to the first token", add_latency),
    "kernels": ("bandwidth of decode attention, GEMMs, copies", add_kernels),
    "online": ("a server under load, by arrivals or by clients", add_online),
    "trace": ("a server on recorded or synthetic chats", add_trace),
    "overhead": ("the cost of HTTP and text", add_overhead),
    "simulate": ("a load on simulated GPUs", add_simulate),
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every command, with every default in the help."""
    what = "Measure the engine and its server, compared with the limits of the device."
    tune = "python -m minisgl.benchmark.tune MODEL searches for better GEMM kernels on this GPU"
    parser = Parser(prog="python -m minisgl.benchmark", description=what, epilog=tune)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (what, add) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"Measure {what}.")
        add(command)
        if name in ("offline", "latency", "kernels", "overhead"):
            add_model_flags(command)
        if name in ("offline", "latency", "overhead"):
            flags.add_engine_flags(command.add_argument_group("engine"), SchedulerConfig())
        group = command.add_argument_group("run")
        add_integer(group, "--seed", "of prompts and lengths (default 0)", low=0, default=0)
        where = "also write results, hardware, versions and command here"
        group.add_argument("--json", metavar="OUT", type=Path, default=None, help=where)
    return parser


def check_lengths(args: argparse.Namespace, window: int) -> None:
    """Raise a `ValueError` that names the flag if the longest request exceeds the window."""
    if args.command == "latency":
        check_room("prompt-len", args.prompt_len, args.tokens, window)
    elif args.command != "kernels":
        check_room("input-len", args.input_len[1], args.output_len[1], window)


def check_writable(flag: str, path: Path) -> None:
    """Raise `ValueError` before the run if a file cannot be written."""
    with file_of(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.exists()
        path.open("a").close()
        if not before:
            path.unlink()


def check_ranges(args: argparse.Namespace) -> None:
    """Raise `ValueError` for a range whose first end exceeds the second."""
    for name in ("input_len", "output_len", "lengths"):
        low, high = getattr(args, name, None) or (0, 0)
        if low > high:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: LOW must not exceed HIGH, got {low} {high}")
