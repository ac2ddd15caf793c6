"""One self-contained page that replays a recorded run: timeline, queue, pages, page table, radix
tree, tokens.

Generated from notebooks/09d_viewer.ipynb: edit there.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import subprocess
import sys
from base64 import b64encode
from contextlib import suppress
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
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
    """Return the text of a recording's tokens; empty without the model's tokenizer."""
    tokens: set[int] = set()
    for _, event in recording.lines:
        if isinstance(event, RequestAdded):
            tokens.update(event.prompt)
        elif isinstance(event, StepFinished):
            tokens.update(token for _, token in event.tokens if token is not None)
    model = recording.about.get("model")  # None: the embedded one
    known = model is None or Path(str(model)).is_dir()
    tokenizer = load_tokenizer(resolve_model_path(model)) if known else None
    return {} if tokenizer is None else {token: tokenizer.decode([token]) for token in tokens}


def source(name: str) -> str:
    """Return a file of the page's own code."""
    return (resources.files("minisgl.viewer") / name).read_text("utf-8")


def page_of(path: Path, *, book: str = "", frame: int = 0, pair: bool = False) -> str:
    """Return a recording as one self-contained HTML page.

    book: address of the book's chapters, for links to them. frame: the step shown first.
    pair: follow the clock of a second run in the page around this one.
    """
    data: dict[str, Any] = {"book": book, "frame": frame, "pair": pair, "sources": SOURCES}
    data["words"] = words_of(read_recording(path))
    text = path.read_bytes().rpartition(b"\n")[0]  # the last line may be incomplete
    data["recording"] = b64encode(gzip.compress(text, mtime=0)).decode()
    page = source("viewer.html").replace("/* STYLE */", source("viewer.css"))
    for script in ("replay", "simulate", "whatif", "viewer"):
        page = page.replace(f"/* {script.upper()} */", source(f"{script}.js"))
    return page.replace("/* DATA */", json.dumps(data).replace("<", "\\u003c"))


def pair_of(runs: dict[str, Path], *, book: str = "", frame: int = 0) -> str:
    """Return two recordings, by their titles, side by side in one HTML page with one clock."""
    if len(runs) != 2:
        raise refuse("runs", "two recordings by their titles", list(runs))
    frames = ""
    for title, path in runs.items():
        page = html.escape(page_of(path, book=book, frame=frame, pair=True), quote=True)
        name = html.escape(title, quote=True)
        frames += f'<section><h1>{name}</h1><iframe title="{name}" srcdoc="{page}"></iframe>'
        frames += "</section>"
    return source("pair.html").replace("/* RUNS */", frames)


class Viewer:
    """A recording, or two by their titles, displayed inline by Jupyter."""

    def __init__(
        self, run: str | Path | dict[str, Path], *, frame: int = 0, height: int = 720
    ) -> None:
        """Read a recording and open it at `frame`; `height` is that of the page, in pixels."""
        if height < 1:
            raise refuse("height", "a positive number of pixels", height)
        if isinstance(run, dict):
            self.page = pair_of(run, frame=frame)
        else:
            self.page = page_of(Path(run), frame=frame)
        self.height = height

    def _repr_html_(self) -> str:
        """Return a frame that holds the page."""
        style = f"width:100%;height:{self.height}px;border:0"
        source = html.escape(self.page, quote=True)
        return f'<iframe title="A recorded run" style="{style}" srcdoc="{source}"></iframe>'


def page_in_process(path: Path) -> bytes:
    """Return a recording as a page that another process makes, with lower priority.

    Raise `ValueError` with its message if it fails.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with TemporaryDirectory(prefix="minisgl-viewer-") as folder:
        page = Path(folder, "page.html")
        program = [sys.executable, "-P", "-m", "minisgl.viewer"]
        command = [*program, str(path.absolute()), "-o", str(page)]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            with suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, 5)
            said = process.communicate()[1]
        if process.returncode:
            raise ValueError(said.removeprefix("minisgl.viewer: ").strip()[-1000:])
        return page.read_bytes()
