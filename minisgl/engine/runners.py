"""All CUDA graphs of an engine, captured together, and the choice for a batch.

Generated from notebooks/07d_recorded_prefill.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.base import AttentionBackend
from minisgl.attention.factory import create_backend, parts_of
from minisgl.config.engine import EngineConfig
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase
from minisgl.engine.graph import Draw, Forward, Graph, GraphRunner, choose_sizes
from minisgl.engine.prefill_graph import PrefillRunner, capture_prefill
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

MAX_DRAFT_ROWS = 32  # of a step with drafts: with more, a draft costs what it may save


@dataclass(frozen=True)
class Runners:
    """The captured steps of an engine; None where there are none of a kind."""

    decode: GraphRunner | None = None
    prefill: PrefillRunner | None = None
    verify: GraphRunner | None = None  # steps with drafts; None: `decode` replays them, too

    def choose(self, batch: Batch) -> tuple[GraphRunner | None, int]:
        """Return a batch's runner and the size it pads to; None, 0 if the batch runs eagerly."""
        decode = (self.verify if batch.verifies else None) or self.decode
        runner = decode if batch.phase is Phase.DECODE else self.prefill
        size = None if runner is None else runner.size_for(batch)
        return (None, 0) if size is None else (runner, size)

    @property
    def decode_replays(self) -> int:
        """How many decode steps were replayed, those with drafts included."""
        return sum(runner.replays for runner in (self.decode, self.verify) if runner)

    @property
    def max_draft_rows(self) -> int:
        """Rows of a step with drafts: an eager one would cost more than drafts save."""
        captured = self.verify or self.decode
        return MAX_DRAFT_ROWS if captured is None else min(MAX_DRAFT_ROWS, captured.sizes[-1])

    def free(self) -> Runners:
        """Free all graphs, although a prepared step may refer to its runner; return empty runners.

        NCCL ends only after the last graph that holds one of its calls.
        """
        for runner in (self.decode, self.prefill, self.verify):
            if runner is not None:
                runner.steps.clear()
        return Runners()


def capture_runners(
    config: EngineConfig, model: ModelConfig, pool: KVPool, backend: AttentionBackend,
    tables: TableManager, forward: Forward, draw: Draw,
    new_graph: Callable[[], Graph] | None, progress: bool,
) -> Runners:  # fmt: skip
    """Capture the steps that a resolved config asks for; nothing without `new_graph`."""
    most = max(config.max_running_req, 1 + config.num_speculative_tokens)
    sizes = choose_sizes(config.cuda_graph_bs, config.cuda_graph_max_bs, most)
    if new_graph is None or not sizes:
        return Runners()
    how: dict[str, Any] = {
        "forward": forward, "draw": draw, "tables": tables, "vocab_size": model.vocab_size,
        "dtype": getattr(torch, config.dtype), "new_graph": new_graph,
    }  # fmt: skip
    prefill = capture_prefill(config, model, pool, progress, backend=backend, **how)
    decode = GraphRunner(backend=backend, sizes=sizes, **how)
    decode.capture(progress, None if prefill is None else prefill.pool)
    if not config.num_speculative_tokens or parts_of(config.attention_backend)[1] not in FUSED:
        return Runners(decode, prefill)
    heads = model.num_qo_heads // config.tp.size
    store_first = create_backend("store_first", pool=pool, tables=tables, num_qo_heads=heads)
    few = [size for size in sizes if size <= MAX_DRAFT_ROWS] or sizes[:1]
    verify = GraphRunner(backend=store_first, sizes=few, **how)
    verify.capture(progress, decode.pool)
    return Runners(decode, prefill, verify)


FUSED = ("fused", "fi")  # decode kernels for which rows of one request would race
