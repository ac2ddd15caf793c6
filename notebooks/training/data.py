"""Exact small tasks: questions in many phrasings, answers by plain Python, disjoint splits.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from training.phrases import (
    CORES,
    KINDS,
    NEW_PHRASINGS,
    compose,
    expand,
    is_held_out,
    misspell,
    place,
)
from training.stories import story, topic
from training.vocabulary import KNOWN_WORDS
from training.words import (
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
    sentence,
)

# The wording of a request: a pair of core and carrier that training uses, a pair that it never
# uses, or a whole phrasing that is only in the evaluation.
Phrasing = Literal["known", "new pair", "new phrasing"]


@dataclass(frozen=True)
class Turn:
    """One question and its exact answer; `key` holds the operands that decide the split."""

    task: str
    question: str
    answer: str
    key: str = ""  # empty: training only
    given: str = ""  # the answer's start that a grammar forces: not to be learnt


Styler = Callable[[str], str]


def pick_style(rng: Random) -> Styler:
    """Choose a style of typing: as written, all lower case, or all upper case."""
    kind = rng.random()
    return str if kind < 0.74 else str.lower if kind < 0.94 else str.upper


def frame(rng: Random, name: str, phrasing: Phrasing = "known") -> str:
    """Choose a wording of the named request, with placeholders for its operands."""
    kind = KINDS.get(name, "")
    if phrasing == "new phrasing":
        text = expand(rng, rng.choice(NEW_PHRASINGS[name]))
        return text if "{0}" in text or not kind else place(rng, text, kind)
    return compose(rng, CORES[name], kind, phrasing == "new pair")


def fill(rng: Random, text: str, style: Styler, *operands: str) -> str:
    """Fill a frame in the user's style with its operands and sometimes a typo."""
    text = style(text)
    return (misspell(rng, text) if rng.random() < 0.04 else text).format(*operands)


def ask(rng: Random, name: str, style: Styler, phrasing: Phrasing, *operands: str) -> str:
    """Write the named request about these operands."""
    return fill(rng, frame(rng, name, phrasing), style, *operands)


def number(rng: Random, digits: Sequence[int] = (1, 2, 2, 3, 3, 3)) -> int:
    """Sample a number with one of these counts of digits, each equally likely."""
    size = rng.choice(digits)
    return rng.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def add(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a sum of two numbers of up to four digits."""
    digits = (1, 2, 2, 3, 3, 3) if rng.random() < 0.8 else (1, 2, 3, 4, 4, 4)
    x, y = number(rng, digits), number(rng, digits)
    key = f"add {min(x, y)} {max(x, y)}" if max(x, y) > 9 else ""  # the table of digits is learnt
    spoken = [str(x), str(y)]
    if rng.random() < 0.08:
        x, y = rng.choice(list(NUMBER_WORDS)), rng.choice(list(NUMBER_WORDS))
        key, spoken = f"add {x} {y}", [NUMBER_WORDS[x], NUMBER_WORDS[y]]
    question = ask(rng, "add", pick_style(rng), phrasing, *spoken)
    return Turn("add", question, f"{x} + {y} = {x + y}", key)


def listed(rng: Random, items: Sequence[str]) -> str:
    """Join items with commas, sometimes with a last "and"."""
    if len(items) > 1 and rng.random() < 0.1:
        return ", ".join(items[:-1]) + rng.choice((" and ", ", and ")) + items[-1]
    return rng.choices((", ", ","), (3, 1))[0].join(items)


def sort(rng: Random, phrasing: Phrasing = "known", name: str = "sort") -> Turn:
    """Sample two to ten numbers to sort in ascending order."""
    digits = rng.choice(((1, 2, 2), (2,), (1, 2, 3), (3,), (3,), (1, 2, 3, 4)))
    values = [number(rng, digits) for _ in range(rng.randint(2, 10))]
    shown = [str(value) for value in values]
    separator = rng.choices((", ", " ", "\n", "; "), (8, 2, 1, 1))[0]
    text = listed(rng, shown) if rng.random() < 0.6 else separator.join(shown)
    values.sort()
    answer = values if name == "sort" else values[::-1]
    question = ask(rng, name, pick_style(rng), phrasing, text)
    return Turn(name, question, ", ".join(map(str, answer)), f"sort {values}")


def sort_down(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample two to ten numbers to sort in descending order."""
    return sort(rng, phrasing, "sort down")


def sort_words(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample two to six words to sort alphabetically."""
    style, size = pick_style(rng), rng.randint(2, 6)
    pool = NAMES if rng.random() < 0.25 else ANIMALS + FRUITS + THINGS + COLORS
    items = rng.sample(pool, size)
    if rng.random() < 0.2:
        items[0] = rng.choice(OPEN_WORDS)
    items = [style(item) for item in items]
    question = ask(rng, "sort words", style, phrasing, listed(rng, items))
    ordered = sorted(items, key=str.lower)
    return Turn("sort words", question, ", ".join(ordered), f"sort words {ordered}".lower())


def spellable(rng: Random) -> tuple[str, bool]:
    """Sample a word to spell, and True if it is open: spelled in letters, may be held out."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(KNOWN_WORDS), False
    if kind < 0.6:
        return rng.choice(OPEN_WORDS), True
    return (pseudo_word(rng) if kind < 0.88 else letters(rng, 2, 10)), True


def reverse_word(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a word to reverse."""
    style = pick_style(rng)
    word, is_open = spellable(rng)
    if rng.random() < 0.04:
        word, is_open = str(rng.randint(100, 999999)), True
    word = style(word)
    key = f"reverse {word.lower()}" if is_open else ""
    return Turn("reverse word", ask(rng, "reverse word", style, phrasing, word), word[::-1], key)


def list_items(rng: Random, size: int) -> list[str]:
    """Sample distinct items of one kind: nouns, names, numbers, or any words."""
    make = rng.choice((noun, noun, any_word, lambda r: r.choice(NAMES), lambda r: str(number(r))))
    items: dict[str, None] = {}
    while len(items) < size:
        items[make(rng)] = None
    return list(items)


def reverse_list(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample two to eight items to reverse."""
    style = pick_style(rng)
    items = [style(item) for item in list_items(rng, rng.randint(2, 8))]
    question = ask(rng, "reverse list", style, phrasing, listed(rng, items))
    return Turn("reverse list", question, ", ".join(items[::-1]), f"reverse {items}".lower())


def walk(items: Sequence[str], wanted: str | None = None) -> str:
    """Count aloud: number every item, or only those equal to `wanted`, then give the count."""
    said, count = [], 0
    for item in items:
        hit = wanted is None or item.lower() == wanted.lower()
        count += hit
        said.append(f"{item} {count}" if hit else item)
    return ", ".join(said) + f". I count {count}."


def count_items(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a list of one to sixteen items to count."""
    style = pick_style(rng)
    items = [style(item) for item in list_items(rng, rng.randint(1, rng.choice((8, 12, 16))))]
    if rng.random() < 0.2:
        items = [rng.choice(items) for _ in items]  # repeated items count each time
    question = ask(rng, "count items", style, phrasing, listed(rng, items))
    return Turn("count items", question, walk(items), f"count {items}".lower())


def count_same(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample an item to count in a list of up to sixteen."""
    style, pool = pick_style(rng), [noun(rng) for _ in range(rng.randint(1, 5))]
    items = [style(rng.choice(pool)) for _ in range(rng.randint(1, rng.choice((8, 12, 16))))]
    wanted = style(rng.choice(pool) if rng.random() < 0.9 else noun(rng))
    plural = wanted.lower() in REGULAR and rng.random() < 0.4
    name = "count plural" if plural else "count same"
    question = ask(rng, name, style, phrasing, listed(rng, items), wanted)
    return Turn("count same", question, walk(items, wanted), f"same {wanted} {items}".lower())


def count_letters(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a word whose letters, or one letter's occurrences, are to be counted."""
    style = pick_style(rng)
    word, is_open = spellable(rng)
    word, letter = style(word), style(rng.choice(word + "aest").lower())
    one = rng.random() < 0.5
    question = ask(rng, "count letter" if one else "count letters", style, phrasing, word, letter)
    key = f"letters {letter if one else ''} {word}".lower() if is_open else ""
    return Turn("count letters", question, walk(word, letter if one else None), key)


def count_to(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a range of numbers to count up or down."""
    down, most = rng.random() < 0.3, rng.choice((10, 20, 40))
    text = frame(rng, "count down" if down else "count to", phrasing)
    low = 1 if ("{1}" if down else "{0}") not in text else rng.randint(0, 60)
    high = low + rng.randint(1, most)
    spell = NUMBER_WORDS if rng.random() < 0.3 else {}
    ends = [spell.get(end, str(end)) for end in ((high, low) if down else (low, high))]
    values = [str(value) for value in range(low, high + 1)][:: -1 if down else 1]
    key = f"count {low} {high}" if low > 1 or high > 20 else ""  # the short counts are learnt
    return Turn("count to", fill(rng, text, pick_style(rng), *ends), ", ".join(values), key)


def passage(rng: Random, long: bool) -> str:
    """Sample a text to repeat: words, a sentence, numbers, signs, or several lines of them."""
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


def copy(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a text to copy."""
    style = pick_style(rng)
    text = style(passage(rng, long=rng.random() < 0.08))
    return Turn("copy", ask(rng, "copy", style, phrasing, text), text, f"copy {text}".lower())


def tell_story(rng: Random, phrasing: Phrasing = "known") -> Turn:
    """Sample a request for a story about a subject, short or long."""
    style, subject, kind = pick_style(rng), topic(rng), rng.random()
    if kind < 0.08:
        subject = "a " + rng.choice(ANIMALS)
        return Turn("story", ask(rng, "any story", style, phrasing), story(rng, subject))
    long = kind < 0.2
    name = "long story" if long else "story"
    told = style(subject) if style is str.lower else subject
    question = ask(rng, name, style, phrasing, style(subject))
    answer = story(rng, told, rng.randint(3, 6) if long else 1)
    return Turn("story", question, answer, f"story {subject}".lower())


TASKS: dict[str, Callable[[Random, Phrasing], Turn]] = {
    "add": add,
    "sort": sort,
    "sort down": sort_down,
    "sort words": sort_words,
    "reverse word": reverse_word,
    "reverse list": reverse_list,
    "count items": count_items,
    "count same": count_same,
    "count letters": count_letters,
    "count to": count_to,
    "copy": copy,
    "story": tell_story,
}
WEIGHTS = dict(zip(TASKS, (19, 10, 10, 10, 14, 8, 6, 9, 11, 7, 8, 4)))


def draw(rng: Random, task: str, held_out: bool = False, phrasing: Phrasing = "known") -> Turn:
    """Sample a turn of `task` whose operands are in the chosen split."""
    while True:
        turn = TASKS[task](rng, phrasing)
        if is_held_out(turn.key) == held_out:
            return turn


def draw_any(rng: Random) -> Turn:
    """Sample a training turn of any exact task, by weight."""
    return draw(rng, rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])
