"""The engine's flags, for every command line: names, help texts and config fields.

Generated from notebooks/01b_configuration.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from minisgl.config.engine import SchedulerConfig

Group = argparse._ArgumentGroup


class Flag(NamedTuple):
    """One field of `SchedulerConfig` on a command line."""

    names: str  # several, with spaces between
    field: str
    what: str  # for the help
    more: Mapping[str, Any] = {}  # for `add_argument`, beyond the field's type


def argument_options(field: str) -> dict[str, Any]:
    """Return the `add_argument` options for a field of `SchedulerConfig`, by its type."""
    hint = get_type_hints(SchedulerConfig)[field]
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    metavars = {int: "N", float: "R", str: "NAME"}
    kind = next(kind for kind in metavars if hint in (kind, kind | None))
    return {"type": kind, "metavar": metavars[kind]}


def number_or(word: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make the type of a flag that takes a number, or a word that stands for None."""

    def read(text: str) -> Any:
        return None if text == word else kind(text)

    read.__name__ = f"number-or-{word}"  # argparse prints it in its error
    return read


ENGINE_FLAGS = (
    Flag("--tensor-parallel-size --tp", "tp", "ranks (default: 1)", {"type": int, "metavar": "N"}),
    Flag("--expert-parallel", "expert_parallel", "shard experts by rank", {"action": "store_true"}),
    Flag("--attention-backend --attn", "attention_backend",
         "torch, triton, fi, or two for prefill,decode; fused only decodes; auto: triton,fused on "
         "a GPU, torch on a CPU; fi,fused (FlashInfer) may suit prompts of 4,096 tokens and more"),
    Flag("--kernels", "kernels", "kernels for norms, few-row GEMMs and residual adds"),
    Flag("--cache-type", "cache_type", "prefix cache"),
    Flag("--page-size", "page_size", "tokens per KV page"),
    Flag("--num-pages", "num_pages", "KV pages (default: what memory allows)"),
    Flag("--memory-ratio", "memory_ratio", "share of memory for weights and KV"),
    Flag("--memory-trial-tokens", "memory_trial_tokens",
         "size the KV cache by a trial prefill of N tokens; 0: by --memory-ratio alone"),
    Flag("--max-seq-len-override", "max_seq_len_override", "context window (default: the model's)"),
    Flag("--max-running-requests --max-running-req", "max_running_req", "requests in one batch"),
    Flag("--max-prefill-length", "max_extend_tokens", "prompt tokens per step (8192; CPU: 1024)"),
    Flag("--schedule-policy", "schedule_policy", "fair: clients in turn; fcfs: one can stop all"),
    Flag("--reserve-tokens", "reserve_tokens",
         "answer tokens whose pages are reserved in advance; all: the longest possible answer",
         {"type": number_or("all", int), "metavar": "N"}),
    Flag("--num-speculative-tokens", "num_speculative_tokens", "n-gram drafts per step; 0: none"),
    Flag("--cuda-graph-max-bs", "cuda_graph_max_bs", "largest captured batch (256); 0: no graph"),
    Flag("--prefill-graph-max-tokens", "prefill_graph_max_tokens", "most tokens captured; 0: none"),
    Flag("--quantization", "quantization",
         "weights; none: as stored, float32 on a CPU; auto: fp16 for large 16-bit ones on a CPU"),
    Flag("--kv-cache-dtype", "kv_cache_dtype", "KV-cache format; model: same as activations"),
    Flag("--deterministic", "deterministic", "batch-invariant results", {"action": "store_true"}),
    Flag("--disable-overlap", "overlap", "do not overlap scheduling and compute",
         {"action": "store_const", "const": False}),
)  # fmt: skip

ENGINE_FIELDS = ("dtype", "device", "seed", *(flag.field for flag in ENGINE_FLAGS))


def add_model_flags(group: Group, which: str) -> None:
    """Add the flags that choose a model, its weights and device; `which` describes the model."""
    group.add_argument("--model", "--model-path", metavar="MODEL", default=None, help=which)
    random = "random weights of the model's shapes, to measure speed"
    group.add_argument("--dummy-weight", action="store_true", help=random)
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def add_engine_flags(group: Group, defaults: SchedulerConfig) -> None:
    """Add the engine's flags; their help shows the values of `defaults`."""
    for names, name, what, more in ENGINE_FLAGS:
        value = getattr(defaults, name)
        plain = value is None or value is False or name in ("overlap", "tp")
        text = what if plain else f"{what} (default: {value})"
        how = more if "action" in more or "type" in more else argument_options(name)
        group.add_argument(*names.split(), dest=name, default=argparse.SUPPRESS, help=text, **how)


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that were given, as fields of `SchedulerConfig`."""
    given = {name: value for name, value in vars(args).items() if name in ENGINE_FIELDS}
    return {**given, "use_dummy_weight": args.dummy_weight}


KEY_VARIABLE = "MINISGL_API_KEY"


def add_key_flag(group: Group, what: str) -> None:
    """Add the flag for a server's API key, for the server and for its clients."""
    what += f"; prefer {KEY_VARIABLE} in the environment: others can read command lines"
    group.add_argument("--api-key", metavar="KEY", default=None, help=what)


def key_of(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key from the command line, or else from the environment."""
    return environment.get(KEY_VARIABLE) if args.api_key is None else args.api_key
