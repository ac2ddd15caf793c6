"""A chat in the terminal: an ordinary client of the same frontend that the HTTP routes use.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from io import FileIO
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory

from minisgl.core import SamplingParams
from minisgl.server.frontend import Frontend, RequestFailed

HELP = "/reset forgets the conversation · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


def line_reader() -> Callable[[], Awaitable[str]]:
    """An async function that asks for a line; with editing and history on a terminal."""
    if sys.stdin.isatty():
        session: PromptSession[str] = PromptSession(history=InMemoryHistory())
        return lambda: session.prompt_async("you> ")
    raw = FileIO(sys.stdin.fileno(), closefd=False)

    async def read() -> str:
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

    return read


class Shell:
    """One conversation. Every turn sends all of it again, and the prefix cache makes that cheap."""

    def __init__(
        self, frontend: Frontend, params: SamplingParams, write: Callable[[str], Any]
    ) -> None:
        self._frontend, self._params, self._write = frontend, params, write
        self.history: list[dict[str, str]] = []

    async def turn(self, text: str) -> None:
        """Answer one line of the user; a refused turn leaves the history as it was."""
        messages = [*self.history, {"role": "user", "content": text}]
        answer = ""
        try:
            async for reply in self._frontend.generate(self._params, messages=messages):
                answer += reply.text
                self._write(reply.text)
        except RequestFailed as failure:
            self._write(f"[{failure}; /reset starts over]\n")
            return
        except asyncio.CancelledError:
            self._write(" [stopped]")
        self._write("\n")
        self.history = [*messages, {"role": "assistant", "content": answer}]

    async def handle(self, line: str) -> bool:
        """One line of input; False means leave."""
        match line.strip():
            case "":
                return True
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.history = []
                self._write("[conversation forgotten]\n")
            case command if command.startswith("/"):
                self._write(f"[{HELP}]\n")
            case text:
                await self._interruptible(text)
        return True

    async def _interruptible(self, text: str) -> None:
        """Run a turn; Ctrl-C cancels the turn, which aborts its request, and not the shell."""
        turn = asyncio.ensure_future(self.turn(text))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, turn.cancel)
        try:
            await asyncio.wait({turn})
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if not turn.cancelled() and turn.exception() is not None:
            raise turn.exception()  # type: ignore[misc]


async def run_shell(frontend: Frontend, sampling_defaults: Mapping[str, Any]) -> None:
    """Read lines and answer them until the user leaves."""

    def write(text: str) -> None:
        print(text, end="", flush=True)

    shell, read = Shell(frontend, SamplingParams(**sampling_defaults), write), line_reader()
    print(HELP)
    await frontend.start()
    try:
        while await shell.handle(await read()):
            pass
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        await frontend.stop()
