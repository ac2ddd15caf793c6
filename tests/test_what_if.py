"""The viewer's simulated scheduler, in JavaScript, against the scheduler of the package.

Both serve the same requests on the same clock; every event must be equal, one by one: admissions,
batches, matches, evictions, retractions, the owner of each page. Node.js runs the JavaScript.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.events import Event
from minisgl.recording import read_recording
from tests.fakes import VOCAB, Driver, expected

ROOT = Path(__file__).resolve().parents[1]
SIMULATE = ROOT / "notebooks" / "viewer" / "simulate.js"
SERVE = """
const readline = require("node:readline").createInterface({ input: process.stdin });
readline.on("line", (line) => {
  const { settings, arrivals } = JSON.parse(line);
  console.log(JSON.stringify(new Simulation(settings, arrivals).run().map(([, event]) => event)));
});
"""
HOST_US = 400  # of each step: schedule 100, launch 200, process 100

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
Arrival = dict[str, Any]


class Node:
    """A process that runs simulations, one line of JSON for each."""

    def __init__(self) -> None:
        script = SIMULATE.read_text("utf-8") + SERVE
        self.process = subprocess.Popen(
            ["node", "-e", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, fields: dict[str, Any], arrivals: list[Arrival]) -> list[Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"settings": fields, "arrivals": arrivals}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the simulation raised an error"
        return json.loads(line)


@pytest.fixture(scope="module")
def node():
    running = Node()
    yield running
    running.process.stdin.close()
    running.process.wait()


def arrival(uid: int, at: int, client: str, prompt: list[int], max_tokens: int) -> Arrival:
    answer = expected(prompt, max_tokens)
    fields = {"uid": uid, "at": at, "client": client, "prompt": prompt}
    return {**fields, "answer": answer, "maxTokens": max_tokens}


def in_python(fields: dict[str, Any], arrivals: list[Arrival]) -> list[Any]:
    """Serve the requests with the package's scheduler, and return its events."""
    events: list[Event] = []
    driver = Driver(
        emit=events.append, budget=fields["budget"], reserve=fields["reserve"],
        policy="fair" if fields["fair"] else "fcfs", min_shared=fields["minShared"],
        cache_type="radix" if fields["radix"] else "naive", page_size=fields["pageSize"],
        mixed_prefill_threshold=fields["threshold"], num_pages=fields["pages"],
        max_running_req=fields["rows"], max_seq_len=fields["window"], turn=fields["turn"],
    )  # fmt: skip
    now, waiting = 0, sorted(arrivals, key=lambda each: each["at"])
    while waiting or driver.scheduler.has_work:
        if not driver.scheduler.has_work:
            now = max(now, waiting[0]["at"])
        while waiting and waiting[0]["at"] <= now:
            asked = waiting.pop(0)
            uid, prompt, client = asked["uid"], asked["prompt"], asked["client"]
            driver.ask(uid, prompt, client, max_tokens=asked["maxTokens"])
        steps = len(driver.engine.steps)
        driver.go()
        computed = sum(sum(step.extend) for step in driver.engine.steps[steps:])
        now += HOST_US + fields["stepUs"] + fields["tokenUs"] * computed if computed else 100
    return json.loads(msgspec.json.encode(events))


def check(node: Node, fields: dict[str, Any], arrivals: list[Arrival]) -> list[Any]:
    wanted, got = in_python(fields, arrivals), node(fields, arrivals)
    for index, (one, other) in enumerate(zip(wanted, got)):
        assert one == other, (index, wanted[max(0, index - 3) : index])
    assert len(wanted) == len(got)
    return got


DEFAULTS = {
    "pages": 60, "pageSize": 4, "rows": 6, "budget": 64, "fair": False, "radix": True,
    "reserve": None, "window": 128, "minShared": 32, "threshold": 16, "turn": 128,
    "stepUs": 4000, "tokenUs": 100,
}  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> tuple[dict[str, Any], list[Arrival]]:
    """Settings, and requests that often share prefixes, in pools that are often too small."""
    fields = DEFAULTS | {
        "pages": draw(st.integers(8, 40)),
        "pageSize": draw(st.sampled_from([1, 4, 8])),
        "rows": draw(st.sampled_from([1, 3, 6, 64])),
        "budget": draw(st.sampled_from([5, 16, 64])),
        "fair": draw(st.booleans()),
        "radix": draw(st.integers(0, 4)) > 0,
        "reserve": draw(st.sampled_from([None, 1, 4, 16])),
        "minShared": draw(st.sampled_from([0, 8, 32])),
        "threshold": draw(st.sampled_from([2, 8, 16])),
        "turn": draw(st.sampled_from([2, 6, 128])),
    }
    arrivals = []
    for uid in range(draw(st.integers(1, 14))):
        shared = [4] * draw(st.integers(0, 24))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
        at = draw(st.integers(0, 100_000)) if draw(st.booleans()) else 0
        client = draw(st.sampled_from("abc"))
        arrivals.append(arrival(uid, at, client, shared + own, draw(st.integers(1, 14))))
    return fields, arrivals


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(work=workloads())
def test_random_workloads_give_the_same_events(node: Node, work: Any) -> None:
    fields, arrivals = work
    pool = min(fields["pages"] * fields["pageSize"], fields["window"])
    check(node, fields, [each for each in arrivals if len(each["prompt"]) < pool])


@pytest.mark.parametrize("pages", [20, 30, 200])
@pytest.mark.parametrize("fair", [False, True])
def test_requests_of_a_recorded_run_give_the_same_events(
    node: Node, pages: int, fair: bool
) -> None:
    run = read_recording(ROOT / "notebooks" / "data" / "tour_run.jsonl")
    arrivals = [
        arrival(
            event.uid,
            time,
            "",
            [token % VOCAB for token in event.prompt],
            event.max_len - event.prompt_len,
        )
        for time, event in run.lines
        if type(event).__name__ == "RequestAdded"
    ]
    got = check(node, DEFAULTS | {"pages": pages, "fair": fair, "rows": 3}, arrivals)
    kinds = {event[0] for event in got}
    assert "RequestAdmitted" in kinds and ("NodeEvicted" in kinds) == (pages < 200)


def test_a_crowd_in_a_small_pool_meets_every_kind_of_event(node: Node) -> None:
    """Else the comparison would be of less than it promises."""
    prompts = [[4] * 30 + [uid % 7] * (1 + 9 * (uid % 3)) for uid in range(40)]
    arrivals = [arrival(uid, 9000 * (uid // 8), "ab"[uid % 2], prompt, 30)
                for uid, prompt in enumerate(prompts)]  # fmt: skip
    kinds: set[str] = set()
    for fair in (False, True):
        fields = DEFAULTS | {"reserve": 2, "pages": 40, "fair": fair}
        kinds |= {event[0] for event in check(node, fields, arrivals)}
    every = {kind.__name__ for kind in Event.__subclasses__()}
    assert kinds == every - {"SchedulerReset"}
