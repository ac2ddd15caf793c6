"""Phrasings of requests: carrier phrases around a core, small talk, and declined requests.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import re
import zlib
from random import Random

from training.tables import TABLES
from training.words import any_word, sentence

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


def is_held_out(key: str) -> bool:
    """Return True if this text is for evaluation: one in ten, by a constant hash."""
    return bool(key) and zlib.crc32(key.encode()) % 10 == 0


def choose(rng: Random, pattern: str) -> str:
    """Choose one alternative in every [a|b]."""
    return ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def expand(rng: Random, pattern: str) -> str:
    """Choose one alternative in every [a|b]; tidy the spaces and the first letter."""
    text = re.sub(r" +(?=[ :.,?!]|$)", "", choose(rng, pattern)).lstrip()
    return text[:1].upper() + text[1:]


def misspell(rng: Random, frame: str) -> str:
    """Drop or double one letter of the frame, never inside a placeholder."""
    spots = [i for i, letter in enumerate(frame) if letter.isalpha()]
    if not spots:
        return frame
    spot = rng.choice(spots)
    return frame[:spot] + rng.choice(("", frame[spot] * 2)) + frame[spot + 1 :]


Patterns = dict[str, list[str]]  # by the grammatical form of the core
CARRIERS: Patterns = TABLES["carriers"]
LATER: dict[str, Patterns] = TABLES["later_cores"]  # not counted by the vocabulary
CORES: dict[str, Patterns] = {
    name: {form: few + LATER.get(name, {}).get(form, []) for form, few in forms.items()}
    for name, forms in TABLES["cores"].items()
}
KINDS: dict[str, str] = TABLES["kinds"]  # names of the data, where the core leaves it out
NEW_PHRASINGS: Patterns = TABLES["new_phrasings"]  # by request, only for the evaluation
AROUND: Patterns = TABLES["around"]
SUBJECTS: list[str] = TABLES["look_up"]["subjects"]  # possible names of a value
ABILITIES = (
    "I can add two numbers, sort numbers or words, reverse a word or a list, count, "
    "repeat a text, look up a value in a list, answer in JSON, use tools, and tell a story."
)
CANNOT = "I cannot do that. " + ABILITIES


def place(rng: Random, sentence: str, kind: str) -> str:
    """Put the placeholder {0} before or after a request that lacks it."""
    pattern = rng.choice(AROUND["text_places" if kind in ("text", "word") else "places"])
    if pattern.startswith("{q}"):
        sentence = sentence.rstrip("?.!, ")
    text = choose(rng, pattern).replace("{k}", kind).replace("{q}", sentence)
    return text.replace("?.", "?").replace("!.", "!")


def lower_first(text: str) -> str:
    """Return the text with a small first letter, except for the word "I"."""
    return text if text[:2] in ("I ", "I'") else text[:1].lower() + text[1:]


def surround(rng: Random, text: str, kind: str) -> str:
    """Add other words around a request, where they cannot be confused with its data."""
    around, begins, ends = rng.random(), text.lstrip('"')[:3] == "{0}", text.endswith(("{0}", ":"))
    if around < 0.22 and not (kind and begins):
        if around < 0.11:
            return choose(rng, rng.choice(AROUND["openers"])) + lower_first(text)
        if around < 0.18:  # random words: only the core matters
            words = [any_word(rng) for _ in range(rng.randint(1, 4))]
            return " ".join([*words, lower_first(text)])
        return f"{sentence(rng, rng.randint(2, 7))} {text}"
    if around > 0.92 and kind != "text":
        if around < 0.97:
            return text + choose(rng, rng.choice(AROUND["closers"]))
        if not (kind and ends):
            return text + rng.choice((" ", "\n")) + sentence(rng, rng.randint(2, 7))
    return text


def compose(rng: Random, cores: Patterns, kind: str, held_out: bool = False) -> str:
    """Write a request with the placeholder {0} for its `kind` of data, from the chosen split."""
    forms = [form for form, patterns in cores.items() for _ in patterns]
    while True:
        form = rng.choice(forms)
        core, carrier = rng.choice(cores[form]), rng.choice(CARRIERS[form])
        if (carrier != "*" and is_held_out(f"{carrier} {core}")) == held_out:
            break
    text = expand(rng, carrier.replace("*", core))
    if "{0}" not in text and kind:
        text = place(rng, text, kind)
    return surround(rng, text, kind)
