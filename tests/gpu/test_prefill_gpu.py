"""Captured prefill on a GPU: replays equal direct calls of the kernels, and nearly eager steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from minisgl import LLM
from minisgl.config.engine import EngineConfig
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.engine import Engine, build_engine
from minisgl.engine.prefill_graph import MAX_REQUESTS
from tests.gpu.test_engine_gpu import (
    DEVICE,
    KINDS,
    assert_sums_are_right,
    crowd,
    free_memory,
    need,
    request,
    run,
    slots_in_all_layers,
    synchronize,
    wipe,
)

__all__ = ["free_memory"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def prompts(engine: Engine, lengths: list[tuple[int, int, int]], seed: int) -> list[Req]:
    """Requests (cached, end of the step, end of the prompt) on random pages of their own."""
    r, page_size, tables = random.Random(seed), engine.page_size, engine.tables
    pages = r.sample(range(engine.num_pages), engine.num_pages)
    reqs = []
    for index, (cached, end, length) in enumerate(lengths):
        mine = [pages.pop() for _ in range(-(-length // page_size))]
        slots = np.add.outer(np.array(mine) * page_size, np.arange(page_size)).ravel()
        ids = [r.randrange(engine.model_config.vocab_size) for _ in range(length)]
        row = tables.allocate()
        tables.write(row, 0, slots.astype(np.int32))
        tables.write_tokens(row, 0, np.array(ids, np.int32))
        params = SamplingParams(temperature=float(index % 2), seed=index)
        req = request(index, ids, params, row)
        req.cached_len = cached
        req.schedule(end)
        reqs.append(req)
    return reqs


MIXES = [
    [(0, 1, 1)],
    [(0, 60, 60), (300, 301, 301), (0, 3, 3)],
    [(0, 200, 400)],  # a chunk that ends no prompt
    [(130, 190, 190), (0, 40, 90), (17, 80, 80)],
    [(5 * i, 5 * i + 3, 5 * i + 3) for i in range(MAX_REQUESTS)],
    [(40, 90, 90), *((60 * i, 60 * i + 1, 60 * i + 1) for i in range(16))],  # running ones, too
    [(700, 900, 900), (0, 56, 56)],
    [(0, 7, 7)],
]


@pytest.mark.parametrize(("backend", "page_size"), [("triton,fused", 16), ("fi,fused", 1)])
def test_replay_equals_its_kernels_and_nearly_eager(backend: str, page_size: int) -> None:
    """Steps of all kinds in one engine, so that each finds what the one before left behind."""
    need(backend)
    config = EngineConfig(
        device=DEVICE, dtype="bfloat16", attention_backend=backend, page_size=page_size,
        num_pages=16384 // page_size, max_running_req=MAX_REQUESTS + 4, max_seq_len_override=1024,
        cuda_graph_bs=(1,), prefill_graph_max_tokens=256,
    )  # fmt: skip
    engine = build_engine(config, progress=False)
    engine.pool.buffer.normal_(generator=torch.Generator(engine.device).manual_seed(0))
    runner = engine.runners.prefill
    assert runner is not None
    synchronize()
    for seed, mix in enumerate(MIXES):
        reqs = prompts(engine, mix, seed)
        fi = engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL))
        assert fi.packed is not None, mix
        count, step = len(fi.sampled), runner.steps[fi.packed.shape[1]]
        new = torch.from_numpy(fi.out_loc.astype(np.int64)).to(engine.device)
        made: list[torch.Tensor] = []
        forward = engine.forward_pass
        engine.forward_pass = lambda fb, f=forward, m=made: m.append(f(fb).clone()) or m[-1]  # type: ignore
        with torch.inference_mode(), engine.on_stream():
            engine.tables.flush()
            engine.run_eager(fi)
            engine.forward_pass = forward
            written = slots_in_all_layers(engine, new)
            wipe(engine, new)
            drawn = runner.replay(fi.packed)[:count].clone()
            replay, again = runner.logits[:count].clone(), slots_in_all_layers(engine, new)
            after = engine.tables.token_pool.view(-1)[step.static.scatter[:count]]
            wipe(engine, new)
            runner.run_step(step.static, step.plan)
            called, third = runner.logits[:count].clone(), slots_in_all_layers(engine, new)
            want = None if count == 0 else engine.sampler.sample(replay, fi.sampling).next_ids
        synchronize()
        eager = made[0][:count]
        assert torch.equal(called, replay), f"{mix}: recorded kernels are not the called ones"
        assert torch.equal(third, again), mix
        near = (written.double() - again.double()).abs().max() / written.abs().max()
        assert near <= 0.04, (mix, near)
        if count:
            gap = (eager.double() - replay.double()).abs().max() / eager.abs().max()
            assert gap <= 0.04 and eager.std() > 0, (mix, gap)
            assert want is not None and torch.equal(drawn, want) and torch.equal(after, drawn)
        for req in reqs:
            engine.tables.free(req.table_idx)
    engine.shutdown()


def answers(most: int, **fields: Any) -> tuple[list[list[int]], int]:
    """Tokens of a crowd that shares beginnings, in chunks, and how many prefills were replays."""
    texts, params = crowd(48)
    how: dict[str, Any] = {"page_size": 16, "num_pages": 256, "max_seq_len_override": 512, **fields}
    with LLM(device=DEVICE, max_extend_tokens=256, prefill_graph_max_tokens=most, **how) as llm:
        outs = llm.generate(texts, params)
        graph = llm.scheduler.engine.runners.prefill
    return [out["token_ids"] for out in outs], 0 if graph is None else graph.replays


def test_recorded_prefill_gives_the_tokens_of_eager_prefill() -> None:
    """In float32 no token may hang on the padding; prefix hits, chunks, filters, log probs."""
    need("triton")
    (eager, none), (recorded, some) = (
        answers(most, dtype="float32", attention_backend="triton") for most in (0, 256)
    )
    assert none == 0 and some > 5
    for index, (a, b) in enumerate(zip(eager, recorded, strict=True)):
        assert a == b, (index, KINDS[index % len(KINDS)])


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8", "quantization": "fp8"}])
def test_answers_in_half_precision(fields: dict[str, Any]) -> None:
    need("triton,fused")
    outs = run(attention_backend="triton,fused", prefill_graph_max_tokens=512, **fields)
    if not fields:
        assert_sums_are_right(outs)
        return
    eager = run(attention_backend="triton,fused", prefill_graph_max_tokens=0, **fields)
    same = sum(a["text"] == b["text"] for a, b in zip(eager, outs, strict=True))
    assert same >= len(outs) - 2
