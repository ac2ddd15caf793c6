"""Standard error of a server: no write waits for its reader, and no client can flood it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from minisgl.server.http.access import warn_if_open
from minisgl.server.observe.stderr import MOST, SAME, LineLimit
from tests.serving import Served

pytest_plugins = ["tests.random_server"]

PATIENCE = 100.0  # seconds


def test_a_flood_is_cut_and_counted_and_the_next_minute_is_another() -> None:
    lines: list[str] = []
    now = 0.0
    limit = LineLimit(lines.append, lambda: now)
    for _ in range(3):
        for _ in range(SAME + 5):
            limit("Invalid HTTP request received.")
        limit("another line")
        now += 60
    flood, rest = ["Invalid HTTP request received."] * SAME, "repeated or surplus lines dropped"
    assert lines[: SAME + 2] == [*flood, "another line", f"minisgl: stderr: 5 {rest}"]
    assert lines.count(flood[0]) == 3 * SAME and lines.count("another line") == 3
    lines.clear()
    for number in range(MOST // 100):
        limit(f"{number:200}")
    assert 0.9 * MOST < sum(map(len, lines[1:])) <= MOST
    limit.renew()
    assert lines[-1].endswith(rest)
    limit("x" * (MOST // 2))
    assert len(lines[-1]) == MOST // 2  # this minute's characters count anew


SCRIPT = """
import os, subprocess
from minisgl.server.observe.logs import LineWriter
from minisgl.server.observe.stderr import relayed

log = LineWriter(2)
with relayed():
    for number in range(30):
        log("logged")
    os.write(2, b"first\\n")
    subprocess.run(["sh", "-c", "echo of a child >&2"])
    for number in range(100_000):
        os.write(2, b"again\\n")
    print("written", flush=True)
    input()
    os.write(2, b"half a li")
log.close()
os.write(2, b"directly\\n")
"""


def test_no_write_waits_and_what_came_first_is_kept() -> None:
    """Of this process and its children, past a pipe that nobody reads until all is written."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], text=True, **pipes)  # type: ignore[call-overload]
    try:
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            pytest.fail("a write waits for a reader")
        said, errors = process.communicate("\n", timeout=PATIENCE)
    finally:
        process.kill()
    assert said == "written\n" and process.returncode == 0, errors
    lines = errors.splitlines()
    assert lines.count("logged") == 30  # the log has a writer of its own
    others = [line for line in lines if line not in ("logged", "directly")]
    assert others[:-1] == ["first", "of a child", *["again"] * SAME, "half a li"]
    assert others[-1].startswith("minisgl: stderr: 99990 ") and lines[-1] == "directly"


@pytest.mark.drill
def test_malformed_requests_neither_stop_a_server_nor_fill_its_log(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Its stderr is a pipe of 64 KiB that nobody reads until it has ended."""
    served = Served(tmp_path, "--model", str(checkpoint), "--log-format", "none")
    url, count = served.ready(), 2_000
    children = served.children()
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port), PATIENCE) as client:
            client.sendall(b"\x00\xff bad\r\n\r\n")
            assert b" 400 " in client.recv(100)
    body = {"prompt": "hi", "max_tokens": 2}
    httpx.post(f"{url}/completions", json=body, timeout=PATIENCE).raise_for_status()
    served.process.terminate()
    lines = served.ended(children).splitlines()
    assert lines[0].endswith("Invalid HTTP request received.")
    reports = [line for line in lines if line.startswith("minisgl: stderr: ")]
    dropped = sum(int(line.split()[2]) for line in reports)
    assert dropped + len(lines) - len(reports) == count and len(lines) < count / 4


@pytest.mark.parametrize(
    ("host", "keys", "policy", "warned"),
    [
        ("127.0.0.1", 2, "fcfs", True),
        ("127.0.0.1", 1, "fcfs", False),
        ("0.0.0.0", 1, "fcfs", True),
        ("0.0.0.0", 2, "fair", False),
    ],
)
def test_order_of_arrival_is_for_one_client(
    host: str, keys: int, policy: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_if_open(host, {str(number): "key" for number in range(keys)}, policy)
    assert ("--schedule-policy fcfs: one client" in capsys.readouterr().err) == warned
