"""Wires the parts of the book into one object that turns batches into tokens.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.attention.base import ForwardBatch
from minisgl.attention.factory import create_backend
from minisgl.attention.staging import StagingRing
from minisgl.config.engine import EngineConfig, max_seq_len, resolve
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.graph import Graph, GraphRunner, choose_sizes
from minisgl.engine.logits_processors import LogitsProcessors
from minisgl.engine.memory import agree_on_free, check_asked, decide_pages, peak_of
from minisgl.engine.prefill_graph import PrefillRunner, record_prefill
from minisgl.engine.sample_kernel import load_sample_kernel
from minisgl.engine.sampler import SampleOutput, Sampler
from minisgl.engine.step import ForwardInput, ForwardOutput, build_forward_input
from minisgl.kvcache.fp8_pool import load_kv_scales, make_pool
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool
from minisgl.models.quantization import quantize_model
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights, load_weights
from minisgl.parallel.comm import Comm, SingleRank


def dummy_request(row: int, length: int = 1) -> Req:
    """Padding: `length` tokens in a row that names only the dummy page."""
    ids, greedy = np.zeros(length, np.int32), SamplingParams()
    return Req(uid=-1, input_ids=ids, sampling_params=greedy, max_new_tokens=1, table_idx=row)


def choose_forward(config: EngineConfig, model: nn.Module) -> Callable[[ForwardBatch], Tensor]:
    """The model, or the same weights behind fused kernels where those fit."""
    if config.kernels == "triton" and torch.device(config.device).type == "cuda":
        from minisgl.models.fused import FusedModel, can_fuse  # Triton is not everywhere

        if can_fuse(model):
            return FusedModel(model)
    return model


def allocate_memory(
    config: EngineConfig, model_config: ModelConfig, num_pages: int
) -> tuple[KVPool, TableManager]:
    """The pool with its dummy page, and tables whose dummy row names that page."""
    pool, window = make_pool(config, model_config, num_pages), max_seq_len(config, model_config)
    tables = TableManager(
        config.max_running_req, window, pool.page_size, pool.dummy_page, torch.device(config.device)
    )
    return pool, tables


class Deferral(Protocol):
    """Keeps a draw that has to wait: `minisgl.scheduler.grammar` in chapter 09a."""

    def defer(self, fi: ForwardInput, draw: Callable[[], ForwardOutput]) -> ForwardOutput: ...

    def draw(self) -> None: ...
    def reset(self) -> None: ...


class Engine:
    """One rank's model, memory and stream. It knows rows and slots, and no request's fate."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, model: nn.Module, num_pages: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """`config` is resolved; `stream` None on a CPU. There are no graphs before `capture`."""
        self.config, self.model_config, self.model = config, model_config, model
        self.num_pages, self.page_size = num_pages, config.page_size
        self.device, self.stream = torch.device(config.device), stream
        self.pool, self.tables = allocate_memory(config, model_config, num_pages)
        self.max_seq_len = max_seq_len(config, model_config)
        self.vocab_size = vocab_size = model_config.vocab_size
        self.backend = create_backend(
            config.attention_backend, deterministic=config.deterministic, pool=self.pool,
            tables=self.tables, num_qo_heads=model_config.num_qo_heads // config.tp.size,
        )  # fmt: skip
        kernel = load_sample_kernel(self.device)
        processors = LogitsProcessors(vocab_size, self.tables.token_pool)
        self.sampler = Sampler(vocab_size, self.device, config.seed, kernel, processors)
        self.forward_pass = choose_forward(config, model)
        self.ring, self.dummy_req = StagingRing(self.device), dummy_request(self.tables.dummy_row)
        self.graph: GraphRunner | None = None
        self.verify_graph: GraphRunner | None = None  # 09b; None: drafts need none of their own
        self.prefill_graph: PrefillRunner | None = None  # 07d
        self.deferral: Deferral | None = None  # for grammars, from chapter 09a on
        self.scorer: Callable[[ForwardInput, ForwardBatch], Tensor] | None = None  # 08a

    def prepare(self, batch: Batch) -> ForwardInput:
        """Pad a decode batch to a captured size, if there is one, and lay the step out."""
        graph = (self.verify_graph if batch.verifies else None) or self.graph
        size = graph.bucket(batch.size) if graph and batch.phase is Phase.DECODE else None
        if size is not None:
            batch.reqs = sorted(batch.reqs, key=lambda req: req.device_len, reverse=True)
            batch.padded_reqs = batch.reqs + [self.dummy_req] * (size - batch.size)
        fi = build_forward_input(batch, self.tables, self.page_size, self.sampler, size is not None)
        return fi if self.prefill_graph is None else self.prefill_graph.prepare(fi)

    def on_stream(self) -> AbstractContextManager[object]:
        """All that the engine does on a GPU is in one stream, in the order of the calls."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @torch.inference_mode()
    def step(self, fi: ForwardInput) -> ForwardOutput:
        """Start one step, and the copy of its tokens to the host; nothing waits."""
        self.sample_deferred()  # chapter 09a; at the latest now, for this step reads those tokens
        with self.on_stream():
            self.tables.flush()
            return self.run_eager(fi) if fi.packed is None else self.run_recorded(fi)

    def run_eager(self, fi: ForwardInput) -> ForwardOutput:
        """Gather, forward, sample and scatter, operation by operation."""
        assert fi.meta is not None
        tokens, width = self.tables.token_pool.view(-1), self.tables.width
        gather, scatter, positions, out_loc, last = self.ring.upload(
            fi.token_rows.astype(np.int64) * width + fi.positions,
            fi.write_rows.astype(np.int64) * width + fi.write_positions,
            *(part.astype(np.int64) for part in (fi.positions, fi.out_loc, fi.last_idx)),
        )
        fb = ForwardBatch(
            phase=fi.batch.phase, input_ids=tokens.index_select(0, gather), positions=positions,
            out_loc=out_loc, last_idx=None if len(last) == len(gather) else last,
            attn=self.backend.plan(fi.meta, out_loc),
        )  # fmt: skip
        logits = self.forward_pass(fb) if self.scorer is None else self.scorer(fi, fb)
        return self.draw(fi, logits[: len(fi.sampled)], scatter)

    def run_recorded(self, fi: ForwardInput) -> ForwardOutput:
        """Replay a recorded step; rows with filters or log probabilities are drawn again."""
        decode = (self.verify_graph if fi.batch.verifies else None) or self.graph
        graph = decode if fi.batch.phase is Phase.DECODE else self.prefill_graph
        assert fi.packed is not None and graph is not None
        size, count = fi.packed.shape[1], len(fi.sampled)
        ids = graph.replay(fi.packed)[:count]
        if fi.sampling is None or fi.sampling.simple:
            return ForwardOutput(SampleOutput(ids))
        return self.draw(fi, graph.logits[:count], graph.steps[size].static.scatter[:count])

    def draw(self, fi: ForwardInput, logits: Tensor, scatter: Tensor) -> ForwardOutput:
        """Draw now, or hand the draw over until the step before it is known."""
        draw = partial(self.draw_now, fi, logits, scatter)
        return draw() if self.deferral is None else self.deferral.defer(fi, draw)

    @torch.inference_mode()
    def draw_now(self, fi: ForwardInput, logits: Tensor, scatter: Tensor) -> ForwardOutput:
        """Sample, and scatter the tokens to where the next step gathers them."""
        with self.on_stream():
            out = self.sampler.sample(logits, fi.sampling)
            self.tables.token_pool.view(-1).index_copy_(0, scatter, out.next_ids)
            return ForwardOutput(out)

    def sample_deferred(self) -> None:
        """Draw what was handed over and waits: the host knows the tokens before it."""
        if self.deferral is not None:
            self.deferral.draw()

    def capture(self, new_graph: Callable[[], Graph] | None = None, progress: bool = True) -> None:
        """Record steps; on a CPU only by a `new_graph` that works there, else ValueError."""
        config = self.config
        if new_graph is None and self.stream is None:
            if config.cuda_graph_bs:
                given = f"got {config.cuda_graph_bs} on {config.device!r}"
                raise ValueError(f"cuda_graph_bs: CUDA graphs need a GPU, {given}")
            return
        most = max(config.max_running_req, 1 + config.num_speculative_tokens)
        sizes = choose_sizes(config.cuda_graph_bs, config.cuda_graph_max_bs, most)
        if not sizes:
            return
        new_runner = partial(
            GraphRunner, forward=self.forward_pass, draw=self.sampler.draw_rows, tables=self.tables,
            backend=self.backend, vocab_size=self.vocab_size,
            dtype=getattr(torch, config.dtype), new_graph=new_graph or torch.cuda.CUDAGraph,
        )  # fmt: skip
        with self.on_stream():
            prefill = record_prefill(config, self.model_config, self.pool, new_runner, progress)
            graph = new_runner(sizes=sizes)
            graph.capture(progress, None if prefill is None else prefill.pool)
        self.graph, self.prefill_graph = graph, prefill

    def counts(self) -> dict[str, int]:
        """Counters for `/metrics`, by name."""
        return {"graph_replays": sum(g.replays for g in (self.graph, self.verify_graph) if g)}

    def reset(self) -> None:
        """Wait for the device and forget the deferred draw; see `Scheduler.reset`."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.deferral is not None:
            self.deferral.reset()

    def shutdown(self) -> None:
        """Wait for the device and give its memory back; this engine must not be used any more."""
        self.reset()
        self.graph = self.verify_graph = self.prefill_graph = None  # they know the pool
        self.pool.free()
        torch.cuda.empty_cache()  # torch keeps what is freed, out of reach of other processes


def start_device(config: EngineConfig, comm: Comm) -> torch.device:
    """The device of a resolved config, made current; ValueError if ranks or GPU are missing."""
    device = torch.device(config.device)
    if config.tp.size != comm.size:
        raise ValueError(
            f"tp: the config asks for {config.tp.size} ranks, the communicator has {comm.size}; "
            "`python -m minisgl --tp N` and `LLM(tensor_parallel_size=N)` start them"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: torch finds no GPU here, got {config.device!r}")
        torch.cuda.set_device(device)
    return device


def load_model(
    config: EngineConfig, model_config: ModelConfig, path: Path, comm: Comm, progress: bool
) -> nn.Module:
    """The model with its weights on the device: shapes first, values afterwards."""
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    model = build_model(model_config, comm, dtype=dtype, deterministic=config.deterministic,
                        expert_parallel=config.expert_parallel)  # fmt: skip
    quantize_model(model, config.quantization, path, device)
    if config.use_dummy_weight:
        load_dummy_weights(model, device=device, dtype=dtype, seed=config.seed)
    else:
        load_weights(model, path, comm, device=device, dtype=dtype, progress=progress)
    return model.eval()


def measure_peak(engine: Engine, num_tokens: int) -> tuple[int, int]:
    """Bytes that torch holds on the GPU before a trial prefill, and at its peak; 0, 0 on a CPU."""
    longest, row = engine.max_seq_len - 1, engine.tables.dummy_row
    pieces = [longest] * (num_tokens // longest) + [num_tokens % longest]
    batch = Batch([dummy_request(row, length) for length in pieces if length], Phase.PREFILL)
    return peak_of(lambda: engine.step(engine.prepare(batch)).wait(), engine.device)


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all weights and tables of a model."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def count_pages(
    config: EngineConfig, model_config: ModelConfig, model: nn.Module, comm: Comm,
    free_before: int, stream: torch.cuda.Stream | None,
) -> int:  # fmt: skip
    """The KV pages that the config asks for, or else as many as all ranks can have."""
    if config.num_pages is not None:
        return config.num_pages
    return decide_pages(
        config, model_config, comm, free_before=free_before, model_bytes=tensor_bytes(model),
        trial=lambda tokens: measure_peak(Engine(config, model_config, model, 1, stream), tokens),
    )  # fmt: skip


def build_engine(
    config: EngineConfig, comm: Comm | None = None, *, progress: bool = True,
    new_graph: Callable[[], Graph] | None = None,
) -> Engine:  # fmt: skip
    """An engine from a config, part by part; `new_graph` makes graphs without a GPU, for tests."""
    comm, path = comm or SingleRank(), resolve_model_path(config.model_path)
    model_config = ModelConfig.from_path(path)
    config = resolve(config, model_config)
    device = start_device(config, comm)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free_before = agree_on_free(device, comm)
    check_asked(config, model_config, comm.size, free_before)
    model = load_model(config, model_config, path, comm, progress)
    num_pages = count_pages(config, model_config, model, comm, free_before, stream)
    if stream is not None:  # the weights came on another stream: wait for them once
        torch.cuda.synchronize(device)
    engine = Engine(config, model_config, model, num_pages, stream)
    load_kv_scales(engine.pool, path, model_config.num_kv_heads, comm)
    engine.capture(new_graph, progress)
    return engine
