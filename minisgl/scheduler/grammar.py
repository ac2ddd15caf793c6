"""Answers that keep to a grammar: compile it, follow the answer, mask what may not come next.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask_par

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams, masks_of
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.messages import AbortMsg, InvalidRequestError, Msg, UserMsg
from minisgl.tokenizer import THINK

MAX_MULTIPLES = 1000  # sum of all `multipleOf` of a schema: each takes as many states
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=10_000,
    max_lexer_states=10_000, max_grammar_size=20_000, verbose_errors=False,
)  # fmt: skip
ONE_LINE: Any = {  # else a model may answer with spaces indefinitely
    "whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?",
}  # fmt: skip


def check_multiples(schema: str) -> None:
    """Raise `ValueError` if all `multipleOf` together take too many states."""
    multiples = re.findall(r'"multipleOf": ([0-9.]+)', schema)
    digits = [number.replace(".", "").strip("0") for number in multiples]
    if sum(map(int, filter(None, digits))) > MAX_MULTIPLES:
        raise ValueError(f"the digits of all multipleOf must add up to {MAX_MULTIPLES} at most")


def schema_grammar(schema: str) -> str:
    """Convert a JSON schema to llguidance's form."""
    check_multiples(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=ONE_LINE)


def free_grammar(text: str) -> str:
    """Convert a grammar in Lark's or llama.cpp's notation (GBNF); it embeds no schema."""
    lark = grammar_from("grammar", text)
    if "%json" in lark:
        raise ValueError("a schema inside of a grammar is not supported, use json_schema")
    return lark


FORMS: dict[str, Callable[[str], str]] = {
    "json_schema": schema_grammar,
    "json_object": schema_grammar,
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda text: grammar_from("choice", text),
    "grammar": free_grammar,
}


def tag_of(text: str) -> dict[str, Any]:
    """Parse a structural tag: its `format` is the tree, its `name` identifies it in errors."""
    try:
        given = json.loads(text)
    except RecursionError:
        given = None
    return given if isinstance(given, dict) else {}


class TagCompiler:
    """A structural tag in Lark's notation for one tokenizer, whose special tokens are no text."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.rules = [r"TEXT: /(.|\n)*/"]

    def lark(self, text: str) -> str:
        """Return the whole grammar; raise `ValueError` that names a node of no known form."""
        check_multiples(text)
        start = self.expression(tag_of(text).get("format"))
        return "\n".join([f"start: {start}", *self.rules])

    def define(self, body: str, kind: str = "part_{}") -> str:
        """Define a rule, or a terminal, and return its name."""
        name = kind.format(len(self.rules))
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """Return a fixed text: special tokens by their numbers, the rest quoted."""
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        parts = [] if ids else ['""']
        for special, run in groupby(ids, self.tokenizer.is_special_token):
            if special:
                parts += [f"<[{token}]>" for token in run]
            else:
                parts.append(json.dumps(self.tokenizer.decode_str(list(run)), ensure_ascii=False))
        return " ".join(parts)

    def without(self, marker: str) -> str:
        """Define any text without the marker."""
        pattern = re.escape(marker).replace("/", r"\/").replace("\n", "n")
        return self.define(rf"TEXT & ~/(.|\n)*{pattern}(.|\n)*/", "TEXT_{}")

    def until(self, marker: str) -> str:
        """Define any text up to and including the first marker."""
        literal = self.literal(marker)
        if "<[" in literal:
            return f"{self.without(marker)} {literal}"
        return self.define(f"TEXT {literal}", "part_{}[lazy]")

    def expression(self, node: Any) -> str:
        """Return the expression of one node; raise `ValueError` if its form is unknown."""
        match node:
            case {"type": "const_string", "value": str(text)}:
                return self.literal(text)
            case {"type": "any_text"}:
                return "TEXT"
            case {"type": "json_schema", "json_schema": dict(schema)}:
                return self.define("%json " + json.dumps({**schema, "x-guidance": ONE_LINE}))
            case {"type": "sequence", "elements": [_, *_] as parts}:
                return " ".join(map(self.expression, parts))
            case {"type": "or", "elements": [_, *_] as parts}:
                return self.either(parts)
            case {
                "type": "tag",
                "begin": str(begin),
                "content": {"type": "any_text"},
                "end": str(end),
            }:
                return f"{self.literal(begin)} {self.until(end)}"
            case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
                return f"{self.literal(begin)} {self.expression(content)} {self.literal(end)}"
            case {
                "type": "tags_with_separator",
                "tags": [_, *_] as tags,
                "separator": str(between),
            }:
                return self.repeated(node, self.either(tags), f"{self.literal(between)} ", "")
            case {
                "type": "triggered_tags",
                "triggers": [str(trigger)],
                "tags": [_, *_] as tags,
            } if trigger:
                return self.triggered(node, trigger, tags)
        raise ValueError(f"no node of a structural tag that is supported: {node!r:.80}")

    def either(self, nodes: list[Any]) -> str:
        """Define one of several nodes."""
        return self.define(" | ".join(map(self.expression, nodes)))

    def repeated(self, node: dict[str, Any], one: str, between: str, end: str) -> str:
        """Return one or more, unless limited to one; or also none, if that is allowed."""
        many = one if node.get("stop_after_first") else f"{one} ({between}{one})* {end}"
        empty = end or '""'
        return many if node.get("at_least_one") else f"({many} | {empty})"

    def triggered(self, node: dict[str, Any], trigger: str, tags: list[Any]) -> str:
        """Define text with a tag wherever the trigger occurs."""
        rest = []
        for tag in tags:
            match tag:
                case {"begin": str(begin)} if begin.startswith(trigger):
                    rest.append({**tag, "begin": begin[len(trigger) :]})
                case _:
                    must = f"a tag must begin with its trigger {trigger!r}, got {tag!r:.80}"
                    raise ValueError(must)
        call = self.define(f"{self.until(trigger)} {self.either(rest)}")
        return self.repeated(node, call, "", self.without(trigger))


def asked_for(params: SamplingParams) -> tuple[str, str] | None:
    """Return the field that constrains an output, and its grammar as text; None if none does."""
    texts: dict[str, Any] = {
        "json_schema": params.json_schema,
        "json_object": '{"type": "object"}' if params.json_object else None,
        "regex": params.regex,
        "choice": json.dumps(params.choice) if params.choice else None,
        "grammar": params.grammar,
        "structural_tag": params.structural_tag,
    }
    return next(((field, text) for field, text in texts.items() if text is not None), None)


def compile_grammar(tokenizer: LLTokenizer | str, field: str, text: str) -> LLMatcher:
    """Compile a matcher; raise `InvalidRequestError` that names the field and the reason."""
    try:
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        tag = field == "structural_tag"
        source = TagCompiler(tokenizer).lark(text) if tag else FORMS[field](text)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # of the first token
        if matcher.is_error():  # it never raises
            why = matcher.get_error()
            raise ValueError("no text matches" if why.startswith("NoExtensionBias") else why)
    except Exception as error:  # a client's text: nothing in it may end the scheduler's loop
        name = f"{tag_of(text).get('name', field)!s:.100}" if field == "structural_tag" else field
        raise InvalidRequestError(f"{name}: {error!s:.500}", param=name) from None
    return matcher


class Matcher:
    """Follows one answer through its grammar. Only the answer and the prompt's end move it."""

    def __init__(self, start: LLMatcher, field: str) -> None:
        self.ll, self.field = start.deep_copy(), field
        self.seen = 0  # tokens of the answer that it has accepted

    @property
    def error(self) -> str:
        """Why the answer cannot go on, or nothing."""
        return f"{self.field}: {self.ll.get_error():.500}" if self.ll.is_error() else ""

    def follow(self, output_ids: IntArray) -> None:
        """Accept what the answer has got since the last call."""
        for token in output_ids[self.seen :].tolist():
            self.ll.consume_token(token)
        self.seen = len(output_ids)


class DeferredOutput(ForwardOutput):
    """A step whose sampling waits for the step before; `wait` samples if nothing did so earlier."""

    def __init__(self, sample: Callable[[], ForwardOutput]) -> None:
        self._sample = sample
        self.output: ForwardOutput | None = None

    def sample(self) -> ForwardOutput:
        """Sample, once."""
        if self.output is None:
            self.output = self._sample()
        return self.output

    def wait(self) -> SampledTokens:
        return self.sample().wait()


class Grammars:
    """Compiles grammars for one model in a thread, keeps the last ones, fills masks."""

    def __init__(self, load: Callable[[], LLTokenizer | str], keep: int = 256) -> None:
        """Start one thread, in which `load` returns a tokenizer, or the reason why there is none.

        `keep` bounds their memory, a few MiB for a large one; one that is dropped while its request
        waits is compiled twice.
        """
        pool = ThreadPoolExecutor(1, "grammars")
        self.tokenizer = loaded = pool.submit(load)
        self.waiting: DeferredOutput | None = None  # the last step, if it is not sampled yet
        self.executor = LLExecutor(1)  # one call for a batch, in one thread

        def compile(field: str, text: str) -> Future[LLMatcher]:
            return pool.submit(lambda: compile_grammar(loaded.result(), field, text))

        self.compile = lru_cache(keep)(compile)

    def start(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Compile what a request asks for, unless it is there; None if it asks for nothing."""
        asked = asked_for(params)
        return None if asked is None else self.compile(*asked)

    def constrain(self, req: Req, vocab_size: int) -> None:
        """Set the matcher and mask of a constrained request, or raise `InvalidRequestError`."""
        asked = asked_for(req.sampling_params)
        assert asked is not None
        job = self.compile(*asked)
        if isinstance(error := job.exception(), InvalidRequestError):
            raise InvalidRequestError(error.message, param=error.param)
        req.matcher = Matcher(job.result(), asked[0])
        if asked[0] == "structural_tag":
            self.begin(req.matcher, req.input_ids)
        req.logits_params = req.logits_params or LogitsParams()
        req.logits_params.mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def begin(self, matcher: Matcher, prompt: IntArray) -> None:
        """Accept the `<think>` with which a prompt ends, if the grammar begins so too."""
        tokenizer = self.tokenizer.result()
        assert not isinstance(tokenizer, str)
        for length in range(1, 9):  # tokens that a marker may take where it is no special one
            tail = prompt[-length:].tolist()
            if tokenizer.decode_str(tail).strip() == THINK:
                if matcher.ll.validate_tokens(tail) == len(tail):
                    matcher.ll.consume_tokens(tail)
                return

    def fill_masks(self, fi: ForwardInput) -> None:
        """Write the masks of a step: what each constrained request may say next."""
        assert fi.sampling is not None
        rows, masks = masks_of(fi.sampling.processing)
        todo = []
        for index, row in enumerate(rows):
            req = fi.sampled[row]
            if req.matcher is not None:
                req.matcher.follow(req.output_ids)
                todo.append((req.matcher.ll, index))
        if todo:  # a tokenizer may have more tokens than the model has logits
            tokenizer, words = self.tokenizer.result(), masks.shape[1]
            assert not isinstance(tokenizer, str)
            wide = np.full((len(masks), max(words, -(-tokenizer.vocab_size // 32))), -1, np.int32)
            fill_next_token_bitmask_par(self.executor, todo, wide)
            indices = [index for _, index in todo]
            masks[indices] = wide[indices, :words]

    def defer(self, fi: ForwardInput, sample: Callable[[], ForwardOutput]) -> ForwardOutput:
        """Keep a sampling that needs masks; do others at once."""
        if all(req.matcher is None for req in fi.sampled):
            return sample()

        def masked() -> ForwardOutput:
            self.waiting = None
            self.fill_masks(fi)
            return sample()

        self.waiting = DeferredOutput(masked)
        return self.waiting

    def sample(self) -> None:
        """Fill the masks of the step that is kept, if there is one, and sample it."""
        if self.waiting is not None:
            self.waiting.sample()

    def reset(self) -> None:
        """Drop the step that waits: its requests are gone."""
        self.waiting = None


def load_grammars(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars:
    """Make the grammars of a model folder; without a tokenizer each is rejected with a reason."""

    def load() -> LLTokenizer | str:
        try:
            about = json.loads((folder / "tokenizer.json").read_text("utf-8"))
            about |= {"truncation": None, "padding": None}  # of the training
            ids = [token["id"] for token in about.get("added_tokens", [])]
            known = about.get("model", {}).get("vocab", ())
            size = max(vocab_size, len(known), *(i + 1 for i in ids))
            return LLTokenizer(json.dumps(about), n_vocab=size, eos_token=sorted(eos_token_ids))
        except (OSError, ValueError) as error:
            return f"the model's tokenizer cannot be used: {error}"

    return Grammars(load)


class CompileMsg(msgspec.Struct, tag=True):
    """Rank 0 to the others: a request with these parameters will come."""

    sampling_params: SamplingParams


class GrammarQueue:
    """Requests that wait for their grammars.

    `start` is that of `Grammars`, once they are there; `announce` if there are other ranks.
    """

    def __init__(self, announce: bool = False) -> None:
        self.announce = announce
        self.start: Callable[[SamplingParams], Future[LLMatcher] | None] = lambda params: None
        self.held: dict[int, tuple[UserMsg, Future[LLMatcher]]] = {}  # by uid

    def pass_on(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages that may go on, in order, and those whose wait is over."""
        passed: list[Any] = []
        for msg in messages:
            job = self.start(msg.sampling_params) if isinstance(msg, UserMsg) else None
            if job is None or job.done():
                passed.append(msg)
            else:
                self.held[msg.uid] = msg, job
                passed += [CompileMsg(msg.sampling_params)] if self.announce else []
            if isinstance(msg, AbortMsg):
                self.held.pop(msg.uid, None)
        ready = [uid for uid, (_, job) in self.held.items() if job.done()]
        return passed + [self.held.pop(uid)[0] for uid in ready]


class CompilingChannel:
    """The channel of a rank: what is announced is compiled, the rest goes on."""

    def __init__(self, channel: Channel, grammars: Grammars) -> None:
        self.channel, self.grammars = channel, grammars
        self.send = channel.send

    def recv(self, block: bool) -> list[Msg]:
        messages: Sequence[Any] = self.channel.recv(block)
        for msg in messages:
            if isinstance(msg, CompileMsg):
                self.grammars.start(msg.sampling_params)
        return [msg for msg in messages if not isinstance(msg, CompileMsg)]
