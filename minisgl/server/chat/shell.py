"""A chat in the terminal: an ordinary client, of this process's frontend or of a server.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from io import FileIO
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from minisgl.server.frontend import RequestFailed
from minisgl.server.workers.messages import UserReply


async def line_from(raw: FileIO) -> str:
    """Read a line in a daemon thread, which does not delay the exit of Python."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[bytes] = loop.create_future()

    def give(found: bytes) -> None:
        if not line.done():
            line.set_result(found)

    def wait() -> None:
        found = raw.readline()  # unbuffered: a buffer's lock would be held at the exit
        with suppress(RuntimeError):  # the loop is closed: no reader is left
            loop.call_soon_threadsafe(give, found)

    threading.Thread(target=wait, daemon=True, name="stdin").start()
    text = await line
    if not text:
        raise EOFError
    return text.decode(errors="replace").rstrip("\r\n")


def line_reader() -> Callable[[], Awaitable[str]]:
    """Return an async function that reads a line; with editing and history on a terminal."""
    if sys.stdin.isatty():
        keys = KeyBindings()

        @keys.add("c-c", eager=True)
        def drop_line(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
        return lambda: session.prompt_async("you> ")
    raw = FileIO(sys.stdin.fileno(), closefd=False)
    return lambda: line_from(raw)


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Turn off echo in the block and drop typed keys; Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)  # and drop typed keys


HELP = """\
/help    shows this
/stats   speed and cached tokens of the last answer
/reset   forgets the conversation
/exit    leaves, as Ctrl-D does
Ctrl-C   stops an answer; at the prompt, drops the line, and leaves if there is none
"""

Conversation = list[dict[str, str]]
Talk = Callable[[Conversation], AsyncGenerator[UserReply, None]]


def stats_line(reply: UserReply, pieces: int, seconds: float) -> str:
    """Format speed and cached tokens of an answer that came in `pieces` pieces."""
    tokens = max(reply.completion_tokens, pieces)  # counts come with the end of the stream
    speed = tokens / seconds if seconds > 0 else 0.0
    text = f"{tokens} tokens in {seconds:.2f} s, {speed:.1f} tok/s"
    if reply.prompt_tokens:
        text += f"; prompt {reply.prompt_tokens} tokens, {reply.cached_tokens} of them cached"
    return text


class Shell:
    """One conversation. Each turn sends the whole history; the prefix cache makes that cheap."""

    def __init__(self, talk: Talk, write: Callable[[str], Any]) -> None:
        self._talk, self._write = talk, write
        self.history: Conversation = []
        self.stats = "no answer yet"

    async def turn(self, text: str) -> None:
        """Answer one line of the user; a refused turn leaves the history as it was."""
        messages = [*self.history, {"role": "user", "content": text}]
        answer, start, last, pieces = "", time.perf_counter(), None, 0
        try:
            async with aclosing(self._talk(messages)) as replies:
                async for last in replies:
                    answer += last.text
                    pieces += bool(last.text)
                    self._write(last.text)
        except RequestFailed as failure:
            self._write(f"[{failure}; /reset starts over]\n")
            return
        except asyncio.CancelledError:
            self._write(" [stopped]")
        self._write("\n")
        if last is not None:
            self.stats = stats_line(last, pieces, time.perf_counter() - start)
        self.history = [*messages, {"role": "assistant", "content": answer}]

    async def handle(self, line: str) -> bool:
        """Handle one line of input; return False to leave."""
        match line.strip():
            case "":
                return True
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.history = []
                self._write("[conversation forgotten]\n")
            case "/stats":
                self._write(f"[{self.stats}]\n")
            case command if command.startswith("/"):
                self._write("" if command == "/help" else f"[unknown command {command}]\n")
                self._write(HELP)
            case text:
                with quiet_keys():
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


async def run_shell(talk: Talk) -> None:
    """Read lines and answer them until the user leaves."""

    def write(text: str) -> None:
        print(text, end="", flush=True)

    shell, read = Shell(talk, write), line_reader()
    write(HELP)
    try:
        while await shell.handle(await read()):
            pass
    except (EOFError, KeyboardInterrupt):
        pass
