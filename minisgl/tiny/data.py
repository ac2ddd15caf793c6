"""Exact small tasks: questions in many phrasings, answers by plain Python, disjoint splits.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from minisgl.tiny.frames import FRAMES
from minisgl.tiny.phrases import AFTERWORDS, PREAMBLES, expand, misspell
from minisgl.tiny.stories import story, topic
from minisgl.tiny.vocabulary import KNOWN_WORDS
from minisgl.tiny.words import (
    ANIMALS,
    COLORS,
    FRUITS,
    NAMES,
    NUMBER_WORDS,
    OPEN_WORDS,
    REGULAR,
    THINGS,
    any_word,
    letters,
    noun,
    pseudo_word,
)


@dataclass(frozen=True)
class Turn:
    """One question and its exact answer; `key` holds the operands that decide the split."""

    task: str
    question: str
    answer: str
    key: str = ""  # empty: training only


def is_held_out(key: str) -> bool:
    """Whether these operands belong to the evaluation: one in ten, by a hash that never changes."""
    return bool(key) and zlib.crc32(key.encode()) % 10 == 0


Styler = Callable[[str], str]


def pick_style(rng: Random) -> Styler:
    """How the user types: as written, all lower case, or all upper case."""
    kind = rng.random()
    return str if kind < 0.76 else str.lower if kind < 0.92 else str.upper


def ask(rng: Random, frames: Sequence[str], style: Styler, *operands: str) -> str:
    """A question from one of the frames, in the user's style, sometimes with a slip of the pen."""
    frame = style(expand(rng, rng.choice(frames)))
    if rng.random() < 0.04:
        frame = misspell(rng, frame)
    return frame.format(*operands)


def number(rng: Random, digits: Sequence[int] = (1, 2, 2, 3, 3, 3)) -> int:
    """A number with one of the given numbers of digits, each length equally likely to be drawn."""
    size = rng.choice(digits)
    return rng.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def add(rng: Random, frames: Sequence[str] = FRAMES["add"]) -> Turn:
    """The sum of two numbers of up to four digits."""
    digits = (1, 2, 2, 3, 3, 3) if rng.random() < 0.8 else (1, 2, 3, 4, 4, 4)
    x, y = number(rng, digits), number(rng, digits)
    key = f"add {min(x, y)} {max(x, y)}" if max(x, y) > 9 else ""  # the table of digits is learnt
    spoken = [str(x), str(y)]
    if rng.random() < 0.08:
        x, y = rng.choice(list(NUMBER_WORDS)), rng.choice(list(NUMBER_WORDS))
        key, spoken = f"add {x} {y}", [NUMBER_WORDS[x], NUMBER_WORDS[y]]
    question = ask(rng, frames, pick_style(rng), *spoken)
    return Turn("add", question, f"{x} + {y} = {x + y}", key)


def listed(rng: Random, items: Sequence[str]) -> str:
    """Items with commas, sometimes with a last "and"."""
    if len(items) > 1 and rng.random() < 0.08:
        return ", ".join(items[:-1]) + rng.choice((" and ", ", and ")) + items[-1]
    return rng.choice((", ", ", ", ", ", ", ", ",")).join(items)


def join(rng: Random, items: Sequence[str]) -> str:
    """The items as a user may type them."""
    separator = rng.choices((", ", " ", "\n", "; "), (8, 2, 1, 1))[0]
    return listed(rng, items) if rng.random() < 0.6 else separator.join(items)


def sort(rng: Random, frames: Sequence[str] = FRAMES["sort"]) -> Turn:
    """Three to ten numbers in ascending order."""
    digits = rng.choice(((1, 2, 2), (2,), (1, 2, 3), (3,), (3,), (1, 2, 3, 4)))
    values = [number(rng, digits) for _ in range(rng.randint(2, 10))]
    question = ask(rng, frames, pick_style(rng), join(rng, [str(v) for v in values]))
    values.sort()
    return Turn("sort", question, ", ".join(map(str, values)), f"sort {values}")


def sort_down(rng: Random, frames: Sequence[str] = FRAMES["sort down"]) -> Turn:
    """Three to ten numbers in descending order."""
    turn = sort(rng, frames)
    answer = ", ".join(reversed(turn.answer.split(", ")))
    return Turn("sort down", turn.question, answer, turn.key)


def sort_words(rng: Random, frames: Sequence[str] = FRAMES["sort words"]) -> Turn:
    """Two to six words in alphabetical order."""
    style, size = pick_style(rng), rng.randint(2, 6)
    pool = NAMES if rng.random() < 0.25 else ANIMALS + FRUITS + THINGS + COLORS
    items = rng.sample(pool, size)
    if rng.random() < 0.2:
        items[0] = rng.choice(OPEN_WORDS)
    items = [style(item) for item in items]
    question = ask(rng, frames, style, listed(rng, items))
    ordered = sorted(items, key=str.lower)
    return Turn("sort words", question, ", ".join(ordered), f"sort words {ordered}".lower())


def spellable(rng: Random) -> tuple[str, bool]:
    """A word to take apart, and whether it is open: spelled in letters, so it may be held out."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(KNOWN_WORDS), False
    if kind < 0.6:
        return rng.choice(OPEN_WORDS), True
    return (pseudo_word(rng) if kind < 0.88 else letters(rng, 2, 10)), True


def reverse_word(rng: Random, frames: Sequence[str] = FRAMES["reverse word"]) -> Turn:
    """The letters of one word from last to first."""
    style = pick_style(rng)
    word, is_open = spellable(rng)
    if rng.random() < 0.04:
        word, is_open = str(rng.randint(100, 999999)), True
    word = style(word)
    key = f"reverse {word.lower()}" if is_open else ""
    return Turn("reverse word", ask(rng, frames, style, word), word[::-1], key)


def list_items(rng: Random, size: int) -> list[str]:
    """Distinct items of one kind: nouns, names, numbers, or any words."""
    make = rng.choice((noun, noun, any_word, lambda r: r.choice(NAMES), lambda r: str(number(r))))
    items: dict[str, None] = {}
    while len(items) < size:
        items[make(rng)] = None
    return list(items)


def reverse_list(rng: Random, frames: Sequence[str] = FRAMES["reverse list"]) -> Turn:
    """Two to eight items from last to first."""
    style = pick_style(rng)
    items = [style(item) for item in list_items(rng, rng.randint(2, 8))]
    question = ask(rng, frames, style, listed(rng, items))
    return Turn("reverse list", question, ", ".join(items[::-1]), f"reverse {items}".lower())


def walk(items: Sequence[str], wanted: str | None = None) -> str:
    """Count aloud: number every item, or only those equal to `wanted`, then say how many."""
    said, count = [], 0
    for item in items:
        hit = wanted is None or item.lower() == wanted.lower()
        count += hit
        said.append(f"{item} {count}" if hit else item)
    return ", ".join(said) + f". I count {count}."


def count_items(rng: Random, frames: Sequence[str] = FRAMES["count items"]) -> Turn:
    """How many items a list has, one to sixteen."""
    style = pick_style(rng)
    items = [style(item) for item in list_items(rng, rng.randint(1, rng.choice((8, 12, 16))))]
    if rng.random() < 0.2:
        items = [rng.choice(items) for _ in items]  # repeated items count each time
    question = ask(rng, frames, style, listed(rng, items))
    return Turn("count items", question, walk(items), f"count {items}".lower())


def count_same(rng: Random, frames: Sequence[str] | None = None) -> Turn:
    """How often one item occurs in a list of up to sixteen."""
    style, pool = pick_style(rng), [noun(rng) for _ in range(rng.randint(1, 5))]
    items = [style(rng.choice(pool)) for _ in range(rng.randint(1, rng.choice((8, 12, 16))))]
    wanted = style(rng.choice(pool) if rng.random() < 0.9 else noun(rng))
    plural = wanted.lower() in REGULAR and rng.random() < 0.4
    frames = frames or FRAMES["count plural" if plural else "count same"]
    question = ask(rng, frames, style, listed(rng, items), wanted)
    return Turn("count same", question, walk(items, wanted), f"same {wanted} {items}".lower())


def count_letters(rng: Random, frames: Sequence[str] | None = None) -> Turn:
    """How many letters a word has, or how often one of them occurs in it."""
    style = pick_style(rng)
    word, is_open = spellable(rng)
    word, letter = style(word), style(rng.choice(word + "aest").lower())
    one = frames is None and rng.random() < 0.5
    question = ask(
        rng, frames or FRAMES["count letter" if one else "count letters"], style, word, letter
    )
    key = f"letters {letter if one else ''} {word}".lower() if is_open else ""
    return Turn("count letters", question, walk(word, letter if one else None), key)


def sentence(rng: Random, size: int) -> str:
    """Words without much sense, with a capital and a stop."""
    words = [any_word(rng) for _ in range(size)]
    text = " ".join(words)
    return text[:1].upper() + text[1:] + rng.choice("...!?")


def passage(rng: Random, long: bool) -> str:
    """Something to repeat: words, a sentence, numbers, signs, or several lines of them."""
    kind = rng.random()
    if long:
        separator = rng.choice((" ", " ", "\n"))
        return separator.join(sentence(rng, rng.randint(4, 12)) for _ in range(rng.randint(3, 14)))
    if kind < 0.45:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 9)))
    if kind < 0.75:
        return sentence(rng, rng.randint(2, 12))
    if kind < 0.87:
        return " ".join(str(number(rng, (1, 2, 3, 5))) for _ in range(rng.randint(1, 8)))
    signs = (
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=<>#@$%&()[]{}:;,.!?"
    )
    return "".join(rng.choice(signs) for _ in range(rng.randint(2, 16))).strip() or "ok"


def copy(rng: Random, frames: Sequence[str] = FRAMES["copy"]) -> Turn:
    """The same text again."""
    style = pick_style(rng)
    text = style(passage(rng, long=rng.random() < 0.08))
    return Turn("copy", ask(rng, frames, style, text), text, f"copy {text}".lower())


def tell_story(rng: Random, frames: Sequence[str] = FRAMES["story"]) -> Turn:
    """A story about a subject, short or, when asked, long."""
    style, subject, kind = pick_style(rng), topic(rng), rng.random()
    if frames is FRAMES["story"] and kind < 0.08:
        subject = "a " + rng.choice(ANIMALS)
        return Turn("story", ask(rng, FRAMES["any story"], style), story(rng, subject))
    long = frames is FRAMES["story"] and kind < 0.2
    question = ask(rng, FRAMES["long story"] if long else frames, style, style(subject))
    answer = story(
        rng, style(subject) if style is str.lower else subject, rng.randint(3, 6) if long else 1
    )
    return Turn("story", question, answer, f"story {subject}".lower())


TASKS: dict[str, Callable[..., Turn]] = {
    "add": add,
    "sort": sort,
    "sort down": sort_down,
    "sort words": sort_words,
    "reverse word": reverse_word,
    "reverse list": reverse_list,
    "count items": count_items,
    "count same": count_same,
    "count letters": count_letters,
    "copy": copy,
    "story": tell_story,
}
WEIGHTS = {
    "add": 20,
    "sort": 11,
    "sort down": 7,
    "sort words": 11,
    "reverse word": 12,
    "reverse list": 9,
    "count items": 6,
    "count same": 7,
    "count letters": 8,
    "copy": 8,
    "story": 4,
}


def draw(rng: Random, task: str, held_out: bool = False, **options: Sequence[str]) -> Turn:
    """A turn of `task` whose operands lie in the wanted split."""
    while True:
        turn = TASKS[task](rng, **options)
        if is_held_out(turn.key) == held_out:
            return turn


def draw_any(rng: Random) -> Turn:
    """A training turn of any exact task, by weight, sometimes with words around it."""
    turn = draw(rng, rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])
    if rng.random() < 0.1:
        before = (
            rng.choice(PREAMBLES) if rng.random() < 0.7 else sentence(rng, rng.randint(2, 8)) + " "
        )
        turn = replace(turn, question=before + turn.question)
    if turn.task != "copy" and rng.random() < 0.05:
        turn = replace(turn, question=turn.question + rng.choice(AFTERWORDS))
    return turn
