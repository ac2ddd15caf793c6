"""Deterministic simulation: fresh seeds find nothing, planted bugs are found and made short."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minisgl.core import Batch, Phase, Req, SamplingParams
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.page_table import TableManager
from minisgl.scheduler.messages import Msg
from minisgl.scheduler.mixed import MixedPrefill
from minisgl.scheduler.simulated import SimulatedExecutor, WrongKV
from tests import adversary
from tests.adversary import (
    Abort,
    Again,
    Ask,
    Exit,
    Fail,
    Jump,
    Misuse,
    Script,
    Swap,
    Turn,
    failure,
    fresh_seeds,
    make_script,
    play,
    report,
    search,
    shrink,
)

SIZES: dict[str, Any] = {
    "num_pages": 8, "page_size": 2, "max_seq_len": 16, "max_running_req": 3, "vocab_size": 64,
}  # fmt: skip


def test_fresh_seeds(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """`--adversary TURNS` makes it a longer run."""
    first = secrets.randbelow(10**9)
    with capsys.disabled():
        print(f"\nadversary: seeds from {first} on")
    _, failed = search(fresh_seeds(first), pytestconfig.getoption("--adversary"))
    assert failed is None, report(failed)


def test_a_seed_is_all_there_is() -> None:
    """Two schedulers do the same, as those of two ranks must: nothing depends on addresses."""
    for seed in range(10):
        script = make_script(seed)
        assert script == make_script(seed)
        assert play(script).trace == play(script).trace


def test_scripts_hold_all_that_can_happen() -> None:
    scripts = [make_script(seed) for seed in range(40)]
    ops = [op for script in scripts for op in script.ops]
    assert {type(op) for op in ops} == {
        Ask, Abort, Turn, Again, Swap, Fail, Jump, Misuse, Exit,
    }  # fmt: skip
    worlds = [play(script) for script in scripts]
    assert any(world.follower is not None and len(world.trace) > 50 for world in worlds)
    assert any(world.shadow is not None and len(world.trace) > 50 for world in worlds)
    assert sum(world.scheduler.retractions for world in worlds) > 10
    assert sum(world.shared for world in worlds) > 100
    assert sum(getattr(world.scheduler, "accepted", 0) for world in worlds) > 100
    given = {name for op in ops if isinstance(op, Ask) for name, _ in op.options}
    assert given >= {"regex", "cache_salt", "stop_token_ids", "logprobs", "prompt_logprobs"}


def test_slow_masks_change_no_token() -> None:
    """An answer waits for its mask in any state, also for its first and last."""
    scripts = [script for script in map(make_script, range(70)) if script.slow_masks]
    assert {script.overlap for script in scripts if script.grammars} == {True, False}
    assert sum(play(script).masks_late for script in scripts if script.grammars) > 50


# ------------------------------------------------------------------ the executor


def admit(executor: SimulatedExecutor, slots: list[int], ids: list[int], **fields: Any) -> Req:
    """A request in a row that names these slots."""
    params = SamplingParams(**fields)
    req = Req(uid=1, input_ids=np.array(ids), sampling_params=params, max_new_tokens=4)
    req.table_idx = executor.tables.allocate()
    executor.tables.write(req.table_idx, 0, np.array(slots, np.int32))
    executor.tables.write_tokens(req.table_idx, 0, req.input_ids)
    return req


def prefill(executor: SimulatedExecutor, *reqs: Req) -> list[int]:
    """Compute what is not cached; the next tokens."""
    batch = Batch(list(reqs), Phase.PREFILL)
    return executor.step(executor.prepare(batch)).wait().ids


def test_an_answer_that_waits_for_its_mask_writes_no_shared_page() -> None:
    """It computes its last token again; the page of that is not in the prefix cache yet."""
    asks = [
        Ask(uid=uid, text=1, length=1, max_tokens=1, options=(("regex", "a*"),)) for uid in range(3)
    ]
    script = Script(
        ops=(asks[0], Turn(), *asks[1:]), page_size=1, num_pages=240, rows=5, window=16, budget=10,
        overlap=False, grammars=True, context=60, long_chunk=12, decode_context=30, turn=4,
        slow_masks=True,
    )  # fmt: skip
    assert not failure(script)


def test_a_slot_of_another_prefix_is_noticed() -> None:
    executor = SimulatedExecutor(**SIZES)
    prefill(executor, admit(executor, [0, 1, 2], [7, 7, 1]))
    same = admit(executor, [0, 1, 4], [7, 7, 2])
    same.cached_len = 2
    prefill(executor, same)
    other = admit(executor, [0, 1, 6], [7, 9, 2])
    other.cached_len = 2
    with pytest.raises(WrongKV, match="row 2, position 1, slot 1"):
        prefill(executor, other)


def test_a_prefix_under_another_salt_is_another_prefix() -> None:
    executor = SimulatedExecutor(**SIZES)
    prefill(executor, admit(executor, [0, 1], [7, 7], cache_salt="a"))
    same = admit(executor, [0, 1, 4], [7, 7, 2], cache_salt="a")
    other = admit(executor, [0, 1, 6], [7, 7, 2], cache_salt="b")
    same.cached_len = other.cached_len = 2
    prefill(executor, same)
    same.cached_len = 2
    with pytest.raises(WrongKV, match="row 2, position 0, slot 0"):
        prefill(executor, same, other)


def test_answers_do_not_depend_on_the_batch() -> None:
    ids = [[1, 2, 3, 4], [5, 6], [7]]
    alone = [prefill(e := SimulatedExecutor(**SIZES), admit(e, [0, 1, 2, 3][: len(i)], i))
             for i in ids]  # fmt: skip
    executor = SimulatedExecutor(**SIZES, share_memory=False)
    reqs = [admit(executor, [4 * k + n for n in range(len(i))], i) for k, i in enumerate(ids)]
    assert prefill(executor, *reqs) == [token for tokens in alone for token in tokens]


# ------------------------------------------------------------------ planted bugs

Cached = Callable[[CacheManager, Req, bool], None]


def without_rewrite(real: Cached) -> Cached:
    """`cache_req` that leaves the row as it is, although its duplicates are freed."""

    def cache_req(self: CacheManager, req: Req, finished: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TableManager, "write", lambda *_: None)
            real(self, req, finished)

    return cache_req


def test_a_planted_bug_shrinks_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "cache_req", without_rewrite(CacheManager.cache_req))
    seed = next(seed for seed in range(100) if failure(make_script(seed)))
    script = shrink(make_script(seed))
    assert len(script.ops) <= 4 < 100 <= len(make_script(seed).ops)
    assert failure(script) and failure(script) == failure(make_script(seed))
    text = report(seed)
    assert text.endswith(f"reproduce: python -m tests.adversary {seed}")
    scope = {kind.__name__: kind for kind in (Script, Ask, Abort, Turn, Again, Swap, Fail, Exit)}
    assert eval(str(script), scope) == script  # what is printed can be pasted into a test


def test_mixed_steps_that_count_no_pages_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedPrefill, "has_pages", lambda *_: True)
    _, failed = search(fresh_seeds(0), 20_000)
    assert failed is not None


@pytest.mark.parametrize(
    "wire",
    [lambda sent: sent[::-1], lambda sent: sent + sent[:1], lambda sent: sent[1:]],
    ids=["reordered", "twice", "lost"],
)
def test_messages_that_change_between_ranks_are_noticed(
    wire: Callable[[list[Msg]], list[Msg]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks decide for themselves, so that each has to get the same messages in the same order."""
    monkeypatch.setattr(adversary, "over_the_wire", wire)
    scripts = (replace(make_script(seed), lag=1) for seed in range(100))
    assert any(failure(script) for script in scripts)


def test_an_empty_script_passes() -> None:
    assert failure(Script(())) == "" and shrink(replace(Script(()), rows=1)).ops == ()
