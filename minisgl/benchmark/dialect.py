"""How to say "a prompt of n tokens, m new ones" to a server that we do not know.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minisgl.benchmark.client import Api, Record

COMMON = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work night point
home water room mother area money story fact month lot right study book eye job word business
issue side kind head house service friend father power hour game line end member law car city
"""
WORDS = COMMON.split()
LOW, HIGH = (
    100,
    1100,
)  # token ids that we draw: no special tokens, and no small vocabulary ends here


@dataclass(frozen=True)
class Dialect:
    """What a server takes, found out by asking."""

    model: str
    chat: bool = False
    ids: bool = False  # prompts as token ids
    usage: bool = True  # `stream_options.include_usage`
    ignore_eos: bool = False
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0  # of the chat template

    @property
    def path(self) -> str:
        return "chat/completions" if self.chat else "completions"

    def prompt(self, ids: Sequence[int]) -> list[int] | str:
        """The prompt as the server takes it: ids, or about as many tokens in words."""
        if self.ids:
            return [int(token) for token in ids]
        count = max(1, round((len(ids) - self.extra_tokens) / self.tokens_per_word))
        return " ".join(WORDS[token % len(WORDS)] for token in ids[:count])

    def body(self, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The whole request, streamed."""
        prompt: Any = self.prompt(ids)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {}
        return {
            "model": self.model, **(asked or {"prompt": prompt}), "max_tokens": max_tokens,
            "temperature": 0, "stream": True,
            **({"stream_options": {"include_usage": True}} if self.usage else {}),
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }  # fmt: skip


TAKE_IGNORE_EOS = ("minisgl", "mini-sglang", "sglang", "vllm")


async def probe(api: Api, dialect: Dialect, count: int) -> Record:
    """One tiny request with a prompt of `count` ids."""
    record = Record()
    ids = [LOW + (7 * i) % (HIGH - LOW) for i in range(count)]
    await api.send(dialect.path, dialect.body(ids, 2), record, time.perf_counter)
    return record


async def calibrated(api: Api, dialect: Dialect) -> Dialect:
    """A dialect of words that knows how many tokens they are: a line through two probes."""
    short, long = [(await probe(api, dialect, count)).prompt_tokens for count in (8, 72)]
    if long <= short:  # the server does not count
        return dialect
    slope = max(1.0, (long - short) / 64)
    return replace(dialect, tokens_per_word=slope, extra_tokens=max(0.0, short - 8 * slope))


def variants(first: Dialect) -> list[Dialect]:
    """Ways to speak, the best first; the last resort of a completion is a chat."""
    exact = [] if first.chat else [replace(first, ids=True)]
    ways = [*exact, first, *(replace(d, usage=False) for d in [*exact, first])]
    chat = replace(first, chat=True)
    return ways if first.chat else [*ways, chat, replace(chat, usage=False)]


async def negotiate(
    api: Api, model: str | None = None, *, chat: bool = False, ignore_eos: bool | None = None
) -> tuple[Dialect, list[str]]:
    """What to speak with a server, and notices of what it cannot do.

    Raises `ConnectionError` if it refuses every way, with the first reason.
    """
    card: dict[str, Any] = {}
    if model is None or ignore_eos is None:
        cards = await api.models()
        named = [c for c in cards if model in (None, c.get("id"))]
        card = named[0] if named else {}
        if model is None and not card.get("id"):
            raise ConnectionError(f"url: {api.url}models names no model; say --model")
    if ignore_eos is None:
        ignore_eos = card.get("owned_by") in TAKE_IGNORE_EOS
    first = Dialect(model or str(card["id"]), chat, ignore_eos=ignore_eos)
    failures = []
    for dialect in variants(first):
        answer = await probe(api, dialect, 4)
        if answer.error in (None, "empty"):
            return await settled(api, dialect, answer)
        failures.append(f"{answer.error}: {answer.detail}")
        if answer.error in ("connect", "timeout", "http 401", "http 403"):
            break  # another spelling will not help
    raise ConnectionError(f"url: {api.url}{first.path} refuses a small request ({failures[0]})")


async def settled(api: Api, dialect: Dialect, answer: Record) -> tuple[Dialect, list[str]]:
    """The last questions to a server that has answered, and what to tell the user."""
    notices = []
    if dialect.chat:
        notices.append("prompts are chats of one message")
    if not answer.counted:
        notices.append("the server gives no usage: every chunk counts as one token")
    if not dialect.ids:
        dialect = await calibrated(api, dialect)
        about = f"{dialect.tokens_per_word:.2f} tokens a word" if answer.counted else "not counted"
        notices.append(f"prompts are words, their length is about right ({about})")
    if not dialect.ignore_eos:
        notices.append("ignore_eos is not sent: answers may end early (--ignore-eos to send it)")
    return dialect, notices
