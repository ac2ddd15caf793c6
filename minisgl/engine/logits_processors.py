"""Changes of logits before sampling: masks, bad words, biases, penalties, min-p.

Generated from notebooks/06d_logits_processors.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.staging import StagingRing
from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.sampler import clamped_temperature

ALWAYS = 2**62


def ints(values: Iterable[int]) -> IntArray:
    """Convert numbers to int64 [n]."""
    return np.array(list(values), np.int64)


class BanArrays(NamedTuple):
    """Sequences of tokens, whose last one is forbidden after the others."""

    lasts: IntArray  # [k]: the last token of each ban
    lens: IntArray  # [k]
    limits: IntArray  # [k]: answer length from which the ban is lifted
    bans: IntArray  # [t]: the ban of each token that is not a last one
    before: IntArray  # [t]: this token
    offsets: IntArray  # [t]: its distance to the last one, below 0


def ban_arrays(words: Sequence[Sequence[int]], limits: IntArray) -> BanArrays:
    """Convert words, none of them empty, and their limits [k]."""
    tokens, lens = ints(token for word in words for token in word), ints(map(len, words))
    bans, lasts = np.repeat(ints(range(len(lens))), lens), np.cumsum(lens) - 1
    offsets = np.arange(len(tokens)) - lasts[bans]
    early = offsets < 0
    return BanArrays(tokens[lasts], lens, limits, bans[early], tokens[early], offsets[early])


def bitmask(token_ids: Collection[int], vocab_size: int) -> IntArray:
    """Return int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set for token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class LogitsParams:
    """Changes of the logits for one request; created once, at admission.

    `mask` has a bit for each token that is allowed, as from `bitmask`; its owner may replace it
    between two steps.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_logit: float = -inf  # of a token, as a difference to the largest logit
    bias: tuple[IntArray, np.ndarray] | None = None  # tokens, and float32 to add to their logits
    bans: BanArrays | None = None
    mask: IntArray | None = None

    @property
    def penalizes(self) -> bool:
        """True if a token's logit depends on how often it was generated."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


def logits_params(
    params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> LogitsParams | None:
    """Return what these parameters change in the logits; None if they change nothing.

    Token ids are below `vocab_size`, and bad words are token ids.
    """
    words = [[int(token) for token in word] for word in params.bad_words]
    ends = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens > 0 else ()
    lifted = [[token] for token in sorted(ends) if token < vocab_size]
    limits = np.repeat(ints([ALWAYS, params.min_tokens]), [len(words), len(lifted)])
    bias = params.logit_bias or {}
    wants = LogitsParams(
        repetition=min(max(params.repetition_penalty, 1e-30), 1e30),  # within float32's reach
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        bias=(ints(bias), np.array(list(bias.values()), np.float32)) if bias else None,
        bans=ban_arrays([*words, *lifted], limits) if len(limits) else None,
    )
    if params.min_p > 0 and not params.is_greedy:
        wants.min_logit = clamped_temperature(params) * log(params.min_p)
    if params.allowed_token_ids is not None:
        wants.mask = bitmask(params.allowed_token_ids, vocab_size)
    return None if wants.mask is None and wants == LogitsParams() else wants


Asked = Sequence[tuple[int, LogitsParams]]  # rows of a batch that use one kind of change


class Edit(NamedTuple):
    """One kind of change in one step: `apply(logits, flattened token pool, *uploaded arrays)`."""

    apply: Callable[..., None]
    arrays: tuple[np.ndarray, ...]


class Rows(NamedTuple):
    """Requests of a batch in one step."""

    reqs: Sequence[Req]
    ends: IntArray  # [bs]: place of the token to be sampled, in the flattened token pool
    answer_lens: IntArray  # [bs]


class Rule(Protocol):
    """One kind of change while the batch stays the same."""

    def step(self, rows: Rows) -> Edit | None: ...  # None: nothing to do in this step


class Masks:
    """Forbid the tokens that are not in a request's mask."""

    def __init__(self, asked: Asked, vocab_size: int) -> None:
        self.rows, self.words = ints(row for row, _ in asked), -(-vocab_size // 32)
        self.params = [params for _, params in asked]

    def step(self, rows: Rows) -> Edit:
        """Read the masks again."""
        masks = [params.mask for params in self.params]
        return Edit(apply_masks, (self.rows, np.array(masks, np.int32).reshape(-1, self.words)))


def apply_masks(out: Tensor, _: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid, in some rows of out [bs, vocab], tokens without a bit in masks [g, words]."""
    bits = masks[:, :, None] >> torch.arange(32, device=out.device, dtype=torch.int32)
    allowed = (bits & 1).bool().flatten(1)[:, : out.shape[1]]
    out.index_copy_(0, rows, out.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


def masks_of(edits: Sequence[Edit]) -> tuple[np.ndarray, ...]:
    """Return the rows with masks and their masks, which may change until `process` is called."""
    found = (edit.arrays for edit in edits if edit.apply is apply_masks)
    return next(found, (ints(()), np.zeros((0, 0), np.int32)))


class Biases:
    """Add a number to the logits of some tokens."""

    def __init__(self, asked: Asked, vocab_size: int) -> None:
        tokens, values = zip(*(params.bias for _, params in asked if params.bias is not None))
        rows = np.repeat([row for row, _ in asked], [len(ids) for ids in tokens])
        places = rows * vocab_size + np.concatenate(tokens)
        self.edit = Edit(add_biases, (places, np.concatenate(values)))

    def step(self, rows: Rows) -> Edit:
        """Return the same edit for every step."""
        return self.edit


def add_biases(out: Tensor, _: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values [b] at places [b] of the flattened logits."""
    out.view(-1).index_add_(0, places, values)


class MinP:
    """Forbid tokens that are much less likely than the most likely one."""

    def __init__(self, asked: Asked, vocab_size: int) -> None:
        limits = np.array([params.min_logit for _, params in asked], np.float32)
        self.edit = Edit(apply_min_p, (ints(row for row, _ in asked), limits))

    def step(self, rows: Rows) -> Edit:
        """Return the same edit for every step."""
        return self.edit


def apply_min_p(out: Tensor, _: Tensor, rows: Tensor, min_logits: Tensor) -> None:
    """Forbid, in some rows, tokens that are more than -min_logits [q] below the largest."""
    chosen = out.index_select(0, rows)
    limit = chosen.amax(-1) + min_logits
    out.index_copy_(0, rows, chosen.masked_fill_(chosen < limit[:, None], -torch.inf))


class Bans:
    """Forbid the last token of a ban while the answer ends in the tokens before it."""

    def __init__(self, asked: Asked, vocab_size: int) -> None:
        given = [params.bans for _, params in asked if params.bans is not None]
        columns = map(np.concatenate, zip(*given))
        lasts, self.lens, self.limits, bans, self.before, self.offsets = columns
        counts = ints(len(arrays.lens) for arrays in given)
        self.rows = np.repeat([row for row, _ in asked], counts)
        self.places = self.rows * vocab_size + lasts  # of logits
        self.bans = np.repeat(counts.cumsum() - counts, [len(arrays.bans) for arrays in given])
        self.bans += bans

    def step(self, rows: Rows) -> Edit | None:
        """Keep the bans that are active."""
        answers = rows.answer_lens[self.rows]
        active = (self.lens - 1 <= answers) & (answers < self.limits)
        if not active.any():
            return None
        kept = active[self.bans]
        bans = (np.cumsum(active) - 1)[self.bans[kept]]
        tokens_at = (rows.ends[self.rows][self.bans] + self.offsets)[kept]
        return Edit(forbid, (self.places[active], bans, self.before[kept], tokens_at))


def forbid(
    out: Tensor, tokens: Tensor, places: Tensor, bans: Tensor, before: Tensor, tokens_at: Tensor
) -> None:
    """Forbid places [k] of the flattened logits whose `before` [t] are at `tokens_at` [t]."""
    wrong = (tokens[tokens_at] != before).long()
    absent = torch.zeros_like(places).index_add_(0, bans, wrong) != 0
    limits = torch.where(absent, torch.inf, -torch.inf)
    out.view(-1).scatter_reduce_(0, places, limits, "amin")  # a place may occur several times


MAX_GATHERED = 2**20  # tokens at once: bounds the memory of penalties


class Penalties:
    """Lower the logits of tokens that occurred, in the answer or, for repetition, anywhere."""

    def __init__(self, asked: Asked, vocab_size: int) -> None:
        factors = [(p.repetition, p.frequency, p.presence) for _, p in asked]
        self.rows, self.factors = ints(row for row, _ in asked), np.array(factors, np.float32)

    def step(self, rows: Rows) -> Edit:
        """Count back from the ends of the rows, to the prompt's start for a repetition penalty."""
        prompt_lens = ints(rows.reqs[row].prompt_len for row in self.rows)
        prompts = np.where(self.factors[:, 0] != 1, prompt_lens, 0)
        counts = rows.answer_lens[self.rows] + prompts
        starts = rows.ends[self.rows] - counts
        apply = partial(penalize, longest=max(1, int(counts.max())))
        return Edit(apply, (self.rows, self.factors, starts, counts, prompts))


def penalize(
    out: Tensor, tokens: Tensor, rows: Tensor, factors: Tensor, starts: Tensor, counts: Tensor,
    prompts: Tensor, longest: int,
) -> None:  # fmt: skip
    """Apply to `counts` [m] tokens from `starts` [m] on, of which `prompts` [m] are no answer."""
    offsets = torch.arange(longest, device=out.device)
    step = max(1, MAX_GATHERED // longest)
    columns = (rows, factors, starts, counts, prompts)
    for row, factor, start, count, prompt in zip(*(c.split(step) for c in columns)):
        last = count[:, None] - 1  # shorter rows repeat their last token, which changes nothing
        found = tokens[start[:, None] + torch.minimum(offsets, last)]
        answer = (offsets >= prompt[:, None]) & (offsets <= last)
        seen = out.new_zeros(len(row), out.shape[1]).scatter_add_(1, found, answer.float())
        times = seen.gather(1, found)
        repetition, frequency, presence = factor.T[:, :, None]
        places = row[:, None] * out.shape[1] + found
        old = out.view(-1)[places]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= frequency * times + presence * (times > 0)
        out.view(-1).scatter_(0, places.flatten(), new.flatten())


KINDS: tuple[tuple[Callable[[Asked, int], Rule], Callable[[LogitsParams], bool]], ...] = (
    (Masks, lambda params: params.mask is not None),
    (Bans, lambda params: params.bans is not None),
    (Biases, lambda params: params.bias is not None),
    (Penalties, lambda params: params.penalizes),
    (MinP, lambda params: params.min_logit > -inf),
)


class LogitsProcessors:
    """Changes of the logits of rows whose requests have `logits_params`."""

    def __init__(self, vocab_size: int, token_pool: Tensor) -> None:
        """Read output tokens from `token_pool`, int64 [rows, width], on the logits' device."""
        self.vocab_size, self.tokens = vocab_size, token_pool.view(-1)
        self.width = token_pool.shape[1]
        self.staging = StagingRing(token_pool.device)

    def batch_args(self, reqs: Sequence[Req]) -> list[Rule] | None:
        """Collect these requests' rules, which do not depend on lengths; None if there are none."""
        params = [(row, req.logits_params) for row, req in enumerate(reqs)]
        asked = [(row, given) for row, given in params if isinstance(given, LogitsParams)]
        kinds = [(rule, [pair for pair in asked if asks(pair[1])]) for rule, asks in KINDS]
        return [rule(rows, self.vocab_size) for rule, rows in kinds if rows] or None

    def step_args(self, rules: Sequence[Rule], reqs: Sequence[Req]) -> list[Edit]:
        """Compute the arguments of `process` for the step of these requests, the batch's.

        The token to be sampled will stand at position `device_len` of a row; those before it are in
        the token pool once the steps launched so far are done.
        """
        ends = ints(req.table_idx * self.width + req.device_len for req in reqs)
        rows = Rows(reqs, ends, ints(req.device_len - req.prompt_len for req in reqs))
        return [edit for rule in rules if (edit := rule.step(rows)) is not None]

    def process(self, logits: Tensor, edits: Sequence[Edit]) -> Tensor:
        """Return a float32 copy of logits [bs, vocab_size] with all edits applied; no sync."""
        out = logits.to(torch.float32, copy=True)
        uploaded = iter(self.staging.upload(*(array for edit in edits for array in edit.arrays)))
        for edit in edits:
            edit.apply(out, self.tokens, *(next(uploaded) for _ in edit.arrays))
        return out
