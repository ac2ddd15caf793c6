"""Attention of a captured prefill step over its padded plan, on a CPU and a GPU alike."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from minisgl.attention.triton_backend import TritonBackend
from minisgl.engine.prefill_graph import MAX_REQUESTS, PrefillRunner
from minisgl.engine.tiled_prefill import TiledPrefill
from tests.attention_worlds import World, dense_oracle


def check_recorded_tiles(world: World, size: int, tolerance: float) -> Any:
    """The plan of `size` tokens before and after a smaller batch is copied in: answers, padding."""
    backend, dtype = world.backend("triton"), world.q.dtype
    assert isinstance(backend, TritonBackend)
    unused: Any = None
    runner = PrefillRunner(
        plans=TiledPrefill(backend, dtype), forward=unused, sample=unused, backend=unused,
        tables=world.tables, sizes=(size,), vocab_size=8, dtype=dtype, new_graph=unused,
    )  # fmt: skip
    n, zeros = world.meta.num_tokens, np.zeros(world.meta.num_tokens, np.int32)
    fi: Any = SimpleNamespace(
        positions=zeros, token_rows=zeros, out_loc=world.out_loc.cpu().numpy(), sampled=(),
        write_rows=zeros[:0], write_positions=zeros[:0], last_idx=zeros, sampling=None,
        meta=world.meta,
    )  # fmt: skip
    static, plan = runner.lay_out(size)

    def padded(part: Tensor) -> Tensor:
        return torch.cat([part, part.new_empty(size - n, *part.shape[1:]).normal_()])

    pad = [padded(part) for part in (world.q, world.k, world.v)]
    assert not plan.run(*pad, 1).any(), "padding alone has no answer"
    runner.ring.send([runner.pack(fi, size)], runner.memory)
    got = plan.run(*pad, 1)
    want = dense_oracle(world).float()
    torch.testing.assert_close(got[:n].float().cpu(), want, atol=tolerance, rtol=0)
    assert not got[n:].any()
    assert static.scatter.tolist() == [world.tables.dummy_row * world.tables.width] * MAX_REQUESTS
    return plan
