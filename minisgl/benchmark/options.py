"""Flags that the benchmarks share, and what they mean: model, engine, sizes.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from minisgl.config import resolve_model_path
from minisgl.known_models import KNOWN_CONFIGS


class Parser(argparse.ArgumentParser):
    """Complains in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def at_least(low: int) -> Callable[[str], int]:
    """The type of a flag that must be an integer of at least `low`, which is not negative."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
        return int(text)

    return read


def known_name(name: str | None) -> str | None:
    """The hub id of a model by that, or by the part behind the slash; None if it is unknown."""
    if name is None or Path(name).is_dir():
        return None
    for known in KNOWN_CONFIGS:
        if name.lower() in (known.lower(), known.lower().split("/")[1]):
            return known
    return None


@contextmanager
def model_folder(name: str | None, shapes_only: bool) -> Iterator[Path]:
    """The model's folder; if its weights are not wanted, a known name gives one with a config."""
    known = known_name(name) if shapes_only else None
    if known is None:
        yield resolve_model_path(name)
        return
    with TemporaryDirectory(prefix="minisgl-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_CONFIGS[known]))
        yield Path(folder)


Group = argparse._ArgumentGroup


def add_integer(group: Group, flags: str, what: str, low: int = 1, **more: Any) -> None:
    """A flag, or several names of one, that takes an integer or as many as `nargs` says."""
    fields: dict[str, Any] = {"metavar": "N", "type": at_least(low), "help": what, **more}
    group.add_argument(*flags.split(), **fields)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, with which weights, where."""
    group = parser.add_argument_group("model")
    known = ", ".join(name.split("/")[1] for name in KNOWN_CONFIGS)
    which = f"folder, hub id, or with --dummy-weight one of {known}; none: the embedded model"
    group.add_argument("--model", "--model-path", metavar="M", default=None, help=which)
    random = "random weights of the model's shapes"
    group.add_argument("--dummy-weight", action="store_true", help=random)
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """How often, and where the results go."""
    group = parser.add_argument_group("run")
    add_integer(group, "--seed", "of prompts and lengths (default 0)", low=0, default=0)
    where = "also write results, hardware, versions and command here"
    group.add_argument("--json", metavar="OUT", type=Path, default=None, help=where)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What an engine may be told; the names are those of the server's command line."""
    group = parser.add_argument_group("engine")
    names = "auto, torch, triton, fi, or two for prefill,decode like fi,fused"
    group.add_argument("--attn", "--attention-backend", dest="attention_backend",
                       metavar="NAME", default=None, help=names)  # fmt: skip
    group.add_argument("--cache-type", choices=["radix", "hash", "naive"], default=None)
    group.add_argument("--kernels", choices=["auto", "torch", "triton"], default=None,
                       help="of norms, products and sums in a layer")  # fmt: skip
    group.add_argument("--decode-tensor-cores", action=argparse.BooleanOptionalAction,
                       default=None, help="in FlashInfer's decode")  # fmt: skip
    add_integer(group, "--page-size", "tokens per KV page")
    pages = "KV pages; none: what memory allows"
    add_integer(group, "--num-pages", pages, dest="num_page_override")
    group.add_argument("--memory-ratio", metavar="R", type=float, default=None,
                       help="share of memory for weights and KV")  # fmt: skip
    add_integer(group, "--max-running-req --max-running-requests", "requests in one batch")
    budget = "prompt tokens per step"
    add_integer(group, "--max-prefill-length", budget, dest="max_extend_tokens")
    add_integer(group, "--max-seq-len-override", "context window; none: the model's")
    add_integer(group, "--cuda-graph-max-bs", "largest captured batch; 0: none", low=0)
    add_integer(group, "--torch-compile-max-bs", "largest compiled batch; 0: none", low=0)
    group.add_argument("--disable-overlap", action="store_true", help="schedule, then compute")


ENGINE_FIELDS = (
    "dtype", "device", "max_seq_len_override", "attention_backend", "cache_type", "page_size",
    "num_page_override", "memory_ratio", "max_running_req", "max_extend_tokens", "kernels",
    "decode_tensor_cores", "cuda_graph_max_bs", "torch_compile_max_bs",
)  # fmt: skip


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as fields of `SchedulerConfig`; the others keep its defaults."""
    given = {name: getattr(args, name) for name in ENGINE_FIELDS}
    fields = {name: value for name, value in given.items() if value is not None}
    return {**fields, "use_dummy_weight": args.dummy_weight, "overlap": not args.disable_overlap}
