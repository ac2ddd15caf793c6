"""The main function of a side process.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
from llguidance import LLTokenizer

from minisgl.scheduler.forms import as_lark, compile_grammar, load_tokens
from minisgl.scheduler.messages import InvalidRequestError
from minisgl.scheduler.side import CPU_SHARE, MAX_ANSWER, MEMORY, WORK
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer_files import ChatTemplates


def limit_process() -> None:
    """Limit the files, memory, priority and signals of a side process."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    os.nice(5)
    for kind, most in (("AS", MEMORY), ("FSIZE", 0), ("CORE", 0)):
        with suppress(OSError, ValueError):  # a system without such a limit, or with a lower one
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))


def limit_work(seconds: float, memory: int) -> None:
    """Limit the processor time and the additional memory of this process from now on."""
    cpu, memory = sum(os.times()[:2]) + seconds, psutil.Process().memory_info().vms + memory
    for kind, most in (("CPU", int(cpu) + 1), ("AS", memory)):
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number := getattr(resource, f"RLIMIT_{kind}"))[1]
            resource.setrlimit(number, (most if hard < 0 else min(most, hard), hard))


MOST, PER_CHARACTER = 2**20, 400  # bytes of a compiled grammar
COMPILING = 0.5  # processor seconds


def allocated() -> int:
    """Return the bytes that libraries have allocated; 0 where the C library does not count."""
    heap = psutil.heap_info() if hasattr(psutil, "heap_info") else None
    return heap.heap_used + heap.mmap_used if heap else 0


def try_grammar(tokenizer: LLTokenizer | str, field: str, text: str) -> tuple[str, float, int]:
    """Return a grammar, in Lark's notation if it was in GBNF, and its seconds and bytes.

    Raise `InvalidRequestError` for one that takes too much memory or time.
    """
    before, start = allocated(), time.process_time()
    matcher = compile_grammar(tokenizer, field, text)
    size, seconds = allocated() - before, time.process_time() - start
    del matcher  # alive until it was measured
    if size > (most := MOST + PER_CHARACTER * len(text)) or seconds > COMPILING:
        why = f"takes {size:,} bytes and {seconds:.2g} s to compile, more than {most:,} bytes or"
        raise InvalidRequestError(f"{field}: {why} {COMPILING} s", param=field)
    return as_lark(text) if field == "grammar" else text, seconds, size


def serve(fd: int) -> None:
    """Do the jobs from a pipe until it is closed."""
    limit_process()
    pipe = Connection(fd)
    texts, special_tokens, folder, *size = msgspec.msgpack.decode(pipe.recv_bytes())
    templates = ChatTemplates(texts, special_tokens)
    load, read = cache(partial(load_tokens, Path(folder), *size)), cache(partial(Tokenizer, folder))
    jobs: dict[str, Callable[..., Any]] = {
        "start": lambda: None,
        "load": lambda: load() and None,
        "read": lambda: read() and None,
        "render": lambda messages, variables: templates.render(messages, **variables),
        "compile": lambda field, text: try_grammar(load(), field, text),
        "encode": lambda text, special: read().ids_of(text, special),
    }
    with suppress(EOFError, OSError):  # our parent is gone
        while True:
            seconds, kind, *given = msgspec.msgpack.decode(pipe.recv_bytes())
            limit_work(seconds / CPU_SHARE, MEMORY if kind in ("load", "read") else WORK)
            try:
                answer = msgspec.msgpack.encode((jobs[kind](*given), None, None, True))
                if len(answer) > MAX_ANSWER:
                    raise ValueError(f"messages: become {len(answer)} bytes, {MAX_ANSWER} at most")
            except Exception as error:
                expected, why = isinstance(error, ValueError | MemoryError), str(error)[:1000]
                said = [why or f"messages: {type(error).__name__}", getattr(error, "param", None)]
                said = [text and text.encode(errors="backslashreplace").decode() for text in said]
                answer = msgspec.msgpack.encode((None, *said, expected))  # no half a character
            pipe.send_bytes(answer)
