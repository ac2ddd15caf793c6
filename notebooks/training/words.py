"""The words of the embedded model, and made-up ones that it has never seen.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from random import Random

from training.tables import TABLES

WORDS: dict[str, list[str]] = {kind: text.split() for kind, text in TABLES["words"].items()}
NAMES, CITIES, ANIMALS, PEOPLE, FRUITS, THINGS, COLORS = list(WORDS.values())[:7]
WEEKDAYS, EVENTS, ROOMS, LANGUAGES, CURRENCIES, ADJECTIVES = list(WORDS.values())[7:13]
OPEN_WORDS, COMMON = WORDS["open_words"], WORDS["common"]
SMALL, TENS = WORDS["small"], WORDS["tens"]
NUMBER_WORDS = dict(enumerate(SMALL)) | {20 + 10 * i: word for i, word in enumerate(TENS)}
# Nouns whose plural is the word and an "s".
REGULAR = {
    word
    for word in ANIMALS + FRUITS + THINGS
    if not word.endswith(("s", "x", "sh", "ch", "y", "f", "fe", "o"))
} - {"mouse", "goose", "sheep", "fish", "deer"}
CLOSED_WORDS = [
    word
    for kind, some in WORDS.items()
    if kind not in ("open_words", "syllable_starts")
    for word in some
]

SYLLABLE_STARTS = WORDS["syllable_starts"]
SYLLABLE_ENDS = ["", "", "", "n", "r", "l", "m", "t", "s", "k", "x", "nd", "rt", "p"]


def pseudo_word(rng: Random) -> str:
    """Sample a pronounceable made-up word, such as "blorvik"."""
    parts = [
        rng.choice(SYLLABLE_STARTS) + rng.choice("aeiou") + rng.choice(SYLLABLE_ENDS)
        for _ in range(rng.choice((1, 2, 2, 2, 3, 3)))
    ]
    return "".join(parts)


def letters(rng: Random, low: int = 3, high: int = 9) -> str:
    """Sample random letters, such as "xqzt"."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def noun(rng: Random) -> str:
    """Sample a noun for a list."""
    return rng.choice(rng.choice((ANIMALS, FRUITS, THINGS, COLORS)))


def any_word(rng: Random) -> str:
    """Sample one word of any kind: known, common, never tokenised, or invented."""
    kind = rng.random()
    if kind < 0.35:
        return noun(rng)
    if kind < 0.6:
        return rng.choice(COMMON)
    if kind < 0.8:
        return rng.choice(OPEN_WORDS)
    return pseudo_word(rng) if kind < 0.95 else letters(rng)


def sentence(rng: Random, size: int) -> str:
    """Sample random words, with a capital and a full stop."""
    text = " ".join(any_word(rng) for _ in range(size))
    return text[:1].upper() + text[1:] + rng.choice("...!?")
