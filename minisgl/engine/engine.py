"""All parts, assembled into one object that turns batches into tokens.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import ForwardBatch
from minisgl.attention.staging import StagingRing
from minisgl.config.engine import EngineConfig, max_seq_len, resolve
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.engine.graph import Forward, Graph, GraphRunner
from minisgl.engine.logits_processors import LogitsProcessors
from minisgl.engine.memory import (
    agree_on_free,
    check_asked,
    decide_pages,
    make_pool,
    peak_of,
    tensor_bytes,
)
from minisgl.engine.runners import Runners, capture_runners
from minisgl.engine.sample_kernel import load_sample_kernel
from minisgl.engine.sampler import SampleOutput, Sampler
from minisgl.engine.step import ForwardInput, ForwardOutput, build_forward_input
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool
from minisgl.models.kv_scales import load_kv_scales
from minisgl.models.packed import set_formats
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights, load_weights
from minisgl.parallel.comm import Comm, SingleRank


def dummy_request(row: int, length: int = 1) -> Req:
    """Make a padding request: `length` tokens in a row that points only to the dummy page."""
    ids, greedy = np.zeros(length, np.int32), SamplingParams()
    return Req(uid=-1, input_ids=ids, sampling_params=greedy, max_new_tokens=1, table_idx=row)


def choose_forward(config: EngineConfig, model: nn.Module) -> Forward:
    """Return the model, or fused kernels over the same weights if they support it."""
    if config.kernels == "triton" and torch.device(config.device).type == "cuda":
        from minisgl.models.fused import FusedModel, can_fuse  # Triton may be missing

        if can_fuse(model):
            return FusedModel(model)
    return model


def allocate_memory(
    config: EngineConfig, model_config: ModelConfig, num_pages: int
) -> tuple[KVPool, TableManager]:
    """Allocate the pool with its dummy page, and tables whose dummy row points to that page."""
    pool, window = make_pool(config, model_config, num_pages), max_seq_len(config, model_config)
    tables = TableManager(
        config.max_running_req, window, pool.page_size, pool.dummy_page, torch.device(config.device)
    )
    return pool, tables


class Deferral(Protocol):
    """Holds the sampling of a step that must wait: `minisgl.scheduler.grammar`, chapter 09a."""

    @property
    def waiting(self) -> ForwardOutput | None: ...  # the last step, if it is not sampled yet

    def defer(self, fi: ForwardInput, sample: Callable[[], ForwardOutput]) -> ForwardOutput: ...

    def sample(self) -> None: ...  # do it now, if one is waiting
    def reset(self) -> None: ...


Scorer = Callable[[ForwardInput, ForwardBatch], Tensor]  # a `Forward` that also scores prompts: 08a


class Engine:
    """One rank's model, memory and stream; the scheduler owns the lifecycle of requests."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, model: nn.Module, pool: KVPool,
        tables: TableManager, stream: torch.cuda.Stream | None = None, *,
        new_graph: Callable[[], Graph] | None = None, deferral: Deferral | None = None,
        make_scorer: Callable[[Forward, nn.Module, int], Scorer] | None = None,
        progress: bool = False,
    ) -> None:  # fmt: skip
        """Assemble the engine of a resolved config; without `new_graph` it captures no graph."""
        self.config, self.model_config, self.model = config, model_config, model
        self.stream, self.pool, self.tables, self.deferral = stream, pool, tables, deferral
        self.num_pages, self.page_size = pool.num_pages, pool.page_size
        self.device, self.max_seq_len = tables.device, max_seq_len(config, model_config)
        self.vocab_size = vocab_size = model_config.vocab_size
        self.backend = create_backend(
            config.attention_backend, deterministic=config.deterministic, pool=pool, tables=tables,
            num_qo_heads=model_config.num_qo_heads // config.tp.size,
        )  # fmt: skip
        kernel = load_sample_kernel(self.device)
        processors = LogitsProcessors(vocab_size, tables.token_pool)
        self.sampler = Sampler(vocab_size, self.device, config.seed, kernel, processors)
        self.forward_pass = choose_forward(config, model)
        self.ring, self.dummy_req = StagingRing(self.device), dummy_request(tables.dummy_row)
        self.scorer = make_scorer(self.forward_pass, model, vocab_size) if make_scorer else None
        with self.on_stream():
            self.runners = capture_runners(
                config, model_config, pool, self.backend, tables, self.forward_pass,
                self.sampler.sample_rows, new_graph, progress,
            )  # fmt: skip

    def prepare(self, batch: Batch) -> ForwardInput:
        """Lay a step out; pad and pack a captured one. The batch does not change."""
        runner, size = self.runners.choose(batch) if self.runners.decode else (None, 0)
        padded = None
        if runner is not None and batch.phase is Phase.DECODE:
            longest_first = sorted(batch.reqs, key=lambda req: req.device_len, reverse=True)
            padded = longest_first + [self.dummy_req] * (size - batch.size)
        fi = build_forward_input(batch, self.tables, self.page_size, self.sampler, padded)
        if runner is not None:
            fi.runner, fi.packed = runner, runner.pack(fi, size)
        return fi

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context in which all GPU work goes to the engine's stream, in call order."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @torch.inference_mode()
    def step(self, fi: ForwardInput) -> ForwardOutput:
        """Start one step, and the copy of its tokens to the host; do not wait for either."""
        if self.deferral is not None and self.deferral.waiting:  # this step reads those tokens
            raise RuntimeError(
                "step: the one before is not sampled yet, call sample_deferred first"
            )
        with self.on_stream():
            self.tables.flush()
            return self.run_eager(fi) if fi.runner is None else self.replay(fi, fi.runner)

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
        prompts = fi.batch.reqs if fi.batch.phase is Phase.PREFILL else ()
        if self.scorer is not None and any(req.scores_prompt for req in prompts):
            logits = self.scorer(fi, fb)
        else:
            logits = self.forward_pass(fb)
        return self.sample(fi, logits[: len(fi.sampled)], scatter)

    def replay(self, fi: ForwardInput, runner: GraphRunner) -> ForwardOutput:
        """Replay a captured step; sample again for rows with filters or log probabilities."""
        assert fi.packed is not None
        size, count = fi.packed.shape[1], len(fi.sampled)
        ids = runner.replay(fi.packed)[:count]
        if fi.sampling is None or fi.sampling.simple:
            return ForwardOutput(SampleOutput(ids))
        return self.sample(fi, runner.logits[:count], runner.steps[size].static.scatter[:count])

    def sample(self, fi: ForwardInput, logits: Tensor, scatter: Tensor) -> ForwardOutput:
        """Sample now, or defer it until the host has the tokens of the previous step."""
        sample = partial(self.sample_now, fi, logits, scatter)
        if self.deferral is None or fi.sampling is None or fi.sampling.processing is None:
            return sample()
        return self.deferral.defer(fi, sample)

    @torch.inference_mode()
    def sample_now(self, fi: ForwardInput, logits: Tensor, scatter: Tensor) -> ForwardOutput:
        """Sample, and scatter the tokens to where the next step gathers them."""
        with self.on_stream():
            out = self.sampler.sample(logits, fi.sampling)
            self.tables.token_pool.view(-1).index_copy_(0, scatter, out.next_ids)
            return ForwardOutput(out)

    def sample_deferred(self) -> None:
        """Sample the deferred step, if there is one; the host must have the tokens before it."""
        if self.deferral is not None:
            self.deferral.sample()

    def counts(self) -> dict[str, int]:
        """Return the counters for `/metrics`, by name."""
        return {"graph_replays": self.runners.decode.replays if self.runners.decode else 0}

    def reset(self) -> None:
        """Wait for the device and discard the deferred sampling; see `Scheduler.reset`."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.deferral is not None:
            self.deferral.reset()

    def shutdown(self) -> None:
        """Wait for the device and give its memory back; this engine must not be used any more."""
        self.reset()
        self.runners.free()
        self.runners = Runners()
        self.pool.free()
        torch.cuda.empty_cache()  # torch keeps freed memory; return it to other processes


def start_device(config: EngineConfig, comm: Comm, fake_graphs: bool = False) -> torch.device:
    """Make a resolved config's device current; raise ValueError if ranks or GPU are missing."""
    device = torch.device(config.device)
    if device.type == "cpu" and config.cuda_graph_bs and not fake_graphs:
        raise ValueError(f"cuda_graph_bs: CUDA graphs need a GPU, got {config.cuda_graph_bs}")
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
    """Build the model and load its weights to the device: shapes first, values afterwards."""
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    model = build_model(model_config, comm, dtype=dtype, deterministic=config.deterministic,
                        expert_parallel=config.expert_parallel)  # fmt: skip
    set_formats(model, config.quantization, path, device)
    if config.use_dummy_weight:
        load_dummy_weights(model, device=device, dtype=dtype)
    else:
        load_weights(model, path, comm, device=device, dtype=dtype, progress=progress)
    return model.eval()


def measure_peak(engine: Engine, num_tokens: int) -> tuple[int, int]:
    """Return torch's bytes on the GPU before a trial prefill, and at its peak; 0, 0 on a CPU."""
    longest, row = engine.max_seq_len - 1, engine.tables.dummy_row
    pieces = [longest] * (num_tokens // longest) + [num_tokens % longest]
    batch = Batch([dummy_request(row, length) for length in pieces if length], Phase.PREFILL)
    return peak_of(lambda: engine.step(engine.prepare(batch)).wait(), engine.device)


def count_pages(
    config: EngineConfig, model_config: ModelConfig, model: nn.Module, comm: Comm,
    free_before: int, stream: torch.cuda.Stream | None,
) -> int:  # fmt: skip
    """Return the configured number of KV pages, or else the most that every rank can hold."""
    if config.num_pages is not None:
        return config.num_pages
    return decide_pages(
        config, model_config, comm, free_before=free_before, model_bytes=tensor_bytes(model),
        trial=lambda tokens: measure_peak(
            Engine(config, model_config, model, *allocate_memory(config, model_config, 1), stream),
            tokens,
        ),
    )  # fmt: skip


def build_engine(
    config: EngineConfig, comm: Comm | None = None, *, progress: bool = True,
    new_graph: Callable[[], Graph] | None = None, **hooks: Any,
) -> Engine:  # fmt: skip
    """Build an engine, part by part. `new_graph` makes graphs without a GPU, for tests.

    `hooks` are `deferral` and `make_scorer` of `Engine`.
    """
    comm, path = comm or SingleRank(), resolve_model_path(config.model_path)
    model_config = ModelConfig.from_path(path)
    config = resolve(config, model_config)
    device = start_device(config, comm, fake_graphs=new_graph is not None)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    free_before = agree_on_free(device, comm)
    check_asked(config, model_config, comm.size, free_before)
    model = load_model(config, model_config, path, comm, progress)
    num_pages = count_pages(config, model_config, model, comm, free_before, stream)
    if stream is not None:  # the weights came on another stream: wait for them once
        torch.cuda.synchronize(device)
        new_graph = new_graph or torch.cuda.CUDAGraph
    pool, tables = allocate_memory(config, model_config, num_pages)
    load_kv_scales(pool, path, model_config.num_kv_heads, comm)
    return Engine(config, model_config, model, pool, tables, stream, new_graph=new_graph,
                  progress=progress, **hooks)  # fmt: skip
