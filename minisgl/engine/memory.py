"""How many KV pages fit: pure arithmetic on byte counts that were read elsewhere.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.config.model import ModelConfig
from minisgl.kvcache.pool import kv_bytes_per_token

GIB = 1 << 30


class NotEnoughMemory(RuntimeError):
    """The KV cache that the engine needs does not fit; the message says by how much."""


def bytes_per_page(model: ModelConfig, page_size: int, itemsize: int, tp_size: int = 1) -> int:
    """Bytes of one page on one rank: K and V of `page_size` tokens in every layer."""
    return page_size * kv_bytes_per_token(model, itemsize, tp_size)


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
    *, free_now: int, peak_bytes: int, current_bytes: int, utilization: float, page_bytes: int
) -> int:
    """Pages in a share of what is free with the model loaded, less what the largest step adds.

    `peak_bytes - current_bytes` is what a trial prefill needed for a moment: it stays reserved.
    """
    available = int(free_now * utilization) - (peak_bytes - current_bytes)
    return available // page_bytes - 1


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


def require_balance(lowest: int, highest: int, limit: int = 2 * GIB) -> int:
    """Return the lowest free memory of all ranks; raise if some rank has over `limit` more."""
    if highest - lowest > limit:
        raise NotEnoughMemory(
            f"free memory differs between ranks: {lowest / GIB:.2f} GiB on the fullest, "
            f"{highest / GIB:.2f} GiB on the emptiest, and {limit / GIB:.0f} GiB apart is the most "
            "allowed; is another process on one of the devices?"
        )
    return lowest
