"""The sampling kernels on a GPU: the oracle's draws, any batch size, CUDA graphs, distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from minisgl.core import Req, SamplingParams
from minisgl.engine.logits_processors import LogitsProcessors, logits_params
from minisgl.engine.sample_kernel import load_sample_kernel
from minisgl.engine.sampler import (
    Sampler,
    gumbel_noise,
    nucleus_mask,
    sample_tokens,
    step_keys,
    token_bits,
    top_candidates,
)
from tests.sampling import assert_same_draws, make_keys, row_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

VOCAB = 151_936
CASES = [  # temperature, top_k, top_p
    (0.0, 0, 1.0),
    (0.6, 0, 1.0),
    (0.6, 20, 0.95),
    (1.0, 0, 0.9),
    (1.0, 1000, 1.0),
    (5.0, 0, 1.0),
]
SIZES = [1, 2, 7, 64, 131, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_logits(rows: int, dtype: torch.dtype = torch.bfloat16, pad: int = 0) -> torch.Tensor:
    """Logits [rows, VOCAB] on the GPU, cut out of a vocabulary that is padded."""
    generator = torch.Generator("cuda").manual_seed(rows)
    wide = torch.randn(rows, VOCAB + pad, generator=generator, device="cuda") * 3
    return wide.to(dtype)[:, :VOCAB]


def settings_of(rows: int) -> tuple[torch.Tensor, ...]:
    """temperature, top_k and top_p [rows] on the GPU: every case in turn."""
    return tuple(part.cuda() for part in row_tensors([CASES[i % len(CASES)] for i in range(rows)]))


def sample(logits: torch.Tensor, keys: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """`sample_logits` with temperature and perhaps top_k and top_p."""
    from minisgl.kernels.sample import sample_logits

    return sample_logits(logits, keys, values[0], None, *values[1:])


def test_bits_are_equal_on_both_devices() -> None:
    keys, tokens = make_keys(9), torch.arange(5000, dtype=torch.int32)
    assert torch.equal(token_bits(keys.cuda(), tokens.cuda()).cpu(), token_bits(keys, tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", SIZES)
def test_draws_are_those_of_the_oracle(rows: int, dtype: torch.dtype) -> None:
    logits, keys = random_logits(rows, dtype, pad=128), make_keys(rows).cuda()
    temperature, top_k, top_p = settings_of(rows)
    got = sample(logits, keys, temperature, top_k, top_p)
    assert_same_draws(got, logits, keys, temperature, top_k, top_p)
    plain = sample(logits, keys, temperature)
    off = torch.zeros_like(top_k), torch.ones_like(top_p)
    assert_same_draws(plain, logits, keys, temperature, *off)
    assert torch.equal(sample(logits, keys, temperature * 0), logits.argmax(-1))


def test_thousands_of_draws_differ_by_rounding_only() -> None:
    """99.9 % are the oracle's; the scores of the others equal the best one up to rounding."""
    rows, vocab = 20_000, 4096
    logits = (torch.randn(rows, vocab, device="cuda") * 2).bfloat16()
    keys, ids = make_keys(rows).cuda(), torch.arange(vocab, dtype=torch.int32, device="cuda")
    warm = torch.full((rows,), 0.8, device="cuda")
    got, want = sample(logits, keys, warm), sample_tokens(logits, ids, 0, keys, warm)
    assert (got == want).double().mean() >= 0.999
    scores = logits.float() + warm[:, None] * gumbel_noise(keys, ids)
    ours, best = (scores.gather(1, tokens[:, None]) for tokens in (got, want))
    assert torch.allclose(ours, best, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_filters_leave_what_kept_leaves(dtype: torch.dtype) -> None:
    """The sets themselves: a token may differ where exp is rounded, at the edge of top-p only."""
    from minisgl.kernels.sample import filter_logits

    logits = random_logits(12, dtype, pad=64)
    temperature, top_k, top_p = settings_of(12)
    threshold, last_id = filter_logits(logits, temperature, top_k, top_p)
    values = logits.float() + 0.0
    bits = values.view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tied = (key == threshold[:, None]) & (torch.arange(VOCAB, device="cuda") <= last_id[:, None])
    ours = ((key > threshold[:, None]) | tied).sum(-1)
    for row in range(12):
        warm, k = float(temperature[row]), int(top_k[row]) or VOCAB
        if warm == 0 or (k == VOCAB and top_p[row] == 1):
            assert ours[row] == VOCAB
            continue
        _, top = top_candidates(values[row : row + 1], VOCAB)
        limit = torch.tensor([k], device="cuda")
        want = int(nucleus_mask(top / warm, limit, top_p[row : row + 1]).sum())
        assert abs(int(ours[row]) - want) <= (0 if top_p[row] == 1 else 1 + want // 1000)


def test_a_row_draws_the_same_at_every_batch_size_and_place() -> None:
    logits, keys = random_logits(256), make_keys(256).cuda()
    values = settings_of(256)
    together = sample(logits, keys, *values)
    for size in (1, 3, 64, 255):
        part = torch.randperm(256, device="cuda")[:size]
        got = sample(logits[part], keys[:, part].contiguous(), *(value[part] for value in values))
        assert torch.equal(got, together[part]), size


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_a_graph_draws_what_eager_draws(rows: int, filtered: bool) -> None:
    """Keys, temperatures and filters are static buffers that change between replays."""
    logits, keys, values = random_logits(rows), make_keys(rows).cuda(), settings_of(rows)
    values = values if filtered else values[:1]
    sample(logits, keys, *values)  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, keys, *values)
    for step in range(3):
        keys.copy_(make_keys(rows, 1000 * step))
        values[0].copy_(values[0].roll(1))
        logits.copy_(random_logits(rows).roll(step, dims=1))
        graph.replay()
        assert torch.equal(out, sample(logits, keys, *values))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_broken_rows_give_a_valid_id_and_harm_nobody(bad: float) -> None:
    for case in CASES:
        logits, keys = random_logits(3), make_keys(3).cuda()
        values = tuple(part.cuda() for part in row_tensors([case] * 3))
        alone = sample(logits[2:], keys[:, 2:].contiguous(), *(value[2:] for value in values))
        logits[0, 4321] = bad
        logits[1] = bad
        got = sample(logits, keys, *values)
        assert got[2] == alone[0]
        assert got[1] == 0, "all are equal: the smallest id"
        assert (got[0] == 4321) == (not bad < 0), "NaN and +inf count as the largest logit"


@pytest.mark.parametrize("case", [(1.0, 0, 1.0), (2.5, 0, 1.0), (1.0, 3, 1.0), (1.5, 0, 0.8)])
def test_the_distribution_is_exact(case: tuple[float, int, float]) -> None:
    """200,000 draws of seven tokens, spread over a large vocabulary that cannot win."""
    rows, spread = 2000, 1000
    row = torch.full((7 * spread,), -1e4)
    row[::spread] = seven = torch.tensor([2.0, 1.6, 1.0, 0.5, 0.0, -0.5, -1.5])
    logits = row.cuda().expand(rows, -1)
    values = tuple(part.cuda() for part in row_tensors([case] * rows))
    counts = np.zeros(7)
    for step in range(100):
        keys = torch.from_numpy(
            step_keys(np.full(rows, 5, np.uint64), rows * step + np.arange(rows))
        )
        tokens = sample(logits, keys.cuda(), *values).cpu()
        assert (tokens % spread == 0).all()
        counts += np.bincount(tokens // spread, minlength=7)
    p = torch.softmax(seven.double() / case[0], 0).numpy()
    p[case[1] or 7 :] = 0
    p /= p.sum()
    p *= np.cumsum(p) - p < case[2]
    p /= p.sum()
    assert (counts[p == 0] == 0).all()
    assert chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


def test_the_sampler_uses_the_kernels_and_agrees_with_a_cpu() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 2
    kinds = [{}, {"top_k": 20}, {"top_p": 0.9}, {"logprobs": 2}]
    reqs = []
    for i in range(64):
        params = SamplingParams(temperature=float(i % 5 > 0), seed=i, **kinds[i % 4])
        req = Req(uid=i, input_ids=np.arange(3, dtype=np.int32), sampling_params=params,
                  max_new_tokens=9)  # fmt: skip
        reqs.append(req)
    kernel = load_sample_kernel("cuda")
    assert kernel is not None
    here, there = Sampler(5000, "cpu"), Sampler(5000, "cuda", kernel=kernel)
    slow = Sampler(5000, "cuda")
    cpu = here.sample(logits, here.prepare(reqs))
    for gpu in (s.sample(logits.cuda(), s.prepare(reqs)) for s in (there, slow)):
        same = cpu.next_ids == gpu.next_ids.cpu()
        assert same.double().mean() > 0.98
        assert torch.equal(cpu.top_ids, gpu.top_ids.cpu())


def test_processed_logits_are_those_of_a_cpu() -> None:
    """Every processor on rows of any length, in a pool full of strangers; no copy back, no wait."""
    rng = np.random.default_rng(0)
    pool = torch.from_numpy(rng.integers(0, 50, (9, 4096)))
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4, "min_p": 0.05, "temperature": 0.8},
        {
            "frequency_penalty": 0.3,
            "presence_penalty": -0.5,
            "logit_bias": {5: 9.0, VOCAB - 1: 1.0},
        },
        {"bad_words": [[3], [1, 2], rng.integers(0, 50, 3).tolist()], "min_tokens": 5000},
        {"allowed_token_ids": rng.integers(0, VOCAB, 1000).tolist(), "stop_token_ids": [9]},
    ]
    reqs = []
    for row in range(9):
        params = SamplingParams(**kinds[row % len(kinds)])
        req = Req(uid=row, input_ids=np.ones(3, np.int32), sampling_params=params,
                  max_new_tokens=4000, table_idx=row)  # fmt: skip
        req.device_len = int(rng.integers(3, 4000))
        req.logits_params = logits_params(params, VOCAB, [7])
        reqs.append(req)
    logits = random_logits(9, pad=64)
    found = []
    for device in ("cuda", "cpu"):
        processors = LogitsProcessors(VOCAB, pool.to(device))
        batch = processors.batch_args(reqs)
        assert batch is not None
        args, own = processors.step_args(batch, reqs), logits.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = processors.process(own, args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(out.cpu())
    assert torch.equal(found[0].isneginf(), found[1].isneginf())
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0][0], logits[0].float().cpu())
    processors = LogitsProcessors(VOCAB, pool.cuda())
    sampler = Sampler(VOCAB, "cuda", 0, load_sample_kernel("cuda"), processors)
    drawn = sampler.sample(logits, sampler.prepare(reqs)).next_ids.tolist()
    assert all(found[1][row, token] > -torch.inf for row, token in enumerate(drawn))
    assert drawn[0] == int(logits[0].argmax())
