"""Every word of the generator's own sentences: these become whole tokens.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from minisgl.tiny import frames, phrases, stories, words

PLACEHOLDER = re.compile(r"\{\w+\}")
TEMPLATE_WORDS = """
Tools You may call one or more functions to assist with the user query are provided with function
signatures within XML tags For each function call return a json object with function name and
arguments within XML tags name arguments type function description parameters object properties
string integer number boolean array items required strict additionalProperties title enum result error The
answer is answers failed I count is not in the list null true false
"""


def sentences(table: Any) -> Iterator[str]:
    """All texts of a table, which may be a text itself, a list, a tuple or a dictionary."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, dict):
        yield from sentences(list(table))
        yield from sentences(list(table.values()))
    elif isinstance(table, list | tuple):
        for part in table:
            yield from sentences(part)


def known_words() -> list[str]:
    """The words of all tables and closed lists, most frequent first, two letters or more."""
    found = Counter[str]()
    tables = [vars(part)[name] for part in (frames, phrases, stories) for name in vars(part)
              if name.isupper() and name not in ("NEW_FRAMES", "ALTERNATIVES")]  # fmt: skip
    for line in sentences([tables, TEMPLATE_WORDS]):
        plain = PLACEHOLDER.sub(" ", line)
        found.update(re.findall(r"[^\W\d_]{2,}", plain))
        found.update(re.findall(r"[^\W\d_]{2,}", plain.lower()))
    found.update(words.CLOSED_WORDS)
    for word in words.OPEN_WORDS:
        found.pop(word, None)
    return [word for word, _ in found.most_common() if word.isascii()]


KNOWN_WORDS = known_words()
