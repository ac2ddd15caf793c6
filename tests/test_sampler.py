"""The sampler: distributions against exact ones, seeds that nobody else can disturb, logprobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from minisgl.core import Req, SamplingParams
from minisgl.engine import sampler as module
from minisgl.engine.sampler import (
    Sampler,
    gumbel_noise,
    kept,
    mix64,
    request_seeds,
    step_keys,
    token_bits,
    top_candidates,
)
from minisgl.engine.staging import Staging

M32, M64 = 2**32 - 1, 2**64 - 1


def make_req(uid: int = 0, position: int = 4, **params: object) -> Req:
    """A request whose next token will stand at `position`; the host knows three tokens only."""
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
    reqs = [make_req(position=4 + i, **params) for i in range(count)]
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
    p = np.where(keep, p, 0.0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    allowed = order[before < top_p * (1 - 1e-12)]
    q = np.zeros_like(p)
    q[allowed] = p[allowed]
    return q / q.sum()


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
    count = 20_000
    tokens = draw_many(logits, count, seed=seed, **params)
    want = exact(logits.double().numpy(), **params) * count
    got = np.bincount(tokens, minlength=8)
    assert (got[want == 0] == 0).all(), "a filtered token was drawn"
    assert chisquare(got[want > 0], want[want > 0]).pvalue > 1e-3


def test_distribution_over_seeds() -> None:
    """At one position, over many requests' seeds: the other axis of the generator."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = Sampler(4, "cpu")
    reqs = [make_req(seed=seed, temperature=1.0) for seed in range(20_000)]
    got = np.bincount(sampler.sample(logits.expand(20_000, -1), sampler.prepare(reqs)).next_ids)
    want = exact(logits.double().numpy(), 1.0) * 20_000
    assert chisquare(got, want).pvalue > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    tokens = draw_many(torch.zeros(5), 20_001, seed=3, temperature=1.0)
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
    values = data.draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), min_size=vocab,
                                max_size=vocab))  # fmt: skip
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]))
    width = data.draw(st.integers(top_k, vocab))
    ids, top = top_candidates(torch.tensor([values]), width)
    keep = kept(top, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    got = sorted(ids[keep].tolist())
    want = np.flatnonzero(exact(np.array(values), 1.0, top_k, top_p)).tolist()
    assert got == want


def test_top_candidates_order_ties_and_special_values() -> None:
    values = torch.tensor([[1.0, torch.nan, 1.0, -0.0, 0.0, torch.inf, -torch.inf, -3.0]])
    for width in (8, 5):
        ids, sorted_values = top_candidates(values, width)
        assert ids.tolist()[0] == [1, 5, 0, 2, 3, 4, 7, 6][:width]
        assert sorted_values[0, 2].item() == 1.0
    negative_nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    ids, _ = top_candidates(torch.cat([torch.tensor([5.0]), negative_nan])[None], 2)
    assert ids.tolist() == [[1, 0]]


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
    monkeypatch.setattr(Staging, "upload", forbidden)
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
    assert sorted(seen) == [(1, 32), (2, 5)]


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
    keys = sampler.prepare([late, moved]).groups[0].keys
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
    reqs = [make_req(uid) for uid in range(1000)]
    seeds = request_seeds(reqs, engine_seed=0)
    assert len(np.unique(seeds)) == 1000
    assert (seeds == request_seeds(reqs, 0)).all(), "ranks must agree"
    assert (seeds != request_seeds(reqs, 1)).all()
    assert request_seeds([make_req(7, seed=3), make_req(8, seed=3)], 0).tolist() == [3, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    """Bits are equal; logarithms may differ in the last place, which moves almost no draw."""
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 2
    kinds = [{}, {"top_k": 20}, {"top_p": 0.9}]
    reqs = [make_req(i, temperature=1.0, seed=i, **kinds[i % 3]) for i in range(64)]
    keys = torch.from_numpy(step_keys(np.arange(9, dtype=np.uint64), np.arange(9)))
    tokens = torch.arange(5000, dtype=torch.int32)
    assert torch.equal(token_bits(keys.cuda(), tokens.cuda()).cpu(), token_bits(keys, tokens))
    here, there = Sampler(5000, "cpu"), Sampler(5000, "cuda")
    cpu = here.sample(logits, here.prepare(reqs)).next_ids
    gpu = there.sample(logits.cuda(), there.prepare(reqs)).next_ids.cpu()
    assert (cpu == gpu).float().mean() > 0.98


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
    alone = sampler.sample(good, sampler.prepare(reqs[2:]))
    assert out.next_ids[2] == alone.next_ids[0]


def test_wrong_shapes_are_refused() -> None:
    sampler = Sampler(10, "cpu")
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(torch.zeros(2, 11), None)
    args = sampler.prepare([make_req(temperature=1.0)])
    with pytest.raises(ValueError, match="1 rows were prepared, got 2"):
        sampler.sample(torch.zeros(2, 10), args)


# ------------------------------------------------------------------------------ staging


class SlowDevice:
    """Copies that happen only when somebody waits for them, as on a GPU with work queued up."""

    def __init__(self) -> None:
        self.waits = 0
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> SlowDevice:
        self.queue.append((target, source))
        return self

    def synchronize(self) -> None:
        self.waits += 1
        while self.queue:
            target, source = self.queue.pop(0)
            target.copy_(source)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pitfall_04_staging_waits_for_the_copy_that_reads_it(depth: int) -> None:
    device = SlowDevice()
    staging = Staging("cpu", depth, device.copy)
    steps = [staging.upload(np.full(3, n), np.full(2, n / 2)) for n in range(7)]
    assert device.waits > 0
    device.synchronize()
    for n, (ints, floats) in enumerate(steps):
        assert ints.tolist() == [n] * 3 and floats.tolist() == [n / 2] * 2


def test_staging_keeps_shapes_dtypes_and_alignment() -> None:
    staging = Staging("cpu")
    arrays = [
        np.arange(3, dtype=np.int32),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([0.5], np.float32),
        np.array([0.1, 0.2]),
    ]
    for array, tensor in zip(arrays, staging.upload(*arrays), strict=True):
        assert tensor.numpy().dtype == array.dtype and tuple(tensor.shape) == array.shape
        assert (tensor.numpy() == array).all()
    big = np.arange(10_000)
    assert staging.upload(big)[0].tolist() == big.tolist()


def test_staged_tensors_outlive_the_next_uploads() -> None:
    staging = Staging("cpu")
    first = staging.upload(np.arange(4))[0]
    for n in range(5):
        staging.upload(np.full(4, n))
    assert first.tolist() == [0, 1, 2, 3]
