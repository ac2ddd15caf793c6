"""Text to token ids and back: chat templates, and text that grows token by token.

Generated from notebooks/06b_tokenizer.ipynb: edit there.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.core import IntArray, SamplingParams, check_values, load_json


def check_unicode(name: str, text: object) -> str:
    """Return `text` if it is a string that UTF-8 can encode; raise ValueError otherwise."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"unpaired surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"{name}: not valid Unicode, {why}") from None
    return text


THINK = "<think>"  # where a reasoning model begins to think, possibly in the prompt
THOUGHT = "</think>"  # and where it ends
MARKERS = {THINK, THOUGHT, "<tool_call>", "</tool_call>", "<|python_tag|>"}
MARKERS |= {"[TOOL_CALLS]", "[ARGS]"}


def with_markers(backend: Any) -> Any:
    """Return the tokenizer with the markers of thoughts and calls made ordinary tokens."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in MARKERS for token in added):
        return backend
    about = json.loads(backend.to_str())
    for token in about["added_tokens"]:
        token["special"] &= token["content"] not in MARKERS
    return type(backend).from_str(json.dumps(about))


SLICE = 8192  # characters


class PromptTooLong(ValueError):
    """The error for a prompt that does not fit the context window."""

    code = "context_length_exceeded"


class Tokenizer:
    """A model's tokenizer, read from its folder: encode, render a chat, decode."""

    def __init__(self, path: str | Path) -> None:
        from minisgl.tokenizer_files import ChatTemplates, has_plain_rules, read_tokenizer  # late

        files = read_tokenizer(Path(path))
        self.backend: Any = with_markers(files.backend)
        self.templates = ChatTemplates(files.templates, files.special_tokens)
        self.roles = {a: b for a, b in ROLES.items() if a not in str(files.templates)}
        self.vocab_size: int = self.backend.get_vocab_size()  # ids are below it
        eos = self.backend.token_to_id(files.special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        added = self.backend.get_added_tokens_decoder().items()
        self.special = {token.content: token_id for token_id, token in added if token.special}
        self.longest = max(map(len, self.backend.get_vocab()), default=1)  # characters of a token
        if self.longest > SLICE // 8:
            raise ValueError(f"tokenizer: {path}: a token has {self.longest} characters")
        self.quick = SLICE if has_plain_rules(self.backend) else 0  # characters: milliseconds

    def decode(self, ids: Sequence[int] | NDArray[Any], skip_special: bool = True) -> str:
        """Decode token ids; broken UTF-8 becomes U+FFFD. Raise `ValueError` if that fails."""
        try:
            return str(self.backend.decode([*map(int, ids)], skip_special_tokens=skip_special))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no `Exception`
            raise ValueError(f"the tokenizer cannot decode the tokens: {error}") from error

    def encode(
        self, text: str, add_special_tokens: bool = True, window: int | None = None
    ) -> IntArray:
        """Encode a prompt to token ids, int32 [n], with BOS where the model expects one.

        Raise `PromptTooLong` for more than `window` tokens, after encoding few more than those.
        """
        check_unicode("prompt", text)
        if window is not None and len(text) > 2 * window:
            self.check_length(text, window)
        ids = self.ids_of(text, add_special_tokens)
        if window is not None and len(ids) > window:
            raise PromptTooLong(f"{len(ids)} tokens are too many for a window of {window} tokens")
        return np.array(ids, dtype=np.int32)

    def ids_of(self, text: str, special: bool) -> list[int]:
        """Encode a text, perhaps with BOS; raise `ValueError` if the library cannot."""
        try:  # a batch, unlike a single text, is encoded without the interpreter lock
            return list(self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from error

    def check_length(self, text: str, window: int) -> None:
        """Encode slices of a text until it is certain that it has more than `window` tokens."""
        count, over = 0, f"too many for a window of {window} tokens"
        if len(text) > 4 * window * self.longest:
            raise PromptTooLong(f"{len(text)} characters are {over}")
        for start in range(0, len(text), SLICE):
            count += len(self.ids_of(text[start : start + SLICE], False)) - self.longest
            if count > window:
                raise PromptTooLong(f"{count} tokens or more are {over}")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render a conversation by the chat template, up to where the answer begins.

        The template reads `variables`, such as `enable_thinking`. One of them,
        `continue_final_message=True`, leaves the last message open instead.
        """
        checked = check_messages(messages, self.roles)
        open_end = {"add_generation_prompt": not variables.get("continue_final_message")}
        try:
            return self.templates.render(checked, **{**open_end, **variables})
        except ValueError:
            raise
        except Exception as error:  # a template may raise any error
            raise ValueError(f"messages: refused by the chat template: {error}") from error

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> IntArray:
        """Encode a rendered conversation to ids, int32 [n]; BOS comes from the template alone."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def encode_params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with token ids for bad words and for special tokens in `stop`."""
        for text in params.stop:
            ids = set[int]() if text in self.special else {*self.ids_of(text, False)}
            if inside := [name for name, token_id in self.special.items() if token_id in ids]:
                why = f"{inside[0]!r} is a special token, which is not text; give it alone"
                raise ValueError(f"stop: must not hold a special token, got {text!r:.80} ({why})")
        ends = [self.special[text] for text in params.stop if text in self.special]
        if ends:
            rest = tuple(text for text in params.stop if text not in self.special)
            params = replace(params, stop=rest, stop_token_ids=(*params.stop_token_ids, *ends))
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                bare = word.lstrip(" ")
                texts = (bare, " " + bare) if bare else (word,)
                found += [
                    tuple(self.encode(text, add_special_tokens=False).tolist()) for text in texts
                ]
            else:
                found.append(tuple(word))
        return replace(params, bad_words=tuple(ids for ids in dict.fromkeys(found) if ids))


def has_tokenizer(folder: Path) -> bool:
    """Return True if there is a tokenizer beside the model; else prompts must be token ids."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder, or return None if it has none."""
    return Tokenizer(folder) if has_tokenizer(folder) else None


def text_size(value: object) -> int:
    """Return the bytes of a message, a tool or a list of them; many if they cannot be sent."""
    try:
        return len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError):  # to be refused where its text is made
        return 2**31


def text_of(name: str, content: object) -> str:
    """Join a message's content into one string; None is empty."""
    if not isinstance(content, list | tuple):
        return check_unicode(name, "" if content is None else content)
    texts = [part.get("text", part.get("refusal", part)) if isinstance(part, Mapping) else part
             for part in content]  # fmt: skip
    return "".join(check_unicode(f"{name}[{index}]", text) for index, text in enumerate(texts))


ROLES = {"developer": "system"}  # for templates without the first


def parsed(call: Any) -> Any:
    """Return a tool call as templates read it: arguments that are a JSON object become a dict."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    given = arguments = call["function"].get("arguments")
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        arguments = {}
    elif isinstance(given, str):
        with suppress(ValueError, RecursionError):
            found = load_json(given)
            with suppress(OverflowError):  # an integer of more than 64 bits
                msgspec.msgpack.encode(found)  # half a character may be escaped
            arguments = found if isinstance(found, dict) else given
    return {**call, "function": {**call["function"], "arguments": arguments}}


def check_arguments(messages: Sequence[Any]) -> None:
    """Raise `ValueError` if the arguments of all calls have too many values to be parsed."""
    calls = [m.get("tool_calls") for m in messages if isinstance(m, Mapping)]
    given = [call.get("function") for each in calls if isinstance(each, list | tuple)
             for call in each if isinstance(call, Mapping)]  # fmt: skip
    texts = [function.get("arguments") for function in given if isinstance(function, Mapping)]
    try:
        check_values(*(t.encode(errors="surrogatepass") for t in texts if isinstance(t, str)))
    except ValueError as error:
        raise ValueError(f"messages: arguments of tool calls: {error}") from None


def check_messages(messages: Sequence[Any], roles: Mapping[str, str] = ROLES) -> list[Any]:
    """Check a conversation and return dicts with string role and content; ValueError if invalid.

    `roles` holds the other names of roles that the chat template does not mention.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or len(messages) == 0:
        raise ValueError("messages: must be a non-empty list of {role, content}")
    check_arguments(messages)
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not message.keys() & {"content", "tool_calls"}:
            what = f"must be {{role, content}}, got {message!r:.80}"
            raise ValueError(f"messages[{index}]: {what}")
        role = check_unicode(f"messages[{index}].role", message.get("role"))
        role = roles.get(role, role)
        content = text_of(f"messages[{index}].content", message.get("content"))
        checked.append({**message, "role": role, "content": content})
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            checked[-1]["tool_calls"] = [parsed(call) for call in calls]
    return checked


REPLACEMENT = "\ufffd"  # stands for invalid or incomplete bytes
MAX_PENDING = 32


class IncrementalDetokenizer:
    """Token ids in, text out: complete characters at once, an incomplete one when it is whole.

    `prefix` holds the last tokens that were sent in full, `pending` those after them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self.decode = tokenizer.decode
        self.prefix = [int(token) for token in prompt_ids[-16:]]
        self.prefix_text = self.decode(self.prefix)
        self.pending: list[int] = []
        self.sent = 0  # characters of the pending tokens that are already sent

    def fresh(self) -> str:
        """Decode the pending tokens in the context of the prefix."""
        text = self.decode(self.prefix + self.pending)
        if text.startswith(self.prefix_text):
            return text[len(self.prefix_text) :]
        self.prefix, self.prefix_text = [], ""
        return self.decode(self.pending)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now final."""
        self.pending.append(int(token_id))
        text = self.fresh()
        open_bytes = len(text) - len(text.rstrip(REPLACEMENT))
        held = 0 if len(self.pending) > MAX_PENDING else min(open_bytes, 3)
        new = text[self.sent : len(text) - held]
        self.sent = max(self.sent, len(text) - held)
        if held == 0 and (text or len(self.pending) > MAX_PENDING):  # special tokens are no text
            self.settle()
        return new

    def settle(self) -> None:
        """Make all pending tokens the prefix."""
        self.prefix, self.prefix_text = self.pending, self.decode(self.pending)
        self.pending, self.sent = [], 0

    def finish(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        rest = self.fresh()[self.sent :] if self.pending else ""
        self.settle()
        return rest


class StopStrings:
    """An Aho-Corasick automaton of stop strings. Its links are computed as texts need them.

    A state is a place in `text`, which has one string after another: the read text ends with
    the characters of a string up to that place. Strings share the states of a common beginning.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        kept: list[str] = []
        for string in sorted(stop):
            if not (kept and string.startswith(kept[-1])):  # else the shorter one ends it first
                kept.append(string)
        self.text = "\0".join(kept)
        self.starts = [0, *accumulate(len(string) + 1 for string in kept)][: len(kept)]
        self.ends = {at + len(s): s for at, s in zip(self.starts, kept, strict=True)}  # by state
        self.links = array("i", [-1]) * (len(self.text) + 1)  # -1: not computed
        self.first = frozenset(string[0] for string in kept)
        self.branches: dict[tuple[int, str], int] = {}  # next states in another string
        shared = [-1, *(common(a, b) for a, b in pairwise(kept))]
        for index in range(1, len(kept)):
            length, owner = shared[index], index - 1
            while shared[owner] >= length:
                owner -= 1
            state = self.starts[owner] + length
            after = self.starts[index] + length + 1
            self.branches[state, kept[index][length]] = after

    def depth(self, state: int) -> int:
        """Count the characters of a state."""
        return state - self.starts[bisect_right(self.starts, state) - 1]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        text, links, found = self.text, self.links, list[int]()
        while True:
            after = state + 1 if text[state] == char else self.branches.get((state, char), 0)
            if after:
                found.append(after)
                if links[after] >= 0:
                    break
            if not state:
                found.append(0)
                break
            state = links[state]
        for longer, shorter in reversed([*pairwise(found)]):  # the links that were missing
            links[longer] = shorter
            if longer not in self.ends and shorter in self.ends:
                self.ends[longer] = self.ends[shorter]
        return found[0]


def common(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two strings."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: a[:n] != b[:n])


stop_strings = lru_cache(16)(StopStrings)  # the answers of one request share an automaton


class StopFilter:
    """Passes text on up to the first stop string; holds back a possible start of one.

    With `spare_thoughts`, stop strings in a thought are ignored; `thinking`: the prompt began one.
    """

    def __init__(
        self, stop: Sequence[str] = (), spare_thoughts: bool = False, thinking: bool = False
    ) -> None:
        if any(not text for text in stop):
            raise ValueError("stop: must not contain an empty string")
        self.strings = stop_strings(tuple(stop)) if stop else None
        self.held, self.state = "", 0  # if the state is 0, the text held was not searched
        self.found: str | None = None  # the stop string that ended the text
        self.in_thought = spare_thoughts and thinking
        self.opening = spare_thoughts and not thinking  # a thought may still begin

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self.found is not None

    def release(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self.held, self.state = self.held, "", 0
        return held

    def push(self, text: str) -> str:
        """Take new text; return the text that can no longer be part of a stop string."""
        if self.stopped or self.strings is None:
            return text if self.strings is None else ""
        if not self.state:
            text, self.held = self.held + text, ""
        if self.opening:
            body = skip_blank(text)
            if THINK.startswith(body):
                self.held = text
                return ""
            self.opening, self.in_thought = False, body.startswith(THINK)
        if self.in_thought:
            thought, end, rest = text.partition(THOUGHT)
            if not end:
                keep = overlap(text, THOUGHT)
                self.held = text[len(text) - keep :]
                return text[: len(text) - keep]
            self.in_thought = False
            return thought + end + self.search(self.strings, rest)
        return self.search(self.strings, text)

    def search(self, strings: StopStrings, text: str) -> str:
        """Search new text; return the text that can no longer be part of a stop string."""
        if not self.state and strings.first.isdisjoint(text):
            return text
        whole, state, known = self.held + text, self.state, strings.links
        for after, char in enumerate(text, len(self.held) + 1):
            if strings.text[state] == char and known[state + 1] >= 0:
                state += 1  # without a call
            elif state or char in strings.first:
                state = strings.step(state, char)
            if state in strings.ends:
                self.found, self.held = strings.ends[state], ""
                return whole[: after - len(self.found)]
        self.state, certain = state, len(whole) - strings.depth(state)
        self.held = whole[certain:]
        return whole[:certain]


MAX_BLANK = 1024  # characters of white space that may wait for what follows


def skip_blank(text: str) -> str:
    """Drop white space at the beginning, `MAX_BLANK` characters of it at most."""
    return text[:MAX_BLANK].lstrip() + text[MAX_BLANK:]


def drop_blank(text: str) -> str:
    """Drop white space at the end, `MAX_BLANK` characters of it at most."""
    return text[:-MAX_BLANK] + text[-MAX_BLANK:].rstrip()


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of a short `mark` that `text` ends with."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class DecodeStatus:
    """The text of one request: token ids go in, text comes out as soon as it is final."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        spare_thoughts: bool = False,
    ) -> None:
        self.skipped = frozenset(tokenizer.eos_token_ids)
        self.stream = IncrementalDetokenizer(tokenizer, prompt_ids)
        self.thinking = self.stream.prefix_text.rstrip().endswith(THINK)  # since the prompt
        self.filter = StopFilter(stop, spare_thoughts, self.thinking)
        self.num_tokens = self.thought_tokens = 0  # the latter: up to the end of the first thought
        self.tail = ""  # the last characters

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; the text ends before it."""
        return self.filter.stopped

    def push(self, token_id: int) -> str:
        """Take the next token; return the new text, perhaps none. An EOS token is not text."""
        if self.stopped or token_id in self.skipped:
            return ""
        return self.filter.push(self.stream.push(token_id))

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        self.filter.opening = False
        rest = self.filter.push(self.stream.finish())
        return rest + self.filter.release()

    def take(self, token_id: int | None, reason: str | None) -> str:
        """Return the text that one reply completes; a `reason` marks the last reply."""
        self.num_tokens += token_id is not None
        new = "" if token_id is None or reason == "stop" else self.push(token_id)  # an end token
        new = new if reason is None or self.stopped else new + self.finish()
        if not self.thought_tokens and THOUGHT in self.tail + new:
            self.thought_tokens = self.num_tokens
        self.tail = (self.tail + new)[1 - len(THOUGHT) :]
        return new
