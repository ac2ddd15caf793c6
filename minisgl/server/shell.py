"""A chat in the terminal: an ordinary client of the same frontend that the HTTP routes use.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
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

    async def read() -> str:
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line.rstrip("\n")

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
