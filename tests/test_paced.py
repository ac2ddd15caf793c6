"""The measured half of the simulator's comparison, on a CPU (tests/gpu/paced.py)."""

from dataclasses import replace

import pytest

from minisgl.benchmark.load import online_workload
from minisgl.llm import LLM

pytest.importorskip("triton")
from tests.gpu import paced


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_run_finds_no_prefix_of_the_first(ranks: int) -> None:
    requests = online_workload(4, (20, 40), (3, 6), 0, rate=50.0)
    requests = [replace(r, input_ids=r.input_ids % 250) for r in requests]
    with LLM(device="cpu", tensor_parallel_size=ranks) as llm:
        runs = list(paced.run_twice(llm, requests))
        assert llm.generate(requests[0].input_ids)[0]["cached_tokens"] > 0
    for run, built, steps in runs:
        assert [len(record.arrivals) for record in run.records] == [r.output_len for r in requests]
        assert not any(record.cached_tokens for record in run.records)
        assert built == {} and sum(row["count"] for row in steps.values()) > 4
