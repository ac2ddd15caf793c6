"""What starting operations costs: a chain of small operations, run eagerly and replayed.

Generated from notebooks/07_cuda_graphs.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.engine.graph import RecordingGraph, capturing, new_graph


def make_stack(
    layers: int, width: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """`layers` times norm, linear, SiLU, linear and sum, as separate operations [n, width]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (layers, 2, width, width)
    weights = torch.randn(shape, generator=generator, device=device, dtype=dtype) * width**-0.5

    def forward(x: Tensor) -> Tensor:
        for first, second in weights:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x + torch.nn.functional.silu(x * scale @ first) @ second
        return x

    return forward


def median_us(call: Callable[[], object], device: torch.device, repeats: int = 50) -> float:
    """Wall time of one call in microseconds, the device's work included: a median of batches."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(5):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / 5 * 1e6)
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def eager_against_replay(
    batch: int, layers: int, width: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Number of operations, and microseconds of one pass: eager and replayed."""
    forward = make_stack(layers, width, device, dtype)
    x = torch.randn(batch, width, device=device, dtype=dtype)
    forward(x)
    counter = RecordingGraph()
    with capturing(counter):
        forward(x)
    graph = new_graph(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with capturing(graph):
        forward(x)
    eager, replayed = median_us(lambda: forward(x), device), median_us(graph.replay, device)
    return {"batch": batch, "operations": len(counter.calls), "eager": eager, "replay": replayed}


SIZES = (1, 4, 16, 64, 256)


@torch.inference_mode()
def pool_bytes(sizes: Sequence[int], shared: bool, layers: int, width: int) -> int:
    """Bytes that graphs of these sizes reserve on the GPU, captured in the given order."""
    device = torch.device("cuda")
    forward = make_stack(layers, width, device, torch.bfloat16)
    inputs = {n: torch.randn(n, width, device=device, dtype=torch.bfloat16) for n in sizes}
    for x in inputs.values():
        forward(x)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for size in sizes:
        graphs.append(new_graph(device))
        with capturing(graphs[-1], pool if shared else None):
            forward(inputs[size])
    return torch.cuda.memory_reserved(device) - before


def measure(device: torch.device, layers: int, width: int) -> dict[str, Any]:
    """All measurements on one device; the memory of graphs only on a GPU."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = [eager_against_replay(size, layers, width, device, dtype) for size in SIZES]
    found: dict[str, Any] = {"layers": layers, "width": width, "dtype": str(dtype), "rows": rows}
    if on_gpu:
        orders = {"large first": SIZES[::-1], "small first": SIZES}
        found["pool_bytes"] = {
            f"{name}, {kind}": pool_bytes(order, kind == "one pool", 8, 8192)
            for name, order in orders.items()
            for kind in ("one pool", "a pool each")
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and store the result with hardware, date and command."""
    parser = argparse.ArgumentParser(description="eager against replayed operations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"hardware": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    about["command"] = " ".join(["python -m minisgl.engine.graph_bench", *(argv or sys.argv[1:])])
    text = json.dumps(about | measure(device, options.layers, options.width), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
