"""Lists of pairs, and questions about one of them, which test memory at every depth.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.data import Phrasing, Turn, fill, number, pick_style
from training.phrases import NEW_PHRASINGS, SUBJECTS, compose, expand, is_held_out
from training.tables import TABLES
from training.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    NAMES,
    OPEN_WORDS,
    letters,
    noun,
    pseudo_word,
)

Maker = Callable[[Random], str]
LISTS: dict[str, Any] = TABLES["look_up"]
MISSING = "{k} is not in the list."


@dataclass(frozen=True)
class Table:
    """Pairs as the user wrote them; `lines[key]` is the pair as text, and also the answer."""

    text: str
    lines: dict[str, str]
    word: str  # the name of a value


def code(rng: Random) -> str:
    """Sample a short code, such as "K47" or "QX-72"."""
    prefix = letters(rng, 1, 2).upper()
    return prefix + rng.choice(("", "", "-")) + str(number(rng, (2, 2, 3)))


def full_name(rng: Random) -> str:
    """Sample a first and a last name."""
    return f"{rng.choice(NAMES)} {rng.choice((rng.choice(NAMES), pseudo_word(rng).title()))}"


KEY_KINDS: list[Maker] = [
    lambda rng: rng.choice(NAMES),
    lambda rng: rng.choice(NAMES),
    lambda rng: rng.choice(CITIES),
    noun,
    noun,
    pseudo_word,
    lambda rng: pseudo_word(rng).title(),
    full_name,
    code,
    lambda rng: f"{rng.choice(ADJECTIVES + COLORS)} {noun(rng)}",
    lambda rng: rng.choice(OPEN_WORDS),
    lambda rng: f"{rng.choice(('room', 'item', 'key', 'user', 'box'))} {number(rng, (1, 2, 3))}",
    lambda rng: letters(rng, 1, 2),
    lambda rng: letters(rng, 2, 5),
    lambda rng: f"{noun(rng)}{number(rng, (1, 2))}",
    lambda rng: f"{noun(rng)}_{number(rng, (1, 2))}",
    lambda rng: str(number(rng, (2, 3, 4))),
]
VALUE_KINDS: list[Maker] = [
    lambda rng: str(number(rng, (1, 2, 3))),
    lambda rng: str(number(rng, (4,))),
    lambda rng: str(number(rng, (3,))),
    lambda rng: str(number(rng, (5, 6))),
    lambda rng: str(number(rng, (2,))),
    noun,
    code,
    lambda rng: rng.choice(CITIES),
    lambda rng: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    lambda rng: f"{number(rng, (1, 2))}.{number(rng, (2,))}",
    pseudo_word,
    lambda rng: f"555-{number(rng, (4,))}",
    lambda rng: rng.choice(COLORS),
]


def make_keys(rng: Random, size: int) -> list[str]:
    """Sample distinct keys of one kind; of two-part kinds when the simple ones run out."""
    make = rng.choice(KEY_KINDS)
    keys: dict[str, None] = {}
    for attempt in range(20 * size):
        if len(keys) == size:
            break
        wide = attempt > 2 * size and rng.random() < 0.5
        keys[full_name(rng) if wide else make(rng)] = None
    return list(keys)


def make_table(rng: Random, size: int) -> Table:
    """Sample a list of about `size` pairs in one of many formats."""
    pair, before, between, after = rng.choice(LISTS["formats"])
    word = rng.choice(SUBJECTS) if rng.random() < 0.7 else noun(rng)
    make = rng.choice(VALUE_KINDS)
    lines = {k: pair.format(k=k, v=make(rng), w=word) for k in make_keys(rng, size)}
    return Table(between.join(before + line for line in lines.values()) + after, lines, word)


def query(
    rng: Random, table: Table, key: str, phrasing: Phrasing = "known", follow_up: bool = False
) -> Turn:
    """Make a question about `key`; the answer is its pair, or that there is none."""
    style = pick_style(rng)
    style = str if style is str.upper else style
    if phrasing == "new phrasing":
        text = expand(rng, rng.choice(NEW_PHRASINGS["look up"]))
    else:
        cores = LISTS["follow_ups" if follow_up else "cores"]
        text = compose(rng, cores, "", phrasing == "new pair")
    shown = style(key) if rng.random() < 0.5 else key  # sometimes "alice" for "Alice"
    answer = table.lines.get(key, MISSING.format(k=key))
    question = fill(rng, text.replace("{w}", table.word), style, shown)
    return Turn("look up", question, answer, f"look up {answer}")


def with_table(rng: Random, table: Table, question: str) -> str:
    """Write one message that holds the list and the question, in either order."""
    gap = rng.choice(("\n", "\n", " "))
    intro = expand(rng, rng.choice(LISTS["intros"]).replace("{w}", table.word))
    intro = intro.replace("{gap}", gap)
    if rng.random() < 0.12:
        link = rng.choice(("\n", " ", " in this list: ", " in the list: ", " in: "))
        if link.startswith(" in"):
            return question.rstrip("?. ") + link + table.text
        return f"{question}{link}{intro}{table.text}"
    return f"{intro}{table.text}{rng.choice((chr(10), chr(10) * 2, ' '))}{question}"


def absent_key(rng: Random, table: Table) -> str:
    """Sample a key that the table does not have."""
    while True:
        for key in make_keys(rng, 3):
            if key.lower() not in {known.lower() for known in table.lines}:
                return key


def queries(rng: Random, table: Table, count: int) -> list[Turn]:
    """Sample training questions about one table, about different keys while they last."""
    keys = rng.sample(list(table.lines), min(count, len(table.lines)))
    turns: list[Turn] = []
    for key in keys:
        wanted = absent_key(rng, table) if rng.random() < 0.06 else key
        follow_up = bool(turns) and rng.random() < 0.5
        turn = query(rng, table, wanted, follow_up=follow_up)
        if not is_held_out(turn.key):
            turns.append(turn)
    return turns
