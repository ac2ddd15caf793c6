"""Write the events of a run to a file while requests are served, and rebuild pool, tree and
answers from the file.

Generated from notebooks/02c_recording.ipynb: edit there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minisgl import events
from minisgl.config.rules import file_of
from minisgl.events import Event, RequestAdded

FORMAT = 1  # of a recording
BUFFER = 1 << 16  # bytes


class Recorder:
    """An observer that writes events to a file, one line of JSON for each."""

    def __init__(
        self, path: Path, *, text: bool = False, max_bytes: int = 1 << 28,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """Open the file; with `text` also record prompts."""
        with file_of("record", path):
            self.file = path.open("wb")
        self.text, self.left, self.clock = text, max_bytes, clock
        self.start = self.flushed = clock()  # of the run: `begin` sets it again
        self.append, self.buffer = msgspec.json.Encoder().encode_into, bytearray()

    def begin(self, about: dict[str, Any]) -> None:
        """Start the clock and write the first line, which describes the engine."""
        self.start = self.flushed = self.clock()
        self.append({"minisgl": FORMAT, "text": self.text, **about}, self.buffer, -1)
        self.buffer += b"\n"

    def __call__(self, event: Event) -> None:
        """Record an event; flush the buffer when it is full, and twice a second."""
        now = self.clock()
        if type(event) is RequestAdded and not self.text:
            event = RequestAdded(event.uid, event.prompt_len, event.max_len)
        self.append((int(1e6 * (now - self.start)), event), buffer := self.buffer, -1)
        buffer += b"\n"
        if len(buffer) > BUFFER or now > self.flushed + 0.5:
            self.flush()
            self.flushed = now

    def flush(self) -> None:
        """Write the buffer, or as many of its lines as `max_bytes` allows."""
        whole = len(self.buffer)
        fits = whole if whole <= self.left else self.buffer.rfind(b"\n", 0, max(0, self.left)) + 1
        lines = bytes(self.buffer[:fits])
        self.left -= whole
        self.buffer.clear()  # first, so that a full disk does not fill the memory
        self.file.write(lines)
        self.file.flush()

    def close(self) -> None:
        """Complete the file."""
        self.flush()
        self.file.close()


class Observed(NamedTuple):
    """The observers of a scheduler's run."""

    traced: bool = False  # times of its stages, for a trace
    record: str | None = None  # a file for its events
    record_text: bool = False  # and prompts in it

    @contextmanager
    def recorder(self) -> Iterator[Recorder | None]:
        """Open the file for the block, if one is named; a full disk on closing is no error."""
        if self.record is None:
            yield None
            return
        recorder = Recorder(Path(self.record), text=self.record_text)
        yield recorder
        with suppress(OSError):
            recorder.close()


Line = tuple[int, events.AnyEvent]


@dataclass
class Recording:
    """Contents of a file: a description of the engine, and events with their times in µs."""

    about: dict[str, Any]
    lines: list[Line]


def read_recording(path: Path) -> Recording:
    """Read a recording; raise ValueError if the file is not one."""
    with file_of("recording", path):
        first, *lines = path.read_bytes().split(b"\n")
    try:
        about = msgspec.json.decode(first, type=dict[str, Any])
        if about.get("minisgl") != FORMAT:
            raise ValueError(f"format {about.get('minisgl')}")
        decode = msgspec.json.Decoder(Line).decode
        return Recording(about, [decode(line) for line in lines[:-1]])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"recording: must be a file of --record, got {path} ({error})") from None


@dataclass
class ReplayedRequest:
    """The state of a request according to the events."""

    uid: int
    prompt_len: int
    max_len: int
    prompt: list[int]
    state: str = "waiting"  # running, done
    row: int = -1
    pages: list[int] = field(default_factory=list)  # of its row
    shared: int = 0  # leading pages that belong to the prefix cache
    cached: int = 0  # tokens with K and V
    answer: list[int] = field(default_factory=list)


@dataclass
class ReplayedNode:
    """A node of the radix tree, named by its first page."""

    pages: list[int]
    parent: int  # -1: the root
    locks: int = 0


@dataclass
class Replay:
    """The state of an engine after some events."""

    num_pages: int
    free: set[int] = field(default_factory=set)
    requests: dict[int, ReplayedRequest] = field(default_factory=dict)  # the last one of each uid
    nodes: dict[int, ReplayedNode] = field(default_factory=dict)  # by their first page
    lru: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the next victim first
    steps: int = 0

    def __post_init__(self) -> None:
        """Mark all pages as free."""
        self.free.update(range(self.num_pages))

    def path(self, page: int) -> Iterator[int]:
        """Yield the names of the nodes from one up to the root, without the root."""
        while page >= 0:
            yield page
            page = self.nodes[page].parent

    def split(self, name: int, at: int) -> None:
        """Cut a node after `at` pages."""
        upper = self.nodes[name]
        lower = ReplayedNode(upper.pages[at:], name, upper.locks)
        renamed = lower.pages[0]
        for child in self.nodes.values():
            if child.parent == name:
                child.parent = renamed
        self.nodes[renamed], upper.pages = lower, upper.pages[:at]
        if name in self.lru:  # the lower half keeps its place; a use of the upper one follows
            self.lru = OrderedDict((renamed if n == name else n, None) for n in self.lru)

    def change_tree(self, event: Event) -> None:
        """Apply an event of the radix tree."""
        match event:
            case events.NodeAdded(parent=parent, pages=pages):
                self.nodes[pages[0]] = ReplayedNode(list(pages), parent)
            case events.NodeSplit(node=name, at=at):
                self.split(name, at)
            case events.NodeEvicted(node=name, count=count):
                del self.nodes[name].pages[-count:]
                if not self.nodes[name].pages:
                    del self.nodes[name], self.lru[name]
            case events.NodeLocked(node=name, change=change):
                for page in self.path(name):
                    self.nodes[page].locks += change
                    if self.nodes[page].locks == 1 and change == 1:
                        del self.lru[page]
            case events.NodeUsed(node=name):
                for page in self.path(name):
                    if self.nodes[page].locks == 0:
                        self.lru[page] = None
                        self.lru.move_to_end(page)

    def change_request(self, event: Event) -> None:
        """Apply an event of a request or of pages."""
        match event:
            case events.RequestAdded(uid=uid, prompt_len=length, max_len=most, prompt=prompt):
                self.requests[uid] = ReplayedRequest(uid, length, most, list(prompt))
            case events.RequestAdmitted(uid=uid, row=row, pages=pages):
                req = self.requests[uid]
                req.state, req.row, req.pages, req.shared = "running", row, list(pages), len(pages)
            case events.RequestRetracted(uid=uid) | events.RequestReleased(uid=uid):
                req = self.requests[uid]
                req.state = "done" if isinstance(event, events.RequestReleased) else "waiting"
                req.row, req.pages, req.shared, req.cached = -1, [], 0, 0
            case events.SchedulerReset():
                self.free, self.nodes = set(range(self.num_pages)), {}
                self.lru.clear()
                for uid in self.requests:
                    self.change_request(events.RequestReleased(uid))
            case events.PagesTaken(uid=uid, pages=pages):
                self.requests[uid].pages += pages
                self.free.difference_update(pages)
            case events.PagesCached(uid=uid, pages=pages):
                req = self.requests[uid]
                req.pages[: len(pages)], req.shared = pages, len(pages)
            case events.PagesFreed(pages=pages):
                self.free.update(pages)
            case events.StepLaunched(step=step, uids=uids, cached=cached):
                self.steps = step + 1
                for uid, tokens in zip(uids, cached):
                    self.requests[uid].cached = tokens
            case events.StepFinished(tokens=given):
                for uid, token in given:
                    if token is not None:
                        self.requests[uid].answer.append(token)
            case _:
                self.change_tree(event)


def replay(recording: Recording) -> Replay:
    """Replay a recording to its end."""
    state = Replay(recording.about["num_pages"])
    for _, event in recording.lines:
        state.change_request(event)
    return state
