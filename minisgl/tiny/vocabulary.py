"""Every word of the generator's own sentences: these become whole tokens.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from minisgl.tiny import frames, phrases, stories, words

PLACEHOLDER = re.compile(r"\{\w+\}")


def sentences() -> Iterable[str]:
    """All patterns, answers and story lines as they stand in the tables."""
    for patterns in frames.FRAMES.values():
        yield from (pattern.replace("@", phrases.PLEASE) for pattern in patterns)
    for answer, patterns in phrases.SMALL_TALK:
        yield from [answer, *patterns]
    yield from [phrases.CANNOT, *phrases.STRANGE_REQUESTS, *phrases.HELPFUL, *phrases.RULES]
    yield from [*phrases.INTROS, *phrases.QUESTIONS, *phrases.FOLLOW_UPS, *phrases.SUBJECTS]
    yield from [*stories.HOMES, *stories.HOBBIES, *stories.DAYS, *stories.NEXT_DAYS]
    yield from stories.PLACES
    yield from [line for episode in stories.EPISODES for line in episode] + stories.ENDINGS
    yield from [
        "Once upon a time there was a child named who dreamed about",
        "I count",
        "is not in the list",
    ]


def known_words() -> list[str]:
    """The words of all sentences and closed lists, most frequent first, two letters or more."""
    found = Counter[str]()
    for line in sentences():
        plain = PLACEHOLDER.sub(" ", line)
        found.update(re.findall(r"[^\W\d_]{2,}", plain))
        found.update(re.findall(r"[^\W\d_]{2,}", plain.lower()))
    found.update(words.CLOSED_WORDS)
    for word in words.OPEN_WORDS:
        found.pop(word, None)
    return [word for word, _ in found.most_common() if len(word) > 1 and word.isascii()]


KNOWN_WORDS = known_words()
