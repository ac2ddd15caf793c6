"""Conversations: system prompts, several turns, and the endless stream for training.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from training.data import Turn, draw_any, number
from training.lookup import make_table, queries, with_table
from training.phrases import CANNOT, SUBJECTS, expand
from training.records import draw_json
from training.tables import TABLES
from training.talk import draw_strange, small_talk, subject
from training.tools import Message, Tool, call_turn, some_tools
from training.words import ADJECTIVES, CITIES, NAMES, PEOPLE, sentence


def system_prompt(rng: Random) -> str:
    """Write instructions of up to about 500 tokens; they do not change the tasks."""
    if rng.random() < 0.35:
        return rng.choice(TABLES["system"]["helpful"])
    parts = []
    for _ in range(min(40, 1 + int(rng.expovariate(0.16)))):
        parts.append(
            expand(rng, rng.choice(TABLES["system"]["rules"])).format(
                rng.choice(ADJECTIVES),
                rng.choice(PEOPLE),
                rng.choice(NAMES),
                rng.choice(CITIES),
                subject(rng),
                number(rng),
                sentence(rng, rng.randint(3, 12)),
            )
            + rng.choice((" ", " ", " ", "\n"))
        )
    return "".join(parts).strip() or TABLES["system"]["helpful"][0]


def maybe_system(rng: Random, share: float) -> str:
    """Return a system prompt with probability `share`, else an empty text."""
    return system_prompt(rng) if rng.random() < share else ""


def as_messages(turns: list[Turn], system: str = "") -> list[Message]:
    """Build the messages of a conversation."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer, "given": turn.given})
    return messages


def any_turn(rng: Random) -> Turn:
    """Sample an exact task, JSON, small talk, or a request that the model cannot fulfil."""
    kind = rng.random()
    if kind < 0.58:
        return draw_any(rng)
    if kind < 0.73:
        return draw_json(rng)
    return draw_strange(rng) if kind < 0.93 else small_talk(rng)


def task_chat(rng: Random) -> list[Message]:
    """Sample one to ten turns of any kind, with or without a system prompt."""
    count = rng.choice((1, 1, 2, 3, 4, 6, 8, 10))
    return as_messages([any_turn(rng) for _ in range(count)], maybe_system(rng, 0.4))


def table_chat(rng: Random, most_pairs: int) -> list[Message]:
    """Sample a list of pairs, in the system prompt or a message, and questions about it."""
    size = min(most_pairs, 2 + int(rng.expovariate(4 / most_pairs)))
    if rng.random() < 0.3:
        size = rng.randint(max(2, most_pairs // 2), most_pairs)
    table = make_table(rng, size)
    turns = queries(rng, table, rng.randint(2, 6) + len(table.lines) // 8)
    if not turns:
        return task_chat(rng)
    before = [any_turn(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
    system = maybe_system(rng, 0.3)
    if rng.random() < 0.2:
        system = (system + "\n" + with_table(rng, table, "").strip()).strip()
    else:
        first = turns[0]
        turns[0] = Turn(first.task, with_table(rng, table, first.question), first.answer, first.key)
    for _ in range(len(turns) // 6):
        turns.insert(rng.randint(1, len(turns)), draw_any(rng))
    return as_messages(before + turns, system)


def toolless_turn(rng: Random, tools: list[Tool]) -> Turn:
    """Sample a turn without a tool call: the model answers, or declines."""
    topics = {tool.topic for tool in tools}
    if rng.random() < 0.25:  # a request for a missing tool
        missing = [tool for tool in some_tools(rng, 3) if tool.topic not in topics | {"arithmetic"}]
        if missing:
            return Turn("cannot", call_turn(rng, missing[:1])[0].question, CANNOT)
    common = any(topic.startswith("tool ") or topic in SUBJECTS for topic in topics)
    while True:
        turn = any_turn(rng)
        computed = "arithmetic" in topics and turn.task in ("add", "cannot")
        if not computed and not (common and turn.task == "cannot"):
            return turn


def tool_chat(rng: Random) -> list[Message]:
    """Sample one to four turns with tools."""
    tools = some_tools(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    messages: list[Message] = [{"role": "tools", "tools": [tool.schema for tool in tools]}]
    messages += as_messages([], maybe_system(rng, 0.4))
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        if rng.random() < 0.72:
            messages += call_turn(rng, tools)[1]
        else:
            messages += as_messages([toolless_turn(rng, tools)])
    return messages


def plain_text(rng: Random) -> list[Message]:
    """Sample a question without a chat around it, as a bare prompt."""
    turn = any_turn(rng)
    return [
        {"role": "plain", "content": turn.question + "\n"},
        {"role": "assistant", "content": turn.answer, "given": turn.given},
    ]


def conversation(rng: Random, most_pairs: int) -> list[Message]:
    """Sample one conversation of the training stream."""
    kind = rng.random()
    if kind < 0.22:
        return table_chat(rng, most_pairs)
    if kind < 0.36:
        return tool_chat(rng)
    return plain_text(rng) if kind < 0.42 else task_chat(rng)


def stream(seed: int, most_pairs: int) -> Iterator[list[Message]]:
    """Yield conversations without end; equal seeds give equal streams."""
    rng = Random(seed)
    while True:
        yield conversation(rng, most_pairs)
