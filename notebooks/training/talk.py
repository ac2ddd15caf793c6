"""Turns that are not exact tasks: greetings, and questions about what the model can do.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from random import Random

from training.data import Turn, fill, number, pick_style
from training.phrases import CANNOT, compose, expand, is_held_out
from training.tables import TABLES
from training.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COMMON,
    FRUITS,
    NAMES,
    OPEN_WORDS,
    PEOPLE,
    THINGS,
    any_word,
    letters,
    pseudo_word,
    sentence,
)


def subject(rng: Random) -> str:
    """Sample the subject of a question that the model cannot answer."""
    pools = (NAMES, CITIES, ANIMALS, FRUITS, THINGS, PEOPLE, OPEN_WORDS, COMMON, COMMON)
    words = [
        rng.choice(rng.choice(pools)) if rng.random() < 0.8 else pseudo_word(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
    ]
    if rng.random() < 0.2:
        words.insert(0, rng.choice(ADJECTIVES))
    return " ".join(words)


def nonsense(rng: Random) -> str:
    """Sample words, letters, signs or foreign text without any request in it."""
    kind = rng.random()
    if kind < 0.35:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 12)))
    if kind < 0.5:
        return " ".join(sentence(rng, rng.randint(3, 10)) for _ in range(rng.randint(1, 4)))
    if kind < 0.65:
        return " ".join(letters(rng, 1, 10) for _ in range(rng.randint(1, 4)))
    if kind < 0.75:
        first = rng.choice(
            (0x21, 0xC0, 0x400, 0x5D0, 0x620, 0x900, 0x3040, 0x4E00, 0xAC00, 0x1F300)
        )
        return "".join(chr(first + rng.randrange(90)) for _ in range(rng.randint(1, 12)))
    return rng.choice(TABLES["nonsense"]["world"])


def strange(rng: Random) -> Turn:
    """Sample a request that the model cannot fulfil, with its answer."""
    style = pick_style(rng)
    if rng.random() < 0.25:
        question = style(nonsense(rng))
    else:
        operands = [subject(rng), subject(rng), str(number(rng)), str(number(rng))]
        question = fill(rng, compose(rng, TABLES["strange"], ""), style, *operands).strip()
    if rng.random() < 0.12:
        question += rng.choice((" ", "\n", ", ")) + nonsense(rng)
    return Turn("cannot", question, CANNOT, f"cannot {question}".lower())


def small_talk(rng: Random) -> Turn:
    """Sample a greeting, a thank-you, or a question about the model itself."""
    told = rng.choice(TABLES["small_talk"])
    text = expand(rng, rng.choice(told["patterns"]))
    return Turn("talk", fill(rng, text, pick_style(rng)), told["answer"])


def draw_strange(rng: Random, held_out: bool = False) -> Turn:
    """Sample a request that the model cannot fulfil, from the chosen split."""
    while True:
        turn = strange(rng)
        if is_held_out(turn.key) == held_out:
            return turn
