"""The engine's flags, for every command line: names, what they mean, and which field they set.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from minisgl.config.engine import SchedulerConfig

Group = argparse._ArgumentGroup


class Flag(NamedTuple):
    """One field of `SchedulerConfig` on a command line."""

    names: str  # several, with spaces between
    field: str
    what: str  # for the help
    options: dict[str, Any]  # for `add_argument`


def counted(names: str, field: str, what: str, *, word: str | None = None) -> Flag:
    """A flag that takes an integer; its range is the config's business. `word` stands for None."""

    def count(text: str) -> int | None:
        return None if word is not None and text == word else int(text)

    return Flag(names, field, what, {"metavar": "N", "type": count})


def add_model_flags(group: Group, which: str) -> None:
    """Which model, with which weights, where; `which` says what a model may be."""
    group.add_argument("--model", "--model-path", metavar="MODEL", default=None, help=which)
    random = "random weights of the model's shapes, to measure speed"
    group.add_argument("--dummy-weight", action="store_true", help=random)
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


ENGINE_FLAGS = (
    Flag("--attention-backend --attn", "attention_backend",
         "torch, triton, fi, or two for prefill,decode; fused only decodes; auto: fi,fused on a "
         "GPU, triton,fused without FlashInfer, torch on a CPU", {"metavar": "NAME"}),
    Flag("--kernels", "kernels", "who computes norms, products and sums of a layer",
         {"choices": ("auto", "torch", "triton")}),
    Flag("--cache-type", "cache_type", "prefix cache", {"choices": ("radix", "naive")}),
    counted("--page-size", "page_size", "tokens per KV page (default: 16)"),
    counted("--num-pages", "num_page_override", "KV pages (default: what memory allows)"),
    Flag("--memory-ratio", "memory_ratio", "share of memory for weights and KV",
         {"metavar": "R", "type": float}),
    counted("--memory-trial-tokens", "memory_trial_tokens",
            "size the KV cache by a trial prefill of so many tokens; 0: by the share alone"),
    counted("--max-seq-len-override", "max_seq_len_override",
            "context window in tokens (default: the model's)"),
    counted("--max-running-requests --max-running-req", "max_running_req",
            "requests in one batch"),
    counted("--max-prefill-length", "max_extend_tokens",
            "prompt tokens per step (default: 8192, on a CPU 1024)"),
    Flag("--schedule-policy", "schedule_policy",
         "who goes first: in order of arrival, or in turns between clients",
         {"choices": ("fcfs", "fair")}),
    counted("--reserve-tokens", "reserve_tokens",
            "tokens of an answer whose pages are promised ahead; all: the longest possible one",
            word="all"),
    counted("--cuda-graph-max-bs", "cuda_graph_max_bs",
            "largest captured batch; 0: none (default: 256, with little memory 160)"),
    counted("--torch-compile-max-bs", "torch_compile_max_bs",
            "largest decode batch for torch.compile, in place of --kernels; 0: none; "
            "a first start compiles for many seconds"),
    Flag("--disable-overlap", "overlap", "schedule and compute in turns",
         {"action": "store_const", "const": False}),
)  # fmt: skip
ENGINE_FIELDS = ("dtype", "device", *(flag.field for flag in ENGINE_FLAGS))


def add_engine_flags(group: Group, defaults: SchedulerConfig) -> None:
    """What an engine may be told; the help shows what `defaults` has instead."""
    for names, field, what, more in ENGINE_FLAGS:
        value = getattr(defaults, field)
        shown = "" if value is None or field == "overlap" else f" (default: {value})"
        group.add_argument(
            *names.split(), dest=field, default=argparse.SUPPRESS, help=what + shown, **more
        )


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as fields of `SchedulerConfig`; the others keep its defaults."""
    given = {name: value for name, value in vars(args).items() if name in ENGINE_FIELDS}
    return {**given, "use_dummy_weight": args.dummy_weight}


KEY_VARIABLE = "MINISGL_API_KEY"


def add_key_flag(group: Group, what: str) -> None:
    """The key of a server, for the server and for its clients."""
    where = f"better in {KEY_VARIABLE} in the environment: other users can read a command line"
    group.add_argument("--api-key", metavar="KEY", default=None, help=f"{what}; {where}")


def key_of(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key of the command line, else of the environment."""
    key: str | None = args.api_key
    return environment.get(KEY_VARIABLE) if key is None else key
