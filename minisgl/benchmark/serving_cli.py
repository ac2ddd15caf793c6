"""The commands that measure a server: online, trace and overhead.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path
from typing import Any

from minisgl.benchmark import cli, options
from minisgl.benchmark.client import Api
from minisgl.benchmark.dialect import Dialect, negotiate
from minisgl.benchmark.load import Ask, Outcome, random_asks, run_load
from minisgl.benchmark.overhead import measure_overhead, offline_engine, overhead_text
from minisgl.benchmark.plot import need_matplotlib, save_plot
from minisgl.benchmark.serving import flags_of, served
from minisgl.benchmark.summary import summarize, table
from minisgl.benchmark.synthetic import with_tokenizer
from minisgl.benchmark.trace import (
    TraceLine,
    asks_of,
    read_trace,
    reusable_tokens,
    synthesize,
    write_trace,
)
from minisgl.benchmark.workload import random_workload
from minisgl.config.flags import add_key_flag, key_of
from minisgl.engine.heap import frozen_heap


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


def add_server_flags(parser: argparse.ArgumentParser, needed: bool = True) -> None:
    """Which server, and how to speak with it."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", required=needed, help="like http://127.0.0.1:1919, with /v1 or not")
    first = "name in the requests (default: the first of /v1/models)"
    group.add_argument("--model", metavar="NAME", default=None, help=first)
    add_key_flag(group, "bearer token")
    group.add_argument("--timeout", metavar="S", type=positive, default=600.0,
                       help="seconds for one answer (default 600)")  # fmt: skip
    how = "chats of one message (default: completions, as token ids if the server takes them)"
    group.add_argument("--chat", action="store_true", help=how)
    which = "full-length answers (default: if the server is minisgl, mini-sglang, sglang or vllm)"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
                       help=which)  # fmt: skip


def add_plot_flag(parser: argparse.ArgumentParser) -> None:
    """Where a picture goes."""
    parser.add_argument("--plot", metavar="OUT", type=Path, default=None,
                        help="also draw .svg, .png or .pdf")  # fmt: skip


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
        size = f"{name} tokens, drawn uniformly (default 32 128)"
        options.add_integer(group, f"--{name}-len", size, nargs=2, default=[32, 128],
                            metavar=("LOW", "HIGH"))  # fmt: skip
    add_plot_flag(parser)


async def one_run(
    args: argparse.Namespace, asks: list[Ask], clients: int | None
) -> tuple[Dialect, Outcome]:
    """Speak with the server, then load it."""
    async with Api(args.url, key_of(args), args.timeout) as api:
        dialect, notices = await negotiate(
            api, args.model, chat=args.chat, ignore_eos=args.ignore_eos
        )
        for notice in notices:
            print(f"notice: {notice}", file=sys.stderr)
        outcome = await run_load(api, dialect, asks, clients, progress=sys.stderr.isatty())
    return dialect, outcome


def measured(
    args: argparse.Namespace, asks: list[Ask], load: dict[str, Any], clients: int | None = None
) -> dict[str, Any]:
    """One run as its summary, which is printed, with what was spoken and loaded."""
    with frozen_heap():  # a pause of ours would look like one of the server's
        dialect, outcome = asyncio.run(one_run(args, asks, clients))
    summary = {"load": load, "dialect": vars(dialect), **summarize(outcome)}
    named = ", ".join(f"{name} {value}" for name, value in load.items() if value is not None)
    print(f"\n{named or 'all at once'}\n{table(summary)}")
    seen: set[str] = set()
    for record in outcome.records:  # one example of every kind of failure
        if record.error and record.error not in seen and record.detail:
            seen.add(record.error)
            print(f"{record.error}: {record.detail}", file=sys.stderr)
    return summary


def status_of(runs: list[dict[str, Any]]) -> int:
    """130 after Ctrl-C, 1 if nothing was answered, else 0."""
    if any(run["interrupted"] for run in runs):
        return 130
    return 0 if any(run["completed"] for run in runs) else 1


def warn_if_cached(run: dict[str, Any]) -> None:
    """Random prompts share nothing: what is cached of them was sent in an earlier run."""
    if (run["cached_tokens"] or 0) > 0.1 * run["input_tokens"]:
        why = f"{run['cached_tokens']} of {run['input_tokens']} prompt tokens were cached"
        print(f"notice: {why}, perhaps of a run with the same --seed", file=sys.stderr)


def run_online(args: argparse.Namespace) -> cli.Result:
    """One run, or one for each rate."""
    for name in ("input_len", "output_len"):
        low, high = getattr(args, name)
        if low > high:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: LOW must not exceed HIGH, got {low} {high}")
    if args.plot is not None:
        need_matplotlib(args.plot)
    runs: list[dict[str, Any]] = []
    for asked in args.rate or [math.inf]:
        rate = asked if math.isfinite(asked) else None
        asks = random_asks(
            args.requests, tuple(args.input_len), tuple(args.output_len),
            args.seed + len(runs), rate,
        )  # fmt: skip
        load = {"rate": rate, "concurrency": args.concurrency}
        runs.append(measured(args, asks, load, args.concurrency))
        warn_if_cached(runs[-1])
        if runs[-1]["interrupted"]:
            break
    if args.plot is not None:
        save_plot(args.plot, runs, f"{runs[0]['dialect']['model']}, {args.requests} requests each")
    names = ("requests", "input_len", "output_len", "seed", "timeout")
    workload = {name: getattr(args, name) for name in names}
    return {"benchmark": "online", "workload": workload, "runs": runs}, status_of(runs)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Flags of the replay."""
    add_server_flags(parser, needed=False)
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", metavar="FILE", type=Path, default=None,
                       help="JSON lines in the Qwen format; default: synthetic chats")  # fmt: skip
    group.add_argument("--synthesize", metavar="FILE", type=Path, default=None,
                       help="write the synthetic trace; without --url nothing is sent")  # fmt: skip
    scale = "of the time between requests: below 1 is more load (default 1)"
    group.add_argument("--scale", metavar="S", type=positive, default=1.0, help=scale)
    options.add_integer(group, "--requests", "only the first N; default: all")
    add_plot_flag(parser)


def lines_for(args: argparse.Namespace) -> list[TraceLine]:
    """The trace that the flags name."""
    if args.trace is None:
        lines = synthesize(seed=args.seed)[: args.requests]
    elif args.synthesize is not None:
        raise ValueError("synthesize: writes a synthetic trace, so it does not go with --trace")
    else:
        lines = read_trace(args.trace, args.requests)
    if args.synthesize is not None:
        write_trace(args.synthesize, lines)
        print(f"{len(lines)} requests written to {args.synthesize}")
    return lines


def facts_of(lines: list[TraceLine]) -> dict[str, Any]:
    """What a trace holds, and how much of its prompts a cache could have."""
    tokens = sum(line.input_length for line in lines)
    known = sum(reusable_tokens(lines))
    return {
        "requests": len(lines), "chats": sum(line.parent_chat_id < 0 for line in lines),
        "seconds": round(lines[-1].timestamp - lines[0].timestamp, 3),
        "input_tokens": tokens, "output_tokens": sum(line.output_length for line in lines),
        "reusable_tokens": known, "reusable_share": round(known / tokens, 4),
    }  # fmt: skip


def run_trace(args: argparse.Namespace) -> cli.Result:
    """Write a trace, replay one, or both."""
    if args.url is None and args.synthesize is None:
        raise ValueError("url: must be given to replay a trace (or --synthesize FILE to write one)")
    if args.plot is not None:
        need_matplotlib(args.plot)
    lines = lines_for(args)
    facts = facts_of(lines)
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))
    results = {"benchmark": "trace", "trace": facts, "scale": args.scale, "seed": args.seed}
    if args.url is None:
        return results, 0
    run = measured(args, asks_of(lines, args.scale), {"rate": None, "scale": args.scale})
    if run["cached_tokens"] is not None and run["input_tokens"]:
        run["cached_share"] = round(run["cached_tokens"] / run["input_tokens"], 4)
        print(f"cached {run['cached_share']:.1%} of the prompt tokens; the trace allows "
              f"{facts['reusable_share']:.1%} in blocks of 16")  # fmt: skip
    else:
        print("the server does not report cached tokens; the trace allows "
              f"{facts['reusable_share']:.1%} in blocks of 16")  # fmt: skip
    if args.plot is not None:
        save_plot(args.plot, [run], f"{run['dialect']['model']}, trace at scale {args.scale}")
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
    with (
        options.model_folder(args.model, args.dummy_weight) as plain,
        with_tokenizer(plain, args.dummy_weight) as (folder, tokenizer),
        offline_engine(folder, fields) as engine,
    ):
        fields["num_page_override"] = engine.about["num_pages"]
        requests = random_workload(
            engine.about["vocab_size"], args.streams, tuple(args.input_len),
            tuple(args.output_len), args.seed,
        )  # fmt: skip
        with served(folder, flags_of(fields)) as child:
            row = measure_overhead(engine, child, requests, temperature=args.temperature,
                                   repeats=args.repeats, seed=args.seed + 1)  # fmt: skip
    print(overhead_text(row))
    about = {"model": options.known_name(args.model) or args.model or "the embedded model",
             "dummy_weight": args.dummy_weight, "tokenizer": tokenizer}  # fmt: skip
    sizes = {name: getattr(args, name) for name in ("input_len", "output_len", "temperature",
                                                    "repeats", "seed")}  # fmt: skip
    engine_about = {**fields, **engine.about}
    return {"benchmark": "overhead", **about, "engine": engine_about, "workload": sizes, **row}, 0


COMMANDS = {
    "online": cli.Command("a server under load, by arrivals or by clients", add_online, run_online),
    "trace": cli.Command("a server on recorded or synthetic chats", add_trace, run_trace),
    "overhead": cli.Command(
        "what HTTP and text cost beside the engine", add_overhead, run_overhead
    ),
}
