"""Operation of a server: limits, lifecycle, safety, metrics, logs, trace and shell."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from minisgl.config.engine import ServerConfig
from minisgl.core import SamplingParams
from minisgl.recording import Observed
from minisgl.runtime.heartbeat import Watchdog
from minisgl.runtime.supervisor import Supervisor, WorkerFailed
from minisgl.scheduler.observe import emitter
from minisgl.server.chat import start as chat_start
from minisgl.server.chat.client import ApiClient, base_url
from minisgl.server.chat.shell import Shell
from minisgl.server.cli import listen, main, serve
from minisgl.server.frontend import Observer
from minisgl.server.http.access import warn_if_open
from minisgl.server.http.hosts import is_loopback
from minisgl.server.http.limits import ConcurrencyLimiter
from minisgl.server.http.settings import ApiSettings, sampling_defaults, settings_for
from minisgl.server.in_process import InProcessServer
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.server.observe.logs import LineWriter, RequestLog, as_json, as_text
from minisgl.server.observe.metrics import Metrics
from minisgl.server.observe.trace import TraceFile
from minisgl.server.options import Operations, build_parser, config_from, operations_from
from minisgl.server.workers import scheduler_process
from minisgl.server.workers.messages import StatsMsg
from minisgl.server.workers.processes import WorkerGroup, address
from tests.checkpoints import make_checkpoint
from tests.forks import Popen
from tests.serving import PAGES, Live, Served, last_event, metric, stream, wait_for

pytest_plugins = ["tests.random_server"]


def test_impossible_defaults_are_the_models_fault(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match=r"generation_config.json: temperature: .*'hot'"):
        sampling_defaults(tmp_path)


def test_sockets_have_short_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """A socket's path has at most 107 bytes, a TMPDIR may have more."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("d" * 90)))
    config = ServerConfig(model_path=str(checkpoint), num_tokenizer=12)
    group = WorkerGroup(config, Watchdog(60, 600), Observed())
    parts = ["text", "scheduler", "frontend", *group.tokenizers]
    assert len(parts) == 15 and all(len(address(group.folder, part)) <= 107 for part in parts)
    group.folder.rmdir()


def test_the_terminal_samples_as_the_model_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []

    class Parts:  # of the workers and of the frontend
        async def start(self) -> None: ...
        async def stop(self) -> None: ...
        def starting(self) -> bool:
            return False

        def broken(self) -> None: ...
        def generate(self, params: SamplingParams, messages: Any) -> None:
            asked.append(params)

    async def shell(talk: Any) -> None:
        talk([])

    monkeypatch.setattr(chat_start, "run_shell", shell)
    parts: Any = Parts()
    advice = {"temperature": 0.2, "top_p": 0.9}
    assert asyncio.run(chat_start.chat(parts, parts, ApiSettings("smollm2", 9, advice))) == 0
    assert asked == [SamplingParams(temperature=0.2, top_p=0.9)]


def test_shell_keeps_a_conversation(checkpoint: Path) -> None:
    config = ServerConfig(model_path=str(checkpoint), num_pages=PAGES)
    said: list[str] = []

    async def talk(server: InProcessServer) -> None:
        frontend = server.frontend
        params = SamplingParams(max_tokens=6)
        shell = Shell(lambda messages: frontend.generate(params, messages=messages), said.append)
        await frontend.start()
        assert await shell.handle("/stats") and "no answer yet" in said[-1]
        assert await shell.handle("hello")
        assert await shell.handle("   ")
        assert await shell.handle("again")
        assert [m["role"] for m in shell.history] == ["user", "assistant"] * 2
        assert await shell.handle("/stats")
        assert "6 tokens in" in said[-1] and "tok/s" in said[-1] and "cached" in said[-1]
        assert await shell.handle("long " * 300)  # refused, and the history stays
        assert len(shell.history) == 4
        assert await shell.handle("/reset") and shell.history == []
        assert await shell.handle("/help") and "/stats" in said[-1] and "unknown" not in said[-2]
        assert await shell.handle("/halp") and "unknown command /halp" in said[-2]
        assert not await shell.handle("/exit")
        await frontend.stop()

    with InProcessServer(config) as server:
        asyncio.run(talk(server))


# Command line and processes


FLAGS = (
    "--model-path",
    "--model",
    "--dtype",
    "--tensor-parallel-size",
    "--tp",
    "--max-running-requests",
    "--max-seq-len-override",
    "--memory-ratio",
    "--num-pages",
    "--page-size",
    "--cuda-graph-max-bs",
    "--max-prefill-length",
    "--attention-backend",
    "--attn",
    "--cache-type",
    "--num-tokenizer",
    "--dummy-weight",
    "--device",
    "--disable-overlap",
    "--shell",
    "--host",
    "--port",
)


def test_help_explains_every_flag() -> None:
    text = build_parser().format_help()
    for flag in FLAGS:
        assert flag in text


def test_flags_reach_the_config() -> None:
    flags = "--page-size 4 --attn triton --cache-type naive --disable-overlap --num-pages 9 --tp 2"
    args = build_parser().parse_args([*flags.split(), "--request-timeout", "none"])
    config = config_from(args)
    assert operations_from(args).request_timeout is None
    assert (config.page_size, config.attention_backend, config.cache_type) == (4, "triton", "naive")
    assert (config.overlap, config.num_pages, config.tp.size) == (False, 9, 2)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--page-size", "0"], "minisgl: --page-size: must be"),
        (["--tp", "0"], "minisgl: --tensor-parallel-size: must be"),
        (["--num-pages", "0"], "minisgl: --num-pages: must be"),
        (["--model", "/no/such/folder"], "--model: no such folder"),
        (["--memory-ratio", "nan"], "--memory-ratio: "),
        (["--dtype", "float7"], "--dtype: "),
        (["--max-queue", "-1"], "--max-queue: "),
        (["--request-timeout", "0"], "--request-timeout: "),
        (["--connect", "ftp://x"], "--connect: must be like"),
        (["--connect", "127.0.0.1:9"], "--connect: no server at 127.0.0.1:9"),
        (["--host", "no-such-host.invalid"], "--host: no-such-host.invalid"),
        (["--max-seq-len-override", "100000", "--port", "0"], "--max-seq-len-override: "),
        (["--trace", "/no/such/folder/trace.json", "--port", "0"], "--trace: cannot use '/no/such"),
    ],
)
def test_wrong_flag_is_one_clear_line(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert word in error and error.startswith("minisgl: ") and error.count("\n") == 1


def test_taken_port_is_said_before_a_model_loads(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(checkpoint), "--port", str(port)]) == 1
    assert f"{port}" in capsys.readouterr().err


def run_package(*flags: str, typed: str = "") -> tuple[int, str, str]:
    """Status, output and errors of `python -m minisgl` with what is typed."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = Popen([sys.executable, "-m", "minisgl", *flags], text=True, **pipes)
    said, errors = process.communicate(typed, timeout=600)
    return process.returncode, said, errors


BUSY = """
import multiprocessing, sys, time
from pathlib import Path
from minisgl.runtime.supervisor import exit_with_parent

def child(folder, told):
    exit_with_parent(Path(folder))
    told.set()
    while True:
        time.sleep(0.01)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    told = context.Event()
    context.Process(target=child, args=(sys.argv[1], told)).start()
    told.wait()
    print("busy", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_served_processes_answer_and_leave_nothing(
    live: Live, checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    """All kinds of processes there are, new ones and no forks; two ranks answer as one does."""
    flags = ["--tp", str(ranks), "--device", "cpu", "--num-tokenizer", str(ranks - 1)]
    served = Served(tmp_path, "--model", str(checkpoint), *flags, real=True)
    url = served.ready()
    children = served.children()
    assert len(children) >= 2 * ranks and list(tmp_path.glob("minisgl-*/*"))
    body = {"prompt": "one and two", "max_tokens": 12, "temperature": 0}
    two = httpx.post(f"{url}/completions", json=body, timeout=300).json()
    one = httpx.post(f"{live.url}/v1/completions", json=body, timeout=300).json()
    assert two["choices"] == one["choices"] and two["usage"]["completion_tokens"] == 12
    maps = ["".join(m.path for m in worker.memory_maps()) for worker in served.workers()]
    assert sum("libtorch" in paths for paths in maps) == ranks  # texts are little work
    os.killpg(served.process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    served.ended(children)


@pytest.mark.drill
@pytest.mark.clock
@pytest.mark.parametrize("worker", [0, 2])
def test_killed_worker_ends_every_stream_and_the_server(
    checkpoint: Path, tmp_path: Path, worker: int
) -> None:
    """SIGKILL to the scheduler or to a tokenizer: error events, 503, one line, status 1."""
    served = Served(tmp_path, "--model", str(checkpoint), "--num-tokenizer", "1")
    url = served.ready()
    children = served.children()
    with stream(url, n=16) as response:
        lines = response.iter_lines()
        next(lines)
        killed = time.monotonic()
        served.workers()[worker].kill()
        last = last_event(lines)
    assert "died" in last or last == "data: [DONE]", last
    health = httpx.get(f"{url.removesuffix('/v1')}/health")
    refused = httpx.post(f"{url}/completions", json={"prompt": "x"})
    assert (health.status_code, refused.status_code) == (503, 503)
    assert refused.headers["retry-after"] and "died" in refused.json()["error"]["message"]
    _, errors = served.process.communicate(timeout=100)
    assert time.monotonic() - killed < 50
    assert served.process.returncode == 1
    lines = [line for line in errors.splitlines() if not line.startswith("time=")]
    assert len(lines) == 1 and "died" in lines[0], errors
    served.assert_gone(children)


@pytest.mark.drill
def test_killed_server_leaves_a_trace_and_no_workers(checkpoint: Path, tmp_path: Path) -> None:
    """The trace lacks its end, as viewers allow."""
    file = tmp_path / "trace.json"
    served = Served(tmp_path, "--model", str(checkpoint), "--trace", str(file))
    url = served.ready()
    children = served.children()
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    httpx.post(f"{url}/completions", json=body, timeout=300)
    wait_for(lambda: file.read_text().count('"process"') >= 5, "the report")
    served.process.kill()
    served.process.communicate()
    check_trace(json.loads(file.read_text().rsplit(",\n", 1)[0] + "]"))
    served.assert_gone(children)


def check_trace(events: list[dict[str, Any]]) -> None:
    """All kinds of events of one request; both processes read one clock."""
    names = {event["name"] for event in events}
    assert {"wait", "stream", "text", "launch", "process", "schedule"} <= names
    spans = {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == 2}
    stream, wait = spans["stream"], spans["wait"]
    assert wait["ts"] + wait["dur"] == pytest.approx(stream["ts"], abs=1)
    steps = [e["args"] for e in events if e["name"] in ("launch", "wait", "process")]
    steps = [args for args in steps if "step" in args]
    assert {(args["size"], args["phase"]) for args in steps} == {(1, "prefill"), (1, "decode")}
    assert all(set(e["args"]) == {"step"} for e in events if e["name"] == "schedule")
    launches = [e["ts"] for e in events if e["name"] == "launch"]
    assert wait["ts"] < launches[0] < stream["ts"] < stream["ts"] + stream["dur"]
    assert launches[0] == min(launches) and len(launches) >= 5


@pytest.mark.drill
def test_killed_parent_takes_busy_workers_along(checkpoint: Path, tmp_path: Path) -> None:
    """A scheduler that never waits for messages never asks for its parent; it must leave too."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(sockets)], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"busy\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(child.is_running() for child in children), "workers to leave")
    wait_for(lambda: not sockets.exists(), "the folder to go")


@pytest.mark.drill
def test_leaving_with_a_stream_under_way(checkpoint: Path, tmp_path: Path) -> None:
    """Ctrl-C, and again: the client gets the reason in its stream, and all is cleaned up."""
    served = Served(tmp_path, "--model", str(checkpoint), "--log-format", "none")
    url = served.ready()
    children = served.children()
    with stream(url, n=64) as response:
        lines = response.iter_lines()
        next(lines)
        for wait in (0.3, 0.1, 0.1, 0.1):
            os.killpg(served.process.pid, signal.SIGINT)
            time.sleep(wait)
        assert "the server is shutting down" in last_event(lines)
    assert not served.ended(children)


@pytest.mark.drill
def test_shell_leaves_although_nobody_types(checkpoint: Path, tmp_path: Path) -> None:
    """It answers over a pipe, and a signal ends it while it waits for more."""
    shell = Popen(
        [sys.executable, "-m", "minisgl", "--shell", "--model", str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    assert shell.stdin is not None and shell.stdout is not None
    assert "/help" in shell.stdout.readline()
    shell.stdin.write("hello\n/reset\n")
    shell.stdin.flush()
    while "forgotten" not in (line := shell.stdout.readline()):
        assert line, shell.communicate()[1]
    shell.terminate()
    assert shell.wait(timeout=80) == 128 + signal.SIGTERM
    assert shell.communicate()[1] == "" and not list(tmp_path.glob("minisgl-*"))


def test_unstartable_model_is_one_clear_line(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "broken", tokenizer=True, drop=("model.norm.weight",))
    code, _, errors = run_package("--port", "0", "--model", str(folder))
    assert code == 1
    assert "model.norm.weight" in errors and errors.count("\n") == 1, errors


# Start


@pytest.mark.drill
def test_two_servers_race_for_a_port(checkpoint: Path, tmp_path: Path) -> None:
    """Binding is not listening: the loser must fail before it loads a model, with a message.

    While the winner loads its model it answers, with 503: how often depends on the machine.
    """
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"port: .*{port}"):
            listen("127.0.0.1", port)
    flags = ["--model", str(checkpoint), "--port", str(port)]
    both = [Served(tmp_path, *flags), Served(tmp_path, *flags)]
    seen: list[int] = []

    def look() -> bool:
        try:
            response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=100)
        except httpx.TransportError:
            return False
        seen.append(response.status_code)
        if response.status_code == 503:
            assert response.headers["retry-after"]
            assert "loading" in response.json()["error"]["message"]
            url = f"http://127.0.0.1:{port}/v1/completions"
            seen.append(httpx.post(url, json={"prompt": "x"}, timeout=200).status_code)
        return response.status_code == 200

    wait_for(look, "a server to be ready", 60)
    assert set(seen) <= {200, 503} and seen == sorted(seen, reverse=True)  # never 503 again
    wait_for(lambda: any(s.process.poll() is not None for s in both), "one to give up", 60)
    loser, winner = sorted(both, key=lambda s: s.process.poll() is None)
    errors = loser.process.communicate(timeout=300)[1]
    assert loser.process.returncode == 1
    assert str(port) in errors and errors.count("\n") == 1, errors
    assert str(port) in winner.ready()
    children = winner.children()
    winner.process.terminate()
    assert winner.process.wait(timeout=200) == 0
    winner.assert_gone(children)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


SLOW_LOAD = """
import sys, time
from minisgl.__main__ import main

if __name__ == "__mp_main__":  # a worker
    from minisgl.engine import engine

    engine.load_model = lambda *_: time.sleep(1000)
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.drill
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stop_while_the_model_loads(checkpoint: Path, tmp_path: Path, signum: int) -> None:
    """A signal to the whole group, young workers among them."""
    (script := tmp_path / "slow_load.py").write_text(SLOW_LOAD)
    port = free_port()
    flags = ["--model", str(checkpoint), "--port", str(port), "--log-format", "none"]
    served = Served(tmp_path, *flags, script=script)

    def answers() -> bool:
        assert served.process.poll() is None, served.process.communicate()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=100).status_code == 503
        except httpx.TransportError:
            return False

    wait_for(answers, "the first 503", 60)
    children = served.children()
    os.killpg(served.process.pid, signum)
    assert not served.ended(children)


@pytest.mark.drill
def test_worker_killed_while_it_loads(checkpoint: Path, tmp_path: Path) -> None:
    served = Served(tmp_path, "--model", str(checkpoint), "--log-format", "none")
    wait_for(lambda: len(served.workers()) == 2, "the workers to start", 60)
    children = served.children()
    served.workers()[0].kill()
    _, errors = served.process.communicate(timeout=200)
    assert served.process.returncode == 1 and errors.count("\n") == 1, errors
    assert "ended before it was ready" in errors
    served.assert_gone(children)


# Safety


def test_only_loopback_is_silent(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    assert build_parser().parse_args([]).host == "127.0.0.1"
    for host, loopback in [
        ("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.8.8", True),
        ("0.0.0.0", False), ("::", False), ("192.168.0.7", False), ("example.org", False),
    ]:  # fmt: skip
        assert is_loopback(host) == loopback
        for key in (None, "k"):
            warn_if_open(host, {} if key is None else {"": key})
            warned = "MINISGL_API_KEY" in capsys.readouterr().err
            assert warned == (not loopback and key is None), (host, key)


def test_key_comes_from_the_environment_unless_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every user of the machine can read a command line; the help must not show the key either."""
    monkeypatch.setenv("MINISGL_API_KEY", "from-there")
    for words, key in ([], "from-there"), (["--api-key", "given"], "given"):
        assert config_from(build_parser().parse_args(words)).api_key == key
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    told = capsys.readouterr().out
    assert "MINISGL_API_KEY" in told and "from-there" not in told
    shown = set(re.findall(r"\(default:\s+([^)]*)\)", told))
    assert {"1919", "0", "auto"} <= shown and not {"None", "False"} & shown
    monkeypatch.setenv("MINISGL_API_KEY", "")  # not the same as no key: somebody meant to set one
    with pytest.raises(ValueError, match="api_key"):
        config_from(build_parser().parse_args([]))


def test_a_model_without_a_tokenizer_is_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`LLM` takes token ids for it; clients send text."""
    path = make_checkpoint(tmp_path, "qwen3")
    assert main(["--model", str(path), "--device", "cpu", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--model" in said and "no tokenizer" in said, said


def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    """A full pipe, then a reader: lines are whole and in order, and some at the end are gone."""
    reader, descriptor = os.pipe()
    write = LineWriter(descriptor, most=50)
    line = "x" * 9999
    start = time.monotonic()
    for number in range(100):
        write(f"{number:04} {line}")
    write.close()
    assert time.monotonic() - start < 50
    with open(reader) as file:
        first = [file.readline() for _ in range(40)]
    assert [text[:4] for text in first] == [f"{number:04}" for number in range(40)]
    assert all(text.endswith("x\n") and len(text) == 10_005 for text in first)
    write("nobody reads this")
    while write._thread.is_alive():  # or it writes to whoever opens a file under this number
        write.close()
    os.close(descriptor)


def test_streams_that_are_closed_lead_nowhere() -> None:
    """A service may be started without them; what is opened later must not take their places."""
    code = (
        "import sys; from minisgl.server.cli import open_streams; open_streams();"
        "print(sys.stdin.read()); print(sys.stderr.isatty(), file=sys.stderr);"
        "sys.exit(7 if open(sys.executable).fileno() > 2 else 1)"
    )
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False).returncode == 7


def test_sockets_lie_in_a_private_folder(checkpoint: Path) -> None:
    group = WorkerGroup(ServerConfig(model_path=str(checkpoint)), Watchdog(60, 600), Observed())
    folder = group.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_log_lines_carry_no_text_unless_asked(checkpoint: Path) -> None:
    for prompts in (False, True):
        lines: list[str] = []
        with Live(checkpoint, operations=Operations(log_prompts=prompts)) as live:
            assert live.observers.log is not None
            live.observers.log._write = lines.append
            live.observers.log._spell = as_json
            body = {"prompt": "my secret is hunter2", "max_tokens": 4, "n": 2, "user": "ann"}
            answer = httpx.post(f"{live.url}/v1/completions", json=body).json()
            chat = {"messages": [{"role": "user", "content": "hunter2"}], "max_tokens": 2}
            httpx.post(f"{live.url}/v1/chat/completions", json=chat)
            httpx.post(f"{live.url}/v1/completions", json={"prompt": "hunter2", "top_p": "hunter2"})
            httpx.post(f"{live.url}/v1/completions", content=b'{"hunter2')
            httpx.get(f"{live.url}/health")
            wait_for(lambda found=lines: len(found) == 4, "the lines")  # type: ignore[misc]
        records = [json.loads(line) for line in lines]
        assert [record["status"] for record in records] == [200, 200, 400, 400]
        assert [record.get("code") for record in records[2:]] == ["invalid_value", "invalid_value"]
        assert records[2]["param"] == "top_p" and "code" not in records[0]
        first = records[0]
        assert "cmpl-" + first["id"] == answer["id"] and first["outcome"] == "length"
        assert first["answers"] == 2 and first["tokens"] == 8
        assert first["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert first["ms"] >= first["ttft_ms"] > 0
        assert ("hunter2" in "".join(lines)) == ("answer" in first) == prompts
        assert not any(word in line for line in lines for word in ('"ann"', "user ann", "127.0"))


OBSERVERS = [Metrics, RequestLog, TraceFile]


def full(*_: Any) -> Any:
    raise OSError("No space left on device")


@pytest.mark.parametrize("kind", OBSERVERS, ids=lambda kind: kind.__name__)
def test_an_observer_that_fails_harms_nobody(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, kind: type[Observer]
) -> None:
    """Answers, streams, rejections and aborts are as before; one line names the observer."""
    ours = {cls for cls in Observer.__subclasses__() if cls.__module__.startswith("minisgl")}
    assert ours == set(OBSERVERS)
    trace = "/dev/full" if kind is TraceFile else None
    with Live(checkpoint, operations=Operations(log_format="text", trace=trace)) as live:
        for observer in live.observers.all():
            if isinstance(observer, RequestLog | Metrics) and type(observer) is kind:
                vars(observer).update(_write=full, _clock=full)
        for _ in range(2):
            ask = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            answer = httpx.post(f"{live.url}/v1/completions", json=ask, timeout=200)
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert answer.headers["x-request-id"] in answer.json()["id"]
            with stream(f"{live.url}/v1", max_tokens=4) as response:
                assert last_event(response.iter_lines()) == "data: [DONE]"
            wrong = httpx.post(f"{live.url}/v1/completions", json={**ask, "top_p": 7}, timeout=200)
            assert wrong.status_code == 400
            with stream(f"{live.url}/v1") as response:
                next(response.iter_lines())  # and leave
            live.assert_pages_home()
        assert httpx.get(f"{live.url}/health", timeout=200).status_code == 200
        live.observers.close()
    said = [record for record in caplog.records if "reported once" in record.getMessage()]
    told = [record.getMessage() for record in said]
    assert told[0].startswith(kind.__name__) and "No space left" in told[0], told
    assert len(told) == (2 if trace else 1), told  # a trace has an end to write
    assert not any(record.exc_info for record in said)


def test_the_list_of_routes_is_made_before_the_first_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.2 s of the event loop, and the first 404 shows it."""
    apps: list[Any] = []

    class Served(Lifecycle):
        async def run(self, sock: socket.socket) -> int:
            apps.append(self.server.config.app)
            return 0

    monkeypatch.setattr("minisgl.server.cli.Lifecycle", Served)
    config, operations = ServerConfig(model_path=str(checkpoint)), Operations()
    frontend = SimpleNamespace(notify=None)
    parts: Any = None, frontend, SimpleNamespace(metrics=Metrics()), None
    settings = settings_for(config, checkpoint, operations.request_timeout)
    assert asyncio.run(serve(*parts, config, operations, settings)) == 0
    assert apps[0].openapi_schema is not None


def test_a_scheduler_outlives_what_watches_it(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trace and its reports."""
    stats_of = scheduler_process.stats_of
    with Live(checkpoint) as live:
        ours = live.server.scheduler  # another server may run in this process

        def broken(scheduler: Any) -> Any:
            return full() if scheduler is ours else stats_of(scheduler)

        monkeypatch.setattr(scheduler_process, "stats_of", broken)
        ours.emit = emitter(full)
        for _ in range(2):
            answer = httpx.post(f"{live.url}/generate", json={"prompt": "hi", "max_tokens": 2})
            assert answer.text.endswith("[DONE]\n\n")
    told = [r.getMessage() for r in caplog.records if "reported once" in r.getMessage()]
    assert sorted(line.split()[0] for line in told) == ["Reporter", "full"]


def test_a_line_keeps_answers_apart_and_counts_as_usage_does(checkpoint: Path) -> None:
    lines: list[str] = []
    with Live(checkpoint, operations=Operations(log_prompts=True)) as live:
        assert live.observers.log is not None
        live.observers.log._write = lines.append
        live.observers.log._spell = as_json
        body = {"prompt": ["one fox", "two hens and a cow"], "n": 2, "max_tokens": 6}
        answer = httpx.post(f"{live.url}/v1/completions", json=body).json()
        wait_for(lambda: len(lines) == 1, "the line")
    record = json.loads(lines[0])
    assert record["prompt"] == body["prompt"] and record["answers"] == 4
    assert sorted(record["answer"]) == sorted(choice["text"] for choice in answer["choices"])
    usage = answer["usage"]
    assert record["prompt_tokens"] == usage["prompt_tokens"]
    assert record["tokens"] == usage["completion_tokens"]


def test_the_window_is_no_larger_than_the_cache_that_was_asked_for(checkpoint: Path) -> None:
    config = ServerConfig(model_path=str(checkpoint))
    whole = settings_for(config, checkpoint).max_model_len
    small = replace(config, num_pages=3, page_size=4)
    assert settings_for(small, checkpoint).max_model_len == 12 < whole


def test_lines_for_people_stay_lines() -> None:
    record = {"path": "/a\nstatus=200", "id": "x", "n": 3, "text": 'say "hi"'}
    assert as_text(record) == 'path="/a\\nstatus=200" id=x n=3 text="say \\"hi\\""'
    assert json.loads(as_json(record)) == record


# Stopping


def test_drain_finishes_what_is_under_way(checkpoint: Path, tmp_path: Path) -> None:
    """A whole life: metrics show all events, SIGTERM drains, the log and the trace are whole.

    It goes to the whole group, as systemd sends it.
    """
    file = tmp_path / "trace.json"
    flags = ["--model", str(checkpoint), "--num-pages", "64", "--trace", str(file)]
    served = Served(tmp_path, *flags)
    url = served.ready()
    root, children = url.removesuffix("/v1"), served.children()
    check_metrics(url, root)
    with httpx.Client() as kept, stream(url, n=8) as response:
        lines = response.iter_lines()
        next(lines)
        assert kept.get(f"{url}/models").status_code == 200
        os.killpg(served.process.pid, signal.SIGTERM)
        wait_for(lambda: kept.get(f"{root}/health").status_code == 503, "the drain to begin")
        refused = httpx.post(f"{url}/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert last_event(lines) == "data: [DONE]"
    errors = served.ended(children)
    assert errors.count("path=/v1/completions") == 5 and "outcome=left" in errors
    events = json.loads(file.read_text())
    assert {"wait", "stream", "text", "launch"} <= {event["name"] for event in events}


def check_metrics(url: str, root: str) -> None:
    """Two answers, one stream that is left, and the metrics of a fresh server of 64 pages."""
    body = {"prompt": "hello " * 20, "max_tokens": 5, "ignore_eos": True}
    usages = [
        httpx.post(f"{url}/completions", json=body, timeout=300).json()["usage"] for _ in range(2)
    ]
    with stream(url) as response:
        next(response.iter_lines())
    wait_for(lambda: metric(root, 'requests_total{outcome="left"}') == 1, "the abort")
    wait_for(lambda: metric(root, "running") == 0 and metric(root, "steps_total") > 10, "idleness")
    assert metric(root, 'requests_total{outcome="length"}') == 2
    assert metric(root, "completion_tokens_total") >= 10
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0 and metric(root, "cached_prompt_tokens_total") >= cached
    assert metric(root, "prompt_tokens_total") > cached
    pages = [metric(root, f"{kind}_pages") for kind in ("free", "cached", "used")]
    assert sum(pages) == 64 and pages[2] == 0 and pages[1] > 0
    assert metric(root, "time_to_first_token_seconds_count") == 3
    assert metric(root, "time_per_output_token_seconds_count") >= 2
    assert metric(root, "open_requests") == 0


@pytest.mark.clock
@pytest.mark.parametrize("signals", [1, 2])
def test_drain_has_a_deadline(signals: int) -> None:
    """A drain ends when its time is over, or at once when a signal comes again."""
    told: list[str] = []
    limiter = ConcurrencyLimiter(4)
    server: Any = SimpleNamespace(asked=signals)
    frontend: Any = SimpleNamespace(fail_all=told.append)
    lifecycle = Lifecycle(
        server, Supervisor([]), frontend, limiter,
        drain_timeout={1: 0.3, 2: 600.0}[signals], on_ready=lambda: None,
    )  # fmt: skip

    async def drain() -> float:
        with limiter.acquire(2):  # answers that do not end
            start = time.monotonic()
            await lifecycle._drain()
            return time.monotonic() - start

    took = asyncio.run(drain())
    assert took >= 0.3 if signals == 1 else took < 60
    assert told == ["the server is shutting down"]


def test_a_worker_that_dies_ends_a_drain(capsys: pytest.CaptureFixture[str]) -> None:
    """No stream waits for answers that cannot come; a supervisor sees a failure."""
    told: list[str] = []
    limiter, group = ConcurrencyLimiter(4), Supervisor([])
    group.broken = lambda: WorkerFailed("the scheduler died")  # type: ignore[method-assign]
    server: Any = SimpleNamespace(asked=1)
    frontend: Any = SimpleNamespace(fail_all=told.append)
    lifecycle = Lifecycle(
        server, group, frontend, limiter, drain_timeout=600.0, on_ready=lambda: None
    )
    with limiter.acquire(2):
        asyncio.run(lifecycle._drain())
    assert told == ["the scheduler died; restart the server"] and lifecycle.status == 1
    assert "the scheduler died" in capsys.readouterr().err


def test_what_ends_a_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and not only a worker's failure."""
    done = list[str | int]()
    monkeypatch.setattr(
        "minisgl.server.observe.lifecycle.return_free_memory", lambda: done.append("returned")
    )

    async def serve(sockets: Any) -> None:
        while not server.should_exit:
            await asyncio.sleep(0.01)

    server: Any = SimpleNamespace(
        asked=0, started=True, should_exit=False, serve=serve, handle_exit=None
    )

    def on_ready() -> None:
        raise ZeroDivisionError("a bug")

    nobody: Any = SimpleNamespace(fail_all=lambda why: None)
    lifecycle = Lifecycle(
        server, Supervisor([]), nobody, ConcurrencyLimiter(4), drain_timeout=1.0, on_ready=on_ready
    )
    queue: Any = SimpleNamespace(listen=done.append)  # of connections
    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(lifecycle.run(queue))
    assert done == ["returned", 2048]  # a server of texts: freed memory goes back


# Metrics


def test_metrics_count_retractions(checkpoint: Path) -> None:
    """Answers that outgrow a pool that was promised to more of them than it can hold."""
    with Live(checkpoint, num_pages=12, reserve_tokens=1) as live:
        body = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "n": 4, "temperature": 1}
        assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=600).status_code == 200
        live.assert_pages_home()
        count = live.server.scheduler.retractions
        assert count > 0
        wait_for(lambda: metric(live.url, "retractions_total") == count, "the report")


# Shell


def test_shell_of_a_server_elsewhere(live: Live, tmp_path: Path) -> None:
    typed = "hello\n/stats\nagain\n" + "long " * 300 + "\n/exit\n"
    code, said, errors = run_package("--connect", live.url, typed=typed)
    assert code == 0 and not errors, errors
    assert " tok/s; prompt " in said and "[400: messages: " in said
    live.assert_pages_home()
    nowhere = f"http://127.0.0.1:{free_port()}"
    code, _, errors = run_package("--connect", nowhere, typed="hello\n")
    assert code == 1 and "connect: no server at http://127" in errors, errors


def test_leaving_a_server_elsewhere_aborts(live: Live) -> None:
    async def run() -> None:
        async with ApiClient(live.url) as client:
            async for _ in client.chat("", [{"role": "user", "content": "hello"}]):
                break

    asyncio.run(run())
    live.assert_pages_home()
    assert base_url("host:1/v1") == base_url("http://host:1/") == "http://host:1/v1/"


class Terminal:
    """`python -m minisgl` on a pseudo-terminal."""

    def __init__(self, *flags: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", *flags],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        """Everything that appears up to `text`."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"waited for {text!r}, saw {self.seen[-400:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def look(self, seconds: float) -> None:
        """Read the output for a while: Ctrl-C drops unread output."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.02)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())


@pytest.mark.clock
def test_keys_during_an_answer_and_ctrl_c(live: Live) -> None:
    """Arrow keys leave no trace in the answer; Ctrl-C stops the answer, then drops a line."""
    terminal = Terminal("--connect", live.url)
    terminal.read_until("you> ")
    terminal.type("hello\r")
    frontend = live.server.frontend
    wait_for(lambda: bool(frontend._streams), "the answer to begin", 30)
    terminal.look(0.05)
    terminal.type("\x1b[A\x1b[Bqwerty")
    terminal.look(0.1)
    terminal.type("\x03")
    answer = terminal.read_until("[stopped]")
    assert "^[" not in answer and "qwerty" not in answer
    live.assert_pages_home()
    terminal.read_until("you> ")
    terminal.look(1.0)  # a dumb terminal shows the prompt before it takes keys
    terminal.type("half a line")
    terminal.look(0.5)
    terminal.type("\x03")  # drops the line; at an empty prompt it leaves
    terminal.look(0.5)
    terminal.type("/stats\r")
    terminal.read_until("tok/s")
    terminal.read_until("you> ")
    terminal.look(1.0)
    terminal.type("\x03")
    assert terminal.process.wait(timeout=200) == 0
    os.close(terminal.master)


def test_the_share_of_the_pool_that_is_held() -> None:
    metrics = Metrics()
    metrics.reported(StatsMsg(used_pages=3, cached_pages=1, free_pages=4))
    assert metrics.registry.get_sample_value("minisgl_kv_cache_usage") == 0.375
