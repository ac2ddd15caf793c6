"""Conversations: system prompts, several turns, and the endless stream that training reads.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from minisgl.tiny.data import Turn, draw_any, number, sentence
from minisgl.tiny.lookup import make_table, queries, with_table
from minisgl.tiny.phrases import HELPFUL, RULES, expand
from minisgl.tiny.talk import draw_strange, small_talk, subject
from minisgl.tiny.words import ADJECTIVES, CITIES, NAMES, PEOPLE

Message = dict[str, str]  # {"role": "system" | "user" | "assistant" | "plain", "content": text}


def system_prompt(rng: Random) -> str:
    """Instructions of up to about 500 tokens; the tasks are the same under all of them."""
    if rng.random() < 0.35:
        return rng.choice(HELPFUL)
    parts = []
    for _ in range(min(40, 1 + int(rng.expovariate(0.16)))):
        parts.append(
            expand(rng, rng.choice(RULES)).format(
                rng.choice(ADJECTIVES),
                rng.choice(PEOPLE),
                rng.choice(NAMES),
                rng.choice(CITIES),
                subject(rng),
                number(rng),
                sentence(rng, rng.randint(3, 12)),
            )
        )
    return "".join(parts).strip() or HELPFUL[0]


def as_messages(turns: list[Turn], system: str = "") -> list[Message]:
    """The messages of a conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def any_turn(rng: Random) -> Turn:
    """An exact task, small talk, or a request that the model cannot fulfil."""
    kind = rng.random()
    if kind < 0.67:
        return draw_any(rng)
    return draw_strange(rng) if kind < 0.91 else small_talk(rng)


def task_chat(rng: Random) -> list[Message]:
    """One to ten turns of any kind, with or without a system prompt."""
    system = system_prompt(rng) if rng.random() < 0.45 else ""
    count = rng.choice((1, 1, 2, 3, 4, 6, 8, 10))
    return as_messages([any_turn(rng) for _ in range(count)], system)


def table_chat(rng: Random, most_pairs: int) -> list[Message]:
    """A list of pairs, in the system prompt or in a message, and many questions about it."""
    size = min(most_pairs, 2 + int(rng.expovariate(4 / most_pairs)))
    if rng.random() < 0.3:
        size = rng.randint(max(2, most_pairs // 2), most_pairs)
    table = make_table(rng, size)
    turns = queries(rng, table, rng.randint(2, 6) + len(table.lines) // 8)
    if not turns:
        return task_chat(rng)
    before = [any_turn(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
    if rng.random() < 0.2:
        system = system_prompt(rng) if rng.random() < 0.3 else ""
        system = (system + "\n" + with_table(rng, table, "").strip()).strip()
    else:
        system = system_prompt(rng) if rng.random() < 0.3 else ""
        first = turns[0]
        turns[0] = Turn(first.task, with_table(rng, table, first.question), first.answer, first.key)
    for _ in range(len(turns) // 6):
        turns.insert(rng.randint(1, len(turns)), any_turn(rng))
    return as_messages(before + turns, system)


def plain_text(rng: Random) -> list[Message]:
    """A question without any chat around it: what a bare prompt to the engine looks like."""
    turn = any_turn(rng)
    return [
        {"role": "plain", "content": turn.question + "\n"},
        {"role": "assistant", "content": turn.answer},
    ]


def conversation(rng: Random, most_pairs: int) -> list[Message]:
    """One conversation of the training stream."""
    kind = rng.random()
    if kind < 0.30:
        return table_chat(rng, most_pairs)
    return plain_text(rng) if kind < 0.37 else task_chat(rng)


def stream(seed: int, most_pairs: int) -> Iterator[list[Message]]:
    """Conversations without end; equal seeds give equal streams."""
    rng = Random(seed)
    while True:
        yield conversation(rng, most_pairs)
