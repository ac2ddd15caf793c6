"""An engine and everything that feeds it, from a config.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minisgl.config.engine import SchedulerConfig
from minisgl.config.folder import check_folder
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.engine import Engine, build_engine
from minisgl.engine.prompt_logprobs import make_scorer
from minisgl.events import Emit
from minisgl.guarded import guarded
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.naive_cache import NaiveCache
from minisgl.kvcache.prefix_cache import PrefixCache
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.parallel.comm import Comm
from minisgl.recording import Recorder
from minisgl.scheduler import mixed
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.executor import Executor
from minisgl.scheduler.grammar import CompilingChannel, load_grammars
from minisgl.scheduler.grammar_queue import GrammarQueue
from minisgl.scheduler.mixed import MixedPrefill, SharedDecode, SharedPrefill
from minisgl.scheduler.observe import IdleAudit, emitter
from minisgl.scheduler.phases import DecodeManager, PrefillLimits, PrefillManager
from minisgl.scheduler.queue import ArrivalOrder, FairQueue, WaitingQueue, mixed_prefill_threshold
from minisgl.scheduler.requests import Limits, make_req
from minisgl.scheduler.retraction import DelayedPrefill, make_room
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.speculative import SpeculativeScheduler
from minisgl.tokenizer import load_tokenizer


def limits_of(engine: Executor, eos_token_ids: Collection[int]) -> Limits:
    """Return the limits for requests to this engine."""
    pool_tokens = engine.num_pages * engine.page_size
    return Limits(engine.max_seq_len, pool_tokens, engine.vocab_size, frozenset(eos_token_ids))


def end_tokens(folder: Path, model: ModelConfig) -> Collection[int]:
    """Return the tokens that end an output: the model config's, or else its tokenizer's."""
    if model.eos_token_ids:
        return model.eos_token_ids
    tokenizer = load_tokenizer(folder)
    return () if tokenizer is None else tokenizer.eos_token_ids


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Factories of a scheduler's parts. Replace one to use your own class."""

    engine: Callable[..., Engine] = build_engine
    radix_cache: Callable[[int], PrefixCache] = RadixCache
    naive_cache: Callable[[int], PrefixCache] = NaiveCache
    cache_manager: Callable[..., CacheManager] = CacheManager
    decode: Callable[..., DecodeManager] = DecodeManager
    shared_decode: Callable[..., DecodeManager] = SharedDecode
    prefill: Callable[..., PrefillManager] = SharedPrefill
    delayed_prefill: Callable[..., PrefillManager] = DelayedPrefill
    arrival_order: Callable[[], WaitingQueue] = ArrivalOrder
    fair_queue: Callable[[int], WaitingQueue] = FairQueue
    scheduler: Callable[..., Scheduler] = Scheduler
    speculative_scheduler: Callable[..., Scheduler] = SpeculativeScheduler


def build_prefill(
    config: SchedulerConfig, engine: Executor, parts: Parts, emit: Emit | None
) -> PrefillManager:
    """Build cache, queue and admission from a resolved config."""
    kinds = {"radix": parts.radix_cache, "naive": parts.naive_cache}
    prefixes = kinds[config.cache_type](engine.page_size)
    cache = parts.cache_manager(engine.num_pages, engine.tables, prefixes, emit)
    budget, fair = config.max_extend_tokens, config.schedule_policy == "fair"
    assert budget is not None
    limits = PrefillLimits(
        max_extend_tokens=budget,
        min_shared=0 if config.cache_type == "naive" else 32,
        mixed_prefill_threshold=mixed_prefill_threshold(budget) if fair else None,
    )
    if fair:
        on_cpu = torch.device(config.device).type == "cpu"
        context = mixed.CPU_CONTEXT if on_cpu else mixed.GPU_CONTEXT
        decode = parts.shared_decode(config.reserve_tokens, context)
        prefill = parts.prefill(cache, decode, limits, parts.fair_queue(budget))
        if on_cpu and isinstance(prefill, MixedPrefill):
            prefill.long_chunk = mixed.CPU_CHUNK
        return prefill
    decode = parts.decode(config.reserve_tokens)
    return parts.delayed_prefill(cache, decode, limits, parts.arrival_order())


def describe(config: SchedulerConfig, cache: CacheManager) -> dict[str, Any]:
    """Describe the engine for a reader of the recording."""
    folder = resolve_model_path(config.model_path)
    return {
        "model": None if folder == resolve_model_path(None) else str(folder),
        "device": torch.device(config.device).type,
        "overlap": bool(config.overlap),
        "page_size": cache.page_size,
        "num_pages": cache.num_pages,
        "rows": cache.tables.num_rows,
        "budget": config.max_extend_tokens,  # tokens of a prefill step
    }


def build_scheduler(
    config: SchedulerConfig, channel: Channel, comm: Comm | None = None, *,
    observe: Emit | None = None, recorder: Recorder | None = None, progress: bool = False,
    hold: GrammarQueue | None = None, parts: Parts | None = None,
) -> Scheduler:  # fmt: skip
    """Build an engine and everything that feeds it; each part gets the parts that it uses.

    `observe` and `recorder` receive events. In `hold`, somewhere inside of `channel`, requests wait
    for their grammars. `parts` None: the default factories.
    """
    parts = parts or Parts()
    folder = resolve_model_path(config.model_path)
    check_folder(folder)
    model = ModelConfig.from_path(folder)
    ends = end_tokens(folder, model)
    grammars = load_grammars(folder, model.vocab_size, ends, comm)
    if hold is not None:
        hold.start = grammars.start
    hooks = {"deferral": grammars, "make_scorer": make_scorer}
    engine = parts.engine(config, comm, progress=progress, **hooks)
    limits, settled = limits_of(engine, ends), engine.config
    assert isinstance(settled, SchedulerConfig)
    emit = emitter(observe, recorder)
    prefill = build_prefill(settled, engine, parts, emit)
    if recorder is not None:
        guarded(recorder.begin)(describe(settled, prefill.cache))
    make, drafts = parts.scheduler, {}
    if most := settled.num_speculative_tokens:
        make = parts.speculative_scheduler
        drafts = {"num_speculative_tokens": most, "max_rows": engine.runners.max_draft_rows}
    elif isinstance(prefill, MixedPrefill):
        prefill.max_tokens, prefill.max_requests = engine.runners.mixed_limits
    return make(
        engine, prefill.cache, prefill, prefill.decode,
        channel if hold is not None else CompilingChannel(channel, grammars),
        make_req=partial(make_req, limits=limits, constrain=grammars.constrain),
        make_room=make_room, audit=IdleAudit(), eos_token_ids=limits.eos_token_ids,
        overlap=bool(settled.overlap), interleave=settled.schedule_policy == "fair",
        emit=emit,
        **drafts,
    )  # fmt: skip
