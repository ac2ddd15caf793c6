"""Tools and thoughts: formats found, calls in any chunking, guarantees, and the OpenAI API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from minisgl import LLM, SamplingParams
from minisgl.core import GRAMMARS
from minisgl.scheduler.forms import compile_grammar, load_tokens
from minisgl.scheduler.grammar import load_grammars
from minisgl.scheduler.messages import InvalidRequestError, UserMsg
from minisgl.scheduler.requests import Limits, make_req
from minisgl.server.http import tool_parser
from minisgl.server.http.calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    CallFormat,
    ChatAbilities,
    chat_abilities,
    constraint,
    read_template,
)
from minisgl.server.http.chats import AnswerParser, as_message
from minisgl.server.http.tool_parser import (
    MAX_HEAD,
    CallArguments,
    CallStart,
    Content,
    ObjectEnd,
    Piece,
    Reasoning,
    ToolParser,
)
from minisgl.server.http.tools import Tool, tool_rules
from minisgl.tokenizer import MAX_BLANK, DecodeStatus, Tokenizer, check_messages
from tests.checkpoints import make_checkpoint
from tests.serving import WINDOW, Live
from tests.turns import in_turns

NAMES = ("weather", "add")
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str = "weather", parameters: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


# ------------------------------------------------------------------ templates and formats

TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYSTEM = """{%- if tools %}<|im_start|>system
# Tools <tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}</tools> For each call, return a json object within <tool_call> tags:
<tool_call>{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}</tool_call><|im_end|>
{% endif %}"""
CALLS = """{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.tool_call_id %}(for {{ m.tool_call_id }}){% endif %}"""
HERMES_TEMPLATE = SYSTEM + TURNS.replace("CALLS", CALLS)
KEPT = "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
THINKS_TEMPLATE = SYSTEM + TURNS.replace("CALLS", KEPT + CALLS)
THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
OPENED_TEMPLATE = THINKS_TEMPLATE.removesuffix("{% endif %}") + THINKING + "{% endif %}"
LLAMA_TEMPLATE = """{%- if tools %}Respond in the format {"name": function name, "parameters":
dictionary of argument name and its value}. {{ tools | tojson }}{% endif %}"""
LLAMA_TEMPLATE += TURNS.replace("CALLS", "")
MISTRAL_TEMPLATE = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
MISTRAL_TEMPLATE += TURNS.replace("CALLS", "{% if m.tool_calls %}[TOOL_CALLS]{% endif %}")
TEMPLATES: dict[str, tuple[str, CallFormat]] = {
    "hermes": (HERMES_TEMPLATE, HERMES),
    "llama": (LLAMA_TEMPLATE, LLAMA),
    "mistral": (MISTRAL_TEMPLATE, MISTRAL),
    "named": (MISTRAL_TEMPLATE.replace("[TOOL_CALLS]", "[TOOL_CALLS]x[ARGS]{}"), MISTRAL_NAMED),
    "thinks": (THINKS_TEMPLATE, HERMES),
    "opened": (OPENED_TEMPLATE, HERMES),
}
MARKERS = {"<tool_call>": False, "</tool_call>": True, "[TOOL_CALLS]": True, "[ARGS]": True,
           "<think>": False, "</think>": True}  # fmt: skip


def save_model(folder: Path, template: str, markers: bool = True) -> Path:
    """A random model whose vocabulary has the markers, some of them as special tokens."""
    make_checkpoint(folder, tokenizer=True, max_position_embeddings=WINDOW * 8, vocab_size=768)
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    if markers:
        words = about["model"]["vocab"]
        for (marker, special), word in zip(MARKERS.items(), [w for w in words if "unused" in w]):
            like = about["added_tokens"][0]
            entry = {**like, "id": words[word], "content": marker, "special": special}
            about["added_tokens"].insert(0, entry)
            words[marker] = words.pop(word)
        about["added_tokens"].sort(key=lambda entry: int(entry["id"]))
        file.write_text(json.dumps(about))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_the_format(name: str, tmp_path: Path) -> None:
    template, form = TEMPLATES[name]
    for stored in (
        template,
        [{"name": "default", "template": ""}, {"name": "tool_use", "template": template}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        can = chat_abilities(read_template(tmp_path))
        assert can.calls is form and can.reasoning is (name in ("thinks", "opened"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_template(tmp_path) == ""
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_abilities(read_template(tmp_path)).calls is form


def test_other_formats_are_none_of_ours() -> None:
    for text in ("", "{{ messages }}", "<tool_call> without any list"):
        assert chat_abilities(text).calls is None
    with pytest.raises(ValueError, match=r"^tools: .* chat_template\.jinja .* response_format$"):
        tool = Tool.model_validate({"type": "function", "function": {"name": "weather"}})
        tool_rules([tool], None, None, chat_abilities("{{ messages }}"))
    for text in (
        "{{ tools }}",
        "{{ tools }}<tool_call><function=f>",
        "{{ tools }}<tool_call><arg_key>",
    ):
        can = chat_abilities(text)
        assert can.calls is None and "not supported" in can.refusal


# ------------------------------------------------------------------ the parser


def joined(pieces: list[Piece]) -> list[Any]:
    """Pieces that belong together as one, calls as [name, arguments]."""
    out: list[Any] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.call == sum(isinstance(one, list) for one in out)
            assert re.fullmatch("[a-zA-Z0-9]{9}", piece.id)
            out.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            out[-1][1] += piece.text
        elif out and type(out[-1]) is type(piece):
            out[-1] = type(piece)(out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def parse(form: CallFormat, chunks: list[str]) -> list[Any]:
    parser = ToolParser(form, NAMES)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return joined(pieces + parser.push("", last=True))


OSLO = ["weather", '{"city": "Oslo"}']
WHOLE: list[tuple[CallFormat, str, list[Any]]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", [OSLO]),
    (HERMES, f"Sure.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n\n",
     [Content("Sure."), OSLO, OSLO]),
    (HERMES, f"So \n<tool_call>{CALL}</tool_call> on", [Content("So"), OSLO, Content(" on")]),
    (HERMES, f"<tool_call>{CALL}", [OSLO]),  # the end came before its marker
    (HERMES, '<tool_call>{"arguments": {"a": [1, {}]}, "name": "add"}</tool_call>',
     [["add", '{"a": [1, {}]}']]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', [["add", "{}"]]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>}\\""}}</tool_call>',
     [["add", '{"a": "</tool_call>}\\""}']]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": </tool_call> oh',
     [["add", '{"a": '], Content(" oh")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', [["add", '{"a": 1']]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', [["add", '{"a": 1}']]),
    (LLAMA, 'Use {"name" first: {"name": "add", "parameters": {"a": 1}}',
     [Content('Use {"name" first:'), ["add", '{"a": 1}']]),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}',
     [["add", "{}"], ["add", "{}"]]),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1}}', [["add", '{"a": 1}']]),
    (LLAMA, '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
     [["add", '{"a": 1}']]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", [OSLO, OSLO]),
    (MISTRAL, f"Look:[TOOL_CALLS] [ {CALL} ] done", [Content("Look:"), OSLO, Content(" done")]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 2}',
     [["add", '{"a": 1}'], ["add", '{"a": 2}']]),
]  # fmt: skip
NOT_CALLS: list[tuple[CallFormat, str]] = [
    (HERMES, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'),
    (HERMES, "<tool_call>\nno JSON\n</tool_call> <tool_ca"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": 5}</tool_call>\n'),
    (HERMES, '<tool_call>{"name": "add", "argu'),
    (HERMES, "  <tool_call>  "),
    (HERMES, "\n\n"),
    (LLAMA, '{"answer": {"name": "x"}} {"name": "rm", "parameters": {}}'),
    (LLAMA, '<|python_tag|>print("{}")'),
    (LLAMA, '{"name": "add", "parameters": [1]}'),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]add me"),
]


@pytest.mark.parametrize(("form", "text", "expected"), WHOLE)
def test_calls_are_found_in_every_chunking(form: CallFormat, text: str, expected: Any) -> None:
    assert parse(form, [text]) == expected
    for size in range(1, 9):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(form, chunks) == expected, size


@pytest.mark.parametrize(("form", "text"), NOT_CALLS)
def test_what_is_no_call_is_content_to_the_letter(form: CallFormat, text: str) -> None:
    for size in (1, 2, 3, 5, len(text)):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(form, chunks) == [Content(text)]


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", CALL,
     '{"name": "add", "arguments": {"a": "b', '"}}', '{"name"', "add[ARGS]", '{"a": 1}', "[", "]",
     "{", "}", '"', "\\", ",", ";", " ", "\n", "<", "hello", "😀"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, max_size=12), st.lists(st.integers(1, 9), min_size=1), st.data())
def test_any_text_in_any_chunks_gives_what_the_whole_gives(
    parts: list[str], sizes: list[int], data: st.DataObject
) -> None:
    form = data.draw(st.sampled_from([HERMES, LLAMA, MISTRAL, None]))
    thinks, opened = data.draw(st.booleans()), data.draw(st.booleans())
    text, chunks, left = "".join(parts), [], "".join(parts)
    for at in range(len(text)):
        size = sizes[at % len(sizes)]
        chunks.append(left[:size])
        left = left[size:]

    def answer(pieces: list[str]) -> list[Any]:
        parser = AnswerParser(thinks, None if form is None else ToolParser(form, NAMES))
        said = [piece for one in pieces for piece in parser.push(one, thinking=opened)]
        return joined(said + parser.push("", last=True, thinking=opened))

    whole = answer([text])
    assert answer(chunks) == whole
    if not thinks and not any(isinstance(piece, list) for piece in whole):
        assert "".join(piece.text for piece in whole) == text


def test_no_text_makes_the_patterns_of_calls_backtrack() -> None:
    """Doubtful brackets once doubled the time with every two characters."""
    text = "[TOOL_CALLS]f" + "[aa" * 300 + "!"
    assert parse(MISTRAL, [text]) == [Content(text)]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    "text",
    [
        "a" + " " * 5000 + "b",
        " " * 5000 + "<think>a",
        "<think>a" + " " * 5000 + "b</think>c",
        "<tool_call>f" + "a" * 5000,
        "[TOOL_CALLS]add[CALL_ID]" + "a" * 5000,
        '[TOOL_CALLS]{"name": "' + "a" * 5000,
        '{"name": "add", "parameters": {}' + " " * 5000 + "}" + " " * 5000 + "a",
        "<tool_call>" + CALL + " " * 5000 + "a",
    ],
)
def test_a_chunk_costs_the_same_however_much_came_before(
    form: CallFormat, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an object that no pattern decides is kept whole, and each character is read once."""
    searched = list[int]()

    class Counted:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern.pattern

        def match(self, text: str) -> re.Match[str] | None:
            searched.append(len(text))
            return re.match(self.pattern, text)

    for name in ("NAMED", "NO_OBJECT", "NO_HEAD"):
        monkeypatch.setattr(tool_parser, name, Counted(getattr(tool_parser, name)))
    answers = []
    for step in (1, 37, len(text)):
        tools = ToolParser(form, NAMES)
        parser, pieces = AnswerParser(True, tools), list[Piece]()
        for at in range(0, len(text), step):
            pieces += parser.push(text[at : at + step])
            most = MAX_BLANK + MAX_HEAD + step
            assert len(parser.buffer) <= most and len(tools.blank) <= most
            assert len(tools.buffer) <= most or tools.buffer.startswith("{")
        answers.append(joined(pieces + parser.push("", last=True)))
    assert answers[0] == answers[1] == answers[2]
    assert max(searched, default=0) <= MAX_HEAD


def test_an_object_that_is_no_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, find = list[int](), ObjectEnd.find
    monkeypatch.setattr(
        ObjectEnd, "find", lambda self, text: read.append(len(text)) or find(self, text)
    )
    text = '{"type": ' * 300
    for step in (9, len(text)):
        chunks = [text[at : at + step] for at in range(0, len(text), step)]
        read.clear()
        assert parse(LLAMA, chunks) == [Content(text)]
        assert sum(read) <= len(text)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    """Arguments stream, content is held only where a marker may begin."""
    parser = ToolParser(HERMES, NAMES)
    assert parser.push("So <tool") == [Content("So")]
    assert parser.push("s> ") == [Content(" <tools>")]
    assert parser.push('<tool_call>{"name": "add", ') == []
    (start,) = parser.push('"arguments": {')[:1]
    assert isinstance(start, CallStart) and start.name == "add"
    assert parser.push('"a') == [CallArguments(0, '"a')]
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.push("}</tool_") == [] and parser.push("call>\nBye") == [Content("\nBye")]


def test_half_a_character_stays_escaped() -> None:
    """JSON can hold half of a surrogate pair; no message can, here or in the next turn."""
    parser, half = ToolParser(HERMES, NAMES), '{"a": "\\ud83d é"}'
    said = parser.push(f'<tool_call>{{"arguments": {half}, "name": "add"}}</tool_call>', last=True)
    assert said[1] == CallArguments(0, half)
    call = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": half}}
    (message,) = check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"] == [call]


def test_long_arguments_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose name comes last is held: its cost must still grow with its length alone."""
    parser, seen = ToolParser(HERMES, NAMES), 0
    find = ObjectEnd.find

    def counted(self: ObjectEnd, text: str) -> int:
        nonlocal seen
        seen += len(text)
        return find(self, text)

    monkeypatch.setattr(ObjectEnd, "find", counted)
    assert parser.push('<tool_call>{"arguments": {"text": "') == []
    for _ in range(2000):
        assert parser.push("0123456789") == []
    assert len(parser.push('"}, "name": "add"}</tool_call>')) == 2
    assert seen < 21_000


# ------------------------------------------------------------------ thoughts


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, [Reasoning("hm"), Content("yes")]),
        ("\n<think> a </think>b", False, [Reasoning("a"), Content("b")]),
        ("hm\n</think>\n\nyes", True, [Reasoning("hm"), Content("yes")]),
        ("<think>\nhm</think>yes", True, [Reasoning("hm"), Content("yes")]),
        ("yes </think>", False, [Content("yes </think>")]),
        ("hm </thi", True, [Reasoning("hm </thi")]),
        ("hm </think>\n", True, [Reasoning("hm")]),
        (" <thin", False, [Content(" <thin")]),
        ("", True, []),
    ],
)
def test_thoughts_are_split_off(text: str, opened: bool, expected: list[Any]) -> None:
    for size in (1, 3, 100):
        parser = AnswerParser(True)
        chunks = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        pieces = [p for chunk in chunks for p in parser.push(chunk, thinking=opened)]
        assert joined(pieces + parser.push("", last=True)) == expected
    untold = AnswerParser(True, show_thoughts=False).push(text, True, opened)
    assert [piece for piece in expected if isinstance(piece, Content)] == untold


# ------------------------------------------------------------------ markers and tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: save_model(folder / name, TEMPLATES[name][0]) for name in TEMPLATES}
    return made | {"spelled": save_model(folder / "spelled", OPENED_TEMPLATE, markers=False)}


def test_markers_are_text_though_they_are_special_tokens(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["hermes"])
    text = f"<|im_start|>a<tool_call>{CALL}</tool_call>[TOOL_CALLS]<think>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) < len(text) - 50 and tokenizer.decode(ids) == text.removeprefix("<|im_start|>")
    theirs = AutoTokenizer.from_pretrained(folders["hermes"])
    assert theirs.encode(text, add_special_tokens=False) == ids.tolist()
    assert DecodeStatus(tokenizer, ids).thinking
    assert not DecodeStatus(tokenizer, ids[:-1]).thinking


def test_arguments_are_a_mapping_for_the_template(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["thinks"])
    function = {"name": "add", "arguments": '{"a": "é"}'}
    call = {"id": "x", "type": "function", "function": function}
    ask = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    text = tokenizer.render_chat([ask])
    assert '"arguments": {"a": "é"}}' in text and "<think>hm</think>" in text
    for odd in ("no JSON", "[1]", '{"a": ' + "[" * 5000):
        broken = {**ask, "tool_calls": [{**call, "function": {"name": "add", "arguments": odd}}]}
        assert "tool_call" in tokenizer.render_chat([broken])
    tokenizer.templates.texts = {"default": "{{ messages }}"}
    with pytest.raises(ValueError, match="tools: this model"):
        tokenizer.render_chat(ASK, tools=[tool()])


# ------------------------------------------------------------------ the guarantee


@pytest.mark.parametrize("name", in_turns(2, ["hermes", "llama", "mistral", "named", "opened"]))
def test_a_random_model_calls_if_it_must(name: str, folders: dict[str, Path]) -> None:
    form, reasoning = TEMPLATES[name][1], name == "opened"
    many = constraint(form, {"weather": SCHEMA, "add": NONE}, required=True, single=False)
    single = constraint(form, {"weather": SCHEMA}, required=True, single=True)
    free = constraint(form, {"weather": SCHEMA}, required=False, single=False, reasoning=reasoning)
    answer = constraint(form, {"weather": SCHEMA}, required=False, single=True, answer=NONE)
    hot = {"temperature": 1.0, "max_tokens": 120}
    forms = (many, single, free, answer)
    params = [
        SamplingParams(seed=n, structural_tag={"format": forms[n % 4]}, **hot) for n in range(12)
    ]
    with LLM(folders[name], device="cpu", num_pages=2000, max_running_req=12) as llm:
        outs = llm.generate(["hi"] * 12, params)
        if name == "hermes":
            counts = [llm.chat(ASK, SamplingParams(max_tokens=1), tools=t)[0]["prompt_tokens"]
                      for t in (None, [tool()])]  # fmt: skip
            assert counts[1] > counts[0] + 100
    for n, out in enumerate(outs):
        pieces = parse(form, [out["text"]])
        whole = out["finish_reason"] == "stop"
        for name, arguments in [piece for piece in pieces if isinstance(piece, list)][
            : None if whole else -1
        ]:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else NONE)
        assert whole or n % 4 in (0, 2)  # these may call without end
        match n % 4:
            case 0:
                assert all(isinstance(piece, list) for piece in pieces[:-1])
            case 1:
                assert [piece[0] for piece in pieces] == ["weather"]
            case 3:
                assert out["text"] == "{}" or [piece[0] for piece in pieces] == ["weather"]


@pytest.mark.parametrize("name", ["opened", "spelled"])
def test_a_grammar_begins_in_the_prompts_thought(name: str, folders: dict[str, Path]) -> None:
    tag = constraint(HERMES, {"add": NONE}, required=True, single=True, reasoning=True)
    params = SamplingParams(structural_tag={"format": tag})
    tokenizer = Tokenizer(folders[name])
    vocabulary, end = tokenizer.vocab_size, tokenizer.eos_token_ids
    grammars = load_grammars(folders[name], vocabulary, end)
    limits = Limits(1000, 1000, vocabulary, frozenset(end))
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for prompt, answer, fits in (
        ("hi<think>\n", f"hm</think>\n\n{call}", True),
        ("hi<think>", f"hm</think>\n\n{call}", True),
        ("hi<think>\n", call, False),
        ("hi", f"<think>hm</think>\n\n{call}", True),
        ("hi", call, True),
        ("hi", f"hm</think>\n\n{call}", False),
    ):
        msg = UserMsg(0, tokenizer.encode(prompt).tolist(), params)
        req = make_req(msg, limits, grammars.constrain)
        ids = tokenizer.encode(answer, add_special_tokens=False).tolist()
        whole = req.matcher.ll.try_consume_tokens(ids) == len(ids)
        assert (whole and req.matcher.ll.is_accepting()) is fits, (prompt, answer)


NO_BEGIN = {"type": "tag", "begin": 1, "content": {"type": "any_text"}, "end": ""}
TRIGGER = {"type": "triggered_tags", "triggers": ["<a"], "tags": [{"begin": "b"}]}


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({}, "no node"),
        ([], "no node"),
        ({"format": {"type": "or", "elements": []}}, "no node"),
        ({"format": NO_BEGIN}, "no node"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "foo"}}}, "foo"),
        ({"format": {"type": "json_schema", "json_schema": {"multipleOf": 9999}}}, "multipleOf"),
        ({"format": TRIGGER}, "trigger"),
        ({"format": {**TRIGGER, "triggers": ["1"], "tags": [{"begin": 123}]}}, "trigger"),
        ({"format": {**TRIGGER, "triggers": [""], "tags": [{}, "x"]}}, "trigger"),
    ],
)
def test_tags_that_cannot_be_used_are_refused(
    tag: Any, reason: str, folders: dict[str, Path]
) -> None:
    tokens = load_tokens(folders["hermes"], 768, [766])
    for name in (None, "tools"):
        named = {**tag, "name": name} if name and tag else tag
        asked = SamplingParams(structural_tag=named).structural_tag
        assert asked is not None
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            compile_grammar(tokens, "structural_tag", asked)
        assert caught.value.param == ("tools" if "name" in named else "structural_tag")
    deep = '{"type": "sequence", "elements": ['
    for depth in (300, 1500):
        text = '{"format": ' + deep * depth + '{"type": "x"}' + "]}" * depth + "}"
        with pytest.raises(InvalidRequestError):
            compile_grammar(tokens, "structural_tag", text)


# ------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def live(folders: dict[str, Path]) -> Iterator[Live]:
    with Live(folders["hermes"], num_pages=4096) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


ASK: list[Any] = [{"role": "user", "content": "weather?"}]


def post(live: Live, **fields: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 150, "seed": 1, **fields}
    return httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=600)


CHOICES: list[Any] = [
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}},
     "parallel_tool_calls": False},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_required_calls_are_valid_whole_and_streamed(
    client: openai.OpenAI, live: Live, choice: dict[str, Any]
) -> None:
    name = client.models.list().data[0].id
    tools: Any = [tool(), tool("add", NONE)]
    for seed in range(2):
        ask: Any = {"model": name, "messages": ASK, "tools": tools, "seed": seed, **choice}
        ask["max_tokens"] = 150
        whole = client.chat.completions.create(**ask)
        (found,) = whole.choices
        assert found.finish_reason == "tool_calls" and found.message.content is None
        (call,) = found.message.tool_calls or []
        assert call.type == "function"
        if choice["tool_choice"] != "required":
            assert call.function.name == "weather"
        schema = SCHEMA if call.function.name == "weather" else NONE
        jsonschema.validate(json.loads(call.function.arguments), schema)
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
        calls = [one for delta in deltas for one in delta.delta.tool_calls or []]
        first, *rest = calls
        assert first.function and first.function.name == call.function.name and first.id
        assert first.function.arguments == "" and deltas[0].delta.role == "assistant"
        assert all(one.id is None and one.function and one.function.name is None for one in rest)
        text = "".join(one.function.arguments or "" for one in rest if one.function)
        assert text == call.function.arguments
        reasons = [delta.finish_reason for delta in deltas]
        assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    live.assert_pages_home()


def test_an_argument_may_spell_a_special_token(live: Live) -> None:
    """Whatever the format; the call is whole, and its argument is what the schema says."""
    for text in ("<tool_call>", "a</tool_call>b"):
        schema = {"type": "object", "properties": {"x": {"enum": [text]}}, "required": ["x"]}
        found = post(live, tools=[tool("f", schema)], **CHOICES[0]).json()["choices"][0]
        (call,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"])["x"] == text


def test_the_client_accumulates_and_parses(client: openai.OpenAI) -> None:
    """Streams and strict tools through the openai package."""
    name = client.models.list().data[0].id
    strict: Any = [tool(strict=True)]
    ask: Any = {"model": name, "messages": ASK, "tools": strict, "seed": 2, "max_tokens": 150}
    ask["tool_choice"] = CHOICES[1]["tool_choice"]
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    parsed = client.chat.completions.parse(**ask)
    for completion in (final, parsed):
        (call,) = completion.choices[0].message.tool_calls or []
        arguments: Any = call.function.parsed_arguments
        jsonschema.validate(arguments, SCHEMA)
    assert final.choices[0].message.tool_calls[0].function == call.function


def test_tools_are_shown_and_results_come_back(live: Live, folders: dict[str, Path]) -> None:
    """By the prompt's length: the tokens of the template with the same tools and messages."""
    tokenizer = Tokenizer(folders["hermes"])
    function = {"name": "weather", "arguments": '{"city": "Rom", "days": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    talk = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
    ]
    shown = tool("weather", SCHEMA, description="Says the weather.")
    order = {"type": "function", "function": {
        "name": "weather", "description": "Says the weather.", "parameters": SCHEMA}}  # fmt: skip
    expected = tokenizer.apply_chat(talk, tools=[order])
    reply = post(live, messages=talk, tools=[shown], max_tokens=1)
    assert reply.json()["usage"]["prompt_tokens"] == len(expected)
    without = post(live, messages=talk, tools=[shown], tool_choice="none", max_tokens=1)
    assert without.json()["usage"]["prompt_tokens"] == len(tokenizer.apply_chat(talk))


def test_auto_answers_freely_unless_a_promise_is_made(live: Live) -> None:
    """The grammar reaches the scheduler only where it has to."""
    seen = list[str | None]()
    box = live.server.to_scheduler
    put = box.put

    def noted(*messages: Any) -> None:
        seen.extend(m.sampling_params.structural_tag for m in messages if isinstance(m, UserMsg))
        put(*messages)

    box.put = noted  # type: ignore[method-assign]
    try:
        two = [tool(), tool("add", NONE)]
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
        for fields, promised in (
            ({}, False),
            ({"tool_choice": "auto", "parallel_tool_calls": True}, False),
            ({"tool_choice": "none"}, False),
            ({"parallel_tool_calls": False}, True),
            ({"tools": [tool(strict=True), tool("add", NONE)]}, True),
            ({"tool_choice": "required"}, True),
            ({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}, True),
            ({"response_format": {"type": "json_object"}}, True),
        ):
            reply = post(live, **{"tools": two, "max_tokens": 1, **fields})
            assert reply.status_code == 200, reply.text
            assert (seen[-1] is not None) is promised, fields
    finally:
        box.put = put  # type: ignore[method-assign]
    kept = json.loads(seen[4] or "")["format"]["tags"]
    schemas = [tag["content"]["json_schema"] for tag in kept]
    assert schemas == [SCHEMA, {"type": "object"}]  # only the strict one is held to its schema


def with_fields(name: str, value: Any) -> dict[str, Any]:
    return {"tools": [tool()], name: value}


FOR_X = {"type": "function", "function": {"name": "x"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": FOR_X}, "tool_choice"),
    (with_fields("tool_choice", FOR_X), "tool_choice"),
    (with_fields("tool_choice", "always"), "tool_choice"),
    (with_fields("tool_choice", {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [FOR_X]}}), "tool_choice"),
    (with_fields("parallel_tool_calls", "x"), "parallel_tool_calls"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool("a b")]}, "tools"),
    ({"tools": [tool("a" * 65)]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
    ({"tools": [tool(description="x" * 300_000)]}, "tools"),
    ({"tools": [tool(parameters={"const": 10**30})]}, "tools"),
    ({"tools": [tool(description="\ud800")]}, "tools"),
    ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool(parameters={"not": {}}, strict=True)]}, "tools"),
    ({"tools": [tool(parameters={"enum": ["x" * 70_000]}, strict=True)]}, "tools"),
    ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [tool()], "tool_choice": "required", "regex": "x"}, "regex"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": ["a"]}}]}]}, "messages"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"structural_tag": {"format": {"type": "nothing"}}}, "structural_tag"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_bad_tools_are_refused_by_name(live: Live, stream: bool) -> None:
    for fields, param in BAD:
        body = json.dumps({"messages": ASK, "stream": stream, "max_tokens": 5, **fields})
        reply = httpx.post(f"{live.url}/v1/chat/completions", content=body, timeout=300,
                           headers={"content-type": "application/json"})  # fmt: skip
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()["error"]
        assert error["param"] == param and param in error["message"], error
    fine = [tool(parameters={"not": {}}), tool("f", parameters=None)]
    assert post(live, tools=fine, max_tokens=1).status_code == 200  # nothing is promised
    live.assert_pages_home()


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", TURNS.replace("CALLS", ""))
    with Live(plain) as live:
        for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
            error = post(live, tools=[tool()], **fields).json()["error"]
            assert error["param"] == "tools" and "chat template" in error["message"]
        for fields in ({"tools": []}, {"tools": [tool()], "tool_choice": "none"}):
            assert post(live, max_tokens=1, **fields).status_code == 200


def say(live: Live, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Replace the model's text from now on."""
    push = DecodeStatus.push

    def scripted(self: DecodeStatus, token: int) -> str:
        size = 7
        said = getattr(self, "said", 0)
        self.said = said + size  # type: ignore[attr-defined]
        push(self, token)
        return text[said : said + size]

    monkeypatch.setattr(DecodeStatus, "push", scripted)
    monkeypatch.setattr(DecodeStatus, "finish", lambda self: text[getattr(self, "said", 0) :])


def test_thoughts_and_calls_together_over_http(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Live(folders["thinks"], num_pages=1024) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)
        check_thoughts_and_calls(live, monkeypatch, client)


def check_thoughts_and_calls(
    live: Live, monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI
) -> None:
    told = f"<think>\nhm, Oslo\n</think>\n\nSo:\n<tool_call>\n{CALL}\n</tool_call>"
    say(live, monkeypatch, told)
    fields = {"tools": [tool()], "max_tokens": 5, "ignore_eos": True}
    message = post(live, **fields).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm, Oslo" and message["content"] == "So:"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    name = client.models.list().data[0].id
    chunks = list(client.chat.completions.create(
        model=name, messages=ASK, tools=fields["tools"], max_tokens=5, stream=True,  # type: ignore
        extra_body={"ignore_eos": True}))  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "hm, Oslo" and "".join(d.content or "" for d in deltas) == "So:"
    kept = post(live, **fields, separate_reasoning=False).json()["choices"][0]["message"]
    assert kept["content"] == told.partition("\n<tool_call>")[0] and len(kept["tool_calls"]) == 1
    untold = post(live, **fields, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning_content" not in untold and untold["content"] == "So:"
    plain = post(live, max_tokens=5, ignore_eos=True).json()["choices"][0]
    assert "<tool_call>" in plain["message"]["content"] and plain["finish_reason"] == "length"


def test_thoughts_that_begin_in_the_prompt(folders: dict[str, Path]) -> None:
    fields = {"max_tokens": 4, "ignore_eos": True, "temperature": 1}
    with Live(folders["opened"], num_pages=1024) as live:
        message = post(live, **fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] and message["content"] == ""
        talk = {"chat_template_kwargs": {"enable_thinking": False}}
        message = post(live, **fields, **talk).json()["choices"][0]["message"]
        assert "reasoning_content" not in message and message["content"]
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        error = post(live, response_format=shape).json()["error"]
        assert error["param"] == "response_format"


def test_messages_are_shaped_as_openai_does() -> None:
    parser = AnswerParser(False, ToolParser(HERMES, NAMES))
    message = as_message(parser.push(f"<tool_call>{CALL}</tool_call>", last=True))
    assert message["content"] is None and parser.reason("stop") == "tool_calls"
    assert parser.reason("length") == "length" and "reasoning_content" not in message
    assert as_message([])["content"] == "" and AnswerParser().reason("stop") == "stop"
    assert ChatAbilities().calls is None and "structural_tag" in GRAMMARS


def test_arguments_belong_to_their_call() -> None:
    pieces = [CallStart(0, "a", "f"), CallArguments(0, "{"), Content("x"), CallArguments(0, "}")]
    pieces += [CallStart(1, "b", "g"), CallStart(2, "c", "h"), CallArguments(2, "[]"), Content("y")]
    message = as_message([*pieces, Reasoning("z")])
    texts = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert texts == ["{}", "", "[]"] and message["content"] == "xy"
    assert message["reasoning_content"] == "z"
