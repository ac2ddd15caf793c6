"""Answers that keep to a grammar: compile it, follow the answer, mask what may not come next.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask_par

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens
from minisgl.scheduler.messages import InvalidRequestError, UserMsg
from minisgl.scheduler.validation import Limits, make_req

MAX_BYTES = 16 * 1024  # of a grammar's text
MAX_MULTIPLES = 1000  # sum of all `multipleOf` of a schema: each takes as many states
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=10_000,
    max_lexer_states=10_000, max_grammar_size=20_000, verbose_errors=False,
)  # fmt: skip
ONE_LINE: Any = {  # else a model may answer with spaces for ever
    "whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?",
}  # fmt: skip


def schema_grammar(schema: str) -> str:
    """A JSON schema in llguidance's form."""
    multiples = re.findall(r'"multipleOf": ([0-9.]+)', schema)
    digits = [number.replace(".", "").strip("0") for number in multiples]
    if sum(map(int, filter(None, digits))) > MAX_MULTIPLES:
        raise ValueError(f"the digits of all multipleOf must add up to {MAX_MULTIPLES} at most")
    return LLMatcher.grammar_from_json_schema(schema, defaults=ONE_LINE)


def free_grammar(text: str) -> str:
    """A grammar in Lark's or llama.cpp's notation (GBNF); it embeds no schema."""
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


def asked_for(params: SamplingParams) -> tuple[str, str] | None:
    """The field that constrains an answer, and its grammar as text; None for a free answer."""
    texts: dict[str, Any] = {
        "json_schema": params.json_schema,
        "json_object": '{"type": "object"}' if params.json_object else None,
        "regex": params.regex,
        "choice": json.dumps(params.choice) if params.choice else None,
        "grammar": params.grammar,
    }
    return next(((field, text) for field, text in texts.items() if text is not None), None)


def compile_grammar(tokenizer: LLTokenizer | str, field: str, text: str) -> LLMatcher:
    """A matcher before its first token; `InvalidRequestError` names the field and the reason."""
    try:
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"must have at most {MAX_BYTES} bytes, got {len(text.encode())}")
        matcher = LLMatcher(tokenizer, FORMS[field](text), log_level=0, limits=LIMITS)
        if matcher.is_error():  # it never raises
            raise ValueError(matcher.get_error())
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {error}", param=field) from None
    return matcher


class Matcher:
    """Follows one answer through its grammar. What it knows is a function of the answer alone."""

    def __init__(self, start: LLMatcher, field: str) -> None:
        self.ll, self.field = start.deep_copy(), field
        self.seen = 0  # tokens of the answer that it has accepted

    @property
    def error(self) -> str:
        """Why the answer cannot go on, or nothing."""
        return f"{self.field}: {self.ll.get_error()}" if self.ll.is_error() else ""

    def follow(self, output_ids: IntArray) -> None:
        """Accept what the answer has got since the last call."""
        for token in output_ids[self.seen :].tolist():
            self.ll.consume_token(token)
        self.seen = len(output_ids)


class DeferredOutput(ForwardOutput):
    """A step whose draw waits for the step before; `wait` draws, if nothing did so earlier."""

    def __init__(self, draw: Callable[[], ForwardOutput]) -> None:
        self.draw = cache(draw)

    def wait(self) -> SampledTokens:
        return self.draw().wait()


class Grammars:
    """Compiles grammars for one model, keeps the last ones, and fills masks before a draw."""

    def __init__(self, tokenizer: LLTokenizer | str, keep: int = 64) -> None:
        """`tokenizer` knows the model's vocabulary and end tokens, or says why there is none."""
        self.tokenizer = tokenizer
        self.waiting: DeferredOutput | None = None  # the last step, if it is not drawn yet
        self.executor = LLExecutor(1)  # one call for a batch, in one thread
        self.compile = lru_cache(keep)(partial(compile_grammar, tokenizer))

    def make_req(self, msg: UserMsg, limits: Limits) -> Req:
        """The request that a message asks for, with its matcher; raises `InvalidRequestError`."""
        req, asked = make_req(msg, limits), asked_for(msg.sampling_params)
        if asked is not None:
            req.matcher = Matcher(self.compile(*asked), asked[0])
            req.logits_params = req.logits_params or LogitsParams()
            req.logits_params.mask = np.full(-(-limits.vocab_size // 32), -1, np.int32)
        return req

    def fill_masks(self, fi: ForwardInput) -> None:
        """Write the masks of a step: what each constrained request may say next."""
        assert fi.sampling is not None
        rows, masks = fi.sampling.processing.mask_rows, fi.sampling.processing.masks
        todo = []
        for index, row in enumerate(rows):
            req = fi.sampled[row]
            if req.matcher is not None:
                req.matcher.follow(req.output_ids)
                todo.append((req.matcher.ll, index))
        fill_next_token_bitmask_par(self.executor, todo, masks)

    def defer(self, fi: ForwardInput, draw: Callable[[], ForwardOutput]) -> ForwardOutput:
        """Keep a draw that needs masks; others are done at once."""
        processed = fi.sampling is not None and fi.sampling.processing is not None
        if not processed or all(req.matcher is None for req in fi.sampled):
            return draw()

        def masked() -> ForwardOutput:
            self.fill_masks(fi)
            return draw()

        self.waiting = DeferredOutput(masked)
        return self.waiting

    def draw(self) -> None:
        """Fill the masks of the step that waits, if one does, and draw it."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.draw()


def load_grammars(folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars:
    """Grammars for the model in a folder; without a usable tokenizer each is refused, and why."""
    try:
        text = (folder / "tokenizer.json").read_text("utf-8")
        return Grammars(LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)))
    except (OSError, ValueError) as error:
        return Grammars(f"the model's tokenizer cannot be used: {error}")
