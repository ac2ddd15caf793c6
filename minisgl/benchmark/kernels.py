"""Kernels alone: time in a CUDA graph, achieved bandwidth and arithmetic.

Generated from notebooks/13a_kernels.ipynb: edit there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import AttentionPlan, DecodeBuffers
from minisgl.config.model import ModelConfig
from minisgl.core import IntArray
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

Call = Callable[[], object]
CALLS, REPEATS = 10, 20  # calls in one graph, replays of it


class Row(NamedTuple):
    """One kernel: a function that makes the call, and the bytes and operations of one launch.

    `launches` is above 1 if a call starts the kernel several times, each time on other memory.
    """

    name: str
    make: Callable[[], Call]
    nbytes: int
    flops: int = 0
    launches: int = 1


@torch.inference_mode()
def graph_seconds(call: Call, device: torch.device) -> float:
    """Return the median seconds of one call on a GPU, from replays of a graph with several."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # to compile and choose algorithms
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    graph.replay()
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in marks) / CALLS / 1e3


@torch.inference_mode()
def plain_seconds(call: Call) -> float:
    """Return the median seconds of one call on a CPU, where a launch costs almost nothing."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_row(row: Row, device: torch.device) -> dict[str, Any]:
    """Time a row, then free its memory."""
    call = row.make()
    seconds = graph_seconds(call, device) if device.type == "cuda" else plain_seconds(call)
    seconds /= row.launches
    return {
        "name": row.name,
        "us": round(seconds * 1e6, 2),
        "tb_per_s": round(row.nbytes / seconds / 1e12, 4),
        "tflop_per_s": round(row.flops / seconds / 1e12, 4),
    }


def measure_rows(rows: Iterable[Row], device: torch.device) -> list[dict[str, Any]]:
    """Measure all rows in order; a row that cannot run has the error instead of a time."""
    found = []
    for row in tqdm(list(rows), desc="kernels", disable=None):
        try:
            found.append(measure_row(row, device))
        except (ImportError, ValueError, RuntimeError) as error:
            found.append({"name": row.name, "skipped": str(error).splitlines()[0]})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of a device: bytes per second from memory, operations per second."""

    bytes_per_s: float
    flops_per_s: float


def make_matmul(size: int, dtype: torch.dtype, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: a @ b


def make_copy(elements: int, device: torch.device) -> Call:
    source, target = torch.ones(2, elements, device=device)
    return lambda: target.copy_(source)


def ceiling_rows(dtype: torch.dtype, device: torch.device) -> list[Row]:
    """List a copy, a read, and a square matrix product, all far larger than a GPU's caches."""
    n, size = (1 << 28, 8192) if device.type == "cuda" else (1 << 24, 512)
    return [
        Row("copy", partial(make_copy, n, device), 8 * n),
        Row("read", lambda: torch.ones(n, device=device).sum, 4 * n),
        Row(f"matmul {size}", partial(make_matmul, size, dtype, device), 0, 2 * size**3),
    ]


def ceilings_of(rows: Sequence[dict[str, Any]]) -> Ceilings:
    """Return the best bandwidth and FLOP/s of the measured rows."""
    bandwidth = max(row["tb_per_s"] for row in rows)
    return Ceilings(bandwidth * 1e12, max(row["tflop_per_s"] for row in rows) * 1e12)


Product = Callable[[torch.Tensor], object]  # from a weight


def fused_product(name: str, x: torch.Tensor, weight: torch.Tensor) -> Product:
    """Return the product of projection `name` in `FusedModel`, with its norm, gate or residual.

    Raise ValueError if the sizes of a weight do not fit the kernels for a single row.
    """
    from minisgl.kernels import linear
    from minisgl.kernels.norm import DeferredNorm

    if len(x) > 1:
        calls = {"qkv": linear.linear, "gate_up": linear.gated_linear}
        return partial(calls.get(name, linear.split_k_linear), x)
    if name in ("qkv", "gate_up"):
        squares = x.float().square().view(-1, 2).sum(1)  # of thread blocks with two outputs each
        row = DeferredNorm(x, x, squares)
        one: Product = partial(linear.gemv, row, eps=1e-6, gated=name == "gate_up")
    else:
        ones = torch.ones_like(weight[:, 0])
        one = partial(linear.gemv_add_norm, x, residual=ones[None], norm=ones)
    if one(weight) is None:
        raise ValueError(f"fused {name}: no block divides a weight of {list(weight.shape)}")
    return one


def make_linear(x_size: tuple[int, int], weight_size: tuple[int, int, int], dtype: torch.dtype,
                device: torch.device, fused: str) -> Call:  # fmt: skip
    """Make a call that multiplies x [rows, width] by each weight of [copies, out, width]."""
    x = torch.randn(x_size, dtype=dtype, device=device)
    weights = torch.randn(weight_size, dtype=dtype, device=device)
    product: Product = partial(torch.nn.functional.linear, x)
    if fused:
        product = fused_product(fused, x, weights[0])
    return lambda: [product(weight) for weight in weights]


def linear_rows(
    model: ModelConfig, batches: Sequence[int], dtype: torch.dtype, device: torch.device, *,
    fused: bool = False,
) -> list[Row]:  # fmt: skip
    """List the GEMMs of a layer and the head with torch, or those of a layer with chapter 05d's."""
    q, kv = model.num_qo_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {"qkv": (hidden, q + 2 * kv), "o": (q, hidden), "gate_up": (hidden, 2 * inner),
              "down": (inner, hidden), "head": (hidden, model.vocab_size)}  # fmt: skip
    if fused:
        del shapes["head"]
    if model.moe is not None and not model.moe.dense_layers:  # experts: see chapter 11b
        del shapes["gate_up"], shapes["down"]
    enough = (1 << 28) if device.type == "cuda" else (1 << 23)  # bytes, more than a cache holds
    rows = []
    for (name, (width, out)), batch in ((s, b) for s in shapes.items() for b in batches):
        weight = width * out * dtype.itemsize
        copies = -(-enough // weight)
        moved = weight + batch * (width + out) * dtype.itemsize
        make = partial(make_linear, (batch, width), (copies, out, width), dtype, device,
                       name if fused else "")  # fmt: skip
        label = f"{'fused' if fused else 'linear'} {name}, batch {batch}"
        rows.append(Row(label, make, moved, 2 * batch * width * out, launches=copies))
    return rows


def scatter_pages(lengths: IntArray, tables: TableManager, num_pages: int) -> None:
    """Write random pages of a pool of `num_pages` into every row, enough for its length."""
    pages, size, taken = np.random.default_rng(0).permutation(num_pages), tables.page_size, 0
    for row, length in enumerate(lengths):
        count = -(-int(length) // size)
        slots = pages[taken : taken + count, None] * size + np.arange(size)
        tables.write(row, 0, slots.reshape(-1)[:length].astype(np.int32))
        taken += count
    tables.flush()


@dataclass
class DecodeCase:
    """The attention of one decode step in all layers of a pool, which can be called repeatedly."""

    plan: AttentionPlan
    q: torch.Tensor  # [bs, qo_heads, head_dim]
    k: torch.Tensor  # [bs, kv_heads, head_dim]
    v: torch.Tensor
    tables: TableManager
    layers: int = 1

    def __call__(self) -> torch.Tensor:
        """Attend in every layer and return the last layer's output."""
        for layer_id in range(self.layers):
            out = self.plan.attend(self.q, self.k, self.v, layer_id)
        return out


def make_decode(
    model: ModelConfig, backend: str, page_size: int, lengths: IntArray,
    dtype: torch.dtype, device: torch.device, layers: int = 1,
) -> DecodeCase:  # fmt: skip
    """Build a filled pool, tables, and a plan for a captured step; new tokens are stored."""
    bs, num_pages = len(lengths), int((-(-lengths // page_size)).sum())
    qo, kv, dim = model.num_qo_heads, model.num_kv_heads, model.head_dim
    pool = KVPool(num_layers=layers, num_pages=num_pages, page_size=page_size, num_kv_heads=kv,
                  head_dim=dim, dtype=dtype, device=device)  # fmt: skip
    pool.buffer.normal_()
    tables = TableManager(bs, int(lengths.max()), page_size, pool.dummy_page, device)
    scatter_pages(lengths, tables, num_pages)
    rows = np.arange(bs, dtype=np.int32)
    parts = (rows, lengths - 1, tables.page_table[rows, lengths - 1])
    buffers = DecodeBuffers(*(torch.from_numpy(p.astype(np.int64)).to(device) for p in parts))
    chosen = create_backend(backend, pool=pool, tables=tables, num_qo_heads=qo)
    plan = chosen.graph_plan(bs, buffers)
    q = torch.randn(bs, qo, dim, dtype=dtype, device=device)
    k, v = torch.randn(2, bs, kv, dim, dtype=dtype, device=device)
    for layer_id in range(layers):
        plan.run(q, k, v, layer_id)
    return DecodeCase(plan, q, k, v, tables, layers)


def decode_rows(
    model: ModelConfig, backends: Sequence[str], page_sizes: Sequence[int], lengths: IntArray,
    dtype: torch.dtype, device: torch.device,
) -> list[Row]:  # fmt: skip
    """List a row for each backend and page size, over the same lengths."""
    nbytes = 2 * int(lengths.sum()) * model.num_kv_heads * model.head_dim * dtype.itemsize
    flops = 4 * int(lengths.sum()) * model.num_qo_heads * model.head_dim
    layers = -(-(1 << 28) // nbytes) if device.type == "cuda" else 1
    return [
        Row(f"decode {name}, page {page}, batch {len(lengths)}",
            partial(make_decode, model, name, page, lengths, dtype, device, layers),
            nbytes, flops, launches=layers)
        for name in backends for page in page_sizes
    ]  # fmt: skip
