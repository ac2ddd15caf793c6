"""The search in captured decode steps: engines, their times, and the correct choices.

Generated from notebooks/13f_tuning.ipynb: edit there.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minisgl.benchmark.options import known_name, named_model
from minisgl.benchmark.tuning import choices, search
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.config.paths import read_json, resolve_model_path
from minisgl.engine.engine import Engine
from minisgl.fp8 import Fp8Weight, fp8_weight
from minisgl.kernels.device import DeviceLimits, device_limits
from minisgl.kernels.linear import Tiling, choose_gemv_block, gemv_add_norm, launch_few_row_gemm
from minisgl.kernels.norm import DeferredNorm, add_norm
from minisgl.llm import LLM
from minisgl.parallel.comm import SingleRank

LAYERS = 8  # of the model: enough that their weights do not stay in the L2 cache


def one_rank(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """Return the config of one of `tp` ranks, as a separate model with few layers.

    Raise ValueError if the ranks cannot share the model.
    """
    ModelConfig.from_hf(config).check_tp(tp, False)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size",
             "moe_intermediate_size")  # fmt: skip
    cut = {name: max(1, config[name] // tp) for name in names if name in config}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = min(LAYERS, config["num_hidden_layers"])
    return config | cut | {"num_hidden_layers": layers, "head_dim": head_dim}


def config_of(model: str, tp: int) -> dict[str, Any]:
    """Return `one_rank` of a known model or of a folder; raise ValueError for neither."""
    known = known_name(model)
    config = KNOWN_CONFIGS[known] if known else read_json(resolve_model_path(model) / "config.json")
    return one_rank(config, tp)


class SkippedAllReduce(SingleRank):
    """One of several ranks without the others: its own part replaces each sum."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce_add_norm(
        self, parts: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_norm(parts, residual, norm, eps)


@contextmanager
def engine_of(model: str, tp: int, quantization: str, sizes: Sequence[int]) -> Iterator[Engine]:
    """Yield an engine with random weights that captures these sizes; free its memory afterwards."""
    config = config_of(model, tp)
    with TemporaryDirectory(prefix="minisgl-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with LLM(
            folder, use_dummy_weight=True, quantization=quantization, cuda_graph_bs=tuple(sizes),
            prefill_graph_max_tokens=0, num_pages=2048, max_running_req=max(sizes),
        ) as llm:  # fmt: skip
            engine: Any = llm.scheduler.engine
            if tp > 1:  # other kernels follow a sum over ranks
                engine.forward_pass.comm = SkippedAllReduce(tp)
            yield engine
    gc.collect()
    torch.cuda.empty_cache()


def step_seconds(engine: Engine, size: int, replays: int = 15) -> float:
    """Capture a decode step of `size` dummy requests; return its median seconds."""
    assert engine.runners.decode is not None
    with engine.on_stream(), torch.inference_mode():
        graph = engine.runners.decode.capture_size(size).graph
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        for mark in marks:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks[2:])) / 1e3


Product = Callable[[list[Any]], Tensor]
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def random_weight(*shape: int, eight_bits: bool, on: dict[str, Any]) -> Tensor:
    """Make a random weight [..., n, k] whose products have a magnitude of about one."""
    values = torch.randn(shape, **on) / shape[-1] ** 0.5
    if not eight_bits:
        return values
    weight = fp8_weight(*shape, device=on["device"])
    weight.copy_((values * 64).to(weight.dtype))
    weight.scale.fill_(1 / 64)
    return weight


def plain_product(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """Multiply x [m, k] by the weight in float32."""
    if isinstance(weight, Fp8Weight):
        weight = weight.dequantized(torch.float32)
    y = x.float() @ weight.float().T
    return F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else y


def gemv_trial(
    kind: str, scales: int, n: int, k: int, on: dict[str, Any]
) -> tuple[Product, Tensor]:
    """Make a one-row product (GEMV) that takes tiles, and its expected result."""
    gated = "gated" in kind
    weight = random_weight(n * (2 if gated else 1), k, eight_bits=scales > 0, on=on)
    x = torch.randn(1, k, **on)
    row: Tensor | DeferredNorm = x  # before a norm, or after one
    after: Any = x.new_zeros(1, n), x.new_ones(n)
    want = plain_product(x, weight, gated)
    if "norm" in kind:
        # The usual number of sums of the product before: an engine then finds its kernel compiled.
        front = choose_gemv_block(k, k, False, False, scales) or (1,)
        squares = x.float().square().view(-1, front[0]).sum(1)
        row, after = DeferredNorm(x, x, squares), (None, None)
        want = plain_product(F.rms_norm(x.float(), (k,)), weight, gated)

    def product(tiles: list[Any]) -> Tensor:
        y = gemv_add_norm(row, weight, *after, gated=gated, block=(*tiles,))
        return want * 0 if y is None else y.total

    return product, want


def gemm_trial(
    kind: str, eight_bits: bool, rows: int, n: int, k: int, on: dict[str, Any]
) -> tuple[Product, Tensor]:
    """Make a product of a few rows that takes tiles and sums its splits, and its result."""
    gated = kind == "gated"
    weight = random_weight(n * (2 if gated else 1), k, eight_bits=eight_bits, on=on)
    x = torch.randn(rows, k, **on)

    def product(tiles: list[Any]) -> Tensor:
        parts = Tiling(*tiles)
        dtype = torch.float32 if parts.splits > 1 else x.dtype
        out = torch.empty(parts.splits, rows, n, dtype=dtype, device=x.device)
        launch_few_row_gemm(x, weight, out, parts, None, gated)
        return out.sum(0)

    return product, plain_product(x, weight, gated)


def trial_of(key: str, on: dict[str, Any] = ON_GPU) -> tuple[Product, Tensor]:
    """Make the product of a key, which takes tiles, and its expected result."""
    kernel, kind, *sizes = key.split()
    first, n, k = map(int, sizes)
    if kernel == "row":
        return gemv_trial(kind, first, n, k, on)
    return gemm_trial(kind, kernel == "rows8", 8 if first == 16 else first, n, k, on)


def is_right(product: Product, want: Tensor, tiles: list[Any]) -> bool:
    """Compile a choice and run it once; return True if it runs and its result is right."""
    try:
        got = product(tiles).float()
    except Exception:  # of Triton, or without a result
        return False
    return bool((got - want).norm() < 0.02 * want.norm())


def right_choices(key: str, limits: DeviceLimits) -> list[list[Any]]:
    """List the choices for a key whose results are right, and cuBLAS."""
    product, want = trial_of(key)
    every = list(choices(key, limits))
    tiled = [tiles for tiles in every if tiles]
    with ThreadPoolExecutor(16) as threads:
        right = list(threads.map(lambda tiles: is_right(product, want, tiles), tiled))
    return [tiles for tiles, fits in zip(tiled, right) if fits] + [t for t in every if not t]


def tune(model: str, tp: int, quantization: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Search for one model; return a row for each size. Found entries are used from then on."""
    limits = device_limits(torch.device("cuda", torch.cuda.current_device()))
    rows: list[dict[str, Any]] = []
    tried: dict[str, int] = {}

    def right(key: str) -> list[list[Any]]:
        found = right_choices(key, limits)
        tried[key] = len(found)
        return found

    with engine_of(model, tp, quantization, sizes) as engine:
        for size in tqdm(sizes, desc=model, unit="size", disable=None):
            start, measure = time.perf_counter(), partial(step_seconds, engine, size)
            before = measure()
            found = search(limits.tuned, right, measure)
            rows.append({
                "model": named_model(model), "tp": tp, "quantization": quantization, "rows": size,
                "ms_before": round(before * 1e3, 4), "ms": round(measure() * 1e3, 4),
                "seconds": round(time.perf_counter() - start, 1), "tried": dict(tried),
                "found": found,
            })  # fmt: skip
            tried.clear()
    return rows
