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
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark import cli, load, options, plot, serving_cli
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.client import Api, Record, base_url, take
from minisgl.benchmark.dialect import WORDS, Dialect, negotiate
from minisgl.benchmark.flood import Tail, check_answer, http_request
from minisgl.benchmark.load import Outcome, poisson_arrivals, random_asks, run_load
from minisgl.benchmark.overhead import overhead_row
from minisgl.benchmark.serving import flags_of
from minisgl.benchmark.summary import peak, summarize, table
from minisgl.benchmark.synthetic import synthetic_tokenizer, with_tokenizer
from minisgl.benchmark.trace import (
    BLOCK,
    Shape,
    TraceLine,
    asks_of,
    parse_line,
    prompt_ids,
    read_trace,
    reusable_tokens,
    synthesize,
    write_trace,
)
from minisgl.benchmark.workload import random_workload
from minisgl.config.engine import SchedulerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.server import cli as server_cli
from minisgl.server.frontend import Observer
from tests.checkpoints import base_config
from tests.serving import Live, wait_for

pytestmark = pytest.mark.clock

DATA = Path(__file__).resolve().parents[1] / "notebooks" / "data"
Handler = Callable[[httpx.Request], httpx.Response]


def sse(*events: Any) -> str:
    return "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)


def chunk(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


def fake_api(handler: Handler | Callable[..., Any], timeout: float = 5.0) -> Api:
    api = Api("http://fake", timeout=timeout)
    api.http = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url=api.url)
    return api


def sent(answer: httpx.Response | Exception, timeout: float = 5.0) -> Record:
    """The record of one request that is answered so."""

    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    record = Record()
    ticks = iter(range(1000))
    send = fake_api(handle, timeout).send("completions", {}, record, lambda: float(next(ticks)))
    asyncio.run(send)
    return record


# --------------------------------------------------------------------------------- client


def test_times_of_a_stream() -> None:
    record = Record(sent=1.0, arrivals=[1.5, 2.0, 3.5], output_tokens=5, error=None)
    assert (record.ttft, record.e2e, record.streaming, record.tpot) == (0.5, 2.5, 2.0, 0.5)
    record.output_tokens = 1
    assert record.tpot is None


def test_the_first_chunk_with_text_counts() -> None:
    record = Record()
    take(record, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    take(record, {"choices": [{"delta": {"content": None}}]}, 2.0)
    assert record.arrivals == []
    for now, field in enumerate(("content", "reasoning_content", "reasoning"), 3):
        take(record, {"choices": [{"delta": {field: "x"}}]}, float(now))
    take(record, chunk("x", "length"), 6.0)
    assert record.arrivals == [3.0, 4.0, 5.0, 6.0] and record.finish_reason == "length"
    take(record, {"choices": [], "usage": USAGE}, 7.0)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 5, 3)
    assert record.arrivals[-1] == 6.0


def test_tokens_are_the_servers_count_or_else_chunks() -> None:
    told = sent(httpx.Response(200, text=sse(chunk("a"), chunk("b", "stop"), {"usage": USAGE})))
    assert told.error is None and told.counted and told.output_tokens == 5
    silent = sent(httpx.Response(200, text=sse(chunk("a"), chunk("b", "stop"), "[DONE]")))
    assert silent.error is None and not silent.counted and silent.output_tokens == 2
    assert silent.sent == 0.0 and silent.arrivals == [1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (httpx.Response(429, json={"error": {"message": "full"}}), "http 429", "full"),
        (httpx.Response(502, text="<html>"), "http 502", "<html>"),
        (httpx.Response(200, text=sse(chunk("a"))), "cut off", "finish reason"),
        (httpx.Response(200, text=sse(chunk("", "stop"), "[DONE]")), "empty", "no text"),
        (httpx.Response(200, text=sse({"error": {"message": "died"}})), "error event", "died"),
        (httpx.Response(200, text=sse({"error": "died"})), "error event", "died"),
        (httpx.Response(200, text="data: {\n\n"), "bad answer", "JSON"),
        (httpx.Response(200, text=sse({"choices": 3})), "bad answer", "TypeError"),
        (httpx.ConnectError("nobody there"), "connect", "nobody"),
        (httpx.ReadError("reset"), "connection", "reset"),
        (httpx.ReadTimeout("slow"), "timeout", "no end within"),
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

    record = sent(httpx.Response(200, content=drip()), timeout=0.1)
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
    record = sent(httpx.Response(200, content=sse(*events).encode() + b"data: " + junk))
    assert isinstance(record.error, str) and record.error != "not sent"


def test_urls() -> None:
    for url in ("host:1919", "http://host:1919/", "http://host:1919/v1", "http://host:1919/v1/"):
        assert base_url(url) == "http://host:1919/v1/"
    assert base_url("https://a.b/proxy/v1") == "https://a.b/proxy/v1/"
    for url in ("", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="url: must be"):
            base_url(url)


# -------------------------------------------------------------------------------- dialect


class FakeServer:
    """Answers as its settings say, and remembers the bodies."""

    def __init__(
        self, owner: str = "x", ids: bool = True, usage: bool = True, completions: bool = True,
        per_word: int = 2, template: int = 7,
    ) -> None:  # fmt: skip
        self.owner, self.ids, self.usage, self.completions = owner, ids, usage, completions
        self.per_word, self.template = per_word, template
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            cards = [{"id": "first", "owned_by": self.owner}, {"id": "second", "owned_by": "vllm"}]
            return httpx.Response(200, json={"data": cards})
        body = json.loads(request.content)
        self.bodies.append(body)
        chat = request.url.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if not (chat or self.completions):
            return httpx.Response(404, text="no such route")
        if (not isinstance(prompt, str) and not self.ids) or (
            not self.usage and "stream_options" in body
        ):
            return httpx.Response(400, json={"error": {"message": "not taken here"}})
        words = len(prompt) if not isinstance(prompt, str) else len(prompt.split()) * self.per_word
        usage = {"prompt_tokens": words + self.template * chat, "completion_tokens": 1}
        ends: list[Any] = [{"choices": [], "usage": usage}] if self.usage else []
        return httpx.Response(200, text=sse(chunk("a", "stop"), *ends, "[DONE]"))


def agreed(server: Handler, **asked: Any) -> tuple[Dialect, list[str]]:
    return asyncio.run(negotiate(fake_api(server), **asked))


def test_ids_are_spoken_where_they_are_taken() -> None:
    dialect, notices = agreed(FakeServer(owner="sglang"))
    assert dialect == Dialect("first", ids=True, ignore_eos=True) and notices == []
    body = dialect.body([5, 6], 9)
    assert body["prompt"] == [5, 6] and body["max_tokens"] == 9 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["stream"] is True


def test_ignore_eos_only_for_those_who_take_it_or_when_asked() -> None:
    assert "ignore_eos" not in agreed(FakeServer("someone"))[0].body([1], 1)
    assert agreed(FakeServer("someone"), ignore_eos=True)[0].ignore_eos
    assert not agreed(FakeServer("vllm"), ignore_eos=False)[0].ignore_eos
    assert agreed(FakeServer("someone"), model="second")[0].ignore_eos  # its own card counts
    assert "ignore_eos is not sent" in agreed(FakeServer("someone"))[1][-1]


def test_words_are_calibrated() -> None:
    dialect, notices = agreed(FakeServer(ids=False))
    assert not dialect.ids and dialect.tokens_per_word == 2 and dialect.extra_tokens == 0
    assert any("2.00 tokens a word" in notice for notice in notices)
    chat, _ = agreed(FakeServer(ids=False), chat=True)
    assert chat.chat and chat.extra_tokens == 7
    text = chat.body(list(range(107)), 1)["messages"][0]["content"]
    assert len(text.split()) == 50 and set(text.split()) <= set(WORDS)


def test_a_common_beginning_stays_one_in_words() -> None:
    dialect = Dialect("m", tokens_per_word=1.3, extra_tokens=5)
    shared = list(range(100, 196))
    one, two = (str(dialect.prompt(shared + tail)).split() for tail in ([1] * 4, [2] * 60))
    common = next(i for i, (a, b) in enumerate(zip(one, two)) if a != b or i == len(one) - 1)
    assert common >= min(len(one) - 1, 90)


def test_servers_without_usage_or_completions() -> None:
    dialect, notices = agreed(FakeServer(usage=False))
    assert dialect.ids and not dialect.usage and "no usage" in notices[0]
    assert "stream_options" not in dialect.body([1], 1)
    dialect, notices = agreed(FakeServer(completions=False))
    assert dialect.chat and dialect.path == "chat/completions" and "chats" in notices[0]


def test_who_refuses_everything_is_told_apart() -> None:
    calls: list[str] = []

    def closed(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        return httpx.Response(401, json={"error": {"message": "wrong key"}})

    with pytest.raises(ConnectionError, match="401: wrong key"):
        agreed(closed)
    with pytest.raises(ConnectionError, match="http 401: wrong key"):
        agreed(closed, model="m", ignore_eos=False)
    assert len(calls) == 2  # another spelling would not help

    def empty(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    with pytest.raises(ConnectionError, match="names no model; say --model"):
        agreed(empty)
    with pytest.raises(ConnectionError, match="no list of models"):
        agreed(lambda _: httpx.Response(200, text="hello"))


# ----------------------------------------------------------------------------------- load


def test_arrivals_are_a_poisson_process() -> None:
    due = poisson_arrivals(20_000, 4.0, seed=3)
    gaps = np.diff(due)
    assert due[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: as large as the mean
    assert (poisson_arrivals(20_000, 4.0, seed=3) == due).all()
    assert not (poisson_arrivals(20_000, 4.0, seed=4) == due).all()


def test_asks_keep_their_bounds_and_their_seed() -> None:
    asks = random_asks(200, (3, 5), (7, 9), seed=1, rate=10.0)
    assert {len(a.ids) for a in asks} == {3, 4, 5} and {a.max_tokens for a in asks} == {7, 8, 9}
    assert min(int(a.ids.min()) for a in asks) >= 100 and max(int(a.ids.max()) for a in asks) < 1100
    again = random_asks(200, (3, 5), (7, 9), seed=1, rate=10.0)
    assert all((a.ids == b.ids).all() and a.due == b.due for a, b in zip(asks, again))
    assert {a.due for a in random_asks(5, (3, 5), (7, 9), seed=1)} == {0.0}


class SlowApi:
    """Takes `seconds` for each answer and counts who is under way."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.running, self.most = seconds, 0, 0

    async def send(
        self, path: str, body: dict[str, Any], record: Record, clock: Callable[[], float]
    ) -> None:
        record.sent = clock()
        record.fail("interrupted", "")
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        record.arrivals, record.output_tokens, record.error = [clock()], 1, None


def loaded(api: SlowApi, asks: list[load.Ask], clients: int | None = None) -> Outcome:
    return asyncio.run(run_load(api, Dialect("m", ids=True), asks, clients))  # type: ignore[arg-type]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    api = SlowApi(0.3)
    asks = [load.Ask(np.arange(3, dtype=np.int32), 1, due=0.02 * i) for i in range(10)]
    outcome = loaded(api, asks)
    assert api.most == 10  # all were sent before the first was answered
    for ask, record in zip(asks, outcome.records):
        assert record.sent is not None and ask.due <= record.sent < ask.due + 0.2
        assert record.due == ask.due


def test_a_closed_loop_waits() -> None:
    api = SlowApi(0.02)
    outcome = loaded(api, random_asks(9, (2, 2), (1, 1), seed=0), clients=3)
    assert api.most == 3 and outcome.seconds >= 3 * 0.02
    assert all(record.error is None for record in outcome.records)


def test_what_was_measured_survives_a_stop() -> None:
    async def stopped() -> Outcome:
        asks = [load.Ask(np.arange(3, dtype=np.int32), 1, due=d) for d in (0.0, 0.12, 9.0)]
        run = asyncio.ensure_future(run_load(SlowApi(0.1), Dialect("m"), asks))  # type: ignore[arg-type]
        await asyncio.sleep(0.17)
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
    summary = summarize(Outcome(found, 1.0, 0.0, False))
    done = [r for r in found if r.error is None]
    assert summary["completed"] == len(done)
    assert summary["completed"] + sum(summary["errors"].values()) == len(found)
    assert summary["errors"] == Counter(r.error for r in found if r.error is not None)
    assert summary["output_tokens"] == sum(r.output_tokens for r in done)
    if done:
        for name in ("ttft", "e2e", "streaming"):
            values = [1e3 * getattr(r, name) for r in done]
            row = summary["ms"][name]
            assert row["p90"] == pytest.approx(np.percentile(values, 90), abs=1e-3)
            assert row["mean"] == pytest.approx(np.mean(values), abs=1e-3)
    assert "of CPU" in table(summary)


@given(st.lists(records(), max_size=6))
def test_peak_is_the_most_at_any_moment(found: list[Record]) -> None:
    moments = [r.sent or 0.0 for r in found]
    counts = [sum((r.sent or 0.0) <= t < r.arrivals[-1] for r in found) for t in moments]
    assert peak(found) == max(counts, default=0)


def test_rates_and_gaps() -> None:
    one = Record(sent=1.0, arrivals=[2.0, 2.5, 4.0], prompt_tokens=6, output_tokens=4, counted=True)
    two = Record(sent=2.0, arrivals=[5.0], prompt_tokens=2, output_tokens=1, cached_tokens=1)
    for record in (one, two):
        record.due, record.error = record.sent or 0.0, None
    summary = summarize(Outcome([one, two], 9.0, 0.5, False))
    assert summary["seconds"] == 4.0 and summary["requests_per_s"] == 0.5
    assert summary["output_tokens_per_s"] == 1.25 and summary["total_tokens_per_s"] == 3.25
    assert summary["ms"]["itl"] == {
        "mean": 1000,
        "p50": 1000,
        "p90": 1400,
        "p99": 1490,
        "max": 1500,
    }
    assert summary["ms"]["tpot"]["mean"] == pytest.approx(666.667)  # of the one with two tokens
    assert summary["tokens_per_chunk"] == 1.25 and summary["tokens_counted_by"] == "chunks"
    assert summary["cached_tokens"] is None  # one of them was not told


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
    for text, what in (("{", "not JSON"), ("[1]", "must be an object"), ("{}", "got nothing")):
        with pytest.raises(ValueError, match=f"trace line 2: .*{what}"):
            parse_line(text, 2)
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(tmp_path / "none")


def test_traces_are_read_as_written_in_the_order_of_time(tmp_path: Path) -> None:
    lines = synthesize(Shape(sessions=6), seed=2)
    write_trace(tmp_path / "deep" / "trace.jsonl", lines[::-1])
    assert read_trace(tmp_path / "deep" / "trace.jsonl") == lines
    assert len(read_trace(tmp_path / "deep" / "trace.jsonl", 3)) == 3


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(0, 15))
def test_equal_blocks_are_equal_tokens_and_others_are_not(blocks: list[int], cut: int) -> None:
    length = BLOCK * len(blocks) - cut
    line = TraceLine(3, -1, 0.0, length, 1, "text", 1, blocks)
    ids = prompt_ids(line)
    assert len(ids) == length and ids.min() >= 100 and ids.max() < 1100
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
    lines = synthesize(Shape(sessions=30, systems=3), seed=5)
    assert lines == synthesize(Shape(sessions=30, systems=3), seed=5)
    other = synthesize(Shape(sessions=30, systems=3), seed=6)
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
    asks, twice = asks_of(lines), asks_of(lines, 0.5)
    assert asks[0].due == 0 and [a.max_tokens for a in asks] == [x.output_length for x in lines]
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
    fields = options.engine_fields(cli.build_parser().parse_args(argv))
    config = server_cli.config_from(server_cli.build_parser().parse_args(flags_of(fields)))
    for name, value in fields.items():
        assert getattr(config, name) == value, name


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_engine_and_server_are_compared_with_one_configuration(device: str) -> None:
    """Whatever their defaults are; on a GPU there is room for both."""
    parser = cli.build_parser(serving_cli.COMMANDS)
    args = parser.parse_args(["overhead", "--device", device, "--streams", "300"])
    fields = serving_cli.engine_fields(args)
    server = server_cli.config_from(server_cli.build_parser().parse_args(flags_of(fields)))
    engine = SchedulerConfig(**fields)
    for field in dataclasses.fields(SchedulerConfig):
        assert getattr(server, field.name) == getattr(engine, field.name), field.name
    assert engine.max_running_req == 300 and (device == "cpu" or engine.memory_ratio < 0.5)


def test_an_answer_must_be_whole() -> None:
    tail = sse(chunk("a", "length"), {"usage": USAGE}, "[DONE]").encode()
    check_answer(b"HTTP/1.1 200 OK", tail, 5)
    for head, end in ((b"HTTP/1.1 429", tail), (b"HTTP/1.1 200 OK", tail[:-9]), (b"", b"")):
        with pytest.raises(ValueError, match="did not end well"):
            check_answer(head, end, 5)
    with pytest.raises(ValueError, match="6 tokens were asked for, got 5"):
        check_answer(b"HTTP/1.1 200 OK", tail, 6)


@given(st.integers(1, 700))
def test_the_end_of_a_stream_is_kept_however_it_is_cut(size: int) -> None:
    tail = sse({"usage": USAGE}, "[DONE]").encode()
    data = b"HTTP/1.1 200 OK\r\n" + 40 * sse(chunk("some text")).encode() + tail

    async def receive() -> tuple[bytes, bytes]:
        done = asyncio.get_running_loop().create_future()
        protocol = Tail(b"", done)
        for start in range(0, len(data), size):
            protocol.data_received(data[start : start + size])
        protocol.connection_lost(None)
        return await done

    head, end = asyncio.run(receive())
    assert data.startswith(head) and end.endswith(tail) and len(end) < 3000


def test_a_request_in_bytes() -> None:
    raw = http_request("http://host:80/v1", {"prompt": [1]})
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: host:80\r\n")
    assert f"Content-Length: {len(body)}".encode() in head and json.loads(body) == {"prompt": [1]}


def test_overhead_is_a_ratio_of_medians() -> None:
    requests = random_workload(300, 4, (2, 2), (5, 5))
    seconds = {"engine": [2.0, 1.0, 9.0], "engine and text": [2.5] * 3, "server": [4.0, 4.0, 1.0]}
    cpu = [{"seconds": 4.0, "cpu http": c} for c in (0.1, 0.3, 0.2)]
    row = overhead_row(requests, seconds, cpu)
    assert (
        row["best_ratio"] == 1.0
        and row["ratio"] == 0.5
        and row["text_ratio"] == 0.8
        and row["cpu_s"] == {"http": 0.2}
    )
    assert row["tokens_per_s"] == {"engine": 10.0, "engine and text": 8.0, "server": 5.0}


@pytest.mark.parametrize("size", [257, 300, 2000, 40_000])
def test_synthetic_tokenizer(size: int) -> None:
    tokenizer = synthetic_tokenizer(size)
    assert tokenizer.get_vocab_size() == size == len(set(tokenizer.get_vocab().values()))
    text = "the quick brown fox: né 3 日本 \n end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert max(tokenizer.get_vocab().values()) == size - 1
    if size >= 2000:
        assert len(tokenizer.encode("abcdefgh").ids) < 8  # merges are used


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base_config("qwen3"), "vocab_size": 500}))
    sizes = "--streams 4 --input-len 4 8 --output-len 4 8 --repeats 1 --num-pages 64 --device cpu"
    out = tmp_path / "out" / "overhead.json"
    words = ["overhead", "--model", str(tmp_path), "--dummy-weight", *sizes.split()]
    assert main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert found["tokenizer"] == "synthetic" and found["streams"] == 4 and found["ratio"] > 0
    assert {"engine alone", "client", "http", "scheduler"} <= found["cpu_s"].keys()
    assert found["engine"]["num_pages"] == 64
    assert "HTTP and text cost" in capsys.readouterr().out
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
    fields = {"num_page_override": 1024, "served_model_name": "tiny", "api_key": "secret"}
    with Live(resolve_model_path(None), observers=(answered,), **fields) as live:
        yield live


SIZES = ("--input-len", "8", "24", "--output-len", "4", "12", "--requests", "6")


def test_online_measures_a_server(live: Live, tmp_path: Path, capsys: Any) -> None:
    out, picture = tmp_path / "online.json", tmp_path / "online.png"
    words = ["online", "--url", live.url, "--api-key", "secret", "--rate", "50", "100", *SIZES]
    assert main([*words, "--json", str(out), "--plot", str(picture)]) == 0
    said, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "secret" not in out.read_text() and "--api-key …" in record["command"].replace("'", "")
    assert picture.read_bytes().startswith(b"\x89PNG") and said.count("6 of 6 requests") == 2
    for index, (run, rate) in enumerate(zip(record["results"]["runs"], (50.0, 100.0))):
        asks = random_asks(6, (8, 24), (4, 12), seed=index, rate=rate)
        assert run["load"]["rate"] == rate and run["completed"] == 6 and run["errors"] == {}
        assert run["dialect"]["ids"] and run["dialect"]["ignore_eos"]
        assert run["input_tokens"] == sum(len(a.ids) for a in asks)
        assert run["output_tokens"] == sum(a.max_tokens for a in asks)
        assert run["tokens_counted_by"] == "usage"
    live.assert_pages_home()


def test_closed_loop_and_chat(live: Live, tmp_path: Path, capsys: Any) -> None:
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
    assert run["completed"] == 6 and run["peak_running"] <= 2 and run["dialect"]["chat"]
    asked = sum(len(a.ids) for a in random_asks(6, (8, 24), (4, 12), seed=0))
    assert run["input_tokens"] == pytest.approx(asked, rel=0.5)
    assert "prompts are words" in capsys.readouterr().err


def test_trace_finds_shared_prefixes(live: Live, tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "trace.jsonl", tmp_path / "trace.json"
    assert main(["trace", "--synthesize", str(file), "--requests", "8", "--seed", "3"]) == 0
    words = ["trace", "--url", live.url, "--api-key", "secret", "--trace", str(file)]
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
    long = ["--input-len", "9", "9000", "--output-len", "2", "4"]
    assert main([*words, *long, "--json", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]["runs"]
    assert run["completed"] + run["errors"]["http 400"] == 4 and 0 < run["completed"] < 4
    assert "context length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("online --url ftp://x", "url: must be"),
        ("online --url http://127.0.0.1:9", "does not answer"),
        ("online --url x --input-len 9 3", "input-len: LOW must not exceed HIGH, got 9 3"),
        ("online --url x --plot out.bmp", "plot: must end in"),
        ("trace", "url: must be given"),
        ("trace --url x --trace /nowhere/at/all", "No such file"),
        ("trace --trace a --synthesize b", "synthesize: "),
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


def test_prompts_of_an_earlier_run_are_noticed(live: Live, capsys: Any) -> None:
    words = ["online", "--url", live.url, "--api-key", "secret", *SIZES, "--seed", "99"]
    for times in range(2):
        assert main(words) == 0
        assert ("prompt tokens were cached" in capsys.readouterr().err) == (times == 1)


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "-inf", "x"])
def test_a_rate_is_a_number_above_zero(rate: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["online", "--url", "x", f"--rate={rate}"])
    assert "must be a number above 0" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_first(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["online", "--url", "http://127.0.0.1:9", "--plot", "x.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured(live: Live, answered: Answered, tmp_path: Path) -> None:
    out = tmp_path / "online.json"
    words = [
        "online",
        "--url",
        live.url,
        "--api-key",
        "secret",
        "--rate",
        "0.5",
        "--json",
        str(out),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.benchmark", *words, "--seed", "1"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    before = answered.count
    wait_for(lambda: answered.count >= before + 2, "a probe and a request", seconds=60)
    time.sleep(0.5)  # for the answer to arrive
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 64 requests" in said and "not sent" in said
    [run] = json.loads(out.read_text())["results"]["runs"]
    assert run["interrupted"] and run["completed"] + sum(run["errors"].values()) == 64


def test_no_answer_at_all_is_a_failure() -> None:
    assert serving_cli.status_of([{"interrupted": False, "completed": 0}]) == 1
    assert serving_cli.status_of([{"interrupted": False, "completed": 1}]) == 0
    assert serving_cli.status_of([{"interrupted": True, "completed": 1}]) == 130


def test_pictures_of_runs_without_answers(tmp_path: Path) -> None:
    run = {"completed": 0, "load": {"rate": 1.0}}
    plot.save_plot(tmp_path / "deep" / "empty.svg", [run], "nothing")
    assert "</svg>" in (tmp_path / "deep" / "empty.svg").read_text()


@pytest.mark.parametrize("name", ["online_tiny", "overhead_tiny", "overhead_tiny_one_thread"])
def test_stored_runs_carry_their_circumstances(name: str) -> None:
    record = json.loads((DATA / f"{name}.json").read_text())
    assert {"hardware", "date", "command", "versions", "results"} <= record.keys()
    assert "minisgl.benchmark" in record["command"]
