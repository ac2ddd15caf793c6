"""The persistent decode step, phase by phase: in the interpreter programs run one after another."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton")
from minisgl.attention.base import ForwardBatch
from minisgl.attention.metadata import build_metadata
from minisgl.attention.torch_backend import TorchBackend
from minisgl.benchmark.kernels import make_decode
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.models.fused import FusedModel
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights
from minisgl.parallel.comm import SingleRank
from tests.checkpoints import base_config
from tests.fused_cases import close
from tests.gpu import persistent_kernel as persistent
from tests.gpu.persistent_parts import DATA
from tests.interpreter import quicken

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="run tests.gpu.persistent_step")
TOKENS, WIDE, CPU = 37, torch.float32, torch.device("cpu")


def test_all_phases_of_all_layers_equal_the_model() -> None:
    """Two programs for each of two KV heads; three layers, so that places are emptied again."""
    quicken()
    config = ModelConfig.from_hf(base_config("qwen3") | {"num_hidden_layers": 3})
    model: Any = build_model(config, SingleRank(), dtype=WIDE)
    load_dummy_weights(model, device="cpu", dtype=WIDE)
    fused = FusedModel(model)
    torch.manual_seed(0)
    case: Any = make_decode(config, "fused", 4, np.array([TOKENS], np.int32), WIDE, CPU, layers=3)
    pool, x = case.plan.pool, torch.randn(1, config.hidden_size)
    before = pool.buffer.clone()
    s = persistent.shape_of(config, 4, warps=1, sync=DATA.value, early=True)
    shared = persistent.shared(s, x)
    weights = persistent.stack(fused)
    request = persistent.request_of(case, fused.layers[0].attention.table)
    for layer in range(3):
        for phase in range(5):
            persistent.step_kernel[(s.programs,)](
                weights, request, shared, persistent.score_scale(s), layer,
                layer + 1, S=s, FIRST=phase, LAST=phase,
            )  # fmt: skip
    stored = pool.buffer.clone()
    pool.buffer.copy_(before)
    to, one, table = case.plan.buffers, np.ones(1, np.int32), case.tables.page_table
    meta = build_metadata(Phase.DECODE, 0 * one, one, TOKENS * one, table, pool.page_size)
    backend = TorchBackend(pool, case.tables, config.num_qo_heads, config.head_dim**-0.5)
    fb = ForwardBatch(
        Phase.DECODE, to.rows, to.positions, to.out_loc, None, backend.plan(meta, to.out_loc)
    )
    want, residual = x, torch.zeros_like(x)
    rotation = model.model.rotary(to.positions)
    for layer in model.model.layers:
        want, residual = layer(want, residual, rotation, fb)
    close(shared.x[3:], want + residual, 2e-5)
    close(stored, pool.buffer, 2e-5)
    assert int((stored != before).any(-1).sum()) == 2 * 3 * config.num_kv_heads
    left = [bool(torch.signbit(part[0]).all()) for part in shared[1:6]]
    assert all(left), "two layers later, the first layer's places hold minus zeros again"
    assert not torch.signbit(shared.mid[1:]).all()
