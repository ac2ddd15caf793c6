"""The tokenizer: chat templates, text that grows token by token, stop strings, clear errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from minisgl.config.paths import resolve_model_path
from minisgl.core import SamplingParams
from minisgl.template_files import chat_templates
from minisgl.token_bytes import byte_letters
from minisgl.tokenizer import (
    MAX_BLANK,
    SLICE,
    DecodeStatus,
    IncrementalDetokenizer,
    PromptTooLong,
    StopFilter,
    StopStrings,
    Tokenizer,
)
from minisgl.tokenizer_files import (
    has_plain_rules,
    read_by_transformers,
    read_directly,
    read_tokenizer,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a small text about numbers: 12 + 30 = 42",
    "你好，世界！今天天气很好。 — “quotes”, naïve café",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'clown' %}"
    "{{ raise_exception('no clowns') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEXT = "hello 世界 😀👩‍👩‍👧 café — 12 + 30 = 42\n"


def byte_level() -> Backend:
    """GPT-2's kind: every byte has a token, and a token may hold half a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend


def byte_fallback() -> Backend:
    """Llama 2's kind: pieces with a sign for the space, and bytes where no piece fits."""
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    names += [*"▁helowrdtxas,.12", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    strip = decoders.Strip(" ", 1, 0)
    space = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    """Mistral's kind: pieces begin with a sign for the space, and what has no piece is unknown."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    backend.train_from_iterator([*CORPUS * 4, TEXT], trainer)
    return backend


def save(folder: Path, backend: Backend, **config: object) -> Path:
    """A model folder's tokenizer files; encoding a plain text puts BOS in front, as Llama does."""
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings_ = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    } | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def level(folder: Path) -> Tokenizer:
    return Tokenizer(save(folder / "level", byte_level()))


@pytest.fixture(scope="module")
def fallback(folder: Path) -> Tokenizer:
    return Tokenizer(save(folder / "fallback", byte_fallback()))


@pytest.mark.parametrize("text", ["", "{}", "[]", "no JSON"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "broken", byte_level())
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer: .*broken cannot be read: "):
        Tokenizer(folder)


def pieces(stream: IncrementalDetokenizer | DecodeStatus, ids: list[int]) -> list[str]:
    """Return the text that each token adds, then the text that the end adds."""
    return [stream.push(token) for token in ids] + [stream.finish()]


# ------------------------------------------------------------------------------ encode, chat


def test_facts(level: Tokenizer) -> None:
    assert level.vocab_size == level.backend.get_vocab_size() > 256
    assert level.eos_token_ids == (SPECIAL.index("</s>"),)
    ids = level.encode("hello")
    assert ids.dtype.name == "int32" and ids[0] == 0 and level.decode(ids) == "hello"
    assert level.encode("", add_special_tokens=False).shape == (0,)


def test_pitfall_13_a_chat_gets_one_bos(level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = level.render_chat(messages)
    assert text == "<s><|user|>hello\n<|assistant|>"
    ids = level.apply_chat(messages).tolist()
    assert ids.count(0) == 1 and ids[0] == 0
    assert level.encode(text).tolist() == [0, *ids], "encoded as plain text there are two"
    assert ids[-1] == SPECIAL.index("<|assistant|>")


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": TEXT, "name": None},
    {"role": "assistant", "content": "  ok ", "reasoning_content": "hm", "tool_calls": None},
    {"role": "user", "content": "again"},
]
TOOL = {"type": "function", "function": {"name": "é<b>", "parameters": {"b": 1, "a": [1, 2]}}}
TEMPLATES = {
    "plain": TEMPLATE,
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
    "loops": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}\n"
    "  {% set x = loop.index %}\n{{ x }}{{ m.content | trim }}{% break %}{% endfor %}",
    "marked": "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}",
    "nulls": "{% for m in messages %}{{ m.keys() | list | sort | join(' ') }};{% endfor %}",
    "thoughts": "{% for m in messages if m.thinking %}{{ m.thinking }}{% endfor %}",
    "tokens": "{{ eos_token }}{{ user_token }}{{ pad_token }}{{ documents is none }}{{ x }}",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2).b }}",
    "date": "{{ strftime_now('%Y') }}",
    "refuses": "{{ raise_exception('no') }}",
    "escapes": "{{ messages.__class__ }}",
    "changes": "{{ messages.append(1) }}",
    "broken": "{% if %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_is_what_transformers_makes_of_it(folder: Path, name: str) -> None:
    extra = {"extra_special_tokens": {"user_token": "<|user|>"}}
    place = save(folder / f"say-{name}", byte_level(), chat_template=TEMPLATES[name], **extra)
    ours, theirs = Tokenizer(place), AutoTokenizer.from_pretrained(place)
    variables = {"tools": [TOOL], "x": 1} if name == "json" else {"x": 1}
    try:
        want = theirs.apply_chat_template(TALK, tokenize=False, **variables)
    except Exception:
        with pytest.raises(ValueError, match="refused by the chat template"):
            ours.render_chat(TALK, add_generation_prompt=False, **variables)
        return
    assert ours.render_chat(TALK, add_generation_prompt=False, **variables) == want
    if name == "plain":
        want = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat(TALK).tolist() == want


@pytest.mark.parametrize("shown", ["m.content", "m.content | trim", "'gone'"])
@pytest.mark.parametrize("end", ["so", "so ", "so\n\n"])
def test_an_open_end_is_where_transformers_cuts(folder: Path, shown: str, end: str) -> None:
    template = "{% for m in messages %}<s>{{ " + shown + " }}</s>\n{% endfor %}"
    place = save(folder / "open", byte_level(), chat_template=template)
    ours, theirs = Tokenizer(place), AutoTokenizer.from_pretrained(place)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": end}]
    if shown == "'gone'":
        with pytest.raises(ValueError, match="leaves the last message out"):
            ours.render_chat(talk, continue_final_message=True)
        return
    want = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert ours.render_chat(talk, continue_final_message=True) == want
    with pytest.raises(ValueError, match="add_generation_prompt: not together"):
        ours.render_chat(talk, continue_final_message=True, add_generation_prompt=True)


def test_several_templates(folder: Path) -> None:
    """A chat with tools has its own, files replace the config, and a list without default fails."""
    both = [{"name": n, "template": n + "{{ tools }}"} for n in ("default", "tool_use")]
    place = save(folder / "several", byte_level(), chat_template=both)
    theirs = AutoTokenizer.from_pretrained(place)
    for tools in (None, [TOOL]):
        want = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert Tokenizer(place).render_chat(TALK, tools=tools) == want
    (place / "chat_template.jinja").write_text("from a file")
    assert Tokenizer(place).render_chat(TALK) == "from a file"
    assert chat_templates(place) == {"default": "from a file"}
    odd = save(folder / "odd", byte_level(), chat_template=both[1:])
    with pytest.raises(ValueError, match="messages: no default among the templates tool_use"):
        Tokenizer(odd).render_chat(TALK)


# ------------------------------------------------------------------------------ files


def qwen() -> Backend:
    """The parts that every Qwen2 and Qwen3 has, with a small vocabulary."""
    backend = byte_level()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.normalizer = normalizers.NFC()
    return backend


DIRECT = {
    "PreTrainedTokenizerFast": byte_level,
    "TokenizersBackend": metaspace,
    "Qwen2Tokenizer": qwen,
    "LlamaTokenizerFast": byte_level,
}


@pytest.mark.parametrize("kind", DIRECT)
def test_files_read_directly_are_what_transformers_reads(folder: Path, kind: str) -> None:
    place = save(folder / kind, DIRECT[kind](), tokenizer_class=kind, pad_token="</s>")
    ours, theirs = read_directly(place), read_by_transformers(place)
    assert ours is not None and ours.templates == theirs.templates
    assert ours.special_tokens.items() <= theirs.special_tokens.items()
    for text in (*CORPUS, TEXT, "<s>a <|user|>b", "", " x", "e\u0301 12345"):
        for special in (True, False):
            got, want = (b.encode(text, add_special_tokens=special).ids
                         for b in (ours.backend, theirs.backend))  # fmt: skip
            assert got == want, text
            assert ours.backend.decode(got) == theirs.backend.decode(want)


OTHER = {
    "another class": {"tokenizer_class": "BertTokenizer"},
    "no class": {"tokenizer_class": None},
    "a class with rules of its own": {"tokenizer_class": "LlamaTokenizer"},
    "code": {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
    "prefix": {"add_prefix_space": True},
    "a special token that is not in the file": {"eos_token": "<|new|>"},
    "a token that is no special one in the file": {"pad_token": "hello"},
    "an added one": {"added_tokens_decoder": {"999": {"content": "<|new|>", "special": False}}},
    "a listed one": {"additional_special_tokens": ["<|new|>"]},
    "another listed one": {"extra_special_tokens": [{"content": "<|new|>"}]},
}


@pytest.mark.parametrize("why", OTHER)
def test_other_files_go_to_transformers(folder: Path, why: str) -> None:
    make = metaspace if "rules" in why else byte_level
    assert read_directly(save(folder / why.replace(" ", "-"), make(), **OTHER[why])) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "config.json"])
def test_older_files_go_to_transformers(folder: Path, name: str) -> None:
    place = save(folder / f"older-{name}", byte_level())
    assert read_directly(place) is not None
    (place / name).write_text('{"model_type": "mistral3"}' if name == "config.json" else "{}")
    assert read_directly(place) is None


def test_tokens_that_only_the_config_has_come_from_transformers(folder: Path) -> None:
    place = save(folder / "more", byte_level(), eos_token="<|new|>")
    tokenizer = Tokenizer(place)
    assert tokenizer.eos_token_ids == (tokenizer.vocab_size - 1,)
    assert tokenizer.encode("<|new|>").tolist() == [0, tokenizer.vocab_size - 1]


def test_no_text_is_cut_or_padded(folder: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    for config in ({}, {"add_prefix_space": True}):
        backend = read_tokenizer(save(folder / "cut", backend, **config)).backend
        assert len(backend.encode(TEXT).ids) > 8 and len(backend.encode("a").ids) == 2


def test_letters_of_bytes() -> None:
    assert byte_letters() == {char: byte for byte, char in bytes_to_unicode().items()}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], r"messages\[0\]: must be"),
        ([{"role": "user"}], r"messages\[0\]: must be {role, content}, got {'role'"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: must be a string, got int"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url"}]}],
            r"messages\[0\].content\[1\]: must be a string, got dict",
        ),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\].role"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content: not valid Unicode"),
        ([{"role": "clown", "content": "a"}], "refused by the chat template: no clowns"),
    ],
)
def test_bad_messages_are_refused(level: Tokenizer, messages: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        level.apply_chat(messages)  # type: ignore[arg-type]


def test_templates_see_variables_and_plain_text(folder: Path) -> None:
    """Text parts and null as text; variables reach the template; a last message is left open."""
    template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
        "{{ think }}{% if add_generation_prompt %}go{% endif %}"
    )
    tokenizer = Tokenizer(save(folder / "variables", byte_level(), chat_template=template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert tokenizer.render_chat(talk) == "[ab][]go"
    assert tokenizer.render_chat(talk, think=False) == "[ab][]Falsego"
    assert tokenizer.render_chat(talk, add_generation_prompt=False) == "[ab][]"
    talk[1]["content"] = "so"
    assert tokenizer.render_chat(talk, continue_final_message=True) == "[ab][so"


def test_bad_prompts_are_refused(level: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"prompt: .*unpaired surrogate U\+DC80 at character 2"):
        level.encode("ab\udc80")
    with pytest.raises(ValueError, match="prompt: must be a string, got bytes"):
        level.encode(b"ab")  # type: ignore[arg-type]


def test_a_tokenizer_without_template_says_so(folder: Path) -> None:
    plain = Tokenizer(save(folder / "plain", byte_level(), chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        plain.apply_chat([{"role": "user", "content": "x"}])


def test_special_words_in_the_content_are_text_of_the_user(level: Tokenizer) -> None:
    """Known and accepted: both look the same in a rendered template, as in every engine."""
    ids = level.apply_chat([{"role": "user", "content": "</s>"}]).tolist()
    assert SPECIAL.index("</s>") in ids


# ------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("name", ["level", "fallback"])
def test_characters_come_whole(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    parts = pieces(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert "😀" in parts, "a character is sent when it is complete"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole_text(level: Tokenizer, data: st.DataObject) -> None:
    """Byte level: for any ids at all, also those that make no UTF-8."""
    ids = data.draw(st.lists(st.integers(0, level.vocab_size - 1), max_size=40))
    split = data.draw(st.integers(0, len(ids)))
    assert "".join(pieces(IncrementalDetokenizer(level), ids)) == level.decode(ids)
    prompt, answer = ids[:split], ids[split:]
    whole, before = level.decode(ids), level.decode(prompt)
    if whole.startswith(before):  # no character lies across the border
        assert before + "".join(pieces(IncrementalDetokenizer(level, prompt), answer)) == whole


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("hello wrd,.12é你😀\n"), max_size=30), data=st.data())
def test_pieces_are_the_whole_text_with_byte_fallback(
    fallback: Tokenizer, text: str, data: st.DataObject
) -> None:
    """Byte fallback: for the ids of any text. Where bytes are broken, what was sent stays sent."""
    ids = fallback.encode(text, add_special_tokens=False).tolist()
    assert "".join(pieces(IncrementalDetokenizer(fallback), ids)) == fallback.decode(ids)
    prompt = fallback.encode("hello", add_special_tokens=False).tolist()
    want = fallback.decode(prompt + ids).removeprefix("hello")
    assert "".join(pieces(IncrementalDetokenizer(fallback, prompt), ids)) == want
    junk = data.draw(st.lists(st.integers(0, fallback.vocab_size - 1), max_size=20))
    got = "".join(pieces(IncrementalDetokenizer(fallback), junk))
    whole = fallback.decode(junk)
    if "\ufffd" not in whole:
        assert got == whole


def test_the_first_word_keeps_its_space_after_a_prompt(fallback: Tokenizer) -> None:
    ids = fallback.encode("hello", add_special_tokens=False).tolist()
    assert "".join(pieces(IncrementalDetokenizer(fallback, ids), ids)) == " hello"
    assert "".join(pieces(IncrementalDetokenizer(fallback), ids)) == "hello"


def test_special_tokens_and_unknown_ids_are_no_text(level: Tokenizer) -> None:
    hello = level.encode("hello", add_special_tokens=False).tolist()
    assert "".join(pieces(DecodeStatus(level), [0, *hello, 1, 2, 10**6, *hello])) == "hellohello"


def test_a_broken_end_is_flushed(level: Tokenizer) -> None:
    ids = level.encode("a😀", add_special_tokens=False).tolist()[:-1]
    stream = IncrementalDetokenizer(level)
    sent = [stream.push(token) for token in ids]
    assert sent[0] == "a" and set(sent[1:]) == {""}
    assert stream.finish() == "\ufffd" and stream.finish() == ""


def test_cost_per_token_does_not_grow(level: Tokenizer) -> None:
    """Only a bounded window is decoded, however long the text, broken or not."""
    lengths: list[int] = []
    stream = IncrementalDetokenizer(level, list(range(300)))
    decode = stream.decode
    stream.decode = lambda ids: lengths.append(len(ids)) or decode(ids)  # type: ignore
    broken = level.encode("😀", add_special_tokens=False).tolist()[:1]
    for ids in (level.encode(TEXT * 20).tolist(), broken * 200):
        for token in ids:
            stream.push(token)
    assert max(lengths) <= 70


def test_the_shipped_tokenizer() -> None:
    tokenizer = Tokenizer(resolve_model_path(None))
    chat = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat(chat)
    assert (ids < tokenizer.vocab_size).all()
    assert tokenizer.decode(ids) == TEXT + "".join(tokenizer.decode([i]) for i in ids[-1:])
    plain = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    eos = tokenizer.eos_token_ids[0]
    assert "".join(pieces(DecodeStatus(tokenizer, ids.tolist()), [*plain, eos])) == TEXT


# ------------------------------------------------------------------------------ stop strings


def stop_oracle(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text up to the stop string that is complete first, found one character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_they_begin(parts: list[str], stop: list[str]) -> None:
    filter_ = StopFilter(stop)
    sent = ""
    for part in parts:
        sent += filter_.push(part)
        want, stopped = stop_oracle("".join(parts), tuple(stop))
        assert want.startswith(sent)
        if not filter_.stopped:
            held = filter_.held
            assert any(s.startswith(held) for s in stop) or not held
    got = sent if filter_.stopped else sent + filter_.held
    assert (got, filter_.stopped) == (want, stopped) if parts else got == ""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=6),
    st.lists(st.lists(st.text("abc", max_size=5), max_size=8), min_size=1, max_size=3),
)
def test_text_is_held_back_as_long_as_the_definition_says(
    stop: list[str], texts: list[list[str]]
) -> None:
    """Each text finds the states that earlier ones have left in the automaton."""
    for parts in texts:
        filter_, text = StopFilter(stop), ""
        for part in parts:
            filter_.push(part)
            text += part
            if filter_.stopped:
                break
            begun = [s[:n] for s in stop for n in range(len(s))]
            assert filter_.held == max((s for s in begun if text.endswith(s)), key=len)
        want, stopped = stop_oracle(text, tuple(stop))
        assert filter_.stopped == stopped
        assert filter_.found is None or (want + filter_.found in text and filter_.found in stop)


class CountedLinks(list[int]):
    """Links of an automaton that count how often they are read."""

    count = 0

    def __getitem__(self, place: Any) -> Any:
        self.count += 1
        return super().__getitem__(place)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.sampled_from("abc")),
             min_size=1, max_size=20, unique=True),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=20),
)  # fmt: skip
@example([("b", 1000, chr(0x4E00 + i)) for i in range(64)], [("a", 1500), ("c", 1), ("a", 1500)])
def test_a_stop_filter_does_constant_work_per_character(
    stop: list[tuple[str, int, str]], runs: list[tuple[str, int]]
) -> None:
    strings = StopStrings([first + "a" * n + last for first, n, last in stop])
    links = CountedLinks(strings.links)
    strings.links = links  # type: ignore[assignment]
    for known in (False, True):
        filter_, links.count, size = StopFilter(["x"]), 0, 0
        filter_.strings = strings
        for char in "".join(char * n for char, n in runs):
            filter_.push(char)
            size += 1
            if filter_.stopped:
                break
        assert links.count <= 4 * size + 4 * len(strings.text) * (not known)


def test_the_answers_of_a_request_share_an_automaton() -> None:
    stop = [c * 1024 for c in "abc"]
    assert StopFilter(stop).strings is StopFilter(list(stop)).strings


def test_white_space_waits_for_a_thought_up_to_a_bound() -> None:
    """The cost of a token does not grow with the white space before it."""
    for size in (1, 700, MAX_BLANK, MAX_BLANK + 1, 3000):
        for step in (1, 400, 4000):
            filter_, text = StopFilter(["END"], spare_thoughts=True), " " * size + "<think>END"
            sent = ""
            for at in range(0, len(text), step):
                sent += filter_.push(text[at : at + step])
                assert len(filter_.held) <= MAX_BLANK + len("<think>")
            assert filter_.stopped == (size > MAX_BLANK)
            assert sent + filter_.held == text[: -3 if filter_.stopped else None]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab你😀 "), max_size=20), stop=st.text("ab你 ", min_size=1,
       max_size=3))  # fmt: skip
def test_stop_strings_that_span_tokens(level: Tokenizer, text: str, stop: str) -> None:
    ids = level.encode(text, add_special_tokens=False).tolist()
    status = DecodeStatus(level, stop=(stop,))
    got = "".join(pieces(status, ids))
    assert got == text.split(stop)[0]
    assert status.stopped == (stop in text)


def test_stop_is_held_back_only_while_it_may_match(level: Tokenizer) -> None:
    status = DecodeStatus(level, stop=("###",))
    ids = [level.encode(c, add_special_tokens=False).tolist()[0] for c in "a##b#"]
    assert [status.push(token) for token in ids] == ["a", "", "", "##b", ""]
    assert status.finish() == "#" and not status.stopped


def test_after_a_stop_there_is_no_text(level: Tokenizer) -> None:
    status = DecodeStatus(level, stop=("b", "abc"))
    ids = [level.encode(c, add_special_tokens=False).tolist()[0] for c in "abcab"]
    assert pieces(status, ids) == ["", "a", "", "", "", ""], "b is complete before abc is"
    assert status.stopped


def test_an_empty_stop_string_is_refused(level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="stop: must not contain an empty string"):
        DecodeStatus(level, stop=("",))


@pytest.mark.parametrize("window", [None, 64], ids=["whole", "in slices"])
@pytest.mark.parametrize("regex", ["(x+x+)+y", "(a|aa|x)+$|(x*)*z"])
def test_a_text_on_which_a_regex_gives_up_is_refused(
    tmp_path: Path, regex: str, window: int | None
) -> None:
    """The library panics, which is no `Exception`; the next text is encoded as before."""
    backend = byte_level()
    hostile = pre_tokenizers.Split(Regex(regex), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([hostile, backend.pre_tokenizer])  # type: ignore[list-item]
    tokenizer = Tokenizer(save(tmp_path, backend))
    before = tokenizer.encode("hello").tolist()
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode the text: .*retry-limit"):
        tokenizer.encode("x" * 3000 + "!", window=window)
    assert tokenizer.encode("hello").tolist() == before


def grown(size: int) -> normalizers.Replace:
    return normalizers.Replace("a", "a" * size)


def with_rule(normalizer: Any = None, words: Any = None, after: Any = None) -> Backend:
    backend = byte_level()
    backend.normalizer = normalizer
    if words is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, backend.pre_tokenizer])  # type: ignore[list-item]
    backend.post_processor = after
    return backend


def with_token(content: str, normalizer: Any = None, **fields: bool) -> Backend:
    backend = byte_level()
    backend.normalizer = normalizer
    backend.add_tokens([AddedToken(content, **fields)])
    return backend


def split(regex: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(regex), "isolated")


AFTER = processors.TemplateProcessing(" ".join(["$A"] * 3), None, [])


@pytest.mark.parametrize(
    "backend",
    [
        lambda: with_rule(grown(1000)),
        lambda: with_rule(normalizers.Sequence([normalizers.NFC(), grown(2)])),
        lambda: with_rule(normalizers.Prepend("aa")),
        lambda: with_rule(normalizers.NFKC()),
        lambda: with_rule(normalizers.Replace(Regex("a*"), "")),
        lambda: with_rule(words=split("(x+x+)+y")),
        lambda: with_rule(words=split(PRETOKENIZE_REGEX + "|y")),
        lambda: with_rule(words=pre_tokenizers.ByteLevel()),
        lambda: with_rule(words=pre_tokenizers.Sequence([split(PRETOKENIZE_REGEX)] * 40)),
        lambda: with_rule(after=AFTER),
        lambda: Backend(models.WordLevel({"a": 0}, unk_token="a")),
        lambda: Backend(models.BPE({"a": 0, "b": 1}, [], continuing_subword_prefix="b")),
        lambda: Backend(models.BPE({"a": 0, "b": 1}, [], dropout=0.9)),
        lambda: with_token("\u3000", rstrip=True),
        lambda: with_token("\n \t", lstrip=True, special=True),
        lambda: with_token("x", normalizers.Replace("x", "\u3000"), rstrip=True, normalized=True),
        lambda: with_rule(
            words=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated")] * 3)
        ),
        lambda: with_rule(words=pre_tokenizers.Split("", "isolated")),
        lambda: with_rule(normalizers.Sequence([normalizers.Replace("a", "b")] * 3)),
    ],
)
def test_rules_of_which_nobody_knows_the_time_are_not_plain(backend: Callable[[], Backend]) -> None:
    assert not has_plain_rules(backend())


@pytest.mark.parametrize("backend", [byte_level, byte_fallback, metaspace])
def test_usual_rules_are_plain(tmp_path: Path, backend: Callable[[], Backend]) -> None:
    assert Tokenizer(save(tmp_path, backend())).quick == SLICE
    assert has_plain_rules(with_rule(normalizers.NFC(), split(PRETOKENIZE_REGEX)))
    spell = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert has_plain_rules(with_rule(spell))
    assert has_plain_rules(with_token("<|end|>", rstrip=True)) and has_plain_rules(with_token("  "))
    assert has_plain_rules(with_rule(words=pre_tokenizers.Split("a", "isolated")))


@pytest.mark.parametrize(
    "rule",
    [
        decoders.Replace("e", "ee"),
        decoders.Replace(Regex("(x+x+)+y"), ""),
        decoders.Sequence([decoders.Replace("e", "e" * 1000)] * 2),
        decoders.Sequence([decoders.BPEDecoder("")] * 20),
        decoders.Sequence([decoders.Replace("e", "a")] * 3),
    ],
)
def test_a_decoder_that_may_ruin_a_server_is_refused(tmp_path: Path, rule: Any) -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.Fuse(), rule])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^tokenizer: .*: decoder: it may hold neither"):
        Tokenizer(save(tmp_path, backend))


def test_stop_strings_are_searched_for_special_tokens_by_the_library(tmp_path: Path) -> None:
    """Some models have a thousand of them, and a request may have 64 stop strings."""
    backend = byte_level()
    backend.add_special_tokens([f"<<<<<<|reserved_{number}|>" for number in range(1000)])
    tokenizer = Tokenizer(save(tmp_path, backend))
    start = time.process_time()
    params = tokenizer.encode_params(SamplingParams(stop=["<" * (1024 - n) for n in range(64)]))
    assert time.process_time() - start < 0.3  # a search for each name takes 2 s
    assert len(params.stop) == 64 and not params.stop_token_ids
    with pytest.raises(ValueError, match=r"^stop: .*'<<<<<<\|reserved_77\|>' is a special token"):
        tokenizer.encode_params(SamplingParams(stop=["a", "a <<<<<<|reserved_77|> b"]))
    alone = tokenizer.encode_params(SamplingParams(stop=["<<<<<<|reserved_77|>", "b"]))
    assert alone.stop == ("b",)
    assert alone.stop_token_ids == (backend.token_to_id("<<<<<<|reserved_77|>"),)


def test_a_token_of_a_book_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["a" * 3000])
    with pytest.raises(ValueError, match="a token has 3000 characters"):
        Tokenizer(save(tmp_path, backend))


def test_a_token_on_which_a_decoder_panics_is_an_error(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.Strip("a", 0, 5)
    tokenizer = Tokenizer(save(tmp_path, backend))
    (fine,), (panics,) = (tokenizer.encode(text, False).tolist() for text in "ba")
    with pytest.raises(ValueError, match="the tokenizer cannot decode the tokens: index out"):
        tokenizer.decode([panics])
    assert tokenizer.decode([fine]) == "b"


class Counting:
    """A tokenizer's backend that counts the characters it encodes."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.sizes = backend, list[int]()

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.sizes += map(len, texts)
        return self.backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize("window", [64, 4096, 32768])
def test_a_prompt_that_is_too_long_is_refused_after_a_few_slices(
    tmp_path: Path, backend: Callable[[], Backend], window: int
) -> None:
    tokenizer = Tokenizer(save(tmp_path, backend()))
    tokenizer.backend = counting = Counting(tokenizer.backend)
    text = "hello world, the quick brown fox " * (window // 4)
    per_token = len(text) / len(counting.backend.encode(text).ids)
    with pytest.raises(PromptTooLong, match=f"too many for a window of {window} tokens"):
        tokenizer.encode(text, window=window)
    work, needed = sum(counting.sizes), window * per_token
    assert max(counting.sizes) <= max(SLICE, 2 * window)
    assert work <= 2.2 * max(needed, 2 * window) + 2 * SLICE
    if len(text) > 2 * window:  # nothing is encoded in one piece
        assert max(counting.sizes) <= SLICE


@given(st.integers(1, 9000), st.text(max_size=20), st.integers(1, 2000))
@settings(max_examples=40, deadline=None)
def test_a_prompt_is_refused_exactly_if_it_has_too_many_tokens(
    level: Tokenizer, window: int, piece: str, times: int
) -> None:
    """The oracle encodes all of it."""
    text = piece * times
    count = len(level.encode(text))
    try:
        assert len(level.encode(text, window=window)) == count <= window
    except PromptTooLong as error:
        assert count > window and error.code == "context_length_exceeded"


@pytest.mark.parametrize("padding", [None, 12, 300])
@pytest.mark.parametrize("truncation", [None, 5, 300])
def test_settings_of_the_training_do_not_change_a_prompt(
    tmp_path: Path, padding: int | None, truncation: int | None
) -> None:
    backend = byte_level()
    plain = Tokenizer(save(tmp_path / "plain", backend))
    if padding is not None:
        backend.enable_padding(length=padding, direction="left")
    if truncation is not None:
        backend.enable_truncation(truncation)
    found = Tokenizer(save(tmp_path / "trained", backend))
    for text in ("", "hi", "hello world, the quick brown fox " * 40):
        assert found.encode(text).tolist() == plain.encode(text).tolist()
    chat = [{"role": "user", "content": "hello " * 50}]
    assert found.apply_chat(chat).tolist() == plain.apply_chat(chat).tolist()
