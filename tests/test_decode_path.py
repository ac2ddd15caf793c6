"""The number of files on the path of one decode step from the scheduler to the kernels."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from recorder import RecordingGraph

from minisgl import LLM, SamplingParams
from minisgl.attention.metadata import DecodeBuffers
from minisgl.core import Phase
from minisgl.engine.graph import GraphRunner, view_buffers
from minisgl.engine.sampler import Sampler
from minisgl.scheduler.messages import UserMsg
from tests.fakes import record_on_a_cpu

ROOT = Path(__file__).resolve().parents[1]


def opened(call: Callable[[], object]) -> set[str]:
    """Files of the package in which a Python function runs during `call`, kernels included."""
    package, seen = str(ROOT / "minisgl") + os.sep, set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.add(frame.f_code.co_filename.removeprefix(package))

    gc.collect()  # what ends with an object is not on the way of this call
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_a_decode_step_opens_few_files_before_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part of a captured step: decide, take pages, lay out, send, replay.

    Counted over several steps, some of which take a page. Not counted are the kernels, which the
    next test counts, and the way of the tokens to the caller.
    """
    record_on_a_cpu(monkeypatch)
    llm = LLM(page_size=4, num_pages=64, cuda_graph_bs=[2])
    params, ids = SamplingParams(max_tokens=32, ignore_eos=True), list(range(5, 15))
    llm.channel.put_messages(*(UserMsg(uid, ids, params) for uid in (1, 2)))
    scheduler, graph = llm.scheduler, llm.scheduler.engine.runners.decode
    assert graph is not None
    for _ in range(4):
        scheduler.step_overlap()
    before, files, launched = graph.replays, set(), []

    def decide_and_launch() -> None:
        batch = scheduler.next_step()
        assert batch is not None and batch.phase is Phase.DECODE and batch.size == 2
        launched.append(scheduler.launch(batch))

    for _ in range(5):
        files |= opened(decide_and_launch)
        scheduler.finish_in_flight()
        scheduler.in_flight = launched[-1]
    assert before > 0 and graph.replays == before + 5
    llm.shutdown()
    assert {"scheduler/scheduler.py", "kvcache/page_table.py", "engine/graph.py"} <= files
    assert len(files) <= 14, sorted(files)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs without a GPU")
def test_a_graph_holds_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a step in a CUDA graph: gather, a fused layer, logits, sample, scatter."""
    pytest.importorskip("triton")
    from minisgl.attention.fused_backend import FusedBackend
    from minisgl.kernels import sample
    from minisgl.models.fused import FusedModel
    from tests.fused_cases import World, small_model

    monkeypatch.setattr(sample, "target_programs", lambda device: 2)
    model = small_model("qwen3", num_hidden_layers=1, head_dim=128, num_attention_heads=4)
    world = World([5, 6], kv=4, dim=128)
    backend = FusedBackend(world.pool, world.tables, 4, 128**-0.5)
    sampler = Sampler(320, "cpu", 0, sample.sample_logits)
    runner = GraphRunner(
        forward=FusedModel(model), sample=sampler.sample_rows, backend=backend, tables=world.tables,
        sizes=[2], vocab_size=320, dtype=torch.float32, new_graph=RecordingGraph,
    )  # fmt: skip
    static = view_buffers(runner.memory, 2)
    plan = backend.graph_plan(2, DecodeBuffers(static.rows, static.positions, static.out_loc))
    with torch.inference_mode():
        files = opened(lambda: runner.run_step(static, plan))
    kernels = {name for name in files if name.startswith("kernels/")}
    assert {"kernels/linear.py", "kernels/decode_attention.py", "kernels/sample.py"} <= kernels
    assert len(files) <= 15, sorted(files)
