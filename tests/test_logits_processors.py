"""Logits processors against a slow oracle: one request at a time, over the list of its tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from minisgl import LLM
from minisgl.core import Req, SamplingParams
from minisgl.engine import logits_processors as module
from minisgl.engine.logits_processors import LogitsProcessors, bitmask, logits_params
from minisgl.engine.sampler import Sampler, clamped_temperature
from minisgl.kernels.sample import sample_logits
from minisgl.scheduler.messages import InvalidRequestError, UserMsg
from minisgl.scheduler.requests import Limits, make_req
from minisgl.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.dense import dense_batch
from tests.fakes import record_on_a_cpu

VOCAB, EOS, WIDTH = 41, 7, 24


def oracle(
    logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams
) -> list[float]:
    """The logits of one row after all processors, by the definitions, in float64."""
    out, vocab = list(logits), range(len(logits))
    allowed = vocab if params.allowed_token_ids is None else params.allowed_token_ids
    banned = [token for token in vocab if token not in allowed]
    for *before, last in params.bad_words:
        start = len(answer) - len(before)
        if start >= 0 and answer[start:] == before:
            banned.append(last)
    if len(answer) < params.min_tokens:
        banned += [token for token in {EOS, *params.stop_token_ids} if token in vocab]
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
    """A request with output `answer`, its tokens in row `table_idx` of a pool."""

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


def make_sampler(pool: torch.Tensor | None, kernel: Any = None) -> Sampler:
    processors = None if pool is None else LogitsProcessors(VOCAB, pool)
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


# ------------------------------------------------------------------------------ sampling

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels")
PATHS = [
    pytest.param(None, id="torch"),
    pytest.param(sample_logits, id="triton", marks=interpreted),
]


@pytest.mark.parametrize("kernel", PATHS)
@settings(max_examples=25, deadline=None)
@given(rows=batches(), seed=st.integers(0, 1000))
def test_tokens_are_drawn_from_processed_logits(kernel: Any, rows: list[Row], seed: int) -> None:
    """As a sampler draws that gets them ready made; a row that asks for nothing, from its own."""
    logits, reqs = random_logits(len(rows), seed, torch.bfloat16), [row.req for row in rows]
    before = logits.clone()
    sampler = make_sampler(fresh_pool(rows, seed), kernel)
    got = sampler.sample(logits, sampler.prepare(reqs)).next_ids
    assert torch.equal(logits, before)
    plain = make_sampler(None, kernel)
    want = plain.sample(processed(rows, logits, seed), plain.prepare(reqs)).next_ids
    assert torch.equal(got, want)
    for index, row in enumerate(rows):
        if row.req.logits_params is None:
            alone = plain.sample(logits[index : index + 1], plain.prepare([row.req])).next_ids
            assert got[index] == alone[0]


def test_log_probabilities_are_those_of_the_model() -> None:
    row = Row(0, [1], [2], logprobs=2, allowed_token_ids=[9], repetition_penalty=2.0)
    logits, sampler = random_logits(1, 0), make_sampler(fresh_pool([row]))
    out = sampler.sample(logits, sampler.prepare([row.req]))
    assert out.next_ids.tolist() == [9] and out.logprobs is not None and out.top_ids is not None
    assert torch.isclose(out.logprobs[0], logits.log_softmax(-1)[0, 9])
    assert out.top_ids[0].tolist() == logits[0].topk(2).indices.tolist()


def test_who_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("work that no request asked for")

    monkeypatch.setattr(LogitsProcessors, "process", forbidden)
    monkeypatch.setattr(LogitsProcessors, "step_args", forbidden)
    rows = [Row(0, [1], []), Row(1, [1], [], temperature=1.0, stop=["x"], stop_token_ids=[3])]
    assert [row.req.logits_params for row in rows] == [None, None]
    sampler = make_sampler(fresh_pool(rows))
    assert sampler.prepare([rows[0].req]) is None
    args = sampler.prepare([row.req for row in rows])
    assert args is not None and args.simple
    sampler.sample(random_logits(2, 0), args)
    asking = Row(2, [1], [], presence_penalty=1.0)
    monkeypatch.undo()
    assert not sampler.prepare([rows[0].req, asking.req]).simple  # type: ignore[union-attr]


def test_a_batch_has_the_rules_that_it_asks_for_and_a_step_those_that_are_active() -> None:
    rows = [Row(0, [1], [2], logit_bias={3: 1.0}), Row(1, [1], [2], bad_words=[[4, 5, 6]])]
    processors, reqs = LogitsProcessors(VOCAB, fresh_pool(rows)), [row.req for row in rows]
    rules = processors.batch_args(reqs)
    assert rules is not None and [type(rule) for rule in rules] == [module.Bans, module.Biases]
    assert [edit.apply for edit in processors.step_args(rules, reqs)] == [module.add_biases]


def test_masks_may_be_written_after_a_step_is_prepared() -> None:
    rows = [Row(0, [1], [2], logit_bias={3: 1.0}), Row(1, [1], [2], allowed_token_ids=[4])]
    processors, reqs = LogitsProcessors(VOCAB, fresh_pool(rows)), [row.req for row in rows]
    rules = processors.batch_args(reqs)
    assert rules is not None
    edits = processors.step_args(rules, reqs)
    which, masks = module.masks_of(edits)
    assert which.tolist() == [1]
    masks[:] = bitmask([5], VOCAB)
    assert processors.process(random_logits(2, 0), edits)[1].argmax() == 5
    assert len(module.masks_of([edit for edit in edits if edit.apply is module.add_biases])[0]) == 0


def test_a_step_is_prepared_before_the_one_before_it_is_done() -> None:
    """The args say where to look; the token there may come later, and the request may move on."""
    row = Row(0, [1], [2, 3], frequency_penalty=2.0, bad_words=[[3, 4]], allowed_token_ids=[4, 5])
    pool = fresh_pool([row])
    sampler = make_sampler(pool)
    args = sampler.prepare([row.req])
    pool[0, 2] = 9  # drawn only now: not the 3 that the test had in mind
    row.req.device_len += 1
    row.req.logits_params.mask = bitmask([6], VOCAB)
    logits = torch.zeros(1, VOCAB)
    assert sampler.sample(logits, args).next_ids.tolist() == [4]
    assert sampler.sample(logits, sampler.prepare([row.req])).next_ids.tolist() == [6]


def test_a_request_may_come_back_in_another_row() -> None:
    """After a retraction the batch may be the same, and the row is not."""
    row = Row(0, [1], [2, 2], frequency_penalty=2.0)
    pool = torch.full((2, WIDTH), 5)
    row.write(pool)
    sampler, logits = make_sampler(pool), torch.zeros(1, VOCAB)
    logits[0, [2, 5]] = 1.0
    assert sampler.sample(logits, sampler.prepare([row.req])).next_ids.tolist() == [5]
    row.req.table_idx, pool[0] = 1, 5
    row.write(pool)
    assert sampler.sample(logits, sampler.prepare([row.req])).next_ids.tolist() == [5]
    pool[1, 1:3] = 5
    assert sampler.sample(logits, sampler.prepare([row.req])).next_ids.tolist() == [2]


@pytest.mark.parametrize(
    ("prompt", "answer", "banned"),
    [([1, 2], [], False), ([1], [2], False), ([8], [1, 2], True), ([8], [1, 2, 2], False)],
)
def test_a_bad_word_begins_in_the_answer(
    prompt: list[int], answer: list[int], banned: bool
) -> None:
    got = processed([Row(0, prompt, answer, bad_words=[[1, 2, 3]])], torch.zeros(1, VOCAB))
    assert (got[0, 3] == -math.inf) == banned and got[0].isneginf().sum() == banned


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_harm_no_other_token(bad: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = bad
    rows = [Row(uid, [1, 8], [9], bad_words=[[5]], presence_penalty=1.0) for uid in range(2)]
    got = processed(rows, logits)
    assert torch.equal(got[0, 6:], got[1, 6:]) and got[1, 9] == -1
    assert bad != math.inf or got[0, 5] == -math.inf


def test_a_row_that_forbids_everything_gives_token_0() -> None:
    row = Row(0, [1], [], bad_words=[[9]], allowed_token_ids=[9])
    sampler = make_sampler(fresh_pool([row]))
    assert sampler.sample(torch.ones(1, VOCAB), sampler.prepare([row.req])).next_ids.tolist() == [0]


def bytecodes(call: Callable[[], object]) -> int:
    """Count the bytecodes that Python executes during a call."""
    count, before = 0, sys.gettrace()

    def look(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_python_runs_as_long_for_many_rules_as_for_few() -> None:
    """A batch that changes at each step, with thousands of rules in each row, delays everybody."""

    def cost(rules: int) -> int:
        params = {
            "bad_words": [[1, 2, 3]] * rules,
            "logit_bias": dict.fromkeys(range(rules), 1.0),
            "min_tokens": 9,
            "stop_token_ids": list(range(rules)),
        }
        rows = [Row(uid, [1], [2] * 5, **params) for uid in range(3)]
        logits = random_logits(3, 0)
        processed(rows, logits)  # the first time, torch may import modules
        return min(bytecodes(lambda: processed(rows, logits)) for _ in range(3))

    few, many = cost(1), cost(VOCAB)
    assert few > 100 and many < few + 10 * VOCAB  # a loop would take more for each rule and row


# ------------------------------------------------------------------------------ other oracles


@pytest.mark.parametrize("seed", range(3))
def test_as_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(0, 9, 4).tolist(), rng.integers(0, 4, 8).tolist()
    logits, said = random_logits(1, seed), torch.tensor([prompt + answer])
    words = [[int(answer[-1]), 3], [7], rng.integers(0, 4, 3).tolist(), [*answer[-2:], 5]]
    wanted = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor(1.7)(said, logits.clone()),
        "bad_words": NoBadWordsLogitsProcessor(words)(torch.tensor([answer]), logits.clone()),
        "min_p": MinPLogitsWarper(0.2)(said, logits / 0.7) * 0.7,
    }
    asked = {"repetition_penalty": 1.7, "bad_words": words, "min_p": 0.2}
    for name, want in wanted.items():
        got = processed([Row(0, prompt, answer, temperature=0.7, **{name: asked[name]})], logits)
        assert torch.allclose(got, want, rtol=1e-5), name
        assert not torch.equal(got, logits), name


# ------------------------------------------------------------------------------ at the door

LIMITS = Limits(max_seq_len=64, pool_tokens=64, vocab_size=VOCAB, eos_token_ids=frozenset([EOS]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token ids must be in 0..40, got 41"),
        ({"allowed_token_ids": [1, 10**12]}, "allowed_token_ids: token ids must be in 0..40, got"),
        ({"bad_words": [[1], [2, VOCAB]]}, "bad_words: token ids must be in 0..40, got 41"),
        ({"bad_words": ["text"]}, "bad_words: strings need a tokenizer"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: must be at most max_tokens=4, got 5"),
    ],
)
def test_what_the_model_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        make_req(UserMsg(1, [1], SamplingParams(**fields)), LIMITS)
    assert error.value.param == message.split(":")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": -0.1}, {"min_p": 1.1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0}, {"repetition_penalty": math.inf}, {"logit_bias": {1: 100.5}},
        {"logit_bias": {"1": 1.0}}, {"logit_bias": dict.fromkeys(range(1025), 0.0)},
        {"min_tokens": -1}, {"min_tokens": 2**63}, {"bad_words": [""]}, {"bad_words": [[]]},
        {"bad_words": [[-1]]},
        {"bad_words": [[1]] * 1025}, {"allowed_token_ids": []}, {"allowed_token_ids": [-1]},
    ],
    ids=str,
)  # fmt: skip
def test_ranges(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: must"):
        SamplingParams(**fields)


def test_admission_says_what_a_request_wants() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[2, 10**9], bad_words=[[1, 2]], min_p=0.5)
    req = make_req(UserMsg(1, [1], params), LIMITS)
    assert [array.tolist() for array in req.logits_params.bans] == [
        [2, 2, EOS], [2, 1, 1], [module.ALWAYS, 3, 3], [0], [1], [-1],
    ]  # fmt: skip
    assert req.logits_params.min_logit == -math.inf  # greedy
    assert make_req(UserMsg(1, [1], SamplingParams(top_p=0.5)), LIMITS).logits_params is None
    assert logits_params(SamplingParams(temperature=1e-9, min_p=1.0), VOCAB) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("processors"), "qwen3", seed=2, tokenizer=True)


def test_bad_words_become_tokens_with_and_without_a_space(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    params = tokenizer.encode_params(SamplingParams(bad_words=["cat", " cat", [7, 8]], seed=3))
    texts = [tokenizer.decode(word) for word in params.bad_words]
    assert texts[:2] == ["cat", " cat"] and params.bad_words[2:] == ((7, 8),)
    assert params.seed == 3
    plain = SamplingParams(bad_words=[[7, 8]])
    assert tokenizer.encode_params(plain) is plain


def test_a_bad_word_of_white_space_is_that_one(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    words = tokenizer.encode_params(SamplingParams(bad_words=["\n", " "])).bad_words
    assert [tokenizer.decode(word) for word in words] == ["\n", " \n", " "]


def test_one_long_word_does_not_widen_the_short_ones() -> None:
    words = [[1, 2]] * 500 + [list(range(20)) * 10]
    reqs = [make_req(UserMsg(1, [1], SamplingParams(bad_words=words)), LIMITS)] * 4
    processors = LogitsProcessors(VOCAB, torch.zeros(4, WIDTH, dtype=torch.int64))
    batch = processors.batch_args(reqs)
    assert batch is not None
    (bans,) = batch
    assert isinstance(bans, module.Bans) and len(bans.before) == 4 * (500 + 199)
    edits = processors.step_args(batch, reqs)
    assert all(array.size < 4 * (500 + 199) for edit in edits for array in edit.arrays)


def test_bad_words_have_a_limit_in_all() -> None:
    with pytest.raises(ValueError, match=r"^bad_words: .*2048.*17000"):
        SamplingParams(bad_words=[[1] * 1000] * 17)
    assert SamplingParams(bad_words=[[1] * 1000] * 2 + ["a" * 1000]).bad_words


# ------------------------------------------------------------------------------ the whole engine

WAYS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {3: 2.0, 9: -100.0}},
    {"allowed_token_ids": [1, 2, 3, 4], "bad_words": [[1, 1], [2, 3, 1], [4]]},
    {"repetition_penalty": 1.2, "temperature": 1.0, "seed": 1, "min_p": 0.05, "top_k": 50},
    {"frequency_penalty": 2.0, "temperature": 0.8, "seed": 2, "logprobs": 1},
    {"min_tokens": 12, "logit_bias": {318: 30.0}},  # an end token that would come at once
    {"temperature": 1.0, "seed": 3},
]
PROMPTS = [[(7 * i + j) % 50 for j in range(20 + 9 * i)] for i in range(len(WAYS))]


def answers(
    folder: Path, *, repeat: int = 1, only: slice = slice(None), **how: Any
) -> list[list[int]]:
    """Return the answers to some prompts; those of the last time, if there are several."""
    fields = {"page_size": 4, "num_pages": 400, "max_running_req": 16, "overlap": False} | how
    params = [SamplingParams(max_tokens=16, **way) for way in WAYS[only]]
    with LLM(folder, device="cpu", **fields) as llm:
        for _ in range(repeat):
            outs = llm.generate(PROMPTS[only], params)
        if "reserve_tokens" in how:
            assert llm.scheduler.retractions > 0
        if repeat > 1:
            assert all(out["cached_tokens"] > 0 for out in outs)
        if "cuda_graph_bs" in how:
            assert llm.scheduler.engine.runners.decode is not None
            assert llm.scheduler.engine.runners.decode.replays > 0
    return [out["token_ids"] for out in outs]


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[list[int]]:
    return answers(folder, cache_type="naive")


@pytest.mark.parametrize(
    "how",
    [
        {"overlap": True},
        {"max_extend_tokens": 24},
        {"repeat": 2},
        {"overlap": True, "cuda_graph_bs": (4, 8)},
        {"cuda_graph_bs": (2,), "only": slice(1, 3)},
        {"num_pages": 60, "overlap": True, "reserve_tokens": 1, "cuda_graph_bs": (8,)},
    ],
    ids=["overlap", "chunks", "prefix", "recorded", "only-processed", "retracted"],
)
def test_any_schedule_gives_the_same_tokens(
    folder: Path, serial: list[list[int]], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_on_a_cpu(monkeypatch)
    assert answers(folder, **how) == serial[how.get("only", slice(None))]


def test_greedy_answers_are_those_of_the_oracle(folder: Path, serial: list[list[int]]) -> None:
    """Token by token, from the dense model's logits for all tokens so far."""
    with LLM(folder, device="cpu", num_pages=8) as llm, torch.inference_mode():
        engine = llm.scheduler.engine
        for way, prompt, answer in zip(WAYS, PROMPTS, serial):
            params = SamplingParams(**way)
            if not params.is_greedy or "min_tokens" in way:
                continue
            for index, token in enumerate(answer):
                said = answer[:index]
                logits = engine.model(dense_batch([prompt + said], last_only=True))[0]
                want = oracle(logits.tolist(), prompt, said, params)
                assert want[token] == pytest.approx(max(want), abs=1e-4)
    assert len(serial[6]) == 13 and serial[6][-1] == 318 and 318 not in serial[6][:-1]
    assert set(serial[3]) <= {1, 2, 3} and (1, 1) not in zip(serial[3], serial[3][1:])
