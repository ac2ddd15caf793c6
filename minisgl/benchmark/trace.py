"""Traffic in the public Qwen format: read it, synthesize it, and make prompts from it.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic.dataclasses import dataclass

from minisgl.benchmark.load import SAFE_VOCAB
from minisgl.benchmark.workload import RandomRequest
from minisgl.config.rules import Count, Number, Positive, explain, file_of
from minisgl.core import IntArray

BLOCK = 16  # tokens


@dataclass(frozen=True, config=ConfigDict(strict=True))
class TraceLine:
    """One recorded request; an invalid field is a `ValidationError`, which is a `ValueError`."""

    chat_id: Count
    parent_chat_id: Annotated[int, Field(ge=-1)]  # -1: a first turn
    timestamp: Annotated[Number, Field(ge=0)]  # seconds
    input_length: Positive  # tokens
    output_length: Positive  # tokens
    type: str
    turn: Positive
    hash_ids: list[Count]  # one for each block of 16 prompt tokens, the last may be partly filled

    @pydantic.field_validator("hash_ids")
    @classmethod
    def cover_the_prompt(cls, blocks: list[int], info: ValidationInfo) -> list[int]:
        """Require an id per block; the id of a last, partial block may be missing."""
        length = info.data.get("input_length", BLOCK * len(blocks))
        low, high = length // BLOCK, math.ceil(length / BLOCK)
        if not low <= len(blocks) <= high:
            raise ValueError(f"must be {high} ids for {length} tokens")
        return blocks


LINE = TypeAdapter(TraceLine)


def parse_line(text: str, number: int) -> TraceLine:
    """Parse one line of a trace; raise `ValueError` that names line, field and value."""
    try:
        return LINE.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"trace line {number}: {explain(error)}") from None


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """Read the first `limit` requests of a file, and sort them by time."""
    with file_of("trace", path), path.open(encoding="utf-8") as file:
        rows = ((number, text) for number, text in enumerate(file, 1) if text.strip())
        lines = [parse_line(text, number) for _, (number, text) in zip(range(limit or 2**62), rows)]
    if not lines:
        raise ValueError(f"trace: {path} has no requests")
    return sorted(lines, key=lambda line: line.timestamp)


def block_tokens(block: int) -> IntArray:
    """Return the token ids of one block, int32 [16], always the same for the same id."""
    return np.random.default_rng(block).integers(0, SAFE_VOCAB, BLOCK, dtype=np.int32)


def prompt_ids(line: TraceLine) -> IntArray:
    """Return the token ids of a prompt, int32 [input_length]: equal blocks are equal tokens."""
    blocks = list(line.hash_ids)
    if len(blocks) * BLOCK < line.input_length:  # a last block without an id is unique
        blocks.append(line.chat_id + (1 << 64))
    return np.concatenate([block_tokens(block) for block in blocks])[: line.input_length]


def requests_of(lines: Sequence[TraceLine], scale: float = 1.0) -> list[RandomRequest]:
    """Return the requests to send; `scale` multiplies their times."""
    first = lines[0].timestamp
    return [
        RandomRequest(prompt_ids(line), line.output_length, (line.timestamp - first) * scale)
        for line in lines
    ]


def reusable_tokens(lines: Sequence[TraceLine]) -> list[int]:
    """Count each prompt's tokens that an unlimited cache of whole blocks would hold."""
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


@plain_dataclass(frozen=True)
class TraceShape:
    """Shape of synthetic chats; lengths in tokens, times in seconds, both ends included."""

    sessions: int = 16
    rate: float = 1.0  # sessions a second
    turns: tuple[int, int] = (1, 4)
    systems: int = 2  # different system prompts
    system_len: tuple[int, int] = (64, 128)
    question_len: tuple[int, int] = (10, 60)
    answer_len: tuple[int, int] = (16, 48)
    think_s: float = 2.0  # mean pause before the next turn


Text = tuple[list[int], int]  # block ids and length in tokens


class ChatGenerator:
    """A source of sessions; a chat's state is its block ids and its length."""

    def __init__(self, shape: TraceShape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.next_block = seed % 2**32 << 20  # traces of different seeds share no block
        self.next_chat = 0
        self.systems = [self.grow(([], 0), shape.system_len) for _ in range(shape.systems)]

    def sample_length(self, ends: tuple[int, int]) -> int:
        return int(self.rng.integers(ends[0], ends[1] + 1))

    def grow(self, text: Text, ends: tuple[int, int]) -> Text:
        """Append some tokens; a last block that was not full gets a new id."""
        blocks, length = text
        kept, length = blocks[: length // BLOCK], length + self.sample_length(ends)
        new = math.ceil(length / BLOCK) - len(kept)
        self.next_block += new
        return [*kept, *range(self.next_block - new, self.next_block)], length

    def session(self, now: float) -> Iterator[TraceLine]:
        """Yield the turns of one chat that begins at `now`."""
        parent, text = -1, self.systems[self.rng.integers(self.shape.systems)]
        for turn in range(1, self.sample_length(self.shape.turns) + 1):
            blocks, length = self.grow(text, self.shape.question_len)
            text = self.grow((blocks, length), self.shape.answer_len)
            answer, chat = text[1] - length, self.next_chat
            self.next_chat += 1
            yield TraceLine(chat, parent, round(now, 3), length, answer, "text", turn, blocks)
            now, parent = now + float(self.rng.exponential(self.shape.think_s)), chat


def synthesize(shape: TraceShape | None = None, seed: int = 0) -> list[TraceLine]:
    """Synthesize a trace: Poisson sessions of growing chats, sorted by time."""
    shape = shape or TraceShape()
    chats = ChatGenerator(shape, seed)
    starts = np.cumsum(chats.rng.exponential(1 / shape.rate, shape.sessions))
    lines = [line for start in starts for line in chats.session(float(start))]
    return sorted(lines, key=lambda line: line.timestamp)
