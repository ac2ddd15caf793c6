"""The compiled model: the cuts are checked without a compiler, the compiler on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.models.compiled import CompiledModel, SizeSwitch
from tests.dense import dense_batch
from tests.fused_cases import small_model


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_cuts_change_nothing(arch: str) -> None:
    model = small_model(arch, hidden_size=32, intermediate_size=48, head_dim=16)
    cut = CompiledModel(model, backend="eager")
    fb = dense_batch([[1, 2, 3], [4, 5]], last_only=True)
    with torch.inference_mode():
        torch.testing.assert_close(cut(fb), model(fb), rtol=1e-4, atol=1e-4)


def test_several_ranks_are_refused() -> None:
    model = small_model("qwen3", hidden_size=32, intermediate_size=48, head_dim=16)

    class Two:
        rank, size = 0, 2

    model.ctx = type("Context", (), {"comm": Two()})()
    with pytest.raises(ValueError, match="torch_compile_max_bs"):
        CompiledModel(model)


def test_switch_looks_at_phase_and_size() -> None:
    from minisgl.core import Phase

    switch: Any = SizeSwitch(lambda fb: "compiled", lambda fb: "other", 2)
    fb = dense_batch([[1]])
    for phase, rows, want in (
        (Phase.DECODE, 2, "compiled"), (Phase.DECODE, 3, "other"), (Phase.PREFILL, 1, "other"),
    ):  # fmt: skip
        fb.phase, fb.positions = phase, torch.zeros(rows)
        assert switch(fb) == want
