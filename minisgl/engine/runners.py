"""All CUDA graphs of an engine, captured together, and the choice for a batch.

Generated from notebooks/07d_recorded_prefill.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.factory import backend_pair, create_backend
from minisgl.attention.metadata import AttentionBackend
from minisgl.config.engine import EngineConfig
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase
from minisgl.engine.graph import Forward, Graph, GraphRunner, Sample, choose_sizes
from minisgl.engine.prefill_graph import PrefillRunner, capture_prefill
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

MAX_MIXED_TOKENS = 512  # of a step with prompts and running requests: chapter 09ba
MAX_DRAFT_ROWS = 32  # of a step with drafts: with more, drafts cost more than they save


@dataclass(frozen=True)
class Runners:
    """The captured steps of an engine; None for a kind that has none."""

    decode: GraphRunner | None = None
    prefill: PrefillRunner | None = None

    def choose(self, batch: Batch) -> tuple[GraphRunner | None, int]:
        """Return a batch's runner and the size it pads to; None, 0 if the batch runs eagerly."""
        runner = self.decode if batch.phase is Phase.DECODE else self.prefill
        size = None if runner is None else runner.size_for(batch)
        return (None, 0) if size is None else (runner, size)

    @property
    def max_draft_rows(self) -> int:
        """The most rows of a step with drafts; an eager step would cost more than drafts save."""
        captured = MAX_DRAFT_ROWS if self.decode is None else self.decode.sizes[-1]
        return min(MAX_DRAFT_ROWS, captured)

    @property
    def mixed_limits(self) -> tuple[int, int]:
        """Return the most new tokens and requests of a mixed step; 0, 0 if it would run eagerly."""
        if self.prefill is None:
            return 0, 0
        return min(MAX_MIXED_TOKENS, self.prefill.sizes[-1]), len(self.prefill.next_ids)

    def free(self) -> None:
        """Free all graphs, although a prepared step may still refer to its runner.

        NCCL ends only after the last graph that holds one of its calls.
        """
        for runner in (self.decode, self.prefill):
            if runner is not None:
                runner.steps.clear()


def capture_runners(
    config: EngineConfig, model: ModelConfig, pool: KVPool, backend: AttentionBackend,
    tables: TableManager, forward: Forward, sample: Sample,
    new_graph: Callable[[], Graph] | None, progress: bool,
) -> Runners:  # fmt: skip
    """Capture the steps of a resolved config; nothing without `new_graph`."""
    most = max(config.max_running_req, 1 + config.num_speculative_tokens)
    sizes = choose_sizes(config.cuda_graph_bs, config.cuda_graph_max_bs, most)
    if new_graph is None or not sizes:
        return Runners()
    how: dict[str, Any] = {
        "forward": forward, "sample": sample, "tables": tables, "vocab_size": model.vocab_size,
        "dtype": getattr(torch, config.dtype), "new_graph": new_graph,
    }  # fmt: skip
    prefill = capture_prefill(config, model, pool, progress, backend=backend, **how)
    if config.num_speculative_tokens and backend_pair(config.attention_backend)[1] in FUSED:
        heads = model.num_qo_heads // config.tp.size
        backend = create_backend("store_first", pool=pool, tables=tables, num_qo_heads=heads)
    decode = GraphRunner(backend=backend, sizes=sizes, **how)
    decode.capture(progress, None if prefill is None else prefill.pool)
    return Runners(decode, prefill)


FUSED = ("fused", "fi")  # decode kernels for which rows of one request would race
