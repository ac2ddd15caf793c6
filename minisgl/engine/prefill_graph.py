"""Prefill steps as CUDA graphs: rounded numbers of tokens, and a few requests in each.

Generated from notebooks/07d_recorded_prefill.ipynb: edit there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.factory import backend_pair, create_backend
from minisgl.attention.metadata import AttentionBackend, AttentionPlan, DecodeBuffers, ragged_arange
from minisgl.config.engine import EngineConfig, SchedulerConfig
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase
from minisgl.engine.graph import GraphRunner, StepBuffers
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

if TYPE_CHECKING:
    from minisgl.engine.step import ForwardInput


SMALLEST, MAX_REQUESTS = 64, 64  # tokens of the smallest step; requests that fit each of them


def prefill_sizes(most: int) -> tuple[int, ...]:
    """Return the token counts to capture: powers of two, halfway steps from 512 on, `most`."""
    powers = [SMALLEST << n for n in range(16)]
    halves = [n + n // 2 for n in powers if n >= 512]
    return tuple(sorted({n for n in (*powers, *halves, most) if 0 < n <= most}))


class Tiles(NamedTuple):
    """Further inputs of attention, int32: of `MAX_REQUESTS` requests and one that is empty."""

    table_idx: Tensor  # [requests + 1] row of the page table
    last: Tensor  # [requests + 1] position of the last token; -1 for a request without tokens
    qo_indptr: Tensor  # [requests + 2] tokens
    request: Tensor  # [tiles] request of a query tile
    tile: Tensor  # [tiles] number of the tile within its request


def num_tiles(size: int, group: int, tile_q: int) -> int:
    """Return the most query tiles of a step: each request may have one that is not full."""
    return size * group // tile_q + min(size, MAX_REQUESTS)


def num_words(size: int, tiles: int) -> int:
    """Return the length of the memory that `view_prefill` divides, a multiple of `size`."""
    words = 4 * (size + MAX_REQUESTS) + (3 * MAX_REQUESTS + 4 + 2 * tiles + 1) // 2
    return -(-words // size) * size


def view_prefill(memory: Tensor, size: int, tiles: int) -> tuple[StepBuffers, Tiles]:
    """View the start of a flat memory, int64, as the buffers of a step of `size` tokens."""
    most = MAX_REQUESTS
    gather, rows, positions, out_loc = memory[: 4 * size].view(4, size)
    per_request = memory[4 * size :][: 4 * most].view(4, most)
    scatter, last_idx, keys = per_request[0], per_request[1], per_request[2].view(torch.int32)
    temperature = per_request[3].view(torch.float32)[:most]
    static = StepBuffers(
        gather, scatter, rows, positions, out_loc, keys.view(2, most), temperature, last_idx
    )
    lengths = [most + 1, most + 1, most + 2, tiles, tiles]
    rest = memory[4 * (size + most) :].view(torch.int32)[: sum(lengths)]
    return static, Tiles(*rest.split(lengths))


class PrefillPlans(Protocol):
    """Attention for captured prefill."""

    group: int  # query heads of a KV head: rows of a token in a tile

    def tile_rows(self, size: int) -> int:
        """Return the rows of one query tile in a step of `size` tokens."""
        ...

    def plan(self, size: int, static: StepBuffers, tiles: Tiles) -> AttentionPlan:
        """Plan over buffers whose values change between replays, but not their addresses."""
        ...


class PerTokenPlans:
    """Each token as its own decode request, which finds the earlier tokens in the pool."""

    group = 1

    def __init__(self, backend: AttentionBackend) -> None:
        """Plan with a `backend` that stores all keys and values before one token attends."""
        self.backend = backend

    def tile_rows(self, size: int) -> int:
        """Return one tile for each request: this backend reads no tiles."""
        return size

    def plan(self, size: int, static: StepBuffers, tiles: Tiles) -> AttentionPlan:
        """Plan a decode of `size` requests."""
        buffers = DecodeBuffers(static.rows, static.positions, static.out_loc)
        return self.backend.graph_plan(size, buffers)


class PrefillRunner(GraphRunner):
    """Captures prefill steps of fixed numbers of tokens, of up to `MAX_REQUESTS` requests."""

    phase = Phase.PREFILL

    def __init__(self, *, plans: PrefillPlans, **of_runner: Any) -> None:
        """Allocate buffers as `GraphRunner` does; `sizes` are numbers of tokens."""
        super().__init__(rows=MAX_REQUESTS, **of_runner)
        self.plans = plans
        self.blanks = {size: self.blank(size) for size in self.sizes}
        words = max(blank.size for blank in self.blanks.values())
        self.memory = torch.zeros(words, dtype=torch.int64, device=self.device)

    def view(self, memory: Tensor, size: int) -> tuple[StepBuffers, Tiles]:
        """Apply `view_prefill` with the tiles that this runner's plans need."""
        tiles = num_tiles(size, self.plans.group, self.plans.tile_rows(size))
        return view_prefill(memory, size, tiles)

    def blank(self, size: int) -> NDArray[np.int64]:
        """Pack a step of padding, int64 [k, size]: all tokens in the dummy row, no request."""
        tables = self.tables
        tiles = num_tiles(size, self.plans.group, self.plans.tile_rows(size))
        packed = np.zeros((num_words(size, tiles) // size, size), np.int64)
        static, of_attention = self.view(torch.from_numpy(packed).view(-1), size)
        static.gather[:] = static.scatter[:] = tables.dummy_row * tables.width
        static.rows[:] = of_attention.table_idx[:] = tables.dummy_row
        static.out_loc[:] = int(tables.page_table[tables.dummy_row, 0])
        of_attention.last[:] = -1
        of_attention.request[:] = MAX_REQUESTS
        return packed

    def lay_out(self, size: int) -> tuple[StepBuffers, AttentionPlan]:
        """Fill the buffers with a step of padding; return them and a plan over them."""
        static, tiles = self.view(self.memory, size)
        self.ring.send([self.blanks[size]], self.memory)
        return static, self.plans.plan(size, static, tiles)

    def pack(self, fi: ForwardInput, size: int) -> NDArray[np.int64]:
        """Pack the step into one array, int64 [k, size], padded to `size` tokens."""
        packed, width = self.blanks[size].copy(), self.tables.width
        views: Any = self.view(torch.from_numpy(packed).view(-1), size)
        to, tiles = (type(part)(*(tensor.numpy() for tensor in part)) for part in views)
        n, count = len(fi.positions), len(fi.sampled)
        to.gather[:n] = fi.token_rows.astype(np.int64) * width + fi.positions
        to.rows[:n], to.positions[:n], to.out_loc[:n] = fi.token_rows, fi.positions, fi.out_loc
        to.scatter[:count] = fi.write_rows.astype(np.int64) * width + fi.write_positions
        to.last_idx[:count] = fi.last_idx[:count]
        if fi.sampling is not None:
            to.keys[:, :count], to.temperature[:count] = fi.sampling.keys, fi.sampling.temperature
        self.pack_tiles(fi, tiles, size)
        return packed

    def pack_tiles(self, fi: ForwardInput, tiles: Any, size: int) -> None:
        """Cut the queries of each request into tiles; requests after the last have no tokens."""
        meta, rows = fi.meta, self.plans.tile_rows(size)
        assert meta is not None
        bs, counts = meta.batch_size, -(-meta.extend_lens * self.plans.group // rows)
        tiles.table_idx[:bs], tiles.last[:bs] = meta.table_idx, meta.seq_lens - 1
        tiles.qo_indptr[: bs + 1], tiles.qo_indptr[bs + 1 :] = meta.qo_indptr, meta.num_tokens
        total = int(counts.sum())
        tiles.request[:total] = np.repeat(np.arange(bs, dtype=np.int32), counts)
        tiles.tile[:total] = ragged_arange(np.zeros_like(counts), counts)

    def size_for(self, batch: Batch) -> int | None:
        """Return the number of tokens that a batch is padded to; None if it has to run eagerly."""
        if batch.size > MAX_REQUESTS or any(req.scores_prompt for req in batch.reqs):
            return None
        return self.bucket(sum(req.extend_len for req in batch.reqs))


LAYER_SECONDS = 340e-6  # host time to launch a layer
SUMS_SECONDS = 190e-6  # and to launch its sums over several ranks
FLOPS = 600e12  # operations per second of a GPU in large GEMMs


def prefill_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the largest number of tokens to capture; 0: none."""
    most = config.prefill_graph_max_tokens
    if config.deterministic:  # a padded step has other bits than an eager one
        return 0
    if most is None:
        if config.device == "cpu":
            return 0
        moe, tables = model.moe, 1 if model.tie_word_embeddings else 2
        met = model.num_parameters - tables * model.vocab_size * model.hidden_size
        if moe is not None:
            met -= model.expert_parameters * (moe.num_experts - moe.top_k) // moe.num_experts
        seconds = LAYER_SECONDS + (SUMS_SECONDS if config.tp.size > 1 else 0)
        break_even = seconds * FLOPS / 2 / (met / config.tp.size / model.num_layers)
        most = min(4096, 1 << int(break_even).bit_length() - 1)
    if isinstance(config, SchedulerConfig) and config.max_extend_tokens is not None:
        most = min(most, config.max_extend_tokens)
    return most


def prefill_plans(
    config: EngineConfig, model: ModelConfig, pool: KVPool, tables: TableManager
) -> PrefillPlans | None:
    """Return the attention of captured prefill, close to eager prefill's; None if unsupported."""
    torch_alone = backend_pair(config.attention_backend)[0] == "torch"
    if torch_alone != (config.device == "cpu"):
        return None
    heads = model.num_qo_heads // config.tp.size
    backend = create_backend(
        "torch" if torch_alone else "triton", pool=pool, tables=tables, num_qo_heads=heads
    )
    if torch_alone:
        return PerTokenPlans(backend)
    tiled = import_module("minisgl.engine.tiled_prefill")  # Triton may be missing
    plans: PrefillPlans = tiled.TiledPrefill(backend, getattr(torch, config.dtype))
    return plans


def capture_prefill(
    config: EngineConfig, model: ModelConfig, pool: KVPool, progress: bool, **how: Any
) -> PrefillRunner | None:
    """Capture prefill by a runner made with `how`; return None if none is to be captured."""
    sizes = prefill_sizes(prefill_tokens(config, model))
    plans = prefill_plans(config, model, pool, how["tables"]) if sizes else None
    if plans is None:
        return None
    prefill = PrefillRunner(plans=plans, sizes=sizes, **how)
    prefill.capture(progress)
    return prefill
