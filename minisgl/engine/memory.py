"""How many KV pages fit: byte counts, and what all ranks can have of them.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

import psutil
import torch

from minisgl.parallel.comm import Comm


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def pages_by_ratio(
    *, free_before: int, model_bytes: int, memory_ratio: float, page_bytes: int
) -> int:
    """Pages in a fixed share of the memory that was free before the model came, less the model.

    The dummy page is paid for and not counted. Zero or less means that nothing fits.
    """
    available = int(free_before * memory_ratio) - model_bytes
    return available // page_bytes - 1


def pages_by_peak(
    *, free_now: int, peak_bytes: int, current_bytes: int, memory_ratio: float, page_bytes: int
) -> int:
    """Pages in a share of what is free with the model loaded, less what the largest step adds.

    `peak_bytes - current_bytes` is what a trial prefill needed for a moment: it stays reserved.
    """
    available = int(free_now * memory_ratio) - (peak_bytes - current_bytes)
    return available // page_bytes - 1


GIB = 1 << 30


class NotEnoughMemory(RuntimeError):
    """The KV cache that the engine needs does not fit; the message says by how much."""


def cap_on_cpu(
    num_pages: int, *, page_bytes: int, page_size: int, max_seq_len: int, max_running_req: int
) -> int:
    """On a CPU the pool shares memory with everything else: at most 1 GiB, or one full window.

    Never more than `max_running_req` full windows, which is all that could be in use at once.
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
        "or set num_page_override"
    )


def free_bytes(device: torch.device, comm: Comm) -> int:
    """Free memory for this rank in bytes; ranks on a CPU share one memory."""
    if device.type != "cuda":
        return psutil.virtual_memory().available // comm.size
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def agree_on_free(device: torch.device, comm: Comm, limit: int = 2 * GIB) -> int:
    """The least free bytes of all ranks; `NotEnoughMemory` if a GPU has over `limit` more."""
    comm.barrier()
    free = free_bytes(device, comm)
    lowest, minus_highest = comm.min_ints([free, -free])
    if device.type == "cuda" and -minus_highest - lowest > limit:
        raise NotEnoughMemory(
            f"free memory differs between ranks: {lowest / GIB:.2f} GiB on the fullest, "
            f"{-minus_highest / GIB:.2f} GiB on the emptiest, and {limit / GIB:.0f} GiB apart is "
            "the most allowed; is another process on one of the devices?"
        )
    return lowest
