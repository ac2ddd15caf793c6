"""Plans of captured prefill steps for the Triton kernels.

Generated from notebooks/07d_recorded_prefill.ipynb: edit there.
"""

from __future__ import annotations

import torch

from minisgl.attention.metadata import AttentionPlan
from minisgl.attention.triton_backend import KernelArgs, TritonBackend
from minisgl.engine.graph import StepBuffers
from minisgl.engine.prefill_graph import Tiles

MAX_SPLITS = 8  # scratch memory grows with them


class TiledPrefill:
    """Attention of query tiles over the pool, for any lengths of the requests."""

    def __init__(self, backend: TritonBackend, dtype: torch.dtype) -> None:
        """Plan captured prefills on `backend`; `dtype` is that of queries and outputs."""
        self.backend, self.dtype, self.group = backend, dtype, backend.group

    def programs(self, size: int, tile_q: int) -> int:
        """Count the thread blocks with work for one prompt whose keys are not split."""
        return -(-size * self.group // tile_q) * self.backend.pool.num_kv_heads

    def tile_rows(self, size: int) -> int:
        """Return the rows of a tile: large if such tiles occupy half of the SMs."""
        widest = self.backend.query_rows(128)
        enough = 2 * self.programs(size, widest) >= self.backend.num_sms
        return widest if enough else min(64, widest)

    def plan(self, size: int, static: StepBuffers, tiles: Tiles) -> AttentionPlan:
        """Plan a prefill of `size` tokens for capture; small steps split the keys."""
        backend, tile_q = self.backend, self.tile_rows(size)
        programs = self.programs(size, tile_q)
        splits = max(1, min(MAX_SPLITS, backend.num_sms // programs))
        plan = backend.make_plan(static.out_loc, KernelArgs(*tiles), tile_q, splits, programs)
        heads, device = self.group * backend.pool.num_kv_heads, backend.device
        # Padding has no tile: its outputs stay these zeros.
        plan.out = torch.zeros(size, heads, backend.pool.head_dim, dtype=self.dtype, device=device)
        return plan
