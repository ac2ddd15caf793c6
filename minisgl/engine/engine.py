"""Wires the parts of the book into one object that turns batches into tokens.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from minisgl.attention.base import AttentionBackend, ForwardBatch
from minisgl.attention.factory import available, create_backend
from minisgl.attention.staging import StagingRing
from minisgl.config.engine import EngineConfig, max_seq_len, resolve
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.graph import choose_sizes
from minisgl.engine.memory import (
    bytes_per_page,
    cap_on_cpu,
    pages_by_peak,
    pages_by_ratio,
    require_balance,
    require_pages,
)
from minisgl.engine.sampler import SampleOutput, Sampler
from minisgl.engine.step import ForwardInput, ForwardOutput, build_forward_input
from minisgl.engine.step_graph import StepGraphs
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool
from minisgl.models.compiled import CompiledModel, SizeSwitch
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights, load_weights
from minisgl.parallel.comm import Comm, SingleRank


def dummy_request(row: int, length: int = 1) -> Req:
    """A request of nobody: `length` tokens in a row that names only the dummy page."""
    ids, greedy = np.zeros(length, np.int32), SamplingParams()
    return Req(uid=-1, input_ids=ids, sampling_params=greedy, max_new_tokens=1, table_idx=row)


def choose_forward(config: EngineConfig, model: nn.Module) -> Callable[[ForwardBatch], Tensor]:
    """The model itself, or fused or compiled where that is wanted and fits."""
    chosen: Callable[[ForwardBatch], Tensor] = model
    if config.kernels == "triton" and torch.device(config.device).type == "cuda":
        from minisgl.models.fused import FusedModel, can_fuse

        chosen = FusedModel(model) if can_fuse(model) else model
    if config.torch_compile_max_bs == 0:
        return chosen
    return SizeSwitch(CompiledModel(model), chosen, config.torch_compile_max_bs)


@dataclass(eq=False)
class Engine:
    """One rank's model, memory and stream. It knows rows and slots, and no request's fate."""

    config: EngineConfig
    model_config: ModelConfig
    model: nn.Module
    pool: KVPool
    tables: TableManager
    backend: AttentionBackend
    sampler: Sampler
    max_seq_len: int
    num_pages: int
    page_size: int
    device: torch.device
    stream: torch.cuda.Stream | None = None
    graph: StepGraphs | None = None

    def __post_init__(self) -> None:
        self.forward_pass = choose_forward(self.config, self.model)
        self.plan_free = bool(getattr(self.backend, "plan_free", False))
        self.staging = StagingRing(self.device)
        self.dummy_req = dummy_request(self.tables.dummy_row)
        if self.stream is not None:  # the weights came on another stream: wait for them once
            torch.cuda.synchronize(self.device)

    def on_stream(self) -> AbstractContextManager[object]:
        """All that the engine does on a GPU is in one stream, in the order of the calls."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def prepare(self, batch: Batch) -> ForwardInput:
        """Pad a decode batch to a captured size, if there is one, and lay the step out."""
        graph = self.graph
        use_graph = graph is not None and graph.can_replay(batch.phase, batch.size)
        if graph is not None and use_graph:
            batch.reqs = sorted(batch.reqs, key=device_len, reverse=True)
            missing = graph.bucket(batch.size) - batch.size
            batch.padded_reqs = batch.reqs + [self.dummy_req] * missing
        return build_forward_input(
            batch, self.tables, self.page_size, self.sampler, use_graph, self.plan_free
        )

    @torch.inference_mode()
    def step(self, fi: ForwardInput) -> ForwardOutput:
        """Start one step: gather, forward, sample, scatter, and send the ids to the host."""
        with self.on_stream():
            self.tables.flush()
            if fi.packed is not None and self.graph is not None:
                return self.replay(fi, self.graph)
            tokens = self.tables.token_pool.view(-1)
            width = self.tables.token_pool.shape[1]
            gather, scatter, positions, out_loc, last = self.staging.upload(
                fi.token_rows.astype(np.int64) * width + fi.positions,
                fi.write_rows.astype(np.int64) * width + fi.write_positions,
                *(part.astype(np.int64) for part in (fi.positions, fi.out_loc, fi.last_idx)),
            )  # fmt: skip
            logits = self.forward(fi, tokens.index_select(0, gather), positions, out_loc, last)
            out = self.sampler.sample(logits[: len(fi.sampled)], fi.sampling)
            tokens.index_copy_(0, scatter, out.next_ids)
            return ForwardOutput(out)

    def forward(
        self, fi: ForwardInput, input_ids: Tensor, positions: Tensor, out_loc: Tensor, last: Tensor
    ) -> Tensor:
        """Logits, float [rows wanted, vocab_size], layer by layer."""
        assert fi.meta is not None
        all_rows = len(last) == len(input_ids)
        fb = ForwardBatch(
            phase=fi.batch.phase, input_ids=input_ids, positions=positions, out_loc=out_loc,
            last_idx=None if all_rows else last, attn=self.backend.plan(fi.meta, out_loc),
        )  # fmt: skip
        logits: Tensor = self.forward_pass(fb)
        return logits

    def replay(self, fi: ForwardInput, graph: StepGraphs) -> ForwardOutput:
        """A recorded step; rows with filters or log probabilities are drawn again, outside."""
        assert fi.packed is not None
        size, count = fi.packed.shape[1], len(fi.sampled)
        ids = graph.step(fi.packed, fi.meta)[:count]
        if fi.sampling is None or fi.sampling.simple:
            return ForwardOutput(SampleOutput(ids), graph.delivery)
        assert graph.logits is not None
        out = self.sampler.sample(graph.logits[:count], fi.sampling)
        tokens = self.tables.token_pool.view(-1)
        tokens.index_copy_(0, graph.scatter_places(size, count), out.next_ids)
        return ForwardOutput(out)

    def shutdown(self) -> None:
        """Wait for the device; let go of the graphs, which hold addresses, and of the pool.

        The next engine finds the memory free, in this process or another. This one must not be used
        any more.
        """
        if self.stream is not None:
            self.stream.synchronize()
        self.graph = None
        self.pool.free()
        if self.stream is not None:
            torch.cuda.empty_cache()  # torch keeps what is freed, out of reach of other processes


device_len = attrgetter("device_len")


def start_device(config: EngineConfig) -> torch.device:
    """The device of a resolved config, made current."""
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: torch finds no GPU here, got {config.device!r}")
        torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device, comm: Comm) -> int:
    """Free memory for this rank in bytes; ranks on a CPU share one memory."""
    if device.type != "cuda":
        return psutil.virtual_memory().available // comm.size
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def require_size(config: EngineConfig, comm: Comm) -> None:
    """ValueError if the config asks for more or fewer ranks than there are."""
    if config.tp.size != comm.size:
        raise ValueError(
            f"tp: the config asks for {config.tp.size} ranks, the communicator has {comm.size}; "
            "`python -m minisgl --tp N` starts ranks, and so does minisgl.runtime.ranks.Ranks"
        )


def agree_on_free(device: torch.device, comm: Comm) -> int:
    """The least free memory of all ranks: one minimum over `[free, -free]` gives both ends."""
    comm.barrier()
    free = free_bytes(device, comm)
    lowest, minus_highest = comm.min_ints([free, -free])
    return require_balance(lowest, -minus_highest) if device.type == "cuda" else lowest


def load_model(
    config: EngineConfig, model_config: ModelConfig, path: Path, comm: Comm, progress: bool
) -> nn.Module:
    """The model with its weights on the device: shapes first, values afterwards."""
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    model = build_model(model_config, comm, dtype=dtype, device="meta")
    if config.use_dummy_weight:
        load_dummy_weights(model, device=device, dtype=dtype, seed=config.seed)
    else:
        load_weights(model, path, comm, device=device, dtype=dtype, progress=progress)
    return model.eval()


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all weights and tables of a model."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def assemble(
    config: EngineConfig, model_config: ModelConfig, model: nn.Module, comm: Comm, *,
    num_pages: int, window: int, stream: torch.cuda.Stream | None,
) -> Engine:  # fmt: skip
    """Everything around a loaded model: pool, tables, attention, sampler; no graphs yet."""
    device, page_size = torch.device(config.device), config.page_size or 1
    pool = KVPool(
        num_layers=model_config.num_layers, num_pages=num_pages, page_size=page_size,
        num_kv_heads=model_config.kv_heads_per_rank(comm.size), head_dim=model_config.head_dim,
        dtype=getattr(torch, config.dtype), device=device,
    )  # fmt: skip
    tables = TableManager(config.max_running_req, window, page_size, pool.dummy_page, device)
    backend = create_backend(
        config.attention_backend, pool=pool, tables=tables,
        num_qo_heads=model_config.num_qo_heads // comm.size,
    )  # fmt: skip
    sampler = Sampler(model_config.vocab_size, device, config.seed)
    return Engine(
        config, model_config, model, pool, tables, backend, sampler,
        window, num_pages, page_size, device, stream,
    )  # fmt: skip


def trial_batch(engine: Engine, num_tokens: int) -> Batch:
    """A prefill of `num_tokens` tokens that belongs to nobody: all of it lies in the dummy row."""
    longest = engine.max_seq_len - 1  # the token behind it needs a place, too
    pieces = [longest] * (num_tokens // longest) + [num_tokens % longest]
    row = engine.tables.dummy_row
    reqs = [dummy_request(row, length) for length in pieces if length]
    return Batch(reqs=reqs, phase=Phase.PREFILL)


def measure_peak(engine: Engine, num_tokens: int) -> tuple[int, int]:
    """Bytes that torch holds on the GPU before a trial prefill, and at its peak; 0, 0 on a CPU."""
    batch = trial_batch(engine, num_tokens)
    if engine.device.type != "cuda":
        engine.step(engine.prepare(batch)).wait()
        return 0, 0
    torch.cuda.reset_peak_memory_stats(engine.device)
    current = torch.cuda.memory_allocated(engine.device)
    engine.step(engine.prepare(batch)).wait()
    return current, torch.cuda.max_memory_allocated(engine.device)


def page_bytes_of(config: EngineConfig, model_config: ModelConfig, comm: Comm) -> int:
    """Bytes of one page on this rank, for a resolved config."""
    itemsize = getattr(torch, config.dtype).itemsize
    return bytes_per_page(model_config, config.page_size or 1, itemsize, comm.size)


def settle_pages(
    config: EngineConfig, model_config: ModelConfig, comm: Comm, pages: int, window: int
) -> int:
    """The number of pages that all ranks can have; raises `NotEnoughMemory` if it is too small."""
    sizes = {
        "page_bytes": page_bytes_of(config, model_config, comm),
        "page_size": config.page_size or 1,
        "max_seq_len": window,
    }
    if torch.device(config.device).type == "cpu":
        pages = cap_on_cpu(pages, max_running_req=config.max_running_req, **sizes)
    return require_pages(comm.min_ints([pages])[0], **sizes)


def count_pages(
    config: EngineConfig, model_config: ModelConfig, comm: Comm, free_before: int,
    model: nn.Module, build: Callable[..., Engine],
) -> int:  # fmt: skip
    """Pages that fit on this rank, by the ratio rule, or by the peak of a trial prefill."""
    page_bytes = page_bytes_of(config, model_config, comm)
    if config.memory_trial_tokens == 0:
        return pages_by_ratio(
            free_before=free_before, model_bytes=tensor_bytes(model),
            memory_ratio=config.memory_ratio, page_bytes=page_bytes,
        )  # fmt: skip
    current, peak = measure_peak(build(num_pages=1), config.memory_trial_tokens)
    return pages_by_peak(
        free_now=agree_on_free(torch.device(config.device), comm), peak_bytes=peak,
        current_bytes=current, utilization=config.memory_ratio, page_bytes=page_bytes,
    )  # fmt: skip


def capture_graphs(engine: Engine, free_before: int, progress: bool) -> StepGraphs | None:
    """Recorded decode steps; on a CPU only on request, for there they save nothing."""
    config = engine.config
    if engine.device.type == "cpu" and config.cuda_graph_bs is None:
        return None
    sizes = choose_sizes(
        config.cuda_graph_bs, config.cuda_graph_max_bs, config.max_running_req, free_before
    )
    if not sizes:
        return None
    runner = StepGraphs(
        draw=engine.sampler.draw_rows, forward=engine.forward_pass, backend=engine.backend,
        tables=engine.tables, sizes=sizes, device=engine.device,
        vocab_size=engine.model_config.vocab_size, stream=engine.stream,
    )  # fmt: skip
    runner.capture(progress=progress)
    return runner


logger = logging.getLogger("minisgl.engine")


def say_backend(asked: EngineConfig, settled: EngineConfig) -> None:
    """One line where "auto" had to do without FlashInfer."""
    on_gpu = torch.device(settled.device).type == "cuda"
    if on_gpu and asked.attention_backend == "auto" and not available("fi"):
        logger.warning(
            "attention_backend: FlashInfer is not installed, %s serves; "
            "pip install 'minisgl[cuda]' adds it", settled.attention_backend,
        )  # fmt: skip


def build_engine(
    config: EngineConfig, comm: Comm | None = None, *, progress: bool = True
) -> Engine:
    """An engine from a config, part by part; each size is settled before it is needed."""
    comm = SingleRank() if comm is None else comm
    require_size(config, comm)
    path = resolve_model_path(config.model_path)
    model_config = ModelConfig.from_path(path)
    asked, config = config, resolve(config, model_config)
    device = start_device(config)
    say_backend(asked, config)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free_before = agree_on_free(device, comm)
    model = load_model(config, model_config, path, comm, progress)
    window = max_seq_len(config, model_config)
    build = partial(assemble, config, model_config, model, comm, window=window, stream=stream)
    num_pages = config.num_page_override
    if num_pages is None:
        wanted = count_pages(config, model_config, comm, free_before, model, build)
        num_pages = settle_pages(config, model_config, comm, wanted, window)
    engine = build(num_pages=num_pages)
    engine.graph = capture_graphs(engine, free_before, progress)
    return engine
