"""Lines from a person: with editing on a terminal, plain from a pipe; no echo in between.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory


async def line_from(raw: FileIO) -> str:
    """A thread waits for the line: one that Python need not join when we leave before."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[bytes] = loop.create_future()

    def give(found: bytes) -> None:
        if not line.done():
            line.set_result(found)

    def wait() -> None:
        found = raw.readline()  # unbuffered: a buffer's lock would be held at the exit
        with suppress(RuntimeError):  # the loop is closed, nobody reads on
            loop.call_soon_threadsafe(give, found)

    threading.Thread(target=wait, daemon=True, name="stdin").start()
    text = await line
    if not text:
        raise EOFError
    return text.decode(errors="replace").rstrip("\r\n")


def line_reader() -> Callable[[], Awaitable[str]]:
    """An async function that asks for a line; with editing and history on a terminal."""
    if sys.stdin.isatty():
        session: PromptSession[str] = PromptSession(history=InMemoryHistory())
        return lambda: session.prompt_async("you> ")
    raw = FileIO(sys.stdin.fileno(), closefd=False)
    return lambda: line_from(raw)


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keys have no echo in the block, and what was typed is dropped; Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcflush(descriptor, termios.TCIFLUSH)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
