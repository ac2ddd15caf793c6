"""Stored responses of each client, within bounds of time and memory.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
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
    """A turn as JSON, so that the counted bytes are the stored bytes."""

    client: str
    data: bytes
    previous: str | None
    expires: float


MOST_READ = 2**24  # bytes of turns that one request may read
decode = msgspec.json.Decoder(Turn).decode


class ResponseStore:
    """The turns that each client used last, each for `seconds` after its last use.

    Clients share `max_bytes`: a full store evicts turns of the client that holds the most. A use
    of a response is a use of its whole conversation, from its end back to its beginning, so a turn
    is dropped before the turns that it continues: what stays can be continued. Raises `KeyError`
    with the id of what is not there for this client, or not any more, and `OverflowError` for more
    than one request may read.
    """

    def __init__(
        self,
        max_bytes: int = 2**26,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._seconds, self._clock = max_bytes, seconds, clock
        self._held = Counter[str]()  # bytes of each client
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the oldest first
        self._own = defaultdict[str, OrderedDict[str, None]](OrderedDict)  # ids of each client
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all turns."""
        return self._held.total()

    def _use(self, client: str, response_id: str | None) -> list[Entry]:
        """Return a turn and those before it, now marked as used; drop what is too old."""
        found, now = list[Entry](), self._clock()
        while response_id is not None and response_id in self._own.get(client, ()):
            entry = self._entries[response_id]
            if entry.expires <= now:
                break
            entry.expires = now + self._seconds
            for order in (self._entries, self._own[client]):
                order.move_to_end(response_id)
            found.append(entry)
            response_id = entry.previous
        while self._entries and next(iter(self._entries.values())).expires <= now:
            self._drop(next(iter(self._entries)))
        return found

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        del self._own[entry.client][response_id]
        self._held[entry.client] -= len(entry.data)
        if not self._own[entry.client]:
            del self._own[entry.client], self._held[entry.client]

    def put(self, client: str, turn: Turn) -> None:
        """Store a turn; evict the oldest turns of the client that holds the most until it fits."""
        name, previous = turn.response["id"], turn.response["previous_response_id"]
        data, held = msgspec.json.encode(turn), self._held
        with self._lock:
            self._entries[name] = Entry(client, data, previous, self._clock() + self._seconds)
            self._own[client][name] = None
            held[client] += len(data)
            self._use(client, name)  # so that the conversation that it continues is newer
            while self.size > self._max_bytes:
                most = max(held, key=lambda each: (held[each], each == client))
                self._drop(next(iter(self._own[most])))

    def read(self, client: str, response_id: str) -> bytes:
        """Return one turn as JSON."""
        with self._lock:
            if not (found := self._use(client, response_id)):
                raise KeyError(response_id)
            return found[0].data

    def get(self, client: str, response_id: str) -> Turn:
        """Return one turn; raise `KeyError` if it is not stored."""
        return decode(self.read(client, response_id))

    def conversation(
        self,
        client: str,
        response_id: str | None,
        hold: Callable[[int], object] = lambda size: None,
    ) -> list[Turn]:
        """Return all turns up to a response, the first one first; None has none.

        `hold` is called with their bytes before they are read, and may raise.
        """
        with self._lock:
            found = self._use(client, response_id)
        missing = found[-1].previous if found else response_id
        if missing is not None:
            raise KeyError(missing)
        if (size := sum(len(entry.data) for entry in found)) > MOST_READ:
            raise OverflowError(size)
        hold(size)
        return [decode(entry.data) for entry in reversed(found)]

    def delete(self, client: str, response_id: str) -> None:
        """Delete one turn; later turns stay, but cannot be continued."""
        with self._lock:
            if not self._use(client, response_id):
                raise KeyError(response_id)
            self._drop(response_id)
