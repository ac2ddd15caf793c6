"""Untrusted chats and grammars, in processes that are killed if a job takes too long.

Generated from notebooks/09a_structured_output.ipynb: edit there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import msgspec

from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.scheduler.messages import InvalidRequestError
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer_files import ChatTemplates


def asked_for(params: SamplingParams) -> tuple[str, str] | None:
    """Return the field that constrains an output and its grammar as text; None without one."""
    texts: dict[str, Any] = {
        "json_schema": params.json_schema,
        "json_object": '{"type": "object"}' if params.json_object else None,
        "regex": params.regex,
        "choice": json.dumps(params.choice) if params.choice else None,
        "grammar": params.grammar,
        "structural_tag": params.structural_tag,
    }
    return next(((field, text) for field, text in texts.items() if text is not None), None)


SLOTS = 4  # jobs at once, in a server
START, SECONDS = 60.0, 10.0  # to start and load a tokenizer; for a job
CPU_SHARE = 4  # a job has this part of its seconds on the processor
MEMORY, WORK, MAX_ANSWER = 2**32, 2**28, 2**25  # bytes: of a process, of a job, of its result
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")  # environment variables; no secrets


class SideProcess:
    """A process of `side_process.serve` that does one job at a time."""

    def __init__(self, setup: bytes) -> None:
        self._pipe, theirs = Pipe()
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env |= {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        # Threads would count as memory of the job; large blocks go back to the system.
        env |= {"TOKENIZERS_PARALLELISM": "false", "MALLOC_MMAP_THRESHOLD_": "262144"}
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with theirs:
            code = f"from minisgl.scheduler.side_process import serve; serve({theirs.fileno()})"
            command, fds = [sys.executable, "-P", "-c", code], [theirs.fileno()]
            self._process = subprocess.Popen(command, pass_fds=fds, env=env, **quiet)  # type: ignore[call-overload]
        self._pipe.send_bytes(setup)

    def call(self, seconds: float, job: bytes) -> Any:
        """Return the answer to a job; an `OSError` or `EOFError` if there is none in time."""
        self._pipe.send_bytes(job)
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return msgspec.msgpack.decode(self._pipe.recv_bytes(MAX_ANSWER))

    def end(self) -> None:
        """Kill the process, even in the middle of a job."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def packed(seconds: float, *job: Any) -> bytes:
    """Encode a job; raise `ValueError` or `OverflowError` if it holds more than JSON's values."""
    return msgspec.msgpack.encode((seconds, *job), enc_hook=plain)


def plain(value: Any) -> Any:
    """Convert a mapping or sequence of any class; a template gets JSON's types only."""
    if isinstance(value, Mapping | Sequence):
        return dict(value) if isinstance(value, Mapping) else list(value)
    raise ValueError(f"messages: must hold JSON values, got {type(value).__name__}")


def end_all(processes: list[SideProcess]) -> None:
    """End the idle processes."""
    while processes:
        processes.pop().end()


class Side:
    """Side processes of one model: one for each thread that waits for a result."""

    def __init__(self, setup: Sequence[Any], seconds: float = SECONDS) -> None:
        self._setup, self._seconds = msgspec.msgpack.encode(setup), seconds
        self.limit: Callable[[float], float] = lambda most: most  # seconds that a thread may wait
        self._idle = list[SideProcess]()
        self.compile = lru_cache(64)(lambda *job: self.call("compile", *job[:2]))  # not the salt
        weakref.finalize(self, end_all, self._idle)

    def start(self) -> None:
        """Start a process before the first job comes."""
        self._idle.append(SideProcess(self._setup))

    def close(self) -> None:
        """End the processes; a later job starts a new one."""
        end_all(self._idle)

    def measure_grammar(self, params: SamplingParams) -> tuple[str, float, int]:
        """Return a grammar's text, and the seconds and bytes of its compilation; "" if none."""
        asked = asked_for(params)
        return tuple(self.compile(*asked, params.cache_salt)) if asked else ("", 0.0, 0)

    def _take(self, task: str) -> SideProcess:
        """Return a process that has done `task`; replace one that has died."""
        while True:
            try:
                process, fresh = self._idle.pop(), False
            except IndexError:
                process, fresh = SideProcess(self._setup), True
            try:
                process.call(START, packed(START, task))
                return process
            except (OSError, EOFError) as error:
                process.end()
                if fresh:
                    raise RuntimeError(f"no side process can be started: {error!r}") from error

    def call(self, kind: str, field: Any, *given: Any) -> Any:
        """Do a job; a `ValueError` names the field at fault."""
        job = packed(self._seconds, kind, field, *given)  # an error here harms no process
        process = self._take({"compile": "load", "encode": "read"}.get(kind, "start"))
        try:
            value, why, param, expected = process.call(self.limit(self._seconds), job)
        except (OSError, EOFError):
            process.end()
            self.start()  # it loads before the next job comes
            name = {"compile": field, "encode": "prompt"}.get(kind, "messages")
            most = f"{self._seconds:g} seconds ({self._seconds / CPU_SHARE:g} of CPU time)"
            must = f"{name}: must {kind} within {most} and {WORK >> 20} MiB, got one that does not"
            raise InvalidRequestError(must, param=name) from None
        except BaseException:  # nothing was sent, or an interrupt came
            process.end()
            raise
        self._idle.append(process)
        if why is None:
            return value
        kind_of = ValueError if expected else RuntimeError
        raise kind_of(why) if param is None else InvalidRequestError(why, param=param)


class SideTemplates(ChatTemplates):
    """Chat templates that are rendered in a side process."""

    def __init__(self, templates: ChatTemplates, side: Side) -> None:
        super().__init__(templates.texts, templates.special_tokens)
        self._side = side

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return a conversation as one string; raise `ValueError` if that takes too long."""
        try:
            return str(self._side.call("render", messages, variables))
        except (UnicodeEncodeError, OverflowError) as error:
            raise ValueError(f"messages: must hold Unicode and 64-bit integers, {error}") from None


class SideTokenizer(Tokenizer):
    """A tokenizer that renders, tries grammars and encodes by odd rules in side processes."""

    def __init__(self, path: str | Path, seconds: float = SECONDS) -> None:
        super().__init__(path)
        model = ModelConfig.from_path(Path(path))
        ends = sorted(model.eos_token_ids or self.eos_token_ids)
        about = (self.templates.texts, self.templates.special_tokens)
        self.side = Side((*about, str(path), model.vocab_size, ends), seconds)
        self.templates = SideTemplates(self.templates, self.side)
        most = max(2**20, 8 * model.rotary.max_position) if self.quick else 0  # characters
        here, aside = self.ids_of, partial(self.side.call, "encode")  # within limits of memory
        self.ids_of = lambda text, special: (here if len(text) <= most else aside)(text, special)  # type: ignore[method-assign]

    def encode_params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters in ids; raise `ValueError` also for a grammar that does not compile."""
        text, *_ = self.side.measure_grammar(params)
        params = copy(super().encode_params(params))
        if params.grammar is not None:  # the scheduler must not spend time on a conversion
            object.__setattr__(params, "grammar", text)  # it may be longer than a client's
        return params
