"""Responses that can be asked for again, within bounds of time and memory.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


class Turn(msgspec.Struct):
    """One request and its answer: the items that came in and the response that went out."""

    items: list[dict[str, Any]]
    response: dict[str, Any]

    @property
    def all_items(self) -> list[dict[str, Any]]:
        return self.items + self.response["output"]


@dataclass
class Entry:
    """A turn as JSON, so that what is counted is what is held."""

    data: bytes
    previous: str | None
    expires: float


decode = msgspec.json.Decoder(Turn).decode


class ResponseStore:
    """The turns used last, in at most `max_bytes`, each for `seconds` after its last use.

    A use of a response is a use of its whole conversation, from its end back to its beginning, so
    a turn is dropped before the turns that it continues: what stays can be continued.
    Raises `KeyError` with the id of what is not there, or not any more.
    """

    def __init__(
        self,
        max_bytes: int = 2**26,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._seconds, self._clock = max_bytes, seconds, clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the oldest first
        self.size = 0  # bytes

    def _use(self, response_id: str | None) -> list[Entry]:
        """Return a turn and those before it, marked as used; drop what is too old or too much."""
        found, now = list[Entry](), self._clock()
        while (entry := self._entries.get(response_id or "")) and entry.expires > now:
            entry.expires = now + self._seconds
            self._entries.move_to_end(response_id or "")
            found.append(entry)
            response_id = entry.previous
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if oldest.expires > now and self.size <= self._max_bytes:
                break
            self.size -= len(self._entries.popitem(last=False)[1].data)
        return found

    def put(self, turn: Turn) -> None:
        """Keep a turn, if it fits."""
        name, previous = turn.response["id"], turn.response["previous_response_id"]
        entry = Entry(msgspec.json.encode(turn), previous, self._clock() + self._seconds)
        self._entries[name] = entry
        self.size += len(entry.data)
        self._use(name)

    def get(self, response_id: str) -> Turn:
        """Return one turn; raise `KeyError` if it is not stored."""
        if not (found := self._use(response_id)):
            raise KeyError(response_id)
        return decode(found[0].data)

    def conversation(self, response_id: str | None) -> list[Turn]:
        """Return all turns up to a response, the first one first; None has none."""
        found = self._use(response_id)
        missing = found[-1].previous if found else response_id
        if missing is not None:
            raise KeyError(missing)
        return [decode(entry.data) for entry in reversed(found)]

    def delete(self, response_id: str) -> None:
        """Forget one turn; those after it stay and cannot be continued."""
        self.get(response_id)
        self.size -= len(self._entries.pop(response_id).data)
