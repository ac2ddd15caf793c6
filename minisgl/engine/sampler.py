"""Chooses the next token of every request: greedy, temperature, top-k, top-p, seeds, logprobs.

Generated from notebooks/06_sampler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import Req, SamplingParams
from minisgl.engine.staging import Staging

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers, one to one (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


MASK64 = 2**64 - 1


def request_seeds(reqs: Sequence[Req], engine_seed: int) -> NDArray[np.uint64]:
    """The seed of each request, uint64 [bs]: its own, or one of the engine's seed and its uid."""
    engine = mix64(np.array([engine_seed & MASK64], np.uint64) ^ GOLDEN)
    uids = np.array([req.uid & MASK64 for req in reqs], np.uint64)
    given = [req.sampling_params.seed for req in reqs]
    own = np.array([(seed or 0) & MASK64 for seed in given], np.uint64)
    return np.where([seed is None for seed in given], mix64(engine + uids), own)


def step_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Two words of randomness for (seed, position), int32 [2, bs]: equal inputs, equal words."""
    mixed = mix64(mix64(seeds + GOLDEN) + positions.astype(np.uint64) * GOLDEN)
    low = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (mixed >> np.uint64(32)).astype(np.uint32)
    return np.stack([low.view(np.int32), high.view(np.int32)])


def token_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """31 random bits for each (key, token), int32 [bs, width]; keys int32 [2, bs].

    `tokens` holds token ids, int32 [width] or [bs, width]. Products wrap modulo 2**32, and an
    arithmetic shift is masked into a logical one, so that every device computes the same bits.
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
    """Standard Gumbel noise for each (key, token), float32 [bs, width]; always finite."""
    uniform = token_bits(keys, tokens).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def largest_keys(keys: Tensor, width: int) -> Tensor:
    """The `width` largest of each row, int64 [bs, width], largest first; all are different."""
    if keys.device.type == "cpu":  # numpy's sort is vectorised, and an order of magnitude faster
        return torch.from_numpy(np.sort(keys.numpy())[:, ::-1][:, :width].copy())
    if width < keys.shape[-1]:
        return keys.topk(width, dim=-1).values
    return keys.sort(dim=-1, descending=True).values


def top_candidates(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the `width` largest per row, int64 and float32 [bs, width], largest first.

    Equal values come in the order of their ids: the id is part of the sort key, so no two keys
    are equal and any correct algorithm gives this one order. NaN counts as +inf.
    """
    vocab = values.shape[-1]
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    smaller_id_first = torch.arange(vocab - 1, -1, -1, device=values.device)
    keys = (ordered << 32) | smaller_id_first
    ids = vocab - 1 - (largest_keys(keys, width) & 0xFFFFFFFF)
    return ids, values.gather(-1, ids)


def kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which candidates may be drawn, bool [bs, width]; `scaled` is logits / temperature, sorted.

    The first top_k, and of these the fewest whose share reaches top_p; the first one always.
    top_k int64 [bs], top_p float64 [bs]. Shares are summed as integers, which add up to the same
    total in any order: the result cannot depend on the width or on the number of rows.
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


def draw(
    logits: Tensor,
    token_ids: Tensor,
    width: int = 0,
    keys: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """One token id per row, int64 [rows], of logits [rows, vocab]; what is None costs nothing.

    token_ids int32 [vocab]; keys int32 [2, rows], None for greedy; temperature float32 [rows].
    """
    if keys is None or temperature is None:
        return logits.argmax(-1)
    scale = temperature[:, None]
    if top_k is None or top_p is None:
        return torch.addcmul(logits.float(), gumbel_noise(keys, token_ids), scale).argmax(-1)
    ids, values = top_candidates(logits.float(), width)
    scores = torch.addcmul(values, gumbel_noise(keys, ids.int()), scale)
    scores.masked_fill_(~kept(values / scale, top_k, top_p), -torch.inf)
    return ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


@dataclass(frozen=True)
class RowGroup:
    """Rows of a batch that need the same work; host arrays [rows]. None: not needed."""

    rows: NDArray[np.int64]
    width: int = 0  # candidates that the filters look at; 0 without filters
    keys: NDArray[np.int32] | None = None  # [2, rows]; None: greedy
    temperature: NDArray[np.float32] | None = None
    top_k: NDArray[np.int64] | None = None
    top_p: NDArray[np.float64] | None = None

    def arrays(self) -> list[NDArray[Any]]:
        """What has to go to the device, in the order of the fields."""
        fields = (self.rows, self.keys, self.temperature, self.top_k, self.top_p)
        return [array for array in fields if array is not None]


@dataclass(frozen=True)
class SamplingArgs:
    """How to sample one batch: a snapshot on the host, so that its requests may move on."""

    batch_size: int
    groups: tuple[RowGroup, ...]
    logprob_rows: NDArray[np.int64]  # rows that asked for log probabilities
    num_top: int  # most likely tokens that these rows want besides the chosen one


@dataclass(frozen=True)
class SampleOutput:
    """What was drawn, on the device; rows that asked for no log probabilities hold NaN and -1."""

    next_ids: Tensor  # int64 [bs]
    logprobs: Tensor | None = None  # float32 [bs], of the chosen token
    top_ids: Tensor | None = None  # int64 [bs, num_top]
    top_logprobs: Tensor | None = None  # float32 [bs, num_top]


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6  # beyond, nothing changes but float32 overflows


class Sampler:
    """Turns logits into next tokens; holds a seed and no state that a request could see."""

    def __init__(self, vocab_size: int, device: torch.device | str, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.staging = Staging(device)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def candidates(self, params: SamplingParams) -> int:
        """How many tokens the filters of a request look at: -1 greedy, 0 no filter."""
        if params.is_greedy:
            return -1
        if 0 < params.top_k < self.vocab_size:
            return params.top_k
        return self.vocab_size if params.top_p < 1.0 else 0

    def group(self, reqs: Sequence[Req], rows: list[int], widths: list[int]) -> RowGroup:
        """The host arrays of rows that need the same work."""
        index = np.array(rows, np.int64)
        width = max(widths)
        if width < 0:
            return RowGroup(index)
        chosen = [reqs[row] for row in rows]
        params = [req.sampling_params for req in chosen]
        positions = np.array([req.device_len for req in chosen], np.int64)
        keys = step_keys(request_seeds(chosen, self.seed), positions)
        given = np.array([p.temperature for p in params])
        warm = given.clip(MIN_TEMPERATURE, MAX_TEMPERATURE).astype(np.float32)
        if width == 0:
            return RowGroup(index, 0, keys, warm)
        top_p = np.array([p.top_p for p in params], np.float64)
        return RowGroup(index, width, keys, warm, np.array(widths, np.int64), top_p)

    def prepare(self, reqs: Sequence[Req]) -> SamplingArgs | None:
        """What `sample` must know about these requests; None if all are greedy without logprobs.

        Host arithmetic only. The token to be drawn will stand at position `device_len`: that
        counts the draws, because the host may not know yet what the tokens before it are.
        """
        params = [req.sampling_params for req in reqs]
        asked = [row for row, p in enumerate(params) if p.logprobs is not None]
        if not asked and all(p.is_greedy for p in params):
            return None
        widths = [self.candidates(p) for p in params]
        kinds: dict[int, list[int]] = {}
        for row, width in enumerate(widths):
            filtered = 1 if 0 < width < self.vocab_size else width
            kinds.setdefault(filtered, []).append(row)
        groups = [self.group(reqs, rows, [widths[row] for row in rows]) for rows in kinds.values()]
        num_top = max((params[row].logprobs or 0 for row in asked), default=0)
        return SamplingArgs(len(reqs), tuple(groups), np.array(asked, np.int64), num_top)

    def sample(self, logits: Tensor, args: SamplingArgs | None) -> SampleOutput:
        """Draw one token per row of logits [bs, vocab_size], any float dtype, left as they are.

        A NaN counts as the largest logit and a row of -inf gives token 0: a broken row yields a
        valid id, and its neighbours are unharmed.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(
                f"logits: must be [batch, {self.vocab_size}], got {list(logits.shape)}"
            )
        if args is None:
            return SampleOutput(logits.argmax(-1))
        if args.batch_size != len(logits):
            raise ValueError(f"logits: {args.batch_size} rows were prepared, got {len(logits)}")
        parts = [group.arrays() for group in args.groups]
        flat = [array for part in parts for array in part]
        on_device = iter(self.staging.upload(*flat, args.logprob_rows))
        next_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group, part in zip(args.groups, parts):
            rows, *values = [next(on_device) for _ in part]
            chosen = logits if len(args.groups) == 1 else logits.index_select(0, rows)
            next_ids.index_copy_(0, rows, draw(chosen, self.token_ids, group.width, *values))
        if len(args.logprob_rows) == 0:
            return SampleOutput(next_ids)
        return with_logprobs(logits, next_ids, next(on_device), args.num_top)


def with_logprobs(logits: Tensor, next_ids: Tensor, rows: Tensor, num_top: int) -> SampleOutput:
    """Add log probabilities of the model's own distribution (temperature 1, nothing filtered)."""
    raw = logits.index_select(0, rows).float().log_softmax(-1)
    top_ids, top_logprobs = top_candidates(raw, min(num_top, raw.shape[-1]))
    chosen = raw.gather(-1, next_ids.index_select(0, rows)[:, None]).squeeze(-1)

    def spread(part: Tensor, empty: float) -> Tensor:
        whole = part.new_full((len(logits), *part.shape[1:]), empty)
        return whole.index_copy_(0, rows, part)

    return SampleOutput(
        next_ids, spread(chosen, torch.nan), spread(top_ids, -1), spread(top_logprobs, torch.nan)
    )
