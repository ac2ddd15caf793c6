"""Chooses the next token of every request: greedy, temperature, top-k, top-p, seeds, logprobs.

Generated from notebooks/06_sampler.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

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
    """Scramble 64-bit numbers, one to one (the finaliser of splitmix64)."""
    x = x ^ (x >> SHIFTS[0])
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x


MASK64 = 2**64 - 1


def engine_seeds(engine_seed: int, uids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Seeds of requests that brought none, uint64 [bs]: of the engine's seed and their uids."""
    engine = mix64(np.array([engine_seed & MASK64], np.uint64) ^ GOLDEN)
    return mix64(engine + uids.astype(np.uint64))


def streams(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The part of a key that all steps of a request share, uint64 [bs]."""
    return mix64(seeds + GOLDEN)


def keys_at(streams: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Two words of randomness for (stream, position), int32 [2, bs]; the low word comes first."""
    mixed = mix64(streams + positions.astype(np.uint64) * GOLDEN)
    return np.ascontiguousarray(mixed.astype("<u8").view("<i4").reshape(-1, 2).T)


def step_keys(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Two words of randomness for (seed, position), int32 [2, bs]: equal inputs, equal words."""
    return keys_at(streams(seeds), positions)


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


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6  # beyond, nothing changes but float32 overflows

ROW = np.dtype(
    [
        ("width", np.int64),  # candidates the filters look at; 0 no filter, -1 greedy
        ("temperature", np.float32),  # 0 for greedy
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("seeded", np.bool_),  # False: the seed comes from the engine's and the uid
        ("num_top", np.int64),  # logprobs wanted, -1 for none
    ]
)


def params_row(params: SamplingParams, vocab_size: int) -> tuple[int, float, float, int, bool, int]:
    """What sampling needs to know of a request's parameters, as a row of `ROW`."""
    width = vocab_size if params.top_p < 1.0 else 0
    if 0 < params.top_k < vocab_size:
        width = params.top_k
    warm = min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    if params.is_greedy:
        width, warm = -1, 0.0
    num_top = -1 if params.logprobs is None else params.logprobs
    seed = (params.seed or 0) & MASK64
    return width, warm, params.top_p, seed, params.seed is not None, num_top


get_params, get_uid = attrgetter("sampling_params"), attrgetter("uid")
get_position = attrgetter("device_len")


class ParamsTable:
    """A row of numbers for each `SamplingParams` object met lately; a batch is one indexing."""

    def __init__(self, vocab_size: int, capacity: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.capacity = capacity
        self.forget(capacity)

    def forget(self, capacity: int) -> None:
        """Start anew, with room for `capacity` objects."""
        self.numbers: NDArray[Any] = np.zeros(capacity, ROW)
        self.row_of: dict[int, int] = {}
        self.held: list[SamplingParams] = []  # while we hold an object, its id is its own

    def add(self, params: SamplingParams) -> int:
        """The row of an object, made now if it has none."""
        row = self.row_of.get(id(params))
        if row is None:
            row = len(self.held)
            self.numbers[row] = params_row(params, self.vocab_size)
            self.held.append(params)
            self.row_of[id(params)] = row
        return row

    def rows(self, reqs: Sequence[Req]) -> NDArray[Any]:
        """A copy of the requests' rows, [bs] of `ROW`."""
        params = list(map(get_params, reqs))
        row_of = self.row_of
        try:
            found = [row_of[id(p)] for p in params]
        except KeyError:  # somebody is new
            if len(self.held) + len(params) > len(self.numbers):
                self.forget(max(self.capacity, len(params)))
            found = [self.add(p) for p in params]
        return self.numbers[found]


@dataclass(frozen=True)
class SamplingArgs:
    """How to sample one batch: a snapshot on the host, so that its requests may move on."""

    keys: NDArray[np.int32]  # [2, bs]
    temperature: NDArray[np.float32]  # [bs], 0 for a greedy row
    width: NDArray[np.int64]  # [bs], candidates the filters look at; 0 no filter, -1 greedy
    top_p: NDArray[np.float64]  # [bs]
    logprob_rows: NDArray[np.int64]  # rows that asked for log probabilities
    num_top: int  # most likely tokens that these rows want besides the chosen one
    filtered: bool  # a row has top-k or top-p

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self.temperature)

    @property
    def simple(self) -> bool:
        """True if keys and temperatures are all there is: no filter, no log probability."""
        return not self.filtered and len(self.logprob_rows) == 0


@dataclass(frozen=True)
class SampleOutput:
    """What was drawn, on the device; rows that asked for no log probabilities hold NaN and -1."""

    next_ids: Tensor  # int64 [bs]
    logprobs: Tensor | None = None  # float32 [bs], of the chosen token
    top_ids: Tensor | None = None  # int64 [bs, num_top]
    top_logprobs: Tensor | None = None  # float32 [bs, num_top]


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


def row_groups(args: SamplingArgs, vocab_size: int) -> list[RowGroup]:
    """The rows of a batch by the work they need: greedy, plain, a few candidates, all of them."""
    groups = []
    kind = np.where(args.width == vocab_size, 2, np.minimum(args.width, 1))
    for wanted in np.unique(kind):
        rows = np.flatnonzero(kind == wanted)
        if wanted < 0:
            groups.append(RowGroup(rows))
            continue
        keys, warm = args.keys[:, rows], args.temperature[rows]
        if wanted == 0:
            groups.append(RowGroup(rows, 0, keys, warm))
            continue
        top_k, top_p = args.width[rows], args.top_p[rows]
        groups.append(RowGroup(rows, int(top_k.max()), keys, warm, top_k, top_p))
    return groups


class Known(NamedTuple):
    """What stays as it is while the batch does; nobody changes the parameters of a request."""

    reqs: list[Req]
    streams: NDArray[np.uint64]  # [bs], or none if no keys are wanted
    args: SamplingArgs | None  # its keys are placeholders; None: all greedy without logprobs


def load_kernels() -> Callable[..., Tensor] | None:
    """`sample_logits` of our Triton kernels; None where Triton is not installed."""
    try:
        from minisgl.kernels.sample import sample_logits
    except ImportError:
        return None
    return sample_logits


class Sampler:
    """Turns logits into next tokens; holds a seed and no state that a request could see."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        seed: int = 0,
        use_kernels: bool | None = None,
    ) -> None:
        """`use_kernels` None: on a GPU only. On a CPU they need TRITON_INTERPRET=1."""
        self.vocab_size = vocab_size
        self.seed = seed
        self.staging = StagingRing(device)
        self.params = ParamsTable(vocab_size)
        self.known = Known([], np.empty(0, np.uint64), None)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        wanted = self.token_ids.is_cuda if use_kernels is None else use_kernels
        self.sample_logits = load_kernels() if wanted else None

    def look_up(self, reqs: list[Req]) -> Known:
        """What `prepare` needs to know of these requests, whatever their positions."""
        rows = self.params.rows(reqs)
        width, num_top = rows["width"].copy(), rows["num_top"]
        asked = np.flatnonzero(num_top >= 0)
        if len(asked) == 0 and (width < 0).all():
            return Known(reqs, np.empty(0, np.uint64), None)
        uids = np.array(list(map(get_uid, reqs)), np.int64)
        seeds = np.where(rows["seeded"], rows["seed"], engine_seeds(self.seed, uids))
        args = SamplingArgs(
            keys=np.zeros((2, len(reqs)), np.int32),
            temperature=rows["temperature"].copy(),
            width=width,
            top_p=rows["top_p"].copy(),
            logprob_rows=asked,
            num_top=int(num_top[asked].max(initial=0)),
            filtered=bool((width > 0).any()),
        )
        return Known(reqs, streams(seeds), args)

    def prepare(self, reqs: Sequence[Req]) -> SamplingArgs | None:
        """What `sample` must know about these requests; None if all are greedy without logprobs.

        Host arithmetic only. The token to be drawn will stand at position `device_len`: that
        counts the draws, because the host may not know yet what the tokens before it are.
        """
        same = list(reqs)
        if self.known.reqs != same:  # requests are equal if they are the same object
            self.known = self.look_up(same)
        args = self.known.args
        if args is None:
            return None
        positions = np.array(list(map(get_position, reqs)), np.int64)
        return SamplingArgs(
            keys_at(self.known.streams, positions), args.temperature, args.width, args.top_p,
            args.logprob_rows, args.num_top, args.filtered,
        )  # fmt: skip

    def sample(self, logits: Tensor, args: SamplingArgs | None) -> SampleOutput:
        """Draw one token per row of logits [bs, vocab_size], which are left as they are.

        They are bfloat16, float16 or float32.

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
        next_ids = self.draw_fused(logits, args) if self.sample_logits else self.draw(logits, args)
        if len(args.logprob_rows) == 0:
            return SampleOutput(next_ids)
        (rows,) = self.staging.upload(args.logprob_rows)
        return with_logprobs(logits, next_ids, rows, args.num_top)

    def draw_rows(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        """Tensors to tensors, so that a CUDA graph can hold it: logits [n, vocab] to ids int64 [n].

        keys int32 [2, n]; temperature float32 [n], 0 for a greedy row.
        """
        if self.sample_logits is not None:
            return self.sample_logits(logits, keys, temperature)
        return draw(logits, self.token_ids, 0, keys, temperature)

    def draw_fused(self, logits: Tensor, args: SamplingArgs) -> Tensor:
        """By the kernels: all rows in one launch, whatever they need; int64 [bs]."""
        assert self.sample_logits is not None
        arrays: list[NDArray[Any]] = [args.keys, args.temperature]
        if args.filtered:
            few = (args.width > 0) & (args.width < self.vocab_size)
            arrays += [np.where(few, args.width, 0).astype(np.int32), args.top_p]
        keys, temperature, *filters = self.staging.upload(*arrays)
        return self.sample_logits(logits, keys, temperature, None, *filters)

    def draw(self, logits: Tensor, args: SamplingArgs) -> Tensor:
        """By torch functions, a group of rows at a time; int64 [bs]."""
        groups = row_groups(args, self.vocab_size)
        parts = [group.arrays() for group in groups]
        on_device = iter(self.staging.upload(*(array for part in parts for array in part)))
        next_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for group, part in zip(groups, parts):
            rows, *values = [next(on_device) for _ in part]
            chosen = logits if len(groups) == 1 else logits.index_select(0, rows)
            next_ids.index_copy_(0, rows, draw(chosen, self.token_ids, group.width, *values))
        return next_ids


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
