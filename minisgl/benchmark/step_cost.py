"""Seconds of a step: known work, divided by a GPU's ceilings, times fitted factors.

Generated from notebooks/13da_simulator.ipynb: edit there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.kernels import Ceilings
from minisgl.benchmark.roofline import Work, body_parameters, head_parameters
from minisgl.config.engine import SchedulerConfig, TPInfo
from minisgl.config.model import ModelConfig
from minisgl.engine.prefill_graph import MAX_REQUESTS, prefill_sizes, prefill_tokens
from minisgl.kvcache.pool import kv_bytes_per_token

Times = NDArray[np.float64]
Lengths = NDArray[np.int64]
FEW_ROWS = 16  # of a GEMM whose tiles are not those of 64 rows
TILE_ROWS = 128  # of a prefill kernel: queries of a KV head


class Factors(NamedTuple):
    """Factors of the columns of `StepCost.columns`; those of layers and bytes are in seconds."""

    captured_layer: float
    rows_layer: float
    expert_layer: float
    weights: float
    products: float
    expert_weights: float
    expert_products: float
    kv: float
    pairs: float
    queries: float
    activations: float
    reduce_layer: float
    reduce_byte: float
    launch_layer: float
    launch_expert_layer: float
    host: float


@dataclass(frozen=True)
class StepCost:
    """The work of steps of one model on `tp` GPUs with these ceilings each.

    captured: tokens of the prefill steps that are CUDA graphs, in ascending order.
    """

    model: ModelConfig
    ceilings: Ceilings
    tp: int = 1
    captured: tuple[int, ...] = ()

    def rows(self, extend: Lengths) -> tuple[int, bool]:
        """Return the rows that a step computes, and whether it is captured."""
        tokens = int(extend.sum())
        if (extend == 1).all():
            return tokens, True
        if len(extend) > MAX_REQUESTS or not self.captured or tokens > self.captured[-1]:
            return tokens, False
        return self.captured[bisect_left(self.captured, tokens)], True

    def expert_work(self, tokens: int, rows: int) -> Work:
        """Return the bytes of experts that `tokens` use, and the operations of `rows`."""
        if (moe := self.model.moe) is None:
            return Work(0, 0)
        share, all_experts = moe.top_k / moe.num_experts, self.model.expert_parameters
        met = round((1 - (1 - share) ** tokens) * all_experts)
        return Work(2 * met, 2 * rows * round(share * all_experts))

    def row_bytes(self) -> int:
        """Return the bytes that one token moves between a layer's products, on each GPU."""
        model, moe = self.model, self.model.moe
        heads = (model.num_qo_heads + 2 * model.num_kv_heads) * model.head_dim
        gated, gathered = 3 * model.intermediate_size, 0
        if moe is not None:
            gated, gathered = 3 * moe.top_k * moe.intermediate_size, 4 * moe.top_k
        return 2 * ((8 + gathered) * model.hidden_size + (2 * heads + gated) // self.tp)

    def columns(self, extend: Lengths, cached: Lengths, sampled: int) -> Times:
        """Return the work of a step, float64 [factors]; lengths are int [requests]."""
        model, layers, one = self.model, self.model.num_layers, self.ceilings
        bytes_per_s, flops_per_s = one.bytes_per_s * self.tp, one.flops_per_s * self.tp
        (rows, captured), tokens = self.rows(extend), int(extend.sum())
        tiled = rows if rows <= FEW_ROWS else -(-rows // 64) * 64
        one_token, several = extend == 1, self.tp > 1  # of running requests, in a mixed step too
        decode = bool(one_token.all())
        sparse = 0 if model.moe is None else layers - len(model.moe.dense_layers)
        experts = self.expert_work(tokens, rows)
        body, head = body_parameters(model) - model.expert_parameters, head_parameters(model)
        kv = int((cached + extend)[one_token].sum()) * kv_bytes_per_token(model, 2)
        pairs = int((extend * cached + extend * (extend + 1) // 2)[~one_token].sum())
        if not decode:  # each row of a running request fills a tile of queries
            group = model.num_qo_heads // model.num_kv_heads
            pairs += TILE_ROWS // group * int(cached[one_token].sum())
        per_pair = 4 * layers * model.num_qo_heads * model.head_dim
        return np.array([
            layers * captured, layers * (captured and tokens > 1), sparse,
            2 * (body + head * (sampled > 0)) / bytes_per_s,
            2 * (tiled * body + sampled * head) / flops_per_s,
            experts.nbytes / bytes_per_s, experts.flops / flops_per_s, kv / bytes_per_s,
            per_pair * pairs / flops_per_s,
            per_pair * rows / flops_per_s * (not decode),
            layers * rows * self.row_bytes() / one.bytes_per_s,
            2 * layers * several, 4 * layers * rows * model.hidden_size * several,
            layers * (not captured), sparse * (not captured), float(not decode),
        ])  # fmt: skip


def smooth_max(power: int, *times: Times) -> Times:
    """Return a smooth maximum, which a fit can differentiate."""
    return np.asarray(sum(part**power for part in times) ** (1 / power))


class StepTimes(NamedTuple):
    """Seconds of the device, and of the host before its first kernel and while it launches."""

    device: Times
    host: Times
    launch: Times


def times_of(columns: Times, factors: Factors) -> StepTimes:
    """Return the times of steps [..., factors]; few rows overlap less than many."""
    part: Any = Factors(*np.moveaxis(columns * np.array(factors), -1, 0))
    reads = part.weights, part.products
    device = np.where(part.host > 0, smooth_max(4, *reads), smooth_max(2, *reads))
    device = device + smooth_max(4, part.expert_weights, part.expert_products)
    device = device + part.captured_layer + part.rows_layer + part.expert_layer + part.kv
    device = device + part.pairs + part.queries + part.activations
    device = device + part.reduce_layer + part.reduce_byte
    return StepTimes(device, part.host, part.launch_layer + part.launch_expert_layer)


def seconds_of(columns: Times, factors: Factors) -> Times:
    """Return the seconds of steps [..., factors] that are alone."""
    times = times_of(columns, factors)
    return times.host + smooth_max(8, times.device, times.launch)


class Gpu(NamedTuple):
    """Ceilings, memory and power of a GPU."""

    ceilings: Ceilings
    nbytes: float  # for weights and pages, with a memory ratio of 0.9
    watts: float  # while it computes


GPUS = {
    "h100": Gpu(Ceilings(3.06e12, 7.35e14), 76.0e9, 570.0),
    "h200": Gpu(Ceilings(4.35e12, 6.83e14), 134.3e9, 680.0),
}


def cost_on(model: ModelConfig, gpu: Gpu, tp: int = 1, budget: int | None = None) -> StepCost:
    """Return the cost of steps on `tp` GPUs; `budget`: most tokens of a prefill step."""
    config = SchedulerConfig(device="cuda:0", tp=TPInfo(0, tp), max_extend_tokens=budget)
    return StepCost(model, gpu.ceilings, tp, prefill_sizes(prefill_tokens(config, model)))


def fit(columns: Times, measured: Times, start: Factors, rounds: int = 100) -> Factors:
    """Return the factors for which steps [n, factors] take about the measured seconds [n]."""

    def errors(logs: Times) -> Times:
        return np.log(seconds_of(columns, Factors(*np.exp(logs))) / measured)

    logs, damping, tiny = np.log(np.array(start)), 1e-3, 1e-5
    for _ in range(rounds):
        now = errors(logs)
        slope = np.stack([(errors(logs + d) - now) / tiny for d in tiny * np.eye(len(logs))], 1)
        square = slope.T @ slope + damping * np.eye(len(logs))
        other = logs - np.clip(np.linalg.solve(square, slope.T @ now), -0.5, 0.5)
        better = (errors(other) ** 2).sum() < (now**2).sum()
        logs, damping = (other, damping / 3) if better else (logs, damping * 4)
    return Factors(*np.exp(logs).tolist())


FITTED = Factors(
    captured_layer=1.21e-5, rows_layer=5.27e-6, expert_layer=7.36e-6, weights=1.02,
    products=0.989, expert_weights=1.06, expert_products=1.29, kv=1.12, pairs=1.16, queries=619,
    activations=1.05, reduce_layer=8.15e-6, reduce_byte=4.31e-12, launch_layer=3.71e-4,
    launch_expert_layer=4.95e-4, host=1.41e-3,
)  # fmt: skip
