"""Seconds of a step: known work, divided by a GPU's ceilings, times fitted factors.

Generated from notebooks/13da_simulator.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.kernels import Ceilings
from minisgl.benchmark.roofline import Roofline
from minisgl.config.model import ModelConfig
from minisgl.kvcache.pool import kv_bytes_per_token

Times = NDArray[np.float64]
Lengths = NDArray[np.int64]


class Factors(NamedTuple):
    """Factors of the columns of `StepCost.columns`."""

    decode_layer: float  # seconds
    weights: float
    products: float
    kv: float
    pairs: float
    reduce_layer: float  # seconds
    reduce_byte: float  # seconds
    launch_layer: float  # seconds
    activations: float


@dataclass(frozen=True)
class StepCost:
    """The work of steps of one model on `tp` GPUs with these ceilings each."""

    model: ModelConfig
    ceilings: Ceilings
    tp: int = 1

    def columns(self, extend: Lengths, cached: Lengths, sampled: int) -> Times:
        """Return what a step is made of, float64 [9]; lengths are int [requests]."""
        model, decode = self.model, bool((extend == 1).all())
        bytes_per_s = self.ceilings.bytes_per_s * self.tp
        flops_per_s = self.ceilings.flops_per_s * self.tp
        tokens, layers = int(extend.sum()), model.num_layers
        work = Roofline(model, self.ceilings).forward(tokens, sampled, 0, 0)
        kv = int((cached + extend).sum()) * kv_bytes_per_token(model, 2)
        pairs = int((extend * cached + extend * (extend + 1) // 2).sum())
        per_pair = 4 * layers * model.num_qo_heads * model.head_dim
        rows = layers * tokens * model.hidden_size * 2  # bytes of activations
        several = self.tp > 1
        return np.array([
            layers * decode, work.nbytes / bytes_per_s, work.flops / flops_per_s,
            kv / bytes_per_s * decode, per_pair * pairs / flops_per_s, layers * several,
            rows * several, layers * (not decode), rows / bytes_per_s,
        ])  # fmt: skip


def seconds_of(columns: Times, factors: Factors) -> Times:
    """Return the seconds of steps [..., 9]; maxima are smooth, so that a fit can follow them."""
    part = np.moveaxis(columns * np.array(factors), -1, 0)
    decode, weights, products, kv, pairs, reduces, moved, launches, rows = part
    device = decode + (weights**4 + products**4) ** 0.25 + kv + pairs + reduces + moved + rows
    return (device**8 + launches**8) ** 0.125


def fit(columns: Times, measured: Times, start: Factors, rounds: int = 100) -> Factors:
    """Return the factors for which steps [n, 9] take about the measured seconds [n]."""

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
    decode_layer=1.50e-5, weights=1.02, products=0.936, kv=1.17, pairs=2.31,
    reduce_layer=8.88e-6, reduce_byte=2.74e-11, launch_layer=1.15e-4, activations=57.8,
)  # fmt: skip
