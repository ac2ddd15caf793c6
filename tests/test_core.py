"""Requests and sampling parameters."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config.rules import file_of, refuse, shown
from minisgl.core import Req, SamplingParams

NAN, INF = float("nan"), float("inf")
ENDLESS = 10**5000  # Python would not print it


def make(prompt: Any = (1, 2, 3, 4, 5), max_new_tokens: int = 3) -> Req:
    ids = np.asarray(prompt, dtype=np.int32)
    return Req(
        uid=0, input_ids=ids, sampling_params=SamplingParams(), max_new_tokens=max_new_tokens
    )


def lengths(req: Req) -> tuple[int, int, int]:
    return req.cached_len, req.device_len, req.max_device_len


# ------------------------------------------------------------------------------- SamplingParams


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (name, wrong)
        for name, values in (
            ("temperature", [-0.1, NAN, INF, True, "1", None]),
            ("top_k", [-2, 1.0, True, NAN, "5", None, ENDLESS]),
            ("top_p", [-0.5, 1.01, NAN, INF, True, None]),
            ("max_tokens", [0, -1, 1.5, True, NAN, "9", 2**63, ENDLESS]),
            ("min_tokens", [ENDLESS]),
            ("logit_bias", [{ENDLESS: 1.0}, {1: ENDLESS}]),
            ("allowed_token_ids", [[ENDLESS]]),
            ("bad_words", [[[ENDLESS]], [[True]], [[]], [""], [1.5]]),
            ("ignore_eos", [0, 1, "yes", None]),
            ("stop", ["", [""], ["a", 1], 1, {"a"}, [None]]),
            ("stop_token_ids", ["12", [-1], [1.0], [True], 3, [ENDLESS]]),
            ("seed", [-1, 2**63, 1.0, True, NAN]),
            ("logprobs", [-1, 21, True, 1.0]),
        )
        for wrong in values
    ],
    ids=lambda value: shown(value)[:30],
)
def test_pitfall_12_wrong_sampling_params_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must .*got "):
        SamplingParams(**{name: wrong})


def test_a_bad_word_is_refused_for_what_is_wrong_with_its_form() -> None:
    with pytest.raises(ValueError, match=r"^bad_words: must have at most 1024 items"):
        SamplingParams(bad_words=[[1] * 1025])
    with pytest.raises(ValueError, match=r"^bad_words: must be a valid integer"):
        SamplingParams(bad_words=["a", [1, "2"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^bad_words: must have at least 1 character"):
        SamplingParams(bad_words=[""])


def test_stop_lists_take_one_form() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    ids = SamplingParams(stop_token_ids=[np.int64(3)]).stop_token_ids
    assert ids == (3,) and type(ids[0]) is int
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


@pytest.mark.parametrize(
    "fields", [{"top_p": 2}, {"temperature": -1.0}, {"stop": [""]}, {"seed": -1}]
)
def test_what_arrives_by_wire_is_validated(fields: dict[str, Any]) -> None:
    wire = msgspec.msgpack.encode(fields)
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        msgspec.msgpack.decode(wire, type=SamplingParams)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice: must be .*regex"),
        ({"regex": "a" * 20_000}, "regex: must .*16384"),
        ({"choice": ["a" * 99] * 999}, "choice: must .*16384"),
        ({"choice": ["a"] * 1025}, "choice: .*at most 1024"),
        ({"json_schema": {"enum": ["a"] * 9999}}, "json_schema: must .*16384"),
        ({"structural_tag": {"format": "a" * 70_000}}, "structural_tag: must .*65536"),
        ({"json_object": True, "grammar": "b"}, "json_object: must be .*grammar"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: must be .*regex"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens: must be .*regex"),
        ({"regex": "a", "allowed_token_ids": [2]}, "allowed_token_ids: must be .*regex"),
        ({"json_schema": "{"}, "json_schema: must be "),
        ({"json_schema": {"const": float("nan")}}, "json_schema: must be "),
        ({"json_schema": {"const": {1, 2}}}, "json_schema: must be "),
        ({"regex": "a", "bad_words": [[2]]}, "bad_words: must be .*regex"),
        ({"regex": "\ud800"}, "regex: must be a valid string"),
        ({"regex": ""}, "regex: must have at least 1 character"),
        ({"choice": [""]}, "choice: must have at least 1 character"),
        ({"choice": [1]}, "choice: must be a valid string"),
        ({"grammar": 5}, "grammar: must be a valid string"),
    ],
)
def test_parameters_that_contradict_each_other_or_are_too_long_are_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        SamplingParams(**fields)


def test_a_schema_is_text_with_its_characters_and_its_order() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"const": "\ud800"}}}
    for schema_in in (schema, json.dumps(schema), json.dumps(schema, indent=4)):
        text = SamplingParams(json_schema=schema_in).json_schema or ""
        assert json.loads(text) == schema and list(json.loads(text)["properties"]) == ["b", "a"]
        assert "é" in text and "\\ud800" in text and len(text.encode()) == len(text) + 1
    assert SamplingParams(json_schema=None).json_schema is None


def test_greedy() -> None:
    assert SamplingParams().is_greedy and SamplingParams(temperature=1, top_k=1).is_greedy
    assert SamplingParams(temperature=1, top_p=0).is_greedy
    assert not SamplingParams(temperature=0.7).is_greedy
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "copy",
    [
        lambda p: msgspec.json.decode(msgspec.json.encode(p), type=SamplingParams),
        lambda p: msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams),
        lambda p: pickle.loads(pickle.dumps(p)),
    ],
)
def test_sampling_params_travel(copy: Callable[[SamplingParams], SamplingParams]) -> None:
    params = SamplingParams(0.5, 10, 0.9, 7, True, ["a", "b"], [1, 2], 42, 3)
    assert copy(params) == params and copy(SamplingParams()) == SamplingParams()


# ------------------------------------------------------------------------------------------ Req


def test_the_life_of_a_request() -> None:
    req, life = make(), []
    while req.can_decode:
        life.append(lengths(req))
        req.advance()
    assert [*life, lengths(req)] == [(0, 5, 8), (5, 6, 8), (6, 7, 8), (7, 8, 8)]


def test_a_chunk_is_not_sampled() -> None:
    req = make(range(10), 2)
    req.schedule(4)
    assert req.is_chunked and req.extend_len == 4
    req.advance()
    assert lengths(req) == (4, 4, 12) and req.extend_len == 0
    req.schedule(10)
    assert not req.is_chunked and req.extend_len == 6
    req.advance()
    assert lengths(req) == (10, 11, 12)


def test_no_pass_beyond_the_end() -> None:
    req = make(max_new_tokens=1)
    req.advance()
    assert lengths(req) == (5, 6, 6) and not req.can_decode
    with pytest.raises(AssertionError):
        req.advance()


@pytest.mark.parametrize("end", [0, 2, 9])
def test_schedule_asserts_the_invariant(end: int) -> None:
    req = make()
    req.cached_len = req.matched_len = 2
    with pytest.raises(AssertionError):
        req.schedule(end)


def test_advance_asserts_the_invariant() -> None:
    req = make()
    req.cached_len = 5
    with pytest.raises(AssertionError):
        req.advance()


def test_an_answer_is_joined_to_a_prompt_that_stays_as_it_is() -> None:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    req = make(prompt, 2)
    first = req.input_ids
    assert first.tolist() == [1, 2, 3] and first.dtype == np.int32
    req.append(7)
    second = req.input_ids
    req.append(8)
    assert req.input_ids.tolist() == [1, 2, 3, 7, 8] and req.output_ids.tolist() == [7, 8]
    assert second.tolist() == [1, 2, 3, 7] and prompt.tolist() == first.tolist() == [1, 2, 3]
    assert req.input_ids.dtype == np.int32 and req.host_len == 5
    with pytest.raises(AssertionError):
        req.append(9)


def test_answers_share_their_prompt_and_have_memory_for_their_tokens_alone() -> None:
    """Those that wait, run or were retracted, whatever the window."""
    prompt = np.arange(100_000, dtype=np.int32)
    tracemalloc.start()
    reqs = [make(prompt, 1_000_000) for _ in range(64)]
    for req in reqs[::2]:
        for token in range(100):
            req.append(token)
        req.restart()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < prompt.nbytes and reqs[0].input_ids[-1] == 99


@pytest.mark.parametrize("prompt", [[], [[1, 2]], 3])
def test_pitfall_12_wrong_prompts(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"^input_ids: must be "):
        make(prompt)


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_pitfall_12_wrong_answer_length(count: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_new_tokens: must be"):
        make(max_new_tokens=count)


def test_requests_are_told_apart_by_identity() -> None:
    a, b = make(), make()
    assert a != b and len({a, b}) == 2 and a in [b, a]
    assert repr(a) == "Req(uid=0, row=-1, lengths=(0, 5, 8))"
    with pytest.raises(AttributeError):
        a.device_length = 3  # type: ignore[attr-defined]


@given(
    prompt_len=st.integers(1, 40),
    max_new=st.integers(1, 6),
    cuts=st.lists(st.integers(1, 15), max_size=8),
    matched=st.integers(0, 39),
)
def test_random_lives_against_lists(
    prompt_len: int, max_new: int, cuts: list[int], matched: int
) -> None:
    """Lists of tokens with and without K/V beside the integers."""
    req = make(range(prompt_len), max_new)
    tokens = list(range(prompt_len))
    with_kv = tokens[: min(matched, prompt_len - 1)]
    req.cached_len = req.matched_len = len(with_kv)
    passes = 0
    while len(tokens) < prompt_len + max_new:
        if len(with_kv) < prompt_len:
            step = cuts.pop() if cuts else prompt_len
            req.schedule(min(prompt_len, len(with_kv) + step))
        work = tokens[len(with_kv) :][: req.extend_len]
        assert len(work) == req.extend_len > 0
        with_kv = with_kv + work
        assert req.is_chunked == (len(with_kv) < prompt_len)
        assert req.can_decode
        req.advance()
        passes += 1
        if len(with_kv) >= prompt_len:
            tokens.append(1000 + passes)
            req.append(1000 + passes)
        assert req.cached_len == len(with_kv) and req.input_ids.tolist() == tokens
    assert not req.can_decode and len(req.output_ids) == max_new


def test_a_restart_leaves_row_and_handle_to_its_caller() -> None:
    req = make()
    req.table_idx, req.cache_handle = 3, "handle"
    for token in (11, 12):
        req.advance()
        req.append(token)
    req.restart()
    assert lengths(req) == (0, 7, 8) and (req.prefill_len, req.prompt_len) == (7, 5)
    assert (req.table_idx, req.cache_handle, req.retracted) == (3, "handle", False)


def test_a_prompt_is_scored_until_the_host_knows_a_new_token() -> None:
    assert not make().scores_prompt
    req = make()
    req.sampling_params = SamplingParams(prompt_logprobs=0)
    req.schedule(3)
    req.advance()
    assert req.scores_prompt  # a chunk
    req.schedule(5)
    req.advance()
    assert req.scores_prompt  # computed; the host has not seen it
    req.append(11)
    assert not req.scores_prompt


# -------------------------------------------------------------------------------------- messages


def test_any_value_can_be_shown() -> None:
    assert shown("a") == "'a'" and shown([1] * 1000) == repr([1] * 1000)[:300]
    assert str(refuse("size", "even", 3)) == "size: must be even, got 3"
    assert len(shown(ENDLESS)) < 300 and str(refuse("size", "small", ENDLESS))


@pytest.mark.parametrize("error", [OSError(2, "No such file"), UnicodeError("no utf-8")])
def test_trouble_with_a_file_names_field_path_and_reason(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=r"^model: .*/a/b.*No such file|^model: .*/a/b.*no utf-8"),
        file_of("model", Path("/a/b")),
    ):
        raise error
    with pytest.raises(KeyError), file_of("model", Path("/a/b")):
        raise KeyError("not about the file")


# ---------------------------------------------------------------------------------------- Batch
