"""What every worker process knows: where the inboxes are, and whether its parent still lives.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """What a worker tells its parent: that it can work, and each turn of its loop."""

    ready: Callable[[], None]
    beat: Callable[[], None]


@dataclass(frozen=True)
class Addresses:
    """Where each inbox listens. With no extra tokenizers, one text worker does both jobs."""

    scheduler: str
    detokenizer: str
    tokenizers: tuple[str, ...]
    frontend: str

    @classmethod
    def in_folder(cls, folder: Path, num_tokenizer: int) -> Addresses:
        def name(part: str) -> str:
            return f"ipc://{folder / part}"

        extra = tuple(name(f"tokenizer-{i}") for i in range(num_tokenizer))
        return cls(name("scheduler"), name("text"), extra or (name("text"),), name("frontend"))

    @property
    def folder(self) -> Path:
        """Where the socket files are."""
        return Path(self.scheduler.removeprefix("ipc://")).parent


def parent_alive() -> bool:
    """Whether the process that started this one still lives; a worker must not outlive it."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def leave_with_parent(folder: Path) -> None:
    """End this process when its parent was killed, whatever it is doing, and remove `folder`."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave with parent").start()
