"""What an engine, a scheduler and a server may use; "auto" is settled by `resolve`.

Generated from notebooks/01_requests.ipynb: edit there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from minisgl.config.model import DTYPES, ModelConfig
from minisgl.config.rules import (
    MAX_SEED,
    Rule,
    apply_rules,
    flag,
    integer,
    number,
    optional,
    refuse,
    several,
    text,
    word,
)


@dataclass(frozen=True)
class TPInfo:
    """Place of this process among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Refuse a rank outside the group."""
        integer(1)("tp.size", self.size)
        if integer(0)("tp.rank", self.rank) >= self.size:
            raise refuse("tp.rank", f"below tp.size {self.size}", self.rank)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may use; "auto" and None stand for a choice that is made later.

    `memory_ratio` is the part of free memory for weights and KV cache, `distributed_timeout` is in
    seconds, `*_bs` are batch sizes in requests, `max_seq_len_override` is in tokens. With
    `memory_trial_tokens` above 0 a trial prefill of so many tokens says what a step needs besides.
    `kernels` "torch" keeps to plain PyTorch, "triton" takes fused kernels where they fit.
    """

    model_path: str | None = None
    tp: TPInfo = TPInfo()
    dtype: str = "auto"
    device: str = "auto"
    max_running_req: int = 256
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    cuda_graph_bs: tuple[int, ...] | None = None
    cuda_graph_max_bs: int | None = None
    page_size: int | None = None
    memory_ratio: float = 0.9
    memory_trial_tokens: int = 0
    distributed_timeout: float = 60.0
    use_dummy_weight: bool = False
    max_seq_len_override: int | None = None
    num_page_override: int | None = None
    kernels: str = "auto"
    torch_compile_max_bs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        apply_rules(self, RULES[type(self)], {})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """An engine's config, who runs when, and how steps are filled.

    `max_extend_tokens` is the budget of one prefill step; None: 8192 on a GPU, 1024 on a CPU.
    `reserve_tokens` of an answer have their pages promised ahead; None promises the longest
    possible answer. `overlap` None: on a GPU.
    """

    max_extend_tokens: int | None = None
    cache_type: Literal["radix", "naive"] = "radix"
    schedule_policy: Literal["fcfs", "fair"] = "fcfs"
    reserve_tokens: int | None = 512
    overlap: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(SchedulerConfig):
    """A scheduler's config and where to serve; port 0 is any free one.

    `num_tokenizer` counts tokenizer processes; 0 means that the detokenizer's process does both.
    Strangers share a server, so requests are taken in a fair order.
    """

    schedule_policy: Literal["fcfs", "fair"] = "fair"

    host: str = "127.0.0.1"
    port: int = 1919
    num_tokenizer: int = 0
    served_model_name: str | None = None
    api_key: str | None = None


BACKENDS = ("torch", "triton", "fi", "fused")


def path_text(name: str, value: Any) -> str:
    """Rule for a path; it comes out as a string."""
    return text(name, str(value) if isinstance(value, Path) else value)


def tp_info(name: str, value: Any) -> TPInfo:
    """Rule for the field `tp`."""
    if not isinstance(value, TPInfo):
        raise refuse(name, "a TPInfo", value)
    return value


def device_name(name: str, value: Any) -> str:
    """Rule for a device."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise refuse(name, "auto, cpu, cuda or cuda:N", value)
    return value


def backend_name(name: str, value: Any) -> str:
    """Rule for "auto", one attention backend, or a pair for prefill and decode."""
    parts = value.split(",") if isinstance(value, str) else []
    if value != "auto" and not (len(parts) in (1, 2) and all(part in BACKENDS for part in parts)):
        raise refuse(name, f"auto, one of {', '.join(BACKENDS)}, or a pair like fi,fused", value)
    if parts[0] == "fused":
        raise refuse(name, "a pair with another backend for prefill, like fi,fused", value)
    return str(value)


ENGINE_RULES: dict[str, Rule] = {
    "model_path": optional(path_text),
    "tp": tp_info,
    "dtype": word("auto", *DTYPES),
    "device": device_name,
    "max_running_req": integer(1),
    "attention_backend": backend_name,
    "moe_backend": word("auto", "torch", "triton"),
    "cuda_graph_bs": optional(several(integer(1), "batch sizes")),
    "cuda_graph_max_bs": optional(integer(0)),
    "page_size": optional(integer(1)),
    "memory_ratio": number(0, 1, above=True),
    "memory_trial_tokens": integer(0),
    "distributed_timeout": number(0, above=True),
    "use_dummy_weight": flag,
    "max_seq_len_override": optional(integer(2)),
    "num_page_override": optional(integer(1)),
    "kernels": word("auto", "torch", "triton"),
    "torch_compile_max_bs": integer(0),
    "seed": integer(0, MAX_SEED),
}

SCHEDULER_RULES: dict[str, Rule] = {
    **ENGINE_RULES,
    "max_extend_tokens": optional(integer(1)),
    "cache_type": word("radix", "naive"),
    "schedule_policy": word("fcfs", "fair"),
    "reserve_tokens": optional(integer(1)),
    "overlap": optional(flag),
}
SERVER_RULES: dict[str, Rule] = {
    **SCHEDULER_RULES,
    "host": text,
    "port": integer(0, 65535),
    "num_tokenizer": integer(0),
    "served_model_name": optional(text),
    "api_key": optional(text),
}
RULES: dict[type, dict[str, Rule]] = {
    EngineConfig: ENGINE_RULES,
    SchedulerConfig: SCHEDULER_RULES,
    ServerConfig: SERVER_RULES,
}


def max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    """Longest text in tokens, prompt and answer together; ValueError if the model cannot do it."""
    window = model.rotary.max_position
    override = config.max_seq_len_override
    if override is not None and override > window:
        raise refuse("max_seq_len_override", f"at most the model's window of {window}", override)
    length = window if override is None else override
    if model.sliding_window is not None and length > model.sliding_window:
        raise ValueError(
            f"sliding_window: full attention is exact only up to {model.sliding_window} tokens, "
            f"got a window of {length}; set max_seq_len_override={model.sliding_window} or less"
        )
    return length


def choose_device(device: str, rank: int) -> str:
    """The device that "auto" means here; ranks take the GPUs of one host in order."""
    if device == "auto":
        import torch  # only here: reading a config must not cost the import of torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{rank}" if device == "cuda" else device


def choose_dtype(dtype: str, device: str, model: ModelConfig) -> str:
    """The dtype that "auto" means: a CPU computes in float32, a GPU in 16 bits."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if model.dtype == "float32" else model.dtype


def choose_backend(backend: str, device: str, dtype: str, head_dim: int) -> str:
    """The attention backend that "auto" means on a device; ValueError if a named one cannot run.

    On a GPU it is FlashInfer for prefill and our fused kernel for decode, where both can be had.
    """
    if device == "cpu":
        if backend != "auto" and {"fi", "fused"} & set(backend.split(",")):
            raise refuse("attention_backend", "torch or triton on device cpu", backend)
        return "torch" if backend == "auto" else backend
    narrow = dtype != "float32" and head_dim in (32, 64, 128, 256)
    if backend != "auto":
        if "fused" in backend and not narrow:
            rule = "without 'fused' for float32 or heads that are not 32, 64, 128 or 256 wide"
            raise refuse("attention_backend", rule, backend)
        return backend
    prefill = "fi" if narrow and find_spec("flashinfer") is not None else "triton"
    return f"{prefill},fused" if narrow else prefill


C = TypeVar("C", bound=EngineConfig)
S = TypeVar("S", bound=SchedulerConfig)
DEFAULT_PAGE_SIZE = 16


def settle_steps(config: S, device: str) -> S:
    """How long a prefill step may be, and whether to plan ahead of the device."""
    budget = 1024 if device == "cpu" else 8192
    return replace(
        config,
        max_extend_tokens=config.max_extend_tokens or budget,
        overlap=device != "cpu" if config.overlap is None else config.overlap,
    )


def resolve(config: C, model: ModelConfig) -> C:
    """A new config in which device, dtype, backends and page size are settled and fit the model."""
    model.check_tp(config.tp.size)
    max_seq_len(config, model)
    device = choose_device(config.device, config.tp.rank)
    dtype = choose_dtype(config.dtype, device, model)
    moe = "torch" if device == "cpu" else "triton"
    if isinstance(config, SchedulerConfig):
        config = settle_steps(config, device)
    return replace(
        config,
        device=device,
        dtype=dtype,
        attention_backend=choose_backend(config.attention_backend, device, dtype, model.head_dim),
        moe_backend=moe if config.moe_backend == "auto" else config.moe_backend,
        kernels=moe if config.kernels == "auto" else config.kernels,
        page_size=DEFAULT_PAGE_SIZE if config.page_size is None else config.page_size,
    )
