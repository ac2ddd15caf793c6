"""A recording, replayed, is the engine: after every step of random runs, and through a file."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl import LLM, SamplingParams, events
from minisgl.events import AnyEvent, Event
from minisgl.guarded import guarded
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.recording import Recorder, Recording, Replay, read_recording, replay
from minisgl.scheduler.messages import AbortMsg
from minisgl.scheduler.observe import emitter
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.speculative import SpeculativeScheduler
from minisgl.server.workers.scheduler_process import Reporter
from tests.fakes import Driver


def assert_same(state: Replay, scheduler: Scheduler) -> None:
    """Compare a replay with the engine's own objects: pages, rows, tree, queue, tokens."""
    cache, size = scheduler.cache, scheduler.cache.page_size
    assert state.free == set(cache.allocator.free_set().tolist())
    assert state.steps == scheduler.step_count
    tree = cache.prefix_cache
    if isinstance(tree, RadixCache):
        nodes = {tree.first_page(node): node for node in tree.nodes()[1:]}
        assert state.nodes.keys() == nodes.keys()
        for name, node in nodes.items():
            replayed = state.nodes[name]
            assert replayed.pages == events.pages_of(node.slots, size)
            assert node.parent is not None and replayed.parent == tree.first_page(node.parent)
            assert replayed.locks == node.ref_count
        assert list(state.lru) == [tree.first_page(node) for node in tree.lru]
    live = {uid: req for uid, req in state.requests.items() if req.state != "done"}
    assert live.keys() == scheduler.reqs.keys()
    for uid, req in scheduler.reqs.items():
        replayed_req = live[uid]
        assert replayed_req.row == req.table_idx
        assert (replayed_req.state == "waiting") == (req.table_idx < 0)
        assert replayed_req.answer == req.output_ids.tolist()
        if req.table_idx >= 0:
            end = cache.allocated_len.get(req, req.cache_handle.cached_len)
            row = cache.tables.page_table[req.table_idx, :end]
            assert replayed_req.pages == events.pages_of(row, size)
            assert replayed_req.shared == req.cache_handle.cached_len // size
            assert replayed_req.cached in (0, req.cached_len)  # 0: admitted, its step not launched


def apply_all(state: Replay, seen: list[Event]) -> None:
    """Apply what was seen since the last call."""
    for event in seen:
        state.change_request(event)
    seen.clear()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 12), st.integers(0, 3), st.integers(1, 14)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("go"), st.integers(1, 4)),
        st.tuples(st.just("reset")),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    ACTIONS, st.booleans(), st.sampled_from(["radix", "naive"]), st.sampled_from([None, 2]),
    st.sampled_from([6, 64]), st.sampled_from(["fcfs", "fair"]), st.booleans(),
)  # fmt: skip
def test_replay_follows_the_engine(
    actions: list[Any], overlap: bool, cache: str, reserve: int | None, budget: int,
    policy: str, drafts: bool,
) -> None:  # fmt: skip
    """Whatever is asked and aborted, in small pools, with retraction, chunks and drafts."""
    seen: list[Event] = []
    driver = Driver(
        emit=seen.append, overlap=overlap, cache_type=cache, reserve=reserve, budget=budget,
        policy=policy, min_shared=4, num_pages=14, max_running_req=3, max_seq_len=40,
        scheduler=SpeculativeScheduler if drafts else Scheduler,
    )  # fmt: skip
    state, uid = Replay(driver.engine.num_pages), 0
    for name, *numbers in actions:
        if name == "ask":
            length, kind, tokens = numbers
            driver.ask(uid, [5] * length + [7 + kind] * 3, max_tokens=tokens)
            uid += 1
        elif name == "abort":
            driver.channel.put_messages(AbortMsg(numbers[0]))
        elif name == "reset":
            driver.scheduler.reset()
        else:
            driver.go(numbers[0])
        apply_all(state, seen)
        assert_same(state, driver.scheduler)
    driver.drain()
    apply_all(state, seen)
    assert_same(state, driver.scheduler)
    for number, req in state.requests.items():
        assert req.state == "done" and req.answer == driver.tokens(number)


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_is_replayed(overlap: bool) -> None:
    seen: list[Event] = []
    driver = Driver(emit=seen.append, overlap=overlap, reserve=1, num_pages=10, max_running_req=3)
    for uid in range(3):
        driver.ask(uid, [uid + 1] * 5, max_tokens=20, ignore_eos=True)
    state = Replay(driver.engine.num_pages)
    while driver.channel.waiting or driver.scheduler.has_work:
        driver.go()
        apply_all(state, seen)
        assert_same(state, driver.scheduler)
    assert driver.scheduler.retractions > 0


def test_a_recording_of_a_model_replays_to_its_end(tmp_path: Path) -> None:
    """Through the file, with the model's own tokens, twice with one prefix cache."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10 + i] for i in range(6)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    path = tmp_path / "run.jsonl"
    llm = LLM(device="cpu", page_size=4, num_pages=24, max_running_req=4, record=path)
    outs = llm.generate(prompts, params) + llm.generate(prompts[:3], params)
    assert llm.recorder is not None
    llm.recorder.flush()
    state = replay(read_recording(path))
    assert_same(state, llm.scheduler)
    assert [req.answer for req in state.requests.values()] == [out["token_ids"] for out in outs]
    llm.shutdown()
    about = read_recording(path).about
    assert about["page_size"] == 4 and about["num_pages"] == 24 and about["device"] == "cpu"


@pytest.mark.parametrize("text", [False, True])
def test_prompts_are_recorded_only_when_asked_for(tmp_path: Path, text: bool) -> None:
    with LLM(device="cpu", num_pages=64, record=tmp_path / "run", record_text=text) as llm:
        llm.generate([[901, 902, 903]], SamplingParams(max_tokens=2))
    assert (b"901,902,903" in (tmp_path / "run").read_bytes()) == text
    added = [
        e for _, e in read_recording(tmp_path / "run").lines if isinstance(e, events.RequestAdded)
    ]
    assert [(e.prompt_len, len(e.prompt)) for e in added] == [(3, 3 if text else 0)]


def test_nothing_is_built_without_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in events.__dict__:
        kind = getattr(events, name)
        if isinstance(kind, type) and issubclass(kind, Event):
            monkeypatch.setattr(events, name, None)  # to build one is an error now
    driver = Driver()
    driver.ask(1, [1, 1, 1], max_tokens=3)
    driver.drain()


def test_a_recording_is_bounded_and_may_end_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorder = Recorder(path, max_bytes=400)
    recorder.begin({"num_pages": 4})
    for step in range(1000):
        recorder(events.StageEnded("wait", step))
    recorder.close()
    whole = path.read_bytes()
    assert 300 < len(whole) <= 400 and whole.endswith(b"\n")
    assert len(read_recording(path).lines) > 3
    for size in range(len(whole.split(b"\n")[0]) + 1, len(whole)):
        path.write_bytes(whole[:size])
        steps = [e.step for _, e in read_recording(path).lines if isinstance(e, events.StageEnded)]
        assert steps == list(range(len(steps)))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"minisgl": 99}\n', b"\x00\xff\n", b"[1]\n"])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="recording: must be"):
        read_recording(tmp_path / "other")
    with pytest.raises(ValueError, match="recording: cannot use"):
        read_recording(tmp_path / "missing")
    with pytest.raises(ValueError, match="record: cannot use"):
        Recorder(tmp_path / "no folder" / "run")


def test_a_full_disk_harms_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.flushed = -1.0  # each event goes to the file at once

    def full(lines: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder.file = SimpleNamespace(write=full)  # type: ignore[assignment]
    driver = Driver(emit=emitter(recorder))
    with caplog.at_level(logging.ERROR):
        driver.ask(1, [1, 1], max_tokens=4, ignore_eos=True)
        driver.drain()
    assert len(driver.tokens(1)) == 4 and not recorder.buffer
    assert len([r for r in caplog.records if "reported once" in r.getMessage()]) == 1


def test_a_report_writes_what_an_idle_server_has_recorded(tmp_path: Path) -> None:
    """No later event does: `/viewer` would show nothing of the only request."""
    recorder = Recorder(tmp_path / "run", clock=lambda: 0.0)
    driver = Driver(emit=emitter(recorder))
    driver.ask(1, [1, 1], max_tokens=4, ignore_eos=True)
    driver.drain()
    reporter = Reporter(False, recorder)
    reporter()  # the scheduler is still being built
    reporter.scheduler = driver.scheduler
    assert recorder.buffer and not (tmp_path / "run").read_bytes()
    assert len(reporter()) == 1
    assert not recorder.buffer and b"\n" in (tmp_path / "run").read_bytes()


def test_an_observer_is_called_again_after_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    """A disk may have room again: one exception does not silence an observer for good."""
    seen: list[int] = []

    def observe(number: int) -> None:
        if number < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        seen.append(number)

    observing = guarded(observe)
    for number in range(5):
        observing(number)
    assert seen == [3, 4] and len(caplog.records) == 1


def test_every_kind_of_event_is_in_the_union_and_survives_the_file(tmp_path: Path) -> None:
    kinds = set(Event.__subclasses__())
    assert kinds == set(AnyEvent.__args__)
    samples: list[Event] = [
        events.RequestAdded(1, 2, 3, [4, 5]), events.RequestAdmitted(1, 0, [2]),
        events.RequestRetracted(1), events.RequestReleased(1), events.SchedulerReset(),
        events.StepLaunched(0, "decode", [1], [5]), events.StepFinished(0, [(1, 7), (2, None)]),
        events.StageEnded("wait", 0), events.PagesTaken(1, [3]), events.PagesCached(1, [2, 3]),
        events.PagesFreed([3]), events.NodeAdded(-1, [2]), events.NodeSplit(2, 1),
        events.NodeEvicted(2, 1), events.NodeLocked(2, -1), events.NodeUsed(2),
    ]  # fmt: skip
    assert {type(sample) for sample in samples} == kinds
    recorder = Recorder(tmp_path / "run", text=True)
    recorder.begin({"num_pages": 1})
    for sample in samples:
        recorder(sample)
    recorder.close()
    run: Recording = read_recording(tmp_path / "run")
    assert [event for _, event in run.lines] == samples
    for line in (tmp_path / "run").read_text().splitlines()[1:]:
        time_us, (name, *_) = json.loads(line)
        assert time_us >= 0 and name in {kind.__name__ for kind in kinds}
