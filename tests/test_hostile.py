"""No client, and nothing else that can reach a socket, may harm the others."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from minisgl.parallel.gloo import loopback_store
from tests.serving import Served, random_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory)


def listening(pid: int) -> list[str]:
    """Addresses on which a process accepts connections over TCP."""
    found = psutil.Process(pid).net_connections("inet")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]


def test_the_store_of_the_ranks_listens_on_loopback() -> None:
    before = listening(os.getpid())
    store = loopback_store()
    assert sorted(listening(os.getpid())) == sorted([*before, "127.0.0.1"])
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_every_process_listens_on_loopback(checkpoint: Path, tmp_path: Path) -> None:
    """A server of two ranks: HTTP, the store and what connects the ranks."""
    served = Served(tmp_path, "--model", str(checkpoint), "--tp", "2", "--device", "cpu", real=True)
    served.ready()
    children = served.children()
    addresses = [a for p in (served.process.pid, *(c.pid for c in children)) for a in listening(p)]
    assert len(addresses) >= 2 and set(addresses) == {"127.0.0.1"}
    served.process.terminate()
    served.ended(children)
