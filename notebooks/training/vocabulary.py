"""Every word of the generator's own sentences: these become whole tokens.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from training.phrases import CANNOT
from training.tables import TABLES
from training.words import CLOSED_WORDS, OPEN_WORDS

UNREAD = ("words", "nonsense", "later_cores", "new_phrasings")  # words of these are left out
PLACEHOLDER = re.compile(r"\{\w+\}")
CODE_WORDS = """
Tools You may call one or more functions to assist with the user query are provided with function
signatures within XML tags For each function call return a json object with function name and
arguments type function description parameters properties string integer number boolean array items
required additionalProperties title enum unit celsius fahrenheit null true false result error phone
email country year value temperature status time The answer is The tool failed I count is not in the
list Once upon a time there was a child named who dreamed about lived and loved to Get Return Gives
"""  # words that are in no table: those of the template and of our own answers


def sentences(table: Any) -> Iterator[str]:
    """Yield all texts of a table, which may be a text, a list or a dictionary."""
    if isinstance(table, str):
        yield table
    else:
        for part in table.values() if isinstance(table, dict) else table:
            yield from sentences(part)


def known_words() -> list[str]:
    """List the words of all tables and closed lists, most frequent first, two letters or more."""
    found = Counter[str]()
    tables = [table for name, table in TABLES.items() if name not in UNREAD]
    for line in sentences([tables, CANNOT, CODE_WORDS]):
        plain = PLACEHOLDER.sub(" ", line)
        found.update(re.findall(r"[^\W\d_]{2,}", plain))
        found.update(re.findall(r"[^\W\d_]{2,}", plain.lower()))
    found.update([*CLOSED_WORDS, *map(str.lower, CLOSED_WORDS)])
    for word in OPEN_WORDS:
        found.pop(word, None)
    return [word for word, _ in found.most_common() if len(word) > 1 and word.isascii()]


KNOWN_WORDS = known_words()
