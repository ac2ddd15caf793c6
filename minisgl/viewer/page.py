"""One self-contained page that plays a recorded run: timeline, queue, pages, page table, radix
tree, tokens.

Generated from notebooks/09d_viewer.ipynb: edit there.
"""

from __future__ import annotations

import gzip
import html
import json
from base64 import b64encode
from importlib import resources
from pathlib import Path
from typing import Any

from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import refuse
from minisgl.events import RequestAdded, StepFinished
from minisgl.recording import Recording, read_recording
from minisgl.tokenizer import load_tokenizer

SCHEDULER, CACHE = "09_scheduler", "03_radix_cache"
SOURCES = {  # by kind of event, and for StageEnded by stage: function and chapter
    "RequestAdded": ("Scheduler.add_request", SCHEDULER),
    "RequestAdmitted": ("CacheManager.admit", CACHE),
    "RequestRetracted": ("retract", "09c_llm"),
    "RequestReleased": ("Scheduler.release", SCHEDULER),
    "SchedulerReset": ("Scheduler.reset", SCHEDULER),
    "StepLaunched": ("Scheduler.launch", SCHEDULER),
    "StepFinished": ("Scheduler.process", SCHEDULER),
    "receive": ("Scheduler.receive", SCHEDULER),
    "schedule": ("Scheduler.next_step", SCHEDULER),
    "wait": ("Scheduler.finish", SCHEDULER),
    "PagesTaken": ("CacheManager.allocate_paged", CACHE),
    "PagesCached": ("CacheManager.cache_req", CACHE),
    "PagesFreed": ("CacheManager.free_slots", CACHE),
    "NodeAdded": ("RadixCache.insert_prefix", CACHE),
    "NodeSplit": ("RadixCache.split", CACHE),
    "NodeEvicted": ("RadixCache.evict", CACHE),
    "NodeLocked": ("RadixCache.lock", CACHE),
    "NodeUsed": ("RadixCache.touch", CACHE),
}


def words_of(recording: Recording) -> dict[int, str]:
    """Spell the tokens of a recording; empty without the model's tokenizer."""
    tokens: set[int] = set()
    for _, event in recording.lines:
        if isinstance(event, RequestAdded):
            tokens.update(event.prompt)
        elif isinstance(event, StepFinished):
            tokens.update(token for _, token in event.tokens if token is not None)
    model = recording.about.get("model")  # None: the embedded one
    known = model is None or Path(model).is_dir()
    tokenizer = load_tokenizer(resolve_model_path(model)) if known else None
    return {} if tokenizer is None else {token: tokenizer.decode([token]) for token in tokens}


def page_of(path: Path, *, book: str = "", frame: int = 0) -> str:
    """Return a recording as one self-contained HTML page.

    book: address of the book's chapters, for links to them. frame: the step shown first.
    """
    data: dict[str, Any] = {"book": book, "frame": frame, "sources": SOURCES}
    data["words"] = words_of(read_recording(path))
    text = path.read_bytes().rpartition(b"\n")[0]  # the last line may be half written
    data["recording"] = b64encode(gzip.compress(text, mtime=0)).decode()
    parts = {name: (resources.files("minisgl.viewer") / name).read_text("utf-8")
             for name in ("viewer.html", "viewer.css", "replay.js", "viewer.js")}  # fmt: skip
    page = parts["viewer.html"].replace("/* STYLE */", parts["viewer.css"])
    page = page.replace("/* REPLAY */", parts["replay.js"])
    page = page.replace("/* VIEWER */", parts["viewer.js"])
    return page.replace("/* DATA */", json.dumps(data).replace("<", "\\u003c"))


class Viewer:
    """A recording, shown inline by Jupyter."""

    def __init__(self, path: str | Path, *, frame: int = 0, height: int = 720) -> None:
        """`height` is that of the frame, in pixels."""
        if height < 1:
            raise refuse("height", "a positive number of pixels", height)
        self.page, self.height = page_of(Path(path), frame=frame), height

    def _repr_html_(self) -> str:
        """Return a frame that holds the page."""
        style = f"width:100%;height:{self.height}px;border:0"
        source = html.escape(self.page, quote=True)
        return f'<iframe title="A recorded run" style="{style}" srcdoc="{source}"></iframe>'
