"""All Triton kernels, compiled for GPUs that are not there; and those that have none that fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from minisgl.attention import triton_backend
from minisgl.kernels.device import DeviceLimits
from minisgl.models import fused
from tests.compile_cards import CARDS
from tests.turns import in_turns

ROOT = Path(__file__).parents[1]
STACK = 128  # bytes that a thread may spill; 96 today
EIGHT_BITS = {"minisgl.kernels.scaled_mm.quantize_rows_kernel"}  # an A100 has no such instructions
SPILLED = {"minisgl.kernels.prefill_attention.prefill_kernel": 160}  # outside of its loops
HOPPER = {"minisgl.kernels.prefill_attention.prefill_kernel"}  # nor have an A100 and an L4 these
PARTS = [(card, i, n) for card, n in (("A100", 10), ("L4", 11), ("H200", 11)) for i in range(n)]


@pytest.mark.parametrize(("card", "part", "parts"), in_turns(32, PARTS))
def test_every_kernel_fits_the_card(card: str, part: int, parts: int, tmp_path: Path) -> None:
    """A part of all variants each day; in a new process, without the interpreter."""
    script = "from tests.compile_cards import main; main()"
    command = [sys.executable, "-c", script, card, "--part", str(part), "--parts", str(parts)]
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, check=True, stdout=subprocess.PIPE
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {
        f"minisgl.kernels.{path.stem}.{name}"
        for path in (ROOT / "minisgl" / "kernels").glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)
    }
    launched = {row["kernel"] for row in rows}
    missing = {"A100": EIGHT_BITS | HOPPER, "L4": HOPPER, "H200": set()}
    assert kernels - launched == missing[card]
    compiled = [row for row in rows if "shared" in row]
    assert len(compiled) > 5
    for row in compiled:
        assert row["shared"] <= CARDS[card].shared_memory, row
        assert row["stack"] <= SPILLED.get(row["kernel"], STACK), row


@pytest.mark.parametrize(("capability", "fits"), [(75, False), (80, True)])
def test_kernels_that_do_not_fit_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, capability: int, fits: bool
) -> None:
    gpu, limits = torch.device("cuda:0"), DeviceLimits(40, 65_536, capability)
    for module in (fused, triton_backend):
        monkeypatch.setattr(module, "device_limits", lambda device: limits)
    weight = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=gpu)
    model: Any = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight))
    whole = SimpleNamespace(model=model, config=SimpleNamespace(head_dim=128))
    assert fused.can_fuse(whole) == fits
    if fits:
        assert triton_backend.count_sms(gpu, torch.float16) == 40
        return
    with pytest.raises(ValueError, match=r"attention_backend: .* 8\.0 or above, got 7\.5"):
        triton_backend.count_sms(gpu, torch.float16)
