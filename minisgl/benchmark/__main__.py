"""`python -m minisgl.benchmark`: the commands that measure a server join those of the engine.

Generated from notebooks/13d_overhead.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark import cli, options
from minisgl.benchmark.compare_hf import compare, comparison_text
from minisgl.benchmark.load import (
    LoadRun,
    Target,
    first_model,
    online_workload,
    run_load,
    summarize,
    table,
)
from minisgl.benchmark.overhead import measure_overhead, overhead_text, with_tokenizer
from minisgl.benchmark.serving import flags_of, served
from minisgl.benchmark.trace import (
    TraceLine,
    read_trace,
    requests_of,
    reusable_tokens,
    synthesize,
    write_trace,
)
from minisgl.benchmark.workload import RandomRequest, chat_workload, random_workload
from minisgl.config.flags import add_key_flag, key_of
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap
from minisgl.llm import LLM
from minisgl.server.chat.client import ApiClient


def positive(text: str) -> float:
    """The type of a flag that must be a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def arrival_rate(text: str) -> float:
    """The type of a rate: a number above 0, or inf for all at once."""
    return math.inf if text == "inf" else positive(text)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Which server, and how to speak with it."""
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--url", default=None, help="like http://127.0.0.1:1919, with /v1 or not")
    add("--model", metavar="NAME", default=None, help="default: the first of /v1/models")
    add_key_flag(group, "bearer token")
    add("--timeout", metavar="S", type=positive, default=600.0, help="for one answer (600)")
    add("--chat", action="store_true", help="chats of words; default: completions of token ids")
    add("--no-ignore-eos", action="store_true", help="for a server that refuses unknown fields")


def add_online(parser: argparse.ArgumentParser) -> None:
    """Flags of the load run."""
    add_server_flags(parser)
    group = parser.add_argument_group("load")
    one = group.add_mutually_exclusive_group()
    what = "requests a second, Poisson, or inf: all at once (default); several are run in turn"
    one.add_argument("--rate", metavar="R", type=arrival_rate, nargs="+", default=None, help=what)
    options.add_integer(one, "--concurrency", "clients that each wait for their answer")
    options.add_integer(group, "--requests", "of each run (default 64)", default=64)
    for name in ("input", "output"):
        ends: dict[str, Any] = {"nargs": 2, "default": [32, 128], "metavar": ("LOW", "HIGH")}
        options.add_integer(group, f"--{name}-len", "tokens, uniform (default 32 128)", **ends)


async def load_server(
    args: argparse.Namespace, requests: Sequence[RandomRequest], clients: int | None
) -> LoadRun:
    """Load the server that the flags name."""
    async with ApiClient(args.url, key_of(args)) as client:
        model = args.model or await first_model(client)
        target, show = Target(model, args.chat, not args.no_ignore_eos), sys.stderr.isatty()
        return await run_load(client, target, requests, clients, args.timeout, show)


def measured(
    args: argparse.Namespace,
    requests: Sequence[RandomRequest],
    load: dict[str, Any],
    clients: int | None = None,
) -> dict[str, Any]:
    """One run as its summary, which is printed, with what was loaded."""
    with frozen_heap():  # a pause of ours would look like one of the server's
        run = asyncio.run(load_server(args, requests, clients))
    summary = {"load": load, **summarize(run)}
    named = ", ".join(f"{name} {value}" for name, value in load.items() if value is not None)
    print(f"\n{named or 'all at once'}\n{table(summary)}")
    for kind, detail in {r.error: r.detail for r in run.records if r.error and r.detail}.items():
        print(f"{kind}: {detail}", file=sys.stderr)  # one example of every kind of failure
    return summary


def status_of(runs: list[dict[str, Any]]) -> int:
    """130 after Ctrl-C, 1 if nothing was answered, else 0."""
    if any(run["interrupted"] for run in runs):
        return 130
    return 0 if any(run["completed"] for run in runs) else 1


def ends_of(args: argparse.Namespace, name: str) -> tuple[int, int]:
    """Both ends of a range. Raises `ValueError` if they are the wrong way round."""
    low, high = getattr(args, name)
    if low > high:
        flag = name.replace("_", "-")
        raise ValueError(f"{flag}: LOW must not exceed HIGH, got {low} {high}")
    return low, high


def run_online(args: argparse.Namespace) -> cli.Result:
    """One run, or one for each rate."""
    if args.url is None:
        raise ValueError("url: must be given, like http://127.0.0.1:1919")
    ends = (ends_of(args, "input_len"), ends_of(args, "output_len"))
    runs: list[dict[str, Any]] = []
    for asked in args.rate or [math.inf]:
        rate = asked if math.isfinite(asked) else None
        requests = online_workload(args.requests, *ends, args.seed + len(runs), rate)
        load = {"rate": rate, "concurrency": args.concurrency}
        run = measured(args, requests, load, args.concurrency)
        runs.append(run)
        if (run["cached_tokens"] or 0) > 0.1 * run["input_tokens"]:  # random prompts share nothing
            why = f"{run['cached_tokens']} of {run['input_tokens']} prompt tokens were cached"
            print(f"notice: {why}, perhaps of a run with the same --seed", file=sys.stderr)
        if run["interrupted"]:
            break
    names = ("requests", "input_len", "output_len", "seed", "timeout", "chat")
    workload = {name: getattr(args, name) for name in names}
    return {"benchmark": "online", "workload": workload, "runs": runs}, status_of(runs)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Flags of the replay."""
    add_server_flags(parser)
    group = parser.add_argument_group("trace")
    what = "JSON lines in the Qwen format; default: synthetic chats"
    group.add_argument("--trace", metavar="FILE", type=Path, default=None, help=what)
    what = "write the synthetic trace; without --url nothing is sent"
    group.add_argument("--synthesize", metavar="FILE", type=Path, default=None, help=what)
    what = "of the time between requests: below 1 is more load (default 1)"
    group.add_argument("--scale", metavar="S", type=positive, default=1.0, help=what)
    options.add_integer(group, "--requests", "only the first N; default: all")


def lines_for(args: argparse.Namespace) -> list[TraceLine]:
    """The trace that the flags name."""
    if args.trace is not None and args.synthesize is not None:
        raise ValueError("synthesize: writes a synthetic trace, so it does not go with --trace")
    if args.trace is not None:
        return read_trace(args.trace, args.requests)
    lines = synthesize(seed=args.seed)[: args.requests]
    if args.synthesize is not None:
        write_trace(args.synthesize, lines)
        print(f"{len(lines)} requests written to {args.synthesize}")
    return lines


def run_trace(args: argparse.Namespace) -> cli.Result:
    """Write a trace, replay one, or both."""
    if args.url is None and args.synthesize is None:
        raise ValueError("url: must be given to replay a trace (or --synthesize FILE to write one)")
    lines = lines_for(args)
    tokens, known = sum(line.input_length for line in lines), sum(reusable_tokens(lines))
    about = {"requests": len(lines), "input_tokens": tokens, "reusable_tokens": known}
    about["output_tokens"] = sum(line.output_length for line in lines)
    about["chats"] = sum(line.parent_chat_id < 0 for line in lines)
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))
    results = {"benchmark": "trace", "trace": about, "scale": args.scale, "seed": args.seed}
    if args.url is None:
        return results, 0
    run = measured(args, requests_of(lines, args.scale), {"rate": None, "scale": args.scale})
    print(f"the trace allows {known / tokens:.1%} of the prompt tokens from a cache")
    return {**results, "runs": [run]}, status_of([run])


def add_overhead(parser: argparse.ArgumentParser) -> None:
    """Flags of the comparison of engine and server."""
    group = parser.add_argument_group("workload")
    cli.add_size(group, "--streams", "requests at once")
    cli.add_size(group, "--input-len", "prompt tokens, drawn uniformly", nargs=2)
    cli.add_size(group, "--output-len", "new tokens, drawn uniformly", nargs=2)
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    cli.add_size(group, "--repeats", "runs of each side, of which the median counts")
    options.add_model_flags(parser)
    options.add_engine_flags(parser)


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's fields, with room for all streams and for the other side."""
    fields = {**options.engine_fields(args), "device": args.device}
    fields.setdefault("max_running_req", max(256, args.streams))
    fields.setdefault("schedule_policy", "fair")  # a server's default, and not an engine's
    if args.device.startswith("cuda"):
        # The second to start finds less memory, which must not change what it captures.
        fields.setdefault("cuda_graph_max_bs", fields["max_running_req"])
        if "num_page_override" not in fields:
            fields.setdefault("memory_ratio", 0.4)
    return fields


def run_overhead(args: argparse.Namespace) -> cli.Result:
    """Engine and server side by side."""
    cli.fill_sizes(args)
    fields = engine_fields(args)
    ends = (tuple(args.input_len), tuple(args.output_len))
    with (
        options.model_folder(args.model, args.dummy_weight) as plain,
        with_tokenizer(plain, args.dummy_weight) as (folder, tokenizer),
        LLM(folder, **fields) as llm,
    ):
        engine = llm.scheduler.engine
        fields["num_page_override"] = engine.num_pages
        requests = random_workload(engine.model_config.vocab_size, args.streams, *ends, args.seed)
        with served(folder, flags_of(fields)) as child:
            how = (args.temperature, args.repeats, args.seed + 1)
            row = measure_overhead(llm, child, requests, *how)
    print(overhead_text(row))
    about = {"model": options.known_name(args.model) or args.model or "the embedded model"}
    names = ("input_len", "output_len", "temperature", "repeats", "seed", "dummy_weight")
    workload = {name: getattr(args, name) for name in names}
    results = {"benchmark": "overhead", **about, "tokenizer": tokenizer, "engine": fields}
    return {**results, "workload": workload, **row}, 0


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Flags of the comparison with `transformers.generate`."""
    group = parser.add_argument_group("workload")
    group.add_argument("--model", default=None, help="model folder; none: the embedded model")
    options.add_integer(group, "--requests", "chats at once (default 64)", default=64)
    options.add_integer(group, "--repeats", "timed runs of each side (default 3)", default=3)
    options.add_integer(group, "--threads", "torch threads; none: torch's own")


def run_compare(args: argparse.Namespace) -> cli.Result:
    """Our engine and `transformers.generate` on the same chats."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    chats = chat_workload(args.requests, args.seed)
    results = compare(chats, resolve_model_path(args.model), args.repeats)
    print(comparison_text(results))
    return {"benchmark": "compare", **results}, 0


COMMANDS = {
    "online": cli.Command("a server under load, by arrivals or by clients", add_online, run_online),
    "trace": cli.Command("a server on recorded or synthetic chats", add_trace, run_trace),
    "overhead": cli.Command("what HTTP and text cost the engine", add_overhead, run_overhead),
    "compare": cli.Command("the engine beside transformers.generate", add_compare, run_compare),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m minisgl.benchmark`; returns the exit status."""
    return cli.main(sys.argv[1:] if argv is None else argv, COMMANDS)


if __name__ == "__main__":
    raise SystemExit(main())
