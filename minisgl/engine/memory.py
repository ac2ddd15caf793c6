"""The number of KV pages that fit: byte counts, and the minimum over all ranks.

Generated from notebooks/07c_memory.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn

from minisgl.config.engine import EngineConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.fp8 import FP8, check_device
from minisgl.kvcache.fp8_pool import Fp8KVPool
from minisgl.kvcache.pool import KVPool, kv_bytes_per_token
from minisgl.parallel.comm import Comm

GIB = 1 << 30


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def pages_by_ratio(
    *, free_before: int, model_bytes: int, memory_ratio: float, page_bytes: int
) -> int:
    """Return the pages in a fixed share of the memory free before the model, less the model.

    The dummy page takes memory but is not counted. Zero or less means that nothing fits.
    """
    available = int(free_before * memory_ratio) - model_bytes
    return available // page_bytes - 1


def pages_by_peak(
    *, free_now: int, peak_bytes: int, current_bytes: int, memory_ratio: float, page_bytes: int
) -> int:
    """Return the pages in a share of the memory free after loading, less the largest step's.

    `peak_bytes - current_bytes`, the temporary memory of a trial prefill, stays reserved.
    """
    available = int(free_now * memory_ratio) - (peak_bytes - current_bytes)
    return available // page_bytes - 1


def tensor_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights and tables of a model."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def peak_of(call: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return torch's bytes on a GPU before a call, and at its peak; 0, 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0, 0
    torch.cuda.reset_peak_memory_stats(device)
    current = torch.cuda.memory_allocated(device)
    call()
    return current, torch.cuda.max_memory_allocated(device)


class NotEnoughMemory(RuntimeError):
    """An engine does not fit into memory; the message has the numbers."""


def cap_on_cpu(
    num_pages: int, *, page_bytes: int, page_size: int, max_seq_len: int, max_running_req: int
) -> int:
    """Limit the pool on a CPU, where memory is shared, to 1 GiB, or one full window if larger.

    Never more than `max_running_req` full windows, the most that can be in use at once.
    """
    window = pages_for(max_seq_len, page_size)
    modest = max(GIB // page_bytes, window)
    return min(num_pages, modest, window * max_running_req)


def require_pages(num_pages: int, *, page_bytes: int, page_size: int, max_seq_len: int) -> int:
    """Return `num_pages`, or raise `NotEnoughMemory` if one full request would not fit."""
    window = pages_for(max_seq_len, page_size)
    if num_pages >= window:
        return num_pages
    have = max(num_pages, 0)
    raise NotEnoughMemory(
        f"KV cache: room for {have} pages of {page_size} tokens, {have * page_bytes / GIB:.2f} "
        f"GiB, but one request of {max_seq_len} tokens needs {window}, "
        f"{window * page_bytes / GIB:.2f} GiB; lower max_seq_len_override, raise memory_ratio, "
        "or set num_pages"
    )


def free_bytes(device: torch.device, comm: Comm) -> int:
    """Return the free memory for this rank in bytes; ranks on a CPU share one memory."""
    if device.type != "cuda":
        return psutil.virtual_memory().available // comm.size
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


MAX_APART = 2 * GIB  # of free memory, between the GPUs of one model


def agree_on_free(device: torch.device, comm: Comm) -> int:
    """Return the least free bytes of all ranks; raise `NotEnoughMemory` above `MAX_APART` apart."""
    comm.barrier()
    free = free_bytes(device, comm)
    lowest, minus_highest = comm.min_ints([free, -free])
    if device.type == "cuda" and -minus_highest - lowest > MAX_APART:
        raise NotEnoughMemory(
            f"free memory differs between ranks: {lowest / GIB:.2f} GiB on the fullest, "
            f"{-minus_highest / GIB:.2f} GiB on the emptiest, and {MAX_APART / GIB:.0f} GiB apart "
            "is the most allowed; is another process on one of the devices?"
        )
    return lowest


def kv_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of keys and values in the pool of a resolved config."""
    found: torch.dtype = getattr(torch, config.dtype)
    return FP8 if config.kv_cache_dtype == "fp8" else found


def make_pool(config: EngineConfig, model: ModelConfig, num_pages: int) -> KVPool:
    """Create the pool of a resolved config; raise ValueError for fp8 on a GPU without FP8."""
    sizes: dict[str, Any] = {
        "num_layers": model.num_layers, "num_pages": num_pages, "page_size": config.page_size,
        "num_kv_heads": model.kv_heads_per_rank(config.tp.size), "head_dim": model.head_dim,
        "device": torch.device(config.device),
    }  # fmt: skip
    if config.kv_cache_dtype != "fp8":
        return KVPool(dtype=kv_dtype(config), **sizes)
    check_device("kv_cache_dtype", config.device)
    return Fp8KVPool(**sizes)


def page_bytes_of(config: EngineConfig, model_config: ModelConfig, ranks: int) -> int:
    """Return the bytes of one KV page on one of `ranks` ranks."""
    tokens, itemsize = config.page_size, kv_dtype(config).itemsize
    return tokens * kv_bytes_per_token(model_config, itemsize, ranks)


def check_asked(config: EngineConfig, model_config: ModelConfig, ranks: int, free: int) -> None:
    """Raise `NotEnoughMemory` for a field that alone needs more than the `free` bytes."""
    each = {
        "num_pages": page_bytes_of(config, model_config, ranks),
        "max_running_req": 12 * max_seq_len(config, model_config),  # int32 and int64 in the tables
        "memory_trial_tokens": 4 * model_config.hidden_size,  # hidden state and residual, 16 bits
    }
    for name, nbytes in each.items():
        count = getattr(config, name) or 0
        if count * nbytes > free:
            need, have = count * nbytes / GIB, free / GIB
            raise NotEnoughMemory(f"{name}: {count} take {need:,.1f} GiB, and {have:.1f} are free")


def decide_pages(
    config: EngineConfig, model_config: ModelConfig, comm: Comm, *, free_before: int,
    model_bytes: int, trial: Callable[[int], tuple[int, int]],
) -> int:  # fmt: skip
    """Return the KV pages for all ranks; `NotEnoughMemory` if one full request cannot fit."""
    device, page_size = torch.device(config.device), config.page_size
    page_bytes = page_bytes_of(config, model_config, comm.size)
    if config.memory_trial_tokens == 0:
        pages = pages_by_ratio(
            free_before=free_before, model_bytes=model_bytes,
            memory_ratio=config.memory_ratio, page_bytes=page_bytes,
        )  # fmt: skip
    else:
        try:
            current, peak = trial(config.memory_trial_tokens)
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemory(f"memory_trial_tokens: {error}") from error
        pages = pages_by_peak(
            free_now=agree_on_free(device, comm), peak_bytes=peak, current_bytes=current,
            memory_ratio=config.memory_ratio, page_bytes=page_bytes,
        )  # fmt: skip
    window = max_seq_len(config, model_config)
    sizes = {"page_bytes": page_bytes, "page_size": page_size, "max_seq_len": window}
    if device.type == "cpu":
        pages = cap_on_cpu(pages, max_running_req=config.max_running_req, **sizes)
    return require_pages(comm.min_ints([pages])[0], **sizes)
