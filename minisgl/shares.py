"""Places that clients share.

Generated from notebooks/08b_queue.ipynb: edit there.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Places shared by clients: one may hold at most `factor` times the free places.

    A 16th of the places is free only for clients that hold a 128th at most. Fewer than 4 * `factor`
    places are not shared: first come, first served.
    """

    def __init__(self, limit: int, factor: int = 8) -> None:
        self.limit, self.factor = limit, factor
        self.taken, self.held = 0, Counter[str]()

    @property
    def most(self) -> int:
        """The largest number of places for a client that is alone."""
        if self.limit < 4 * self.factor:
            return self.limit
        return (self.limit - self.limit // 16) * self.factor // (self.factor + 1)

    def take(self, client: str, count: int) -> bool:
        """Take places for a client, unless that is more than its share."""
        free, held = self.limit - self.taken - count, self.held[client] + count
        small = self.limit < 4 * self.factor or held <= max(1, self.limit // 128)
        if free < 0 or not (small or held <= self.factor * (free - self.limit // 16)):
            return False
        self.taken += count
        self.held[client] = held
        return True

    def give_back(self, client: str, count: int) -> None:
        self.taken -= count
        self.held[client] -= count
        if not self.held[client]:
            del self.held[client]
