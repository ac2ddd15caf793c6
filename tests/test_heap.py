"""The frozen heap: what a collection passes over, and which processes serve or measure with it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.benchmark import cli, options, overhead, serving_cli
from minisgl.config.engine import SchedulerConfig, ServerConfig, TPInfo
from minisgl.engine.heap import frozen_heap
from minisgl.parallel.comm import SingleRank
from minisgl.runtime import ranks
from minisgl.runtime.supervisor import WorkerContext, WorkerFailed
from minisgl.server import scheduler_part, text_part
from minisgl.server.launch import Addresses
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.tiny.model_path import model_path


class Circle:
    """An object that only the collector can remove."""

    def __init__(self) -> None:
        self.me = self


class Left(Exception):
    """Raised to leave a loop that would not end."""


class Counts:
    """How many objects are frozen, each time that it is called."""

    def __init__(self, leave: bool = False) -> None:
        self.found: list[int] = []
        self.leave = leave

    def __call__(self, *args: Any, **how: Any) -> None:
        self.found.append(gc.get_freeze_count())
        if self.leave:
            raise Left

    def check(self, calls: int = 1) -> None:
        """Each time nearly everything was frozen, and now nothing is."""
        assert len(self.found) == calls
        assert min(self.found) > 10_000
        assert gc.get_freeze_count() == 0


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen before a test, nor after one that fails."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Addresses:
    return Addresses.in_folder(tmp_path_factory.mktemp("s"), 0)


def test_everything_is_frozen_in_the_block_and_thaws_after_it() -> None:
    tracked = len(gc.get_objects())
    with frozen_heap():
        assert gc.get_freeze_count() > 0.5 * tracked
        assert len(gc.get_objects()) < 0.1 * tracked
    assert gc.get_freeze_count() == 0


def test_an_error_in_the_block_thaws_it_too() -> None:
    with pytest.raises(Left), frozen_heap():
        raise Left
    assert gc.get_freeze_count() == 0


def test_garbage_goes_before_it_would_stay() -> None:
    circle = weakref.ref(Circle())
    assert circle() is not None
    with frozen_heap():
        assert circle() is None


def test_what_the_block_leaves_behind_is_collected() -> None:
    with frozen_heap():
        circle = weakref.ref(Circle())
        assert circle() is not None
        gc.collect()
        assert circle() is None


def test_what_was_dropped_in_the_block_is_collected_behind_it() -> None:
    kept = Circle()
    circle = weakref.ref(kept)
    with frozen_heap():
        del kept
        gc.collect()
        assert circle() is not None
    gc.collect()
    assert circle() is None


def test_an_inner_block_leaves_the_outer_one_frozen() -> None:
    with frozen_heap():
        circle = weakref.ref(Circle())
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0 and circle() is None


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 10_000


def test_a_few_frozen_objects_of_python_itself_change_nothing() -> None:
    kept = gc.get_objects()
    gc.freeze()
    made: list[Any] = [[] for _ in range(2 * len(kept))]
    with frozen_heap():
        assert gc.get_freeze_count() > len(made)
    assert gc.get_freeze_count() == 0


def test_scheduler_process(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen when it says that it is ready, and in its loop."""
    counts = Counts()
    monkeypatch.setattr(scheduler_part, "run_loop", counts)
    engine = SimpleNamespace(shutdown=lambda: None)
    made = SimpleNamespace(overlap=True, engine=engine)
    monkeypatch.setattr(scheduler_part, "build_scheduler", lambda *args, **how: made)
    config = ServerConfig(model_path=str(model_path()))
    scheduler_part.scheduler_part(config, addresses, 0, WorkerContext(counts, lambda: None))
    counts.check(2)


def test_text_process(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    monkeypatch.setattr(text_part, "run_text_worker", counts)
    config = ServerConfig(model_path=str(model_path()))
    text_part.text_part(config, addresses, -1, WorkerContext(counts, lambda: None))
    counts.check(2)


class Gate:
    """The server's gate; each time that it opens or closes, or is asked who is in, it counts."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.reasons = counts, list[str | None]()

    @property
    def reason(self) -> str | None:
        return self.reasons[-1]

    @reason.setter
    def reason(self, reason: str | None) -> None:
        self.reasons.append(reason)
        self.counts()

    @property
    def taken(self) -> int:
        self.counts()
        return 0


@pytest.mark.parametrize("fails", [False, True])
def test_http_process(fails: bool) -> None:
    """Frozen before anybody is let in, until the last answer."""
    counts = Counts()

    def broken() -> str | None:
        counts()
        if fails:
            raise WorkerFailed("it is enough")
        server.asked = 1
        return None

    group: Any = SimpleNamespace(starting=lambda: False, broken=broken)
    server: Any = SimpleNamespace(asked=0, started=True, should_exit=False)
    frontend: Any = SimpleNamespace(fail_all=counts)
    gate: Any = Gate(counts)
    life = Lifecycle(server, group, frontend, gate, drain_timeout=1.0, on_ready=counts)
    asyncio.run(life._states())
    assert server.should_exit and (life.failed is not None) == fails
    assert gate.reasons == [None, *([] if fails else ["the server is shutting down"])]
    counts.check(3 if fails else 7)


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    monkeypatch.setattr(ranks, "run_loop", counts)
    engine = SimpleNamespace(shutdown=lambda: None)
    made = SimpleNamespace(overlap=True, engine=engine)
    monkeypatch.setattr(ranks, "build_scheduler", lambda *args, **how: made)
    config = SchedulerConfig(model_path=str(model_path()), tp=TPInfo(0, 1))
    outer: Any = None
    monkeypatch.setattr(ranks, "BroadcastChannel", lambda *args: outer)
    ranks.tp_worker(SingleRank(), config)
    counts.check()


def test_benchmarks_of_an_engine() -> None:
    parser = cli.build_parser()
    flags = ["--device", "cpu", "--num-pages", "64", "--page-size", "1"]
    args = parser.parse_args(["offline", *flags])
    counts = Counts()
    with options.model_folder(None, False) as folder, cli.started(folder, args):
        counts()
    counts.check()


def test_engine_beside_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that the server is compared with is frozen as the server is."""
    monkeypatch.setattr(overhead.signal, "signal", lambda *args: None)
    counts = Counts()
    pipe: Any = SimpleNamespace(recv=counts, send=lambda message: None)
    overhead.engine_process(pipe, model_path(), {"device": "cpu", "num_pages": 64})
    counts.check()


def test_clock_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(leave=True)

    async def flood(*args: Any) -> None:
        counts()

    monkeypatch.setattr(overhead, "flood", flood)
    child: Any = SimpleNamespace(url="", cpu_seconds=dict)
    with pytest.raises(Left):
        overhead.run_server(child, [], 0.0)
    counts.check()


def test_benchmarks_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the client would look like one of the server."""
    counts = Counts(leave=True)

    async def one_run(*args: Any) -> None:
        counts()

    monkeypatch.setattr(serving_cli, "one_run", one_run)
    with pytest.raises(Left):
        serving_cli.measured(cli.build_parser().parse_args(["offline"]), [], {})
    counts.check()
