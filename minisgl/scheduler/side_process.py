"""The main function of a side process.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import operator
import os
import random
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
import numpy as np
import psutil
from llguidance import LLMatcher, LLTokenizer

from minisgl.scheduler.forms import as_lark, compile_grammar, load_tokens
from minisgl.scheduler.messages import InvalidRequestError
from minisgl.scheduler.side import CPU_SHARE, MEMORY
from minisgl.tokenizer_files import ChatTemplates


def limit_process() -> None:
    """Limit the files, memory, priority and signals of a side process."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    os.nice(5)
    for kind, most in (("AS", MEMORY), ("FSIZE", 0), ("CORE", 0)):
        with suppress(OSError, ValueError):  # a system without such a limit, or with a lower one
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))


def limit_work(seconds: float) -> None:
    """Limit the processor time of this process from now on."""
    most = int(sum(os.times()[:2]) + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


MOST, PER_CHARACTER = 2**20, 400  # bytes of a compiled grammar
COMPILING, MASKING, TOKENS = 0.5, 0.025, 32  # processor seconds, of one token; tokens tried


def allocated() -> int:
    """Return the bytes that libraries have allocated; 0 where the C library does not count."""
    heap = psutil.heap_info() if hasattr(psutil, "heap_info") else None
    return heap.heap_used + heap.mmap_used if heap else 0


def slowest_token(matcher: LLMatcher) -> float:
    """Return the processor seconds of the slowest token in the beginning of a random answer."""
    slowest, last = 0.0, time.process_time()
    for _ in range(TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        matcher.consume_token(int(random.choice(allowed)) if len(allowed) else 0)
        slowest, last = max(slowest, time.process_time() - last), time.process_time()
    return slowest


def try_grammar(tokenizer: LLTokenizer | str, field: str, text: str) -> str:
    """Compile a grammar, return it in Lark's notation; refuse one that takes too much."""
    before, start = allocated(), time.process_time()
    matcher = compile_grammar(tokenizer, field, text)
    taken = (allocated() - before, time.process_time() - start, slowest_token(matcher))
    most = (MOST + PER_CHARACTER * len(text), COMPILING, MASKING)
    if any(map(operator.gt, taken, most)):
        why = f"{field}: takes {taken} (bytes, seconds to compile, seconds for a token), more than"
        raise InvalidRequestError(f"{why} {most}", param=field)
    return as_lark(text) if field == "grammar" else text


def serve(fd: int) -> None:
    """Do the jobs from a pipe until it is closed."""
    limit_process()
    pipe = Connection(fd)
    texts, special_tokens, folder, *sizes = msgspec.msgpack.decode(pipe.recv_bytes())
    templates = ChatTemplates(texts, special_tokens)
    load = cache(partial(load_tokens, Path(folder), *sizes))
    jobs: dict[str, Callable[..., Any]] = {
        "start": lambda: None,
        "load": lambda: load() and None,
        "render": lambda messages, variables: templates.render(messages, **variables),
        "compile": lambda field, text: try_grammar(load(), field, text),
    }
    with suppress(EOFError, OSError):  # our parent is gone
        while True:
            seconds, kind, *given = msgspec.msgpack.decode(pipe.recv_bytes())
            limit_work(seconds / CPU_SHARE)
            try:
                answer = msgspec.msgpack.encode((jobs[kind](*given), None, None, True))
            except Exception as error:
                why, param = str(error) or type(error).__name__, getattr(error, "param", None)
                refused = (None, why, param, isinstance(error, ValueError))
                answer = msgspec.msgpack.encode(refused)
            pipe.send_bytes(answer)
