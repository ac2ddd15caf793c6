"""Text to token ids and back: chat templates, and text that grows token by token.

Generated from notebooks/06b_tokenizer.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.core import IntArray, SamplingParams


def check_unicode(name: str, text: object) -> str:
    """Return `text` if it is a string that UTF-8 can carry; ValueError says what is wrong."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{name}: not valid Unicode, unpaired surrogate U+{code:04X} at character {error.start}"
        ) from None
    return text


THINK = "<think>"  # where a reasoning model begins to think, be it in the prompt
MARKERS = {THINK, "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"}
MARKERS |= {"[TOOL_CALLS]", "[ARGS]"}


def with_markers(backend: Any) -> Any:
    """The same tokenizer, to which the markers of thoughts and calls are no special tokens."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in MARKERS for token in added):
        return backend
    about = json.loads(backend.to_str())
    for token in about["added_tokens"]:
        token["special"] &= token["content"] not in MARKERS
    return type(backend).from_str(json.dumps(about))


class Tokenizer:
    """A model's tokenizer, read from its folder: encode, render a chat, decode."""

    def __init__(self, path: str | Path) -> None:
        from minisgl.tokenizer_files import ChatTemplates, read_tokenizer  # only where one is built

        files = read_tokenizer(Path(path))
        self.backend: Any = with_markers(files.backend)
        self.templates = ChatTemplates(files.templates, files.special_tokens)
        self.vocab_size: int = self.backend.get_vocab_size()  # ids are below it
        eos = self.backend.token_to_id(files.special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)

    def encode(self, text: str, add_special_tokens: bool = True) -> IntArray:
        """Token ids of a prompt, int32 [n], with BOS where the model wants one."""
        check_unicode("prompt", text)
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of token ids; special tokens are no text, broken UTF-8 becomes U+FFFD."""
        return str(self.backend.decode([int(token) for token in ids], skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as the model was trained to see it, up to where the answer begins.

        The template reads `variables`, such as `enable_thinking`. One of them,
        `continue_final_message=True`, leaves the last message open instead.
        """
        checked = check_messages(messages)
        open_end = {"add_generation_prompt": not variables.get("continue_final_message")}
        try:
            return self.templates.render(checked, **{**open_end, **variables})
        except ValueError:
            raise
        except (
            Exception
        ) as error:  # a template is code of the model's author and refuses as it likes
            raise ValueError(f"messages: refused by the chat template: {error}") from error

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> IntArray:
        """Token ids of a rendered conversation, int32 [n]; BOS comes from the template alone."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The same parameters, bad words as token ids: a text with and without a space before."""
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
    """Whether there is a tokenizer beside the model; without one, prompts must be token ids."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, if it has one."""
    return Tokenizer(folder) if has_tokenizer(folder) else None


def text_size(value: object) -> int:
    """Characters of all texts in a message, a tool or a list of them."""
    todo, size = [value], 0
    while todo:
        match todo.pop():
            case str(text):
                size += len(text)
            case Mapping() as mapping:
                todo += [*mapping, *mapping.values()]
            case list() | tuple() as values:
                todo += values
    return size


def text_of(name: str, content: object) -> str:
    """A message's content as one string: text parts are joined, None is empty."""
    if not isinstance(content, list | tuple):
        return check_unicode(name, "" if content is None else content)
    texts = [p.get("text") if isinstance(p, Mapping) and "text" in p else p for p in content]
    return "".join(check_unicode(f"{name}[{index}]", text) for index, text in enumerate(texts))


def parsed(call: Any) -> Any:
    """A call of a tool as templates want it: its arguments, if they are an object, as a dict."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        arguments = json.loads(call["function"]["arguments"])
        json.dumps(arguments, ensure_ascii=False).encode()  # half a character may be escaped
        if isinstance(arguments, dict):
            return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as dicts whose role and content are strings; ValueError says which is not."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or len(messages) == 0:
        raise ValueError("messages: must be a non-empty list of {role, content}")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "content" not in message:
            what = f"must be {{role, content}}, got {message!r:.80}"
            raise ValueError(f"messages[{index}]: {what}")
        check_unicode(f"messages[{index}].role", message.get("role"))
        content = text_of(f"messages[{index}].content", message.get("content"))
        checked.append({**message, "content": content})
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            checked[-1]["tool_calls"] = [parsed(call) for call in calls]
    return checked


REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not yet
MAX_PENDING = 32


class IncrementalDetokenizer:
    """Token ids in, text out: what is complete at once, the rest of a character when it comes.

    `prefix` holds the last tokens that were sent in full, `pending` those after them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self.decode = tokenizer.decode
        self.prefix = [int(token) for token in prompt_ids[-16:]]
        self.prefix_text = self.decode(self.prefix)
        self.pending: list[int] = []
        self.sent = 0  # characters of the pending tokens that are out already

    def fresh(self) -> str:
        """Text of the pending tokens, as it reads after the prefix."""
        text = self.decode(self.prefix + self.pending)
        if text.startswith(self.prefix_text):
            return text[len(self.prefix_text) :]
        self.prefix, self.prefix_text = [], ""
        return self.decode(self.pending)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now certain."""
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
        """Everything pending is out: it becomes the prefix."""
        self.prefix, self.prefix_text = self.pending, self.decode(self.pending)
        self.pending, self.sent = [], 0

    def finish(self) -> str:
        """The rest: a character that will never be complete, as U+FFFD."""
        rest = self.fresh()[self.sent :] if self.pending else ""
        self.settle()
        return rest


class StopFilter:
    """Passes text on up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise ValueError("stop: must not contain an empty string")
        self.stop = tuple(stop)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take new text; return what can no longer be part of a stop string."""
        if self.stopped:
            return ""
        text = self.held + text
        found = [(at + len(s), at) for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)[1]]
        keep = max((overlap(text, s) for s in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, shorter than `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class DecodeStatus:
    """The text of one request: token ids go in, text comes out as soon as nothing can change it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self.skipped = frozenset(tokenizer.eos_token_ids)
        self.stream = IncrementalDetokenizer(tokenizer, prompt_ids)
        self.filter = StopFilter(stop)
        self.thinking = self.stream.prefix_text.rstrip().endswith(THINK)  # since the prompt

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
        """The text that was held back, now that no token follows."""
        rest = self.filter.push(self.stream.finish())
        held, self.filter.held = self.filter.held, ""
        return rest + held

    def take(self, token_id: int | None, reason: str | None) -> str:
        """The text that one reply of a scheduler completes; `reason` says that it is the last."""
        new = "" if token_id is None or reason == "stop" else self.push(token_id)  # an end token
        return new if reason is None or self.stopped else new + self.finish()
