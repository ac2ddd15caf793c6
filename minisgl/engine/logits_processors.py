"""Changes logits before the draw: masks, bad words, biases, penalties, min-p.

Generated from notebooks/06d_logits_processors.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.staging import StagingRing
from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.sampler import clamped_temperature

ALWAYS = 2**62


def bitmask(token_ids: Collection[int], vocab_size: int) -> IntArray:
    """Return int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set for token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class LogitsParams:
    """Changes of the logits for one request; made once, when it is admitted.

    A ban is a sequence of tokens, whose last one is forbidden after the others, and the length of
    the answer from which it is lifted. `mask` has a bit for each token that is allowed, as from
    `bitmask`; its owner may replace it between two steps.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_logit: float = -inf  # of a token, as a difference to the largest logit
    bias: dict[int, float] = field(default_factory=dict)
    bans: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
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
    bans = [(tuple(int(token) for token in word), ALWAYS) for word in params.bad_words]
    if params.min_tokens > 0:
        ends = sorted({*eos_token_ids, *params.stop_token_ids})
        bans += [((token,), params.min_tokens) for token in ends if token < vocab_size]
    wants = LogitsParams(
        repetition=min(max(params.repetition_penalty, 1e-30), 1e30),  # within float32's reach
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        bias=params.logit_bias or {},
        bans=bans,
    )
    if params.min_p > 0 and not params.is_greedy:
        wants.min_logit = clamped_temperature(params) * log(params.min_p)
    if params.allowed_token_ids is not None:
        wants.mask = bitmask(params.allowed_token_ids, vocab_size)
    return None if wants.mask is None and wants == LogitsParams() else wants


class BatchRules(NamedTuple):
    """Changes of a batch's logits while it stays the same: NumPy arrays, int64 unless noted."""

    prompt_lens: Any  # [bs]
    mask_rows: Any  # [g]: rows of the batch that have a mask
    ban_rows: Any  # [k]
    ban_tokens: Any  # [k]: the last one of each, which is to be forbidden
    ban_lens: Any  # [k]
    ban_ends: Any  # [k]: tokens of the answer from which it is lifted
    before_bans: Any  # [t]: for each token before a last one, whose it is,
    before_tokens: Any  # [t]: which,
    before_offsets: Any  # [t]: and where, counted from the end of the row
    bias_at: Any  # [b]: in the flattened logits
    bias: Any  # float32 [b]
    penalty_rows: Any  # [m]
    penalties: Any  # float32 [m, 3]: repetition, frequency, presence
    min_p_rows: Any  # [q]
    min_logits: Any  # float32 [q]


class LogitsArgs(NamedTuple):
    """The same for one step: arrays on the host or, uploaded, tensors; int64 unless noted."""

    mask_rows: Any  # [g]
    masks: Any  # int32 [g, ceil(vocab_size / 32)]
    ban_at: Any  # [k]: the token to forbid, in the flattened logits
    before_bans: Any  # [t]: it is forbidden if all tokens of its ban
    before_tokens: Any  # [t]: are these,
    before_at: Any  # [t]: here in the flattened token pool
    bias_at: Any  # [b]
    bias: Any  # float32 [b]
    penalty_rows: Any  # [m]
    penalties: Any  # float32 [m, 3]
    starts: Any  # [m]: first token that counts, in the flattened token pool
    counts: Any  # [m]: how many there are from there on,
    prompts: Any  # [m]: of which so many belong to the prompt
    min_p_rows: Any  # [q]
    min_logits: Any  # float32 [q]


def ints(values: Sequence[Any]) -> np.ndarray:
    """Convert numbers to int64 [n]."""
    return np.array(values, np.int64)


def tokens_before(ban: Sequence[int]) -> list[tuple[int, int]]:
    """Pair a ban's tokens before its last one with their positions: -1 is the newest output."""
    return list(zip(ban[:-1], range(1 - len(ban), 0)))


class LogitsProcessors:
    """Changes of the logits of rows whose requests have `logits_params`."""

    def __init__(self, vocab_size: int, token_pool: Tensor) -> None:
        """Read output tokens from `token_pool`, int64 [rows, width], on the logits' device."""
        self.vocab_size, self.tokens = vocab_size, token_pool.view(-1)
        self.width = token_pool.shape[1]
        self.staging = StagingRing(token_pool.device)

    def batch_args(self, reqs: Sequence[Req]) -> BatchRules | None:
        """Collect these requests' rules, whatever their lengths; None if there are none."""
        asked = [(row, req.logits_params) for row, req in enumerate(reqs) if req.logits_params]
        if not asked:
            return None
        bans = [(row, *ban) for row, wants in asked for ban in wants.bans]
        before = [
            (k, token, at) for k, ban in enumerate(bans) for token, at in tokens_before(ban[1])
        ]
        bias = [(row * self.vocab_size + t, b) for row, w in asked for t, b in w.bias.items()]
        penal = [(row, w) for row, w in asked if w.penalizes]
        penalties = [(w.repetition, w.frequency, w.presence) for _, w in penal]
        min_p = [(row, w.min_logit) for row, w in asked if w.min_logit > -inf]
        return BatchRules(
            prompt_lens=ints([req.prompt_len for req in reqs]),
            mask_rows=ints([row for row, w in asked if w.mask is not None]),
            ban_rows=ints([row for row, _, _ in bans]),
            ban_tokens=ints([tokens[-1] for _, tokens, _ in bans]),
            ban_lens=ints([len(tokens) for _, tokens, _ in bans]),
            ban_ends=ints([end for _, _, end in bans]),
            before_bans=ints([k for k, _, _ in before]),
            before_tokens=ints([token for _, token, _ in before]),
            before_offsets=ints([offset for _, _, offset in before]),
            bias_at=ints([at for at, _ in bias]),
            bias=np.array([value for _, value in bias], np.float32),
            penalty_rows=ints([row for row, _ in penal]),
            penalties=np.array(penalties, np.float32).reshape(-1, 3),
            min_p_rows=ints([row for row, _ in min_p]),
            min_logits=np.array([value for _, value in min_p], np.float32),
        )

    def step_args(self, batch: BatchRules, reqs: Sequence[Req]) -> LogitsArgs:
        """Compute the arguments of `process` for the step of these requests, the batch's.

        The token to be sampled will stand at position `device_len` of a row; those before it are in
        the token pool once the steps launched so far are done.
        """
        ends = ints([req.table_idx * self.width + req.device_len for req in reqs])
        lens = ints([req.device_len for req in reqs])
        said = (lens - batch.prompt_lens)[batch.ban_rows]
        active = (batch.ban_lens - 1 <= said) & (said < batch.ban_ends)
        before = active[batch.before_bans]
        rows = batch.penalty_rows
        prompts = np.where(batch.penalties[:, 0] != 1, batch.prompt_lens[rows], 0)
        counts = (lens - batch.prompt_lens)[rows] + prompts
        masks = [reqs[row].logits_params.mask for row in batch.mask_rows]
        words = -(-self.vocab_size // 32)
        return LogitsArgs(
            mask_rows=batch.mask_rows,
            masks=np.array(masks, np.int32).reshape(-1, words),
            ban_at=(batch.ban_rows * self.vocab_size + batch.ban_tokens)[active],
            before_bans=(np.cumsum(active) - 1)[batch.before_bans[before]],
            before_tokens=batch.before_tokens[before],
            before_at=(ends[batch.ban_rows][batch.before_bans] + batch.before_offsets)[before],
            bias_at=batch.bias_at,
            bias=batch.bias,
            penalty_rows=rows,
            penalties=batch.penalties,
            starts=ends[rows] - counts,
            counts=counts,
            prompts=prompts,
            min_p_rows=batch.min_p_rows,
            min_logits=batch.min_logits,
        )

    def process(self, logits: Tensor, args: LogitsArgs) -> Tensor:
        """Return a float32 copy of logits [bs, vocab_size] with all rules applied; no sync."""
        out = logits.to(torch.float32, copy=True)
        gpu = LogitsArgs(*self.staging.upload(*args))
        if len(args.mask_rows):
            apply_masks(out, gpu.mask_rows, gpu.masks)
        if len(args.ban_at):
            forbid(out, gpu.ban_at, self.answer_ends_in(gpu))
        if len(args.bias_at):
            out.view(-1).index_add_(0, gpu.bias_at, gpu.bias)
        if len(args.penalty_rows):
            self.penalize(out, gpu, int(args.counts.max()))
        if len(args.min_p_rows):
            apply_min_p(out, gpu.min_p_rows, gpu.min_logits)
        return out

    def answer_ends_in(self, args: LogitsArgs) -> Tensor:
        """Return True for each ban whose tokens before the last one are present, bool [k]."""
        wrong = (self.tokens[args.before_at] != args.before_tokens).long()
        return torch.zeros_like(args.ban_at).index_add_(0, args.before_bans, wrong) == 0

    def penalize(self, out: Tensor, args: LogitsArgs, most: int) -> None:
        """Apply the penalties; no row counts more than `most` tokens."""
        offsets = torch.arange(max(most, 1), device=out.device)
        step = max(1, MAX_GATHERED // len(offsets))
        columns = (args.penalty_rows, args.penalties, args.starts, args.counts, args.prompts)
        for rows, penalties, starts, counts, prompts in zip(*(c.split(step) for c in columns)):
            last = (
                counts[:, None] - 1
            )  # shorter rows repeat their last token, which changes nothing
            tokens = self.tokens[starts[:, None] + torch.minimum(offsets, last)]
            answer = (offsets >= prompts[:, None]) & (offsets <= last)
            seen = out.new_zeros(len(rows), self.vocab_size).scatter_add_(1, tokens, answer.float())
            count = seen.gather(1, tokens)
            repetition, frequency, presence = penalties.T[:, :, None]
            places = rows[:, None] * self.vocab_size + tokens
            old = out.view(-1)[places]
            new = torch.where(old > 0, old / repetition, old * repetition)
            new -= frequency * count + presence * (count > 0)
            out.view(-1).scatter_(0, places.flatten(), new.flatten())


def apply_masks(out: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid, in some rows of out [bs, vocab], tokens without a bit in masks [g, words]."""
    bits = masks[:, :, None] >> torch.arange(32, device=out.device, dtype=torch.int32)
    allowed = (bits & 1).bool().flatten(1)[:, : out.shape[1]]
    out.index_copy_(0, rows, out.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


def forbid(out: Tensor, places: Tensor, where: Tensor) -> None:
    """Set places [k] of the flattened logits to -inf where `where` [k] is true."""
    limits = torch.where(where, -torch.inf, torch.inf)
    out.view(-1).scatter_reduce_(0, places, limits, "amin")  # a place may occur several times


def apply_min_p(out: Tensor, rows: Tensor, min_logits: Tensor) -> None:
    """Forbid, in some rows, tokens that are more than -min_logits [q] below the largest."""
    chosen = out.index_select(0, rows)
    limit = chosen.amax(-1) + min_logits
    out.index_copy_(0, rows, chosen.masked_fill_(chosen < limit[:, None], -torch.inf))


MAX_GATHERED = 2**20  # tokens at once: bounds the memory of penalties
