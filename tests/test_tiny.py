"""The embedded model: its data against other oracles, its tokenizer, its files, its answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import islice, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config.paths import resolve_model_path
from tests.turns import in_turns
from training import data, evaluate, phrases, records, talk, tools
from training.batches import CURRICULUM, Batches, pack
from training.chats import stream, system_prompt
from training.lookup import make_table, queries, query, with_table
from training.phrases import CANNOT
from training.stories import is_story, story, topic
from training.tokenizer import (
    CHAT_TEMPLATE,
    END_ID,
    PAD_ID,
    encode_chat,
    save_tokenizer,
    train_tokenizer,
)
from training.train import learning_rate, parse_args
from training.words import NUMBER_WORDS

EMBEDDED = resolve_model_path(None)
TOKENIZER = train_tokenizer()
WORD_NUMBERS = {word: number for number, word in NUMBER_WORDS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The chapter's tokenizer, as every program loads it."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, folder, 4096)
    return AutoTokenizer.from_pretrained(folder)


# ----------------------------------------------------------------------- answers by other means


def numbers(text: str) -> list[int]:
    """Every number of a text, in digits or as a word."""
    found = re.findall(r"\d+|[a-z]+", text.lower())
    values = [int(x) if x.isdigit() else WORD_NUMBERS.get(x) for x in found]
    return [value for value in values if value is not None]


def check_add(turn: data.Turn) -> None:
    x, y, total = map(int, re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", turn.answer).groups())  # type: ignore[union-attr]
    assert x + y == total
    assert sorted(numbers(turn.question))[-2:] == sorted((x, y)) or {x, y} <= set(
        numbers(turn.question)
    )


def check_sort(turn: data.Turn) -> None:
    told = [int(item) for item in turn.answer.split(", ")]
    assert Counter(told) == Counter(int(n) for n in re.findall(r"\d+", turn.question))
    steps = {(a > b) - (a < b) for a, b in pairwise(told)}
    assert steps <= ({0, 1} if turn.task == "sort down" else {0, -1})


def check_sort_words(turn: data.Turn) -> None:
    told = turn.answer.lower().split(", ")
    assert all(a <= b for a, b in pairwise(told))
    assert all(item in turn.question.lower() for item in told)


def check_reverse_word(turn: data.Turn) -> None:
    assert "".join(reversed(list(turn.answer))) in turn.question


def check_reverse_list(turn: data.Turn) -> None:
    items = turn.answer.split(", ")
    places = [turn.question.rfind(item) for item in items]
    assert min(places) >= 0
    joined = re.sub(r",? and |, |,", "|", turn.question)
    assert "|".join(items[::-1]) in joined


def check_count(turn: data.Turn) -> None:
    body, _, total = turn.answer.rpartition(". I count ")
    said = body.split(", ")
    marks = [int(m[1]) for item in said if (m := re.search(r" (\d+)$", item))]
    assert marks == list(range(1, len(marks) + 1)) and total == f"{len(marks)}."
    if turn.task == "count items":
        assert len(marks) == len(said)
    if turn.task == "count letters":
        word = "".join(re.sub(r" \d+$", "", item) for item in said)
        assert word in turn.question
        if len(marks) < len(said):
            hits = {item[0].lower() for item in said if re.search(r" \d+$", item)}
            assert len(hits) <= 1
            assert all(word.lower().count(letter) == len(marks) for letter in hits)


def check_copy(turn: data.Turn) -> None:
    assert turn.answer and turn.answer in turn.question


def check_story(turn: data.Turn) -> None:
    subject = turn.key.removeprefix("story ")
    assert not subject or is_story(turn.answer, subject)
    assert turn.answer.endswith("The end.")


def check_count_to(turn: data.Turn) -> None:
    told = [int(number) for number in turn.answer.split(", ")]
    assert len({b - a for a, b in pairwise(told)}) == 1 and abs(told[1] - told[0]) == 1
    asked = set(numbers(turn.question)) | {1}
    assert {told[0], told[-1]} <= asked


CHECKS = {
    "count to": check_count_to,
    "add": check_add,
    "sort": check_sort,
    "sort down": check_sort,
    "sort words": check_sort_words,
    "reverse word": check_reverse_word,
    "reverse list": check_reverse_list,
    "count items": check_count,
    "count same": check_count,
    "count letters": check_count,
    "copy": check_copy,
    "story": check_story,
}


PHRASINGS: list[data.Phrasing] = ["known", "known", "new pair", "new phrasing"]


@pytest.mark.parametrize("task", list(data.TASKS))
def test_answers_are_right(task: str) -> None:
    rng = Random(f"test {task}")
    for index in range(300):
        turn = data.draw(rng, task, rng.random() < 0.5, PHRASINGS[index % 4])
        CHECKS[task](turn)
        assert "{" not in turn.question or task == "copy", turn


def test_json_answers_say_what_the_text_says() -> None:
    rng = Random("json")
    for index in range(400):
        text = records.read_text(rng, PHRASINGS[index % 4])
        found = json.loads(text.answer)
        assert found and text.answer == records.as_json(found)
        for value in found.values():
            parts = value if isinstance(value, list) else [value]
            shown = [str(part).lower() for part in parts if not isinstance(part, bool | None)]
            assert all(part in text.question.lower() for part in shown), text
        turn = records.draw_json(rng)
        json.loads(turn.answer)
        assert turn.answer.startswith(turn.given) and "json" in (turn.question + turn.task).lower()


def test_calls_name_a_tool_and_copy_their_arguments() -> None:
    rng = Random("calls")
    for index in range(300):
        offered = [tool for tool in tools.some_tools(rng, 4) if "noun" in tool.cores]
        turn, messages = tools.call_turn(rng, offered, phrasing=PHRASINGS[index % 4])
        written = re.findall(r"<tool_call>\n(.*)\n</tool_call>", turn.answer)
        assert len(written) == len(messages) - 3 == turn.answer.count("<tool_call>")
        for call in map(json.loads, written):
            schema = next(t.schema["function"] for t in offered if t.name == call["name"])
            assert set(schema["parameters"]["required"]) == set(call["arguments"])
            asked = turn.question.lower()
            assert all(str(value).lower() in asked for value in call["arguments"].values()), turn
        for message in messages[2:-1]:
            values = re.findall(r"[\w.]+", message["content"])
            assert message["role"] == "tool" and values[-1].rstrip(".") in messages[-1]["content"]


def test_conversations_fit_the_window_and_differ() -> None:
    chats = list(islice(stream(9, 60), 150))
    lengths = [len(encode_chat(TOKENIZER, chat)[0]) for chat in chats]
    assert max(lengths) < 4096 and len({records.as_json(chat) for chat in chats}) == len(chats)
    used = {message["role"] for chat in chats for message in chat}
    assert used == {"system", "user", "assistant", "tool", "tools", "plain"}


def test_pairs_of_core_and_carrier_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    carriers = {"do": ["*", *(f"c{index} *" for index in range(60))]}
    monkeypatch.setattr(phrases, "CARRIERS", carriers)
    monkeypatch.setattr(phrases, "AROUND", phrases.AROUND | {"openers": ["Hello. "]})
    rng = Random(0)
    known, new = (
        {re.findall(r"c\d+|$", phrases.compose(rng, {"do": ["sort {0}"]}, "", side).lower())[0]
         for _ in range(1500)}
        for side in (False, True)
    )  # fmt: skip
    held_out = {c[:-2] for c in carriers["do"][1:] if phrases.is_held_out(f"{c} sort {{0}}")}
    assert new == held_out and held_out and not known & new and len(known | new) == 61


def test_phrasings_of_the_evaluation_are_not_trained_on() -> None:
    rng = Random(1)
    for name in phrases.CORES:
        if name in phrases.NEW_PHRASINGS:
            seen = {data.frame(rng, name).lower() for _ in range(600)}
            assert not seen & {text.lower() for text in phrases.NEW_PHRASINGS[name]}


def test_lookup_answers_stand_in_the_list() -> None:
    rng = Random(1)
    for _ in range(200):
        table = make_table(rng, rng.randint(2, 30))
        key = rng.choice(list(table.lines))
        turn = query(rng, table, key)
        assert turn.answer == table.lines[key] and key in turn.answer
        assert turn.answer in with_table(rng, table, turn.question)
        assert table.text.count(turn.answer) >= 1
        assert query(rng, table, "qqqq zzzz").answer == "qqqq zzzz is not in the list."


def test_every_story_passes_its_oracle_and_a_cut_one_does_not() -> None:
    rng = Random(2)
    for _ in range(300):
        subject = topic(rng)
        text = story(rng, subject, rng.choice((1, 1, 4)))
        assert is_story(text, subject), (subject, text)
        assert not is_story(text[: len(text) // 2], subject)


# ----------------------------------------------------------------------------------- the split


@pytest.mark.parametrize("task", list(data.TASKS))
def test_training_and_evaluation_never_share_operands(task: str) -> None:
    rng = Random(f"split {task}")
    training = {data.draw(rng, task).key for _ in range(600)} - {""}
    held_out = {data.draw(rng, task, held_out=True).key for _ in range(60)}
    assert training and held_out and not training & held_out
    assert all(map(data.is_held_out, held_out)) and not any(map(data.is_held_out, training))


def test_held_out_pairs_and_requests_are_never_trained_on() -> None:
    rng = Random(3)
    for _ in range(100):
        table = make_table(rng, 12)
        assert not any(data.is_held_out(turn.key) for turn in queries(rng, table, 12))
    asked = [talk.draw_strange(rng) for _ in range(300)]
    assert not any(data.is_held_out(turn.key) for turn in asked)
    assert {turn.answer for turn in asked} == {CANNOT}


def test_about_one_key_in_ten_is_held_out() -> None:
    share = np.mean([data.is_held_out(f"add {i} {i + 1}") for i in range(20_000)])
    assert 0.09 < share < 0.11
    assert not data.is_held_out("")


def test_streams_depend_on_the_seed_only() -> None:
    first, again, other = (list(islice(stream(seed, 9), 20)) for seed in (4, 4, 5))
    assert first == again != other


# ------------------------------------------------------------------------------- the tokenizer


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert max(ids, default=0) < TOKENIZER.get_vocab_size()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12), st.sampled_from(["Alice", "zyqx", "reverse", "Ünïcode"]))
def test_digits_stand_alone_and_words_are_the_same_everywhere(number: int, word: str) -> None:
    pieces = TOKENIZER.encode(f"{word}: {number}\n{word}").tokens
    alone = TOKENIZER.encode(word).tokens
    assert pieces[: len(alone)] == alone == pieces[-len(alone) :]
    assert [piece for piece in pieces if piece.isdigit()] == list(str(number))


def test_shipped_tokenizer_is_the_one_of_the_chapter(saved: Any) -> None:
    stored = json.loads((EMBEDDED / "tokenizer.json").read_text())
    assert stored == json.loads(TOKENIZER.to_str())
    settings = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert saved.eos_token_id == END_ID and saved.pad_token_id == PAD_ID
    assert saved.encode("a b") == TOKENIZER.encode("a b").ids  # nothing is added in front


def test_chat_template_knows_every_role_and_kind_of_content(saved: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": [{"type": "text", "text": "43"}]},
        {"role": "guest", "content": "?"},
    ]
    text = saved.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|><|end|><|user|><tool_response>\n"
        "42\n</tool_response>\n<tool_response>\n43\n</tool_response><|end|><|user|>?<|end|>"
        "<|assistant|>"
    )


def test_training_and_serving_make_the_same_ids(saved: Any) -> None:
    for chat in islice(stream(6, 8), 40):
        if chat[0]["role"] == "plain":
            continue
        functions = chat[0].get("tools")
        served = saved.apply_chat_template(
            chat[bool(functions) :], tools=functions, return_dict=False
        )
        assert list(served) == encode_chat(TOKENIZER, chat)[0].tolist()


def test_tools_are_rendered_as_qwen3_renders_them(saved: Any) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "<b>"}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]},
    ]
    text = saved.apply_chat_template(messages, tools=[function], tokenize=False)
    written = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
    assert text == (
        "<|system|>S\n\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
        "<tools>\n"
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
        "\n</tools>\n\nFor each function call, return a json object with function name and "
        'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": '
        '<function-name>, "arguments": <args-json-object>}\n</tool_call><|end|><|user|>U<|end|>'
        f"<|assistant|>Wait.\n{written}\n{written}<|end|>"
    )


def test_only_the_assistant_is_learnt() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "21"},
        {"role": "user", "content": "34"},
        {"role": "assistant", "content": '{"a": 43}', "given": '{"'},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]
    ids, learnt = encode_chat(TOKENIZER, chat)
    assert TOKENIZER.decode(ids[learnt].tolist(), skip_special_tokens=False) == (
        '21<|end|>a": 43}<|end|>'
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|end|>'
    )
    plain = [{"role": "plain", "content": "12\n"}, {"role": "assistant", "content": "21"}]
    ids, learnt = encode_chat(TOKENIZER, plain)
    assert TOKENIZER.decode(ids[learnt].tolist(), skip_special_tokens=False) == "21<|end|>"
    assert len(ids) == 6


# ----------------------------------------------------------------------------------- batches


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=30, max_size=60), st.integers(1, 8))
def test_packing_loses_and_invents_nothing(lengths: list[int], waiting: int) -> None:
    documents = [
        (np.full(n, 10 + i, np.int32), np.ones(n, np.bool_)) for i, n in enumerate(lengths)
    ]
    seen: Counter[int] = Counter()
    for ids, learnt in pack(documents, row_tokens=10, waiting=waiting):
        assert len(ids) == len(learnt) == 11
        assert not learnt[ids == PAD_ID].any() and learnt[ids != PAD_ID].all()
        seen.update(ids[ids != PAD_ID].tolist())
    for index, count in seen.items():
        assert count == lengths[index - 10] <= 11


def test_batches_are_seeded_and_have_the_shape_of_the_stage() -> None:
    stage = CURRICULUM[0]
    one, two, other = (
        next(iter(Batches(stage, 2 * stage.row_tokens, seed)))[0] for seed in (0, 0, 1)
    )
    assert one.shape == (2, stage.row_tokens)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    values = [learning_rate(10 * x, x / 100, warm_up=20) for x in range(101)]
    top = int(np.argmax(values))
    assert values[0] == 0.05 and values[-1] == pytest.approx(0.0) and 1 <= top <= 3
    assert values[top:] == sorted(values[top:], reverse=True)


def test_command_line_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "--seconds" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_args([])
    assert "--out" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the shipped files


def test_shipped_files_are_small_and_match_their_manifest() -> None:
    manifest = json.loads((EMBEDDED / "MANIFEST.json").read_text())
    names = {path.name for path in EMBEDDED.iterdir()} - {"MANIFEST.json"}
    assert names == set(manifest["sha256"])
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest() == digest, name
    assert (EMBEDDED / "model.safetensors").stat().st_size <= 12_000_000
    assert {"command", "seed", "hardware", "date"} <= set(manifest)


def test_shipped_config_can_be_split_and_served() -> None:
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["head_dim"] == 64
    assert config["num_key_value_heads"] >= 4 and config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] % 8 == 0 and config["intermediate_size"] % 8 == 0
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    generation = json.loads((EMBEDDED / "generation_config.json").read_text())
    assert generation["do_sample"] is False and generation["eos_token_id"] == [END_ID]


def test_evaluation_notices_a_wrong_answer(saved: Any) -> None:
    cases = list(evaluate.task_cases(seed=5, per_task=1))
    right = [saved.encode(case.turn.answer) for case in cases]
    scores, wrong = evaluate.evaluate(lambda prompts: right, saved, cases)
    assert set(scores.values()) == {1.0} and not wrong
    spoilt = [ids[:-1] for ids in right]
    scores, wrong = evaluate.evaluate(lambda prompts: spoilt, saved, cases)
    assert set(scores.values()) == {0.0} and len(wrong) == len(cases)


def test_long_lists_are_long_and_every_depth_is_asked() -> None:
    def count(text: str) -> int:
        return len(TOKENIZER.encode(text).ids)

    cases = list(evaluate.lookup_cases(0, 1, count, most_tokens=700))
    assert [case.name for case in cases] == [f"look up, depth {d}" for d in range(10)]
    for depth, case in enumerate(cases):
        text = case.messages[-1]["content"]
        assert data.is_held_out(case.turn.key) and count(text) > 350
        assert abs(text.index(case.turn.answer) / len(text) - (depth + 0.5) / 10) < 0.2


@pytest.mark.parametrize("part", in_turns(4, range(4)))
def test_shipped_model_answers(part: int) -> None:
    model, tokenizer = evaluate.load_model(EMBEDDED)
    rng = Random(8)
    cases = [case for case in evaluate.task_cases(seed=7, per_task=1) if case.turn.task != "story"]
    cases += list(evaluate.short_lookup_cases(7, 4))
    turn = data.draw(rng, "add", held_out=True)
    cases.append(evaluate.case("system", turn, system=system_prompt(rng)))
    generate = evaluate.transformers_generate(model, tokenizer, max_new_tokens=120)
    scores, wrong = evaluate.evaluate(generate, tokenizer, cases[part::4])
    assert len(wrong) <= 1, (scores, wrong)  # of 9
