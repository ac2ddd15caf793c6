"""Stored responses of each client, within bounds of time and memory.

Generated from notebooks/12d_responses.ipynb: edit there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.scheduler.queue import Shares


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

    Clients share `max_bytes`. A use of a response is a use of its whole conversation, from its end
    back to its beginning, so a turn is dropped before the turns that it continues: what stays can
    be continued. Raises `KeyError` with the id of what is not there for this client, or not any
    more, and `OverflowError` for more than one request may read.
    """

    def __init__(
        self,
        max_bytes: int = 2**26,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places, self._seconds, self._clock = Shares(max_bytes), seconds, clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the oldest first
        self._own = defaultdict[str, OrderedDict[str, None]](OrderedDict)  # ids of each client
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all turns."""
        return self._places.taken

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

    def _forget(self, response_id: str) -> Entry:
        entry = self._entries.pop(response_id)
        del self._own[entry.client][response_id]
        if not self._own[entry.client]:
            del self._own[entry.client]
        return entry

    def _drop(self, response_id: str) -> None:
        entry = self._forget(response_id)
        self._places.give_back(entry.client, len(entry.data))

    def put(self, client: str, turn: Turn) -> None:
        """Keep a turn, if it fits; older turns make room, for a small client the largest's."""
        name, previous = turn.response["id"], turn.response["previous_response_id"]
        data = msgspec.json.encode(turn)
        with self._lock:
            self._entries[name] = Entry(client, data, previous, self._clock() + self._seconds)
            self._own[client][name] = None
            self._use(client, name)
            held, few = self._places.held, self._places.limit // 128
            while not self._places.take(client, len(data)):
                most = max(held, key=held.__getitem__, default=client)
                is_small = held[client] + len(data) <= min(few, held[most] - 1)
                oldest = next(iter(self._own[most if is_small else client]))
                if oldest == name:  # only the conversation that it continues is newer
                    self._forget(name)
                    return
                self._drop(oldest)

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
