"""Logits processors against a slow oracle: one request at a time, over the list of its tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.engine import logits_processors as module
from minisgl.engine.logits_processors import LogitsProcessors, logits_params
from minisgl.engine.sampler import Sampler, clamped_temperature

VOCAB, EOS, WIDTH = 41, 7, 24


def oracle(
    logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams
) -> list[float]:
    """The logits of one row after all processors, by the definitions, in float64."""
    out = list(logits)
    allowed = range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
    banned = [token for token in range(VOCAB) if token not in allowed]
    for *before, last in params.bad_words:
        start = len(answer) - len(before)
        if start >= 0 and answer[start:] == before:
            banned.append(last)
    if len(answer) < params.min_tokens:
        banned += [token for token in {EOS, *params.stop_token_ids} if token < VOCAB]
    for token in banned:
        out[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in {*prompt, *answer}:
        r = params.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token in set(answer):
        count = answer.count(token)
        out[token] -= count * params.frequency_penalty + params.presence_penalty
    if params.min_p > 0 and not params.is_greedy:
        limit = max(out) + clamped_temperature(params) * math.log(params.min_p)
        out = [logit if logit >= limit else -math.inf for logit in out]
    return out


class Row:
    """A request that has said `answer`, its tokens in row `table_idx` of a pool."""

    def __init__(self, uid: int, prompt: list[int], answer: list[int], **params: object) -> None:
        self.prompt, self.answer = prompt, answer
        self.params = SamplingParams(**params)
        self.req = Req(
            uid=uid,
            input_ids=np.array(prompt, np.int32),
            sampling_params=self.params,
            max_new_tokens=WIDTH - len(prompt),
            table_idx=uid,
        )
        self.req.device_len = len(prompt) + len(answer)
        self.req.logits_params = logits_params(self.params, VOCAB, [EOS])

    def write(self, pool: torch.Tensor) -> None:
        tokens = self.prompt + self.answer
        pool[self.req.table_idx, : len(tokens)] = torch.tensor(tokens)


def fresh_pool(rows: list[Row], seed: int = 0) -> torch.Tensor:
    """A token pool whose places that are not in use hold the tokens of strangers."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(0, VOCAB, (len(rows) + 1, WIDTH), generator=generator)
    for row in rows:
        row.write(pool)
    return pool


def make_sampler(pool: torch.Tensor, kernel: object = None) -> Sampler:
    processors = LogitsProcessors(VOCAB, pool)
    return Sampler(VOCAB, "cpu", seed=3, kernel=kernel, processors=processors)


def processed(rows: list[Row], logits: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Logits after all processors, float32 [rows, VOCAB]; as they are if no row asks."""
    processors = LogitsProcessors(VOCAB, fresh_pool(rows, seed))
    reqs = [row.req for row in rows]
    batch = processors.batch_args(reqs)
    if batch is None:
        return logits.float()
    return processors.process(logits, processors.step_args(batch, reqs))


few_tokens = st.lists(st.integers(0, 9), max_size=7)  # so that they repeat
some_tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20, unique=True)
words = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=5)
params_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 1, 5]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.1, -0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100, 2, 7.5])),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(st.sampled_from([1, 2, VOCAB, 10**6]), max_size=2),
        "bad_words": words,
        "allowed_token_ids": some_tokens,
    },
)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Rows that ask for anything or nothing."""
    asked = draw(st.lists(st.none() | params_strategy, min_size=1, max_size=5))
    return [
        Row(uid, draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)), draw(few_tokens),
            **(params or {}))
        for uid, params in enumerate(asked)
    ]  # fmt: skip


def random_logits(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 3).to(dtype)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_processed_logits_are_those_of_the_definitions(
    rows: list[Row], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    logits = random_logits(len(rows), seed, dtype)
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_GATHERED", data.draw(st.sampled_from([1, 2**20])))
        got = processed(rows, logits, seed)
    assert torch.equal(logits, before)
    assert got.dtype == torch.float32
    for row, ours, raw in zip(rows, got, logits):
        want = torch.tensor(oracle(raw.tolist(), row.prompt, row.answer, row.params))
        assert torch.equal(want.isneginf(), ours.isneginf())
        assert torch.allclose(ours, want.float(), rtol=1e-5, atol=1e-5)
