"""Measuring a server from outside: the client, load, summaries, traces, overhead, the commands."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark import __main__ as commands
from minisgl.benchmark import options
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.load import (
    WORDS,
    LoadRun,
    Record,
    Target,
    first_model,
    online_workload,
    poisson_arrivals,
    run_load,
    send,
)
from minisgl.benchmark.overhead import (
    Timed,
    check_answer,
    last_bytes,
    overhead_row,
    synthetic_tokenizer,
    with_tokenizer,
)
from minisgl.benchmark.serving import flags_of
from minisgl.benchmark.summary import peak, summarize, table
from minisgl.benchmark.trace import (
    BLOCK,
    TraceLine,
    TraceShape,
    parse_line,
    prompt_ids,
    read_trace,
    requests_of,
    reusable_tokens,
    synthesize,
)
from minisgl.benchmark.workload import RandomRequest, random_workload
from minisgl.config.engine import SchedulerConfig
from minisgl.config.flags import engine_fields
from minisgl.config.paths import resolve_model_path
from minisgl.server import options as server_options
from minisgl.server.chat.client import ApiClient
from minisgl.server.frontend import Observer
from tests.checkpoints import base_config
from tests.forks import Popen
from tests.serving import Live, wait_for


def sse(*events: Any) -> str:
    return "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)


def chunk(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


STREAM = {"content-type": "text/event-stream"}


def stream_of(text: str | bytes) -> httpx.Response:
    return httpx.Response(200, content=text, headers=STREAM)


def sent(answer: httpx.Response | Exception, timeout: float = 5.0) -> Record:
    """The record of one request that is answered so."""

    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def one(record: Record) -> None:
        ticks = iter(range(1000))
        async with ApiClient("http://fake", transport=httpx.MockTransport(handle)) as client:
            await send(client, "completions", {}, record, lambda: float(next(ticks)), timeout)

    record = Record()
    asyncio.run(one(record))
    return record


# --------------------------------------------------------------------------------- client


def test_times_of_a_stream() -> None:
    record = Record(sent=1.0, arrivals=[1.5, 2.0, 3.5], output_tokens=5, error=None)
    assert (record.ttft, record.e2e, record.tpot) == (0.5, 2.5, 0.5)
    record.output_tokens = 1
    assert record.tpot is None


def test_the_first_chunk_with_text_counts() -> None:
    record = Record()
    record.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    record.take({"choices": [{"delta": {"content": None}}]}, 2.0)
    assert record.arrivals == []
    for now, field in enumerate(("content", "reasoning_content", "reasoning"), 3):
        record.take({"choices": [{"delta": {field: "x"}}]}, float(now))
    record.take(chunk("x", "length"), 6.0)
    assert record.arrivals == [3.0, 4.0, 5.0, 6.0]
    record.take({"choices": [], "usage": USAGE}, 7.0)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 5, 3)
    assert record.arrivals[-1] == 6.0


def test_tokens_are_the_servers_count_or_else_chunks() -> None:
    told = sent(stream_of(sse(chunk("a"), chunk("b", "stop"), {"usage": USAGE})))
    assert told.error is None and told.counted and told.output_tokens == 5
    silent = sent(stream_of(sse(chunk("a"), chunk("b", "stop"), "[DONE]")))
    assert silent.error is None and not silent.counted and silent.output_tokens == 2
    assert silent.sent == 0.0 and silent.arrivals == [1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (httpx.Response(429, json={"error": {"message": "full"}}), "http 429", "full"),
        (httpx.Response(502, text="<html>"), "http 502", "<html>"),
        (stream_of(sse(chunk("a"))), "cut off", "finish reason"),
        (stream_of(sse(chunk("", "stop"), "[DONE]")), "empty", "no text"),
        (stream_of(sse({"error": {"message": "died"}})), "error event", "died"),
        (stream_of(sse({"error": "died"})), "error event", "died"),
        (stream_of("data: {\n\n"), "bad answer", "JSON"),
        (stream_of(sse({"choices": 3})), "bad answer", "TypeError"),
        (httpx.ConnectError("nobody there"), "connect", "nobody"),
        (httpx.ReadError("reset"), "connection", "reset"),
        (httpx.ReadTimeout("slow"), "timeout", "ReadTimeout"),
        (RuntimeError("a bug of theirs"), "bad answer", "a bug"),
    ],
)
def test_every_failure_is_counted_and_none_is_raised(
    answer: httpx.Response | Exception, kind: str, detail: str
) -> None:
    record = sent(answer)
    assert record.error == kind and detail in record.detail


def test_an_answer_that_never_ends_is_a_timeout() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield sse(chunk("a")).encode()
            await asyncio.sleep(0.01)

    record = sent(httpx.Response(200, content=drip(), headers=STREAM), timeout=0.1)
    assert record.error == "timeout" and len(record.arrivals) > 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(["choices", "usage", "error", "delta", "text", "content", "x"]),
        inner, max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(json_values, max_size=3), st.binary(max_size=20))
def test_no_answer_can_raise(events: list[Any], junk: bytes) -> None:
    record = sent(stream_of(sse(*events).encode() + b"data: " + junk))
    assert isinstance(record.error, str) and record.error != "not sent"


def test_a_separator_inside_a_text_does_not_end_its_event() -> None:
    events = [json.dumps(chunk("a\u2028b"), ensure_ascii=False), chunk("c", "stop"), "[DONE]"]
    record = sent(stream_of(sse(*events)))
    assert record.error is None and len(record.arrivals) == 2


# --------------------------------------------------------------------------------- target


def request_of(*ids: int, output_len: int = 9) -> RandomRequest:
    return RandomRequest(np.array(ids, dtype=np.int32), output_len)


def test_bodies_say_what_was_asked() -> None:
    target = Target("m")
    body = target.body(request_of(5, 6))
    assert target.path == "completions" and body["model"] == "m" and body["prompt"] == [5, 6]
    assert body["max_tokens"] == 9 and body["ignore_eos"] is True and body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True} and body["stream"] is True
    assert "ignore_eos" not in Target("m", ignore_eos=False).body(request_of(5))


def test_chats_are_words_and_keep_a_common_beginning() -> None:
    target = Target("m", chat=True)
    assert target.path == "chat/completions"
    one, two = (target.body(request_of(*range(100, 196), *tail)) for tail in ([1] * 4, [2] * 60))
    assert "prompt" not in one
    texts = [body["messages"][0]["content"].split() for body in (one, two)]
    assert [len(text) for text in texts] == [100, 156] and texts[0][:96] == texts[1][:96]
    assert set(texts[0]) <= set(WORDS) and texts[0][96:] != texts[1][96:100]


def test_the_first_model_is_the_default_and_a_refusal_is_told() -> None:
    def asked(answer: httpx.Response) -> str:
        async def one() -> str:
            transport = httpx.MockTransport(lambda _: answer)
            async with ApiClient("http://fake", transport=transport) as client:
                return await first_model(client)

        return asyncio.run(one())

    assert asked(httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})) == "a"
    with pytest.raises(ConnectionError, match="http 401: wrong key"):
        asked(httpx.Response(401, json={"error": {"message": "wrong key"}}))
    empty: Any
    for empty in ({"data": []}, {"data": [{"name": "x"}]}, "hello"):
        with pytest.raises(ConnectionError, match="url: http://fake/v1/models"):
            asked(httpx.Response(200, json=empty))


# ----------------------------------------------------------------------------------- load


def test_arrivals_are_a_poisson_process() -> None:
    due = poisson_arrivals(20_000, 4.0, seed=3)
    gaps = np.diff(due)
    assert due[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: as large as the mean
    assert (poisson_arrivals(20_000, 4.0, seed=3) == due).all()
    assert not (poisson_arrivals(20_000, 4.0, seed=4) == due).all()


def test_online_requests_keep_their_bounds_and_their_seed() -> None:
    requests = online_workload(200, (3, 5), (7, 9), seed=1, rate=10.0)
    assert {len(r.input_ids) for r in requests} == {3, 4, 5}
    assert {r.output_len for r in requests} == {7, 8, 9}
    assert max(int(r.input_ids.max()) for r in requests) < 1100
    again = online_workload(200, (3, 5), (7, 9), seed=1, rate=10.0)
    for one, other in zip(requests, again):
        assert (one.input_ids == other.input_ids).all() and one.due == other.due
    assert {r.due for r in online_workload(5, (3, 5), (7, 9), seed=1)} == {0.0}


class SlowServer(httpx.AsyncBaseTransport):
    """Takes `seconds` for each answer and counts the requests in flight."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.running, self.most = seconds, 0, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return stream_of(sse(chunk("a", "stop"), "[DONE]"))


async def loaded(
    server: SlowServer, requests: list[RandomRequest], clients: int | None = None
) -> LoadRun:
    async with ApiClient("http://fake", transport=server) as client:
        return await run_load(client, Target("m"), requests, clients)


def due_at(*moments: float) -> list[RandomRequest]:
    return [RandomRequest(np.arange(3, dtype=np.int32), 1, due) for due in moments]


@pytest.mark.clock
def test_an_open_loop_does_not_wait_for_answers() -> None:
    server, requests = SlowServer(1.5), due_at(*(0.02 * i for i in range(10)))
    run = asyncio.run(loaded(server, requests))
    assert server.most == 10  # all were sent before the first was answered
    for request, record in zip(requests, run.records):
        assert record.due == request.due <= record.sent < request.due + 1


def test_a_closed_loop_waits() -> None:
    server = SlowServer(0.02)
    run = asyncio.run(loaded(server, online_workload(9, (2, 2), (1, 1), seed=0), clients=3))
    assert server.most == 3
    assert max(r.arrivals[-1] for r in run.records) >= 3 * 0.02
    assert all(r.error is None and r.due <= r.sent for r in run.records)


@pytest.mark.clock
def test_what_was_measured_survives_a_stop() -> None:
    async def stopped() -> LoadRun:
        server = SlowServer(0.5)
        run = asyncio.ensure_future(loaded(server, due_at(0.0, 1.0, 99.0)))
        for running in (1, 0, 1):  # until the second is under way
            while server.running != running:
                await asyncio.sleep(0.01)
        run.cancel()
        return await run

    summary = summarize(asyncio.run(stopped()))
    assert summary["interrupted"] and summary["completed"] == 1
    assert summary["errors"] == {"interrupted": 1, "not sent": 1}


# -------------------------------------------------------------------------------- summary


@st.composite
def records(draw: st.DrawFn) -> Record:
    moments = draw(st.lists(st.floats(0, 100), min_size=2, max_size=5))
    start, *arrivals = sorted(moments)
    record = Record(due=start, sent=start, arrivals=arrivals, counted=draw(st.booleans()))
    record.prompt_tokens, record.output_tokens = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    record.error = draw(st.sampled_from([None, None, "timeout", "http 500"]))
    return record


@given(st.lists(records(), max_size=8))
def test_nothing_is_lost_in_a_summary(found: list[Record]) -> None:
    summary = summarize(LoadRun(found, 0.0, False))
    done = [r for r in found if r.error is None]
    assert summary["completed"] == len(done)
    assert summary["completed"] + sum(summary["errors"].values()) == len(found)
    assert summary["errors"] == Counter(r.error for r in found if r.error is not None)
    assert summary["output_tokens"] == sum(r.output_tokens for r in done)
    if done:
        for name in ("ttft", "e2e"):
            values = [1e3 * getattr(r, name) for r in done]
            row = summary["ms"][name]
            assert row["p90"] == pytest.approx(np.percentile(values, 90), abs=1e-3)
            assert row["mean"] == pytest.approx(np.mean(values), abs=1e-3)
    assert "of CPU" in table(summary)


@given(st.lists(records(), max_size=6))
def test_peak_is_the_most_at_any_moment(found: list[Record]) -> None:
    moments = [r.sent for r in found]
    counts = [sum(r.sent <= t < r.arrivals[-1] for r in found) for t in moments]
    assert peak(found) == max(counts, default=0)


def test_rates_and_gaps() -> None:
    one = Record(sent=1.0, arrivals=[2.0, 2.5, 4.0], prompt_tokens=6, output_tokens=4, counted=True)
    two = Record(sent=2.0, arrivals=[5.0], prompt_tokens=2, output_tokens=1, cached_tokens=1)
    for record in (one, two):
        record.due, record.error = record.sent, None
    summary = summarize(LoadRun([one, two], 0.5, False))
    assert summary["seconds"] == 4.0 and summary["requests_per_s"] == 0.5
    assert summary["output_tokens_per_s"] == 1.25
    assert summary["ms"]["itl"] == {
        "mean": 1000,
        "p50": 1000,
        "p90": 1400,
        "p99": 1490,
        "max": 1500,
    }
    assert summary["ms"]["tpot"]["mean"] == pytest.approx(666.667)  # of the one with two tokens
    assert summary["tokens_per_chunk"] == 1.25 and summary["tokens_counted_by"] == "chunks"
    assert summary["cached_tokens"] is None  # one of them was not notified


# ---------------------------------------------------------------------------------- trace

GOOD = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40,
        "output_length": 8, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}  # fmt: skip


def test_a_good_line_in_the_public_format() -> None:
    line = parse_line(json.dumps({**GOOD, "more": "is ignored"}), 1)
    assert line == TraceLine(1, -1, 0.5, 40, 8, "text", 1, [7, 8, 9])
    assert parse_line(json.dumps({**GOOD, "hash_ids": [7, 8]}), 1).hash_ids == [7, 8]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_id", "1"), ("parent_chat_id", -2), ("timestamp", -1), ("timestamp", float("nan")),
        ("input_length", 0), ("input_length", True), ("output_length", 1.5), ("type", None),
        ("turn", 0), ("hash_ids", [1, "2", 3]), ("hash_ids", [1]), ("hash_ids", [1, 2, 3, 4]),
        ("hash_ids", None),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"trace line 17: {field}: must be .*, got"):
        parse_line(json.dumps({**GOOD, field: value}), 17)


def test_other_bad_lines(tmp_path: Path) -> None:
    for text, what in (("{", "JSON"), ("[1]", "must be an object"), ("{}", "chat_id: missing")):
        with pytest.raises(ValueError, match=f"trace line 2: .*{what}"):
            parse_line(text, 2)
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(tmp_path / "none")


def test_traces_are_read_as_written_in_the_order_of_time(tmp_path: Path) -> None:
    lines, file = synthesize(TraceShape(sessions=6), seed=2), tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines[::-1]))
    assert read_trace(file) == lines
    assert len(read_trace(file, 3)) == 3


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(0, 15))
def test_equal_blocks_are_equal_tokens_and_others_are_not(blocks: list[int], cut: int) -> None:
    length = BLOCK * len(blocks) - cut
    line = TraceLine(3, -1, 0.0, length, 1, "text", 1, blocks)
    ids = prompt_ids(line)
    assert len(ids) == length and ids.min() >= 0 and ids.max() < 1100
    for i, block in enumerate(blocks):
        alone = prompt_ids(TraceLine(9, -1, 5.0, BLOCK, 1, "text", 1, [block]))
        assert (ids[i * BLOCK : (i + 1) * BLOCK] == alone[: len(ids) - i * BLOCK]).all()
    other = prompt_ids(TraceLine(3, -1, 0.0, BLOCK, 1, "text", 1, [blocks[0] + 1]))
    assert not (other[: len(ids)] == ids[:BLOCK]).all()


def test_a_block_without_an_id_is_nobody_elses() -> None:
    one, two = (TraceLine(c, -1, 0.0, 20, 1, "text", 1, [5]) for c in (1, 2))
    a, b = prompt_ids(one), prompt_ids(two)
    assert len(a) == 20 and (a[:16] == b[:16]).all() and not (a[16:] == b[16:]).all()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6),
       st.data())  # fmt: skip
def test_reuse_is_the_longest_common_prefix_with_any_earlier_prompt(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    lines = []
    for blocks in prompts:
        length = BLOCK * len(blocks) - data.draw(st.integers(0, BLOCK - 1))
        lines.append(TraceLine(0, -1, 0.0, length, 1, "text", 1, blocks))
    ids = [prompt_ids(line).tolist() for line in lines]
    for i, found in enumerate(reusable_tokens(lines)):
        best = 0
        for earlier in ids[:i]:
            same = next((n for n, (a, b) in enumerate(zip(earlier, ids[i])) if a != b),
                        min(len(earlier), len(ids[i])))  # fmt: skip
            best = max(best, same // BLOCK)
        assert found == min(best, (len(ids[i]) - 1) // BLOCK) * BLOCK


def test_synthetic_chats_grow() -> None:
    lines = synthesize(TraceShape(sessions=30, systems=3), seed=5)
    assert lines == synthesize(TraceShape(sessions=30, systems=3), seed=5)
    other = synthesize(TraceShape(sessions=30, systems=3), seed=6)
    blocks = [{block for line in trace for block in line.hash_ids} for trace in (lines, other)]
    assert lines != other and not blocks[0] & blocks[1]
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    by_chat = {line.chat_id: line for line in lines}
    assert len(by_chat) == len(lines) and sum(line.turn == 1 for line in lines) == 30
    for line in lines:
        assert parse_line(json.dumps(vars(line)), 1) == line
        assert len(line.hash_ids) == -(-line.input_length // BLOCK)
        if line.turn > 1:
            parent = by_chat[line.parent_chat_id]
            assert parent.turn == line.turn - 1 and parent.timestamp <= line.timestamp
            assert line.input_length > parent.input_length + parent.output_length
            full = parent.input_length // BLOCK
            assert line.hash_ids[:full] == parent.hash_ids[:full]
            if parent.input_length % BLOCK:  # more tokens in a half block are another block
                assert line.hash_ids[full] != parent.hash_ids[full]
    firsts = {line.hash_ids[0] for line in lines}
    assert len(firsts) <= 3  # one beginning for each system prompt


def test_scale_brings_requests_closer() -> None:
    lines = synthesize(seed=1)
    asks, twice = requests_of(lines), requests_of(lines, 0.5)
    assert asks[0].due == 0 and [a.output_len for a in asks] == [x.output_length for x in lines]
    assert [b.due for b in twice] == pytest.approx([a.due / 2 for a in asks])


# ------------------------------------------------------------------- our server, overhead


@pytest.mark.parametrize(
    "words",
    [
        "", "--num-pages 64 --page-size 4", "--disable-overlap --dtype float32",
        "--kernels torch", "--dummy-weight",
        "--cuda-graph-max-bs 0 --max-seq-len-override 100",
        "--attn torch --cache-type naive --memory-ratio 0.5 --max-running-req 7",
    ],
)  # fmt: skip
def test_the_server_gets_the_engines_flags(words: str) -> None:
    argv = ["offline", "--device", "cpu", *words.split()]
    fields = engine_fields(options.build_parser().parse_args(argv))
    config = server_options.config_from(server_options.build_parser().parse_args(flags_of(fields)))
    for name, value in fields.items():
        assert getattr(config, name) == value, name


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_engine_and_server_are_compared_with_one_configuration(device: str) -> None:
    """Whatever their defaults are; on a GPU there is room for both."""
    parser = options.build_parser()
    args = parser.parse_args(["overhead", "--device", device, "--streams", "300"])
    fields = commands.engine_fields(args)
    server = server_options.config_from(server_options.build_parser().parse_args(flags_of(fields)))
    engine = SchedulerConfig(**fields)
    for field in dataclasses.fields(SchedulerConfig):
        assert getattr(server, field.name) == getattr(engine, field.name), field.name
    assert engine.max_running_req == 300 and (device == "cpu" or engine.memory_ratio < 0.5)


def test_an_answer_must_be_whole() -> None:
    tail = sse(chunk("a", "length"), {"usage": USAGE}, "[DONE]").encode()
    check_answer(tail, 5)
    for end in (b'{"error": "full"}', tail[:-9], b""):
        with pytest.raises(ValueError, match="did not end well"):
            check_answer(end, 5)
    with pytest.raises(ValueError, match="6 tokens were asked for, got 5"):
        check_answer(tail, 6)


@pytest.mark.parametrize("size", [1, 7, 300, 5000])
def test_the_end_of_a_stream_is_kept_however_it_is_cut(size: int) -> None:
    tail = sse({"usage": USAGE}, "[DONE]").encode()
    data = 40 * sse(chunk("some text")).encode() + tail

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        writer.close()

    async def receive() -> bytes:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            _, port = server.sockets[0].getsockname()
            return await last_bytes(f"http://127.0.0.1:{port}", {})

    end = asyncio.run(receive())
    assert end.endswith(tail) and len(end) <= 1024


def test_overhead_is_a_ratio_of_medians() -> None:
    requests = random_workload(300, 4, (2, 2), (5, 5))
    seconds = {"engine": [2.0, 1.0, 9.0], "engine and text": [2.5] * 3, "server": [4.0, 4.0, 1.0]}
    found = {
        side: [Timed(s, {f"{side} cpu": c}) for s, c in zip(all_, (0.1, 0.3, 0.2))]
        for side, all_ in seconds.items()
    }
    row = overhead_row(requests, found)
    assert (row["best_ratio"], row["ratio"]) == (1.0, 0.5)
    assert row["cpu_s"] == {"engine cpu": 0.2, "server cpu": 0.2}
    assert row["tokens_per_s"] == {"engine": 10.0, "engine and text": 8.0, "server": 5.0}


@pytest.mark.parametrize("size", [257, 300, 2000, 40_000])
def test_synthetic_tokenizer(size: int) -> None:
    tokenizer = synthetic_tokenizer(size)
    assert tokenizer.get_vocab_size() == size == len(set(tokenizer.get_vocab().values()))
    text = "the quick brown fox: né 3 日本 \n end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert max(tokenizer.get_vocab().values()) == size - 1


def test_synthetic_tokenizer_has_room_for_bytes() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: must be at least 257.*got 256"):
        synthetic_tokenizer(256)


def test_a_tokenizer_is_made_only_for_shapes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base_config("qwen3"), "vocab_size": 500}))
    with pytest.raises(ValueError, match="has no tokenizer"), with_tokenizer(tmp_path, False):
        pass
    with with_tokenizer(tmp_path, True) as (folder, kind):
        assert kind == "synthetic" and folder != tmp_path
        assert (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file()
    assert not folder.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]
    embedded = resolve_model_path(None)
    with with_tokenizer(embedded, True) as (folder, kind):
        assert (folder, kind) == (embedded, "the model's")


def test_overhead_of_shapes_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Popen)
    (tmp_path / "config.json").write_text(json.dumps({**base_config("qwen3"), "vocab_size": 500}))
    sizes = "--streams 4 --input-len 4 8 --output-len 4 8 --repeats 1 --num-pages 64 --device cpu"
    out = tmp_path / "out" / "overhead.json"
    words = ["overhead", "--model", str(tmp_path), "--dummy-weight", *sizes.split()]
    assert main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert found["tokenizer"] == "synthetic" and found["streams"] == 4 and found["ratio"] > 0
    assert {"engine alone", "client", "http", "scheduler"} <= found["cpu_s"].keys()
    assert found["engine"]["num_pages"] == 64
    assert "CPU seconds of a run" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("python -m minisgl.benchmark: ")


# ------------------------------------------------------------------------------- commands


class Answered(Observer):
    """Counts the requests that a server has answered."""

    def __init__(self) -> None:
        self.count = 0

    def closed(self, uid: int, outcome: str) -> None:
        self.count += 1


@pytest.fixture(scope="module")
def answered() -> Answered:
    return Answered()


@pytest.fixture(scope="module")
def live(answered: Answered) -> Iterator[Live]:
    fields = {"num_pages": 1024, "served_model_name": "tiny", "api_key": "secret"}
    with Live(resolve_model_path(None), observers=(answered,), **fields) as live:
        yield live


SIZES = ("--input-len", "8", "24", "--output-len", "4", "12", "--requests", "6")


def test_online_measures_a_server(live: Live, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "online.json"
    words = ["online", "--url", live.url, "--api-key", "secret", "--rate", "50", "100", *SIZES]
    assert main([*words, "--json", str(out)]) == 0
    said, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "secret" not in out.read_text() and "--api-key …" in record["command"].replace("'", "")
    assert said.count("6 of 6 requests") == 2
    for index, (run, rate) in enumerate(zip(record["results"]["runs"], (50.0, 100.0))):
        asked = online_workload(6, (8, 24), (4, 12), seed=index, rate=rate)
        assert run["load"]["rate"] == rate and run["completed"] == 6 and run["errors"] == {}
        assert run["input_tokens"] == sum(len(r.input_ids) for r in asked)
        assert run["output_tokens"] == sum(r.output_len for r in asked)
        assert run["tokens_counted_by"] == "usage"
    live.assert_pages_home()


def test_closed_loop_and_chat(live: Live, tmp_path: Path) -> None:
    out = tmp_path / "online.json"
    words = [
        "online",
        "--url",
        f"{live.url}/v1",
        "--api-key=secret",
        "--concurrency",
        "2",
        "--chat",
    ]
    assert main([*words, *SIZES, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    [run] = record["results"]["runs"]
    assert "secret" not in out.read_text() and run["load"] == {"rate": None, "concurrency": 2}
    assert run["completed"] == 6 and run["peak_running"] <= 2
    assert record["results"]["workload"]["chat"] and run["input_tokens"] > 6 * 8


def test_trace_finds_shared_prefixes(live: Live, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "trace.json"
    words = ["trace", "--url", live.url, "--api-key", "secret", "--requests", "8", "--seed", "3"]
    assert main([*words, "--scale", "0.2", "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    [run] = results["runs"]
    assert run["completed"] == results["trace"]["requests"] == 8
    assert run["input_tokens"] == results["trace"]["input_tokens"]
    assert run["cached_tokens"] > 0 and results["trace"]["reusable_tokens"] > 0
    assert "the trace allows" in capsys.readouterr().out


def test_errors_do_not_end_a_run(
    live: Live, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "online.json"
    monkeypatch.setenv("MINISGL_API_KEY", "secret")
    words = ["online", "--url", live.url, "--requests", "4"]
    long = ["--input-len", "9", "16000", "--output-len", "2", "4"]
    assert main([*words, *long, "--json", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]["runs"]
    assert run["completed"] + run["errors"]["http 400"] == 4 and 0 < run["completed"] < 4
    assert "context length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("online --url ftp://x", "url: must be"),
        ("online --url http://127.0.0.1:9", "url: http://127.0.0.1:9/v1/models"),
        ("online --url x --input-len 9 3", "input-len: LOW must not exceed HIGH, got 9 3"),
        ("online --url http://127.0.0.1:99999", "url: must be"),
        ("online --url http://[::1", "url: must be"),
        ("trace --url x --trace /nowhere/at/all", "--trace: cannot use '/nowhere/at/all' (No such"),
        (f"trace --url x --trace {sys.executable}", "--trace: cannot use"),
        ("overhead --device cpu --model /nowhere", "/nowhere"),
    ],
)  # fmt: skip
def test_mistakes_cost_one_line(words: str, what: str, capsys: Any) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_an_endless_rate_is_all_at_once(live: Live, tmp_path: Path) -> None:
    out = tmp_path / "online.json"
    words = ["online", "--url", live.url, "--api-key", "secret", "--rate", "90", "inf"]
    assert main([*words, *SIZES, "--json", str(out)]) == 0
    first, second = json.loads(out.read_text())["results"]["runs"]
    assert first["load"]["rate"] == 90.0 and second["load"]["rate"] is None
    assert second["completed"] == second["peak_running"] == 6


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "-inf", "x"])
def test_a_rate_is_a_number_above_zero(rate: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["online", "--url", "x", f"--rate={rate}"])
    assert "must be a number above 0" in capsys.readouterr().err


@pytest.mark.clock
def test_ctrl_c_prints_what_was_measured(live: Live, answered: Answered, tmp_path: Path) -> None:
    out = tmp_path / "online.json"
    words = ["online", "--url", live.url, "--api-key", "secret", "--rate", "2", *SIZES]
    words += ["--requests", "64", "--json", str(out)]
    process = Popen(
        [sys.executable, "-m", "minisgl.benchmark", *words, "--seed", "1"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    before = answered.count
    wait_for(lambda: answered.count >= before + 2, "two requests", seconds=60)
    time.sleep(0.5)  # for the answer to arrive
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 64 requests" in said and "not sent" in said
    [run] = json.loads(out.read_text())["results"]["runs"]
    assert run["interrupted"] and run["completed"] + sum(run["errors"].values()) == 64


@pytest.mark.drill
def test_a_killed_benchmark_stops_its_server(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` and job schedulers send it."""
    words = ["overhead", "--streams", "2", "--repeats", "99", "--device", "cpu"]
    command = [sys.executable, "-m", "minisgl.benchmark", *words]
    process = Popen(command, real=True, stdout=subprocess.DEVNULL)
    started: list[psutil.Process] = []

    def serves() -> bool:
        started[:] = psutil.Process(process.pid).children(recursive=True)
        return any(child.net_connections("tcp") for child in started)

    wait_for(serves, "a server", seconds=150)
    process.terminate()
    assert process.wait(120) == 1
    assert not psutil.wait_procs(started, timeout=60)[1]


def test_no_answer_at_all_is_a_failure() -> None:
    assert commands.status_of([{"interrupted": False, "completed": 0}]) == 1
    assert commands.status_of([{"interrupted": False, "completed": 1}]) == 0
    assert commands.status_of([{"interrupted": True, "completed": 1}]) == 130
