"""The sampler: distributions against exact ones, seeds independent of the batch, logprobs."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from minisgl.attention.staging import StagingRing
from minisgl.core import Req, SamplingParams
from minisgl.engine import sample_kernel
from minisgl.engine import sampler as module
from minisgl.engine.sampler import (
    Sampler,
    engine_seeds,
    gumbel_noise,
    mix64,
    nucleus_mask,
    step_keys,
    token_bits,
    top_candidates,
)
from minisgl.kernels import sample as sample_kernels
from tests.sampling import assert_same_draws, make_keys, row_tensors

M32, M64 = 2**32 - 1, 2**64 - 1


def make_req(uid: int = 0, position: int = 4, **params: object) -> Req:
    """Make a request whose next token goes to `position`; the host has three tokens only."""
    req = Req(
        uid=uid,
        input_ids=np.arange(3, dtype=np.int32),
        sampling_params=SamplingParams(**params),
        max_new_tokens=100_000,
    )
    req.device_len = position
    return req


def draw_many(logits: torch.Tensor, count: int, **params: object) -> np.ndarray:
    """Tokens that one seeded request draws at `count` positions from the same logits [vocab]."""
    sampler = Sampler(len(logits), "cpu")
    first, reqs = make_req(**params), []
    for position in range(4, 4 + count):
        reqs.append(copy.copy(first))
        reqs[-1].device_len = position
    out = sampler.sample(logits.expand(count, -1), sampler.prepare(reqs))
    return out.next_ids.numpy()


def exact(
    logits: np.ndarray, temperature: float, top_k: int = -1, top_p: float = 1.0
) -> np.ndarray:
    """Probabilities [vocab] by the definition, in float64."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    keep = np.zeros(len(p), bool)
    keep[order[: top_k if top_k > 0 else None]] = True
    if top_k > 0 or top_p < 1:
        keep &= p >= p.max() * 2.0**-40
    p = np.where(keep, p, 0.0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    allowed = order[before < top_p * (1 - 1e-12)]
    q = np.zeros_like(p)
    q[allowed] = p[allowed]
    return q / q.sum()


def kernel_noise(bits: torch.Tensor) -> torch.Tensor:
    """Noise of random bits by the kernel's function, float32 [n]."""
    out = torch.empty(len(bits))
    noise_of_bits[(1,)](bits, out, len(bits), BLOCK=triton.next_power_of_2(len(bits)))
    return out


def kernel_bits(vocab: int, key: torch.Tensor) -> torch.Tensor:
    """Random bits of tokens 0 to vocab by the kernel's function, int32 [vocab]; key int32 [2]."""
    out = torch.empty(vocab, dtype=torch.int32)
    bits_of_tokens[(1,)](key.contiguous(), out, vocab, BLOCK=triton.next_power_of_2(vocab))
    return out


@triton.jit
def noise_of_bits(bits_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, sample_kernels.hash_noise(bits), mask=at < count)


@triton.jit
def bits_of_tokens(key_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = sample_kernels.hash_bits(at, tl.load(key_ptr), tl.load(key_ptr + 1))
    tl.store(out_ptr + at, bits, mask=at < count)


def allowed(logits: torch.Tensor, threshold: int, last_id: int) -> list[int]:
    """Ids that a threshold leaves, by the definition; logits float32 [vocab]."""
    bits = (logits + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tied = (key == threshold) & (torch.arange(len(logits)) <= last_id)
    return torch.nonzero((key > threshold) | tied).flatten().tolist()


# ------------------------------------------------------------------------------ random bits


def python_mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def python_bits(seed: int, position: int, token: int) -> int:
    """The definition, in plain Python integers."""
    golden = 0x9E3779B97F4A7C15
    mixed = python_mix64((python_mix64((seed + golden) & M64) + position * golden) & M64)
    x = token ^ (mixed & M32)
    x ^= x >> 16
    x = (x * 0x7FEB352D) & M32
    x ^= mixed >> 32
    x ^= x >> 15
    x = (x * 0x846CA68B) & M32
    x ^= x >> 16
    return x & 0x7FFFFFFF


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, M64), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_bits_are_those_of_the_definition(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs], np.int64)
    tokens = torch.tensor([0, 1, 7, 255, 151_935], dtype=torch.int32)
    bits = token_bits(torch.from_numpy(step_keys(seeds, positions)), tokens)
    assert bits.dtype == torch.int32
    expected = [[python_bits(s, p, t) for t in tokens.tolist()] for s, p in pairs]
    assert bits.tolist() == expected


def test_bits_never_change_between_versions() -> None:
    """A stored seed must give the same answer next year."""
    assert python_bits(0, 0, 0) == 468371343
    assert python_bits(2**64 - 1, 12345, 151_935) == 188632783
    tokens = draw_many(torch.zeros(1000), 8, temperature=1.0, seed=1234)
    assert tokens.tolist() == [827, 315, 434, 157, 928, 620, 798, 367]


def test_mix64_is_one_to_one_on_a_sample() -> None:
    values = mix64(np.arange(100_000, dtype=np.uint64))
    assert len(np.unique(values)) == len(values)


def test_noise_is_gumbel_and_finite() -> None:
    keys = torch.from_numpy(step_keys(np.arange(50, dtype=np.uint64), np.arange(50)))
    noise = gumbel_noise(keys, torch.arange(4000, dtype=torch.int32)).double().flatten()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01  # Euler's constant
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    edges = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double()
    quantiles = -torch.log(-torch.log(edges))
    below = [(noise < q).double().mean().item() for q in quantiles]
    assert np.allclose(below, edges, atol=0.005)


def test_noise_extremes_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 0x7FFFFFFF):
        monkeypatch.setattr(
            module, "token_bits", lambda k, t, b=bits: torch.full((1, 3), b, dtype=torch.int32)
        )
        assert torch.isfinite(gumbel_noise(torch.zeros(2, 1), torch.zeros(3))).all()


# ------------------------------------------------------------------------------ distributions

CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("seed", [0, 7])
def test_distribution_is_exact(params: dict[str, float], seed: int) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(5)) * 1.5
    count = 6_000
    tokens = draw_many(logits, count, seed=seed, **params)
    want = exact(logits.double().numpy(), **params) * count
    got = np.bincount(tokens, minlength=8)
    assert (got[want == 0] == 0).all(), "a filtered token was drawn"
    assert chisquare(got[want > 0], want[want > 0]).pvalue > 1e-3


def test_distribution_over_seeds() -> None:
    """At one position, over many requests' seeds: the other axis of the generator."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = Sampler(4, "cpu")
    reqs = [make_req(seed=seed, temperature=1.0) for seed in range(6_000)]
    got = np.bincount(sampler.sample(logits.expand(6_000, -1), sampler.prepare(reqs)).next_ids)
    want = exact(logits.double().numpy(), 1.0) * 6_000
    assert chisquare(got, want).pvalue > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    tokens = draw_many(torch.zeros(5), 10_001, seed=3, temperature=1.0)
    pairs = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25)
    assert chisquare(pairs).pvalue > 1e-3


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """A tail of 1000 tokens with one per cent of the mass in all."""
    logits = torch.full((1001,), math.log(0.01 / 1000))
    logits[0] = math.log(0.99)
    tokens = draw_many(logits, 20_000, seed=1, temperature=1.0)
    assert abs((tokens != 0).sum() - 200) < 60


# ------------------------------------------------------------------------------ greedy, filters


def test_greedy_prepares_nothing_and_breaks_ties_by_id() -> None:
    sampler = Sampler(6, "cpu")
    reqs = [make_req(), make_req(temperature=1.0, top_k=1)]
    args = sampler.prepare(reqs)
    assert args is None
    logits = torch.tensor([[0.0, 2, 2, 1, 2, 0], [3.0, 3, 3, 3, 3, 3]])
    assert sampler.sample(logits, args).next_ids.tolist() == [1, 0]
    hot = [make_req(), make_req(temperature=1.0, top_k=1), make_req(temperature=9.0)]
    mixed = sampler.sample(torch.cat([logits, logits[:1]]), sampler.prepare(hot))
    assert mixed.next_ids[:2].tolist() == [1, 0]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_kept_is_the_definition(data: st.DataObject) -> None:
    """The filters against sorting in float64; logits from a small set, so that ties are common."""
    vocab = data.draw(st.integers(2, 12))
    some = st.sampled_from([-40.0, -18.0, -2.0, -1.0, 0.0, 0.5, 1.0])
    values = data.draw(st.lists(some, min_size=vocab, max_size=vocab))
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]))
    width = data.draw(st.integers(top_k, vocab))
    ids, top = top_candidates(torch.tensor([values]), width)
    keep = nucleus_mask(top, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    got = sorted(ids[keep].tolist())
    want = np.flatnonzero(exact(np.array(values), 1.0, top_k, top_p)).tolist()
    assert got == want


def test_a_share_below_two_to_the_minus_40_is_dropped() -> None:
    scaled = torch.tensor([[0.0, -27.0, -28.0]])
    for top_p in (1.0, 1.0 - 1e-14):
        keep = nucleus_mask(scaled, torch.tensor([3]), torch.tensor([top_p], dtype=torch.float64))
        assert keep.tolist() == [[True, True, False]]


def test_top_candidates_order_ties_and_special_values() -> None:
    values = torch.tensor([[1.0, torch.nan, 1.0, -0.0, 0.0, torch.inf, -torch.inf, -3.0]])
    for width in (8, 5):
        ids, sorted_values = top_candidates(values, width)
        assert ids.tolist()[0] == [1, 5, 0, 2, 3, 4, 7, 6][:width]
        assert sorted_values[0, 2].item() == 1.0
    negative_nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    ids, _ = top_candidates(torch.cat([torch.tensor([5.0]), negative_nan])[None], 2)
    assert ids.tolist() == [[1, 0]]


@pytest.mark.parametrize("width", [1, 20, 1024, 1025, 3000])
def test_candidates_are_those_of_a_stable_sort(width: int) -> None:
    """Few by `topk`, many by a sort: with ties everywhere both give the one order."""
    values = torch.randint(-5, 5, (3, 3000), generator=torch.Generator().manual_seed(1)).float()
    ids, top = top_candidates(values, width)
    want = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, want.indices[:, :width]) and torch.equal(top, want.values[:, :width])


def test_the_chosen_token_alone_needs_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "largest_keys", None)
    sampler, logits = Sampler(16, "cpu"), torch.randn(2, 16)
    out = sampler.sample(logits, sampler.prepare([make_req(logprobs=0), make_req()]))
    assert out.top_ids is not None and out.top_ids.shape == (2, 0) and out.logprobs is not None
    assert torch.isclose(out.logprobs[0], logits[0].log_softmax(-1).max())
    assert out.logprobs[1].isnan()


def test_extreme_parameters() -> None:
    logits = torch.tensor([0.0, 100.0, -100.0, 99.0])
    assert set(draw_many(logits, 50, temperature=1e-30, seed=0)) == {1}
    assert set(draw_many(logits, 50, temperature=1e-30, top_p=0.9, seed=0)) == {1}
    assert set(draw_many(logits, 400, temperature=1e30, seed=0)) == {0, 1, 2, 3}
    assert set(draw_many(logits, 50, temperature=5.0, top_p=1e-300, seed=0)) == {1}
    assert len(set(draw_many(logits, 400, temperature=1e30, top_k=1000, seed=0))) == 4


def test_what_nobody_asks_for_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("work that no request asked for")

    sampler = Sampler(16, "cpu")
    logits = torch.randn(2, 16)
    monkeypatch.setattr(module, "top_candidates", forbidden)
    sampler.sample(logits, sampler.prepare([make_req(temperature=1.0), make_req()]))
    monkeypatch.setattr(module, "gumbel_noise", forbidden)
    monkeypatch.setattr(StagingRing, "upload", forbidden)
    sampler.sample(logits, sampler.prepare([make_req(), make_req()]))


def test_filters_touch_only_the_rows_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    original = module.top_candidates

    def spy(values: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((len(values), width))
        return original(values, width)

    monkeypatch.setattr(module, "top_candidates", spy)
    sampler = Sampler(32, "cpu")
    reqs = [
        make_req(temperature=1.0, top_k=3),
        make_req(temperature=1.0),
        make_req(temperature=1.0, top_k=5, top_p=0.5),
        make_req(),
        make_req(temperature=1.0, top_p=0.5),
    ]
    sampler.sample(torch.randn(5, 32), sampler.prepare(reqs))
    assert seen == [(3, 32)]


def test_logits_are_left_as_they_are() -> None:
    sampler = Sampler(32, "cpu")
    logits = torch.randn(3, 32)
    before = logits.clone()
    reqs = [make_req(temperature=0.5, logprobs=2), make_req(temperature=1.0, top_k=4), make_req()]
    sampler.sample(logits, sampler.prepare(reqs))
    assert torch.equal(logits, before)


# ------------------------------------------------------------------------------ seeds

params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, 17]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "seed": st.sampled_from([None, 0, 1, 2**63 - 1]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_pitfall_15_a_draw_depends_on_its_request_alone(
    params: list[dict[str, float]], random: object
) -> None:
    """In any batch, in any order, with any neighbours: the token (and logprobs) drawn alone."""
    vocab = 23
    generator = torch.Generator().manual_seed(len(params))
    logits = torch.randn(len(params), vocab, generator=generator)
    logits = (logits * 4).round() / 2  # ties
    reqs = [make_req(uid, 4 + uid % 3, **p) for uid, p in enumerate(params)]
    order = list(range(len(reqs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    sampler = Sampler(vocab, "cpu", seed=5)
    out = sampler.sample(logits[order], sampler.prepare([reqs[i] for i in order]))
    for row, i in enumerate(order):
        alone = Sampler(vocab, "cpu", seed=5)
        single = alone.sample(logits[i : i + 1], alone.prepare([reqs[i]]))
        assert out.next_ids[row] == single.next_ids[0]
        if single.logprobs is not None:
            assert torch.equal(out.logprobs[row], single.logprobs[0])


def test_noise_is_bit_equal_in_any_batch() -> None:
    """Not only the token: every bit of the noise, at every place of a large batch."""
    seeds = np.arange(37, dtype=np.uint64)
    positions = np.arange(37)
    tokens = torch.arange(4999, dtype=torch.int32)
    together = gumbel_noise(torch.from_numpy(step_keys(seeds, positions)), tokens)
    for row in (0, 1, 17, 36):
        key = step_keys(seeds[row : row + 1], positions[row : row + 1])
        assert torch.equal(together[row], gumbel_noise(torch.from_numpy(key), tokens)[0])


def test_the_position_counts_not_what_the_host_knows() -> None:
    """Under overlap a step is prepared before the host has seen the token before it."""
    sampler = Sampler(50, "cpu")
    late, early = make_req(position=9, temperature=1.0, seed=1), make_req(temperature=1.0, seed=1)
    early.device_len = 9
    for token in range(5):
        early.append(token)
    assert late.host_len != early.host_len
    logits = torch.randn(1, 50).expand(2, -1)
    tokens = sampler.sample(logits, sampler.prepare([late, early])).next_ids
    assert tokens[0] == tokens[1]
    moved = make_req(position=10, temperature=1.0, seed=1)
    keys = sampler.prepare([late, moved]).keys
    assert (keys[:, 0] != keys[:, 1]).all()


def test_prepared_args_are_a_snapshot() -> None:
    sampler = Sampler(50, "cpu")
    req = make_req(temperature=1.0, seed=1)
    logits = torch.randn(1, 50)
    args = sampler.prepare([req])
    first = sampler.sample(logits, args).next_ids
    req.device_len += 1
    assert torch.equal(sampler.sample(logits, args).next_ids, first)


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    seeds = engine_seeds(0, np.arange(1000))
    assert len(np.unique(seeds)) == 1000
    assert (seeds == engine_seeds(0, np.arange(1000))).all(), "ranks must agree"
    assert (seeds != engine_seeds(1, np.arange(1000))).all()
    args = Sampler(50, "cpu").prepare([make_req(uid, temperature=1.0) for uid in range(1000)])
    assert args is not None and len(np.unique(args.keys, axis=1).T) == 1000
    twins = [make_req(uid, temperature=1.0, seed=3) for uid in (7, 8)]
    keys = Sampler(50, "cpu").prepare(twins).keys
    assert (keys[:, 0] == keys[:, 1]).all() and (keys[:, 0] == step_keys(*SEED_3)[:, 0]).all()


SEED_3 = (np.array([3], np.uint64), np.array([4]))  # a seed, and the position of `make_req`


# ------------------------------------------------------------------------------ the host's part


def test_prepared_arrays_cover_every_row() -> None:
    reqs = [
        make_req(0),
        make_req(1, temperature=0.5, seed=1),
        make_req(2, temperature=1e-9, top_k=3, top_p=0.5),
        make_req(3, temperature=1.0, top_k=1),
        make_req(4, temperature=1.0, top_p=0.5),
        make_req(5, logprobs=2),
    ]
    sampler = Sampler(50, "cpu")
    args = sampler.prepare(reqs)
    assert args.temperature.tolist() == [0.0, 0.5, np.float32(1e-5), 0.0, 1.0, 0.0]
    assert args.temperature.dtype == np.float32
    assert args.keys.shape == (2, 6) and args.keys.dtype == np.int32
    assert args.width.tolist() == [0, 0, 3, 0, 50, 0]
    assert args.logprob_rows.tolist() == [5] and args.num_top == 2 and args.filtered
    assert not args.simple and not sampler.prepare(reqs[:3]).simple
    assert not sampler.prepare(reqs[5:]).simple and sampler.prepare(reqs[:2]).simple
    assert sampler.prepare([reqs[0], reqs[3]]) is None


@given(batches=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1))
def test_what_is_known_of_a_batch_is_used_for_that_batch_alone(batches: list[list[int]]) -> None:
    """Any order of batches, the same one again or another of its size: as a fresh sampler does."""
    kinds: list[dict[str, float]] = [
        {}, {"temperature": 1.0}, {"temperature": 0.5, "seed": 3}, {"temperature": 1.0, "top_k": 2},
        {"logprobs": 1}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.5, "seed": 4}, {},
    ]  # fmt: skip
    reqs = [make_req(uid, **kind) for uid, kind in enumerate(kinds)]
    sampler = Sampler(50, "cpu", seed=9)
    for position, batch in enumerate(batches):
        chosen = [reqs[index] for index in batch]
        for req in chosen:
            req.device_len = 5 + position
        got, want = sampler.prepare(chosen), Sampler(50, "cpu", seed=9).prepare(chosen)
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            for name, value in vars(want).items():
                assert np.array_equal(getattr(got, name), value), name


def test_requests_may_share_parameters() -> None:
    shared = SamplingParams(temperature=1.0)
    reqs = [make_req(uid) for uid in range(3)]
    for req in reqs:
        req.sampling_params = shared
    sampler = Sampler(50, "cpu")
    assert len(np.unique(sampler.prepare(reqs).keys[0])) == 3


# ------------------------------------------------------------------------------ logprobs


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampler = Sampler(40, "cpu")
    logits = torch.randn(4, 40) * 3
    reqs = [
        make_req(logprobs=2),
        make_req(temperature=2.0),
        make_req(temperature=0.5, top_k=3, seed=1, logprobs=4),
        make_req(logprobs=0),
    ]
    out = sampler.sample(logits, sampler.prepare(reqs))
    raw = logits.log_softmax(-1)
    for row in (0, 2, 3):
        assert torch.isclose(out.logprobs[row], raw[row, out.next_ids[row]])
    assert out.logprobs[1].isnan() and out.top_ids[1].tolist() == [-1] * 4
    want = raw[2].topk(4)
    assert out.top_ids[2].tolist() == want.indices.tolist()
    assert torch.allclose(out.top_logprobs[2], want.values)
    assert torch.allclose(out.top_logprobs[0, :2], raw[0].topk(2).values)
    assert out.top_ids.dtype == torch.int64 and out.logprobs.dtype == torch.float32


def test_logprobs_with_greedy_only_and_more_than_the_vocabulary() -> None:
    sampler = Sampler(3, "cpu")
    out = sampler.sample(torch.zeros(1, 3), sampler.prepare([make_req(logprobs=20)]))
    assert out.next_ids.tolist() == [0] and out.top_ids.tolist() == [[0, 1, 2]]
    assert torch.allclose(out.top_logprobs, torch.full((1, 3), -math.log(3)))


def test_bfloat16_logits() -> None:
    sampler = Sampler(64, "cpu")
    logits = torch.randn(3, 64).bfloat16()
    reqs = [make_req(), make_req(temperature=1.0, seed=0), make_req(temperature=1.0, top_p=0.5)]
    low = sampler.sample(logits, sampler.prepare(reqs)).next_ids
    assert torch.equal(low, sampler.sample(logits.float(), sampler.prepare(reqs)).next_ids)


# ------------------------------------------------------------------------------ broken input


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
    ],
    ids=str,
)
def test_broken_rows_give_a_valid_id_and_harm_nobody(bad: float, params: dict[str, float]) -> None:
    sampler = Sampler(10, "cpu")
    good = torch.randn(1, 10)
    one = good.clone()
    one[0, 6] = bad
    logits = torch.cat([one, torch.full((1, 10), bad), good])
    reqs = [make_req(logprobs=2, seed=0, **params) for _ in range(3)]
    out = sampler.sample(logits, sampler.prepare(reqs))
    assert ((out.next_ids >= 0) & (out.next_ids < 10)).all()
    if math.isnan(bad) or bad > 0:
        assert out.next_ids[0] == 6, "NaN and +inf count as the largest logit"
    if bad < 0 and not math.isnan(bad):
        assert out.next_ids[0] != 6
        assert out.next_ids[1] == 0
    assert out.logprobs is not None and out.top_logprobs is not None
    for row in (1,) if bad == -torch.inf else (0, 1):
        assert out.logprobs[row].isnan() and out.top_logprobs[row].isnan().all()
    alone = sampler.sample(good, sampler.prepare(reqs[2:]))
    assert out.next_ids[2] == alone.next_ids[0]


def test_wrong_shapes_are_refused() -> None:
    sampler = Sampler(10, "cpu")
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(torch.zeros(2, 11), None)
    args = sampler.prepare([make_req(temperature=1.0)])
    with pytest.raises(ValueError, match="1 rows were prepared, got 2"):
        sampler.sample(torch.zeros(2, 10), args)


# ------------------------------------------------------------------------------ the kernels


def filtered(rows: list[tuple[float, int, float]]) -> tuple[Any, ...]:
    """Return `sample_logits`' arguments for rows of (temperature, top_k, top_p)."""
    temperature, top_k, top_p = row_tensors(rows)
    return temperature, None, top_k, top_p


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/gpu/test_sampler_gpu.py runs the kernels"
)


@interpreted
def test_the_kernels_bits_are_those_of_the_definition() -> None:
    vocab = 5000
    keys = make_keys(3, 2**33)
    for row in range(3):
        bits = token_bits(keys[:, row : row + 1], torch.arange(vocab, dtype=torch.int32))[0]
        ours = kernel_bits(vocab, keys[:, row])
        assert torch.equal(ours, bits)
        noise = gumbel_noise(keys[:, row : row + 1], torch.arange(vocab, dtype=torch.int32))[0]
        assert torch.allclose(kernel_noise(bits), noise, rtol=1e-6, atol=1e-6)


@interpreted
def test_noise_of_extreme_bits() -> None:
    bits = torch.tensor([0, 1, 2**31 - 1, 2**31 - 65], dtype=torch.int32)
    noise = kernel_noise(bits)
    uniform = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    assert torch.allclose(noise, -(-torch.log1p(-uniform)).log(), rtol=1e-6)


logit_values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, 1e4, -1e4, math.nan,
                                math.inf, -math.inf])  # fmt: skip
row_settings = st.tuples(
    st.sampled_from([0.0, 1e-5, 0.3, 1.0, 5.0, 1e6]),
    st.sampled_from([0, 0, 1, 2, 5, 40, 10**6]),
    st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1]),
)


@interpreted
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_sample_logits_is_draw(data: st.DataObject) -> None:
    """Any rows, any logits: ties, NaN, infinities, padding; filters or none in one batch."""
    vocab = data.draw(st.integers(1, 40) | st.sampled_from([64, 65, 130]))
    rows = data.draw(st.lists(row_settings, min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    values = data.draw(st.lists(logit_values, min_size=1, max_size=8))
    padded = torch.from_numpy(rng.choice(values, (len(rows), vocab + 3)).astype(np.float32))
    if data.draw(st.booleans()):
        padded = torch.from_numpy(rng.normal(0, 3, padded.shape).astype(np.float32))
    logits = padded.to(dtype)[:, :vocab]
    temperature, top_k, top_p = row_tensors(rows)
    keys = make_keys(len(rows), seed)
    few = (16, 64, 6)  # few programs: many blocks in a slice
    blocks = data.draw(st.sampled_from([(2048, 8192, 528), (16, 64, 528), few]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_kernels, "SLICE_BLOCK", blocks[0])
        patch.setattr(sample_kernels, "FILTER_BLOCK", blocks[1])
        patch.setattr(
            sample_kernels, "target_programs", lambda device: blocks[2]
        )  # few: long slices
        plain = sample_kernels.sample_logits(logits, keys, temperature)
        got = sample_kernels.sample_logits(logits, keys, temperature, None, top_k, top_p)
    off = torch.zeros_like(top_k), torch.ones_like(top_p)
    assert_same_draws(plain, logits, keys, temperature, *off)
    assert_same_draws(got, logits, keys, temperature, top_k, top_p)


@interpreted
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_the_filter_keeps_what_kept_keeps(data: st.DataObject) -> None:
    """Not only the sampled token: the very set of candidates, ties included."""
    vocab = data.draw(st.integers(2, 60))
    values = data.draw(st.lists(st.integers(-6, 6) | st.just(-150), min_size=1, max_size=30))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = torch.from_numpy(rng.choice(values, (1, vocab)).astype(np.float32)) / 2
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]))
    warm = data.draw(st.sampled_from([0.25, 1.0, 2.0]))
    ids, top = top_candidates(logits, vocab)
    p = torch.tensor([top_p], dtype=torch.float64)
    keep = nucleus_mask(top / warm, torch.tensor([top_k]), p)
    k = torch.tensor([top_k], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_kernels, "FILTER_BLOCK", data.draw(st.sampled_from([8, 8192])))
        threshold, last_id = sample_kernels.filter_logits(logits, torch.tensor([warm]), k, p)
    if top_k == vocab and top_p == 1.0:
        assert threshold.item() == -(2**31)  # no filter at all
        return
    assert allowed(logits[0], threshold.item(), last_id.item()) == sorted(ids[keep].tolist())


@interpreted
@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_groups_whose_weight_is_not_in_their_largest_token(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens of nearly equal weight in each of eight groups: their bounds lie far apart."""
    monkeypatch.setattr(sample_kernels, "FILTER_BLOCK", 8)
    logits, p = torch.arange(64.0)[None] / 64, torch.tensor([top_p], dtype=torch.float64)
    ids, top = top_candidates(logits, 64)
    keep = nucleus_mask(top, torch.tensor([64]), p)
    off = torch.zeros(1, dtype=torch.int32)
    threshold, last_id = sample_kernels.filter_logits(logits, torch.ones(1), off, p)
    assert allowed(logits[0], threshold.item(), last_id.item()) == sorted(ids[keep].tolist())


@interpreted
def test_a_seed_reproduces_in_any_batch_and_at_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels cut rows differently at each batch size; the draws stay."""
    monkeypatch.setattr(sample_kernels, "SLICE_BLOCK", 128)
    monkeypatch.setattr(sample_kernels, "target_programs", lambda device: 8)
    vocab = 400
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    keys = make_keys(3)
    temperature, top_k, top_p = row_tensors([(1.0, 0, 1.0), (0.7, 30, 0.9), (0.0, 0, 1.0)])
    alone = [
        sample_kernels.sample_logits(
            logits[i : i + 1], keys[:, i : i + 1], temperature[i : i + 1], None,
            top_k[i : i + 1], top_p[i : i + 1],
        ).item()
        for i in range(3)
    ]  # fmt: skip
    for order in ([2, 1, 0], [1, 1, 0, 2, 2, 0, 1], list(range(3)) * 3):
        part = torch.tensor(order)
        got = sample_kernels.sample_logits(
            logits[part], keys[:, part], temperature[part], None, top_k[part], top_p[part]
        )
        assert got.tolist() == [alone[i] for i in order]


@interpreted
def test_a_large_vocabulary_agrees_but_for_rounding() -> None:
    vocab, rows = 20_000, 4
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    keys = make_keys(rows)
    cases = [(0.6, 0, 1.0), (1.0, 20, 0.95), (1.0, 0, 0.9), (0.0, 0, 1.0)]
    temperature, top_k, top_p = row_tensors([cases[i % 4] for i in range(rows)])
    got = sample_kernels.sample_logits(logits, keys, temperature, None, top_k, top_p)
    assert_same_draws(got, logits, keys, temperature, top_k, top_p)


@interpreted
@pytest.mark.parametrize("case", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5)])
def test_kernels_take_nan_for_the_largest_and_harm_nobody(case: tuple[float, int, float]) -> None:
    """A NaN has a sign bit, too; it must not make it the smallest."""
    bad = [math.nan, -math.nan, math.inf, -math.inf]
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).repeat(9, 1)
    for row, value in enumerate(bad):
        logits[row, 37], logits[4 + row] = value, value
    keys = make_keys(1).expand(-1, 9).contiguous()
    got = sample_kernels.sample_logits(logits, keys, *filtered([case] * 9)).tolist()
    alone = sample_kernels.sample_logits(logits[8:], keys[:, :1], *filtered([case]))
    assert got[:3] == [37] * 3 and got[3] != 37
    assert got[4:8] == [0] * 4 and got[8] == alone.item()


@interpreted
@pytest.mark.parametrize("kernel", [None, sample_kernels.sample_logits])
def test_nan_wins_beside_infinity_and_equals_it_with_filters(kernel: Any) -> None:
    logits = torch.randn(1, 10).repeat(4, 1)
    logits[:, 4], logits[:, 5] = torch.inf, torch.nan
    warm = {"temperature": 1.0}
    reqs = [make_req(), make_req(**warm), make_req(**warm, top_k=3), make_req(**warm, top_p=0.5)]
    sampler = Sampler(10, "cpu", kernel=kernel)
    assert sampler.sample(logits, sampler.prepare(reqs)).next_ids.tolist() == [5, 5, 4, 4]


@interpreted
@pytest.mark.parametrize("programs", [1, 4, 528])
def test_ties_go_to_the_smaller_id_in_a_slice_and_across_slices(programs: int) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [700, 2100, 4100]] = 2.0
    cold = torch.zeros(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_kernels, "SLICE_BLOCK", 64)
        patch.setattr(sample_kernels, "target_programs", lambda device: programs)
        assert sample_kernels.sample_logits(logits, make_keys(2), cold).tolist() == [700, 0]


@interpreted
def test_results_go_where_they_are_wanted_and_bad_dtypes_are_refused() -> None:
    logits, out = torch.randn(3, 50), torch.full((4,), -1)
    result = sample_kernels.sample_logits(logits, make_keys(3), torch.zeros(3), out[:3])
    assert out.tolist() == [*logits.argmax(-1).tolist(), -1] and result.data_ptr() == out.data_ptr()
    wide = torch.randn(50, 3).T  # a row's logits do not lie side by side
    got = sample_kernels.sample_logits(wide, make_keys(3), torch.zeros(3))
    assert got.tolist() == wide.argmax(-1).tolist()
    empty = sample_kernels.sample_logits(logits[:0], make_keys(1)[:, :0], torch.zeros(0))
    assert empty.tolist() == []
    with pytest.raises(ValueError, match="logits: must be bfloat16, float16 or float32"):
        sample_kernels.sample_logits(logits.double(), make_keys(3), torch.zeros(3))


@interpreted
@settings(max_examples=8, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=5), st.integers(0, 99))
def test_a_sampler_with_kernels_is_one_without(params: list[dict[str, float]], seed: int) -> None:
    logits = torch.randn(len(params), 23, generator=torch.Generator().manual_seed(seed))
    reqs = [make_req(uid, 4 + uid % 3, **p) for uid, p in enumerate(params)]
    outs = []
    for kernel in (sample_kernels.sample_logits, None):
        sampler = Sampler(23, "cpu", seed=5, kernel=kernel)
        outs.append(sampler.sample((logits * 4).round() / 2, sampler.prepare(reqs)))
    assert torch.equal(outs[0].next_ids, outs[1].next_ids)
    if outs[0].logprobs is not None:
        assert torch.equal(outs[0].top_ids, outs[1].top_ids)


@interpreted
def test_draw_rows_is_the_same_with_and_without_the_kernel() -> None:
    logits, keys, temperature = torch.randn(3, 50), make_keys(3), torch.tensor([0.0, 0.5, 2.0])
    slow = Sampler(50, "cpu").sample_rows(logits, keys, temperature)
    fast = Sampler(50, "cpu", kernel=sample_kernels.sample_logits)
    assert torch.equal(fast.sample_rows(logits, keys, temperature), slow)
    assert slow[0] == logits[0].argmax()


def test_there_is_no_kernel_without_a_gpu_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_kernel.load_sample_kernel("cpu") is None
    assert sample_kernel.load_sample_kernel("cuda:0") is sample_kernels.sample_logits
    monkeypatch.setattr(sample_kernel, "find_spec", lambda name: None)
    assert sample_kernel.load_sample_kernel("cuda:0") is None
