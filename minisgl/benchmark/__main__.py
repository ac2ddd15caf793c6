"""`python -m minisgl.benchmark`: the measurement, output and stored result of each command.

Generated from notebooks/13e_commands.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.benchmark import kernels, latency, load, offline, options, overhead, trace
from minisgl.benchmark.report import save
from minisgl.benchmark.roofline import Roofline
from minisgl.benchmark.serving import flags_of, served
from minisgl.benchmark.simulate import simulate_flags
from minisgl.benchmark.summary import summarize, table
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.config import flags
from minisgl.config.engine import SchedulerConfig, choose_dtype, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.heap import frozen_heap
from minisgl.engine.memory import NotEnoughMemory
from minisgl.llm import LLM
from minisgl.server.chat.client import ApiClient
from minisgl.server.options import in_flags

Result = tuple[dict[str, Any], int]  # the stored result, and the exit status


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return flags, as given or filled in, for the stored result."""
    return {name: getattr(args, name) for name in names}


@contextmanager
def started(folder: Path, args: argparse.Namespace) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Yield an engine built from flags, and its resolved config."""
    start = time.perf_counter()
    with LLM(folder, progress=sys.stderr.isatty(), **flags.engine_fields(args)) as llm:
        llm.generate([0], SamplingParams(max_tokens=1))
        first_token = time.perf_counter() - start
        engine = llm.scheduler.engine
        assert isinstance(engine, Engine)
        about = {name: getattr(engine.config, name) for name in flags.ENGINE_FIELDS}
        about |= {"num_pages": engine.num_pages, "makes_text": llm.tokenizer is not None}
        about["tp"] = engine.config.tp.size
        about["seconds_to_first_token"] = round(first_token, 2)
        about["graph_sizes"] = list(getattr(engine.runners.decode, "sizes", ()))
        with frozen_heap():
            yield llm, about


def roofline_of(folder: Path, args: argparse.Namespace) -> Roofline:
    """Build the roofline of the model on this device, whose ceilings are measured in seconds."""
    device, model = torch.device(args.device), ModelConfig.from_path(folder)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, model))
    rows = kernels.measure_rows(kernels.ceiling_rows(dtype, device), device)
    fields = ("quantization", "kv_cache_dtype")
    eight_bits = frozenset(name for name in fields if getattr(args, name, None) == "fp8")
    one, ranks = kernels.ceilings_of(rows), getattr(args, "tp", 1)
    together = kernels.Ceilings(one.bytes_per_s * ranks, one.flops_per_s * ranks)
    return Roofline(model, together, dtype.itemsize, eight_bits)


def run_offline(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all requests at once."""
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
    if found["joules_per_token"] is not None:
        print(f"{found['joules_per_token']:.3f} joules per output token")
    for name, seconds in floors.items():
        print(f"{name} floor {seconds:.3f} s = {found['output_tokens'] / seconds:,.0f} tokens/s; "
              f"the engine reaches {seconds / found['median_seconds']:.0%} of it")  # fmt: skip
    workload = chosen(args, "requests", "input_len", "output_len", "temperature", "seed")
    return {"engine": about, "workload": workload, **found,
            "ceilings": vars(roof.ceilings), "floors": floors}  # fmt: skip


def run_latency(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure fixed batches, and write traces if they are requested."""
    if args.profile is not None:
        options.check_writable("profile", trace_file(args, args.batch_sizes[0], args.sampling[0]))
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
        print("profile " + named(row))
    workload = {"prompt_len": args.prompt_len, "output_len": args.tokens, "seed": args.seed}
    return {"engine": about, "workload": workload, "rows": rows, "profile": traces,
            "ceilings": vars(roof.ceilings)}  # fmt: skip


def named(values: dict[str, Any]) -> str:
    """Format names and values for a line of the terminal."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def trace_file(args: argparse.Namespace, batch: int, name: str) -> Path:
    """Return the trace's path for a batch size and way of sampling, in a folder or alone."""
    path: Path = args.profile / "trace.json" if args.profile.is_dir() else args.profile
    return path.with_name(f"{path.stem}-bs{batch}-{name}{path.suffix}")


def profiles(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write a trace for every batch size and way of sampling."""
    return [
        latency.profile_decode(
            llm, batch, trace_file(args, batch, name),
            prompt_len=args.prompt_len, steps=20, sampling=name,
        )
        for batch in args.batch_sizes for name in args.sampling
    ]  # fmt: skip


def run_kernels(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure ceilings, GEMMs and decode attention in the model's shapes."""
    model, device = ModelConfig.from_path(folder), torch.device(args.device)
    dtype = getattr(torch, choose_dtype(args.dtype, device.type, model))
    rng, (low, high) = random.Random(args.seed), args.lengths
    lengths = np.array([rng.randint(low, high) for _ in range(args.batch)], dtype=np.int32)
    ceilings = kernels.measure_rows(kernels.ceiling_rows(dtype, device), device)
    rows = kernels.decode_rows(model, args.backends, args.page_sizes, lengths, dtype, device)
    for batch in (n for n in (1, 8, 64) if n < args.batch):
        few = (args.backends, args.page_sizes[-1:], lengths[:batch])
        rows += kernels.decode_rows(model, *few, dtype, device)
    rows += kernels.linear_rows(model, args.rows, dtype, device)
    if device.type == "cuda":  # our own kernels run only there
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


ENGINE_RUNS = {"offline": run_offline, "latency": run_latency, "kernels": run_kernels}


def run_on_engine(args: argparse.Namespace) -> Result:
    """Run one of the three commands that need no server."""
    options.fill_sizes(args)
    config = SchedulerConfig(**flags.engine_fields(args))  # reject before the measurement
    shapes_only = args.dummy_weight or args.command == "kernels"
    with options.model_folder(args.model, shapes_only) as folder:
        about = {"model": options.named_model(args.model), "dummy_weight": args.dummy_weight}
        options.check_lengths(args, max_seq_len(config, ModelConfig.from_path(folder)))
        return about | ENGINE_RUNS[args.command](folder, args), 0


async def load_server(
    args: argparse.Namespace, requests: Sequence[RandomRequest], clients: int | None
) -> load.LoadRun:
    """Load the server that the flags name."""
    async with ApiClient(args.url, flags.key_of(args)) as client:
        model = args.model or await load.first_model(client)
        target, show = load.Target(model, args.chat, not args.no_ignore_eos), sys.stderr.isatty()
        return await load.run_load(client, target, requests, clients, args.timeout, show)


def measured(
    args: argparse.Namespace,
    requests: Sequence[RandomRequest],
    terms: dict[str, Any],
    clients: int | None = None,
) -> dict[str, Any]:
    """Run a load, print its summary and return it together with `terms`."""
    with frozen_heap():  # a pause here would look like one of the server's
        run = asyncio.run(load_server(args, requests, clients))
    summary = {"load": terms, **summarize(run)}
    shown = named({name: value for name, value in terms.items() if value is not None})
    print(f"\n{shown or 'all at once'}\n{table(summary)}")
    for kind, detail in {r.error: r.detail for r in run.records if r.error and r.detail}.items():
        print(f"{kind}: {detail}", file=sys.stderr)  # one example of every kind of failure
    return summary


def status_of(runs: list[dict[str, Any]]) -> int:
    """Return the exit status: 130 after Ctrl-C, 1 without any answer, else 0."""
    if any(run["interrupted"] for run in runs):
        return 130
    return 0 if any(run["completed"] for run in runs) else 1


def run_online(args: argparse.Namespace) -> Result:
    """Measure one run, or one for each rate."""
    runs: list[dict[str, Any]] = []
    for asked in args.rate or [math.inf]:
        rate = asked if math.isfinite(asked) else None
        requests = load.online_workload(
            args.requests, args.input_len, args.output_len, args.seed + len(runs), rate
        )
        terms = {"rate": rate, "concurrency": args.concurrency}
        run = measured(args, requests, terms, args.concurrency)
        runs.append(run)
        if run["interrupted"]:
            break
    workload = chosen(args, "requests", "input_len", "output_len", "seed", "timeout", "chat")
    return {"workload": workload, "runs": runs}, status_of(runs)


def run_trace(args: argparse.Namespace) -> Result:
    """Replay a trace, or synthetic chats from a seed."""
    if args.trace is None:
        lines = trace.synthesize(seed=args.seed)[: args.requests]
    else:
        lines = trace.read_trace(args.trace, args.requests)
    tokens, known = sum(line.input_length for line in lines), sum(trace.reusable_tokens(lines))
    about = {"requests": len(lines), "input_tokens": tokens, "reusable_tokens": known}
    about["output_tokens"] = sum(line.output_length for line in lines)
    about["chats"] = sum(line.parent_chat_id < 0 for line in lines)
    print(named(about))
    run = measured(args, trace.requests_of(lines, args.scale), {"rate": None, "scale": args.scale})
    print(f"the trace allows {known / tokens:.1%} of the prompt tokens from a cache")
    results = {"trace": about, "scale": args.scale, "seed": args.seed, "runs": [run]}
    return results, status_of([run])


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's fields, with room for all streams and for the server."""
    fields = {**flags.engine_fields(args), "device": args.device}
    fields.setdefault("max_running_req", max(256, args.streams))
    fields.setdefault("schedule_policy", "fair")  # a server's default, not an engine's
    if args.device.startswith("cuda"):
        # The second to start has less memory, which must not change its captured sizes.
        fields.setdefault("cuda_graph_max_bs", fields["max_running_req"])
        if "num_pages" not in fields:
            fields.setdefault("memory_ratio", 0.4)
    return fields


def run_overhead(args: argparse.Namespace) -> Result:
    """Measure engine and server in turns."""
    options.fill_sizes(args)
    fields = engine_fields(args)
    ends = (tuple(args.input_len), tuple(args.output_len))
    with (
        options.model_folder(args.model, args.dummy_weight) as plain,
        overhead.with_tokenizer(plain, args.dummy_weight) as (folder, tokenizer),
    ):
        model = ModelConfig.from_path(folder)
        options.check_lengths(args, max_seq_len(SchedulerConfig(**fields), model))
        requests = random_workload(model.vocab_size, args.streams, *ends, args.seed)
        with LLM(folder, **fields) as llm:
            fields["num_pages"] = llm.scheduler.engine.num_pages
            with served(folder, flags_of(fields)) as child:
                how = (args.temperature, args.repeats, args.seed + 1)
                row = overhead.measure_overhead(llm, child, requests, *how)
    print(overhead.overhead_text(row))
    names = ("input_len", "output_len", "temperature", "repeats", "seed", "dummy_weight")
    about = {"model": options.named_model(args.model), "tokenizer": tokenizer, "engine": fields}
    return {**about, "workload": chosen(args, *names), **row}, 0


def run_simulate(args: argparse.Namespace) -> Result:
    """Run one simulated replica of the given number, or of the number that a target needs."""
    with options.model_folder(args.model, True) as folder:
        replicas, summary = simulate_flags(ModelConfig.from_path(folder), args)
    print(f"{replicas} replicas, {replicas * args.tp} GPUs; one replica:\n{table(summary)}")
    print(named({n: summary[n] for n in ("busy", "joules_per_token", "cost_per_million")}))
    names = ("rate", "concurrency", "requests", "input_len", "output_len", "gpu", "tp", "router")
    about = chosen(args, *names) | {"model": options.named_model(args.model), "replicas": replicas}
    return {"load": about, **summary}, 0


RUNS = dict.fromkeys(ENGINE_RUNS, run_on_engine) | {
    "online": run_online, "trace": run_trace, "overhead": run_overhead,
    "simulate": run_simulate,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m minisgl.benchmark` and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = options.build_parser().parse_args(given)
    try:
        options.check_ranges(args)
        if args.json is not None:
            options.check_writable("json", args.json)
        results, status = RUNS[args.command](args)
        if args.json is not None:
            command = options.stored_command("minisgl.benchmark", given)
            save(args.json, {"benchmark": args.command, **results}, command)
    except (ValueError, OSError, ImportError, NotEnoughMemory) as error:
        print(f"python -m minisgl.benchmark: {in_flags(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    raise SystemExit(main())
