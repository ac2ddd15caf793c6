"""Recorded traffic in the public Qwen format: read, write, invent, and make prompts of it.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.dialect import HIGH, LOW
from minisgl.benchmark.load import Ask
from minisgl.core import IntArray

BLOCK = 16  # tokens


@dataclass(frozen=True)
class TraceLine:
    """One recorded request."""

    chat_id: int
    parent_chat_id: int  # -1: a first turn
    timestamp: float  # seconds
    input_length: int  # tokens
    output_length: int  # tokens
    type: str
    turn: int
    hash_ids: list[int]  # one for each block of 16 prompt tokens, the last may be partly filled


def is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_time(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def is_blocks(value: object) -> bool:
    return isinstance(value, list) and all(is_int(block, 0) for block in value)


FIELDS = {
    "chat_id": ("an integer from 0", lambda v: is_int(v, 0)),
    "parent_chat_id": ("an integer from -1", lambda v: is_int(v, -1)),
    "timestamp": ("seconds from 0", is_time),
    "input_length": ("an integer from 1", lambda v: is_int(v, 1)),
    "output_length": ("an integer from 1", lambda v: is_int(v, 1)),
    "type": ("a string", lambda v: isinstance(v, str)),
    "turn": ("an integer from 1", lambda v: is_int(v, 1)),
    "hash_ids": ("a list of integers from 0", is_blocks),
}


def parse_line(text: str, number: int) -> TraceLine:
    """One line of a trace. Raises `ValueError` that names line, field and value."""
    where = f"trace line {number}"
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}), got {text.strip()[:80]!r}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be an object, got {text.strip()[:80]!r}")
    for name, (wanted, fits) in FIELDS.items():
        if name not in data or not fits(data[name]):
            got = f"{data[name]!r:.80}" if name in data else "nothing"
            raise ValueError(f"{where}: {name}: must be {wanted}, got {got}")
    line = TraceLine(**{name: data[name] for name in FIELDS})
    low, high = line.input_length // BLOCK, math.ceil(line.input_length / BLOCK)
    if not low <= len(line.hash_ids) <= high:
        wanted = f"{high} ids for {line.input_length} tokens"
        raise ValueError(f"{where}: hash_ids: must be {wanted}, got {len(line.hash_ids)}")
    return line


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """The first `limit` requests of a file, in the order of their time."""
    lines: list[TraceLine] = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if limit is not None and len(lines) == limit:
                break
            if text.strip():
                lines.append(parse_line(text, number))
    if not lines:
        raise ValueError(f"trace: {path} has no requests")
    return sorted(lines, key=lambda line: line.timestamp)


def write_trace(path: Path, lines: Sequence[TraceLine]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines), encoding="utf-8")


def mix(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Well spread 64-bit numbers, the same for the same value (splitmix64)."""
    z = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def prompt_ids(line: TraceLine) -> IntArray:
    """Token ids of a prompt, int32 [input_length]: equal blocks are equal tokens."""
    blocks = np.array(line.hash_ids, dtype=np.uint64)
    if len(blocks) * BLOCK < line.input_length:  # a last block without an id is nobody else's
        own = np.uint64(1 << 63) + np.uint64(line.chat_id)
        blocks = np.append(blocks, own)
    places = np.repeat(blocks, BLOCK) * np.uint64(BLOCK)
    places += np.tile(np.arange(BLOCK, dtype=np.uint64), len(blocks))
    ids = LOW + mix(places) % np.uint64(HIGH - LOW)
    return ids[: line.input_length].astype(np.int32)


def asks_of(lines: Sequence[TraceLine], scale: float = 1.0) -> list[Ask]:
    """The requests to send; below 1, `scale` brings them closer together."""
    first = lines[0].timestamp
    return [
        Ask(prompt_ids(line), line.output_length, (line.timestamp - first) * scale)
        for line in lines
    ]


def reusable_tokens(lines: Sequence[TraceLine]) -> list[int]:
    """For each prompt, the tokens that an endless cache of whole blocks would have."""
    chains: dict[tuple[int, int], int] = {}  # (number of the chain before, block id) to its number
    found = []
    for line in lines:
        chain, hits, known = 0, 0, True
        for block in line.hash_ids[: line.input_length // BLOCK]:
            step = (chain, block)
            known = known and step in chains
            hits += known
            chain = chains.setdefault(step, len(chains) + 1)
        found.append(min(hits, (line.input_length - 1) // BLOCK) * BLOCK)
    return found


@dataclass(frozen=True)
class Shape:
    """What synthetic chats look like; lengths in tokens, times in seconds, both ends included."""

    sessions: int = 16
    rate: float = 1.0  # sessions a second
    turns: tuple[int, int] = (1, 4)
    systems: int = 2  # different system prompts
    system_len: tuple[int, int] = (64, 128)
    question_len: tuple[int, int] = (10, 60)
    answer_len: tuple[int, int] = (16, 48)
    think_s: float = 2.0  # mean pause before the next turn


class Chats:
    """Invents sessions. The text of a chat is a list of block ids and a length in tokens."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.next_block = seed % 2**32 << 20  # traces of different seeds share no block
        self.next_chat = 0
        self.systems = [self.grow([], 0, self.draw(shape.system_len)) for _ in range(shape.systems)]

    def draw(self, ends: tuple[int, int]) -> int:
        return int(self.rng.integers(ends[0], ends[1] + 1))

    def grow(self, blocks: list[int], length: int, more: int) -> tuple[list[int], int]:
        """Append `more` tokens: a last block that was not full becomes another one."""
        kept, length = blocks[: length // BLOCK], length + more
        new = math.ceil(length / BLOCK) - len(kept)
        self.next_block += new
        return [*kept, *range(self.next_block - new, self.next_block)], length

    def session(self, start: float) -> Iterator[TraceLine]:
        """The turns of one chat that begins at `start`."""
        shape, now, parent = self.shape, start, -1
        blocks, length = self.systems[self.rng.integers(shape.systems)]
        for turn in range(1, self.draw(shape.turns) + 1):
            blocks, length = self.grow(blocks, length, self.draw(shape.question_len))
            answer, chat = self.draw(shape.answer_len), self.next_chat
            self.next_chat += 1
            yield TraceLine(chat, parent, round(now, 3), length, answer, "text", turn, blocks)
            blocks, length = self.grow(blocks, length, answer)
            now, parent = now + self.rng.exponential(shape.think_s), chat


def synthesize(shape: Shape | None = None, seed: int = 0) -> list[TraceLine]:
    """A synthetic trace: Poisson sessions of chats that grow, in the order of time."""
    shape = shape or Shape()
    chats = Chats(shape, seed)
    starts = np.cumsum(chats.rng.exponential(1 / shape.rate, shape.sessions))
    lines = [line for start in starts for line in chats.session(float(start))]
    return sorted(lines, key=lambda line: line.timestamp)
