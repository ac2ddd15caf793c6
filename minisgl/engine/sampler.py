"""Chooses the next token of every request: greedy, temperature, top-k, top-p, seeds, logprobs.

Generated from notebooks/06_sampler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.staging import StagingRing
from minisgl.core import Req, SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SHIFTS = np.array([30, 27, 31], np.uint64)
FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers, one to one (the finaliser of splitmix64).

    `x ^= x >> shift` for each of the three SHIFTS; between two of them, a product with a factor.
    """
    x = x ^ (x >> SHIFTS[0])
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x


def engine_seeds(engine_seed: int, uids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return seeds for requests without one: `mix64(mix64(engine_seed ^ GOLDEN) + uid)` [bs]."""
    engine = mix64(np.array([engine_seed], np.uint64) ^ GOLDEN)
    return mix64(engine + uids.astype(np.uint64))


def streams(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the part of a key that all steps of a request share: `mix64(seed + GOLDEN)` [bs]."""
    return mix64(seeds + GOLDEN)


def keys_at(streams: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return `mix64(stream + position * GOLDEN)` as two words, int32 [2, bs], the low one first."""
    mixed = mix64(streams + positions.astype(np.uint64) * GOLDEN)
    return np.ascontiguousarray(mixed.astype("<u8").view("<i4").reshape(-1, 2).T)


def step_keys(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return two words of randomness for (seed, position), int32 [2, bs]; no hidden state."""
    return keys_at(streams(seeds), positions)


def token_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return 31 random bits for each (key, token), int32 [bs, width]; keys int32 [2, bs].

    `tokens` holds token ids, int32 [width] or [bs, width]. From `x = token ^ keys[0]`:
    `x ^= x >> 16`, `x *= 0x7FEB352D`, `x ^= keys[1]`, `x ^= x >> 15`, `x *= 0x846CA68B`,
    `x ^= x >> 16`, and the sign bit is cleared. Products wrap modulo 2**32, and an arithmetic
    shift is masked into a logical one, so that every device computes the same bits.
    """
    x = tokens ^ keys[0, :, None]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= keys[1, :, None]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    return x


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise for each (key, token), float32 [bs, width], always finite.

    In float32: `u = (bits + 0.5) * 2**-31`, at most `1 - 2**-24`; the noise is
    `-log(-log1p(-u))`.
    """
    uniform = token_bits(keys, tokens).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def largest_keys(keys: Tensor, width: int) -> Tensor:
    """Return each row's `width` largest, int64 [bs, width], largest first; all are different."""
    if keys.device.type == "cpu" and width > 1024:  # numpy's sort is vectorised
        return torch.from_numpy(np.sort(keys.numpy())[:, ::-1][:, :width].copy())
    if width < keys.shape[-1]:
        return keys.topk(width, dim=-1).values
    return keys.sort(dim=-1, descending=True).values


def top_candidates(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of each row's `width` largest, int64 and float32 [bs, width], sorted.

    Equal values come in the order of their ids: the id is part of the sort key, so no two keys
    are equal and any correct algorithm gives this one order. NaN counts as +inf. A `width` of 0
    needs no keys.
    """
    vocab = values.shape[-1]
    if width == 0:
        return values.new_empty((len(values), 0), dtype=torch.int64), values[:, :0]
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    smaller_id_first = torch.arange(vocab - 1, -1, -1, device=values.device)
    keys = ordered.bitwise_left_shift_(32).bitwise_or_(smaller_id_first)
    ids = vocab - 1 - (largest_keys(keys, width) & 0xFFFFFFFF)
    return ids, values.gather(-1, ids)


def nucleus_mask(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mark candidates to sample from, bool [bs, width]; `scaled` is sorted logits / temperature.

    Keep the first top_k, and of these the fewest whose share reaches top_p; at least one.
    top_k int64 [bs], top_p float64 [bs]. Shares are summed as integers, which add up to the same
    total in any order: the result cannot depend on the width or on the number of rows. A share of
    less than 2**-40 of the first is 0, and its candidate is dropped.
    """
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    first_k = rank < top_k[:, None]
    share = (scaled - scaled[:, :1]).exp_().nan_to_num_(0.0).mul_(2.0**40)
    weights = share.to(torch.int64) * first_k
    up_to = weights.cumsum(-1)
    limit = up_to[:, -1:].double() * top_p[:, None]
    keep = first_k & ((up_to - weights).double() < limit)
    keep[:, 0] = True
    return keep


def sample_tokens(
    logits: Tensor, token_ids: Tensor, width: int, keys: Tensor, temperature: Tensor,
    top_k: Tensor | None = None, top_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample one token id per row, int64 [rows], of logits [rows, vocab]; sort only for filters.

    token_ids int32 [vocab]; keys int32 [2, rows]; temperature float32 [rows], 0 for greedy. With
    filters, no row is greedy and `width` candidates are compared: top_k int64 [rows], no larger,
    and top_p float64 [rows].
    """
    scale = temperature[:, None]
    if top_k is None or top_p is None:
        return torch.addcmul(logits.float(), gumbel_noise(keys, token_ids), scale).argmax(-1)
    ids, values = top_candidates(logits.float(), width)
    scores = torch.addcmul(values, gumbel_noise(keys, ids.int()), scale)
    scores.masked_fill_(~nucleus_mask(values / scale, top_k, top_p), -torch.inf)
    return ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


@dataclass(frozen=True)
class SamplingArgs:
    """Arguments of sampling one batch: a snapshot on the host; requests may advance."""

    keys: NDArray[np.int32]  # [2, bs]
    temperature: NDArray[np.float32]  # [bs], 0 for a greedy row
    width: NDArray[np.int64]  # [bs], candidates that the filters look at; 0: no filter
    top_p: NDArray[np.float64]  # [bs]
    logprob_rows: NDArray[np.int64]  # rows that requested log probabilities
    num_top: int  # most likely tokens reported for these rows besides the chosen one
    processing: Any = None  # for the logits processors; None: sample from the logits as they are

    @property
    def filtered(self) -> bool:
        """True if a row has top-k or top-p."""
        return bool(self.width.any())

    @property
    def simple(self) -> bool:
        """True if keys and temperatures suffice: no filters, logprobs or processors."""
        return not self.filtered and len(self.logprob_rows) == 0 and self.processing is None


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6  # beyond these, only float32 overflows


def filter_width(params: SamplingParams, vocab_size: int) -> int:
    """Return the number of candidates to filter: 0 without a filter, all for top-p alone."""
    if params.is_greedy:
        return 0
    if 0 < params.top_k < vocab_size:
        return params.top_k
    return vocab_size if params.top_p < 1.0 else 0


def clamped_temperature(params: SamplingParams) -> float:
    """Return the temperature within float32's reach; 0 for greedy."""
    if params.is_greedy:
        return 0.0
    return min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


class Processors(Protocol):
    """Change logits before sampling: `minisgl.engine.logits_processors` in chapter 06d."""

    def batch_args(self, reqs: list[Req]) -> Any | None: ...  # None if no request asks for it

    def step_args(self, batch: Any, reqs: Sequence[Req]) -> Any: ...

    def process(self, logits: Tensor, args: Any) -> Tensor: ...  # a copy


class CachedArgs(NamedTuple):
    """Arguments that stay the same while the batch does; a request's parameters never change."""

    reqs: list[Req]
    streams: NDArray[np.uint64]  # [bs]
    args: SamplingArgs | None  # its keys are placeholders; None: all greedy without logprobs


class Sampler:
    """Converts logits to next tokens; holds a seed and no state that affects a request.

    `kernel(logits, keys, temperature, out, top_k, top_p)` samples all rows in one call: see
    `minisgl.kernels.sample.sample_logits`. Without it, torch functions do the work.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, seed: int = 0,
        kernel: Callable[..., Tensor] | None = None, processors: Processors | None = None,
    ) -> None:  # fmt: skip
        self.vocab_size, self.seed, self.kernel = vocab_size, seed, kernel
        self.processors = processors
        self.staging = StagingRing(device)
        self.cached = CachedArgs([], np.empty(0, np.uint64), None)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def batch_args(self, reqs: list[Req]) -> CachedArgs:
        """Collect the arguments of `prepare` that do not depend on the requests' positions."""
        every = [req.sampling_params for req in reqs]
        num_top = np.array([-1 if p.logprobs is None else p.logprobs for p in every])
        asked = np.flatnonzero(num_top >= 0)
        processing = None
        if self.processors is not None and any(req.logits_params for req in reqs):
            processing = self.processors.batch_args(reqs)
        if len(asked) == 0 and processing is None and all(p.is_greedy for p in every):
            return CachedArgs(reqs, np.empty(0, np.uint64), None)
        uids = np.array([req.uid for req in reqs], np.int64)
        own = np.array([p.seed or 0 for p in every], np.uint64)
        seeded = np.array([p.seed is not None for p in every])
        args = SamplingArgs(
            keys=np.zeros((2, len(reqs)), np.int32),
            temperature=np.array([clamped_temperature(p) for p in every], np.float32),
            width=np.array([filter_width(p, self.vocab_size) for p in every], np.int64),
            top_p=np.array([p.top_p for p in every], np.float64),
            logprob_rows=asked,
            num_top=int(num_top.max()),
            processing=processing,
        )
        return CachedArgs(reqs, streams(np.where(seeded, own, engine_seeds(self.seed, uids))), args)

    def prepare(self, reqs: Sequence[Req]) -> SamplingArgs | None:
        """Prepare the arguments of `sample`; return None if all are greedy without logprobs.

        Host arithmetic only. The new token's position is `device_len`, which counts samples: the
        host may not have the earlier tokens yet.
        """
        same = list(reqs)
        if self.cached.reqs != same:  # requests are equal if they are the same object
            self.cached = self.batch_args(same)
        args = self.cached.args
        if args is None:
            return None
        positions = np.array([req.device_len for req in reqs], np.int64)
        processing = args.processing
        if self.processors is not None and processing is not None:
            processing = self.processors.step_args(processing, reqs)
        return replace(args, keys=keys_at(self.cached.streams, positions), processing=processing)

    def sample(self, logits: Tensor, args: SamplingArgs | None) -> SampleOutput:
        """Sample one token per row of logits [bs, vocab_size]; leave the logits unchanged.

        They are bfloat16, float16 or float32. A NaN counts as the largest logit, and a row of -inf
        gives token 0: a broken row yields a valid id and does not affect other rows.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(
                f"logits: must be [batch, {self.vocab_size}], got {list(logits.shape)}"
            )
        if args is None:
            return SampleOutput(logits.argmax(-1))
        if len(args.temperature) != len(logits):
            raise ValueError(
                f"logits: {len(args.temperature)} rows were prepared, got {len(logits)}"
            )
        wanted = logits
        if self.processors is not None and args.processing is not None:
            wanted = self.processors.process(logits, args.processing)
        next_ids = (
            self.sample_unfused(wanted, args)
            if self.kernel is None
            else self.sample_fused(wanted, args)
        )
        if len(args.logprob_rows) == 0:
            return SampleOutput(next_ids)
        (rows,) = self.staging.upload(args.logprob_rows)
        return with_logprobs(logits, next_ids, rows, args.num_top)

    def sample_unfused(self, logits: Tensor, args: SamplingArgs) -> Tensor:
        """Sample by torch functions: rows without filters, then rows with; int64 [bs]."""
        if not args.temperature.any():
            return logits.argmax(-1)
        next_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for rows in (np.flatnonzero(args.width == 0), np.flatnonzero(args.width)):
            if len(rows) == 0:
                continue
            width = int(args.width[rows].max())
            arrays: list[NDArray[Any]] = [rows, args.keys[:, rows], args.temperature[rows]]
            if width > 0:
                arrays += [args.width[rows], args.top_p[rows]]
            at, *values = self.staging.upload(*arrays)
            chosen = logits if len(rows) == len(logits) else logits.index_select(0, at)
            next_ids.index_copy_(0, at, sample_tokens(chosen, self.token_ids, width, *values))
        return next_ids

    def sample_rows(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        """Sample ids int64 [n] of logits [n, vocab] in a form that a CUDA graph can capture.

        keys int32 [2, n]; temperature float32 [n], 0 for a greedy row.
        """
        if self.kernel is not None:
            return self.kernel(logits, keys, temperature)
        return sample_tokens(logits, self.token_ids, 0, keys, temperature)

    def sample_fused(self, logits: Tensor, args: SamplingArgs) -> Tensor:
        """Sample all rows in one call of the kernel; int64 [bs].

        Filters are passed only if a row has one: top_k int32, 0 for off, and top_p float64.
        """
        assert self.kernel is not None
        arrays: list[NDArray[Any]] = [args.keys, args.temperature]
        if args.filtered:
            few = (args.width > 0) & (args.width < self.vocab_size)
            arrays += [np.where(few, args.width, 0).astype(np.int32), args.top_p]
        keys, temperature, *filters = self.staging.upload(*arrays)
        return self.kernel(logits, keys, temperature, None, *filters)


@dataclass(frozen=True)
class SampleOutput:
    """Sampled tokens on the device; rows without log probabilities hold NaN and -1."""

    next_ids: Tensor  # int64 [bs]
    logprobs: Tensor | None = None  # float32 [bs], of the chosen token
    top_ids: Tensor | None = None  # int64 [bs, num_top]
    top_logprobs: Tensor | None = None  # float32 [bs, num_top]


def with_logprobs(logits: Tensor, next_ids: Tensor, rows: Tensor, num_top: int) -> SampleOutput:
    """Add log probabilities of the model's own distribution (temperature 1, nothing filtered)."""
    raw = logits.index_select(0, rows).float().log_softmax(-1)
    top_ids, _ = top_candidates(raw, min(num_top, raw.shape[-1]))
    chosen = raw.gather(-1, next_ids.index_select(0, rows)[:, None]).squeeze(-1)

    def spread(part: Tensor, empty: float) -> Tensor:
        whole = part.new_full((len(logits), *part.shape[1:]), empty)
        return whole.index_copy_(0, rows, part)

    top_logprobs = raw.gather(-1, top_ids)  # NaN stays NaN
    return SampleOutput(
        next_ids, spread(chosen, torch.nan), spread(top_ids, -1), spread(top_logprobs, torch.nan)
    )
