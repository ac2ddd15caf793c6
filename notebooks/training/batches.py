"""Packed rows of conversations in stages that grow longer.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from training.chats import stream
from training.tokenizer import PAD_ID, encode_chat, train_tokenizer

Document = tuple[NDArray[np.int32], NDArray[np.bool_]]  # token ids, and a mask of those to learn


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum."""

    until: float  # the share of the run at which it ends
    row_tokens: int
    most_pairs: int  # length of the longest list


CURRICULUM = (
    Stage(until=0.12, row_tokens=2048, most_pairs=12),
    Stage(until=0.35, row_tokens=2048, most_pairs=60),
    Stage(until=0.75, row_tokens=2048, most_pairs=170),
    Stage(until=1.00, row_tokens=4096, most_pairs=200),
)
SHORT_CURRICULUM = (Stage(until=1.0, row_tokens=256, most_pairs=4),)  # for a try on a CPU


def join_row(row: list[Document], free: int) -> Document:
    """Concatenate the documents of a row and pad its last `free` places."""
    padding = (np.full(free, PAD_ID, np.int32), np.zeros(free, np.bool_))
    ids, learnt = zip(*row, padding)
    return np.concatenate(ids), np.concatenate(learnt)


def pack(documents: Iterable[Document], row_tokens: int, waiting: int = 24) -> Iterator[Document]:
    """Pack rows of `row_tokens` + 1 tokens: add the longest waiting document that fits."""
    queue: list[Document] = []
    row: list[Document] = []
    free = row_tokens + 1
    for document in documents:
        if len(document[0]) > row_tokens + 1:
            continue
        queue.append(document)
        if len(queue) < waiting:
            continue
        fitting = [index for index, (ids, _) in enumerate(queue) if len(ids) <= free]
        if fitting:
            longest = max(fitting, key=lambda index: len(queue[index][0]))
            row.append(queue.pop(longest if row else fitting[0]))
            free -= len(row[-1][0])
        else:
            yield join_row(row, free)
            row, free = [], row_tokens + 1


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Batches(IterableDataset):
    """Endless batches of packed rows; every worker process reads a stream with its own seed.

    A batch is (ids [rows, n] int32, at [m] int64, wanted [m] int64): the input tokens, the flat
    positions before each learnt token, and these tokens.
    """

    def __init__(self, stage: Stage, batch_tokens: int, seed: int) -> None:
        self.stage, self.seed = stage, seed
        self.rows = max(1, batch_tokens // stage.row_tokens)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        tokenizer = train_tokenizer()
        chats = stream(seed, self.stage.most_pairs)
        rows = pack((encode_chat(tokenizer, chat) for chat in chats), self.stage.row_tokens)
        while True:
            ids, learnt = map(np.stack, zip(*(next(rows) for _ in range(self.rows))))
            at = np.flatnonzero(learnt[:, 1:])
            wanted = ids[:, 1:].ravel()[at].astype(np.int64)
            yield (
                torch.from_numpy(ids[:, :-1].copy()),
                torch.from_numpy(at),
                torch.from_numpy(wanted),
            )
