"""Bugs that engines had, put back into the running one for a block.

Chapters 14 to 14m show them. The package never imports this file.
"""

from __future__ import annotations
import __future__

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from textwrap import dedent
from typing import Any
from unittest.mock import patch

from minisgl import LLM, SamplingParams
from minisgl.scheduler.messages import UserMsg
from minisgl.scheduler.scheduler import Scheduler


class Bug(AbstractContextManager["Bug"]):
    """One place of one function of the engine, changed for the length of a block."""

    def __init__(self, function: Callable[..., Any], old: str, new: str) -> None:
        """Compile `function` with `new` in place of `old`; ValueError unless it has `old` once."""
        lines, start = inspect.getsourcelines(function)
        source = dedent("".join(lines))
        if (count := source.count(old)) != 1:
            where = function.__qualname__
            raise ValueError(f"old: must be once in {where}, got {old!r}, which is {count} times")
        self.function, self.old, self.new = function, old, new
        self.texts = source, source.replace(old, new)
        code = compile(
            "\n" * (start - 1) + self.texts[1], inspect.getfile(function), "exec",
            flags=__future__.annotations.compiler_flag, dont_inherit=True,
        )  # fmt: skip
        made: dict[str, Any] = {}
        exec(code, inspect.unwrap(function).__globals__, made)
        owner: Any = sys.modules[function.__module__]
        *path, name = function.__qualname__.split(".")
        for part in path:
            owner = getattr(owner, part)
        self.patch = patch.object(owner, name, made[name])

    def __enter__(self) -> Bug:
        self.patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.stop()

    def __str__(self) -> str:
        """Return the changed lines as a diff, each with its neighbours."""
        before, after = (text.splitlines() for text in self.texts)
        lines = difflib.unified_diff(before, after, n=1, lineterm="")
        kept = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        return "\n".join([self.function.__qualname__, *kept])


def conversation(question: str) -> list[dict[str, str]]:
    """Return a conversation that begins with a question."""
    return [{"role": "user", "content": question}]


def ask(llm: LLM, *questions: str, **params: Any) -> list[str]:
    """Answer questions, all at once and greedily unless `params` has another temperature."""
    chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | params))
    return [out["text"] for out in llm.chat([conversation(text) for text in questions], chosen)]


def steps(llm: LLM, *questions: str, **params: Any) -> Iterator[Scheduler]:
    """Answer questions one step of the engine at a time; yield its scheduler after each step."""
    assert llm.tokenizer is not None
    scheduler, chosen = llm.scheduler, SamplingParams(**({"temperature": 0.0} | params))
    first, llm.next_uid = llm.next_uid, llm.next_uid + len(questions)
    for uid, text in enumerate(questions, start=first):
        ids = llm.tokenizer.apply_chat(conversation(text))
        llm.channel.put_messages(UserMsg(uid, ids.tolist(), chosen))
    while llm.channel.waiting or scheduler.has_work:
        (scheduler.step_overlap if scheduler.overlap else scheduler.step)()
        yield scheduler
    llm.channel.take_replies()
