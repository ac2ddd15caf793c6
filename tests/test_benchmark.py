"""The benchmarks: workload, roofline, offline, latency, kernels, profile and the command."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.attention.metadata import build_metadata
from minisgl.benchmark import kernels, offline, options
from minisgl.benchmark.__main__ import RUNS, main
from minisgl.benchmark.kernels import Ceilings
from minisgl.benchmark.latency import (
    Interval,
    Timeline,
    device_intervals,
    drive,
    first_token_seconds,
    idle_times,
    latency_row,
    measure_latency,
    median_row,
    start_together,
    steady_gaps,
    trace_row,
)
from minisgl.benchmark.offline import launches, measure_offline, resample, run_once
from minisgl.benchmark.roofline import (
    Floors,
    Roofline,
    Work,
    body_parameters,
    decode_lengths,
    head_parameters,
)
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.config.flags import engine_fields
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.llm import LLM
from minisgl.models.registry import build_model
from minisgl.parallel.comm import SingleRank
from tests.checkpoints import base_config, make_checkpoint
from tests.fused_cases import few_programs

__all__ = ["few_programs"]  # the fixture
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, Triton does not interpret kernels on a CPU"
)
H200 = Ceilings(bytes_per_s=4.4e12, flops_per_s=790e12)
DATA = Path(__file__).resolve().parents[1] / "notebooks" / "data"


def known(name: str) -> ModelConfig:
    return ModelConfig.from_hf(KNOWN_CONFIGS[f"Qwen/{name}"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(folder, device="cpu", num_pages=64) as llm:
        yield llm


# ------------------------------------------------------------------------------- workload


def test_random_workload_is_the_one_that_others_measure() -> None:
    requests = random_workload(151_936)
    assert len(requests) == 256
    assert sum(len(r.input_ids) for r in requests) == 142_827
    assert sum(r.output_len for r in requests) == 133_966
    assert max(int(r.input_ids.max()) for r in requests) == 10_000


def test_workload_keeps_its_bounds_and_vocabulary() -> None:
    requests = random_workload(50, 40, (3, 5), (7, 9), seed=1)
    assert {len(r.input_ids) for r in requests} == {3, 4, 5}
    assert {r.output_len for r in requests} == {7, 8, 9}
    assert max(int(r.input_ids.max()) for r in requests) < 50


def test_redraw_keeps_lengths_and_changes_tokens() -> None:
    before = random_workload(320, 20)
    after = resample(before, 320, seed=1)
    assert [(len(a.input_ids), a.output_len) for a in before] == [
        (len(b.input_ids), b.output_len) for b in after
    ]
    assert not any((a.input_ids[:32] == b.input_ids[:32]).all() for a, b in zip(before, after))
    assert max(int(r.input_ids.max()) for r in after) < 320
    again = resample(before, 320, seed=2)
    assert not (after[0].input_ids == again[0].input_ids).all()


# ------------------------------------------------------------------------------- roofline


def test_experts_are_read_if_a_token_wants_them() -> None:
    """A single token reads what it computes with; many tokens read everything, and compute more."""
    sparse = known("Qwen3-30B-A3B")
    roof = Roofline(sparse, Ceilings(1e12, 1e15))
    bodies = [roof.forward(n, 0, 0, 0) for n in (1, 8, 4096)]
    active = sparse.num_parameters - 2 * sparse.vocab_size * sparse.hidden_size
    assert bodies[2].nbytes == 2 * active
    active -= sparse.expert_parameters * 15 // 16
    assert bodies[0] == (2 * active, 2 * active)
    assert [work.flops for work in bodies] == [2 * n * active for n in (1, 8, 4096)]
    read = (bodies[1].nbytes - bodies[2].nbytes) / 2 / sparse.expert_parameters + 1
    assert round(128 * read) == 52


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    config = ModelConfig.from_hf({**base_config("llama"), "tie_word_embeddings": tied})
    model = build_model(config, SingleRank(), dtype=torch.float32, device="meta")
    whole = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    tables = head_parameters(config) * (1 if tied else 2)
    assert body_parameters(config) + tables == whole


@pytest.mark.parametrize(
    ("name", "step", "overlap"), [("Qwen3-0.6B", 37_220, 39_100), ("Qwen3-14B", 8_460, 12_175)]
)
def test_floors_of_the_offline_workload(name: str, step: float, overlap: float) -> None:
    requests = random_workload(151_936)
    prompts, outputs = [len(r.input_ids) for r in requests], [r.output_len for r in requests]
    floors = Roofline(known(name), H200).workload(prompts, outputs)
    assert sum(outputs) / floors.step == pytest.approx(step, rel=0.02)
    assert sum(outputs) / floors.overlap == pytest.approx(overlap, rel=0.02)


def test_work_overlaps_within_a_step_and_in_one_floor_between_steps() -> None:
    """On a device with four operations for each byte, where both floors follow by hand."""
    roof = Roofline(ModelConfig.from_hf(base_config("qwen3")), Ceilings(0.25, 1.0))
    assert roof.seconds(Work(3, 5)) == 12 and roof.seconds(Work(1, 5)) == 5
    steps = [roof.prefill_work([9, 4]), roof.decode_work([10, 5]), roof.decode_work([11])]
    times = [(4 * nbytes, flops) for nbytes, flops in steps]
    assert {reading > computing for reading, computing in times} == {False, True}
    reading, computing = (sum(column) for column in zip(*times))
    expected = Floors(sum(max(step) for step in times), max(reading, computing))
    assert roof.workload([9, 4], [3, 2]) == expected


@pytest.mark.parametrize(("name", "milliseconds"), [("Qwen3-0.6B", 0.29), ("Qwen3-8B", 3.5)])
def test_single_stream_floor(name: str, milliseconds: float) -> None:
    assert Roofline(known(name), H200).decode([640]) * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_prefill_counts_causal_pairs() -> None:
    """Against a loop over tokens, on a device whose memory costs nothing."""
    config = ModelConfig.from_hf(base_config("qwen3"))
    roof = Roofline(config, Ceilings(float("inf"), 1.0))
    lengths = [1, 5, 9]
    body, head = body_parameters(config), head_parameters(config)
    flops = sum(2 * body * n + 2 * head for n in lengths)
    per_pair = 2 * 2 * config.num_qo_heads * config.head_dim  # q k^T, and weights times v
    flops += sum(config.num_layers * per_pair * (i + 1) for n in lengths for i in range(n))
    assert roof.seconds(roof.prefill_work(lengths)) == flops


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12)


@given(requests=REQUESTS, max_running=st.integers(1, 5))
def test_decode_lengths_are_every_token_once(
    requests: list[tuple[int, int]], max_running: int
) -> None:
    prompts, outputs = zip(*requests)
    steps = list(decode_lengths(prompts, outputs, max_running))
    seen = sorted(int(n) for step in steps for n in step)
    assert seen == sorted(p + i for p, o in requests for i in range(1, o))
    assert all(1 <= len(step) <= max_running for step in steps)


# ------------------------------------------------------------------------------- offline


def test_offline_counts_what_was_launched(llm: LLM) -> None:
    requests = random_workload(320, 6, (4, 12), (5, 12))
    found = measure_offline(llm, requests, temperature=0.6, repeats=3)
    steps = found["steps"]
    assert (
        steps["prefill_tokens"] == found["input_tokens"] == sum(len(r.input_ids) for r in requests)
    )
    assert steps["decode_tokens"] == found["output_tokens"] - len(requests)
    assert len(found["seconds"]) == 3
    assert found["median_seconds"] == sorted(found["seconds"])[1]
    assert found["tokens_per_s"] == pytest.approx(
        found["output_tokens"] / found["median_seconds"], rel=0.01
    )
    assert found["joules_per_token"] is None  # no GPU


def test_joules_of_all_ranks_and_repetitions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of GPUs 0 and 1 go up by 3 joules each; a driver that fails costs no run."""
    drawn = {"GPU-0": 1e6, "GPU-1": 2e6}

    def count(handle: str) -> float:
        drawn[handle] += 3000
        return drawn[handle]

    nvml = types.SimpleNamespace(
        NVMLError=ZeroDivisionError, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetTotalEnergyConsumption=count,
    )  # fmt: skip
    for name, fake in (("find_spec", lambda name: name), ("import_module", lambda name: nvml)):
        monkeypatch.setattr(offline, name, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: types.SimpleNamespace(uuid=gpu)
    )
    assert offline.joules_drawn(2) == 3006.0
    requests = random_workload(320, 2, (4, 5), (5, 6))
    found = measure_offline(llm, requests, temperature=0.6, repeats=2)
    assert found["joules_per_token"] == pytest.approx(3 / (2 * found["output_tokens"]), abs=1e-4)
    nvml.nvmlInit = lambda: 1 / 0
    assert offline.joules_drawn(2) is None


def test_every_launch_is_seen(llm: LLM) -> None:
    request = RandomRequest(np.array([7, 3, 9], np.int32), 4)
    with launches(llm.scheduler) as log:
        run_once(llm, [request], temperature=0.0)
    seen = [(entry.phase, entry.requests, entry.tokens) for entry in log]
    assert seen == [(Phase.PREFILL, 1, 3), *[(Phase.DECODE, 1, 1)] * 3]
    run_once(llm, [request], temperature=0.0)
    assert len(log) == 4, "the log ends with its block"


def test_a_workload_that_does_not_fit_is_refused(llm: LLM) -> None:
    for prompt, answer, flag in ((3, 600, "output-len"), (512, 1, "input-len")):
        with pytest.raises(ValueError, match=f"{flag}: must be"):
            run_once(llm, [RandomRequest(np.full(prompt, 7, np.int32), answer)], temperature=0.0)


# ------------------------------------------------------------------------------- latency


def test_gaps_are_of_steady_full_steps() -> None:
    line = Timeline([1.0, 2.0, 2.5, 3.0, 3.25, 4.0, 6.0, 6.5], [2, 1, 3, 3, 3, 3, 3, 1])
    assert first_token_seconds(line, 3) == [1.0, 1.0, 2.0]
    assert steady_gaps(line, 3, skip=0) == [0.5, 0.25, 0.75, 2.0]
    assert steady_gaps(line, 3, skip=2) == [0.75, 2.0]
    row = latency_row(Timeline([0.5, *np.arange(1, 9.0)], [1] * 9), 1)
    assert (row["tpot_ms"], row["gap_ms"]["p50"], row["ttft_ms"]["p50"]) == (1000, 1000, 500)


def test_a_step_without_all_requests_is_not_steady() -> None:
    """A request that joins late must not make the others look slow, or fast."""
    line = Timeline([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 2, 1, 2, 2, 2])
    assert steady_gaps(line, 2, skip=0) == [1.0, 1.0]


def test_too_short_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="output-len: batch 1 had no steady decode step"):
        latency_row(Timeline([1.0, 2.0], [1, 1]), 1)


def test_timeline_of_a_real_run(llm: LLM) -> None:
    start_together(llm, 3, 8, 10, 0.6, seed=1)
    line = drive(llm)
    assert sum(line.tokens) == 30 and line.tokens[-1] == 3
    assert line.seconds == sorted(line.seconds)
    assert len(first_token_seconds(line, 3)) == 3
    assert not llm.scheduler.has_work


def test_latency_rows(llm: LLM) -> None:
    roof = Roofline(llm.scheduler.engine.model_config, H200, itemsize=4)
    rows = measure_latency(
        llm, [1, 3], prompt_len=8, output_len=12, sampling=["greedy", "sampled"], repeats=3,
        roof=roof,
    )  # fmt: skip
    assert [(row["batch"], row["sampling"]) for row in rows] == [
        (1, "greedy"), (1, "sampled"), (3, "greedy"), (3, "sampled"),
    ]  # fmt: skip
    for row in rows:
        assert row["tpot_ms"] == sorted(row["all_tpot_ms"])[1]
        assert row["gap_ms"]["p50"] <= row["gap_ms"]["p99"]
        assert 0 <= row["floor_ms"] < row["tpot_ms"]
        nbytes = roof.decode_work([8 + 6] * row["batch"]).nbytes
        assert row["tb_per_s"] == pytest.approx(nbytes / row["tpot_ms"] / 1e9, abs=1e-4)


def test_latency_refuses_what_does_not_fit(llm: LLM) -> None:
    with pytest.raises(ValueError, match="batch-sizes: 200 need 20000 KV tokens, there are 1024"):
        start_together(llm, 200, 50, 50, 0.0, seed=0)
    with pytest.raises(ValueError, match=r"output-len: must be at most 412, .* got 500"):
        start_together(llm, 1, 100, 500, 0.0, seed=0)
    assert not llm.channel.waiting


# ------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_timed_decode_attention_is_right(backend: str, page_size: int) -> None:
    config = ModelConfig.from_hf(base_config("qwen3"))
    lengths = np.array([3, 17, 8], dtype=np.int32)
    case = kernels.make_decode(config, backend, page_size, lengths, torch.float32, CPU)
    out = case()
    for row, length in enumerate(lengths):
        slots = torch.from_numpy(case.tables.page_table[row, :length].astype(np.int64))
        pool = case.plan.pool
        keys, values = (
            part.flatten(0, 1)[slots].repeat_interleave(2, dim=1)
            for part in (pool.k_cache(0), pool.v_cache(0))
        )
        scores = torch.einsum("hd,nhd->hn", case.q[row], keys) * config.head_dim**-0.5
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_pool_are_disjoint() -> None:
    config = ModelConfig.from_hf(base_config("qwen3"))
    lengths = np.array([5, 9, 16], dtype=np.int32)
    table = kernels.make_decode(config, "torch", 4, lengths, torch.float32, CPU).tables.page_table
    slots = np.concatenate([table[row, :length] for row, length in enumerate(lengths)])
    assert len(np.unique(slots)) == lengths.sum()
    meta = build_metadata(Phase.DECODE, np.arange(3), np.ones(3), lengths, table, 4)
    assert len(np.unique(meta.kv_indices)) == 2 + 3 + 4


def test_rows_count_bytes_and_operations() -> None:
    config = ModelConfig.from_hf(base_config("qwen3"))
    row = kernels.decode_rows(config, ["torch"], [1], np.array([10, 20]), torch.float16, CPU)[0]
    assert row.nbytes == 30 * 2 * config.num_kv_heads * config.head_dim * 2
    linear = {r.name: r for r in kernels.linear_rows(config, [3], torch.float32, CPU)}
    down = linear["linear down, batch 3"]
    assert down.flops == 2 * 3 * 96 * 64
    assert down.nbytes == 4 * (96 * 64 + 3 * (96 + 64))
    assert down.launches * 4 * 96 * 64 >= 1 << 23
    sparse, mixed = base_config("qwen3_moe"), base_config("qwen3_moe") | {"mlp_only_layers": [0]}
    for fields, times in ((sparse, 3), (mixed, 5)):  # without layers that are dense, no such MLP
        some = ModelConfig.from_hf(fields)
        assert len(kernels.linear_rows(some, [3], torch.float32, CPU)) == times


@interpreted
def test_decode_visits_every_layer_of_its_pool() -> None:
    config = ModelConfig.from_hf(base_config("qwen3"))
    lengths = np.array([3, 17], dtype=np.int32)
    case = kernels.make_decode(config, "fused", 4, lengths, torch.float32, CPU, layers=3)
    one = case.plan.attend(case.q, case.k, case.v, 2)
    torch.testing.assert_close(case(), one)
    assert case.plan.pool.k_cache(2)[:-1].abs().sum() > 0


@interpreted
@pytest.mark.parametrize("rows", [1, 3])
def test_fused_rows_pair_with_those_of_torch(rows: int, few_programs: None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
    config = ModelConfig.from_hf({**base_config("qwen3"), **sizes, "head_dim": 256})
    ours = kernels.linear_rows(config, [rows], torch.float32, CPU, fused=True)
    theirs = [row.name for row in kernels.linear_rows(config, [rows], torch.float32, CPU)]
    assert theirs[:-1] == [row.name.replace("fused", "linear") for row in ours]
    q, kv = 4 * 256, config.num_kv_heads * 256
    shapes = {"qkv": (512, q + 2 * kv), "o": (q, 512), "gate_up": (512, 2048), "down": (1024, 512)}
    for name, (width, out) in shapes.items():
        x, weight = torch.randn(rows, width), torch.randn(out, width)
        got = kernels.fused_product(name, x, weight)(weight)
        y = torch.nn.functional.rms_norm(x, (width,)) if rows == 1 and width == 512 else x
        want = y @ weight.T
        if name == "gate_up":
            want = torch.nn.functional.silu(want[:, :1024]) * want[:, 1024:]
        elif name in ("o", "down"):
            got = got.sum(0) if rows > 1 else got.total - 1
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@interpreted
def test_a_fused_row_of_odd_sizes_says_so() -> None:
    with pytest.raises(ValueError, match=r"fused down: no block divides a weight of \[4, 96\]"):
        kernels.fused_product("down", torch.ones(1, 96), torch.ones(4, 96))


def test_a_row_that_cannot_run_says_why() -> None:
    def refuse() -> kernels.Call:
        raise ImportError("no such library")

    rows = [kernels.Row("broken", refuse, 1), kernels.Row("fine", lambda: lambda: None, 8, 4, 2)]
    broken, fine = kernels.measure_rows(rows, CPU)
    assert broken == {"name": "broken", "skipped": "no such library"}
    assert fine["us"] >= 0


# ------------------------------------------------------------------------------- profile


def test_idle_by_hand() -> None:
    events = [Interval(0, 4, 1), Interval(5, 7, 1), Interval(6, 8, 9), Interval(11, 12, 2)]
    idle = idle_times(reversed(events))
    assert (idle.window, idle.inside, idle.between) == (12, 1, 3)
    within = idle_times([Interval(0, 10, 1), Interval(2, 3, 2), Interval(10, 11, 1)])
    assert within == (11, 0, 0)
    with pytest.raises(ValueError, match="events"):
        idle_times([])


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2)), min_size=1)


@given(spans=SPANS)
def test_idle_is_what_no_interval_covers(spans: list[tuple[int, int, int]]) -> None:
    events = [Interval(start, start + length, launch) for start, length, launch in spans]
    low, high = min(e.start for e in events), max(e.end for e in events)
    covered = {int(t) for e in events for t in range(int(e.start), int(e.end))}
    idle = idle_times(events)
    assert idle.window == high - low
    assert idle.inside + idle.between == high - low - len(covered)


def chrome(cat: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": cat, "ts": ts, "dur": dur, "args": args}


def test_only_the_device_counts_in_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        chrome("cuda_runtime", 0, 1000, 1), chrome("kernel", 10, 5, 1), chrome("kernel", 16, 4, 1),
        chrome("gpu_memcpy", 30, 1, 2), {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "gpu_memset", "ts": 31, "dur": 9},
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    assert len(device_intervals({"traceEvents": events})) == 4
    row = trace_row(path, 8, 2, "greedy")
    assert row["step_ms"] == 0.015 and row["kernels_per_step"] == 2
    assert row["idle_share"] == pytest.approx(11 / 30, abs=1e-4)
    assert row["idle_between_launches"] == pytest.approx(10 / 30, abs=1e-4)
    assert row["idle_inside_graphs"] == pytest.approx(1 / 30, abs=1e-4)


def test_the_median_run_counts_and_all_are_kept() -> None:
    rows = [{"ms": ms, "name": name} for ms, name in ((0.2, "a"), (0.01, "b"), (0.03, "c"))]
    assert median_row(rows, "ms") == rows[2] | {"all_ms": [0.2, 0.01, 0.03]}


# ------------------------------------------------------------------------------- command

SHORT = {
    "offline": "--requests 4 --input-len 4 8 --output-len 4 8 --repeats 1 --num-pages 300",
    "latency": "--batch-sizes 2 --prompt-len 8 --output-len 10 --repeats 1 --num-pages 300",
    "kernels": "--batch 2 --lengths 4 8 --rows 1",
}
KEYS = {
    "offline": {"engine", "workload", "tokens_per_s", "median_seconds", "seconds", "steps",
                "input_tokens", "output_tokens", "joules_per_token", "warm_up_seconds", "ceilings",
                "floors"},
    "latency": {"engine", "workload", "rows", "profile", "ceilings"},
    "kernels": {"dtype", "workload", "rows", "ceilings"},
}  # fmt: skip


@pytest.mark.parametrize("command", SHORT)
def test_command_stores_results_with_their_circumstances(command: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    argv = [command, "--device", "cpu", *SHORT[command].split(), "--json", str(out)]
    if command == "latency":
        argv += ["--profile", str(tmp_path)]
    assert main(argv) == 0
    record = json.loads(out.read_text())
    assert record.keys() == {"hardware", "threads", "versions", "date", "command", "results"}
    assert record["command"].startswith(f"python -m minisgl.benchmark {command} --device cpu")
    assert "--json out.json" in record["command"], "a place of this machine is nobody's business"
    results = record["results"]
    assert results.keys() == KEYS[command] | {"benchmark", "model", "dummy_weight"}
    assert (results["benchmark"], results["model"]) == (command, "the embedded model")
    if command == "latency":
        assert {row["trace"] for row in results["profile"]} == {
            "trace-bs2-greedy.json", "trace-bs2-sampled.json"
        }  # fmt: skip
        assert (tmp_path / "trace-bs2-greedy.json").is_file()


def test_ctrl_c_leaves_no_file_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(RUNS, "offline", interrupt)
    out = tmp_path / "out.json"
    assert main(["offline", "--device", "cpu", "--json", str(out)]) == 130
    assert not out.exists() and not capsys.readouterr().err
    out.write_text("kept")
    assert main(["offline", "--device", "cpu", "--json", str(out)]) == 130
    assert out.read_text() == "kept"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("online --api-key secret --rate 2", "online --api-key … --rate 2"),
        ("online --api-key=secret", "online --api-key=…"),
        (
            "offline --json=/home/ann/o.json --model /home/ann/m=1",
            "offline --json=o.json --model m=1",
        ),
    ],
)
def test_a_stored_command_keeps_secrets_and_places(given: str, stored: str) -> None:
    words = shlex.split(options.stored_command("minisgl.benchmark", given.split()))
    assert " ".join(words) == f"python -m minisgl.benchmark {stored}"


def test_results_that_cannot_be_stored_cost_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file" / "out.json", tmp_path):
        assert main(["offline", "--device", "cpu", "--json", str(place)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m minisgl.benchmark: json: ") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


def test_dummy_weights_of_a_known_model_need_no_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(KNOWN_CONFIGS, "test/Small", base_config("qwen3"))
    out = tmp_path / "out.json"
    argv = ["offline", "--model", "small", "--dummy-weight", "--device", "cpu", "--page-size", "4"]
    argv += ["--disable-overlap", "--max-running-req", "3", "--attn", "torch", "--json", str(out)]
    assert main([*argv, *SHORT["offline"].split()]) == 0
    results = json.loads(out.read_text())["results"]
    assert results["model"] == "test/Small" and results["dummy_weight"]
    engine = results["engine"]
    assert (engine["page_size"], engine["max_running_req"], engine["overlap"]) == (4, 3, False)
    assert not engine["makes_text"], "without a tokenizer there is no text to make"


def test_a_model_in_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    assert options.named_model(str(tmp_path / "mine")) == "mine"
    assert options.named_model("qwen3-8b") == "Qwen/Qwen3-8B"
    assert options.named_model(None) == "the embedded model"


def test_known_shapes_are_a_folder_while_they_are_needed(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-14B", "qwen3-14b"):
        with options.model_folder(name, shapes_only=True) as folder:
            assert ModelConfig.from_path(folder) == known("Qwen3-14B")
        assert not folder.exists()
    real = make_checkpoint(tmp_path / "Qwen3-14B")
    with options.model_folder(str(real), shapes_only=True) as folder:
        assert folder == real
    assert real.exists()


def test_every_engine_flag_reaches_the_config() -> None:
    argv = ["offline", "--attn", "fi,triton", "--page-size", "64", "--cuda-graph-max-bs", "0"]
    argv += ["--max-running-req", "7", "--memory-ratio", "0.5"]
    argv += ["--dtype", "bfloat16", "--num-pages", "9", "--disable-overlap", "--dummy-weight"]
    argv += ["--kernels", "torch", "--seed", "4"]
    fields = engine_fields(options.build_parser().parse_args(argv))
    assert fields == {
        "attention_backend": "fi,triton", "page_size": 64, "cuda_graph_max_bs": 0,
        "max_running_req": 7, "memory_ratio": 0.5,
        "dtype": "bfloat16", "num_pages": 9, "overlap": False,
        "use_dummy_weight": True, "device": "auto", "kernels": "torch",
        "seed": 4,
    }  # fmt: skip


def test_sizes_follow_the_device_unless_given() -> None:
    args = options.build_parser().parse_args(["latency", "--device", "cpu", "--prompt-len", "5"])
    options.fill_sizes(args)
    assert (args.batch_sizes, args.prompt_len, args.tokens) == ([1, 4], 5, 32)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "COMMAND"),
        ("fast", "invalid choice: 'fast'"),
        ("online --url x --api secret", "unrecognized arguments: --api secret; see --help"),
        ("offline --requests 0", "--requests: must be an integer of at least 1 and"),
        ("offline --repeats x", "--repeats: must be an integer of at least 1 and"),
        ("kernels --lengths 5 2147483648", "below 2**31, got '2147483648'"),
        ("kernels --backends nosuch", "--backends: invalid choice: 'nosuch'"),
        ("kernels --device cpu --dtype nosuch", "--dtype: must be"),
        ("offline --reserve-tokens x", "--reserve-tokens: invalid number-or-all value"),
        ("offline --device cpu --num-pages 1000000000000", "--num-pages: 1000000000000 take"),
        ("offline --device cpu --input-len 9 60000000", "input-len: must be below 4096"),
        # Rejected before an engine is built, which would not fit.
        ("overhead --device cpu --input-len 9 9999 --num-pages 1000000000000", "input-len: must"),
        ("latency --device cpu --prompt-len 5000", "prompt-len: must be below 4096"),
        ("latency --device cpu --batch-sizes 3 --max-running-req 2", "batch-sizes: must be at"),
        ("latency --device cpu --profile /dev/null/x", "profile: cannot use '/dev/null/x-bs1"),
        ("offline --input-len 9 3 --device cpu", "input-len: LOW must not exceed HIGH, got 9 3"),
        ("offline --device tpu", "device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("offline --device cpu --attn magic", "--attention-backend: must be auto, torch"),
        ("offline --device cpu --memory-ratio 2", "--memory-ratio: must be less than"),
        ("latency --sampling wild", "invalid choice: 'wild'"),
        ("latency --device cpu --num-pages 4 --batch-sizes 9", "batch-sizes: 9 need"),
        ("latency --device cpu --model /no/such/folder", "--model: no such folder"),
        ("offline --device cpu --temperature -1 --num-pages 300", "temperature: must be"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(argv.split())
    except SystemExit as leaving:
        status = leaving.code
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "%|" not in line and line.strip()]
    assert status == 2
    assert len(lines) == 1 and says in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "device: torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("command", SHORT)
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--model", "--dummy-weight", "--json", "--seed"):
        assert flag in said
    assert "(default 3)" in said or "--repeats" not in said  # one default, given once


def test_peers_name_models_that_we_know() -> None:
    peers = json.loads((DATA / "peers_h200.json").read_text())
    assert {"hardware", "date", "source", "versions", "results"} <= peers.keys()
    assert Ceilings(**peers["results"]["ceilings"]) == H200
    for part in ("offline", "latency"):
        assert all(entry["model"] in KNOWN_CONFIGS for entry in peers["results"][part])


# ------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_kernels_on_a_gpu_reach_a_good_part_of_the_ceiling(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["kernels", "--page-sizes", "16", "--backends", "triton", "--rows", "1"]
    assert main([*argv, "--json", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["results"]["rows"]}
    assert not any("skipped" in row for row in rows.values())
    copy, decode = rows["copy"]["tb_per_s"], rows["decode triton, page 16, batch 256"]["tb_per_s"]
    assert 0.2 * copy < decode < 1.5 * copy


@pytest.mark.gpu
def test_profile_on_a_gpu_finds_kernels(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    argv = ["latency", "--batch-sizes", "2", "--sampling", "greedy", "--repeats", "1"]
    argv += ["--prompt-len", "32", "--output-len", "32", "--num-pages", "300"]
    assert main([*argv, "--profile", str(trace), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["results"]["profile"]
    assert 0 <= row["idle_between_launches"] <= row["idle_share"] < 1
    assert row["kernels_per_step"] > 6, "the embedded model has six layers"


def test_the_readmes_results_are_those_of_stored_runs() -> None:
    """Each cell of the table, in the order of its columns, from the report of one run."""
    root = Path(__file__).parents[1]
    data, text = root / "notebooks" / "data", (root / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| Qwen3-") and "[" not in line]
    reports = {
        "offline": ("offline", lambda found: [found["tokens_per_s"]]),
        "ms per token": ("latency", lambda found: [row["tpot_ms"] for row in found["rows"]]),
        "first token": ("first tokens", lambda found: [r["ttft_ms"] for r in found["rows"][1:]]),
        "server": ("served", lambda found: [
            statistics.median(run["ms"]["tpot"]["p50"] for run in found["runs"])]),
    }  # fmt: skip
    assert len(rows) == 8
    for row in rows:
        about, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        kind, values = reports[next(word for word in ("server", *reports) if word in about)]
        name = re.split(r"[ ,]", about)[0] + f" {kind}" + " on 4 GPUs" * ("four" in about)
        for card, cell in (("h200", cells[0]), ("h100", cells[2])):
            found = values(json.loads((data / f"{card}_rows.json").read_text())[name]["results"])
            printed = [float(number.replace(",", "")) for number in cell.split(" / ")]
            assert printed == pytest.approx(found, rel=0.01), (about, card)
