"""Typed events from the scheduler and the caches, and the one function that receives them.

Generated from notebooks/02b_events.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from minisgl.core import IntArray, Phase, Req


class Event(msgspec.Struct, tag=True, array_like=True, gc=False):
    """A reported change; observers receive it at once, in order."""


Emit = Callable[[Event], None]


def pages_of(slots: IntArray, page_size: int) -> list[int]:
    """Return the page numbers of whole pages, given by their slots [n]."""
    pages: list[int] = (slots[::page_size] // page_size).tolist()
    return pages


class RequestAdded(Event):
    """A request joined the queue."""

    uid: int
    prompt_len: int
    max_len: int  # tokens of prompt and answer together, at most
    prompt: Sequence[int] = ()  # token ids; recordings omit them unless `text` is set


class RequestAdmitted(Event):
    """A request got a row, which begins with these pages of the prefix cache."""

    uid: int
    row: int
    pages: list[int]


class RequestRetracted(Event):
    """A request lost row and pages and is in the queue again."""

    uid: int


class RequestReleased(Event):
    """A request has ended and holds no row and no page."""

    uid: int


class SchedulerReset(Event):
    """All requests, steps and cached prefixes were forgotten; all pages and rows are free."""


class StepLaunched(Event):
    """A step was started; the clock of a run. The stage `launch` ends here."""

    step: int
    phase: str  # prefill or decode
    uids: list[int]
    cached: list[int]  # tokens of each request that have K and V once the step is done

    @classmethod
    def of(cls, step: int, phase: Phase, reqs: Sequence[Req]) -> Self:
        """Describe a step whose requests have advanced."""
        return cls(step, phase.value, [r.uid for r in reqs], [r.cached_len for r in reqs])


class StepFinished(Event):
    """The tokens of a step were sent. The stage `process` ends here."""

    step: int
    tokens: list[tuple[int, int | None]]  # uid and token, in the order of the replies


class StageEnded(Event):
    """The host ended one of the stages receive, schedule and wait."""

    stage: str
    step: int


class PagesTaken(Event):
    """Free pages were appended to a request's row."""

    uid: int
    pages: list[int]


class PagesCached(Event):
    """A request's row now begins with these pages of the prefix cache, which it has locked."""

    uid: int
    pages: list[int]


class PagesFreed(Event):
    """Pages went back to the free list."""

    pages: list[int]


class NodeAdded(Event):
    """A leaf was added to the radix tree."""

    parent: int  # its first page; -1: the root
    pages: list[int]


class NodeSplit(Event):
    """A node was cut in two; the upper half keeps the name."""

    node: int
    at: int  # pages of the upper half


class NodeEvicted(Event):
    """A leaf lost its last pages; one that lost all of them left the tree."""

    node: int
    count: int  # pages


class NodeLocked(Event):
    """The path from the root to a node got one lock more or less."""

    node: int
    change: int  # 1 or -1


class NodeUsed(Event):
    """The path from the root to a node was used: its unlocked nodes are evicted last."""

    node: int


AnyEvent = (
    RequestAdded | RequestAdmitted | RequestRetracted | RequestReleased | SchedulerReset
    | StepLaunched | StepFinished | StageEnded | PagesTaken | PagesCached | PagesFreed
    | NodeAdded | NodeSplit | NodeEvicted | NodeLocked | NodeUsed
)  # fmt: skip


class StageTimed(msgspec.Struct, frozen=True, tag=True):
    """A stage of the host's loop, in seconds of the observer's clock."""

    name: str  # receive, schedule, launch, wait, process
    start: float
    end: float
    step: int  # the step it worked for
    size: int = 0  # requests in that step, if known
    phase: str = ""  # prefill or decode, if known
