"""Settings of an engine, a scheduler and a server; `resolve` replaces "auto".

Generated from notebooks/01b_configuration.ipynb: edit there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from minisgl.config.model import Dtype, ModelConfig
from minisgl.config.rules import (
    Count,
    Positive,
    PositiveNumber,
    Text,
    Validated,
    as_tuple,
    refuse,
    spelled,
)


@dataclass(frozen=True)
class TPInfo(Validated):
    """Place of this process among the tensor-parallel ranks."""

    rank: Count = 0
    size: Positive = 1

    def __post_init__(self) -> None:
        """Refuse a rank outside the group."""
        super().__post_init__()
        if self.rank >= self.size:
            raise refuse("rank", f"below the group's size {self.size}", self.rank)


def as_group(size: Any) -> Any:
    """Convert a number of ranks to a TPInfo of rank 0; raise ValueError if it is not one."""
    if not isinstance(size, TPInfo) and (type(size) is not int or size < 1):
        raise ValueError("must be a positive number of ranks")
    return TPInfo(size=size) if type(size) is int else size


Group = Annotated[TPInfo, BeforeValidator(as_group)]
PathText = Annotated[Text, BeforeValidator(lambda p: str(p) if isinstance(p, Path) else p)]
Device = Annotated[str, spelled(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")]
Backend = Annotated[str, spelled("auto|(torch|triton|fi)(,(torch|triton|fi|fused))?",
                                 "auto, torch, triton, fi or two as in triton,fused")]  # fmt: skip
BatchSizes = Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Validated):
    """Settings of an engine; "auto" and None are replaced later.

    `memory_ratio` is the part of free memory for weights and KV cache, `distributed_timeout` is in
    seconds; `max_running_req` and `*_bs` count requests, `num_pages` pages; `page_size`
    and `max_seq_len_override` (None: the model's window) are in tokens. With
    `memory_trial_tokens` above 0 a trial prefill of that size measures the rest of a step's memory.
    `kernels` "torch" uses only PyTorch, "triton" uses fused kernels where they fit.
    `deterministic`: same bits in every batch, see chapter 05f. "fp8": see chapter 05g.
    `seed` serves requests without one; by default it comes from the operating system.
    """

    model_path: PathText | None = None
    tp: Group = TPInfo()  # or the number of ranks
    expert_parallel: bool = False  # whole experts on each rank, see chapter 11
    dtype: Dtype | Literal["auto"] = "auto"
    device: Device = "auto"
    max_running_req: Positive = 256
    attention_backend: Backend = "auto"
    cuda_graph_bs: BatchSizes | None = None
    cuda_graph_max_bs: Count | None = None
    prefill_graph_max_tokens: Count | None = None  # see chapter 07d
    page_size: Positive = 16
    memory_ratio: Annotated[PositiveNumber, Field(le=1)] = 0.9
    memory_trial_tokens: Count = 0
    distributed_timeout: PositiveNumber = 60.0
    use_dummy_weight: bool = False
    max_seq_len_override: Annotated[Count, Field(ge=2)] | None = None
    num_pages: Positive | None = None
    kernels: Literal["auto", "torch", "triton"] = "auto"
    num_speculative_tokens: Annotated[Count, Field(le=31)] = 0
    deterministic: bool = False
    quantization: Literal["auto", "none", "fp16", "int8", "fp8"] = "auto"
    kv_cache_dtype: Literal["model", "fp8"] = "model"
    seed: Count = field(default_factory=partial(secrets.randbits, 62))


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """An engine's config, with the order of requests and the limits of steps.

    `max_extend_tokens` is the budget of one prefill step; None: 8192 on a GPU, 1024 on a CPU.
    Pages for `reserve_tokens` of an answer are promised in advance; None promises the longest
    possible answer. `overlap` None: only on a GPU.
    """

    max_extend_tokens: Positive | None = None
    cache_type: Literal["radix", "naive"] = "radix"
    schedule_policy: Literal["fcfs", "fair"] = "fcfs"
    reserve_tokens: Positive | None = 512
    overlap: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig(SchedulerConfig):
    """A scheduler's config with the address of a server; port 0 is any free one.

    `num_tokenizer` counts tokenizer processes; 0 means that the detokenizer's process does both.
    A server has many users, so the default order of requests is fair.
    """

    schedule_policy: Literal["fcfs", "fair"] = "fair"
    host: Text = "127.0.0.1"
    port: Annotated[Count, Field(le=65535)] = 1919
    num_tokenizer: Count = 0
    served_model_name: Text | None = None
    api_key: Text | None = None


def max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of prompt plus output; ValueError if the model supports fewer."""
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
    """Resolve "auto" to a device; ranks take the GPUs of one host in order."""
    if device == "auto":
        import torch  # only here: reading a config must not import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{rank}" if device == "cuda" else device


def choose_dtype(dtype: str, device: str, model: ModelConfig) -> str:
    """Resolve "auto" to a dtype: float32 on a CPU, 16 bits on a GPU."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if model.dtype == "float32" else model.dtype


def choose_backend(config: EngineConfig, device: str, dtype: str, head_dim: int) -> str:
    """Resolve "auto" to an attention backend; raise ValueError if a named one cannot run.

    On a GPU, "auto" is Triton's tiled kernel for prefill and the fused one, if it fits, for decode.
    """
    backend, eight_bits = config.attention_backend, config.kv_cache_dtype == "fp8"
    if config.deterministic:  # one backend for prefill and decode
        only = "torch" if device == "cpu" else "triton"
        if backend not in ("auto", only):
            raise refuse("attention_backend", f"{only} for deterministic on {device}", backend)
        return only
    if device == "cpu":
        if {"fi", "fused"} & set(backend.split(",")):
            raise refuse("attention_backend", "torch or triton on device cpu", backend)
        return "torch" if backend == "auto" else backend
    narrow = dtype != "float32" and head_dim in (32, 64, 128, 256)
    if backend == "auto":
        return "triton,fused" if narrow else "triton"
    if "fused" in backend and not narrow:
        rule = "without 'fused' for float32 or heads that are not 32, 64, 128 or 256 wide"
        raise refuse("attention_backend", rule, backend)
    if eight_bits and "fi" in backend.split(","):
        raise refuse("attention_backend", "triton for kv_cache_dtype fp8", backend)
    return backend


C = TypeVar("C", bound=EngineConfig)


def resolve(config: C, model: ModelConfig) -> C:
    """Return a new config with device, dtype and backends chosen and checked against the model."""
    model.check_tp(config.tp.size, config.expert_parallel)
    max_seq_len(config, model)
    device = choose_device(config.device, config.tp.rank)
    dtype = choose_dtype(config.dtype, device, model)
    on_cpu = device == "cpu"
    settled: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "attention_backend": choose_backend(config, device, dtype, model.head_dim),
    }
    if config.kernels == "auto":
        settled["kernels"] = "torch" if on_cpu or config.deterministic else "triton"
    elif config.deterministic and config.kernels == "triton":
        raise refuse("kernels", "auto or torch for deterministic", config.kernels)
    if isinstance(config, SchedulerConfig):
        settled["max_extend_tokens"] = config.max_extend_tokens or (1024 if on_cpu else 8192)
        settled["overlap"] = not on_cpu if config.overlap is None else config.overlap
    return replace(config, **settled)
