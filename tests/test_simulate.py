"""The simulator: a clock that jumps, the steps of real runs, replicas, and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.benchmark.__main__ import main
from minisgl.benchmark.simulate import (
    Device,
    Simulated,
    Timed,
    count_pages,
    min_replicas,
    replica_arrivals,
    share_of,
    simulate,
    with_burst,
)
from minisgl.benchmark.step_cost import (
    FITTED,
    GPUS,
    Factors,
    StepCost,
    StepTimes,
    cost_on,
    fit,
    seconds_of,
)
from minisgl.benchmark.summary import summarize
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.config.engine import SchedulerConfig
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig

DATA = Path(__file__).resolve().parents[1] / "notebooks" / "data"
MODEL, GPU = ModelConfig.from_hf(KNOWN_CONFIGS["Qwen/Qwen3-8B"]), GPUS["h200"]
ENGINE = SchedulerConfig(device="cpu", max_extend_tokens=8192)


def run(requests: list[RandomRequest], **fields: Any) -> Simulated:
    return simulate(MODEL, GPU, requests, config=ENGINE, **fields)


def requests(count: int, prompt: int, answer: int, gap: float = 0.0) -> list[RandomRequest]:
    """Different prompts of one length, `gap` seconds apart."""
    return [RandomRequest(np.arange(i, i + prompt, dtype=np.int32), answer, i * gap)
            for i in range(count)]  # fmt: skip


def step_seconds(extend: int, cached: int) -> float:
    """One request's step."""
    lengths = np.array([[extend], [cached]])
    return float(seconds_of(cost_on(MODEL, GPU, 1, 8192).columns(*lengths, 1), FITTED))


def times(device: float, host: float = 0.0, launch: float = 0.0) -> StepTimes:
    return StepTimes(*(np.array(seconds) for seconds in (device, host, launch)))


def test_the_device_works_in_order_and_waiting_moves_the_clock() -> None:
    device = Device(host_s=0.5)
    first, second = device.launch(times(3.0)), device.launch(times(3.0))
    assert (first, second, device.now, device.busy) == (3.5, 6.5, 1.0, 6.0)
    assert Timed(device, second, 2).wait().ids == [0, 0] and device.now == 6.5
    Timed(device, first, 1).wait()
    assert device.now == 6.5 and device.launch(times(1.0)) == 8.0


def test_no_step_ends_before_its_last_launch() -> None:
    device = Device(host_s=0.5)
    assert device.launch(times(1.0, host=2.0, launch=3.0)) == device.now == 5.5
    assert device.launch(times(4.0, launch=1.0)) == 10.0 and device.now == 7.0


def test_a_captured_prefill_step_is_padded() -> None:
    cost = StepCost(MODEL, GPU.ceilings, captured=(64, 512))
    shapes = {(100,): (512, True), (64,): (64, True), (513,): (513, False), (1, 1): (2, True)}
    for shape, expected in [*shapes.items(), ((2,) * 65, (130, False))]:
        assert cost.rows(np.array(shape)) == expected
    assert cost_on(MODEL, GPU).captured[-1] == 512
    assert cost_on(MODEL, GPU, 1, 256).captured[-1] == 256


def test_a_burst_is_one_client() -> None:
    load = with_burst(requests(3, 8, 1, gap=1.0), requests(2, 50, 1), at=1.5)
    assert [r.client for r in load] == ["0", "1", "burst", "burst", "2"]
    assert [r.due for r in load] == [0.0, 1.0, 1.5, 1.5, 2.0]
    fair = replace(ENGINE, schedule_policy="fair", max_extend_tokens=512)
    load = with_burst(requests(30, 100, 8, gap=0.1), requests(20, 4000, 8), at=1.0)
    spans = [max(r.ttft for r, request in zip(found.run.records, load) if request.client != "burst")
             for config in (ENGINE, fair)
             for found in [simulate(MODEL, GPU, load, config=config)]]  # fmt: skip
    assert spans[1] < spans[0] / 5


def test_one_request_takes_the_time_of_its_steps() -> None:
    record = run([replace(requests(1, 512, 4)[0], due=5.0)]).run.records[0]
    assert record.ttft == pytest.approx(Device().host_s * 2 + step_seconds(512, 0), rel=0.02)
    decodes = sum(step_seconds(1, 512 + i) for i in range(3))
    assert record.sent == 5.0 and record.e2e - record.ttft == pytest.approx(decodes, rel=0.05)
    assert (record.prompt_tokens, record.output_tokens, record.error) == (512, 4, None)


def test_short_prompts_join_the_steps_of_running_requests() -> None:
    load = [*requests(1, 64, 100), *(replace(r, due=0.2 + r.due) for r in requests(9, 48, 4, 0.02))]
    apart, mixed = (run(load, mixed_tokens=most) for most in (0, 512))
    assert apart.device.steps - mixed.device.steps == 9
    first = [found.run.records[0].e2e for found in (apart, mixed)]
    assert first[0] - first[1] == pytest.approx(9 * (step_seconds(48, 0) - FITTED.host), rel=0.1)


def test_a_mixed_step_reads_the_context_of_running_requests() -> None:
    cost = StepCost(MODEL, GPU.ceilings, captured=(64,))
    long, short = (seconds_of(cost.columns(np.array([1, 1, 48]), np.array([cached, cached, 0]), 3),
                              FITTED) for cached in (8000, 100))  # fmt: skip
    both = cost.columns(np.array([1, 1]), np.array([8000, 8000]), 2)
    assert 2 * seconds_of(both, FITTED) > long > short > seconds_of(cost.columns(
        np.array([48]), np.array([0]), 1), FITTED)  # fmt: skip


def test_the_clock_jumps_over_what_is_idle() -> None:
    found = run(requests(3, 100, 2, gap=1e6))
    assert found.device.steps == 6 and found.device.now > 2e6
    assert found.device.busy < 1 and all(r.sent == r.due for r in found.run.records)


def test_clients_wait_for_their_answers() -> None:
    found = run(requests(20, 64, 8), clients=3)
    assert summarize(found.run)["peak_running"] == 3
    assert all(r.error is None and len(r.arrivals) == 8 for r in found.run.records)


@pytest.mark.parametrize("name", ["h200_offline_8B", "h100_offline_0.6B"])
def test_steps_and_pages_are_those_of_a_stored_run(name: str) -> None:
    stored = json.loads((DATA / f"{name}.json").read_text())["results"]
    model, gpu = ModelConfig.from_hf(KNOWN_CONFIGS[stored["model"]]), GPUS[name[:4]]
    load = random_workload(model.vocab_size)
    found = simulate(model, gpu, load, config=ENGINE, mixed_tokens=0)
    steps = stored["steps"]
    assert found.device.steps == steps["prefill_steps"] + steps["decode_steps"]
    assert summarize(found.run)["output_tokens"] == stored["output_tokens"]
    assert count_pages(model, gpu, 1, 16) == pytest.approx(stored["engine"]["num_pages"], rel=0.01)
    assert found.device.now == pytest.approx(stored["median_seconds"], rel=0.1)


def test_a_model_that_does_not_fit_is_refused() -> None:
    large = ModelConfig.from_hf(KNOWN_CONFIGS["Qwen/Qwen3-32B"])
    with pytest.raises(ValueError, match="gpu: must have room for the weights"):
        count_pages(large, GPU._replace(nbytes=60e9), 1, 16)


def test_a_fit_finds_the_factors_again() -> None:
    rng, cost = np.random.default_rng(0), StepCost(MODEL, GPU.ceilings, tp=2)
    shapes = [(rng.integers(1, 600, n) if n % 2 else np.ones(n, int), rng.integers(0, 4000, n))
              for n in rng.integers(1, 200, 80)]  # fmt: skip
    columns = np.array([cost.columns(*shape, len(shape[0])) for shape in shapes])
    start = Factors(*(2 * value for value in FITTED))
    found = fit(columns, seconds_of(columns, FITTED), start, rounds=300)
    assert np.allclose(seconds_of(columns, found), seconds_of(columns, FITTED), rtol=1e-3)


def test_routers_share_the_load() -> None:
    gaps = {name: np.diff(replica_arrivals(4000, 10.0, 5, name, 0))
            for name in ("random", "round-robin")}  # fmt: skip
    assert all(np.mean(g) == pytest.approx(0.5, rel=0.1) for g in gaps.values())
    assert np.std(gaps["round-robin"]) < 0.6 * np.std(gaps["random"])
    load = [r for i in range(40) for r in requests(3, 100 + i, 1)]
    mine = share_of(load, 4, "prefix", 0)
    heads = [r.input_ids[:64].tobytes() for r in load]
    kept = {r.input_ids[:64].tobytes() for r in mine}
    assert len(mine) == sum(head in kept for head in heads) and len(mine) % 40 == 0
    assert share_of(load, 4, "round-robin", 0) == load[::4]
    assert 15 < len(share_of(load, 4, "random", 0)) < 50


@pytest.mark.parametrize("need", [1, 2, 3, 7, 100])
def test_the_fewest_replicas_are_found(need: int) -> None:
    assert min_replicas(lambda count: count >= need) == need


def test_an_impossible_target_is_refused() -> None:
    with pytest.raises(ValueError, match="target: must be possible, got none with 64"):
        min_replicas(lambda count: False, most=64)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    flags = "simulate --requests 40 --rate 200 --ttft-ms 100 --tpot-ms 8 --price 2 --shared 64"
    assert main([*flags.split(), "--json", str(file)]) == 0
    stored = json.loads(file.read_text())["results"]
    replicas = stored["load"]["replicas"]
    assert replicas > 1 and stored["ms"]["tpot"]["p99"] <= 8 < 1000 * stored["cost_per_million"]
    assert stored["cached_tokens"] >= 30 * 64
    assert f"{replicas} replicas, {replicas} GPUs; one" in capsys.readouterr().out
    assert main(["simulate", "--sessions", "8", "--router", "prefix", "--replicas", "2"]) == 0
    assert main(["simulate", "--model", "no-such-model"]) == 2
