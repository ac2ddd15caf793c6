"""An executor without a model: each slot holds a hash of its prefix, and every read is checked.

Generated from notebooks/09e_simulation.ipynb: edit there.
"""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np
from numpy.typing import NDArray

from minisgl.attention.metadata import ragged_arange
from minisgl.core import Batch, Req
from minisgl.engine.logits_processors import LogitsProcessors, masks_of
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import ForwardInput, ForwardOutput, SampledTokens, build_forward_input
from minisgl.kvcache.page_table import TableManager
from minisgl.scheduler.grammar import Grammars

Hashes = NDArray[np.uint64]


def mixed(x: Hashes) -> Hashes:
    """Return hashes of which each bit depends on all bits of x (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt_hash(salt: str | None) -> int:
    """Return the hash of an empty prefix."""
    return 0 if salt is None else 1 + zlib.crc32(salt.encode())


class WrongKV(RuntimeError):
    """A step would read a slot that does not hold the KV of its own prefix."""


class Ready(ForwardOutput):
    """The output of a step that is over."""

    def __init__(self, tokens: SampledTokens) -> None:
        self.tokens = tokens

    def wait(self) -> SampledTokens:
        """Return at once."""
        return self.tokens


class SimulatedExecutor:
    """Computes hashes where a model computes KV, and tokens that depend on the prefix alone.

    The hash of a prefix is a sum over its tokens, each multiplied by a factor of its position, so
    that one `cumsum` gives those of a whole batch. Of four tokens three repeat what stood `PERIOD`
    tokens before, so that drafts are right now and then.
    """

    PERIOD, ALPHABET = 3, 24

    def __init__(
        self, *, num_pages: int, page_size: int, max_seq_len: int, max_running_req: int,
        vocab_size: int, share_memory: bool = True, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        """Build the tables; with `share_memory` False the device's follow the host's each step."""
        self.num_pages, self.page_size = num_pages, page_size
        self.max_seq_len, self.vocab_size = max_seq_len, vocab_size
        self.tables = TableManager(max_running_req, max_seq_len, page_size, num_pages, "cpu",
                                   share_memory=share_memory)  # fmt: skip
        self.page_table = self.tables.device_page_table.numpy()
        self.token_pool = self.tables.token_pool.numpy()
        self.kv = np.zeros((num_pages + 1) * page_size, np.uint64)
        self.of_token = mixed(np.arange(1, vocab_size + 1, dtype=np.uint64))
        self.of_position = mixed(np.arange(self.tables.width, dtype=np.uint64)) | np.uint64(1)
        self.grammars, self.launched = grammars, 0
        processors = LogitsProcessors(vocab_size, self.tables.token_pool)
        self.sampler = None if grammars is None else Sampler(vocab_size, "cpu", 0, None, processors)

    def prepare(self, batch: Batch) -> ForwardInput:
        """Lay the step out as the engine does for a step without a captured graph."""
        return build_forward_input(batch, self.tables, self.page_size, self.sampler)

    def step(self, inputs: ForwardInput) -> ForwardOutput:
        """Store the hashes of the new tokens, check all that attention reads, and sample."""
        self.sample_deferred()
        self.tables.flush()
        new = self.forward(inputs)
        sample = partial(self.sample, inputs, new[inputs.last_idx])
        self.launched += 1
        return sample() if self.grammars is None else self.grammars.defer(inputs, sample)

    def forward(self, inputs: ForwardInput) -> Hashes:
        """Return the hash of the prefix of each new token, [tokens]; WrongKV for a wrong read."""
        meta = inputs.meta
        assert meta is not None
        ends = np.cumsum(meta.seq_lens)
        rows = np.repeat(meta.table_idx, meta.seq_lens)
        positions = ragged_arange(np.zeros_like(meta.seq_lens), meta.seq_lens)
        tokens, slots = self.token_pool[rows, positions], self.page_table[rows, positions]
        sums = np.cumsum(self.of_token[tokens] * self.of_position[positions])
        before = np.concatenate([[np.uint64(0)], sums[ends[:-1] - 1]])
        sums -= np.repeat(before - self.salts(inputs.batch.reqs, meta.table_idx), meta.seq_lens)
        new = sums[positions >= np.repeat(meta.seq_lens - meta.extend_lens, meta.seq_lens)]
        self.kv[inputs.out_loc] = new
        if (wrong := np.flatnonzero(self.kv[slots] != sums)).size:
            at = wrong[0]
            where = f"row {rows[at]}, position {positions[at]}, slot {slots[at]}"
            raise WrongKV(f"{where}: holds no KV of this prefix, or that of another")
        return new

    def salts(self, reqs: list[Req], rows: NDArray[np.int32]) -> Hashes:
        """Return the hash of the empty prefix of each row, [rows]."""
        found = {req.table_idx: salt_hash(req.sampling_params.cache_salt) for req in reqs}
        return np.array([found[row] for row in rows.tolist()], np.uint64)

    def sample(self, inputs: ForwardInput, prefixes: Hashes) -> ForwardOutput:
        """Choose tokens by the hashes of the prefixes, and write them to the token pool."""
        count, rows, positions = len(inputs.sampled), inputs.write_rows, inputs.write_positions
        x = mixed(prefixes[:count])
        repeats = (x % np.uint64(4) > 0) & (positions >= self.PERIOD)
        fresh = (x >> np.uint64(8)) % np.uint64(self.ALPHABET)
        ids = np.where(repeats, self.token_pool[rows, positions - self.PERIOD], fresh)
        processing = None if inputs.sampling is None else inputs.sampling.processing
        if processing is not None:
            for row, mask in zip(*masks_of(processing)):
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                ids[row] = allowed[int(x[row]) % len(allowed)]
        self.token_pool[rows, positions] = ids
        scores = (-(x % np.uint64(997)).astype(float)).tolist()
        ids = ids.astype(int).tolist()
        tops = [[score] for score in scores]
        return Ready(SampledTokens(ids, scores, [[token] for token in ids], tops))

    def sample_deferred(self) -> None:
        """Sample the step that waits for its masks."""
        if self.grammars is not None:
            self.grammars.sample()

    def reset(self) -> None:
        """Drop the step that waits for its masks."""
        if self.grammars is not None:
            self.grammars.reset()

    def counts(self) -> dict[str, int]:
        return {"steps": self.launched}

    def shutdown(self) -> None:
        """Hold nothing."""
