"""Answers that keep to a grammar: valid in every kind of step, and no neighbour notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock, patch

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits, LLTokenizer

from minisgl.config.engine import SchedulerConfig, ServerConfig
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.kvcache.audit import check_integrity
from minisgl.llm import LLM
from minisgl.runtime.ranks import Ranks, config_of_rank
from minisgl.scheduler import forms, grammar, grammar_queue, side
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.forms import compile_grammar
from minisgl.scheduler.grammar import (
    CompilingChannel,
    Grammars,
    Matcher,
    fill_some,
    load_grammars,
)
from minisgl.scheduler.grammar_queue import SMALL, GrammarQueue
from minisgl.scheduler.messages import (
    AbortMsg,
    ErrorReply,
    InvalidRequestError,
    TokenReply,
    UserMsg,
)
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.side_process import MOST, PER_CHARACTER, try_grammar
from minisgl.server.frontend import RequestFailed
from minisgl.server.in_process import InProcessServer
from minisgl.server.workers.messages import UserReply
from minisgl.server.workers.scheduler_process import SchedulerChannel
from tests import schemas
from tests.fakes import record_on_a_cpu
from tests.tp_drills import quick_ranks
from tests.turns import in_turns

__all__ = ["quick_ranks"]  # a fixture

FOLDER = resolve_model_path(None)
MODEL = ModelConfig.from_path(FOLDER)
TEXT = (FOLDER / "tokenizer.json").read_text("utf-8")
EOS = MODEL.eos_token_ids[0]
ANSWER = SamplingParams(regex="(yes|no), [0-9]{2,4}!", max_tokens=40)


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def serve(**fields: Any) -> LLM:
    """The embedded model in a small engine on a CPU."""
    return LLM(**{"device": "cpu", "page_size": 4, "num_pages": 2000, **fields})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with serve(overlap=True) as made:
        yield made


def tokenizer(eos: list[int] | None = None) -> LLTokenizer:
    return LLTokenizer(TEXT, n_vocab=MODEL.vocab_size, eos_token=eos or [EOS])


def allowed(matcher: Matcher) -> set[int]:
    """Tokens that may come next."""
    bits = np.frombuffer(matcher.ll.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


# ------------------------------------------------------------------ whole answers


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances are short, whatever a model prefers to say."""
    kinds = ["string", "integer", "enum", "boolean", "null", "number", "pattern"]
    kind = rng.choice(kinds if depth == 0 else [*kinds, "object", "object", "array"])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(1, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[ab]{2}$", "^x[0-9]$", "^(on|off)$"])}
    if kind in ("integer", "number"):
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(90)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, True, "é 😀"], rng.randrange(1, 4))}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3}
    if kind == "object":
        return random_object(rng, depth)
    return {"type": kind}


def random_object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    names = rng.sample(["a", "name", "size", "b c", "ok"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def check(params: SamplingParams, out: dict[str, Any]) -> bool:
    """True if the answer is finished; fails if it is finished and wrong."""
    if out["finish_reason"] != "stop":
        assert out["finish_reason"] == "length"
        return False
    if params.json_schema is not None:
        jsonschema.validate(json.loads(out["text"]), json.loads(params.json_schema))
    elif params.regex is not None:
        assert re.fullmatch(params.regex, out["text"])
    elif params.choice:
        assert out["text"] in params.choice
    return True


REGEXES = (r"[0-9]{3}-[a-z]{1,5}", "(yes|no), I (can|do)( not)?", r"\(\d+, \d+\)|none", "é{2}|ü")
CHOICES = (("yes", "no"), ("red", "reddish", "green"), ('say "hi"\n', "é 😀"), ("a",))


def mixed(seed: int, count: int) -> list[SamplingParams]:
    """Schemas, each greedy and sampled; regexes, choices, and free answers between them."""
    rng, asked = random.Random(seed), []
    for index in range(count):
        hot = {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": index}
        schema = random_object(rng) if rng.random() < 0.8 else random_schema(rng)
        asked += [
            SamplingParams(json_schema=schema, max_tokens=150, **extra) for extra in ({}, hot)
        ]
        hot["top_p"] = rng.choice([1.0, 0.9])
        asked.append(SamplingParams(max_tokens=20, **(hot if index % 2 else {})))
        if index % 3 == 0:
            asked.append(SamplingParams(regex=rng.choice(REGEXES), max_tokens=40, **hot))
            asked.append(SamplingParams(choice=rng.choice(CHOICES), max_tokens=40, **hot))
    return asked


PROMPTS = ("What is 12 + 30?", "Tell me a story about a fox.", "Sort these: 9, 4, 7, 1", "Hi")


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [talk(PROMPTS[index % len(PROMPTS)]) for index in range(count)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlap": {"overlap": True},
    "recorded": {"overlap": True, "cuda_graph_bs": (4, 16), "max_seq_len_override": 256},
    "recorded, plain": {"overlap": False, "cuda_graph_bs": (4, 16), "max_seq_len_override": 256},
    "chunked": {"overlap": True, "max_extend_tokens": 9, "cache_type": "naive"},
    "retracted": {"overlap": True, "num_pages": 24, "reserve_tokens": 1},
}


@pytest.mark.parametrize(("part", "kind"), in_turns(8, itertools.product(range(4), KINDS)))
def test_answers_are_valid_and_neighbours_as_if_alone(
    part: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 schemas each, 144 in all, twice: greedy and sampled, beside requests without any."""
    if "cuda_graph_bs" in KINDS[kind]:
        record_on_a_cpu(monkeypatch)
    asked = mixed(seed=6 * part + list(KINDS).index(kind), count=6)
    free = [index for index, params in enumerate(asked) if check_is_free(params)]
    talks = prompts(len(asked))
    with serve(max_running_req=16, **KINDS[kind]) as engine:
        outs = engine.chat(talks, asked)
        ended = sum(check(*pair) for pair in zip(asked, outs))
        assert ended > 0.9 * len(asked) - len(free)
        if kind == "retracted":
            assert engine.scheduler.retractions > 0
        if kind == "overlap":
            assert sum(out["cached_tokens"] > 0 for out in outs) > (len(outs) - 16) / 2
        check_integrity(engine.scheduler.cache)
        for index in free[:4]:
            alone = engine.chat(talks[index], asked[index])[0]
            assert alone["token_ids"] == outs[index]["token_ids"]


def check_is_free(params: SamplingParams) -> bool:
    return side.asked_for(params) is None


@pytest.mark.parametrize("other", in_turns(2, ["overlap", "retracted", "recorded"]))
def test_every_loop_gives_the_same_constrained_tokens(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = mixed(seed=9, count=1), []
    for kind in ("plain", other):
        if "cuda_graph_bs" in KINDS[kind]:
            record_on_a_cpu(monkeypatch)
        with serve(max_running_req=16, **KINDS[kind]) as engine:
            outs = engine.chat(prompts(len(asked)), asked)
        answers.append([out["token_ids"] for out in outs])
    assert all(answer == answers[0] for answer in answers)


def test_aborts_leave_nothing_behind_and_harm_nobody() -> None:
    """At every moment of an answer; the others get the tokens that they get alone."""
    channel = InProcessChannel()
    config = SchedulerConfig(
        model_path=str(FOLDER), device="cpu", page_size=4, num_pages=200, overlap=True
    )
    scheduler = build_scheduler(config, channel)
    prompt, asked = list(range(6, 20)), [ANSWER, SamplingParams(max_tokens=12), ANSWER]

    def go(abort_at: int) -> dict[int, list[Any]]:
        said: dict[int, list[Any]] = {}
        channel.put_messages(*(UserMsg(uid, prompt, params) for uid, params in enumerate(asked)))
        for turn in range(200):
            if turn == abort_at:
                channel.put_messages(AbortMsg(0))
            scheduler.step_overlap()
            for reply in channel.take_replies():
                said.setdefault(reply.uid, []).append(reply)
            if not scheduler.has_work and not channel.waiting:
                break
        check_integrity(scheduler.cache)
        return {uid: [reply.token for reply in replies] for uid, replies in said.items()}

    whole = go(-1)
    for abort_at in range(1, 8):
        tokens = go(abort_at)
        assert tokens[0][-1] is None and tokens[0][:-1] == whole[0][: len(tokens[0]) - 1]
        assert tokens[1] == whole[1] and tokens[2] == whole[2]


def test_the_draw_of_an_aborted_request_is_no_part_of_the_next_prompt() -> None:
    """Its row goes to a request that came with the abort, in the first turn after a pause."""
    with LLM(overlap=True, max_running_req=1, cache_type="naive") as made:
        channel, scheduler = made.channel, made.scheduler
        prompt, params = list(range(6, 40)), SamplingParams(max_tokens=4)
        alone = made.generate(prompt, params)[0]["token_ids"]
        channel.put_messages(UserMsg(100, prompt[:9], ANSWER))
        scheduler.step_overlap()
        channel.put_messages(AbortMsg(100), UserMsg(101, prompt, params))
        scheduler.step_overlap()
        tokens = scheduler.engine.tables.token_pool[scheduler.reqs[101].table_idx]
        assert tokens[: len(prompt)].tolist() == prompt
        while scheduler.has_work:
            scheduler.step_overlap()
        replies = [reply for reply in channel.take_replies() if reply.uid == 101]
        assert [reply.token for reply in replies] == alone


def test_grammars_of_both_notations(llm: LLM) -> None:
    lark = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
    gbnf = 'root ::= "(" root ")" | [0-9] [0-9]'
    asked = [SamplingParams(grammar=text, temperature=1.0, seed=1, max_tokens=60) for text in
             (lark, gbnf)]  # fmt: skip
    for out in llm.generate(["What is 12 + 30?"] * 2, asked):
        assert out["finish_reason"] == "stop"
        assert re.fullmatch(r"\(*\d{1,3}\)*", out["text"])
        assert out["text"].count("(") == out["text"].count(")")


def test_a_json_object_is_one(llm: LLM) -> None:
    asked = [SamplingParams(json_object=True, temperature=1.0, seed=n, max_tokens=60) for n in
             range(8)]  # fmt: skip
    outs = llm.generate(["Tell me of a fox."] * 8, asked)
    whole = [json.loads(out["text"]) for out in outs if out["finish_reason"] == "stop"]
    assert whole and all(isinstance(value, dict) for value in whole)
    assert all(out["text"].startswith("{") for out in outs)


def test_a_cut_answer_says_so(llm: LLM) -> None:
    """An integer without bounds may go on, and a greedy model does."""
    out = llm.generate("Say it.", SamplingParams(regex="[0-9]{50}", max_tokens=5))[0]
    assert out["finish_reason"] == "length" and len(out["token_ids"]) == 5
    assert re.fullmatch("[0-9]{1,50}", out["text"])


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    """The grammar's only path is improbable for the model, and the logprobs show it."""
    asked = [SamplingParams(logprobs=2, max_tokens=1), SamplingParams(choice=["Zz"], logprobs=2)]
    free, forced = (llm.chat(talk("What is 12 + 30?"), params)[0]["logprobs"] for params in asked)
    assert forced[0]["top_logprobs"][0][0] == free[0]["token_id"]
    assert forced[0]["top_logprobs"][0][1] == pytest.approx(free[0]["logprob"], abs=1e-4)
    assert forced[0]["logprob"] < -3


def test_a_grammar_that_fails_on_the_way_ends_its_request_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    with serve(overlap=True) as engine:
        asked = [SamplingParams(regex="[a-z ]{300}", max_tokens=90),
                 SamplingParams(max_tokens=8)]  # fmt: skip
        broken, whole = engine.generate(["a"] * 2, asked)
        assert broken["finish_reason"] == "abort"
        assert broken["notice"].startswith("regex: ") and "states" in broken["notice"]
        assert whole == engine.generate("a", asked[1])[0] | {
            "cached_tokens": whole["cached_tokens"]
        }


def tiny_tokenizer() -> LLTokenizer:
    tokenizer = forms.load_tokens(FOLDER, 2240, [0])
    assert isinstance(tokenizer, LLTokenizer)
    return tokenizer


def ambiguous(count: int) -> str:
    """A grammar whose rules are empty, a letter or two of the rules: it has many parses."""
    names = "abcdefghijklmnop"[:count]
    pairs = " | ".join(f"{one} {other}" for one in names for other in names)
    return "start: a\n" + "\n".join(f'{name}: {pairs} | "x" |' for name in names)


@pytest.mark.parametrize("count, least", [(2, 20), (3, 5), (6, None), (12, None)])
def test_a_token_of_an_ambiguous_grammar_has_bounded_work(count: int, least: int | None) -> None:
    """The items of a row bound it, and the answer ends; otherwise a token may take seconds."""
    tokenizer = tiny_tokenizer()
    try:
        matcher = compile_grammar(tokenizer, "grammar", ambiguous(count))
    except InvalidRequestError as error:
        assert least is None and "items" in error.message
        return
    token = tokenizer.tokenize_str("x")[0]
    length = 0
    while matcher.consume_token(token) and not matcher.is_error():
        matcher.compute_bitmask()
        length += 1
        assert length < 100
    assert least is not None and length >= least and "max is 400" in matcher.get_error()


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_a_choice_is_one_item(count: int) -> None:
    """However many texts there are; an empty one and the beginning of another are texts, too."""
    texts = ["", "one", *(f"one of {i}" for i in range(count))]
    tokenizer = tiny_tokenizer()
    start = compile_grammar(tokenizer, "choice", json.dumps(texts))
    for text in (*texts[:3], texts[-1]):
        matcher = start.deep_copy()
        assert matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()
    assert not start.validate_tokens(tokenizer.tokenize_str("two"))


@pytest.mark.parametrize(
    "pattern", [r"\w+@\w+", r"\w+@\w+\.com", r"\w+(\.\w+)*@\w+(\.\w+)+", r"\w.\.\w"]
)
def test_a_letter_of_any_script_may_come_in_bytes(pattern: str) -> None:
    """The first byte of U+1000 to U+1FFF leaves the lexer many expressions to follow."""
    tokens = tokenizer()
    matcher = compile_grammar(tokens, "regex", pattern)
    [byte] = [i for i in range(tokens.vocab_size) if tokens.decode_bytes([i]) == b"\xe1"]
    for _ in range(2):
        assert matcher.consume_token(byte)
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        for rest in (b"\xbb", b"\x87"):  # an e with two signs
            [token] = [i for i in range(tokens.vocab_size) if tokens.decode_bytes([i]) == rest]
            matcher.consume_token(token)
            if pattern.startswith(r"\w."):
                matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()


CALLS = {"enum": ["<tool_call>"]}
NESTED = {"type": "object", "properties": {"</tool_call>": {"const": "a<|end|>b"}},
          "required": ["</tool_call>"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"choice": ["<tool_call>"]}, "<tool_call>"),
        ({"choice": ["a<|user|>b", "a<|user|>c"]}, r"a<\|user\|>[bc]"),
        ({"regex": "<tool_call>[a-c]</tool_call>"}, "<tool_call>[a-c]</tool_call>"),
        ({"regex": "<[|]end[|]>"}, r"<\|end\|>"),
        ({"json_schema": CALLS}, '"<tool_call>"'),
        ({"json_schema": NESTED}, r'\{"</tool_call>": ?"a<\|end\|>b"\}'),
        ({"grammar": 'start: "<tool_call>" "x"'}, "<tool_call>x"),
        ({"structural_tag": {"type": "structural_tag",
                             "format": {"type": "json_schema", "json_schema": CALLS}}},
         '"<tool_call>"'),
    ],
)  # fmt: skip
def test_a_text_may_spell_a_special_token(llm: LLM, fields: dict[str, Any], pattern: str) -> None:
    """Text that must come is text, too: the library would make it the special token."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, **fields)
    (found,) = llm.generate(["x"], params)
    assert re.fullmatch(pattern, found["text"]) and found["finish_reason"] == "stop"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "(("}, "regex: .*unclosed group"),
        ({"regex": "(?=a)a"}, "regex: .*look-around"),
        ({"json_schema": {"type": "foo"}}, "json_schema: Invalid type: foo"),
        ({"json_schema": {"not": {}}}, "json_schema: Unimplemented keys"),
        ({"json_schema": {"oneOf": [{"type": "null"}, {"minimum": 1}]}}, "json_schema: oneOf"),
        ({"json_schema": "5"}, "json_schema: Expecting object schema"),
        ({"json_schema": "null"}, "json_schema: Expecting object schema"),
        ({"json_schema": {"$ref": "http://a/b"}}, "json_schema: Resource"),
        ({"json_schema": {"type": "integer", "multipleOf": 99_991}}, "json_schema: .*multipleOf"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no text matches"),
        ({"regex": r"[^\s\S]"}, "regex: no text matches"),
        ({"grammar": "start: start"}, "grammar: no text matches"),
        ({"grammar": "root ::= ??"}, "grammar: "),
        ({"grammar": 'start: "a" b'}, "grammar: "),
        ({"grammar": '{"grammars": []}'}, "grammar: "),
        ({"grammar": "start: a\na: %json {}"}, "grammar: .*use json_schema"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    llm: LLM, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^prompts\[1\]: {reason}"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**fields)])
    assert not llm.scheduler.has_work


def test_parameters_travel_and_can_be_hashed() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for fields in ({"json_schema": schema}, {"choice": ["b", "a"]}, {"json_object": True}):
        params = SamplingParams(**fields)
        message = UserMsg(1, [1], params)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=UserMsg)
        assert again.sampling_params == params and hash(params) == hash(again.sampling_params)
    assert json.loads(SamplingParams(json_schema=json.dumps(schema)).json_schema or "") == schema


def test_a_scheduler_refuses_one_request_and_serves_the_others(llm: LLM) -> None:
    llm.channel.put_messages(
        UserMsg(10**6, [7], SamplingParams(regex="((")), UserMsg(10**6 + 1, [7], ANSWER)
    )
    said = []
    while llm.channel.waiting or llm.scheduler.has_work:
        llm.scheduler.step_overlap()
        said += llm.channel.take_replies()
    refused = [reply for reply in said if isinstance(reply, ErrorReply)]
    assert [(reply.uid, reply.param) for reply in refused] == [(10**6, "regex")]
    assert said[-1].uid == 10**6 + 1 and said[-1].finish_reason == "stop"


def test_a_model_without_a_usable_tokenizer_refuses(tmp_path: Any) -> None:
    for text, reason in (("{}", "Model missing"), (None, "no such file")):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        else:
            (tmp_path / "tokenizer.json").unlink()
        grammars = load_grammars(tmp_path, 1000, [0])
        with pytest.raises(InvalidRequestError, match=f"regex: the model's tokenizer.*{reason}"):
            grammars.compile(SamplingParams(regex="a")).result()  # type: ignore[union-attr]
    assert load_grammars(FOLDER, MODEL.vocab_size, []).tokenizer.result() == (
        "the model's tokenizer cannot be used: eos_token list must not be empty"
    )


# ------------------------------------------------------------------ matchers and masks


def test_a_stopped_matcher_allows_end_tokens_only() -> None:
    made = tokenizer([EOS, 4])
    matcher = Matcher(compile_grammar(made, "choice", '["yes"]'), "choice")
    ids = made.tokenize_str("yes")
    assert EOS not in allowed(matcher)
    matcher.follow(ids)
    assert allowed(matcher) == {EOS, 4}
    matcher.follow([*ids, 4])  # the model's second end token
    assert not matcher.error and allowed(matcher) <= {EOS, 4}


def test_a_matcher_is_a_function_of_the_answer() -> None:
    """Token by token, all at once, or again from the start: as after a retraction."""
    made = tokenizer()
    ids = made.tokenize_str("yes, 123")
    one, many, start, wrong = (
        Matcher(compile_grammar(made, "regex", ANSWER.regex or ""), "regex") for _ in range(4)
    )
    for length in range(len(ids) + 1):
        one.follow(ids[:length])
        one.follow(ids[:length])
    many.follow(ids)
    assert allowed(one) == allowed(many) and one.seen == len(ids) and not one.error
    assert allowed(start) != allowed(many)
    wrong.follow(ids[1:])
    assert wrong.error.startswith("regex: ")


def test_tokens_that_the_tokenizer_lacks_are_never_allowed() -> None:
    grammars = load_grammars(FOLDER, MODEL.vocab_size, [EOS])
    found = grammars.tokenizer.result()
    assert isinstance(found, LLTokenizer)
    matcher = Matcher(compile_grammar(found, "regex", "(?s:.*)"), "regex")
    assert found.vocab_size == MODEL.vocab_size
    size = LLTokenizer(TEXT).vocab_size
    assert size < MODEL.vocab_size and max(allowed(matcher)) < size and len(allowed(matcher)) > 999


def test_an_answer_leaves_the_automaton_of_others_alone() -> None:
    """The library extends it with each text, up to a limit: two that share one end each other."""
    grammars = load_grammars(FOLDER, MODEL.vocab_size, MODEL.eos_token_ids)
    limits = Limits(100, 100, MODEL.vocab_size, frozenset(MODEL.eos_token_ids))
    params = SamplingParams(json_schema={"type": "string", "maxLength": 4000})
    story = tokenizer().tokenize_str('"' + "Once upon a time there was a small fox. " * 40)
    for uid in range(3):  # the third answer is as long as the first
        req = make_req(UserMsg(uid, [1], params), limits, grammars.constrain)
        assert isinstance(req.matcher, Matcher)
        for length in range(1, len(story)):
            req.matcher.follow(story[:length])
            req.matcher.ll.compute_bitmask()
            assert not req.matcher.error, (uid, length)


def test_a_request_keeps_what_it_asked_of_its_logits() -> None:
    grammars = load_grammars(FOLDER, MODEL.vocab_size, MODEL.eos_token_ids)
    limits = Limits(100, 100, MODEL.vocab_size, frozenset(MODEL.eos_token_ids))
    params = SamplingParams(regex="[a-z]+", logit_bias={7: 3.0})
    req = make_req(UserMsg(1, [1], params), limits, grammars.constrain)
    assert req.logits_params.bias == ([7], [3.0]) and req.matcher is not None
    free = make_req(UserMsg(1, [1], SamplingParams()), limits, grammars.constrain)
    assert free.matcher is None and free.logits_params is None


@pytest.mark.parametrize("recorded", [False, True])
def test_a_draw_waits_for_its_masks_and_the_next_step_waits_for_the_draw(
    recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masked token is in the pool before anything reads it; an earlier step is refused."""
    if recorded:
        record_on_a_cpu(monkeypatch)
    with serve(max_running_req=4, cuda_graph_bs=(2,) if recorded else None) as made:
        engine, order = made.scheduler.engine, list[str]()
        grammars = engine.deferral
        assert isinstance(grammars, Grammars)
        fill = grammars.fill_masks
        grammars.fill_masks = lambda fi: order.append("fill") or fill(fi)  # type: ignore[method-assign, func-returns-value]
        tables = engine.tables
        reqs = [made.scheduler.make_req(UserMsg(uid, [9, 8, 7], params)) for uid, params in
                enumerate((ANSWER, SamplingParams()))]  # fmt: skip
        for req in reqs:
            req.table_idx = tables.allocate()
            slots = np.arange(64, dtype=np.int32) + 64 * req.uid
            tables.write(req.table_idx, 0, slots)
            tables.write_tokens(req.table_idx, 0, req.input_ids)
        output = engine.step(engine.prepare(Batch(reqs=reqs, phase=Phase.PREFILL)))
        assert order == [] and grammars.waiting is output
        for req in reqs:
            req.advance()
        first = output.wait().ids
        assert order == ["fill"]
        for req, token in zip(reqs, first):
            req.append(token)
        assert made.tokenizer is not None and made.tokenizer.decode(first[:1])[0] in "yn"
        fi = engine.prepare(Batch(reqs=list(reqs), phase=Phase.DECODE))
        assert (fi.packed is not None) == recorded
        output = engine.step(fi)
        for req in reqs:
            req.advance()
        assert order == ["fill"]
        after = engine.prepare(Batch(reqs=list(reqs), phase=Phase.DECODE))
        with pytest.raises(RuntimeError, match="sample_deferred first"):
            engine.step(after)
        engine.sample_deferred()
        engine.step(after)
        assert order == ["fill"] * 2
        ids = dict(zip(fi.sampled, output.wait().ids))
        for req, token in ids.items():
            assert tables.token_pool[req.table_idx, 4] == token
        assert order == ["fill"] * 2
        matcher = Matcher(made.scheduler.make_req(UserMsg(5, [1], ANSWER)).matcher.ll, "regex")
        matcher.follow(np.array([first[0], ids[reqs[0]]], np.int32))
        assert not matcher.error


def test_free_batches_are_drawn_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.scheduler.engine.deferral, "fill_masks", None)
    asked = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logit_bias={9: 5.0})]
    assert len(llm.generate(["a", "b"], asked)) == 2


# ------------------------------------------------------------------ compiled beside the scheduler


def test_a_slow_grammar_delays_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream begins and ends while the grammar of a request that came first is compiled."""
    begun, go_on, real = threading.Event(), threading.Event(), grammar.compile_grammar

    def slow(*args: Any) -> Any:
        begun.set()
        return go_on.wait(60) and real(*args)

    monkeypatch.setattr(grammar, "compile_grammar", slow)
    config = ServerConfig(model_path=str(FOLDER), device="cpu", page_size=4, num_pages=200)

    async def ask(server: InProcessServer) -> None:
        async def answer(params: SamplingParams) -> list[UserReply]:
            replies = server.frontend.generate(params, input_ids=[9, 8, 7])
            return [reply async for reply in replies]

        await server.frontend.start()
        asked = [ANSWER, SamplingParams(regex="(("), SamplingParams(regex="left")]
        constrained, wrong, left = [asyncio.ensure_future(answer(params)) for params in asked]
        assert await asyncio.to_thread(begun.wait, 60)
        async with asyncio.timeout(20):
            free = await answer(SamplingParams(max_tokens=30, ignore_eos=True))
        assert free[-1].completion_tokens == 30
        assert not constrained.done()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        go_on.set()
        text = "".join(reply.text for reply in await constrained)
        assert re.fullmatch(ANSWER.regex or "", text)
        with pytest.raises(RequestFailed, match=r"(?s)^regex: .*unclosed group") as failed:
            await wrong
        assert failed.value.param == "regex"
        await server.frontend.stop()

    with InProcessServer(config) as server:
        try:
            asyncio.run(ask(server))
        finally:
            go_on.set()
    hold = server.scheduler.channel._hold  # type: ignore[attr-defined]
    assert not hold.held and not server.scheduler.reqs
    check_integrity(server.scheduler.cache)


def test_free_answers_do_not_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), forms.LLTokenizer
    monkeypatch.setattr(
        forms, "LLTokenizer", lambda *args, **fields: go_on.wait(60) and real(*args, **fields)
    )
    try:
        with serve(num_pages=100) as made:
            assert made.generate("Hi", SamplingParams(max_tokens=2))[0]["token_ids"]
            assert not made.scheduler.engine.deferral.tokenizer.done()  # type: ignore[union-attr]
            go_on.set()
            assert made.generate("Hi", ANSWER)[0]["finish_reason"] == "stop"
    finally:
        go_on.set()


class Box:
    """An inbox that gives what it was filled with."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.sent: list[Any] = []

    def put(self, *messages: Any) -> None:
        self.sent += messages

    def get_all(self, timeout: float) -> list[Any]:
        found, self.messages = self.messages, []
        return found


def ask(
    uid: int, regex: str | None = None, client: str = "", cost: float = 0.0, memory: int = 0
) -> UserMsg:
    params = SamplingParams(regex=regex)
    return UserMsg(uid, [1], params, client=client, cost=cost, memory=memory)


def test_requests_wait_in_their_queue_and_come_in_order() -> None:
    """One that leaves is forgotten."""
    box, jobs = Box(), {name: Future[Any]() for name in "abcde"}
    hold = GrammarQueue()
    hold.start = lambda uid, params: jobs[params.regex or ""]
    channel: Any = SchedulerChannel(box, box, hold=hold)  # type: ignore[arg-type]

    def passed() -> list[int]:
        return [msg.uid for msg in channel.recv(False) if isinstance(msg, UserMsg | AbortMsg)]

    box.messages = [ask(1, "a"), ask(2), ask(3, "b"), AbortMsg(9)]
    assert passed() == [2, 9]
    box.messages = [ask(4, "c"), AbortMsg(3), ask(5, "d")]
    assert passed() == [3]  # the scheduler ignores unknown ids
    assert jobs["b"].cancelled()
    for name in ("a", "d"):
        jobs[name].set_result(None)
    assert passed() == [1, 5]
    jobs["c"].set_exception(InvalidRequestError("regex: no"))
    jobs["e"].set_result(None)
    box.messages = [ask(6, "e")]
    assert passed() == [4, 6] and not (hold.held or hold.waiting)


def queue_of(limit: int) -> tuple[GrammarQueue, dict[int, Future[Any]]]:
    """A queue, and its jobs that are not done, by uid."""
    hold, jobs = GrammarQueue(limit=limit), dict[int, Future[Any]]()

    def start(uid: int, params: SamplingParams) -> Future[Any]:
        jobs[uid] = Future()
        return jobs[uid]

    hold.start = start
    return hold, jobs


class QueueTime:
    """Time that passes when a test says so; stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> QueueTime:
    """The time of grammar queues."""
    found = QueueTime()
    monkeypatch.setattr(grammar_queue, "time", found)
    monkeypatch.setattr(grammar_queue, "MOST_JOBS", 1)
    monkeypatch.setattr(grammar_queue, "QUICK", 1.0)
    return found


def test_clients_share_the_compiled_grammars(
    clock: QueueTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait as text, until a grammar that was compiled before is gone."""
    monkeypatch.setattr(grammar_queue, "MOST_JOBS", 1000)
    hold, jobs = queue_of(32 * SMALL)
    hold.pass_on([ask(uid, "a", "greedy") for uid in range(64)])
    started = sorted(jobs)
    assert started == [*range(5)]  # a quarter of what is free, less a tenth
    third = ask(65, "b", "third", memory=5 * SMALL)
    hold.pass_on([ask(64, "a", "other"), third, AbortMsg(63)])
    assert 64 in jobs and 65 not in jobs  # the third has too little room as yet
    for uid in started:
        jobs[uid].set_result(None)
    clock.now += 1.0
    assert len(hold.pass_on([])) == len(started)
    for uid in started[:3]:
        del jobs[uid]
    hold.pass_on([])
    hold.pass_on([])  # those that were passed on last are forgotten now
    assert 65 in jobs  # it goes before those of a client that holds much
    while hold.held or hold.waiting:
        for uid in [*jobs]:
            if not jobs[uid].done():
                jobs[uid].set_result(None)
        jobs.clear()
        hold.pass_on([])
    hold.pass_on([])  # those that were passed on last are forgotten now
    hold.pass_on([])
    assert not (hold.held or hold.waiting) and not hold.shares.taken and not hold.shares.held


@pytest.mark.parametrize(
    "text", ['start: T "a"+\nT: /a*/', 'start: /[xy]/ W "a"\nW: /a+/', 'start: "b" /(ab)+/ "ab"']
)
def test_a_grammar_that_forces_text_without_end_has_masks(text: str) -> None:
    """The library would compute the text that must come, with no limit; in a process, therefore."""
    code = f"""
import numpy as np
from minisgl.scheduler.forms import compile_grammar, load_tokens
from pathlib import Path
tokens = load_tokens(Path({str(FOLDER)!r}), {MODEL.vocab_size}, [0])
found = compile_grammar(tokens, "grammar", {text!r})
for _ in range(20):
    bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
    if not bits.any():
        break
    found.consume_token(int(np.flatnonzero(bits)[-1]))
print("done")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "done\n", ran.stderr


@pytest.mark.parametrize("inside", [False, True])
def test_a_schema_sets_no_options_of_the_compiler(inside: bool) -> None:
    """Its separators are patterns, and some of them make a mask endless."""
    schema: dict[str, Any] = {"type": "array", "x-guidance": {"item_separator": '"+'}}
    schema = {"type": "object", "properties": {"a": schema}} if inside else schema
    asked = SamplingParams(json_schema=schema).json_schema
    assert asked is not None
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    for field, text in (("json_schema", asked), ("structural_tag", tag)):
        with pytest.raises(InvalidRequestError, match="x-guidance is not supported"):
            compile_grammar(tokenizer(), field, text)


def test_who_holds_much_waits_for_who_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else small grammars of one client would take all room that a large one waits for."""
    monkeypatch.setattr(grammar_queue, "MOST_JOBS", 1000)
    hold, jobs = queue_of(64 * SMALL)
    hold.pass_on([ask(uid, "a", "greedy", 0.01, 3 * SMALL) for uid in range(3)])
    hold.pass_on([ask(10, "b", "other", memory=8 * SMALL)])
    hold.pass_on([ask(11, "b", "other", memory=11 * SMALL), ask(3, "a", "greedy", 0.01)])
    assert sorted(jobs) == [0, 1, 2, 10]


def test_the_last_place_is_for_quick_grammars() -> None:
    """Slow ones take half a second each: a client with a usual one must not wait for those."""
    hold, jobs = queue_of(2**30)
    hold.pass_on([ask(uid, "a", f"greedy {uid % 9}", 0.3) for uid in range(128)])
    assert sorted(jobs) == [0, 1, 2]
    hold.pass_on([ask(200, "a", "other", 0.01), ask(201, "a", "other", 0.01)])
    assert set(jobs) == {0, 1, 2, 200}
    jobs[0].set_result(None)
    assert [msg.uid for msg in hold.pass_on([])] == [0]
    assert set(jobs) == {0, 1, 2, 200, 201}  # before the slow ones, which began to wait earlier
    jobs[201].set_result(None)
    hold.pass_on([])
    assert set(jobs) == {0, 1, 2, 200, 201, 3}


@pytest.mark.parametrize("clients", [2, 8, 9, 12, 40])
def test_clients_who_always_wait_take_turns(clients: int) -> None:
    """Also with more clients than jobs, each with a new grammar when one of its own is done."""
    hold, jobs = queue_of(2**30)
    for number in range(4):
        hold.pass_on([ask(100 * c + number, "a", f"greedy {c}") for c in range(clients)])
    hold.pass_on([ask(99_999, "a", "newcomer")])
    for uid in itertools.count(50_000):
        assert uid <= 50_000 + 2 * clients + 8  # a turn of each, and those that had begun
        if 99_999 in jobs:
            break
        jobs.pop(min(jobs)).set_result(None)
        (done,) = hold.pass_on([])
        hold.ready = []  # its answer ends at once, and it asks again
        hold.pass_on([ask(uid, "a", done.client)])


def end(hold: GrammarQueue, jobs: dict[int, Future[Any]], clock: QueueTime, seconds: float) -> str:
    """End the only job after some seconds; whose it was."""
    clock.now += seconds
    jobs.popitem()[1].set_result(None)
    (done,) = hold.pass_on([])
    hold.ready = []
    return done.client


def test_slow_grammars_have_fewer_turns(clock: QueueTime) -> None:
    """Time is shared, not turns: a client with quick grammars need not wait for each slow one."""
    hold, jobs = queue_of(2**30)
    cost = {"slow": 0.4, "quick": 0.1, "usual": 0.2}
    hold.pass_on([ask(uid, "a", [*cost][uid % 3]) for uid in range(300)])
    turns = Counter[str]()
    for _ in range(70):
        ((client, *_),) = hold.busy.values()
        turns[end(hold, jobs, clock, cost[client])] += 1
    assert all(abs(turns[client] * cost[client] - 4) < 0.9 for client in cost), turns


def test_what_a_grammar_costs_is_paid_once(clock: QueueTime) -> None:
    """In advance, as long as only its cost is known; then what it really took."""
    hold, jobs = queue_of(2**30)
    hold.pass_on([ask(0, "a", "one", 0.25), ask(1, "a", "two", 0.25)])
    assert hold.clocks == {"one": 0.25, "two": 0.0}
    end(hold, jobs, clock, 0.75)
    assert hold.clocks == {"one": 0.75, "two": 0.25}


def test_who_returns_owes_what_it_took(clock: QueueTime) -> None:
    """A request at a time, and none between two of them, is no way to be a newcomer each time."""
    hold, jobs = queue_of(2**30)
    strangers = [f"stranger {i}" for i in range(8)]
    hold.pass_on([ask(uid, "a", client) for uid, client in enumerate(strangers)])
    for uid in range(8, 100):
        client = end(hold, jobs, clock, 1 + uid % 7 / 100)
        hold.pass_on([ask(uid, "a", client)])
    hold.pass_on([ask(100, "a", "newcomer")])
    turns = [end(hold, jobs, clock, 1.0) for _ in range(3)]
    assert "newcomer" in turns, turns  # after the one that runs, and one with as low a clock


@pytest.mark.parametrize("strangers", [4, 40])
def test_a_quick_grammar_passes_newcomers_with_slow_ones(clock: QueueTime, strangers: int) -> None:
    """Its cost is in its message; also a slow one has its turn when the others have had theirs."""
    hold, jobs = queue_of(2**30)
    hold.pass_on([ask(uid, "a", f"stranger {uid}", 0.4) for uid in range(strangers)])
    hold.pass_on([ask(100 + uid, "a", "quick", 0.01) for uid in range(100)])
    turns = [end(hold, jobs, clock, 0.4)]
    turns += [end(hold, jobs, clock, 0.01) for _ in range(30)]
    assert turns[1:] == ["quick"] * 30
    others = set[str]()
    for _ in range(60 + strangers):
        ((client, *_),) = hold.busy.values()
        others.add(end(hold, jobs, clock, 0.01 if client == "quick" else 0.4))
    assert len(others) == strangers, others


def test_time_without_grammars_is_not_saved_up(clock: QueueTime) -> None:
    """Who was away for a thousand seconds shares with the others from now on."""
    hold, jobs = queue_of(2**30)
    hold.pass_on([ask(0, "a", "rare")])
    end(hold, jobs, clock, 1.0)
    hold.pass_on([ask(uid, "a", "often") for uid in range(1, 100)])
    for _ in range(50):
        end(hold, jobs, clock, 20.0)
    hold.pass_on([ask(uid, "a", "rare") for uid in range(100, 120)])
    turns = Counter(end(hold, jobs, clock, 20.0) for _ in range(20))
    assert abs(turns["rare"] - turns["often"]) <= 2, turns
    for uid in range(1, 120):
        hold.pass_on([AbortMsg(uid)])
    while hold.busy:
        jobs.popitem()[1].set_result(None)
        hold.pass_on([])
    hold.pass_on([])
    assert not (hold.clocks or hold.waiting or hold.held)


def test_jobs_of_those_who_left_count_until_they_end() -> None:
    """One that has begun cannot be stopped; one that waits for a thread never begins."""
    hold, jobs = queue_of(2**30)
    hold.pass_on([ask(uid, "a", "greedy") for uid in range(8)])
    for uid in (0, 1):
        jobs[uid].set_running_or_notify_cancel()
    hold.pass_on([AbortMsg(uid) for uid in range(4)])
    assert [jobs[uid].cancelled() for uid in range(4)] == [False, False, True, True]
    hold.pass_on([])
    assert sorted(jobs) == [*range(6)]  # two of four are still at work
    jobs[0].set_result(None)
    jobs[1].set_result(None)
    hold.pass_on([])
    assert sorted(jobs) == [*range(8)] and not hold.held.keys() & {0, 1, 2, 3}


class Clock:
    """Processor time that passes as `costs` says: milliseconds of a mask for each answer."""

    def __init__(self, costs: Sequence[int]) -> None:
        self.costs, self.now, self.filled = costs, 0, list[int]()

    def thread_time(self) -> float:
        return self.now / 1000

    monotonic = thread_time

    def fill(self, ll: Any, masks: np.ndarray, number: int) -> None:
        self.filled.append(number)
        self.now += self.costs[number]
        masks[number] = 0


def clocked(clock: Clock) -> Any:
    """Let masks take the clock's time, 50 ms in a step."""
    return patch.multiple(grammar, MASKS=0.05, time=clock, fill_next_token_bitmask=clock.fill)


def answers_of(clients: Sequence[str]) -> list[Any]:
    """Make one constrained answer for each of these clients."""
    made = [(number, Mock(client=client), Matcher(Mock(), "regex"))
            for number, client in enumerate(clients)]  # fmt: skip
    for _, req, matcher in made:
        req.matcher, req.cached_len, req.device_len, req.output_ids = matcher, 8, 9, []
        matcher.ll.is_error.return_value = False
    return made


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.integers(0, 3)), max_size=12))
def test_the_masks_of_a_step_have_bounded_time(rows: list[tuple[int, bool, int]]) -> None:
    """What is begun is finished; all others wait, whoever's they are, but for those with errors."""
    clock, todo = Clock([cost for cost, *_ in rows]), answers_of([""] * len(rows))
    for (_, failed, waited), (*_, matcher) in zip(rows, todo):
        matcher.why, matcher.waited = "error" * failed, waited
    with clocked(clock):
        fill_some(np.zeros((len(rows), 1), np.int32), todo)
    spent = 0
    for number, (cost, failed, waited) in enumerate(rows):
        late = spent > 50 and not failed
        assert todo[number][2].waited == (waited + 1 if late else 0)
        assert (number in clock.filled) == (not late and not failed)
        spent += cost if number in clock.filled else 0
    assert clock.filled == sorted(clock.filled)


def steps_of(costs: Sequence[int], steps: int, clients: Sequence[str] = ()) -> list[list[int]]:
    """Return the answers that get a token in each step of a batch whose masks cost this much."""
    grammars, clock = Grammars(tokenizer), Clock(costs)
    todo = answers_of(clients or [""] * len(costs))
    reqs, found = [req for _, req, _ in todo], list[list[int]]()
    rows, words = [*range(len(costs))], -(-MODEL.vocab_size // 32)
    with clocked(clock):
        for _ in range(steps):
            filled = np.ones((len(costs), words), np.int32)
            with patch.object(grammar, "masks_of", lambda _, filled=filled: (rows, filled)):
                grammars.fill_masks(Mock(sampled=reqs))
            found.append(sorted(clock.filled))
            clock.filled.clear()
            assert [bool(mask.any()) for mask in filled] == [n not in found[-1] for n in rows]
            for number, req in enumerate(reqs):
                back = number not in found[-1]
                assert (req.cached_len, req.device_len) == (8 - back, 9 - back)
                req.cached_len, req.device_len = 8, 9  # as the next step leaves them
    return found


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
def test_no_answer_waits_forever_for_its_mask(costs: list[int]) -> None:
    """Each step fills one mask at least; a slow one waits for quick ones, but not without end."""
    found = steps_of(costs, 600)
    assert all(found)
    for number in range(len(costs)):
        steps = [step for step, filled in enumerate(found) if number in filled]
        assert max(np.diff([-1, *steps, 600])) <= 16 * (1 + sum(costs))


def test_quick_masks_do_not_wait_for_slow_ones() -> None:
    """However many slow ones there are: after their first masks, the quick ones come first."""
    costs = {f"slow {n}": 24 for n in range(60)} | {f"quick {n}": 1 for n in range(10)}
    found = steps_of([*costs.values()], 100, clients=[*costs])
    assert all({*range(60, 70)} <= {*step} for step in found[25:])
    assert {number for step in found for number in step} == {*range(70)}
    late = steps_of([*costs.values()], 40, clients=["slow"] * 60 + ["quick"] * 10)
    assert all({*range(60, 70)} <= {*step} for step in late[2:])  # one slow mask shows the client


def test_a_slow_mask_has_its_turn() -> None:
    """Even if the quick ones would take all the time of each step."""
    found = steps_of([24] + [1] * 60, 300, clients=["slow"] + ["quick"] * 60)
    steps = [step for step, filled in enumerate(found) if 0 in filled]
    assert len(steps) >= 2


def test_masks_of_one_speed_take_turns() -> None:
    """A step has time for some of them."""
    found = steps_of([3] * 40, 30)
    for number in range(40):
        steps = [step for step, filled in enumerate(found) if number in filled]
        assert max(np.diff([-1, *steps])) <= 3


@pytest.mark.parametrize("client", ["", "a"])
def test_slow_masks_add_up(client: str) -> None:
    """What masks take beyond the usual counts until the answer ends; an `LLM`'s never does."""
    clock, todo = Clock([]), answers_of([client] * 3)
    with clocked(clock):
        for step in range(1, 90):
            clock.costs = [26, 1, 2 * (step % 2)]  # the third makes up for it
            fill_some(np.zeros((3, 1), np.int32), todo)
            assert bool(todo[0][2].why) == (25 * step + 4 > 2000 and client == "a")
            assert not todo[1][2].why and not todo[2][2].why


LATE = "start: " + '"' + "a" * 60 + '" x\nx: ' + " | ".join(f"R{i} x" for i in range(390)) + "\n"
LATE += "\n".join(f"R{i}: /(.|\\n){{1,{i + 3}}}/" for i in range(390))  # 0.1 s for a token


def test_slow_masks_end_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is slow only after sixty letters, so that no trial of it would tell."""
    assert try_grammar(tokenizer(), "grammar", LATE)
    monkeypatch.setattr(grammar, "SLOWER", 0.1)
    with serve(overlap=True) as made:
        scheduler, channel = made.scheduler, made.scheduler.channel.channel  # type: ignore[attr-defined]
        others = [SamplingParams(max_tokens=80, ignore_eos=True), ANSWER]
        alone = made.generate(["a"] * 2, others)
        hostile = SamplingParams(max_tokens=80, grammar=LATE)
        asked = [("x", hostile), ("y", others[0]), ("x", hostile), ("y", ANSWER)]
        prompt = scheduler.engine and made.tokenizer.encode("a")  # type: ignore[union-attr]
        channel.put_messages(
            *(UserMsg(900 + n, prompt, p, client=c) for n, (c, p) in enumerate(asked))
        )
        said: dict[int, list[TokenReply]] = {}
        while channel.waiting or scheduler.has_work:
            scheduler.step_overlap()
            for reply in channel.take_replies():
                said.setdefault(reply.uid - 900, []).append(reply)
        for number in (0, 2):
            assert said[number][-1].finish_reason == "abort" and len(said[number]) > 5
            assert (said[number][-1].notice or "").startswith("grammar: its masks take")
        for number, answer in ((1, alone[0]), (3, alone[1])):
            assert [reply.token for reply in said[number]] == answer["token_ids"]
        check_integrity(scheduler.cache)


@pytest.mark.parametrize("end", ["length", "abort", "abort while it waits"])
def test_a_request_that_ended_keeps_no_grammar(end: str) -> None:
    """The sampler keeps the last batch and the queue what left: the characters must be free."""
    with serve(overlap=True) as made:
        scheduler, channel = made.scheduler, made.scheduler.channel.channel  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=8, regex="[a-z ]{30}")
        channel.put_messages(UserMsg(900, [300, 301], params, client="x"))
        while 900 not in scheduler.reqs:
            scheduler.receive(block=False)
        req = scheduler.reqs[900]
        assert isinstance(req.matcher, Matcher)
        if end != "abort while it waits":
            scheduler.step_overlap()
            scheduler.step_overlap()
        if end != "length":
            channel.put_messages(AbortMsg(900))
        while channel.waiting or scheduler.has_work:
            scheduler.step_overlap()
        tokens = {"length": 8, "abort": 1, "abort while it waits": 0}[end]
        assert req.matcher is None and len(req.output_ids) == tokens
        check_integrity(scheduler.cache)


def test_other_ranks_do_as_rank_0_says() -> None:
    """They have no grammar, and no clock: they get its masks, errors and refusals."""
    sent = list[Any]()

    def broadcast(obj: Any, src: int = 0, kind: Any = Any) -> Any:
        return sent[-1]

    first = Mock(rank=0, size=2, broadcast_object=lambda obj, kind: sent.append(obj) or obj)
    ranks = [
        Grammars(tokenizer, first),
        Grammars(tokenizer, Mock(rank=1, size=2, broadcast_object=broadcast)),
    ]
    limits = Limits(100, 100, MODEL.vocab_size, frozenset(MODEL.eos_token_ids))
    words = -(-MODEL.vocab_size // 32)
    reqs, masks = [list[Req](), list[Req]()], [np.full((3, words), -1, np.int32) for _ in ranks]
    for uid, params in enumerate((ANSWER, SamplingParams(regex="[a-z]+"), ANSWER)):
        for rank, grammars in enumerate(ranks):
            reqs[rank].append(make_req(UserMsg(uid, [1], params), limits, grammars.constrain))
    late = reqs[0][1].matcher
    assert isinstance(late, Matcher)
    late.why = "regex: too slow"
    for rank, grammars in enumerate(ranks):
        with patch.object(grammar, "masks_of", lambda _, rank=rank: ([0, 1, 2], masks[rank])):
            grammars.fill_masks(Mock(sampled=reqs[rank]))
        errors = [req.matcher.error for req in reqs[rank] if req.matcher is not None]
        assert errors == ["", "regex: too slow", ""]
    assert (masks[0] == masks[1]).all() and (masks[0][1] == -1).all()
    assert (masks[0][0] != -1).any() and (masks[0][0] != 0).any()
    before = [req.cached_len for req in reqs[0]]
    for rank, grammars in enumerate(ranks):
        with (
            patch.object(grammar, "masks_of", lambda _, rank=rank: ([0, 1, 2], masks[rank])),
            patch.object(grammar, "MASKS", -1.0),
        ):
            grammars.fill_masks(Mock(sampled=reqs[rank]))
        waited = [req.matcher.waited for req in reqs[rank] if req.matcher is not None]
        back = [start - req.cached_len for start, req in zip(before, reqs[rank])]
        assert waited == back == [1, 0, 1]
    for grammars in ranks:
        with pytest.raises(InvalidRequestError, match=r"(?s)^regex: .*unclosed") as failed:
            make_req(UserMsg(9, [1], SamplingParams(regex="((")), limits, grammars.constrain)
        assert failed.value.param == "regex"
    assert ranks[1].tokenizer.result() == "" and not ranks[1].start(3, ANSWER)


def test_many_clients_with_long_answers_leave_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hold their grammars for minutes, as many and as large as they may."""
    monkeypatch.setattr(grammar_queue, "MOST_JOBS", 10_000)
    hold, jobs = GrammarQueue(), dict[int, Future[Any]]()
    hold.start = lambda uid, params: jobs.setdefault(uid, Future())
    most = MOST + PER_CHARACTER * 2**14  # bytes of the largest grammar of 16,384 characters
    for number in range(20):
        name = str(number)
        hold.pass_on([ask(1000 * number + i, "x", name, memory=most) for i in range(200)])
    hold.pass_on([ask(10**6 + i, "y", f"honest {i}", memory=most) for i in range(3)])
    assert {10**6, 10**6 + 1, 10**6 + 2} < set(jobs) and len(jobs) > 100
    long = "x" * 10_000  # a length takes no memory
    hold.pass_on([ask(10**7 + i, long, "another") for i in range(8)])
    assert 10**7 + 7 in jobs


def test_a_grammar_counts_until_it_is_gone() -> None:
    """Not until its request is passed on: the matcher takes its memory as long as it lives."""
    grammars, limits = Grammars(tokenizer), Limits(100, 100, 512, frozenset([0]))
    hold = GrammarQueue()
    hold.start = grammars.start
    passed = hold.pass_on([ask(1, "x{1,9}")])
    while not passed:
        passed = hold.pass_on([])
    hold.charge()  # it has ended: now nobody else has the job
    req = make_req(passed[0], limits, grammars.constrain)
    assert not grammars.jobs and hold.pass_on([]) == []
    hold.pass_on([])
    assert hold.shares.taken == SMALL and req.matcher is not None
    req.matcher = None
    hold.pass_on([ask(2)])
    hold.pass_on([])
    assert not hold.shares.taken


def test_the_memory_of_grammars_goes_back_to_an_idle_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once after they are gone, though no message comes."""
    trimmed, box, jobs = queue.Queue[int](), Box(), [Future[Any]()]  # of an answer's request
    monkeypatch.setattr(grammar_queue, "TRIM", 0.0)
    monkeypatch.setattr(grammar_queue, "give_heap_back", lambda: trimmed.put(1))
    hold = GrammarQueue()
    hold.start = lambda uid, params: jobs[0]
    channel = SchedulerChannel(box, box, hold=hold)  # type: ignore[arg-type]
    jobs[0].set_result(None)
    box.messages = [ask(1, "a")]
    for _ in range(3):
        channel.recv(False)
    assert hold.shares.taken and not hold.busy
    jobs.clear()
    channel.recv(False)
    assert not hold.shares.taken
    trimmed.get(timeout=20)
    hold.trimmer.join()
    channel.recv(False)
    hold.trimmer.join()
    assert trimmed.empty()


def test_messages_without_a_grammar_never_enter_the_queue() -> None:
    box, hold = Box(), GrammarQueue()
    channel = SchedulerChannel(box, box, hold=hold)  # type: ignore[arg-type]
    hold.pass_on = None  # type: ignore[method-assign, assignment]
    box.messages = [UserMsg(1, [1], SamplingParams(logit_bias={3: 1.0})), AbortMsg(2)]
    assert [msg.uid for msg in channel.recv(False)] == [1, 2]  # type: ignore[union-attr]


def test_a_job_waits_for_its_request() -> None:
    """It is started when the message comes, and its request takes it; others have none."""
    channel, grammars = InProcessChannel(), Grammars(tokenizer)
    compiling = CompilingChannel(channel, grammars)
    channel.put_messages(UserMsg(7, [1], ANSWER), AbortMsg(1), UserMsg(8, [1], SamplingParams()))
    assert [msg.uid for msg in compiling.recv(False)] == [7, 1, 8]  # type: ignore[union-attr]
    job, nothing = compiling.ready
    assert job is not None and nothing is None and dict(grammars.jobs) == {7: job}
    limits = Limits(100, 100, MODEL.vocab_size, frozenset(MODEL.eos_token_ids))
    req = make_req(UserMsg(7, [1], ANSWER), limits, grammars.constrain)
    assert isinstance(req.matcher, Matcher) and req.matcher.job is job and not grammars.jobs


def test_a_grammar_has_bounded_memory() -> None:
    """The side process measures it; the number of its states is in no limit of the library."""
    trials = side.SideTokenizer(FOLDER).side
    try:
        for sizes in ((397, 401), (61, 67, 71), (7, 11, 13, 17)):
            parts = [{"type": "integer", "multipleOf": size} for size in sizes]
            with pytest.raises(InvalidRequestError, match=r"least common multiple| bytes and "):
                trials.compile("json_schema", json.dumps({"allOf": parts}), None)
        many = {"allOf": [{"type": "integer", "multipleOf": size} for size in (20, 30, 250)]}
        trials.compile("json_schema", json.dumps(many), None)
        grown = (
            "start: "
            + " ".join(f"A{n}" for n in range(40))
            + "".join(f"\nA{n}: /\\w{{1,200}}{n}/" for n in range(40))
        )
        with pytest.raises(InvalidRequestError, match=r" bytes and |too big"):
            trials.compile("grammar", grown, None)
    finally:
        trials.close()


@pytest.mark.parametrize("text", ["a.{9}/ & ~/.*b.{10}", "a/ | ~/b", "a/ & /b"])
def test_terminals_without_complements_and_intersections(text: str) -> None:
    """Their automata can take hundreds of megabytes, and no limit of the library counts that."""
    tokens = tokenizer()
    found = compile_grammar(tokens, "grammar", r'start: "\u0026\u007e" T' + "\nT: /a/")
    ids = tokens.tokenize_str("&~a")
    assert found.validate_tokens(ids) == len(ids)
    with pytest.raises(InvalidRequestError, match="& and ~ are not supported"):
        compile_grammar(tokens, "grammar", f"start: T\nT: /{text}/")


# ------------------------------------------------------------------ ranks


def run(scheduler: Scheduler, channel: InProcessChannel) -> dict[int, list[Any]]:
    """Three constrained requests and a free one, as `LLM` runs them."""
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
    asked = [ANSWER, SamplingParams(max_tokens=9),
             SamplingParams(json_schema=schema, temperature=1.0, seed=3),
             SamplingParams(choice=["yes", "no"], temperature=2.0)]  # fmt: skip
    channel.put_messages(*(UserMsg(uid, [9, 8, 7, uid], p) for uid, p in enumerate(asked)))
    said: dict[int, list[Any]] = {}
    while channel.waiting or scheduler.has_work:
        scheduler.step_overlap()
        for reply in channel.take_replies():
            said.setdefault(reply.uid, []).append(reply.token)
    return said


@pytest.mark.usefixtures("quick_ranks")
def test_every_rank_follows_the_answer_itself() -> None:
    """Two processes answer as one: matchers depend on tokens alone, which ranks share."""
    config = SchedulerConfig(
        model_path=str(FOLDER), device="cpu", page_size=4, num_pages=100, overlap=True
    )
    channel = InProcessChannel()
    one = run(build_scheduler(config, channel), channel)
    config, channel = config_of_rank(config, 0, 2), InProcessChannel()
    with Ranks(config) as ranks:
        scheduler = build_scheduler(config, ranks.channel(channel), ranks.comm)
        assert run(scheduler, channel) == one
        assert ranks.alive()


def test_schemas_of_every_kind_are_refused_or_obeyed() -> None:
    """A share of `python -m tests.schemas`, which runs 500 and the public test suite."""
    rng = random.Random(5)
    with LLM(device="cpu", num_pages=2000, page_size=16) as llm:
        found = schemas.check(llm, [schemas.random_schema(rng) for _ in range(20)], max_tokens=60)
    assert sum(found.values()) == 20 and found["valid"] >= 10, found
    assert set(found) <= {"valid", "cut", "refused"}, found
