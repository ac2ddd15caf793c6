"""Layers as wide as those of models that people serve, with dummy weights and few layers.

The embedded model is too narrow for some kernels: the one-row chain declines its sizes, and no
product of its layers goes to cuBLAS at the batch sizes of the other tests. Here captured steps take
these paths, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from minisgl import LLM, SamplingParams
from minisgl.config.engine import EngineConfig
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.engine.engine import build_engine
from minisgl.kernels import pdl
from minisgl.models import fused
from tests.gpu.test_engine_gpu import (
    DEVICE,
    KINDS,
    compare_eager_and_replay,
    fill_rows,
    free_memory,
    need,
    synchronize,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
__all__ = ["free_memory"]  # a fixture that every test of this file uses, too

LAYERS = {"Qwen/Qwen3-0.6B": 4, "Qwen/Qwen3-8B": 2, "Qwen/Qwen3-14B": 2}


@pytest.fixture(params=LAYERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of these shapes, with a few of its layers."""
    config = KNOWN_CONFIGS[request.param] | {"num_hidden_layers": LAYERS[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


class Calls:
    """Counts of the model's one-row products, computed or declined."""

    def __init__(self) -> None:
        self.done, self.declined = 0, 0

    def counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A product whose calls are counted."""

        def call(*args: Any, **how: Any) -> Any:
            y = plain(*args, **how)
            self.done, self.declined = self.done + (y is not None), self.declined + (y is None)
            return y

        return call

    def check(self) -> None:
        """Some were computed, and none declined."""
        assert self.done > 0 == self.declined


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The one-row products are counted."""
    calls = Calls()
    for name in ("gemv", "gemv_add_norm"):
        monkeypatch.setattr(fused, name, calls.counted(getattr(fused, name)))
    return calls


@pytest.mark.parametrize("backend", ["fi,fused", "triton,fused"])
def test_wide_replay_equals_eager_bit_for_bit(folder: Path, backend: str, one_row: Calls) -> None:
    need(backend)
    config = EngineConfig(
        model_path=str(folder), use_dummy_weight=True, device=DEVICE, dtype="bfloat16",
        attention_backend=backend, page_size=16, num_pages=4096, max_running_req=256,
        max_seq_len_override=1024, cuda_graph_bs=(1, 2, 8, 64, 128, 192, 256),
    )  # fmt: skip
    engine = build_engine(config, progress=False)
    assert engine.runners.decode is not None
    engine.pool.buffer.normal_(generator=torch.Generator(engine.device).manual_seed(0))
    synchronize()
    r = random.Random(1)
    for batch_size in (1, 2, 8, 33, 64, 100, 192, 250):  # 33, 100 and 250 are padded
        for seed in range(3):
            lengths = [r.randrange(1, (17, 200, 1000)[seed]) for _ in range(batch_size)]
            reqs = fill_rows(engine, lengths, seed)
            compare_eager_and_replay(engine, reqs, same_split=True)
            for req in reqs:
                engine.tables.free(req.table_idx)
    one_row.check()
    engine.shutdown()


def test_wide_steps_in_a_row_answer_like_single_ones(
    folder: Path, one_row: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps without a pause, against calls that start only after the last has ended.

    What a kernel reads too early may show as another token.
    """
    r, answers = random.Random(5), []
    prompts = [[r.randrange(1000, 90_000) for _ in range(40)] for _ in range(200)]
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(pdl, "can_launch_early", lambda x: False)
        how: dict[str, Any] = {"cuda_graph_max_bs": 256 if recorded else 0, "overlap": recorded}
        how |= {"num_pages": 2048, "page_size": 16, "max_seq_len_override": 512}
        how["prefill_graph_max_tokens"] = 0  # one pads tokens: cuBLAS may round other sizes apart
        with LLM(
            str(folder), use_dummy_weight=True, device=DEVICE, dtype="bfloat16",
            cache_type="naive", **how,
        ) as llm:  # fmt: skip
            graph = llm.scheduler.engine.runners.decode
            assert (graph is not None) == recorded
            for count in (1, 2, 8, 64, 200):  # sizes that are recorded, so nothing is padded
                params = [
                    SamplingParams(**KINDS[i % 2], seed=i, max_tokens=100, ignore_eos=True)
                    for i in range(count)
                ]
                answers.append([o["token_ids"] for o in llm.generate(prompts[:count], params)])
            if graph is not None:
                assert graph.replays > 400
    half = len(answers) // 2
    for recorded_ids, single_ids in zip(answers[:half], answers[half:], strict=True):
        assert recorded_ids == single_ids, len(single_ids)
    one_row.check()
