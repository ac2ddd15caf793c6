"""An exception may stop any method of the engine half-way: the next answers are still right.

`Scheduler.reset` makes that so. No method has to be safe by itself, so these tests do not choose
where the exception comes: before and after every method that a call runs, and at every line.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import getmembers, ismethod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

import minisgl
from minisgl import LLM, SamplingParams
from minisgl.kvcache.audit import check_integrity
from minisgl.scheduler import grammar
from tests.checkpoints import make_checkpoint
from tests.turns import in_turns

ROWS = 4
SIZES: dict[str, Any] = {
    "device": "cpu", "page_size": 4, "num_pages": 14, "max_running_req": ROWS,
    "max_extend_tokens": 24, "reserve_tokens": 1,
}  # fmt: skip
# Chunks, shared prefixes, retraction, eviction, drafts, grammars, penalties, scores, seeds.
PROMPTS = [[7] * 9 + [*range(20)], [7] * 9 + [1, 2], [1, 2, 3] * 3, [7] * 9 + [*range(9)]]
PARAMS = [
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=8, regex="[a-z ]{6}"),
    SamplingParams(max_tokens=10, ignore_eos=True, presence_penalty=0.5, logit_bias={5: 99}),
    SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1),
]
LONG = [[(3 * i) % 251 for i in range(40)]], SamplingParams(max_tokens=2, ignore_eos=True)

CASES = pytest.mark.parametrize(
    ("overlap", "drafts"), in_turns(2, [(True, 0), (True, 3), (False, 3), (False, 0)])
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=2, tokenizer=True)


def answers(llm: LLM) -> list[list[int]]:
    """The tokens of a mix of requests, and of a prompt that takes over their rows and pages."""
    return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS) + llm.generate(*LONG)]


@contextmanager
def opened(folder: Path, overlap: bool, drafts: int) -> Iterator[tuple[LLM, list[list[int]]]]:
    """An engine, and the answers that it gives while it is new."""
    with (
        patch.object(grammar, "MASKS", math.inf),  # the steps do not depend on the clock
        LLM(folder, overlap=overlap, num_speculative_tokens=drafts, **SIZES) as llm,
    ):
        want = answers(llm)
        assert llm.scheduler.retractions > 0 and getattr(llm.scheduler, "accepted", 1) > 0
        yield llm, want


def parts(llm: LLM) -> list[Any]:
    """Every object that keeps state from one step to the next."""
    scheduler = llm.scheduler
    engine, cache = scheduler.engine, scheduler.cache
    return [
        scheduler, engine, cache, cache.allocator, cache.prefix_cache, engine.tables,
        engine.deferral, engine.sampler, scheduler.prefill, scheduler.prefill.waiting,
        scheduler.decode, llm.channel, getattr(scheduler, "proposer", None),
    ]  # fmt: skip


def methods(llm: LLM) -> dict[str, tuple[Any, str]]:
    """The methods of all parts by a readable name."""
    return {
        f"{type(part).__name__}.{name}": (part, name)
        for part in parts(llm)
        for name, _ in getmembers(part, ismethod)
        if not name.startswith("__") and name not in vars(part)
    }


@contextmanager
def wrapped(part: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Replace one method of one object for the block."""
    setattr(part, name, wrap(getattr(part, name)))
    try:
        yield
    finally:
        delattr(part, name)


def count_calls(llm: LLM, known: dict[str, tuple[Any, str]]) -> Counter[str]:
    """Count the calls of each method by the answers above."""
    counts: Counter[str] = Counter()

    def counting(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **fields: Any) -> Any:
                counts[label] += 1
                return real(*args, **fields)

            return call

        return wrap

    for label, (part, name) in known.items():
        setattr(part, name, counting(label)(getattr(part, name)))
    answers(llm)
    for part, name in known.values():
        delattr(part, name)
    return counts


def raising(at: int, after: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Raise before or after call number `at`."""
    calls = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and not after:
                raise KeyboardInterrupt
            result = real(*args, **fields)
            if calls == at and after:
                raise KeyboardInterrupt
            return result

        return call

    return wrap


def damage(llm: LLM) -> str:
    """Return the damage that an interrupted call left; empty if there is none."""
    scheduler = llm.scheduler
    left = {
        "requests": list(scheduler.reqs.values()),
        "running": list(scheduler.decode.running.values()),
        "waiting": list(scheduler.prefill.waiting),
        "chunked": scheduler.prefill.chunked_req,
        "in flight": scheduler.in_flight,
        "rows": ROWS - scheduler.engine.tables.free_rows,
        "messages": llm.channel.waiting or llm.channel.take_replies(),
        "deferred": getattr(scheduler.engine.deferral, "waiting", None),
    }
    check_integrity(scheduler.cache)
    return ", ".join(f"{name}: {what}" for name, what in left.items() if what)


@CASES
def test_an_exception_around_any_method(folder: Path, overlap: bool, drafts: int) -> None:
    with opened(folder, overlap, drafts) as (llm, want):
        known = methods(llm)
        counts = count_calls(llm, known)
        assert len(counts) > 50, "the answers are to call most methods"
        for label, count in counts.items():
            for after in (False, True):
                broken = wrapped(*known[label], raising((count + 1) // 2, after))
                with broken, pytest.raises(KeyboardInterrupt):
                    answers(llm)
                where = f"{'after' if after else 'before'} {label}"
                assert not (left := damage(llm)), f"interrupted {where}: {left}"
                assert answers(llm) == want, f"interrupted {where}: other tokens"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deferred_draw_dies_with_its_requests(folder: Path, overlap: bool) -> None:
    """It would write its token into a row that another request has by then."""
    with LLM(folder, overlap=overlap, **SIZES) as llm:
        want = [llm.generate(*LONG)[0]["token_ids"]]
        deferral: Any = llm.scheduler.engine.deferral
        scheduler: Any = llm.scheduler
        place = (scheduler, "process") if overlap else (deferral, "fill_masks")
        with wrapped(*place, raising(3, after=False)), pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], PARAMS[1])
        assert deferral.waiting is None
        assert [llm.generate(*LONG)[0]["token_ids"] for _ in range(2)] == want * 2


class LineTrace:
    """Counts the lines of the package that this thread runs, and raises at chosen ones."""

    folder = str(Path(minisgl.__file__).parent)

    def __init__(self, *stops: int) -> None:
        self.stops, self.count = set(stops), 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.count += 1
            if self.count in self.stops:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> LineTrace:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)


@CASES
def test_an_exception_at_any_line_and_one_more_in_the_reset(
    folder: Path, overlap: bool, drafts: int
) -> None:
    """As Ctrl-C comes: between two lines, once, and again a few lines later."""
    with opened(folder, overlap, drafts) as (llm, want):
        with LineTrace() as trace:
            answers(llm)
        lines, hit = trace.count, 0
        for trial in range(30):
            first = 1 + (trial * lines + 13 * trial) // 30
            with LineTrace(first, first + 1 + trial % 40) as trace, suppress(KeyboardInterrupt):
                answers(llm)
            hit += trace.count < lines
            assert answers(llm) == want, f"interrupted at line {first} of {lines}"
            assert not damage(llm), f"interrupted at line {first} of {lines}"
        assert hit > 25
