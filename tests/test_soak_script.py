"""The scripts of `tests/gpu`, for a moment and on a CPU: the soak, and the report of all proofs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import SamplingParams
from tests.fakes import record_on_a_cpu
from tests.forks import Forked
from tests.gpu import report, soak
from tests.gpu.soak import Asked, Crowd, Round, compare, run_round, verdict

CPU: dict[str, Any] = {"device": "cpu"}


def shorten(params: SamplingParams) -> SamplingParams:
    """The same, but for at most 64 tokens."""
    return replace(params, max_tokens=min(params.max_tokens or 64, 64))


@pytest.mark.drill
def test_a_short_round_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With captured steps and the fair policy; the command line below has neither."""
    record_on_a_cpu(monkeypatch)
    params = Crowd.params  # without the few that answer for long, alone in the end
    monkeypatch.setattr(Crowd, "params", lambda self: shorten(params(self)))
    found = run_round(16, 600, 7, CPU | {"cuda_graph_bs": (4, 16)}, keep=4, turns=60)
    assert found["wrong"] == []
    assert found["steps"] > 60 and found["seen"]["checks"] >= found["steps"] // 100
    assert found["policy"] == "fair"
    assert found["seen"]["retractions"] > 0
    assert found["seen"]["evictions"] > 0 and found["seen"]["cached tokens"] > 0
    assert sum(found["aborted_in"].values()) > 4 and len(found["aborted_in"]) >= 3
    assert sum(share["compared"] for share in found["answers"].values()) == 4


def test_a_lost_page_is_noticed() -> None:
    one = Round(16, 0, CPU, 4)
    one.scheduler.cache.take_pages(1)
    with pytest.raises(RuntimeError, match="lost"):
        one.run(600, 20)
        one.settle()


def test_a_wrong_answer_is_counted() -> None:
    ids = [5, 6, 7, 8]
    wrong = Asked(ids, SamplingParams(max_tokens=4), "noise", tokens=[1791, 1791])
    answers = compare([wrong], CPU)
    assert answers["noise"] == {"compared": 1, "first": 0.0, "start": 0.0, "whole": 0.0}
    memory = {"resident_mib": 100.0, "resident_growth_mib": 40.0}
    memory |= {f"{name}_growth_mib": 0.0 for name in ("gpu", "gpu_tensors")}
    said = verdict({"answers": answers, "memory": memory}, exact=True)
    assert [line.partition(":")[0] for line in said] == ["noise", "resident"]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "soak.json"
    how = ["--minutes", "0.005", "--rounds", "1", "--device", "cpu", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["soak", *how])
    assert soak.main() == 0
    stored = json.loads(path.read_text())
    assert stored["results"]["passed"] and stored["hardware"]["cpu"]


def test_the_kernels_that_memcheck_sees_are_there(tmp_path: Path) -> None:
    """The report names cases of tests by their ids, which change when a test does."""
    files = sorted({name.partition("::")[0] for name in report.CHECKED})
    ids = tmp_path / "ids.txt"
    ids.touch()
    fields = {"root": str(report.ROOT), "tests": ["--collect-only", *files], "seconds": 120}
    assert Forked("tests", output=str(ids), **fields).wait(120) == 0
    assert not set(report.CHECKED) - set(ids.read_text().splitlines())


def test_scores_are_compared_by_row_and_in_all() -> None:
    stored, counts = {"add": 1.0, "sort": 0.9}, {"add": 300, "sort": 10}
    found = report.compare_scores({"add": 0.995, "sort": 0.7}, stored, counts)
    assert not found["passed"] and found["rows_beyond_a_point"] == ["sort"]
    assert found["rows"]["sort"]["difference"] == -0.2
    better = report.compare_scores({"add": 0.995, "sort": 0.8}, stored, counts)
    assert better["passed"] and better["rows"]["add"]["within_a_point"]


def test_a_junit_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.a" name="x" time="2.5"/>'
        '<testcase classname="tests.gpu.a" name="y" time="1"><failure message="bad"/></testcase>'
        '<testcase classname="tests.gpu.b" name="z" time="0"><skipped message="no GPU"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = report.read_junit(path)
    assert found["tests"] == 3 and found["passed_tests"] == 1
    assert found["failures"] == {"tests.gpu.a::y": "bad"} and found["skipped"] == {"no GPU": 1}
    assert found["files"] == {"a": 2, "b": 1}
    assert report.read_junit(tmp_path / "none.xml")["tests"] == 0


def test_a_report_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections come one by one, and a failed one gives a status that a program sees."""
    out = tmp_path / "report.json"
    for name, passed in (("soak", True), ("kernels", False)):
        monkeypatch.setitem(report.SECTIONS, name, lambda args, passed=passed: {"passed": passed})
        assert report.main(["--out", str(out), "--only", name]) == (not passed)
    stored = json.loads(out.read_text())
    assert list(stored["results"]) == ["soak", "kernels"] and str(tmp_path) not in out.read_text()
    assert stored["results"]["soak"]["circumstances"]["versions"]["torch"]
